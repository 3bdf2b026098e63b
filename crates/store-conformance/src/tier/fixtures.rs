//! Helpers for the cases of tier.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use weir_core::tier::{
    Decision, FixedWindow, Limit, LimitState, Plan, ScopedRule, SlidingWindow, Tier, TierLimits, TierRule,
    TokenBucket,
};
use weir_core::{PolicyName, UserId};
use weir_store::tier::{LimitCheck, LimitOutcome, Policy, PolicySpec, TIER_SCOPE, TierOutcome};

use crate::HasLimits;

pub const MINUTE: Duration = Duration::from_secs(60);

/// A bucket of `capacity` tokens that regains `refill` tokens a minute.
pub fn bucket(capacity: u32, refill: u32) -> Limit {
    Limit::TokenBucket(TokenBucket::new(capacity, refill, MINUTE).expect("the suite's limits are valid"))
}

/// A fixed window of a minute.
pub fn fixed(limit: u32) -> Limit {
    Limit::FixedWindow(FixedWindow::new(limit, MINUTE).expect("the suite's limits are valid"))
}

/// A sliding window of a minute.
pub fn sliding(limit: u32) -> Limit {
    Limit::SlidingWindow(SlidingWindow::new(limit, MINUTE).expect("the suite's limits are valid"))
}

/// A policy with a scope that no other case has, since engines may share a Redis.
pub fn policy(limit: Limit) -> Arc<Policy> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let scope =
        std::process::id().wrapping_mul(1_000) % 1_000_000_000 + NEXT.fetch_add(1, Ordering::Relaxed) + 1;
    named("p", scope, PolicySpec::plain(limit))
}

/// A policy in shadow mode.
pub fn shadow(limit: Limit) -> Arc<Policy> {
    let plain = policy(limit);
    named("shadow", plain.scope(), PolicySpec { shadow: true, ..plain.spec.clone() })
}

/// The same policy with another limit.
pub fn with_limit(policy: &Policy, limit: Limit) -> Arc<Policy> {
    named(policy.name.as_str(), policy.scope(), PolicySpec { limit, ..policy.spec.clone() })
}

fn named(name: &str, scope: u32, spec: PolicySpec) -> Arc<Policy> {
    Arc::new(Policy::new(policy_name(name), scope, spec))
}

pub fn policy_name(name: &str) -> PolicyName {
    PolicyName::parse(name).expect("the suite's names are valid")
}

pub fn user(name: &str) -> UserId {
    UserId::parse(name).expect("the suite's users are valid")
}

/// A user id that no other case has.
pub fn unique_user() -> String {
    let limit = policy(bucket(1, 1));
    format!("user-{}-{}", std::process::id(), limit.scope())
}

pub fn tier_rule(tier: Tier) -> Arc<ScopedRule<TierRule>> {
    rule(tier.defaults())
}

pub fn rule(limits: TierLimits) -> Arc<ScopedRule<TierRule>> {
    Arc::new(ScopedRule { scope: TIER_SCOPE, rule: limits.rule() })
}

pub async fn take_all<H: HasLimits>(h: &H, asks: &[(&Arc<Policy>, &str, u32)]) -> LimitOutcome {
    let asks: Vec<LimitCheck<'_>> =
        asks.iter().map(|&(policy, key, cost)| LimitCheck { policy, key, cost }).collect();
    h.limits().take(&asks, false).await.expect("take must succeed")
}

pub async fn take<H: HasLimits>(h: &H, policy: &Arc<Policy>, key: &str, cost: u32) -> Decision {
    let taken = take_all(h, &[(policy, key, cost)]).await;
    if !policy.spec.shadow {
        assert_eq!(taken.decision, taken.each[0].0, "with one key, its decision is the whole decision");
    }
    taken.decision
}

/// Reads the state of a key without spending.
pub async fn limit_state<H: HasLimits>(h: &H, policy: &Arc<Policy>, key: &str) -> LimitState {
    let ask = LimitCheck { policy, key, cost: 0 };
    let taken = h.limits().take(&[ask], true).await.expect("take must succeed");
    policy.spec.limit.limit_state(&taken.each[0].1, taken.now)
}

pub async fn remaining<H: HasLimits>(h: &H, policy: &Arc<Policy>, key: &str) -> u32 {
    limit_state(h, policy, key).await.remaining
}

/// The `retry_after` of a denial; `None` if the cost never fits.
pub fn retry_after(decision: Decision) -> Option<Duration> {
    match decision {
        Decision::Denied(refusal) => refusal.retry_after,
        Decision::Allowed => panic!("the decision must be a denial"),
    }
}

pub async fn call<H: HasLimits>(h: &H, user: &str, rule: &Arc<ScopedRule<TierRule>>) -> TierOutcome {
    h.limits().take_tier(user, rule, 1).await.expect("take_tier must succeed")
}

/// What remains of a user's day and minute.
pub async fn remaining_of_tier<H: HasLimits>(
    h: &H,
    user: &str,
    rule: &Arc<ScopedRule<TierRule>>,
) -> (u32, u32) {
    let taken = h.limits().take_tier(user, rule, 0).await.expect("take_tier must succeed");
    let ([daily, minute], [day, level]) = (&rule.rule, &taken.spent);
    (daily.limit_state(day, taken.now).remaining, minute.limit_state(level, taken.now).remaining)
}

/// A second server that shares counts with this one; `None` if each counts for itself.
pub async fn server_sharing_counts<H: HasLimits>(h: &H) -> Option<H> {
    if H::servers_share_counts() { h.second_server().await } else { None }
}

pub const PRO: Plan = Plan::ProMonthly;
