//! What survives a clean restart.

use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::{HoldSettlement, Tier};
use weir_core::{Clock, HoldId};
use weir_store::tier::{LimitCheck, NewHold, Origin, PolicySpec, SpentRecord, SubscriptionTerms};

use super::fixtures::{
    MINUTE, PRO, bucket, call, fixed, policy, policy_name, remaining, remaining_of_tier, sliding, take,
    tier_rule, unique_user, user,
};
use crate::HasLimits;

pub async fn spent_amounts_survive_a_restart<H: HasLimits>() {
    let h = H::open().await;
    let policies = [policy(bucket(5, 5)), policy(fixed(5)), policy(sliding(5))];
    let (user_id, free) = (unique_user(), tier_rule(Tier::Free));
    for policy in &policies {
        assert!(take(&h, policy, "k", 4).await.is_allowed());
    }
    for _ in 0..3 {
        assert!(call(&h, &user_id, &free).await.decision.is_allowed());
    }
    let h = h.reopen().await;
    for policy in &policies {
        assert_eq!(remaining(&h, policy, "k").await, 1);
    }
    assert_eq!(remaining_of_tier(&h, &user_id, &free).await, (47, 5));
    h.clock().advance(Duration::from_secs(12));
    let h = h.reopen().await;
    assert_eq!(remaining(&h, &policies[0], "k").await, 2, "it refills across restarts");
}

pub async fn a_forgotten_key_stays_forgotten_after_a_restart<H: HasLimits>() {
    let h = H::open().await;
    let policy = policy(fixed(5));
    assert!(take(&h, &policy, "k", 5).await.is_allowed());
    let h = h.reopen().await;
    h.limits().forget(&policy, "k").await.expect("forget must succeed");
    let h = h.reopen().await;
    assert_eq!(remaining(&h, &policy, "k").await, 5);
}

pub async fn definitions_and_holds_survive_a_restart<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let terms = SubscriptionTerms { expires_at: Some(h.clock().now().plus(MINUTE)), ..PRO.into() };
    store.put_subscription(&user("u"), terms).await.expect("an answer");
    store.put_tier(Tier::Pro, Tier::Business.defaults()).await.expect("an answer");
    store.put_limits_enabled(false).await.expect("an answer");
    let spec = PolicySpec::plain(fixed(5));
    let policy = store.put_policy(&policy_name("p"), &spec, Origin::Operator).await.expect("an answer");
    let (id, now) = (HoldId::new(crate::START, [1; 10]), crate::START);
    let (name, key) = (policy_name("p"), "k".to_owned());
    let hold = NewHold { id, policy: name, scope: 1, key, cost: 9, taken_at: now, ttl: MINUTE };
    store.put_hold(hold).await.expect("an answer");
    drop(store);
    let h = h.reopen().await;
    let store = h.definitions().expect("the engine has definitions");
    assert_eq!(store.subscription(&user("u")).await.expect("an answer").map(|s| s.terms), Some(terms));
    assert_eq!(store.limits_enabled().await.expect("an answer"), Some(false));
    assert_eq!(store.tiers().await.expect("an answer"), [(Tier::Pro, Tier::Business.defaults())]);
    assert_eq!(store.policies().await.expect("an answer"), Vec::from_iter(policy));
    let settled = store.settle_hold(id, 4).await.expect("an answer").expect("the row exists");
    assert!(matches!(settled.settlement, HoldSettlement::Settled(_)));
}

pub async fn everything_spent_before_a_flush_is_in_the_store<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let policy = policy(fixed(1_000));
    // Concurrent tasks, so that some flush while the commit of another is in progress.
    let tasks = (0..32_u32).map(|n| {
        let (limits, store, policy) = (h.limits(), Arc::clone(&store), Arc::clone(&policy));
        tokio::spawn(async move {
            let (key, cost) = (format!("k{n:02}"), n + 1);
            let ask = LimitCheck { policy: &policy, key: &key, cost };
            let taken = limits.take(&[ask], false).await.expect("an answer");
            limits.flush().await;
            let before = Some((policy.scope(), String::new()));
            let rows = store.load_spent(before, 100).await.expect("an answer");
            let record = SpentRecord::of_limit(&policy.spec.limit, taken.each[0].1);
            let row = rows.into_iter().find(|row| row.scope == policy.scope() && row.key == key);
            assert_eq!(row.map(|row| row.record), Some(record), "{key}");
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("the row exists");
    }
}

pub async fn a_clock_set_back_denies_nobody_for_longer_than_the_limit_allows<H: HasLimits>() {
    let h = H::open().await;
    if h.store_clock().is_none() {
        return;
    }
    let ahead = Duration::from_secs(7_200);
    let policies = [policy(bucket(5, 5)), policy(fixed(5)), policy(sliding(5))];
    h.clock().advance(ahead);
    for policy in &policies {
        assert!(take(&h, policy, "k", 5).await.is_allowed());
    }
    // A debt must not be mistaken for a clock that was ahead.
    h.limits().charge(&policies[0], "k", 5).await.expect("an answer");
    h.limits().flush().await;
    h.clock().set_back(ahead);
    let h = h.reopen().await;
    for policy in &policies {
        assert!(!take(&h, policy, "k", 1).await.is_allowed(), "spent units stay spent: {policy:?}");
    }
    h.clock().advance(MINUTE);
    assert_eq!(remaining(&h, &policies[0], "k").await, 0, "only the debt is paid");
    assert_eq!(remaining(&h, &policies[1], "k").await, 5, "the window began when the clock was set back");
    h.clock().advance(MINUTE);
    for policy in &policies {
        assert!(take(&h, policy, "k", 5).await.is_allowed(), "{policy:?}");
    }
}
