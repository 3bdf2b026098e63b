//! Holds, for work whose cost is known only afterwards.
//!
//! A hold spends its estimate when it is created, so nothing has to happen when it expires: the estimate stays spent.
//! Settling the hold in time corrects the estimate, once.

use std::time::Duration;

use super::rule::Rule;
use crate::Timestamp;

/// An estimate that was spent and can be corrected until it expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The estimated cost, which was spent.
    pub cost: u32,
    pub taken_at: Timestamp,
    pub expires_at: Timestamp,
    /// The true cost, once the hold is settled.
    pub settled: Option<u32>,
}

/// The outcome of settling a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum HoldSettlement {
    /// The hold is settled now, and the usage has to be corrected.
    Settled(Correction),
    /// The hold was settled before at this cost, which is returned again whatever the new cost is.
    AlreadySettled(u32),
    /// The hold has expired; its estimate stays spent.
    Expired,
}

/// The difference between the estimate and the true cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Correction {
    None,
    /// The cost was higher: this much is spent in addition, as a debt if there is no room.
    Charge(u32),
    /// The cost was lower: this much is given back.
    GiveBack(u32),
}

impl Hold {
    /// Creates a hold of `cost`, which the caller has spent at `now`.
    #[must_use]
    pub fn new(cost: u32, now: Timestamp, ttl: Duration) -> Self {
        Self { cost, taken_at: now, expires_at: now.plus(ttl), settled: None }
    }

    #[must_use]
    pub fn has_expired(&self, now: Timestamp) -> bool {
        self.settled.is_none() && now >= self.expires_at
    }

    /// Settles the hold at its true cost.
    pub fn settle(&mut self, cost: u32, now: Timestamp) -> HoldSettlement {
        if let Some(settled) = self.settled {
            return HoldSettlement::AlreadySettled(settled);
        }
        if self.has_expired(now) {
            return HoldSettlement::Expired;
        }
        self.settled = Some(cost);
        let more = cost.saturating_sub(self.cost);
        let less = self.cost.saturating_sub(cost);
        HoldSettlement::Settled(match (more, less) {
            (0, 0) => Correction::None,
            (0, less) => Correction::GiveBack(less),
            (more, _) => Correction::Charge(more),
        })
    }

    /// Applies the correction to the usage that the hold was taken from.
    pub fn correct<R: Rule>(&self, correction: Correction, rule: &R, spent: &mut R::Usage, now: Timestamp) {
        match correction {
            Correction::None => {}
            Correction::Charge(more) => rule.charge(spent, more, now),
            Correction::GiveBack(less) => rule.give_back(spent, less, Some(self.taken_at), now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::TokenBucket;
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_seconds(seconds)
    }

    fn remaining_after(estimate: u32, cost: u32) -> (u32, HoldSettlement) {
        let bucket = TokenBucket::new(100, 1, Duration::from_secs(3_600)).unwrap();
        let mut level = bucket.unspent();
        assert!(bucket.take(&mut level, estimate, at(0)).is_allowed());
        let mut hold = Hold::new(estimate, at(0), MINUTE);
        let settlement = hold.settle(cost, at(1));
        if let HoldSettlement::Settled(correction) = settlement {
            hold.correct(correction, &bucket, &mut level, at(1));
        }
        (bucket.limit_state(&level, at(1)).remaining, settlement)
    }

    #[test]
    fn settling_corrects_the_estimate_both_ways() {
        assert_eq!(remaining_after(40, 40), (60, HoldSettlement::Settled(Correction::None)));
        assert_eq!(remaining_after(40, 10), (90, HoldSettlement::Settled(Correction::GiveBack(30))));
        assert_eq!(remaining_after(40, 0), (100, HoldSettlement::Settled(Correction::GiveBack(40))));
        assert_eq!(remaining_after(40, 70), (30, HoldSettlement::Settled(Correction::Charge(30))));
        assert_eq!(remaining_after(40, 400), (0, HoldSettlement::Settled(Correction::Charge(360))), "a debt");
    }

    #[test]
    fn a_hold_is_settled_once_and_returns_the_same_cost_even_after_its_expiry() {
        let mut hold = Hold::new(5, at(0), MINUTE);
        assert_eq!(hold.settle(3, at(59)), HoldSettlement::Settled(Correction::GiveBack(2)));
        assert_eq!(hold.settle(5, at(59)), HoldSettlement::AlreadySettled(3));
        assert_eq!(hold.settle(0, at(600)), HoldSettlement::AlreadySettled(3));
    }

    #[test]
    fn an_expired_hold_stays_spent() {
        let mut hold = Hold::new(5, at(0), MINUTE);
        assert!(!hold.has_expired(Timestamp::from_micros(at(60).as_micros() - 1)));
        assert_eq!(hold.settle(0, at(60)), HoldSettlement::Expired);
        assert_eq!(hold.settled, None);
    }
}
