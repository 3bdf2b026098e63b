//! Claims by turns beside servers of the version before, which know neither the columns nor the indexes.

use std::sync::Arc;
use std::time::Duration;

use weir_core::ManualClock;
use weir_store::request::{ClaimOrder, TenantCapacity};
use weir_store_conformance::request::fixtures::{
    DOWNSTREAM, accept_batch, claim_jobs, policy, report_batch, request_audit, room, submission_for, success,
};
use weir_store_conformance::{EngineFixture, HasRequests, START};
use weir_testkit::postgres::Server;

use crate::fixtures::PostgresFixture;

/// What a server of the version before has inserted: without a tenant and without a word on express.
const OF_BEFORE: &str =
    "UPDATE request_job SET waiting_tenant = NULL, is_express = NULL WHERE request_id IN (
    SELECT request_id FROM request_record WHERE tenant_id = 'old')";
/// As that version claims: by time, leaving the columns as they are.
const CLAIM_OF_BEFORE: &str = "
    WITH claimed AS (
        UPDATE request_job SET claimable_at = claimable_at + interval '10 seconds', is_leased = true, token = token + 1,
               attempts = attempts + 1, is_pending = false
        WHERE request_id IN (SELECT request_id FROM request_job ORDER BY claimable_at, request_id LIMIT 5)
        RETURNING request_id)
    UPDATE request_record SET status = 'IN_PROGRESS', attempts = attempts + 1
    WHERE request_id IN (SELECT request_id FROM claimed)";

async fn submissions(h: &PostgresFixture, tenant: &str, count: usize) {
    let batch = (0..count).map(|n| submission_for(h, tenant, &format!("{tenant}-{n}"), "content")).collect();
    accept_batch(h, batch).await;
}

#[tokio::test]
async fn jobs_of_a_server_of_the_version_before_have_their_turns() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let h = PostgresFixture::open().await;
    submissions(&h, "new", 40).await;
    submissions(&h, "old", 40).await;
    h.database.execute(OF_BEFORE).await;
    let claimed = claim_jobs(&h, 20).await;
    let of_old = claimed.jobs.iter().filter(|job| job.tenant.as_str() == "old").count();
    assert_eq!((of_old, claimed.jobs.len()), (10, 20));
    report_batch(&h, claimed.jobs.iter().map(success).collect()).await;
    // The other server claims some of ours and vanishes.
    h.database.execute(CLAIM_OF_BEFORE).await;
    let rest = claim_jobs(&h, 100).await;
    assert_eq!(rest.jobs.len(), 55, "all that it has not claimed");
    report_batch(&h, rest.jobs.iter().map(success).collect()).await;
    h.clock().advance(policy().lease + Duration::from_secs(1));
    let late = claim_jobs(&h, 100).await;
    assert_eq!((late.jobs.len(), late.taken_over), (5, 5), "its leases have ended");
    report_batch(&h, late.jobs.iter().map(success).collect()).await;
    assert_eq!(request_audit(&h).await.completed, 80);
}

#[tokio::test]
async fn until_the_indexes_are_built_jobs_are_claimed_in_the_order_of_time() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Arc::new(Server::shared().database("turns").await);
    // As long as another server builds indexes, this one leaves it to that.
    let builder = database.connect().await.expect("a session");
    builder.batch_execute("SELECT pg_advisory_lock(2003134835)").await.expect("the lock");
    let url = database.url().to_owned();
    let h = PostgresFixture::via(&url, 8, database, ManualClock::at(START)).await;
    for index in ["request_job_turn", "request_job_parked", "request_job_express"] {
        h.database.execute(&format!("DROP INDEX {index}")).await;
    }
    submissions(&h, "a", 20).await;
    h.clock().advance(Duration::from_secs(1));
    submissions(&h, "b", 20).await;
    let first = claim_jobs(&h, 20).await.jobs;
    assert!(first.len() == 20 && first.iter().all(|job| job.tenant.as_str() == "a"));
    let express =
        h.requests().claim_express(&[room(DOWNSTREAM, 5)], &TenantCapacity::default(), &policy()).await;
    assert!(express.expect("claim_express must succeed").jobs.is_empty());
    for index in [
        "request_job_turn ON request_job (downstream, waiting_tenant, claimable_at) WHERE waiting_tenant IS NOT NULL",
        "request_job_parked ON request_job (downstream, claimable_at) WHERE waiting_tenant IS NULL",
        "request_job_express ON request_job (downstream, claimable_at) WHERE is_express",
    ] {
        h.database.execute(&format!("CREATE INDEX {index}")).await;
    }
    submissions(&h, "c", 20).await;
    let order = ClaimOrder::default();
    let claimed = h.requests().claim_jobs(&[room(DOWNSTREAM, 10)], &order, &policy()).await;
    let of_c = claimed.expect("claim_jobs must succeed").jobs.into_iter();
    assert_eq!(of_c.filter(|job| job.tenant.as_str() == "c").count(), 5, "tenants take turns");
}
