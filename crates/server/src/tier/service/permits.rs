//! Permits of concurrency policies: what is in use until it is given back, or until its time is over.
//!
//! Permits are decided by the store and durable before a caller gets one, so a restart forgets none, and all servers of a store
//! count together, with Redis or without. A check that also names other policies takes the permits first; they are deleted
//! again when another policy denies, or when the caller does not hear of them ([`super::unclaimed`]). A crash in between leaves
//! them in use until their time is over.

use std::sync::Arc;
use std::time::Duration;

use weir_core::PermitId;
use weir_core::tier::{Decision, LimitDenial, PermitRelease};
use weir_store::tier::{
    ConcurrencyPolicy, ConcurrencySpec, LimitCheck, OnOutage, PermitAsk, PermitsOutcome, TakePermits,
};
use weir_store::{Error, Result};

use super::explanation::explain_permit;
use super::limits::{Check, CheckDecision, CheckOptions, CheckResult};
use super::unclaimed::TakenPermits;
use super::{TierService, within};
use crate::tier::events::CheckDecided;

/// When a caller that is denied for lack of the store may retry.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// An item of a check about a concurrency policy: its index in the check, and its policy.
pub(super) type PermitItem = (usize, Arc<ConcurrencyPolicy>);

/// The result of giving a permit back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// There is no such permit, or its time was over longer than an hour ago.
    Unknown,
    /// Its time was over.
    Expired,
    /// It was given back, by this call or an earlier one.
    Released { policy: String, key: String, cost: u32 },
}

