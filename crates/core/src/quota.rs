//! Quota: a limit on messages per user and window.
//!
//! Windows are fixed and refresh lazily: nothing runs when a window ends. The next send notices and starts a new
//! window at its own time. So a window starts when the limits are configured, or with the first send after the previous one
//! ended, and idle users cost nothing. A unit that was sent never comes back; only reservations that were not used do
//! ([`Quota::release`]).
//!
//! What a cache holds in advance stands apart from what was sent, and counts like it.

use std::time::Duration;

use crate::verdict::DenialReason;
use crate::{Denial, Timestamp, Verdict};

/// How many messages a user may send per window. Both numbers are from 1 to [`QuotaLimits::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaLimits {
    rate_limit: u32,
    time_window_minutes: u32,
}

/// A number outside 1 to [`QuotaLimits::MAX`]. The message completes the sentence "rateLimit …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be an integer from 1 to {}", QuotaLimits::MAX)]
pub struct QuotaLimitsError;

impl QuotaLimits {
    /// The largest limit and window: the maximum of a Postgres `INT`.
    pub const MAX: u32 = i32::MAX.unsigned_abs();

    pub const fn new(rate_limit: u32, time_window_minutes: u32) -> Result<Self, QuotaLimitsError> {
        if matches!(rate_limit, 1..=Self::MAX) && matches!(time_window_minutes, 1..=Self::MAX) {
            Ok(Self { rate_limit, time_window_minutes })
        } else {
            Err(QuotaLimitsError)
        }
    }

    #[must_use]
    pub const fn rate_limit(&self) -> u32 {
        self.rate_limit
    }

    #[must_use]
    pub const fn time_window_minutes(&self) -> u32 {
        self.time_window_minutes
    }

    /// How many messages a cache reserves beyond those it needs at once: one, or a tenth of the limit, at most 1000. If
    /// the cache is lost, this many sends may be denied too early.
    #[must_use]
    pub fn prefetch(&self) -> u32 {
        (self.rate_limit / 10).clamp(1, 1_000)
    }

    #[must_use]
    pub const fn window(&self) -> Duration {
        Duration::from_secs((self.time_window_minutes as u64).saturating_mul(60))
    }
}

/// A user's row: the limits and what was counted against them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    pub limits: QuotaLimits,
    /// Messages sent in the window that started at `last_refresh`.
    pub current_count: u32,
    /// Further messages that a cache may allow in that window. They count like those that were sent.
    pub reserved_count: u32,
    /// When the current window started.
    pub last_refresh: Timestamp,
}

/// An allowed send, and what is left after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    pub remaining: u32,
    pub reset_at: Timestamp,
}

impl Quota {
    /// Creates a row with nothing counted and a window that starts now.
    #[must_use]
    pub const fn new(limits: QuotaLimits, now: Timestamp) -> Self {
        Self { limits, current_count: 0, reserved_count: 0, last_refresh: now }
    }

    /// Replaces the limits and keeps the window and its count, even a count above the new limit: sends are then denied until
    /// the window ends. A window that has passed under the limits of before stays over, however long the new one is: a new
    /// one starts now.
    ///
    /// What a cache holds in advance stays counted until it is released. Nothing stands apart as reserved in a window that
    /// counts more than its limit: then it is shown as sent.
    pub fn change_limits(&mut self, limits: QuotaLimits, now: Timestamp) {
        self.clamp_window_start(now);
        if self.window_has_passed(now) {
            *self = Self::new(limits, now);
        }
        self.limits = limits;
        if self.counted() > limits.rate_limit() {
            (self.current_count, self.reserved_count) = (self.counted(), 0);
        }
    }

    /// Moves a window that starts after `now` so that it starts now, with its count, and returns whether it did. Such
    /// a window means that the store's clock stepped back. Nobody then waits longer than one window, and nobody gets a
    /// new one. The caller must save the row even if nothing else changed; otherwise every read would restart the
    /// window.
    pub fn clamp_window_start(&mut self, now: Timestamp) -> bool {
        let is_ahead = self.last_refresh > now;
        if is_ahead {
            self.last_refresh = now;
        }
        is_ahead
    }

    /// Decides one send at `now` and counts it if it is allowed. A denial changes nothing except for
    /// [`Quota::clamp_window_start`].
    pub fn send(&mut self, now: Timestamp) -> Verdict<Grant> {
        self.clamp_window_start(now);
        if self.window_has_passed(now) {
            *self = Self::new(self.limits, now);
        }
        if self.remaining() == 0 {
            return Verdict::Denied(Denial {
                reason: DenialReason::QuotaExceeded,
                retry_after: self.reset_at().since(now),
            });
        }
        self.current_count = self.current_count.saturating_add(1);
        Verdict::Allowed(Grant { remaining: self.remaining(), reset_at: self.reset_at() })
    }

