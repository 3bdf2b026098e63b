//! What callers may spend.

use std::time::Duration;

use weir_core::tier::{FixedWindow, Limit, LimitError, SlidingWindow, TokenBucket};

/// A limit with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    pub(crate) name: String,
    pub(crate) limit: Limit,
    pub(crate) is_shadow: bool,
}

/// What a policy cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// A name that no header can hold.
    #[error("the name of a policy must be 1 to 64 letters, digits, '-', '_' or '.'")]
    Name,
    /// A number out of range.
    #[error("an amount or a span {0}")]
    Limit(#[from] LimitError),
}

impl Policy {
    /// `capacity` at once, and `refill` more in each `period`, which come back all the time.
    /// Fails when the name or a number cannot be.
    pub fn token_bucket(
        name: &str,
        capacity: u32,
        refill: u32,
        period: Duration,
    ) -> Result<Self, PolicyError> {
        Self::new(name, Limit::TokenBucket(TokenBucket::new(capacity, refill, period)?))
    }

    /// `limit` from the first call until the window ends.
    /// Fails when the name or a number cannot be.
    pub fn fixed_window(name: &str, limit: u32, window: Duration) -> Result<Self, PolicyError> {
        Self::new(name, Limit::FixedWindow(FixedWindow::new(limit, window)?))
    }

    /// `limit` in the window behind any moment.
    /// Fails when the name or a number cannot be.
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

    /// The same, but it only observes: headers say what would be, and nobody is denied.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// What is gained in a window, and how long that is.
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
    fn what_cannot_be_is_refused() {
        let minute = Duration::from_secs(60);
        for name in ["", "a b", "a\"b", "ä", &"x".repeat(65)] {
            assert_eq!(Policy::fixed_window(name, 1, minute), Err(PolicyError::Name), "{name}");
        }
        assert!(matches!(Policy::fixed_window("a", 0, minute), Err(PolicyError::Limit(_))));
        assert!(matches!(Policy::token_bucket("a", 1, 1, Duration::ZERO), Err(PolicyError::Limit(_))));
        assert!(Policy::sliding_window("a-b_c.1", 1, minute).is_ok());
    }
}
