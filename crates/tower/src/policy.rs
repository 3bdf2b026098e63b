//! Policies: named limits.

use std::time::Duration;

use weir_core::tier::{FixedWindow, Limit, LimitError, SlidingWindow, TokenBucket};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub(crate) name: String,
    pub(crate) limit: Limit,
    pub(crate) is_shadow: bool,
}

/// Why a policy is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// The name cannot be sent in a header.
    #[error("the name of a policy must be 1 to 64 letters, digits, '-', '_' or '.'")]
    Name,
    #[error("an amount or a duration {0}")]
    Limit(#[from] LimitError),
}

impl Policy {
    /// Allows `capacity` requests at once, refilled continuously by `refill` per `period`.
    pub fn token_bucket(
        name: &str,
        capacity: u32,
        refill: u32,
        period: Duration,
    ) -> Result<Self, PolicyError> {
        Self::new(name, Limit::TokenBucket(TokenBucket::new(capacity, refill, period)?))
    }

    /// Allows `limit` requests from the first one until the window ends.
    pub fn fixed_window(name: &str, limit: u32, window: Duration) -> Result<Self, PolicyError> {
        Self::new(name, Limit::FixedWindow(FixedWindow::new(limit, window)?))
    }

    /// Allows `limit` requests within the last `window` at any time.
    pub fn sliding_window(name: &str, limit: u32, window: Duration) -> Result<Self, PolicyError> {
        Self::new(name, Limit::SlidingWindow(SlidingWindow::new(limit, window)?))
    }

    fn new(name: &str, limit: Limit) -> Result<Self, PolicyError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
            return Err(PolicyError::Name);
        }
        Ok(Self { name: name.to_owned(), limit, is_shadow: false })
    }

    /// Makes the policy only observe: headers show the limit, and no request is denied.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// The quota of a window and its length.
    pub(crate) fn quota(&self) -> (u32, Duration) {
        match &self.limit {
            Limit::TokenBucket(bucket) => (bucket.refill(), bucket.period()),
            Limit::FixedWindow(window) => (window.limit(), window.window()),
            Limit::SlidingWindow(window) => (window.limit(), window.window()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_names_and_limits_are_refused() {
        let minute = Duration::from_secs(60);
        for name in ["", "a b", "a\"b", "ä", &"x".repeat(65)] {
            assert_eq!(Policy::fixed_window(name, 1, minute), Err(PolicyError::Name), "{name}");
        }
        assert!(matches!(Policy::fixed_window("a", 0, minute), Err(PolicyError::Limit(_))));
        assert!(matches!(Policy::token_bucket("a", 1, 1, Duration::ZERO), Err(PolicyError::Limit(_))));
        assert!(Policy::sliding_window("a-b_c.1", 1, minute).is_ok());
    }
}
