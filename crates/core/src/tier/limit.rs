//! A limit of any kind, for policies whose kind is chosen when they are created.
//!
//! A new kind needs, besides this enum and its re-export in `core/src/tier.rs`: its columns (`store/src/tier/policy.rs`) and a
//! migration of each engine, which check the kind; `store-redis/src`: `tier/script_key.rs` and `scripts/tier.lua`; the API and
//! the settings (`server/src/tier/routes/policy.rs`, `server/src/tier/settings/policy_input.rs`, `weir.default.toml`,
//! docs/tier.md); `tower/src/policy.rs` and `tower/README.md`; the cases and the model in `store-conformance`. Servers of the
//! version before cannot read it: docs/upgrades.md, "For developers".

use std::time::Duration;

use super::bucket::{BucketLevel, TokenBucket};
use super::rule::{LimitDenial, LimitState, Rule};
use super::sliding::{SlidingWindow, SlidingWindowCounts};
use super::window::{FixedWindow, FixedWindowCount};
use crate::Timestamp;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    TokenBucket(TokenBucket),
    /// An amount per window that starts with the first use.
    FixedWindow(FixedWindow),
    /// An amount per window that ends at any moment.
    SlidingWindow(SlidingWindow),
}

/// What a key has spent of a [`Limit`], in the three numbers that engines store. Their meaning depends on the kind of
/// limit: the parts of a [`BucketLevel`], or the start of a window and what was spent in it and in the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LimitUsage(pub i64, pub u32, pub u32);

/// A number outside the range of a limit. The messages complete the sentence "limit …" or "window …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    #[error("must be an integer from 1 to {}", Limit::MAX)]
    Amount,
    #[error("must be a duration of whole milliseconds from 1 millisecond to 366 days, such as PT1M")]
    Period,
}

/// Evaluates the same expression for each kind of limit, each with its own type.
macro_rules! for_each_kind {
    ($limit:expr, $rule:ident => $what:expr) => {
        match $limit {
            Limit::TokenBucket($rule) => $what,
            Limit::FixedWindow($rule) => $what,
            Limit::SlidingWindow($rule) => $what,
        }
    };
}

pub(super) fn checked_amount(amount: u32) -> Result<u32, LimitError> {
    if matches!(amount, 1..=Limit::MAX) { Ok(amount) } else { Err(LimitError::Amount) }
}

pub(super) fn checked_period_us(period: Duration) -> Result<u64, LimitError> {
    let is_whole = period.subsec_nanos().checked_rem(1_000_000) == Some(0);
    if period.is_zero() || period > Limit::MAX_PERIOD || !is_whole {
        return Err(LimitError::Period);
    }
    u64::try_from(period.as_micros()).map_err(|_too_long| LimitError::Period)
}

impl Limit {
    /// The largest amount: the maximum of a Postgres `INT`.
    pub const MAX: u32 = i32::MAX.unsigned_abs();
    pub const MAX_PERIOD: Duration = Duration::from_secs(366 * 86_400);

    /// Returns the state of a key for headers and responses.
    #[must_use]
    pub fn limit_state(&self, spent: &LimitUsage, now: Timestamp) -> LimitState {
        for_each_kind!(self, rule => rule.limit_state(&(*spent).into(), now))
    }

    /// Returns what counts as spent at `now`, rounded up.
    #[must_use]
    pub fn spent_units(&self, spent: &LimitUsage, now: Timestamp) -> u32 {
        for_each_kind!(self, rule => rule.spent_units(&(*spent).into(), now))
    }
}

impl Rule for Limit {
    type Usage = LimitUsage;

    fn unspent(&self) -> LimitUsage {
        for_each_kind!(self, rule => rule.unspent().into())
    }

    fn is_unspent(&self, spent: &LimitUsage, now: Timestamp) -> bool {
        for_each_kind!(self, rule => rule.is_unspent(&(*spent).into(), now))
    }

    fn has_room(&self, spent: &LimitUsage, cost: u32, now: Timestamp) -> bool {
        for_each_kind!(self, rule => rule.has_room(&(*spent).into(), cost, now))
    }

    fn charge(&self, spent: &mut LimitUsage, cost: u32, now: Timestamp) {
        for_each_kind!(self, rule => {
            let mut usage = (*spent).into();
            rule.charge(&mut usage, cost, now);
            *spent = usage.into();
        });
    }

    fn give_back(&self, spent: &mut LimitUsage, cost: u32, taken_at: Option<Timestamp>, now: Timestamp) {
        for_each_kind!(self, rule => {
            let mut usage = (*spent).into();
            rule.give_back(&mut usage, cost, taken_at, now);
            *spent = usage.into();
        });
    }

    fn denial(&self, spent: &LimitUsage, cost: u32, now: Timestamp) -> LimitDenial {
        for_each_kind!(self, rule => rule.denial(&(*spent).into(), cost, now))
    }

