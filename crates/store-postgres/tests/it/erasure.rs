//! Erasures of tenants beside one that has many requests.

use std::sync::Arc;
use std::time::Duration;

use weir_store::request::{RequestStore, WEBHOOKS_TOPIC};
use weir_store_conformance::EngineFixture;
use weir_store_conformance::request::fixtures::{accept_one, submission_for, tenant};
use weir_store_postgres::{Postgres, PostgresTarget};

use crate::fixtures::PostgresFixture;

/// Requests of a tenant, and dead webhooks of some of them.
const FILL: &str = "
    INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, created_at, updated_at)
    SELECT gen_random_uuid(), 'large', 'payment', 'COMPLETED', '', 'key', now(), now() FROM generate_series(1, 150000);
    INSERT INTO dead_letter (id, topic, shard, message_id, key, payload, reason, attempts, died_at)
    SELECT request_id, 'request-webhooks', 0, row_number() OVER (), request_id, '', 'gone', 1, now()
    FROM request_record WHERE tenant_id = 'large' LIMIT 500";

#[tokio::test]
async fn dead_webhooks_of_a_large_tenant_keep_no_erasure_from_its_end() {
    if PostgresFixture::skipped() {
        return;
    }
    let h = PostgresFixture::open().await;
    assert!(FILL.contains(&format!("'{WEBHOOKS_TOPIC}'")));
    h.database.execute(FILL).await;
    let target: PostgresTarget = h.database.url().parse().expect("a Postgres URL");
    // Enough for a statement on a busy machine, and too little to look at every request for each dead webhook.
    let target = target.with_call_timeout(Duration::from_secs(5));
    let engine =
        Postgres::open_with_clock(target, 2, Some(Arc::new(h.clock().clone()))).await.expect("it opens");
    for name in ["a", "b"] {
        let id = accept_one(&h, submission_for(&h, name, "k", "what")).await;
        let dead = format!(
            "INSERT INTO dead_letter (id, topic, shard, message_id, key, payload, reason, attempts, died_at)
             VALUES ('{name}', '{WEBHOOKS_TOPIC}', 0, 0, '{id}', '', 'gone', 1, now())"
        );
        h.database.execute(&dead).await;
        engine.begin_erasure(&tenant(name), 10).await.expect("begin_erasure must succeed");
        h.clock().advance(Duration::from_secs(1));
    }
    let mut ended = Vec::new();
    while let Some(batch) = engine.erase_some(200, 0).await.expect("no statement takes long") {
        ended.extend(batch.total.map(|total| (batch.tenant.to_string(), total)));
    }
    assert_eq!(ended, [("a".to_owned(), 1), ("b".to_owned(), 1)]);
    let left = h.database.query_strings("SELECT count(*)::text FROM dead_letter").await;
    assert_eq!(left[0][0].as_deref(), Some("500"), "those of the large tenant");
}
