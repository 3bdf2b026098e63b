//! When each request of an open loop is due, whatever the server does with the ones before it.
//!
//! Connections draw tickets from one counter, so a slow answer holds back its own connection only. Latency counts
//! from the due time: a request that waited for a free connection has waited, and the histogram says so.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NANOS_PER_S: u128 = 1_000_000_000;

/// Evenly spaced requests.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    rate_per_s: NonZeroU32,
}

impl Schedule {
    pub(super) fn new(rate_per_s: NonZeroU32) -> Self {
        Self { rate_per_s }
    }

    /// How long after the start request `ticket` is due.
    pub(super) fn due(self, ticket: u64) -> Duration {
        let nanos = u128::from(ticket) * NANOS_PER_S / u128::from(self.rate_per_s.get());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// How many requests are due before `elapsed`: the first ticket that is not.
    pub(super) fn due_before(self, elapsed: Duration) -> u64 {
        let tickets = (elapsed.as_nanos() * u128::from(self.rate_per_s.get())).div_ceil(NANOS_PER_S);
        u64::try_from(tickets).unwrap_or(u64::MAX)
    }
}

/// The tickets of one run, shared by its connections.
#[derive(Debug)]
pub(super) struct Tickets {
    schedule: Schedule,
    start: Instant,
    next: AtomicU64,
}

impl Tickets {
    pub(super) fn new(schedule: Schedule, start: Instant) -> Self {
        Self { schedule, start, next: AtomicU64::new(0) }
    }

    /// Takes the next ticket: when its request is due.
    pub(super) fn take(&self) -> Instant {
        self.start + self.schedule.due(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Requests due between `from` and `end` (both since the start) that no connection took.
    pub(super) fn unsent(&self, from: Duration, end: Duration) -> u64 {
        let taken = self.next.load(Ordering::Relaxed).max(self.schedule.due_before(from));
        self.schedule.due_before(end).saturating_sub(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(rate_per_s: u32) -> Schedule {
        Schedule::new(NonZeroU32::new(rate_per_s).unwrap())
    }

    #[test]
    fn requests_are_evenly_spaced_without_drift() {
        let schedule = schedule(3);
        assert_eq!(schedule.due(0), Duration::ZERO);
        assert_eq!(schedule.due(1), Duration::from_nanos(333_333_333));
        assert_eq!(schedule.due(3_000_000), Duration::from_secs(1_000_000));
    }

    #[test]
    fn the_count_before_a_time_agrees_with_the_due_times() {
        for rate in [1, 3, 7, 1000, 999_983, u32::MAX] {
            let schedule = schedule(rate);
            for elapsed_ms in [0, 1, 10, 333, 1000, 12_345] {
                let elapsed = Duration::from_millis(elapsed_ms);
                let count = schedule.due_before(elapsed);
                assert!(schedule.due(count) >= elapsed, "{rate}/s, {elapsed_ms} ms");
                assert!(count == 0 || schedule.due(count - 1) < elapsed, "{rate}/s, {elapsed_ms} ms");
            }
        }
    }

    #[test]
    fn every_ticket_is_handed_out_once_and_in_order() {
        let start = Instant::now();
        let tickets = Tickets::new(schedule(1000), start);
        let due: Vec<Duration> = (0..4).map(|_| tickets.take() - start).collect();
        assert_eq!(due, [0, 1, 2, 3].map(Duration::from_millis));
    }

    #[test]
    fn requests_that_no_task_took_are_unsent() {
        let (from, end) = (Duration::from_secs(1), Duration::from_secs(3));
        let tickets = Tickets::new(schedule(10), Instant::now());
        let take = |count: u32| (0..count).map(|_| tickets.take()).last();
        assert_eq!(tickets.unsent(from, end), 20, "the warm-up does not count");
        take(25);
        assert_eq!(tickets.unsent(from, end), 5);
        take(25);
        assert_eq!(tickets.unsent(from, end), 0);
    }
}
