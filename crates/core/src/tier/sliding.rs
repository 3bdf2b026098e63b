//! The sliding window in its two-counter form: what was spent in this window, and the share of what was spent in the last
//! one that the window behind `now` still covers, as if it had been spent evenly.
//!
//! Windows are cut at multiples of their length since the epoch. The share is never rounded: everything is compared after
//! multiplying by the length.
//!
//! **Bound.** No window of the cut has more than the limit L. A span of one length across a cut can have more when the
//! earlier window was spent at its very end: L − 1 more at worst, 2L − 1 in all. An exact log would have no such error and
//! would cost memory for every single thing spent.

use std::time::Duration;

use super::limit::{LimitError, checked_amount, checked_period_us};
use super::rule::{LimitDenial, LimitState, Rule};
use crate::Timestamp;

/// How much may be spent in how long a window behind any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindow {
    limit: u32,
    window_us: u64,
}

/// What was spent in the window of the cut that begins at `start`, and in the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindowCounts {
    /// When the present window began.
    pub start: Timestamp,
    /// What was spent in it; more than the limit when there are debts.
    pub current: u32,
    /// What was spent in the one before.
    pub previous: u32,
}

impl SlidingWindow {
    /// A window of such a length.
    /// Fails when a number is out of range.
    pub fn new(limit: u32, window: Duration) -> Result<Self, LimitError> {
        Ok(Self { limit: checked_amount(limit)?, window_us: checked_period_us(window)? })
    }

    /// What may be spent in a window.
    #[must_use]
    pub const fn limit(&self) -> u32 {
        self.limit
    }

    /// The length of the window.
    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// Where a key stands.
    #[must_use]
    pub fn limit_state(&self, counts: &SlidingWindowCounts, now: Timestamp) -> LimitState {
        let remaining = self.limit.saturating_sub(self.spent_units(counts, now));
        let next = remaining.saturating_add(1);
        let counts = self.turned(*counts, now);
        LimitState {
            limit: self.limit,
            remaining,
            next_after: if next > self.limit {
                Duration::ZERO
            } else {
                self.room_at(&counts, next, now).since(now)
            },
            reset_after: self.forgotten_at(&counts).since(now),
        }
    }

    /// What counts at `now`, rounded up.
    #[must_use]
    pub fn spent_units(&self, counts: &SlidingWindowCounts, now: Timestamp) -> u32 {
        let spent = self.weighted(&self.turned(*counts, now), now).div_ceil(self.window_wide());
        u32::try_from(spent).unwrap_or(u32::MAX)
    }

    /// The beginning of the window that a moment is in.
    fn cut(&self, at: Timestamp) -> Timestamp {
        let into = at.as_micros().checked_rem_euclid(self.window_us.cast_signed()).unwrap_or(0);
        Timestamp::from_micros(at.as_micros().saturating_sub(into))
    }

    /// The counts as of `now`. A clock that steps back stays in the window it was in.
    fn turned(&self, counts: SlidingWindowCounts, now: Timestamp) -> SlidingWindowCounts {
        let start = self.cut(now);
        if start <= counts.start {
            return counts;
        }
        let previous = if start == self.later(counts.start, 1) { counts.current } else { 0 };
        SlidingWindowCounts { start, current: 0, previous }
    }

    /// What counts at `now`, times the length of the window.
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

    fn later(&self, start: Timestamp, windows: u32) -> Timestamp {
        start.plus(self.window().saturating_mul(windows))
    }

    /// The first moment, not before `now`, at which `cost` fits. It must not be above the limit.
    fn room_at(&self, counts: &SlidingWindowCounts, cost: u32, now: Timestamp) -> Timestamp {
        let others = self.limit.saturating_sub(cost);
        let at = match others.checked_sub(counts.current) {
            Some(share) => self.faded_at(counts.start, counts.previous, share),
            // This window alone has too much: the next one must have gone on until little enough of it counts.
            None => self.faded_at(self.later(counts.start, 1), counts.current, others),
        };
        at.max(now)
    }