impl TierService {
    /// Decides a check of which some items want permits. `asks` are the other items, in order.
    pub(super) async fn check_with_permits(
        &self,
        checks: &[Check<'_>],
        asks: &[LimitCheck<'_>],
        wanted: &[PermitItem],
        options: CheckOptions,
    ) -> Result<CheckDecision> {
        let take = TakePermits {
            asks: wanted.iter().map(|(at, policy)| self.permit_ask(policy, &checks[*at])).collect(),
            peek: options.peek,
        };
        let (TakenPermits { outcome: mut permits, unclaimed }, is_outage) = self.take_permits(&take).await?;
        let has_permits = permits.decision.is_allowed();
        let limits = CheckOptions { peek: options.peek || !has_permits, ..options };
        let limits = self.decide_uncounted(asks, limits).await?;
        let allowed = has_permits && limits.allowed;
        if let Some(unclaimed) = unclaimed {
            if allowed {
                // Nothing is waited for from here on: the caller is answered.
                unclaimed.keep();
            } else {
                unclaimed.void(&self.shared).await;
                // What the answer says is left is what is left without them.
                let peek = TakePermits { peek: true, ..take.clone() };
                permits = self.take_permits(&peek).await?.0.outcome;
            }
        }
        let is_shadow_denied =
            |(ask, each): &(&PermitAsk, &(Decision, _, bool))| ask.spec.shadow && !each.0.is_allowed();
        let shadow_denied = take.asks.iter().zip(&permits.each).filter(is_shadow_denied).count() as u64;
        let shadow_denied = shadow_denied + limits.shadow_denied;
        CheckDecided { is_allowed: allowed, shadow_denied }.emit(&self.metrics);
        let mut merged = Merged::new(limits.checks, limits.explanations, wanted.len());
        for (((at, policy), ask), (alone, state, is_taken)) in
            wanted.iter().zip(&take.asks).zip(&permits.each)
        {
            let retry_after = match alone {
                Decision::Allowed => Some(Duration::ZERO),
                Decision::Denied(denial) => denial.retry_after,
            };
            let is_allowed = policy.spec.shadow || alone.is_allowed();
            let result = CheckResult { allowed: is_allowed, limit_state: *state, retry_after };
            let permit = (allowed && *is_taken).then_some(ask.id);
            let explanation =
                options.explain.then(|| explain_permit(policy, ask.cost, &result, *alone, permit, is_outage));
            merged.insert(*at, result, permit, explanation);
        }
        Ok(merged.into_decision(allowed, options.explain))
    }

    /// How a key stands under a policy, and whether it would get a permit, with the reason. None is taken, and nothing is counted.
    pub(super) async fn peek_permits(
        &self,
        policy: &ConcurrencyPolicy,
        key: &str,
    ) -> Result<(CheckResult, String)> {
        let ask = self.permit_ask(policy, &Check { policy: policy.name.as_str(), key, cost: 1 });
        let take = TakePermits { asks: vec![ask], peek: true };
        let (taken, is_outage) = self.take_permits(&take).await?;
        let Some((alone, state, _)) = taken.outcome.each.first().copied() else {
            return Err(Error::failed("tier", "a permit was not decided"));
        };
        let retry_after = match alone {
            Decision::Allowed => Some(Duration::ZERO),
            Decision::Denied(denial) => denial.retry_after,
        };
        let allowed = policy.spec.shadow || alone.is_allowed();
        let result = CheckResult { allowed, limit_state: state, retry_after };
        let explanation = explain_permit(policy, 1, &result, alone, None, is_outage);
        Ok((result, explanation))
    }

    fn permit_ask(&self, policy: &ConcurrencyPolicy, check: &Check<'_>) -> PermitAsk {
        let ConcurrencyPolicy { name, scope, spec } = policy;
        let id = PermitId::new(self.now(), rand::random());
        let (policy, key) = (name.clone(), check.key.to_owned());
        PermitAsk { id, policy, scope: *scope, spec: *spec, key, cost: check.cost }
    }

    /// Returns the decision, and whether it was made without the store.
    async fn take_permits(&self, take: &TakePermits) -> Result<(TakenPermits, bool)> {
        let lane_key = take.asks.first().map_or("", |ask| &ask.key);
        match within(self.shared.timeout, self.permits.submit(lane_key, take.clone())).await {
            Err(Error::Unavailable { .. } | Error::NotDone { .. }) => {
                Ok((TakenPermits { outcome: without_store(take), unclaimed: None }, true))
            }
            taken => Ok((taken?, false)),
        }
    }

    /// Gives a permit back.
    pub async fn release(&self, id: PermitId) -> Result<ReleaseOutcome> {
        let released = within(self.shared.timeout, self.shared.store.release_permit(id)).await?;
        let Some(released) = released else { return Ok(ReleaseOutcome::Unknown) };
        Ok(match released.release {
            PermitRelease::Released | PermitRelease::AlreadyReleased => ReleaseOutcome::Released {
                policy: released.policy.to_string(),
                key: released.key,
                cost: released.permit.cost,
            },
            PermitRelease::Expired => ReleaseOutcome::Expired,
        })
    }

    /// The concurrency policy of a name.
    #[must_use]
    pub fn concurrency(&self, name: &str) -> Option<Arc<ConcurrencyPolicy>> {
        self.shared.definitions.snapshot().concurrency(name).cloned()
    }

    /// Deletes the open permits of a key.
    pub(super) async fn reset_permits(&self, policy: &ConcurrencyPolicy, key: &str) -> Result<()> {
        within(self.shared.timeout, self.shared.store.reset_permits(policy.scope, key)).await
    }
}

/// Decides without the store, which alone knows what is in use: what is not open is denied.
fn without_store(take: &TakePermits) -> PermitsOutcome {
    let closed = |spec: &ConcurrencySpec| spec.on_outage != OnOutage::Open && !spec.shadow;
    let denied_by = take.asks.iter().position(|ask| ask.cost > 0 && closed(&ask.spec));
    let each = take.asks.iter().map(|ask| {
        let is_denied = ask.cost > 0 && ask.spec.on_outage != OnOutage::Open;
        let denial = Decision::Denied(LimitDenial::single(Some(RETRY_AFTER)));
        let decision = if is_denied { denial } else { Decision::Allowed };
        (decision, ask.spec.rule.limit_state(&[], weir_core::Timestamp::EPOCH), false)
    });
    let decision = denied_by.map_or(Decision::Allowed, |denied_by| {
        Decision::Denied(LimitDenial { denied_by, retry_after: Some(RETRY_AFTER) })
    });
    PermitsOutcome { decision, each: each.collect() }
}

/// The results of all items, in the order of the check.
struct Merged {
    checks: Vec<CheckResult>,
    permits: Vec<Option<PermitId>>,
    explanations: Vec<String>,
}

impl Merged {
    fn new(checks: Vec<CheckResult>, explanations: Option<Vec<String>>, more: usize) -> Self {
        let mut permits = Vec::with_capacity(checks.len() + more);
        permits.resize(checks.len(), None);
        Self { checks, permits, explanations: explanations.unwrap_or_default() }
    }

    /// Inserts the result of an item. Items are inserted in the order of their indices.
    fn insert(
        &mut self,
        at: usize,
        result: CheckResult,
        permit: Option<PermitId>,
        explanation: Option<String>,
    ) {
        self.checks.insert(at, result);
        self.permits.insert(at, permit);
        if let Some(explanation) = explanation {
            self.explanations.insert(at, explanation);
        }
    }

    fn into_decision(self, allowed: bool, explain: bool) -> CheckDecision {
        let Self { checks, permits, explanations } = self;
        CheckDecision { allowed, checks, permits, explanations: explain.then_some(explanations) }
    }
}
