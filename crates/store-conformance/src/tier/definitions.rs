//! Definitions: subscriptions, tiers and policies; and the stored spent records.

use weir_core::Clock;
use weir_core::tier::{Limit, Plan, Rule, Tier, TierLimits};
use weir_store::tier::{
    ChangedDefinition, Match, OnOutage, Origin, PolicySpec, SpentRecord, SpentRow, TierStore,
};

use super::fixtures::{PRO, bucket, fixed, policy_name, sliding, user};
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
        let put = store.put_subscription(&user_id, plan).await.expect("an answer");
        assert_eq!((put.plan, put.updated_at), (plan, h.clock().now()));
        assert_eq!(store.subscription(&user_id).await.expect("an answer"), Some(put));
    }
    assert_eq!(store.subscription(&user("o'brien <x@y.z>")).await.expect("an answer"), None);
    assert!(store.delete_subscription(&user_id).await.expect("an answer"));
    assert!(!store.delete_subscription(&user_id).await.expect("an answer"));
}

pub async fn tier_limits_are_stored_and_replaced<H: HasLimits>() {
    let h = H::open().await;
    let Some(store) = h.definitions() else { return };
    assert_eq!(store.tiers().await.expect("an answer"), []);
    let largest = TierLimits::new(Limit::MAX, Limit::MAX, Limit::MAX).expect("valid");
    for limits in [TierLimits::new(1, 2, 3).expect("valid"), largest] {
        store.put_tier(Tier::Pro, limits).await.expect("an answer");
        assert_eq!(store.tiers().await.expect("an answer"), [(Tier::Pro, limits)]);
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
    store.put_subscription(&user("a"), PRO).await.expect("an answer");
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
