//! Decides without Redis, as each policy's `on_outage` says.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{Decision, LimitDenial, LimitUsage, Rule, ScopedRule, TierRule};
use weir_store::Result;
use weir_store::tier::{LimitCheck, LimitOutcome, LimitStore, OnOutage, Policy, TierOutcome};

use super::script_key::redis_name;
use super::{RedisLimits, policy_key_name};

/// When a caller that is denied for lack of Redis may retry.
const RETRY_AFTER: Duration = Duration::from_secs(1);

impl RedisLimits {
    pub(super) async fn take_without_redis(
        &self,
        checks: &[LimitCheck<'_>],
        peek: bool,
    ) -> Result<LimitOutcome> {
        self.shared.local_decisions.fetch_add(1, Ordering::Relaxed);
        let on_outage = |index: usize| checks[index].policy.spec.on_outage;
        let closed = (0..checks.len())
            .find(|index| on_outage(*index) == OnOutage::Closed && !checks[*index].policy.spec.shadow);
        let local_indices: Vec<usize> =
            (0..checks.len()).filter(|index| on_outage(*index) == OnOutage::Local).collect();
        let local: Vec<LimitCheck<'_>> = local_indices.iter().map(|index| checks[*index]).collect();
        // If a closed policy denies, the others are not spent.
        let taken = if local.is_empty() {
            LimitOutcome {
                decision: Decision::Allowed,
                each: Vec::new(),
                now: self.shared.clock.now(),
                decided_alone: true,
            }
        } else {
            self.shared.local.take(&local, peek || closed.is_some()).await?
        };
        if taken.decision.is_allowed() && !peek && closed.is_none() {
            for check in local.iter().filter(|check| check.cost > 0) {
                self.shared.mark_unsynced(policy_key_name(check.policy, check.key));
            }
        }
        let mut each: Vec<(Decision, LimitUsage)> = checks.iter().map(uncounted).collect();
        for (index, counted) in local_indices.iter().zip(taken.each) {
            each[*index] = counted;
        }
        let decision = match (closed, taken.decision) {
            (Some(index), _) => {
                Decision::Denied(LimitDenial { denied_by: index, retry_after: Some(RETRY_AFTER) })
            }
            (None, Decision::Denied(refusal)) => {
                let denied_by = local_indices.get(refusal.denied_by).copied().unwrap_or(0);
                Decision::Denied(LimitDenial { denied_by, ..refusal })
            }
            (None, Decision::Allowed) => Decision::Allowed,
        };
        Ok(LimitOutcome { decision, each, now: taken.now, decided_alone: true })
    }

    pub(super) async fn take_tier_without_redis(
        &self,
        user: &str,
        rule: &Arc<ScopedRule<TierRule>>,
        cost: u32,
    ) -> Result<TierOutcome> {
        self.shared.local_decisions.fetch_add(1, Ordering::Relaxed);
        let taken = self.shared.local.take_tier(user, rule, cost).await?;
        if taken.decision.is_allowed() && cost > 0 {
            for bucket in ["daily", "minute"] {
                self.shared.mark_unsynced(redis_name(rule.scope, bucket, user));
            }
        }
        Ok(taken)
    }

    pub(super) async fn charge_without_redis(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
    ) -> Result<(LimitUsage, Timestamp)> {
        self.shared.mark_unsynced(policy_key_name(policy, key));
        self.shared.local.charge(policy, key, cost).await
    }
}

/// Decides about a key of a policy that is not counted without Redis.
fn uncounted(check: &LimitCheck<'_>) -> (Decision, LimitUsage) {
    let unspent = check.policy.spec.limit.unspent();
    match check.policy.spec.on_outage {
        OnOutage::Closed => (Decision::Denied(LimitDenial::single(Some(RETRY_AFTER))), unspent),
        OnOutage::Open | OnOutage::Local => (Decision::Allowed, unspent),
    }
}
