//! Saying once a second what would otherwise be said ten thousand times.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Lets one event a second through and counts the others.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle {
    started: OnceLock<Instant>,
    next_second: AtomicU64,
    held_back: AtomicU64,
}

impl LogThrottle {
    /// A gate that lets the first event through.
    #[must_use]
    pub(crate) const fn new() -> Self {
        Self { started: OnceLock::new(), next_second: AtomicU64::new(0), held_back: AtomicU64::new(0) }
    }

    /// Whether to speak now, and how many events were held back since the last time.
    pub(crate) fn permit(&self) -> Option<u64> {
        self.speak_at(self.started.get_or_init(Instant::now).elapsed().as_secs())
    }

    fn speak_at(&self, second: u64) -> Option<u64> {
        let due = self.next_second.load(Ordering::Relaxed);
        let won = second >= due
            && self
                .next_second
                .compare_exchange(due, second + 1, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if won {
            Some(self.held_back.swap(0, Ordering::Relaxed))
        } else {
            self.held_back.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_a_second_speaks_and_tells_of_the_others() {
        let quiet = LogThrottle::new();
        assert_eq!(quiet.speak_at(0), Some(0));
        assert_eq!(quiet.speak_at(0), None);
        assert_eq!(quiet.speak_at(0), None);
        assert_eq!(quiet.speak_at(3), Some(2));
        assert_eq!(quiet.speak_at(3), None);
    }
}
