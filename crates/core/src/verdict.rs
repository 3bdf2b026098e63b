//! The outcome of a rule. A denial is a regular outcome, not an error: it says why, and when to try again.

use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict<T> {
    Allowed(T),
    Denied(Denial),
}

/// Why a command was denied, and when it can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denial {
    pub reason: DenialReason,
    /// The shortest wait after which a retry can succeed.
    pub retry_after: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialReason {
    QuotaExceeded,
}

impl<T> Verdict<T> {
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }
}
