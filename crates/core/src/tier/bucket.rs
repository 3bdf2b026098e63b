//! The token bucket, in whole numbers.
//!
//! A bucket is one number: the time at which it is full again. It is counted in *ticks*; a microsecond has as many
//! ticks as the bucket gains tokens per period. A token then takes one period's microseconds in ticks to come back
//! (tokens per period and microseconds per period cancel out). So every token and every moment is a whole number of
//! ticks: nothing is rounded and nothing drifts. A bucket refills without any work while it is idle.

use std::time::Duration;

use super::limit::{LimitError, checked_amount, checked_period_us};
use super::rule::{LimitDenial, LimitState, Rule};
use crate::Timestamp;

/// A bucket's capacity and refill rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenBucket {
    capacity: u32,
    refill: u32,
    period_us: u64,
}

/// The time at which a bucket is full again, in its ticks: 96 bits in twelve bytes, because engines store millions of
/// them.
///
/// That is enough: a [`Timestamp`] has 64 bits and a microsecond has at most 2³¹ ticks. A debt that would not fit is
/// cut off there, thousands of years ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BucketLevel {
    high: i32,
    middle: u32,
    low: u32,
}

impl BucketLevel {
    /// A bucket that was never used.
    pub const FULL: Self = Self { high: i32::MIN, middle: 0, low: 0 };

    const MIN_TICKS: i128 = -(1 << 95);
    const MAX_TICKS: i128 = (1 << 95) - 1;

    /// Splits the number as engines store it: the upper 64 bits and the lower 32.
    #[must_use]
    pub const fn to_parts(self) -> (i64, u32) {
        (((self.high as i64) << 32) | self.middle as i64, self.low)
    }

    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "cuts the number into its words"
    )]
    pub const fn from_parts(upper: i64, low: u32) -> Self {
        Self { high: (upper >> 32) as i32, middle: upper as u32, low }
    }

    const fn ticks(self) -> i128 {
        let (upper, low) = self.to_parts();
        ((upper as i128) << 32) | low as i128
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped; the rest is the low word"
    )]
    fn at(ticks: i128) -> Self {
        let ticks = ticks.clamp(Self::MIN_TICKS, Self::MAX_TICKS);
        Self::from_parts((ticks >> 32) as i64, ticks as u32)
    }
}

/// Multiplies 64 by at most 63 bits, which always fits 128 bits.
#[expect(clippy::arithmetic_side_effects, reason = "cannot overflow, and a checked product is a call")]
fn product(a: i64, b: u64) -> i128 {
    debug_assert!(b <= i64::MAX.unsigned_abs());
    i128::from(a) * i128::from(b)
}

/// Returns `a / b` rounded up, with a 64-bit division if the numbers are small enough.
fn div_ceil(a: u128, b: u64) -> u128 {
    match u64::try_from(a) {
        Ok(a) => u128::from(a.div_ceil(b.max(1))),
        Err(_wide) => a.div_ceil(u128::from(b.max(1))),
    }
}

fn micros(count: u128) -> Duration {
    Duration::from_micros(u64::try_from(count).unwrap_or(u64::MAX))
}

impl TokenBucket {
    /// Creates a bucket of `capacity` tokens that gains `refill` tokens evenly in every `period`. Fails if a number is
    /// out of range.
    pub fn new(capacity: u32, refill: u32, period: Duration) -> Result<Self, LimitError> {
        Ok(Self {
            capacity: checked_amount(capacity)?,
            refill: checked_amount(refill)?,
            period_us: checked_period_us(period)?,
        })
    }

    /// Creates a bucket from numbers that are known to be in range.
    pub(super) const fn from_checked(capacity: u32, refill: u32, period_ms: u32) -> Self {
        Self { capacity, refill, period_us: (period_ms as u64).saturating_mul(1_000) }
    }

    #[must_use]
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    #[must_use]
    pub const fn refill(&self) -> u32 {
        self.refill
    }

    #[must_use]
    pub const fn period(&self) -> Duration {
        Duration::from_micros(self.period_us)
    }

    /// Returns the state of a key for headers and responses.
    #[must_use]
    pub fn limit_state(&self, level: &BucketLevel, now: Timestamp) -> LimitState {
        let missing = self.missing_ticks(*level, now);
        let remaining = self.capacity.saturating_sub(self.spent_units(level, now));
        let one_more = self.tokens_ticks(self.capacity.saturating_sub(remaining).saturating_sub(1));
        LimitState {
            limit: self.capacity,
            remaining,
            next_after: self.wait_until_missing(missing, one_more),
            reset_after: self.wait_until_missing(missing, 0),
        }
    }

