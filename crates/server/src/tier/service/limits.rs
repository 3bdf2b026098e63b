//! Policies at work: checks, refunds and resets.

use std::sync::Arc;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{Decision, LimitState, LimitUsage};
use weir_store::Result;
use weir_store::tier::{LimitCheck, Policy};

use super::TierService;

/// One part of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check<'a> {
    /// The name of the policy.
    pub policy: &'a str,
    /// The key.
    pub key: &'a str,
    /// What it asks for.
    pub cost: u32,
}

/// What came of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckOutcome {
    /// The policy at this place is unknown. Nothing was spent.
    UnknownPolicy(usize),
    /// It was decided.
    Decided(Decided),
}

/// A decision about several keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// Whether all of them are allowed, and spent; none is otherwise.
    pub allowed: bool,
    /// Each of them, in the order they were asked.
    pub checks: Vec<Answer>,
}

/// What one key is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether it alone would have been allowed. A policy that only observes allows everything.
    pub allowed: bool,
    /// Where it stands after the decision.
    pub limit_state: LimitState,
    /// How long it has to wait: nothing when there is room, none when it never fits.
    pub retry_after: Option<Duration>,
}

impl Answer {
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
    /// Spends for all checks or for none; with `peek` nothing is spent in any case.
    /// Fails when the engine of limits does not answer.
    pub async fn check(&self, checks: &[Check<'_>], peek: bool) -> Result<CheckOutcome> {
        let definitions = self.shared.definitions.get();
        let mut asks = Vec::with_capacity(checks.len());
        for (at, check) in checks.iter().enumerate() {
            let Some(policy) = definitions.policy(check.policy) else {
                return Ok(CheckOutcome::UnknownPolicy(at));
            };
            asks.push(LimitCheck { policy, key: check.key, cost: check.cost });
        }
        self.decide(&asks, peek).await.map(CheckOutcome::Decided)
    }

    /// The same for policies that were looked up before.
    /// Fails when the engine of limits does not answer.
    pub async fn decide(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<Decided> {
        let taken = self.limits.take(asks, peek).await;
        let taken = taken.inspect_err(|_| {
            self.metrics.check_failed.inc();
        })?;
        let told = asks.iter().zip(&taken.each);
        let shadowed = told.clone().filter(|(ask, (alone, _))| ask.policy.spec.shadow && !alone.is_allowed());
        let allowed = taken.decision.is_allowed();
        self.metrics.count_check(allowed, shadowed.count() as u64);
        let checks = told.map(|(ask, (alone, spent))| Answer::new(ask.policy, *alone, spent, taken.now));
        Ok(Decided { allowed, checks: checks.collect() })
    }

    /// Gives back what was spent, never past full. Answers where the key stands then; none for an unknown policy.
    /// Fails when the engine of limits does not answer.
    pub async fn refund(&self, policy: &str, key: &str, cost: u32) -> Result<Option<LimitState>> {
        let Some(policy) = self.policy(policy) else { return Ok(None) };
        let (spent, now) = self.limits.give_back(&policy, key, cost, None).await?;
        Ok(Some(policy.spec.limit.limit_state(&spent, now)))
    }

    /// Makes a key as good as new; false for an unknown policy.
    /// Fails when the engine of limits does not answer.
    pub async fn reset_key(&self, policy: &str, key: &str) -> Result<bool> {
        let Some(policy) = self.policy(policy) else { return Ok(false) };
        self.limits.forget(&policy, key).await?;
        Ok(true)
    }

    pub(super) async fn take_one(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
    ) -> Result<(Decision, Answer, Timestamp)> {
        let taken = self.limits.take(&[LimitCheck { policy, key, cost }], false).await?;
        let (alone, spent) = taken.each.first().copied().unwrap_or((taken.decision, LimitUsage(0, 0, 0)));
        Ok((alone, Answer::new(policy, alone, &spent, taken.now), taken.now))
    }
}
