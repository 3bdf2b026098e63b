//! Checks, refunds and resets of keys under policies.

use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::{Decision, LimitState, LimitUsage};
use weir_core::{PermitId, Timestamp};
use weir_store::Result;
use weir_store::tier::{LimitCheck, Policy};

use super::explanation::Explained;
use super::{AnyPolicy, TierService};
use crate::tier::events::{CheckDecided, CheckFailed};

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
    /// The permit that each key got, in the same order; empty if none wanted one.
    pub permits: Vec<Option<PermitId>>,
    /// A sentence for each key that says why, if that was asked for.
    pub explanations: Option<Vec<String>>,
}

/// A decision that no metric counts yet.
pub(super) struct UncountedDecision {
    pub(super) allowed: bool,
    pub(super) checks: Vec<CheckResult>,
    pub(super) explanations: Option<Vec<String>>,
    /// How many shadow policies would have denied it.
    pub(super) shadow_denied: u64,
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
        let (mut asks, mut wanted) = (Vec::with_capacity(checks.len()), Vec::new());
        for (at, check) in checks.iter().enumerate() {
            if let Some(policy) = definitions.policy(check.policy) {
                asks.push(LimitCheck { policy, key: check.key, cost: check.cost });
            } else if let Some(policy) = definitions.concurrency(check.policy) {
                wanted.push((at, Arc::clone(policy)));
            } else {
                return Ok(CheckOutcome::UnknownPolicy(at));
            }
        }
        if !wanted.is_empty() {
            // Boxed to keep this future small: most checks want no permits.
            let decided = Box::pin(self.check_with_permits(checks, &asks, &wanted, options)).await;
            return decided.map(CheckOutcome::Decided);
        }
        self.decide_with(&asks, options).await.map(CheckOutcome::Decided)
    }

    /// As [`TierService::check`], for policies that were looked up before.
    pub async fn decide(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<CheckDecision> {
        self.decide_with(asks, CheckOptions { peek, explain: false }).await
    }

    async fn decide_with(&self, asks: &[LimitCheck<'_>], options: CheckOptions) -> Result<CheckDecision> {
        let decided = self.decide_uncounted(asks, options).await?;
        let UncountedDecision { allowed, checks, explanations, shadow_denied } = decided;
        CheckDecided { is_allowed: allowed, shadow_denied }.emit(&self.metrics);
        Ok(CheckDecision { allowed, checks, permits: Vec::new(), explanations })
    }

    /// Decides without counting the decision.
    pub(super) async fn decide_uncounted(
        &self,
        asks: &[LimitCheck<'_>],
        options: CheckOptions,
    ) -> Result<UncountedDecision> {
        if asks.is_empty() {
            let explanations = options.explain.then(Vec::new);
            return Ok(UncountedDecision {
                allowed: true,
                checks: Vec::new(),
                explanations,
                shadow_denied: 0,
            });
        }
        let taken = self.limits.take(asks, options.peek).await;
        let taken = taken.inspect_err(|_| CheckFailed.emit(&self.metrics))?;
        if !options.peek {
            self.remember_checks(asks, &taken);
        }
        let results = asks.iter().zip(&taken.each);
        let is_shadow_denied = |(ask, (decision, _)): &(&LimitCheck<'_>, &(Decision, LimitUsage))| {
            ask.policy.spec.shadow && !decision.is_allowed()
        };
        let allowed = taken.decision.is_allowed();
        let shadow_denied = results.clone().filter(is_shadow_denied).count() as u64;
        let checks =
            results.map(|(ask, (decision, spent))| CheckResult::new(ask.policy, *decision, spent, taken.now));
        let checks: Vec<_> = checks.collect();
        let explained = Explained { asks, taken: &taken, results: &checks, peek: options.peek };
        let explanations = options.explain.then(|| explained.sentences());
        Ok(UncountedDecision { allowed, checks, explanations, shadow_denied })
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
        match self.any_policy(policy) {
            None => return Ok(false),
            Some(AnyPolicy::Limit(policy)) => self.limits.forget(&policy, key).await?,
            Some(AnyPolicy::Concurrency(policy)) => self.reset_permits(&policy, key).await?,
        }
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