    /// Reserves up to `units` messages before they are sent, and returns how many fit into the window.
    pub fn reserve(&mut self, now: Timestamp, units: u32) -> u32 {
        self.clamp_window_start(now);
        if self.window_has_passed(now) && units > 0 {
            *self = Self::new(self.limits, now);
        }
        let reserved = units.min(self.remaining());
        self.reserved_count = self.reserved_count.saturating_add(reserved);
        reserved
    }

    /// Shows reserved messages as sent. What counts against the limit stays the same. `window` is the start of the window
    /// that they were sent in; a later one has begun since, unless the clock was set back and this one was moved.
    pub fn record_sent(&mut self, window: Timestamp, units: u32) {
        if self.last_refresh <= window {
            let units = units.min(self.reserved_count);
            self.reserved_count = self.reserved_count.saturating_sub(units);
            self.current_count = self.current_count.saturating_add(units);
        }
    }

    /// Returns reserved messages that were not sent to the window that started at `window`. Does nothing if that
    /// window has ended or was replaced by new limits. Units that are shown as sent are returned last.
    pub fn release(&mut self, window: Timestamp, units: u32) {
        if self.last_refresh == window {
            let reserved = units.min(self.reserved_count);
            self.reserved_count = self.reserved_count.saturating_sub(reserved);
            self.current_count = self.current_count.saturating_sub(units.saturating_sub(reserved));
        }
    }

    /// Returns the row as it counts at `now`: the count is 0 once the window has passed.
    #[must_use]
    pub fn as_of(mut self, now: Timestamp) -> Self {
        self.clamp_window_start(now);
        if self.window_has_passed(now) {
            (self.current_count, self.reserved_count) = (0, 0);
        }
        self
    }

    /// What counts against the limit: the messages that were sent, and those that are reserved.
    #[must_use]
    pub const fn counted(&self) -> u32 {
        self.current_count.saturating_add(self.reserved_count)
    }

    #[must_use]
    pub const fn remaining(&self) -> u32 {
        self.limits.rate_limit.saturating_sub(self.counted())
    }

    #[must_use]
    pub fn reset_at(&self) -> Timestamp {
        self.last_refresh.plus(self.limits.window())
    }

