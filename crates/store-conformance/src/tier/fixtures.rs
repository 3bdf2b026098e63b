//! What cases of tier start from.

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

/// A bucket of so many tokens that regains `refill` in a minute.
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

/// A policy under a number that no other case has: engines may share what holds their state.
pub fn policy(limit: Limit) -> Arc<Policy> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let scope =
        std::process::id().wrapping_mul(1_000) % 1_000_000_000 + NEXT.fetch_add(1, Ordering::Relaxed) + 1;
    named("p", scope, PolicySpec::plain(limit))
}

/// A policy that only observes.
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

/// A user's name that no other case has.
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
        assert_eq!(taken.decision, taken.each[0].0, "one key decides alone");
    }
    taken.decision
}

/// Where a key stands, without spending.
pub async fn limit_state<H: HasLimits>(h: &H, policy: &Arc<Policy>, key: &str) -> LimitState {
    let ask = LimitCheck { policy, key, cost: 0 };
    let taken = h.limits().take(&[ask], true).await.expect("take must succeed");
    policy.spec.limit.limit_state(&taken.each[0].1, taken.now)
}

pub async fn remaining<H: HasLimits>(h: &H, policy: &Arc<Policy>, key: &str) -> u32 {
    limit_state(h, policy, key).await.remaining
}

/// How long a denied key has to wait; none when it never fits.
pub fn retry_after(decision: Decision) -> Option<Duration> {
    match decision {
        Decision::Denied(refusal) => refusal.retry_after,
        Decision::Allowed => panic!("it must be denied"),
    }
}

pub async fn call<H: HasLimits>(h: &H, user: &str, rule: &Arc<ScopedRule<TierRule>>) -> TierOutcome {
    h.limits().take_tier(user, rule, 1).await.expect("take_tier must succeed")
}

/// What a user has left of its day and its minute.
pub async fn remaining_of_tier<H: HasLimits>(
    h: &H,
    user: &str,
    rule: &Arc<ScopedRule<TierRule>>,
) -> (u32, u32) {
    let taken = h.limits().take_tier(user, rule, 0).await.expect("take_tier must succeed");
    let ([daily, minute], [day, level]) = (&rule.rule, &taken.spent);
    (daily.limit_state(day, taken.now).remaining, minute.limit_state(level, taken.now).remaining)
}

/// Another server that counts together with this one; `None` where each counts for itself.
pub async fn server_sharing_counts<H: HasLimits>(h: &H) -> Option<H> {
    if H::servers_share_counts() { h.second_server().await } else { None }
}

/// A plan that is not the free one.
pub const PRO: Plan = Plan::ProMonthly;
