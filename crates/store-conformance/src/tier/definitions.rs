//! Definitions: subscriptions, tiers and policies; and the stored spent records.

use std::sync::Arc;
use std::time::Duration;

use weir_core::Clock;
use weir_core::tier::{Limit, Plan, Rule, Tier, TierLimits};
use weir_store::tier::{
    ChangedDefinition, Match, OnOutage, Origin, PolicySpec, SpentRecord, SpentRow, SubscriptionTerms,
    TierStore,
};

use super::fixtures::{MINUTE, PRO, bucket, fixed, policy_name, sliding, user};
use crate::HasLimits;

async fn put(store: &dyn TierStore, name: &str, limit: Limit, origin: Origin) -> weir_store::tier::Policy {
    let spec = PolicySpec::plain(limit);
    store
        .put_policy(&policy_name(name), &spec, origin)
        .await
        .expect("put_policy")
        .expect("the maximum of policies is not reached")
}

pub async fn a_subscription_is_put_found_and_deleted<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let user_id = user("o'Brien <x@y.z>");
    assert_eq!(store.subscription(&user_id).await.expect("an answer"), None);
    for plan in [PRO, Plan::Free, Plan::BusinessYearly] {
        let put = store.put_subscription(&user_id, plan.into()).await.expect("an answer");
        assert_eq!((put.terms, put.updated_at), (plan.into(), h.clock().now()));
        assert_eq!(put.expires_in, None);
        assert_eq!(store.subscription(&user_id).await.expect("an answer"), Some(put));
    }
    assert_eq!(store.subscription(&user("o'brien <x@y.z>")).await.expect("an answer"), None);
    assert!(store.delete_subscription(&user_id).await.expect("an answer"));
    assert!(!store.delete_subscription(&user_id).await.expect("an answer"));
}

pub async fn a_subscription_is_there_until_it_expires<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let (user_id, now) = (user("u"), h.clock().now());
    let anchor = "2024-02-29".parse().ok();
    let terms = SubscriptionTerms { expires_at: Some(now.plus(MINUTE)), anchor, plan: PRO };
    let put = store.put_subscription(&user_id, terms).await.expect("an answer");
    assert_eq!((put.terms, put.expires_in), (terms, Some(MINUTE)));
    let micro = Duration::from_micros(1);
    h.clock().advance(MINUTE - micro);
    let found = store.subscription(&user_id).await.expect("an answer").expect("it has not expired");
    assert_eq!((found.terms, found.updated_at, found.expires_in), (terms, now, Some(micro)));
    assert_eq!(store.purge_subscriptions(10).await.expect("an answer"), 0);
    h.clock().advance(micro);
    assert_eq!(store.subscription(&user_id).await.expect("an answer"), None);
    assert_eq!(store.subscriptions(None, 10).await.expect("an answer"), []);
    assert!(!store.delete_subscription(&user_id).await.expect("an answer"), "as if it were not there");
    store.put_subscription(&user_id, terms).await.expect("an answer");
    let renewed = store.put_subscription(&user_id, PRO.into()).await.expect("an answer");
    assert_eq!(renewed.terms, PRO.into(), "neither expiry nor anchor stay from the one before");
    h.clock().advance(MINUTE);
    assert_eq!(store.subscription(&user_id).await.expect("an answer"), Some(renewed));
}

