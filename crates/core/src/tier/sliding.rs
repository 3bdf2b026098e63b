//! The sliding window with two counters: what was spent in the current window, plus the share of the previous window
//! that the sliding window still covers, as if it had been spent evenly.
//!
//! Windows are aligned to multiples of their length since the epoch. The share is never rounded: values are multiplied
//! by the length before they are compared.
//!
//! **Bound.** No aligned window exceeds the limit L. A span of one length across a boundary can exceed it if the
//! earlier window was spent at its very end: by L − 1 at worst, 2L − 1 in all. An exact log would have no such error,
//! but would need memory for every unit spent.

use std::time::Duration;

use super::limit::{LimitError, checked_amount, checked_period_us};
use super::rule::{LimitDenial, LimitState, Rule};
use crate::Timestamp;

/// The amount that may be spent in a window that ends at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindow {
    limit: u32,
    window_us: u64,
}

/// What was spent in the aligned window that starts at `start`, and in the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindowCounts {
    /// When the current window started.
    pub start: Timestamp,
    /// What was spent in the current window; more than the limit if there are debts.
    pub current: u32,
    /// What was spent in the previous window.
    pub previous: u32,
}

impl SlidingWindow {
    pub fn new(limit: u32, window: Duration) -> Result<Self, LimitError> {
        Ok(Self { limit: checked_amount(limit)?, window_us: checked_period_us(window)? })
    }

    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// Returns the state of a key for headers and responses.
    #[must_use]
    pub fn limit_state(&self, counts: &SlidingWindowCounts, now: Timestamp) -> LimitState {
        let remaining = self.limit.saturating_sub(self.spent_units(counts, now));
        let next = remaining.saturating_add(1);
        let counts = self.at_time(*counts, now);
        LimitState {
            limit: self.limit,
            remaining,
            next_after: if next > self.limit {
                Duration::ZERO
            } else {
                self.room_at(&counts, next, now).since(now)
            },
            reset_after: self.unspent_at(&counts).since(now),
        }
    }

    /// Returns what counts at `now`, rounded up.
    #[must_use]
    pub fn spent_units(&self, counts: &SlidingWindowCounts, now: Timestamp) -> u32 {
        let spent = self.weighted(&self.at_time(*counts, now), now).div_ceil(self.window_wide());
        u32::try_from(spent).unwrap_or(u32::MAX)
    }

    /// Returns the start of the aligned window that contains `at`.
    fn window_start(&self, at: Timestamp) -> Timestamp {
        let into = at.as_micros().checked_rem_euclid(self.window_us.cast_signed()).unwrap_or(0);
        Timestamp::from_micros(at.as_micros().saturating_sub(into))
    }

    /// Returns the counts as of `now`. If the clock has stepped back, the window stays the same.
    fn at_time(&self, counts: SlidingWindowCounts, now: Timestamp) -> SlidingWindowCounts {
        let start = self.window_start(now);
        if start <= counts.start {
            return counts;
        }
        let previous = if start == self.window_after(counts.start, 1) { counts.current } else { 0 };
        SlidingWindowCounts { start, current: 0, previous }
    }

    /// Returns what counts at `now`, multiplied by the window length.
    fn weighted(&self, counts: &SlidingWindowCounts, now: Timestamp) -> u128 {
        let into = now.since(counts.start).as_micros();
        let share = u128::from(counts.previous).saturating_mul(self.window_wide().saturating_sub(into));
        share.saturating_add(self.weight(counts.current))
    }

    fn weight(&self, units: u32) -> u128 {
        u128::from(units).saturating_mul(self.window_wide())
    }

    fn window_wide(&self) -> u128 {
        u128::from(self.window_us.max(1))
    }

    fn window_after(&self, start: Timestamp, windows: u32) -> Timestamp {
        start.plus(self.window().saturating_mul(windows))
    }

