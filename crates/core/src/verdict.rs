//! What a rule answers. A refusal is an answer, not an error: it says why, and when to come back.

use std::time::Duration;

/// The answer to "may I have one?".
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict<T> {
    /// Yes, and what was granted.
    Allowed(T),
    /// No, and what the caller can do about it.
    Denied(Denial),
}

/// Why there was no room, and when there will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denial {
    /// What was used up.
    pub reason: DenialReason,
    /// The shortest wait after which asking again can succeed.
    pub retry_after: Duration,
}

/// What was used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialReason {
    /// The window's limit is reached.
    QuotaExceeded,
}

impl<T> Verdict<T> {
    /// Whether the answer is yes.
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }
}
