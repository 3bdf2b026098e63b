//! The fixed window, which starts with the first use after the previous one ended.
//!
//! Windows refresh like those of quota, for any length and any cost. Twice the limit can be spent in a short time
//! around the end of a window; a sliding window or a token bucket avoids that.

use std::time::Duration;

use super::limit::{LimitError, checked_amount, checked_period_us};
use super::rule::{LimitDenial, LimitState, Rule};
use crate::Timestamp;

/// The amount that may be spent per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FixedWindow {
    limit: u32,
    window_us: u64,
}

/// What was spent in the window that started at `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FixedWindowCount {
    pub start: Timestamp,
    /// What was spent; more than the limit if there are debts.
    pub spent: u32,
}

impl FixedWindow {
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
    pub fn limit_state(&self, count: &FixedWindowCount, now: Timestamp) -> LimitState {
        let reset_after =
            if self.is_unspent(count, now) { Duration::ZERO } else { self.end(count).since(now) };
        let remaining = self.limit.saturating_sub(self.spent_units(count, now));
        LimitState { limit: self.limit, remaining, next_after: reset_after, reset_after }
    }

    /// Returns what was spent in the window that contains `now`.
    #[must_use]
    pub fn spent_units(&self, count: &FixedWindowCount, now: Timestamp) -> u32 {
        if self.has_passed(count, now) { 0 } else { count.spent }
    }

    fn end(&self, count: &FixedWindowCount) -> Timestamp {
        count.start.plus(self.window())
    }

    fn has_passed(&self, count: &FixedWindowCount, now: Timestamp) -> bool {
        now.since(count.start) >= self.window()
    }
}

impl Rule for FixedWindow {
    type Usage = FixedWindowCount;

    fn unspent(&self) -> FixedWindowCount {
        FixedWindowCount { start: Timestamp::from_micros(i64::MIN), spent: 0 }
    }

    fn is_unspent(&self, count: &FixedWindowCount, now: Timestamp) -> bool {
        self.spent_units(count, now) == 0
    }

    fn has_room(&self, count: &FixedWindowCount, cost: u32, now: Timestamp) -> bool {
        cost == 0 || cost <= self.limit.saturating_sub(self.spent_units(count, now))
    }

    fn charge(&self, count: &mut FixedWindowCount, cost: u32, now: Timestamp) {
        if self.is_unspent(count, now) {
            *count = FixedWindowCount { start: now, spent: 0 };
        }
        count.spent = count.spent.saturating_add(cost);
    }

    /// Nothing is given back to a window that has ended.
    fn give_back(
        &self,
        count: &mut FixedWindowCount,
        cost: u32,
        taken_at: Option<Timestamp>,
        now: Timestamp,
    ) {
        if !self.has_passed(count, now) && taken_at.is_none_or(|taken| taken >= count.start) {
            count.spent = count.spent.saturating_sub(cost);
        }
    }

    fn denial(&self, count: &FixedWindowCount, cost: u32, now: Timestamp) -> LimitDenial {
        LimitDenial::single((cost <= self.limit).then(|| self.end(count).since(now)))
    }

    /// The window keeps its start; only its length and limit are new.
    fn carry_over(&self, old: &Self, count: FixedWindowCount, now: Timestamp) -> FixedWindowCount {
        if old.has_passed(&count, now) { self.unspent() } else { count }
    }

    fn move_back(&self, count: &mut FixedWindowCount, by: Duration) {
        count.start = count.start.minus(by);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Decision;
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_seconds(seconds)
    }

    fn window(limit: u32) -> FixedWindow {
        FixedWindow::new(limit, Duration::from_secs(60)).unwrap()
    }

    #[test]
    fn a_window_starts_with_the_first_use_and_ends_exactly_after_its_length() {
        let rule = window(5);
        let mut count = rule.unspent();
        assert!(rule.take(&mut count, 3, at(7)).is_allowed());
        let denied = Decision::Denied(LimitDenial::single(Some(Duration::from_secs(50))));
        assert_eq!(rule.take(&mut count, 3, at(17)), denied);
        assert!(rule.take(&mut count, 2, at(17)).is_allowed());
        assert!(!rule.has_room(&count, 1, Timestamp::from_micros(at(67).as_micros() - 1)));
        assert!(rule.take(&mut count, 5, at(67)).is_allowed());
        assert_eq!(count, FixedWindowCount { start: at(67), spent: 5 });
    }

    #[test]
    fn units_of_an_earlier_window_are_not_given_back_to_this_one() {
        let rule = window(5);
        let mut count = rule.unspent();
        rule.charge(&mut count, 5, at(0));
        rule.charge(&mut count, 5, at(60));
        rule.give_back(&mut count, 5, Some(at(0)), at(61));
        assert_eq!(rule.limit_state(&count, at(61)).remaining, 0);
        rule.give_back(&mut count, 2, Some(at(60)), at(61));
        rule.give_back(&mut count, 9, None, at(61));
        assert_eq!(rule.limit_state(&count, at(61)).remaining, 5);
    }

    #[test]
    fn a_debt_ends_with_its_window() {
        let rule = window(5);
        let mut count = rule.unspent();
        rule.charge(&mut count, 50, at(0));
        assert_eq!(rule.limit_state(&count, at(1)).remaining, 0);
        assert_eq!(rule.take(&mut count, 6, at(1)), Decision::Denied(LimitDenial::single(None)));
        assert!(rule.has_room(&count, 5, at(60)));
    }

    #[test]
    fn a_clock_that_steps_back_opens_no_window() {
        let rule = window(1);
        let mut count = rule.unspent();
        assert!(rule.take(&mut count, 1, at(0)).is_allowed());
        assert!(!rule.has_room(&count, 1, Timestamp::from_seconds(-60)));
    }
}
