//! The naive engine of tier: maps behind locks, and the rules of core.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use weir_core::tier::{
    BucketLevel, Decision, KeyCharge, Limit, LimitDenial, LimitUsage, Rule, ScopedRule, TierRule, take_all,
};
use weir_core::{Clock, ManualClock, Timestamp};
use weir_store::Result;
use weir_store::tier::{LimitCheck, LimitOutcome, LimitStatus, LimitStore, Policy, TierOutcome};

#[derive(Debug)]
pub struct NaiveLimits {
    clock: ManualClock,
    spent: Mutex<HashMap<(u32, String), (Limit, LimitUsage)>>,
    tiers: Mutex<HashMap<String, (TierRule, [BucketLevel; 2])>>,
}

impl NaiveLimits {
    #[must_use]
    pub fn new(clock: ManualClock) -> Self {
        Self { clock, spent: Mutex::default(), tiers: Mutex::default() }
    }

    fn change(
        &self,
        policy: &Policy,
        key: &str,
        change: impl FnOnce(&Limit, &mut LimitUsage, Timestamp),
    ) -> (LimitUsage, Timestamp) {
        let now = self.clock.now();
        let (mut all, limit) = (self.spent.lock(), &policy.spec.limit);
        let mut spent = current(&all, policy, key, now);
        change(limit, &mut spent, now);
        all.insert((policy.scope(), key.to_owned()), (*limit, spent));
        (spent, now)
    }
}

fn current(
    all: &HashMap<(u32, String), (Limit, LimitUsage)>,
    policy: &Policy,
    key: &str,
    now: Timestamp,
) -> LimitUsage {
    let limit = &policy.spec.limit;
    match all.get(&(policy.scope(), key.to_owned())) {
        None => limit.unspent(),
        Some((old, spent)) if old == limit => *spent,
        Some((old, spent)) => limit.carry_over(old, *spent, now),
    }
}

#[async_trait]
impl LimitStore for NaiveLimits {
    async fn take(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome> {
        let (now, mut all) = (self.clock.now(), self.spent.lock());
        let is_same =
            |a: &LimitCheck<'_>, b: &LimitCheck<'_>| a.policy.scope() == b.policy.scope() && a.key == b.key;
        let cost = |ask: &LimitCheck<'_>| {
            asks.iter().filter(|other| is_same(ask, other)).map(|other| other.cost).sum()
        };
        let first = |ask: &LimitCheck<'_>| asks.iter().position(|other| is_same(ask, other));
        let firsts: Vec<usize> = (0..asks.len()).filter(|at| first(&asks[*at]) == Some(*at)).collect();
        let mut spent: Vec<LimitUsage> =
            firsts.iter().map(|at| current(&all, asks[*at].policy, asks[*at].key, now)).collect();
        let individual: Vec<Decision> = firsts
            .iter()
            .zip(&spent)
            .map(|(at, spent)| asks[*at].policy.spec.limit.take(&mut { *spent }, cost(&asks[*at]), now))
            .collect();
        let before = spent.clone();
        let binding: Vec<usize> = firsts.iter().copied().filter(|at| !asks[*at].policy.spec.shadow).collect();
        let mut claims: Vec<KeyCharge<'_, Limit>> = firsts
            .iter()
            .zip(&mut spent)
            .filter(|(at, _)| binding.contains(at))
            .map(|(at, spent)| KeyCharge {
                rule: &asks[*at].policy.spec.limit,
                spent,
                cost: cost(&asks[*at]),
            })
            .collect();
        let decision = match take_all(&mut claims, now) {
            Decision::Denied(refusal) => {
                Decision::Denied(LimitDenial { denied_by: binding[refusal.denied_by], ..refusal })
            }
            Decision::Allowed => Decision::Allowed,
        };
        for ((at, spent), individual) in firsts.iter().zip(&mut spent).zip(&individual) {
            if asks[*at].policy.spec.shadow
                && decision.is_allowed()
                && individual.is_allowed()
                && cost(&asks[*at]) > 0
            {
                asks[*at].policy.spec.limit.charge(spent, cost(&asks[*at]), now);
            }
        }
        let after = if peek { before } else { spent };
        if !peek {
            for (at, spent) in firsts.iter().zip(&after) {
                let key = (asks[*at].policy.scope(), asks[*at].key.to_owned());
                all.insert(key, (asks[*at].policy.spec.limit, *spent));
            }
        }
        let each = asks.iter().map(|ask| {
            let at =
                firsts.iter().position(|at| Some(*at) == first(ask)).expect("each key has a first position");
            (individual[at], after[at])
        });
        Ok(LimitOutcome { decision, each: each.collect(), now, decided_alone: false })
    }

    async fn charge(&self, policy: &Arc<Policy>, key: &str, cost: u32) -> Result<(LimitUsage, Timestamp)> {
        Ok(self.change(policy, key, |limit, spent, now| limit.charge(spent, cost, now)))
    }

    async fn give_back(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<(LimitUsage, Timestamp)> {
        Ok(self.change(policy, key, |limit, spent, now| {
            if !limit.is_unspent(spent, now) {
                limit.give_back(spent, cost, taken_at, now);
            }
        }))
    }

    async fn forget(&self, policy: &Arc<Policy>, key: &str) -> Result<()> {
        self.spent.lock().remove(&(policy.scope(), key.to_owned()));
        Ok(())
    }

    async fn take_tier(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<TierOutcome> {
        let now = self.clock.now();
        let mut tiers = self.tiers.lock();
        let mut spent = match tiers.get(user) {
            None => rule.rule.unspent(),
            Some((old, spent)) => rule.rule.carry_over(old, *spent, now),
        };
        let decision = rule.rule.take(&mut spent, cost, now);
        tiers.insert(user.to_owned(), (rule.rule, spent));
        Ok(TierOutcome { decision, spent, now })
    }

    async fn flush(&self) {}

    async fn drain(&self) {}

    fn status(&self) -> LimitStatus {
        LimitStatus { keys: self.spent.lock().len(), ..LimitStatus::default() }
    }
}
