//! Tier beside a server of the version before: its statements on this version's schema.

use std::time::Duration;

use weir_core::tier::{Concurrency, Plan};
use weir_core::{Clock, PolicyName, UserId};
use weir_store::tier::{ConcurrencySpec, Origin, SubscriptionTerms, TierStore};
use weir_store_conformance::EngineFixture;

use crate::fixtures::PostgresFixture;

/// How that version saves a subscription.
const SUBSCRIBE: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version, user_id) SELECT version, 'u' FROM next)
    INSERT INTO tier_subscription (user_id, plan, updated_at) VALUES ('u', 'STARTER_YEARLY', clock_timestamp())
    ON CONFLICT (user_id) DO UPDATE SET plan = excluded.plan, updated_at = excluded.updated_at";
/// How it saves a policy.
const PUT_POLICY: &str = "
    INSERT INTO tier_policy (name, kind, amount, refill, period_ms, shadow, on_outage, origin)
    VALUES ('p', 'fixed_window', 5, 0, 60000, false, 'local', 'operator')";

#[tokio::test]
async fn a_subscription_of_the_version_before_has_neither_expiry_nor_anchor() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    let user = UserId::parse("u").expect("a name");
    let minute = Duration::from_secs(60);
    let terms = SubscriptionTerms {
        plan: Plan::ProMonthly,
        expires_at: Some(h.clock().now().plus(minute)),
        anchor: "2026-01-31".parse().ok(),
    };
    h.engine.put_subscription(&user, terms).await.expect("an answer");
    h.database.execute(SUBSCRIBE).await;
    h.clock().advance(2 * minute);
    let found = h.engine.subscription(&user).await.expect("an answer").expect("it never expires");
    assert_eq!((found.terms, found.expires_in), (Plan::StarterYearly.into(), None));
    assert_eq!(h.engine.subscriptions(None, 10).await.expect("an answer"), [found]);
    assert_eq!(h.engine.purge_subscriptions(10).await.expect("an answer"), 0);
    assert!(h.engine.delete_subscription(&user).await.expect("an answer"));
}

#[tokio::test]
async fn the_version_before_reads_its_policies_beside_concurrency() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    let name = PolicyName::parse("p").expect("a name");
    let rule = Concurrency::new(5, Duration::from_secs(30)).expect("a limit");
    let spec = ConcurrencySpec::plain(rule);
    h.engine
        .put_concurrency(&name, &spec, Origin::Operator)
        .await
        .expect("an answer")
        .expect("there is room");
    // It does not know the kind, and must not see it.
    assert_eq!(h.engine.policies().await.expect("an answer"), []);
    h.database.execute(PUT_POLICY).await;
    assert_eq!(h.engine.policies().await.expect("an answer").len(), 1, "its own policy counts");
    assert!(h.engine.delete_policy(&name).await.expect("an answer"), "both are deleted");
    assert_eq!(h.engine.policies().await.expect("an answer"), []);
    assert_eq!(h.engine.concurrency_policies().await.expect("an answer"), []);
}
