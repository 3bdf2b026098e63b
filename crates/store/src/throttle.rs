//! Throttles limit how often one caller may do something. This process decides immediately, without a store.

use std::fmt::Debug;

use weir_core::tier::LimitState;

pub trait Throttle: Debug + Send + Sync + 'static {
    /// Counts a call of `key` if it is allowed now. Refused calls do not count.
    fn take(&self, key: &str) -> ThrottleDecision;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleDecision {
    pub is_allowed: bool,
    /// The key's state after the call. If the call was refused, the next one is allowed after `next_after`.
    pub limit_state: LimitState,
}
