//! Counts the statuses of concurrent responses and checks them.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Counts responses by HTTP status. Callers share it by reference or `Arc`.
#[derive(Debug, Default)]
pub struct StatusCounts {
    by_status: Mutex<BTreeMap<u16, usize>>,
}

impl StatusCounts {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn record(&self, status: u16) {
        *self.by_status.lock().entry(status).or_default() += 1;
    }

    pub fn count(&self, status: u16) -> usize {
        self.by_status.lock().get(&status).copied().unwrap_or_default()
    }

    pub fn total(&self) -> usize {
        self.by_status.lock().values().sum()
    }

    /// Panics with all counts unless there were exactly this many responses with `status`.
    pub fn expect(&self, status: u16, exactly: usize) {
        let found = self.count(status);
        assert!(
            found == exactly,
            "expected {exactly} responses with status {status}, found {found}; by status: {:?}",
            self.by_status.lock()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_from_many_threads() {
        let counts = StatusCounts::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|n| counts.record(if n < 10 { 200 } else { 429 })));
            }
        });
        counts.expect(200, 40);
        counts.expect(429, 360);
        counts.expect(503, 0);
        assert_eq!(counts.total(), 400);
    }

    #[test]
    #[should_panic(expected = "expected 1 responses with status 200, found 2; by status: {200: 2}")]
    fn says_what_it_found_instead() {
        let counts = StatusCounts::new();
        counts.record(200);
        counts.record(200);
        counts.expect(200, 1);
    }
}