    /// When, in the window that begins at `start`, what was spent in the one before it counts for `share` or less.
    fn faded_at(&self, start: Timestamp, previous: u32, share: u32) -> Timestamp {
        let covered = self.weight(share).checked_div(u128::from(previous)).unwrap_or(u128::MAX);
        let into = self.window_wide().saturating_sub(covered);
        start.plus(Duration::from_micros(u64::try_from(into).unwrap_or(u64::MAX)))
    }

    /// When nothing counts any more.
    fn forgotten_at(&self, counts: &SlidingWindowCounts) -> Timestamp {
        match (counts.current, counts.previous) {
            (0, 0) => Timestamp::from_micros(i64::MIN),
            (0, _) => self.later(counts.start, 1),
            _ => self.later(counts.start, 2),
        }
    }
}

impl Rule for SlidingWindow {
    type Usage = SlidingWindowCounts;

    fn unspent(&self) -> SlidingWindowCounts {
        SlidingWindowCounts { start: Timestamp::from_micros(i64::MIN), current: 0, previous: 0 }
    }

    fn is_unspent(&self, counts: &SlidingWindowCounts, now: Timestamp) -> bool {
        self.forgotten_at(counts) <= now
    }

    fn has_room(&self, counts: &SlidingWindowCounts, cost: u32, now: Timestamp) -> bool {
        let spent = self.weighted(&self.turned(*counts, now), now);
        cost == 0 || spent.saturating_add(self.weight(cost)) <= self.weight(self.limit)
    }

    fn charge(&self, counts: &mut SlidingWindowCounts, cost: u32, now: Timestamp) {
        *counts = self.turned(*counts, now);
        counts.current = counts.current.saturating_add(cost);
    }

    /// Given back to the window it was taken in; when that is not known, to this one first and then to the last.
    fn give_back(
        &self,
        counts: &mut SlidingWindowCounts,
        cost: u32,
        taken_at: Option<Timestamp>,
        now: Timestamp,
    ) {
        let mut turned = self.turned(*counts, now);
        let from_current = match taken_at {
            Some(taken) if taken < turned.start => 0,
            _ => cost.min(turned.current),
        };
        let from_previous = match taken_at {
            Some(taken) if taken >= turned.start || self.later(taken, 1) < turned.start => 0,
            _ => cost.saturating_sub(from_current),
        };
        turned.current = turned.current.saturating_sub(from_current);
        turned.previous = turned.previous.saturating_sub(from_previous);
        *counts = turned;
    }

    fn denial(&self, counts: &SlidingWindowCounts, cost: u32, now: Timestamp) -> LimitDenial {
        let counts = self.turned(*counts, now);
        LimitDenial::single((cost <= self.limit).then(|| self.room_at(&counts, cost, now).since(now)))
    }

    /// Another length is another cut: what counts at `now` then counts as spent at `now`.
    fn carry_over(&self, old: &Self, counts: SlidingWindowCounts, now: Timestamp) -> SlidingWindowCounts {
        if self.window_us == old.window_us {
            return counts;
        }
        let mut adopted = self.unspent();
        self.charge(&mut adopted, old.spent_units(&counts, now), now);
        adopted
    }

    /// Windows stay cut where they are, so what was spent may move by up to one window more.
    fn move_back(&self, counts: &mut SlidingWindowCounts, by: Duration) {
        counts.start = self.cut(counts.start.minus(by));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Decision;
    use super::*;

    const WINDOW_US: i64 = 60_000_000;
    const CUT_US: i64 = 28_000_000 * WINDOW_US;

    /// Microseconds into a window of the cut.
    fn at(micros: i64) -> Timestamp {
        Timestamp::from_micros(CUT_US.saturating_add(micros))
    }

    fn window(limit: u32) -> SlidingWindow {
        SlidingWindow::new(limit, Duration::from_secs(60)).unwrap()
    }

    #[test]
    fn the_last_window_fades_as_this_one_goes_on() {
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
    fn a_span_across_the_cut_has_less_than_twice_the_limit() {
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
    fn what_was_taken_in_a_known_window_is_given_back_there() {
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
    fn another_length_starts_with_what_counts() {
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
