//! Throttles: how often one caller may do something, decided at once by this process alone.

use std::fmt::Debug;

use weir_core::tier::LimitState;

/// Limits how often each key may do something.
pub trait Throttle: Debug + Send + Sync + 'static {
    /// Counts one call of `key` if it may be made now. Refused calls do not count.
    fn take(&self, key: &str) -> ThrottleDecision;
}

/// What a [`Throttle`] has decided about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleDecision {
    /// Whether the call may be made.
    pub is_allowed: bool,
    /// Where the key stands after it. When the call is refused, the next one may be made after `next_after`.
    pub limit_state: LimitState,
}