    /// Returns the tokens that are spent and not regained, rounded up.
    #[must_use]
    pub fn spent_units(&self, level: &BucketLevel, now: Timestamp) -> u32 {
        u32::try_from(div_ceil(self.missing_ticks(*level, now), self.period_us)).unwrap_or(u32::MAX)
    }

    /// Converts a time to ticks.
    fn ticks(&self, now: Timestamp) -> i128 {
        product(now.as_micros(), u64::from(self.refill))
    }

    /// Returns the ticks it takes to regain this many tokens.
    fn tokens_ticks(&self, tokens: u32) -> u128 {
        product(i64::from(tokens), self.period_us).unsigned_abs()
    }

    /// Returns the ticks until the bucket is full.
    fn missing_ticks(&self, level: BucketLevel, now: Timestamp) -> u128 {
        level.ticks().saturating_sub(self.ticks(now)).max(0).unsigned_abs()
    }

    /// Returns how long it takes until at most `allowed` ticks are missing.
    fn wait_until_missing(&self, missing: u128, allowed: u128) -> Duration {
        micros(div_ceil(missing.saturating_sub(allowed), u64::from(self.refill)))
    }
}

impl Rule for TokenBucket {
    type Usage = BucketLevel;

    fn unspent(&self) -> BucketLevel {
        BucketLevel::FULL
    }

    fn is_unspent(&self, level: &BucketLevel, now: Timestamp) -> bool {
        level.ticks() <= self.ticks(now)
    }

    fn has_room(&self, level: &BucketLevel, cost: u32, now: Timestamp) -> bool {
        let Some(others) = self.capacity.checked_sub(cost) else { return false };
        cost == 0 || self.missing_ticks(*level, now) <= self.tokens_ticks(others)
    }

    fn charge(&self, level: &mut BucketLevel, cost: u32, now: Timestamp) {
        let full_at = level.ticks().max(self.ticks(now));
        *level = BucketLevel::at(full_at.saturating_add_unsigned(self.tokens_ticks(cost)));
    }

    /// Tokens have no date: regained tokens are not deducted, but the bucket is never more than full.
    fn give_back(&self, level: &mut BucketLevel, cost: u32, _taken_at: Option<Timestamp>, now: Timestamp) {
        if !self.is_unspent(level, now) {
            let full_at = level.ticks().saturating_sub_unsigned(self.tokens_ticks(cost));
            *level = BucketLevel::at(full_at.max(self.ticks(now)));
        }
    }

    fn denial(&self, level: &BucketLevel, cost: u32, now: Timestamp) -> LimitDenial {
        let others = self.capacity.checked_sub(cost).map(|others| self.tokens_ticks(others));
        let missing = self.missing_ticks(*level, now);
        LimitDenial::single(others.map(|others| self.wait_until_missing(missing, others)))
    }

    /// Spent tokens stay spent, even those that exceed the new capacity: otherwise a change to a small bucket and back
    /// would be a refill.
    fn carry_over(&self, old: &Self, level: BucketLevel, now: Timestamp) -> BucketLevel {
        if (self.refill, self.period_us) == (old.refill, old.period_us) {
            return level;
        }
        let missing = old.missing_ticks(level, now);
        if missing == 0 {
            return BucketLevel::FULL;
        }
        let missing_here =
            missing.saturating_mul(u128::from(self.period_us)).div_ceil(u128::from(old.period_us.max(1)));
        BucketLevel::at(self.ticks(now).saturating_add_unsigned(missing_here))
    }