pub async fn subscriptions_are_listed_in_order_and_page_by_page<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let expired = SubscriptionTerms { expires_at: Some(h.clock().now()), ..PRO.into() };
    for (name, terms) in
        [("b", PRO.into()), ("ä", PRO.into()), ("B", PRO.into()), ("a", expired), ("c", PRO.into())]
    {
        store.put_subscription(&user(name), terms).await.expect("an answer");
    }
    let list = async |after: Option<&str>, limit| {
        let page = store.subscriptions(after.map(user).as_ref(), limit).await.expect("an answer");
        page.into_iter().map(|subscription| subscription.user.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(list(None, 10).await, ["B", "b", "c", "ä"]);
    assert_eq!(list(None, 2).await, ["B", "b"]);
    assert_eq!(list(Some("b"), 1).await, ["c"]);
    assert_eq!(list(Some("a"), 2).await, ["b", "c"], "a cursor need not be there any more");
    assert_eq!(list(Some("ä"), 2).await, [""; 0]);
}

pub async fn expired_subscriptions_are_purged_and_others_told<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let expiring = |after| SubscriptionTerms { expires_at: Some(h.clock().now().plus(after)), ..PRO.into() };
    for (name, terms) in
        [("a", expiring(MINUTE)), ("b", expiring(MINUTE)), ("c", expiring(2 * MINUTE)), ("d", PRO.into())]
    {
        store.put_subscription(&user(name), terms).await.expect("an answer");
    }
    h.clock().advance(MINUTE);
    let start = store.changes_since(None).await.expect("an answer").version;
    assert_eq!(store.purge_subscriptions(1).await.expect("an answer"), 1);
    assert_eq!(store.purge_subscriptions(10).await.expect("an answer"), 1);
    assert_eq!(store.purge_subscriptions(10).await.expect("an answer"), 0);
    let left = store.subscriptions(None, 10).await.expect("an answer");
    assert_eq!(left.iter().map(|left| left.user.as_str()).collect::<Vec<_>>(), ["c", "d"]);
    if store.is_shared() {
        let changes = store.changes_since(Some(start)).await.expect("an answer").changed.expect("a list");
        assert_eq!(changes.len(), 2);
        for name in ["a", "b"] {
            assert!(changes.contains(&ChangedDefinition::Subscription(user(name))), "{changes:?}");
        }
    }
}

pub async fn parallel_renewals_survive_purges<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let expired = SubscriptionTerms { expires_at: Some(h.clock().now()), ..PRO.into() };
    let users: Vec<_> = (0..24).map(|n| user(&format!("u{n}"))).collect();
    for user in &users {
        store.put_subscription(user, expired).await.expect("an answer");
    }
    let purges = (0..4).map(|_| {
        let store = Arc::clone(&store);
        tokio::spawn(async move { store.purge_subscriptions(100).await.map(drop) })
    });
    let renewals = users.iter().map(|user| {
        let (store, user) = (Arc::clone(&store), user.clone());
        tokio::spawn(async move { store.put_subscription(&user, PRO.into()).await.map(drop) })
    });
    for task in renewals.chain(purges).collect::<Vec<_>>() {
        task.await.expect("a task").expect("an answer");
    }
    let left = store.subscriptions(None, 100).await.expect("an answer");
    assert_eq!(left.len(), users.len(), "what was renewed is not deleted");
}

pub async fn the_switch_of_tier_is_stored<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    assert_eq!(store.limits_enabled().await.expect("an answer"), None);
    for is_enabled in [false, true, false] {
        let start = store.changes_since(None).await.expect("an answer").version;
        store.put_limits_enabled(is_enabled).await.expect("an answer");
        assert_eq!(store.limits_enabled().await.expect("an answer"), Some(is_enabled));
        if store.is_shared() {
            let changes = store.changes_since(Some(start)).await.expect("an answer").changed;
            assert_eq!(changes.as_deref(), Some(&[ChangedDefinition::Definitions][..]));
        }
    }
}

pub async fn tier_limits_are_stored_replaced_and_forgotten<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    assert_eq!(store.tiers().await.expect("an answer"), []);
    let largest = TierLimits::new(Limit::MAX, Limit::MAX, Limit::MAX).expect("valid");
    for limits in [TierLimits::new(1, 2, 3).expect("valid"), largest] {
        store.put_tier(Tier::Pro, limits).await.expect("an answer");
        assert_eq!(store.tiers().await.expect("an answer"), [(Tier::Pro, limits)]);
    }
    store.put_tier(Tier::Free, largest).await.expect("an answer");
    let start = store.changes_since(None).await.expect("an answer").version;
    for _ in 0..2 {
        store.delete_tier(Tier::Pro).await.expect("an answer");
        assert_eq!(store.tiers().await.expect("an answer"), [(Tier::Free, largest)]);
    }
    if store.is_shared() {
        let changes = store.changes_since(Some(start)).await.expect("an answer").changed;
        assert_eq!(
            changes.as_deref(),
            Some(&[ChangedDefinition::Definitions, ChangedDefinition::Definitions][..])
        );
    }
}

