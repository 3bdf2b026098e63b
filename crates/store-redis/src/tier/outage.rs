//! Decisions without Redis, as each policy wants them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{Decision, LimitDenial, LimitUsage, Rule, ScopedRule, TierRule};
use weir_store::Result;
use weir_store::tier::{LimitCheck, LimitOutcome, LimitStore, OnOutage, Policy, TierOutcome};

use super::part::name;
use super::{Inner, RedisLimits, key_of};

/// When whoever is denied for want of Redis may ask again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

impl RedisLimits {
    pub(super) async fn take_alone(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome> {
        self.inner.alone.fetch_add(1, Ordering::Relaxed);
        let choice = |at: usize| asks[at].policy.spec.on_outage;
        let closed =
            (0..asks.len()).find(|at| choice(*at) == OnOutage::Closed && !asks[*at].policy.spec.shadow);
        let ours: Vec<usize> = (0..asks.len()).filter(|at| choice(*at) == OnOutage::Local).collect();
        let local: Vec<LimitCheck<'_>> = ours.iter().map(|at| asks[*at]).collect();
        // What is denied for the sake of another is not spent.
        let taken = if local.is_empty() {
            LimitOutcome { decision: Decision::Allowed, each: Vec::new(), now: self.inner.clock.now() }
        } else {
            self.inner.local.take(&local, peek || closed.is_some()).await?
        };
        if taken.decision.is_allowed() && !peek && closed.is_none() {
            for ask in local.iter().filter(|ask| ask.cost > 0) {
                self.inner.remember_untold(key_of(ask.policy, ask.key));
            }
        }
        let mut told = ours.iter().zip(taken.each).collect::<Vec<_>>().into_iter();
        let mut next = told.next();
        let each = (0..asks.len()).map(|at| match next {
            Some((place, own)) if *place == at => {
                next = told.next();
                own
            }
            _ => without_count(&asks[at]),
        });
        let each = each.collect();
        let decision = match (closed, taken.decision) {
            (Some(at), _) => Decision::Denied(LimitDenial { denied_by: at, retry_after: Some(RETRY_AFTER) }),
            (None, Decision::Denied(refusal)) => {
                let denied_by = ours.get(refusal.denied_by).copied().unwrap_or(0);
                Decision::Denied(LimitDenial { denied_by, ..refusal })
            }
            (None, Decision::Allowed) => Decision::Allowed,
        };
        Ok(LimitOutcome { decision, each, now: taken.now })
    }

    pub(super) async fn take_tier_alone(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<TierOutcome> {
        self.inner.alone.fetch_add(1, Ordering::Relaxed);
        let taken = self.inner.local.take_tier(user, rule, cost).await?;
        if taken.decision.is_allowed() && cost > 0 {
            for word in ["daily", "minute"] {
                self.inner.remember_untold(name(rule.scope, word, user));
            }
        }
        Ok(taken)
    }

    pub(super) async fn charge_alone(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
    ) -> Result<(LimitUsage, Timestamp)> {
        self.inner.remember_untold(key_of(policy, key));
        self.inner.local.charge(policy, key, cost).await
    }

    /// Given back here alone: Redis goes on from what it knew, which is the safe side.
    pub(super) async fn give_back_alone(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<(LimitUsage, Timestamp)> {
        self.inner.local.give_back(policy, key, cost, taken_at).await
    }
}

/// What a key is told that nobody counts.
fn without_count(ask: &LimitCheck<'_>) -> (Decision, LimitUsage) {
    let unspent = ask.policy.spec.limit.unspent();
    match ask.policy.spec.on_outage {
        OnOutage::Closed => (Decision::Denied(LimitDenial::single(Some(RETRY_AFTER))), unspent),
        OnOutage::Open | OnOutage::Local => (Decision::Allowed, unspent),
    }
}

impl Inner {
    /// Takes over that a key has spent less than was known, or nothing.
    pub(super) fn learn_less(&self, policy: &Arc<Policy>, key: &str, spent: LimitUsage) {
        let now = self.clock.now();
        if policy.spec.limit.is_unspent(&spent, now) {
            self.local.unlearn(policy, key);
        }
    }
}