    fn window_has_passed(&self, now: Timestamp) -> bool {
        now.since(self.last_refresh) >= self.limits.window()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Timestamp = Timestamp::from_seconds(1_000);

    fn quota(limit: u32, minutes: u32) -> Quota {
        Quota::new(QuotaLimits::new(limit, minutes).unwrap(), START)
    }

    fn at(seconds: u64) -> Timestamp {
        START.plus(Duration::from_secs(seconds))
    }

    #[test]
    fn limits_are_from_1_to_the_largest_i32() {
        for bad in [0, QuotaLimits::MAX + 1, u32::MAX] {
            assert_eq!(QuotaLimits::new(bad, 1), Err(QuotaLimitsError));
            assert_eq!(QuotaLimits::new(1, bad), Err(QuotaLimitsError));
        }
        assert!(QuotaLimits::new(QuotaLimits::MAX, QuotaLimits::MAX).is_ok());
    }

    #[test]
    fn the_limit_is_the_last_message_allowed() {
        let mut quota = quota(2, 1);
        assert_eq!(quota.send(at(1)), Verdict::Allowed(Grant { remaining: 1, reset_at: at(60) }));
        assert_eq!(quota.send(at(2)), Verdict::Allowed(Grant { remaining: 0, reset_at: at(60) }));
        let denied = Denial { reason: DenialReason::QuotaExceeded, retry_after: Duration::from_secs(50) };
        assert_eq!(quota.send(at(10)), Verdict::Denied(denied));
    }

    #[test]
    fn a_new_window_starts_exactly_at_the_end_with_count_1() {
        let mut quota = quota(1, 1);
        assert!(quota.send(at(0)).is_allowed());
        assert!(!quota.send(Timestamp::from_micros(at(60).as_micros() - 1)).is_allowed());
        assert_eq!(quota.send(at(60)), Verdict::Allowed(Grant { remaining: 0, reset_at: at(120) }));
        assert_eq!((quota.current_count, quota.last_refresh), (1, at(60)));
    }

    #[test]
    fn reading_a_passed_window_returns_0_and_does_not_move_it() {
        let mut quota = quota(3, 1);
        assert!(quota.send(at(5)).is_allowed());
        assert_eq!(quota.as_of(at(59)).current_count, 1);
        assert_eq!(quota.as_of(at(60)).current_count, 0);
        assert_eq!(quota.as_of(at(60)).last_refresh, START);
    }

    #[test]
    fn changed_limits_keep_the_window_and_its_count() {
        let limits = |limit, minutes| QuotaLimits::new(limit, minutes).unwrap();
        let mut row = quota(3, 1);
        assert_eq!(row.reserve(at(1), 3), 3);
        row.change_limits(limits(2, 5), at(59));
        assert_eq!(
            row,
            Quota { current_count: 3, ..Quota::new(limits(2, 5), START) },
            "what is reserved counts"
        );
        assert!(
            !row.send(at(299)).is_allowed(),
            "the window has got longer and its count is above the limit"
        );
        assert_eq!((row.remaining(), row.reserve(at(299), 1)), (0, 0));
        assert!(row.send(at(300)).is_allowed());
        row.change_limits(limits(2, 1), at(301));
        assert_eq!((row.current_count, row.last_refresh), (1, at(300)));
        row.change_limits(limits(9, 60), at(360));
        assert_eq!(row, Quota::new(limits(9, 60), at(360)), "a window that was over is not revived");
    }

    #[test]
    fn what_is_reserved_stays_counted_under_changed_limits_and_apart_only_within_them() {
        let limits = |limit| QuotaLimits::new(limit, 60).unwrap();
        let reserved = |current_count, reserved_count, limit| Quota {
            current_count,
            reserved_count,
            ..Quota::new(limits(limit), START)
        };
        for (limit, expected) in [(9, (3, 4)), (7, (3, 4)), (6, (7, 0)), (1, (7, 0))] {
            let mut row = reserved(3, 4, 50);
            row.change_limits(limits(limit), at(1));
            assert_eq!((row.current_count, row.reserved_count), expected, "limit {limit}");
            row.record_sent(START, 2);
            row.release(START, 2);
            assert_eq!((row.current_count, row.reserved_count), (5, 0), "two were sent and two were not");
        }
        let mut over = reserved(3, 4, 50);
        over.change_limits(limits(9), at(3_600));
        assert_eq!(over, Quota::new(limits(9), at(3_600)), "a window that is over counts nothing");
    }

    #[test]
    fn a_clock_that_steps_back_opens_no_new_window() {
        let mut quota = quota(1, 1);
        assert!(quota.send(at(30)).is_allowed());
        assert!(!quota.send(Timestamp::EPOCH).is_allowed());
        assert_eq!((quota.last_refresh, quota.current_count), (Timestamp::EPOCH, 1));
    }

    #[test]
    fn a_clock_that_steps_back_delays_nobody_longer_than_a_window() {
        let mut quota = quota(1, 1);
        assert!(quota.send(at(7_200)).is_allowed(), "a window that starts two hours ahead");
        let denied = Denial { reason: DenialReason::QuotaExceeded, retry_after: Duration::from_secs(60) };
        assert_eq!(quota.send(at(0)), Verdict::Denied(denied));
        assert!(!quota.send(at(59)).is_allowed());
        assert!(quota.send(at(60)).is_allowed());
    }

    #[test]
    fn reserved_units_count_like_sends_and_can_be_released_in_their_window() {
        let mut row = quota(10, 1);
        assert_eq!(row.reserve(at(1), 4), 4);
        assert_eq!(row.reserve(at(2), 9), 6, "no more than the window has");
        assert!(matches!(row.send(at(3)), Verdict::Denied(_)));
        row.release(START, 3);
        assert!(matches!(row.send(at(4)), Verdict::Allowed(Grant { remaining: 2, .. })));
        // Units reserved in the previous window are not returned to the next one.
        assert_eq!(row.reserve(at(60), 2), 2);
        row.release(START, 6);
        assert_eq!((row.counted(), row.last_refresh), (2, at(60)));
    }

    #[test]
    fn recording_sent_units_changes_nothing_of_what_counts() {
        let mut row = quota(10, 1);
        assert_eq!(row.reserve(at(1), 6), 6);
        row.record_sent(START, 2);
        assert_eq!((row.current_count, row.reserved_count), (2, 4));
        // Of a window before: these are not its units.
        let mut later = Quota { last_refresh: at(60), ..row };
        later.record_sent(START, 2);
        assert_eq!((later.current_count, later.reserved_count), (2, 4));
        // More than there are, because an outcome was unknown and the call repeated.
        row.record_sent(START, 5);
        assert_eq!((row.current_count, row.reserved_count), (6, 0));
        row.release(START, 1);
        assert_eq!((row.current_count, row.reserved_count), (5, 0), "the sum is right again");
    }

    #[test]
    fn one_or_a_tenth_is_prefetched_and_a_thousand_at_most() {
        let prefetch = |limit| QuotaLimits::new(limit, 1).unwrap().prefetch();
        assert_eq!([prefetch(1), prefetch(19), prefetch(50), prefetch(QuotaLimits::MAX)], [1, 1, 5, 1_000]);
    }
}
