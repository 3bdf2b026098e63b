//! Limits a repeated log line to one per second, so that an outage does not write ten thousand of them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Permits one line per second and counts the lines it suppresses.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle {
    started: OnceLock<Instant>,
    next_second: AtomicU64,
    suppressed: AtomicU64,
}

impl LogThrottle {
    #[must_use]
    pub(crate) const fn new() -> Self {
        Self { started: OnceLock::new(), next_second: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// Returns how many lines were suppressed since the last permitted one, or `None` if this one is suppressed too.
    /// The first line is permitted.
    pub(crate) fn permit(&self) -> Option<u64> {
        self.permit_at(self.started.get_or_init(Instant::now).elapsed().as_secs())
    }

    fn permit_at(&self, second: u64) -> Option<u64> {
        let next = self.next_second.load(Ordering::Relaxed);
        let is_permitted = second >= next
            && self
                .next_second
                .compare_exchange(next, second + 1, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if is_permitted {
            Some(self.suppressed.swap(0, Ordering::Relaxed))
        } else {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_second_is_permitted_with_the_number_of_suppressed_ones() {
        let throttle = LogThrottle::new();
        assert_eq!(throttle.permit_at(0), Some(0));
        assert_eq!(throttle.permit_at(0), None);
        assert_eq!(throttle.permit_at(0), None);
        assert_eq!(throttle.permit_at(3), Some(2));
        assert_eq!(throttle.permit_at(3), None);
    }
}