    fn move_back(&self, level: &mut BucketLevel, by: Duration) {
        let micros = i64::try_from(by.as_micros()).unwrap_or(i64::MAX);
        *level = BucketLevel::at(level.ticks().saturating_sub(product(micros, u64::from(self.refill))));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Decision, Limit};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(micros: i64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000_i64.saturating_add(micros))
    }

    fn minute(capacity: u32, refill: u32) -> TokenBucket {
        TokenBucket::new(capacity, refill, Duration::from_secs(60)).unwrap()
    }

    #[test]
    fn a_level_is_twelve_bytes_and_survives_storage() {
        assert_eq!((size_of::<BucketLevel>(), align_of::<BucketLevel>()), (12, 4));
        assert_eq!(BucketLevel::FULL.ticks(), BucketLevel::MIN_TICKS);
        for ticks in [
            0,
            1,
            -1,
            i128::from(u32::MAX),
            1 << 40,
            -(1 << 70),
            BucketLevel::MAX_TICKS,
            BucketLevel::MIN_TICKS,
        ] {
            let level = BucketLevel::at(ticks);
            assert_eq!(level.ticks(), ticks);
            let (upper, low) = level.to_parts();
            assert_eq!(BucketLevel::from_parts(upper, low), level);
        }
        assert_eq!(BucketLevel::at(i128::MAX).ticks(), BucketLevel::MAX_TICKS);
    }

    #[test]
    fn a_new_bucket_is_full_and_gives_its_capacity_at_once() {
        let bucket = minute(8, 5);
        let mut level = bucket.unspent();
        for left in (0..8).rev() {
            assert!(bucket.take(&mut level, 1, at(0)).is_allowed());
            assert_eq!(bucket.limit_state(&level, at(0)).remaining, left);
        }
        let denial = LimitDenial::single(Some(12 * SECOND));
        assert_eq!(bucket.take(&mut level, 1, at(0)), Decision::Denied(denial), "5 a minute is one in 12 s");
    }

    #[test]
    fn fractions_of_a_microsecond_are_not_lost() {
        // 7 tokens per minute: one takes 8 571 428 and 4/7 microseconds.
        let bucket = minute(7, 7);
        let mut level = bucket.unspent();
        assert!(bucket.take(&mut level, 7, at(0)).is_allowed());
        for token in 1..=7_u32 {
            let due = (60_000_000 * i64::from(token) + 6) / 7;
            assert!(!bucket.has_room(&level, token, at(due - 1)), "token {token}");
            assert!(bucket.has_room(&level, token, at(due)), "token {token}");
        }
    }

    #[test]
    fn a_cost_above_the_capacity_never_fits_and_zero_always_does() {
        let bucket = minute(5, 5);
        let mut level = bucket.unspent();
        assert_eq!(bucket.take(&mut level, 6, at(0)), Decision::Denied(LimitDenial::single(None)));
        bucket.charge(&mut level, 50, at(0));
        assert_eq!(bucket.limit_state(&level, at(0)).remaining, 0);
        let owing = level;
        assert!(bucket.take(&mut level, 0, at(0)).is_allowed());
        assert_eq!(level, owing);
        let wait = LimitDenial::single(Some(46 * 12 * SECOND));
        assert_eq!(bucket.take(&mut level, 1, at(0)), Decision::Denied(wait), "a debt is paid off first");
    }

    #[test]
    fn a_refund_never_fills_past_full() {
        let bucket = minute(5, 5);
        let mut level = bucket.unspent();
        bucket.give_back(&mut level, 3, None, at(0));
        assert!(bucket.take(&mut level, 5, at(0)).is_allowed());
        bucket.give_back(&mut level, u32::MAX, None, at(0));
        assert_eq!(bucket.limit_state(&level, at(0)).remaining, 5);
        assert!(bucket.take(&mut level, 5, at(0)).is_allowed());
        assert!(!bucket.has_room(&level, 1, at(0)));
    }

    #[test]
    fn a_change_of_rule_and_back_refills_nothing() {
        let (free, pro) = (minute(8, 5), minute(40, 30));
        let mut level = pro.unspent();
        pro.charge(&mut level, 30, at(0));
        let small = free.carry_over(&pro, level, at(0));
        assert_eq!(free.limit_state(&small, at(0)).remaining, 0);
        assert_eq!(free.denial(&small, 1, at(0)).retry_after, Some(23 * 12 * SECOND));
        let back = pro.carry_over(&free, small, at(0));
        assert_eq!(back, level);
        // A token now takes 2 s, and 30 are missing.
        assert_eq!(pro.limit_state(&back, at(2_000_000)).remaining, 11);
    }

    #[test]
    fn a_clock_that_steps_back_gives_nothing() {
        let bucket = minute(2, 1);
        let mut level = bucket.unspent();
        assert!(bucket.take(&mut level, 2, at(0)).is_allowed());
        assert!(!bucket.has_room(&level, 1, Timestamp::EPOCH));
        assert!(!bucket.has_room(&level, 1, Timestamp::from_micros(i64::MIN)));
    }

    #[test]
    fn the_largest_numbers_do_not_wrap() {
        let bucket = TokenBucket::new(Limit::MAX, Limit::MAX, Limit::MAX_PERIOD).unwrap();
        let end = Timestamp::from_micros(i64::MAX);
        let mut level = bucket.unspent();
        assert!(bucket.take(&mut level, Limit::MAX, end).is_allowed());
        assert!(!bucket.has_room(&level, 1, end));
        for _ in 0..100 {
            bucket.charge(&mut level, u32::MAX, end);
        }
        assert!(!bucket.has_room(&level, 1, end));
        assert_eq!(bucket.limit_state(&level, Timestamp::from_micros(i64::MIN)).remaining, 0);
    }
}
