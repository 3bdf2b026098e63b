//! Throttles limit how often one caller may do something. This process decides immediately, without a store. What it lets pass
//! may then be counted over all servers.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

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

impl ThrottleDecision {
    /// Returns the decision about a call that this process let pass and that was one too many on all servers together.
    #[must_use]
    pub const fn refused_together(self, retry_after: Duration) -> Self {
        let limit_state = LimitState {
            remaining: 0,
            next_after: retry_after,
            reset_after: retry_after,
            ..self.limit_state
        };
        Self { is_allowed: false, limit_state }
    }
}

/// How many requests one address may make: a token bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressLimit {
    /// The name by which the address is counted. Clones share the text.
    pub address: Arc<str>,
    pub per_second: u32,
    /// Requests at once; at least 1.
    pub burst: u32,
}
