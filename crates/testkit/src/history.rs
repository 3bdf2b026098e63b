//! Checks on what a run of concurrent requests was answered.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// Counts answers by HTTP status; share it by reference or `Arc` among the senders.
#[derive(Debug, Default)]
pub struct Tally {
    by_status: Mutex<BTreeMap<u16, usize>>,
}

impl Tally {
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

    /// Panics with the whole tally unless `status` was answered `exactly` so many times.
    pub fn expect(&self, status: u16, exactly: usize) {
        let found = self.count(status);
        assert!(
            found == exactly,
            "expected {exactly} answers with status {status}, found {found}; by status: {:?}",
            self.by_status.lock()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_from_many_threads() {
        let tally = Tally::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|n| tally.record(if n < 10 { 200 } else { 429 })));
            }
        });
        tally.expect(200, 40);
        tally.expect(429, 360);
        tally.expect(503, 0);
        assert_eq!(tally.total(), 400);
    }

    #[test]
    #[should_panic(expected = "expected 1 answers with status 200, found 2; by status: {200: 2}")]
    fn says_what_it_found_instead() {
        let tally = Tally::new();
        tally.record(200);
        tally.record(200);
        tally.expect(200, 1);
    }
}
