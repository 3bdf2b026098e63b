//! How many rows one statement of a purge deletes.

use std::time::Duration;

/// The number of rows that one statement of a purge deletes: adapted so that rows are not locked for long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PurgeSize(usize);

impl PurgeSize {
    pub(crate) const FIRST: Self = Self(100);
    const MIN: usize = 10;
    const MAX: usize = 1_000;
    const QUICK: Duration = Duration::from_millis(10);
    const SLOW: Duration = Duration::from_millis(30);

    pub(crate) fn rows(&self) -> usize {
        self.0
    }

    /// Returns the size of the next statement after one that took `elapsed`.
    pub(crate) fn after(&self, elapsed: Duration) -> Self {
        Self(match self.0 {
            rows if elapsed < Self::QUICK => (rows * 2).min(Self::MAX),
            rows if elapsed > Self::SLOW => (rows / 2).max(Self::MIN),
            rows => rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_purge_deletes_as_many_rows_at_once_as_it_can_in_a_short_time() {
        let quick = (0..10).fold(PurgeSize::FIRST, |size, _| size.after(Duration::from_millis(1)));
        assert_eq!(quick, PurgeSize(PurgeSize::MAX));
        let slow = (0..10).fold(quick, |size, _| size.after(Duration::from_millis(500)));
        assert_eq!(slow, PurgeSize(PurgeSize::MIN));
        assert_eq!(PurgeSize::FIRST.after(Duration::from_millis(20)), PurgeSize::FIRST);
    }
}