pub async fn policies_keep_their_scope_until_they_are_deleted<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let first = put(&*store, "p", bucket(5, 3), Origin::Operator).await;
    let entries = [("a".to_owned(), "*".to_owned()), ("b".to_owned(), "x y".to_owned())];
    let spec = PolicySpec {
        limit: sliding(7),
        shadow: true,
        on_outage: OnOutage::Closed,
        matches: Some(Match { domain: "edge".to_owned(), entries: entries.into() }),
    };
    let put_again = store.put_policy(&policy_name("p"), &spec, Origin::Operator).await.expect("an answer");
    let second = put_again.expect("the maximum of policies is not reached");
    assert_eq!((&second.spec, second.scope()), (&spec, first.scope()));
    assert!(second.scope() > 0, "scope 0 belongs to the tiers");
    let other = put(&*store, "o", fixed(1), Origin::Operator).await;
    assert_eq!(store.policies().await.expect("an answer"), [other, second.clone()], "in order of name");
    assert!(store.delete_policy(&policy_name("p")).await.expect("an answer"));
    assert!(!store.delete_policy(&policy_name("p")).await.expect("an answer"));
    let again = put(&*store, "p", fixed(1), Origin::Operator).await;
    assert!(again.scope() > second.scope(), "a scope is not reused");
}

pub async fn the_policy_file_does_not_replace_policies_of_operators<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    put(&*store, "p", fixed(1), Origin::File).await;
    assert_eq!(put(&*store, "p", fixed(2), Origin::File).await.spec.limit, fixed(2));
    put(&*store, "p", fixed(3), Origin::Operator).await;
    assert_eq!(put(&*store, "p", fixed(4), Origin::File).await.spec.limit, fixed(3));
    store.delete_policy(&policy_name("p")).await.expect("an answer");
    assert_eq!(put(&*store, "p", fixed(5), Origin::File).await.spec.limit, fixed(5));
}

pub async fn spent_records_are_loaded_in_order_and_page_by_page<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    let limit = bucket(5, 5);
    let record = |cost: u32| {
        let mut spent = limit.unspent();
        limit.charge(&mut spent, cost, h.clock().now());
        SpentRecord::of_limit(&limit, spent)
    };
    let row = |scope: u32, key: &str, cost: u32| SpentRow {
        scope,
        key: key.to_owned(),
        record: record(cost),
        saved_at: Some(h.clock().now()),
    };
    let rows = [row(0, "ü", 1), row(7, "A", 1), row(7, "a", 2), row(7, "ä", 3), row(8, "a", 4)];
    let mixed = [4, 2, 0, 3, 1].map(|at: usize| rows[at].clone());
    store.save_spent(mixed.to_vec()).await.expect("an answer");
    assert_eq!(store.load_spent(None, 10).await.expect("an answer"), rows);
    assert_eq!(store.load_spent(None, 2).await.expect("an answer"), rows[..2]);
    let after = Some((7, "A".to_owned()));
    assert_eq!(store.load_spent(after, 2).await.expect("an answer"), rows[2..4]);
    let deleted = SpentRow { record: None, ..rows[3].clone() };
    store.save_spent(vec![row(7, "a", 5), deleted.clone(), deleted]).await.expect("an answer");
    let rest = store.load_spent(Some((0, "ü".to_owned())), 10).await.expect("an answer");
    assert_eq!(rest, [row(7, "A", 1), row(7, "a", 5), row(8, "a", 4)]);
}

pub async fn changes_are_listed_in_order<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions().filter(|store| store.is_shared()) else { return };
    let start = store.changes_since(None).await.expect("an answer").version;
    store.put_subscription(&user("a"), PRO.into()).await.expect("an answer");
    put(&*store, "p", fixed(1), Origin::Operator).await;
    store.delete_subscription(&user("a")).await.expect("an answer");
    let changes = store.changes_since(Some(start)).await.expect("an answer");
    let expected = [
        ChangedDefinition::Subscription(user("a")),
        ChangedDefinition::Definitions,
        ChangedDefinition::Subscription(user("a")),
    ];
    assert_eq!(changes.changed.as_deref(), Some(&expected[..]));
    let later = store.changes_since(Some(changes.version)).await.expect("an answer");
    assert_eq!((later.version, later.changed), (changes.version, Some(Vec::new())));
    store.put_tier(Tier::Free, Tier::Free.defaults()).await.expect("an answer");
    let last = store.changes_since(Some(changes.version)).await.expect("an answer");
    assert_eq!(last.changed.as_deref(), Some(&[ChangedDefinition::Definitions][..]));
}
