//! The begin of hashed idempotency keys while an autovacuum is at their table.

use std::sync::Arc;
use std::time::Duration;

use weir_core::ManualClock;
use weir_store::request::SealedHashKey;
use weir_store_conformance::{ENGINE_TIMEOUT, HasRequests, START};
use weir_testkit::postgres::{Options, Server};
use weir_testkit::wait;

use crate::fixtures::PostgresFixture;

/// A database that the version before has created: there a begin waits 50 ms for its lock. Its vacuums take minutes.
const OF_BEFORE: &str = "
    UPDATE weir_schema_state SET created_version = 1;
    ALTER TABLE idempotency_record SET (
        autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0,
        autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1);
    INSERT INTO idempotency_record
    SELECT 'acme', 'key ' || n, decode(repeat('00', 32), 'hex'), gen_random_uuid(), now() FROM generate_series(1, 20000) AS n;
    DELETE FROM idempotency_record";
const VACUUMS: &str = "
    SELECT pid FROM pg_stat_progress_vacuum WHERE relid = 'idempotency_record'::regclass";

#[tokio::test]
async fn hashing_begins_although_an_autovacuum_is_at_the_table() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let mut options = Options::default();
    options.settings.push(("autovacuum_naptime".to_owned(), "1s".to_owned()));
    let server = Server::with_options(&options);
    let database = Arc::new(server.database("hashing").await);
    let url = database.url().to_owned();
    let h = PostgresFixture::via(&url, 8, Arc::clone(&database), ManualClock::at(START)).await;
    database.execute(OF_BEFORE).await;
    wait::until("an autovacuum is at the table", ENGINE_TIMEOUT, async || {
        !database.query_strings(VACUUMS).await.is_empty()
    })
    .await;
    let vacuum = database.query_strings(VACUUMS).await;
    let key = SealedHashKey { name: "a".to_owned(), digest: "1".to_owned(), bytes: vec![1] };
    let refused = h.requests().begin_hashing(&key).await.expect_err("it does not wait so long");
    assert!(refused.is_transient(), "{refused:?}");
    wait::until("the autovacuum has ended", Duration::from_secs(20), async || {
        database.query_strings(VACUUMS).await != vacuum
    })
    .await;
    // As a server does, until it succeeds: another autovacuum may have begun meanwhile.
    wait::until("hashing has begun", ENGINE_TIMEOUT, async || {
        let _ = h.requests().begin_hashing(&key).await;
        h.requests().hash_keys().await.is_ok_and(|keys| keys.has_begun)
    })
    .await;
}