    /// Returns the first moment, not before `now`, at which `cost` fits. `cost` must not exceed the limit.
    fn room_at(&self, counts: &SlidingWindowCounts, cost: u32, now: Timestamp) -> Timestamp {
        let others = self.limit.saturating_sub(cost);
        let at = match others.checked_sub(counts.current) {
            Some(share) => self.decayed_at(counts.start, counts.previous, share),
            // The current window alone has too much: wait until little enough of it counts in the next one.
            None => self.decayed_at(self.window_after(counts.start, 1), counts.current, others),
        };
        at.max(now)
    }

    /// Returns when, in the window that starts at `start`, the previous window's count weighs `share` or less.
    fn decayed_at(&self, start: Timestamp, previous: u32, share: u32) -> Timestamp {
        let covered = self.weight(share).checked_div(u128::from(previous)).unwrap_or(u128::MAX);
        let offset = self.window_wide().saturating_sub(covered);
        start.plus(Duration::from_micros(u64::try_from(offset).unwrap_or(u64::MAX)))
    }

    /// Returns when nothing counts any more.
    fn unspent_at(&self, counts: &SlidingWindowCounts) -> Timestamp {
        match (counts.current, counts.previous) {
            (0, 0) => Timestamp::from_micros(i64::MIN),
            (0, _) => self.window_after(counts.start, 1),
            _ => self.window_after(counts.start, 2),
        }
    }
}

impl Rule for SlidingWindow {
    type Usage = SlidingWindowCounts;

    fn unspent(&self) -> SlidingWindowCounts {
        SlidingWindowCounts { start: Timestamp::from_micros(i64::MIN), current: 0, previous: 0 }
    }

    fn is_unspent(&self, counts: &SlidingWindowCounts, now: Timestamp) -> bool {
        self.unspent_at(counts) <= now
    }

    fn has_room(&self, counts: &SlidingWindowCounts, cost: u32, now: Timestamp) -> bool {
        let spent = self.weighted(&self.at_time(*counts, now), now);
        cost == 0 || spent.saturating_add(self.weight(cost)) <= self.weight(self.limit)
    }

    fn charge(&self, counts: &mut SlidingWindowCounts, cost: u32, now: Timestamp) {
        *counts = self.at_time(*counts, now);
        counts.current = counts.current.saturating_add(cost);
    }

    /// Gives back to the window in which it was spent; if that is unknown, to the current one first and then to the
    /// previous one.
    fn give_back(
        &self,
        counts: &mut SlidingWindowCounts,
        cost: u32,
        taken_at: Option<Timestamp>,
        now: Timestamp,
    ) {
        let mut counts_now = self.at_time(*counts, now);
        let from_current = match taken_at {
            Some(taken) if taken < counts_now.start => 0,
            _ => cost.min(counts_now.current),
        };
        let from_previous = match taken_at {
            Some(taken) if taken >= counts_now.start || self.window_after(taken, 1) < counts_now.start => 0,
            _ => cost.saturating_sub(from_current),
        };
        counts_now.current = counts_now.current.saturating_sub(from_current);
        counts_now.previous = counts_now.previous.saturating_sub(from_previous);
        *counts = counts_now;
    }

    fn denial(&self, counts: &SlidingWindowCounts, cost: u32, now: Timestamp) -> LimitDenial {
        let counts = self.at_time(*counts, now);
        LimitDenial::single((cost <= self.limit).then(|| self.room_at(&counts, cost, now).since(now)))
    }

    /// Another length has other boundaries: what counts at `now` then counts as spent at `now`.
    fn carry_over(&self, old: &Self, counts: SlidingWindowCounts, now: Timestamp) -> SlidingWindowCounts {
        if self.window_us == old.window_us {
            return counts;
        }
        let mut adopted = self.unspent();
        self.charge(&mut adopted, old.spent_units(&counts, now), now);
        adopted
    }