    /// A limit of another kind starts with what counts as spent at `now`.
    fn carry_over(&self, old: &Self, spent: LimitUsage, now: Timestamp) -> LimitUsage {
        match (self, old) {
            (Self::TokenBucket(new), Self::TokenBucket(old)) => new.carry_over(old, spent.into(), now).into(),
            (Self::FixedWindow(new), Self::FixedWindow(old)) => new.carry_over(old, spent.into(), now).into(),
            (Self::SlidingWindow(new), Self::SlidingWindow(old)) => {
                new.carry_over(old, spent.into(), now).into()
            }
            _ => {
                let mut adopted = self.unspent();
                match old.spent_units(&spent, now) {
                    0 => {}
                    units => self.charge(&mut adopted, units, now),
                }
                adopted
            }
        }
    }

    fn move_back(&self, spent: &mut LimitUsage, by: Duration) {
        for_each_kind!(self, rule => {
            let mut usage = (*spent).into();
            rule.move_back(&mut usage, by);
            *spent = usage.into();
        });
    }
}

impl From<BucketLevel> for LimitUsage {
    fn from(level: BucketLevel) -> Self {
        let (upper, low) = level.to_parts();
        Self(upper, low, 0)
    }
}

impl From<LimitUsage> for BucketLevel {
    fn from(LimitUsage(upper, low, _): LimitUsage) -> Self {
        Self::from_parts(upper, low)
    }
}

impl From<FixedWindowCount> for LimitUsage {
    fn from(FixedWindowCount { start, spent }: FixedWindowCount) -> Self {
        Self(start.as_micros(), spent, 0)
    }
}

impl From<LimitUsage> for FixedWindowCount {
    fn from(LimitUsage(start, spent, _): LimitUsage) -> Self {
        Self { start: Timestamp::from_micros(start), spent }
    }
}

impl From<SlidingWindowCounts> for LimitUsage {
    fn from(SlidingWindowCounts { start, current, previous }: SlidingWindowCounts) -> Self {
        Self(start.as_micros(), current, previous)
    }
}

impl From<LimitUsage> for SlidingWindowCounts {
    fn from(LimitUsage(start, current, previous): LimitUsage) -> Self {
        Self { start: Timestamp::from_micros(start), current, previous }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn every_kind(amount: u32) -> [Limit; 3] {
        [
            Limit::TokenBucket(TokenBucket::new(amount, amount, MINUTE).unwrap()),
            Limit::FixedWindow(FixedWindow::new(amount, MINUTE).unwrap()),
            Limit::SlidingWindow(SlidingWindow::new(amount, MINUTE).unwrap()),
        ]
    }

    #[test]
    fn amounts_and_periods_out_of_range_are_rejected() {
        for amount in [0, Limit::MAX + 1, u32::MAX] {
            assert_eq!(FixedWindow::new(amount, MINUTE), Err(LimitError::Amount));
            assert_eq!(TokenBucket::new(1, amount, MINUTE), Err(LimitError::Amount));
        }
        let micro = Duration::from_micros(1);
        for period in [Duration::ZERO, micro, Limit::MAX_PERIOD + Duration::from_millis(1), Duration::MAX] {
            assert_eq!(SlidingWindow::new(1, period), Err(LimitError::Period));
        }
        assert!(TokenBucket::new(Limit::MAX, Limit::MAX, Limit::MAX_PERIOD).is_ok());
    }

    #[test]
    fn usage_of_every_kind_survives_storage() {
        let now = Timestamp::from_seconds(1_700_000_007);
        for limit in every_kind(9) {
            let mut spent = limit.unspent();
            assert_eq!(limit.limit_state(&spent, now).remaining, 9);
            assert!(limit.take(&mut spent, 4, now).is_allowed());
            assert_eq!(limit.limit_state(&spent, now).remaining, 5, "{limit:?}");
            limit.give_back(&mut spent, 1, Some(now), now);
            assert_eq!(limit.spent_units(&spent, now), 3, "{limit:?}");
            assert!(!limit.is_unspent(&spent, now));
            assert!(limit.is_unspent(&spent, now.plus(2 * MINUTE)));
            assert!(limit.is_unspent(&limit.unspent(), now));
        }
    }

    #[test]
    fn usage_carries_over_to_a_limit_of_another_kind() {
        let now = Timestamp::from_seconds(1_700_000_007);
        for old in every_kind(9) {
            let mut spent = old.unspent();
            old.charge(&mut spent, 4, now);
            for new in every_kind(6) {
                let adopted = new.carry_over(&old, spent, now);
                assert_eq!(new.limit_state(&adopted, now).remaining, 2, "{old:?} to {new:?}");
                let fresh = new.carry_over(&old, old.unspent(), now);
                assert!(new.is_unspent(&fresh, now), "{old:?} to {new:?}");
            }
        }
    }
}
