//! Checks, refunds and resets of keys under policies.

use std::sync::Arc;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{Decision, LimitState, LimitUsage};
use weir_store::Result;
use weir_store::tier::{LimitCheck, Policy};

use super::TierService;
use super::explanation::Explained;

/// One key of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check<'a> {
    /// The name of the policy.
    pub policy: &'a str,
    pub key: &'a str,
    pub cost: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckOutcome {
    /// The policy at this index is unknown. Nothing was spent.
    UnknownPolicy(usize),
    Decided(CheckDecision),
}

/// A decision about several keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckDecision {
    /// Whether all keys are allowed. If so, all were spent, otherwise none.
    pub allowed: bool,
    /// The result of each key, in the order of the checks.
    pub checks: Vec<CheckResult>,
    /// A sentence for each key that says why, if that was asked for.
    pub explanations: Option<Vec<String>>,
}

/// How a check is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckOptions {
    /// Whether to decide without spending.
    pub peek: bool,
    /// Whether to say why.
    pub explain: bool,
}

/// The result for one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckResult {
    /// Whether this key by itself would have been allowed. A shadow policy allows everything.
    pub allowed: bool,
    /// The key's state after the decision.
    pub limit_state: LimitState,
    /// How long until the cost fits: zero if it fits now, `None` if it never does.
    pub retry_after: Option<Duration>,
}

impl CheckResult {
    pub(super) fn new(policy: &Policy, decision: Decision, spent: &LimitUsage, now: Timestamp) -> Self {
        let retry_after = match decision {
            Decision::Allowed => Some(Duration::ZERO),
            Decision::Denied(refusal) => refusal.retry_after,
        };
        Self {
            allowed: policy.spec.shadow || decision.is_allowed(),
            limit_state: policy.spec.limit.limit_state(spent, now),
            retry_after,
        }
    }
}

impl TierService {
    /// Spends for all checks or for none; with `peek`, never.
    /// Fails when the limit store does not answer.
    pub async fn check(&self, checks: &[Check<'_>], options: CheckOptions) -> Result<CheckOutcome> {
        let definitions = self.shared.definitions.snapshot();
        let mut asks = Vec::with_capacity(checks.len());
        for (at, check) in checks.iter().enumerate() {
            let Some(policy) = definitions.policy(check.policy) else {
                return Ok(CheckOutcome::UnknownPolicy(at));
            };
            asks.push(LimitCheck { policy, key: check.key, cost: check.cost });
        }
        self.decide_with(&asks, options).await.map(CheckOutcome::Decided)
    }

    /// As [`TierService::check`], for policies that were looked up before.
    pub async fn decide(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<CheckDecision> {
        self.decide_with(asks, CheckOptions { peek, explain: false }).await
    }

    async fn decide_with(&self, asks: &[LimitCheck<'_>], options: CheckOptions) -> Result<CheckDecision> {
        let taken = self.limits.take(asks, options.peek).await;
        let taken = taken.inspect_err(|_| {
            self.metrics.check_failed.inc();
        })?;
        let results = asks.iter().zip(&taken.each);
        let is_shadow_denied = |(ask, (decision, _)): &(&LimitCheck<'_>, &(Decision, LimitUsage))| {
            ask.policy.spec.shadow && !decision.is_allowed()
        };
        let allowed = taken.decision.is_allowed();
        self.metrics.count_check(allowed, results.clone().filter(is_shadow_denied).count() as u64);
        let checks =
            results.map(|(ask, (decision, spent))| CheckResult::new(ask.policy, *decision, spent, taken.now));
        let checks: Vec<_> = checks.collect();
        let explained = Explained { asks, taken: &taken, results: &checks, peek: options.peek };
        let explanations = options.explain.then(|| explained.sentences());
        Ok(CheckDecision { allowed, checks, explanations })
    }

    /// Gives back spending, up to the limit. Returns the key's state after that, or `None` for an unknown policy.
    /// Fails when the limit store does not answer.
    pub async fn refund(&self, policy: &str, key: &str, cost: u32) -> Result<Option<LimitState>> {
        let Some(policy) = self.policy(policy) else { return Ok(None) };
        let (spent, now) = self.limits.give_back(&policy, key, cost, None).await?;
        Ok(Some(policy.spec.limit.limit_state(&spent, now)))
    }

    /// Forgets all spending of a key; returns false for an unknown policy.
    /// Fails when the limit store does not answer.
    pub async fn reset_key(&self, policy: &str, key: &str) -> Result<bool> {
        let Some(policy) = self.policy(policy) else { return Ok(false) };
        self.limits.forget(&policy, key).await?;
        Ok(true)
    }

    /// Spends for one key. The decision is that of the limit, also for a shadow policy.
    pub(super) async fn take_one(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
    ) -> Result<(Decision, CheckResult, Timestamp)> {
        let taken = self.limits.take(&[LimitCheck { policy, key, cost }], false).await?;
        let (decision, spent) = taken.each.first().copied().unwrap_or((taken.decision, LimitUsage(0, 0, 0)));
        Ok((decision, CheckResult::new(policy, decision, &spent, taken.now), taken.now))
    }
}
