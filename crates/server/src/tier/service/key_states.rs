//! The state of one key under every policy, for operators, and what is remembered of decisions near a limit. Nothing is spent.

use std::sync::Arc;

use futures_util::stream::{self, StreamExt, TryStreamExt};
use weir_core::tier::{DAILY, Decision, LimitState, ScopedRule, TierRule};
use weir_store::tier::{LimitCheck, LimitOutcome, TierOutcome};
use weir_store::{Error, Result};

use super::limits::{CheckOptions, CheckResult};
use super::{AnyPolicy, TierService};
use crate::telemetry::near_limits::LimitDecision;

/// Policies that are asked at the same time.
const CONCURRENT_ASKS: usize = 16;
/// The most policies that are asked about one key.
pub(crate) const POLICIES_MAX: usize = 1_000;

/// How a key stands under one policy, and whether a call of cost 1 would be allowed now.
#[derive(Clone, Debug)]
pub(crate) struct KeyState {
    pub(crate) policy: AnyPolicy,
    pub(crate) result: CheckResult,
    /// Why, in a sentence.
    pub(crate) explanation: String,
}

impl TierService {
    /// Returns the state of a key under each policy, in order of name.
    /// Fails when the limit store does not answer.
    pub(crate) async fn key_states(&self, key: &str) -> Result<Vec<KeyState>> {
        let policies = self.policies(None, POLICIES_MAX);
        let states = stream::iter(policies).map(|policy| self.key_state(policy, key));
        states.buffered(CONCURRENT_ASKS).try_collect().await
    }

    /// Each policy is asked alone: in one decision the denial of one would be the denial of all.
    async fn key_state(&self, policy: AnyPolicy, key: &str) -> Result<KeyState> {
        let (result, explanation) = match &policy {
            AnyPolicy::Limit(limit) => {
                let asks = [LimitCheck { policy: limit, key, cost: 1 }];
                let options = CheckOptions { peek: true, explain: true };
                let decided = self.decide_uncounted(&asks, options).await?;
                let explanation = decided.explanations.into_iter().flatten().next();
                let Some(result) = decided.checks.into_iter().next() else {
                    return Err(Error::failed("tier", "a policy was not decided"));
                };
                (result, explanation.unwrap_or_default())
            }
            AnyPolicy::Concurrency(limit) => self.peek_permits(limit, key).await?,
        };
        Ok(KeyState { policy, result, explanation })
    }

    /// Remembers the keys of a decision that are near their limits.
    pub(super) fn remember_checks(&self, asks: &[LimitCheck<'_>], taken: &LimitOutcome) {
        for (at, (ask, (alone, spent))) in asks.iter().zip(&taken.each).enumerate() {
            let spec = &ask.policy.spec;
            let state = spec.limit.limit_state(spent, taken.now);
            let denial = match (taken.decision, alone) {
                (Decision::Denied(denial), _) if denial.denied_by == at && !spec.shadow => Some(denial),
                (_, Decision::Denied(denial)) if !spec.shadow => Some(*denial),
                _ => None,
            };
            let until = match denial {
                Some(denial) => denial.retry_after.map(|wait| taken.now.plus(wait)),
                None => Some(taken.now.plus(state.reset_after)),
            };
            self.near_limits.record(&LimitDecision {
                capability: "tier",
                limit_name: ask.policy.name.as_str(),
                key: ask.key,
                limit: state.limit,
                remaining: state.remaining,
                is_denied: denial.is_some(),
                at: taken.now,
                until,
            });
        }
    }

    /// As [`Self::remember_checks`], for a user's minute and day.
    pub(super) fn remember_tier(&self, user: &str, rule: &Arc<ScopedRule<TierRule>>, taken: &TierOutcome) {
        let ([daily, minute], [daily_level, minute_level]) = (&rule.rule, &taken.spent);
        let states: [(&str, bool, LimitState); 2] = [
            ("daily", true, daily.limit_state(daily_level, taken.now)),
            ("minute", false, minute.limit_state(minute_level, taken.now)),
        ];
        for (limit_name, is_daily, state) in states {
            let denial = match taken.decision {
                Decision::Denied(denial) if (denial.denied_by == DAILY) == is_daily => Some(denial),
                _ => None,
            };
            let wait = denial.map_or(Some(state.reset_after), |denial| denial.retry_after);
            self.near_limits.record(&LimitDecision {
                capability: "tier",
                limit_name,
                key: user,
                limit: state.limit,
                remaining: state.remaining,
                is_denied: denial.is_some(),
                at: taken.now,
                until: wait.map(|wait| taken.now.plus(wait)),
            });
        }
    }
}
