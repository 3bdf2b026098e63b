//! What the tiers of plans allow.

use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::{DAILY, Decision, LimitDenial, MINUTE, Tier, TierLimits};

use super::fixtures::{call, remaining_of_tier, rule, server_sharing_counts, tier_rule, unique_user};
use crate::HasLimits;

pub async fn a_free_user_has_8_at_once_and_5_a_minute<H: HasLimits>() {
    let h = H::open().await;
    let (user, free) = (unique_user(), tier_rule(Tier::Free));
    assert_eq!(remaining_of_tier(&h, &user, &free).await, (50, 8));
    for n in 1..=8 {
        assert!(call(&h, &user, &free).await.decision.is_allowed());
        assert_eq!(remaining_of_tier(&h, &user, &free).await, (50 - n, 8 - n));
    }
    let wait = Some(Duration::from_secs(12));
    let denied = Decision::Denied(LimitDenial { denied_by: MINUTE, retry_after: wait });
    assert_eq!(call(&h, &user, &free).await.decision, denied);
    h.clock().advance(Duration::from_micros(11_999_999));
    assert!(!call(&h, &user, &free).await.decision.is_allowed());
    h.clock().advance(Duration::from_micros(1));
    assert!(call(&h, &user, &free).await.decision.is_allowed());
}

pub async fn an_exhausted_day_is_reported_before_an_exhausted_minute<H: HasLimits>() {
    let h = H::open().await;
    let (user, few) = (unique_user(), rule(TierLimits::new(1, 2, 2).expect("valid")));
    for _ in 0..2 {
        assert!(call(&h, &user, &few).await.decision.is_allowed());
    }
    let Decision::Denied(refusal) = call(&h, &user, &few).await.decision else {
        panic!("the decision must be a denial")
    };
    assert_eq!(refusal.denied_by, DAILY, "both are exhausted, and the day is reported");
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(43_200)));
}

pub async fn a_denied_minute_spends_nothing_of_the_day<H: HasLimits>() {
    let h = H::open().await;
    let (user, few) = (unique_user(), rule(TierLimits::new(1, 1, 10).expect("valid")));
    assert!(call(&h, &user, &few).await.decision.is_allowed());
    for _ in 0..20 {
        assert!(!call(&h, &user, &few).await.decision.is_allowed());
    }
    assert_eq!(remaining_of_tier(&h, &user, &few).await, (9, 0));
}

pub async fn a_new_plan_keeps_what_was_spent<H: HasLimits>() {
    let h = H::open().await;
    let (user, free, pro) = (unique_user(), tier_rule(Tier::Free), tier_rule(Tier::Pro));
    for _ in 0..8 {
        assert!(call(&h, &user, &free).await.decision.is_allowed());
    }
    assert_eq!(remaining_of_tier(&h, &user, &pro).await, (492, 32));
    assert!(call(&h, &user, &pro).await.decision.is_allowed());
    assert!(!call(&h, &user, &free).await.decision.is_allowed());
    assert_eq!(remaining_of_tier(&h, &user, &free).await, (41, 0));
}

async fn count_parallel_calls<H: HasLimits>(hs: &[Arc<H>]) -> u32 {
    let (user, free) = (unique_user(), tier_rule(Tier::Free));
    let calls: Vec<_> = (0..200)
        .map(|n| {
            let (h, user, free) = (Arc::clone(&hs[n % hs.len()]), user.clone(), Arc::clone(&free));
            tokio::spawn(async move { call(&*h, &user, &free).await.decision.is_allowed() })
        })
        .collect();
    let mut passed = 0;
    for call in calls {
        passed += u32::from(call.await.expect("a call"));
    }
    passed
}

pub async fn parallel_calls_of_a_free_user_pass_8_times<H: HasLimits>() {
    assert_eq!(count_parallel_calls(&[Arc::new(H::open().await)]).await, 8);
}

pub async fn two_servers_pass_a_free_user_8_times<H: HasLimits>() {
    let h = H::open().await;
    let Some(other) = server_sharing_counts(&h).await else { return };
    assert_eq!(count_parallel_calls(&[Arc::new(h), Arc::new(other)]).await, 8);
}