    /// Windows stay aligned, so usage may move back by up to one window more.
    fn move_back(&self, counts: &mut SlidingWindowCounts, by: Duration) {
        counts.start = self.window_start(counts.start.minus(by));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Decision;
    use super::*;

    const WINDOW_US: i64 = 60_000_000;
    const BOUNDARY_US: i64 = 28_000_000 * WINDOW_US;

    /// Returns a time `micros` after a window boundary.
    fn at(micros: i64) -> Timestamp {
        Timestamp::from_micros(BOUNDARY_US.saturating_add(micros))
    }

    fn window(limit: u32) -> SlidingWindow {
        SlidingWindow::new(limit, Duration::from_secs(60)).unwrap()
    }

    #[test]
    fn the_previous_window_counts_less_as_time_passes() {
        let rule = window(10);
        let mut counts = rule.unspent();
        assert!(rule.take(&mut counts, 10, at(30_000_000)).is_allowed());
        assert_eq!(rule.limit_state(&counts, at(WINDOW_US)).remaining, 0);
        assert_eq!(rule.limit_state(&counts, at(WINDOW_US + 6_000_000)).remaining, 1);
        assert_eq!(rule.limit_state(&counts, at(WINDOW_US + 33_000_000)).remaining, 5);
        assert_eq!(rule.limit_state(&counts, at(2 * WINDOW_US)).remaining, 10);
    }

    #[test]
    fn waits_reach_into_the_next_window_and_to_its_end() {
        let rule = window(10);
        let mut counts = rule.unspent();
        rule.charge(&mut counts, 10, at(0));
        let wait = |cost| rule.denial(&counts, cost, at(10_000_000)).retry_after;
        assert_eq!(wait(1), Some(Duration::from_secs(56)), "a tenth of the next window must have passed");
        assert_eq!(wait(10), Some(Duration::from_secs(110)), "all of it must have");
        assert_eq!(wait(11), None);
    }

    #[test]
    fn a_span_across_a_boundary_has_less_than_twice_the_limit() {
        let rule = window(4);
        let mut counts = rule.unspent();
        assert!(rule.take(&mut counts, 4, at(WINDOW_US - 1)).is_allowed());
        let mut passed = 4;
        for micros in (WINDOW_US..2 * WINDOW_US - 1).step_by(99_999) {
            passed += u32::from(rule.take(&mut counts, 1, at(micros)).is_allowed());
        }
        assert_eq!(passed, 7);
    }

    #[test]
    fn units_are_given_back_to_the_window_they_were_spent_in() {
        let rule = window(10);
        let mut counts = rule.unspent();
        rule.charge(&mut counts, 6, at(0));
        rule.charge(&mut counts, 3, at(WINDOW_US));
        let after = |taken_at, now| {
            let mut counts = counts;
            rule.give_back(&mut counts, 4, taken_at, at(now));
            (counts.current, counts.previous)
        };
        assert_eq!(after(Some(at(5)), WINDOW_US + 5), (3, 2));
        assert_eq!(after(Some(at(WINDOW_US)), WINDOW_US + 5), (0, 6));
        assert_eq!(after(Some(at(-1)), WINDOW_US + 5), (3, 6));
        assert_eq!(after(None, WINDOW_US + 5), (0, 5));
    }

    #[test]
    fn a_window_of_another_length_starts_with_what_counts() {
        let (old, new) = (window(10), SlidingWindow::new(10, Duration::from_secs(7)).unwrap());
        let mut counts = old.unspent();
        old.charge(&mut counts, 9, at(0));
        // Half of nine still counts, which is five.
        let adopted = new.carry_over(&old, counts, at(WINDOW_US + WINDOW_US / 2));
        assert_eq!(new.limit_state(&adopted, at(WINDOW_US + WINDOW_US / 2)).remaining, 5);
    }

    #[test]
    fn a_clock_that_steps_back_gives_nothing() {
        let rule = window(1);
        let mut counts = rule.unspent();
        assert!(rule.take(&mut counts, 1, at(0)).is_allowed());
        assert!(matches!(rule.take(&mut counts, 1, Timestamp::EPOCH), Decision::Denied(_)));
    }
}
