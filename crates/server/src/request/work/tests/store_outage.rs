//! A store that cannot be reached for a while, or takes long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_core::{RequestId, TenantId, Timestamp};
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, ClaimOrder, ClaimedJobs, DeadRequest, DownstreamCapacity,
    ErasedBatch, HashKeys, JobCounts, JobReport, PendingRequest, Request, RequestAudit, RequestFilter,
    RequestPage, RequestStore, ResealedRequest, Rollout, RolloutChange, SealedHashKey, SealedNames,
    SealedSearch, SealingKey, Submit, SubmitOutcome, TenantCapacity, TenantLimit, UnfinishedRequest,
};
use weir_store::{Batch, Error, Result};
use weir_store_sqlite::Sqlite;

use super::fixtures::{FakeDownstream, Fixture, RunningWorker, TEST_TIMEOUT, until};
use crate::request::work::maintenance::Maintenance;

/// A store whose first reports fail and whose purges never end. It has only what workers and maintenance call.
struct Outage {
    engine: Sqlite,
    /// How many reports still fail.
    failing: AtomicUsize,
    is_transient: bool,
    /// The sizes of the batches that were tried.
    tried: parking_lot::Mutex<Vec<usize>>,
    is_purging: AtomicBool,
    /// The tenants whose erasures have begun, in order, and whether each can be erased.
    erasures: parking_lot::Mutex<Vec<(&'static str, bool)>>,
}

impl Outage {
    fn new(fixture: &Fixture, failing: usize, is_transient: bool) -> Arc<Self> {
        Arc::new(Self {
            engine: fixture.engine.clone(),
            failing: AtomicUsize::new(failing),
            is_transient,
            tried: parking_lot::Mutex::default(),
            is_purging: AtomicBool::new(false),
            erasures: parking_lot::Mutex::default(),
        })
    }
}

#[async_trait]
impl RequestStore for Outage {
    async fn claim_jobs(
        &self,
        room: &[DownstreamCapacity],
        order: &ClaimOrder,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        self.engine.claim_jobs(room, order, policy).await
    }
    async fn claim_express(
        &self,
        room: &[DownstreamCapacity],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        self.engine.claim_express(room, tenants, policy).await
    }
    async fn job_downstreams(&self) -> Result<Vec<String>> {
        self.engine.job_downstreams().await
    }
    async fn count_jobs(&self, downstreams: &[String], limit: usize) -> Result<Vec<JobCounts>> {
        self.engine.count_jobs(downstreams, limit).await
    }

    async fn report_batch(
        &self,
        batch: Vec<JobReport>,
        policy: &RetryPolicy,
    ) -> Result<Vec<std::result::Result<RequestStatus, TransitionError>>> {
        self.tried.lock().push(batch.len());
        let fail = |left: usize| left.checked_sub(1);
        if self.failing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fail).is_ok() {
            let (engine, why) = ("test", "as the test wants it");
            return Err(if self.is_transient {
                Error::unavailable(engine, why)
            } else {
                Error::failed(engine, why)
            });
        }
        self.engine.report_batch(batch, policy).await
    }
    async fn wait_for_jobs(&self, at_most: Duration) {
        self.engine.wait_for_jobs(at_most).await;
    }
    async fn wait_for_express_jobs(&self, at_most: Duration) {
        self.engine.wait_for_express_jobs(at_most).await;
    }
    async fn submit_batch(&self, _: Batch<Submit>) -> Result<Vec<SubmitOutcome>> {
        unreachable!()
    }
    async fn find_request(&self, _: RequestId) -> Result<Option<Request>> {
        unreachable!()
    }
    async fn list_requests(&self, _: &RequestFilter, _: Option<RequestId>, _: usize) -> Result<RequestPage> {
        unreachable!()
    }
    async fn unfinished_requests(&self, _: &str, _: usize) -> Result<Vec<UnfinishedRequest>> {
        unreachable!()
    }
    async fn claim_named(&self, _: &[RequestId], _: &TenantCapacity, _: &RetryPolicy) -> Result<ClaimedJobs> {
        unreachable!()
    }
    async fn call_back(&self, _: RequestId, _: CallbackReport) -> Result<CallbackOutcome> {
        unreachable!()
    }
    async fn cancel_request(&self, _: RequestId) -> Result<CancelOutcome> {
        unreachable!()
    }
    async fn pending_requests(&self, older_than: Duration, limit: usize) -> Result<Vec<PendingRequest>> {
        self.engine.pending_requests(older_than, limit).await
    }
    async fn mark_enqueued(&self, _: &[RequestId]) -> Result<()> {
        unreachable!()
    }
    async fn dead_requests(&self, _: Option<RequestId>, _: usize, _: usize) -> Result<Vec<DeadRequest>> {
        unreachable!()
    }
    async fn replay_requests(&self, _: &[RequestId]) -> Result<Vec<RequestId>> {
        unreachable!()
    }
    async fn begin_erasure(&self, _: &TenantId, _: usize) -> Result<u64> {
        unreachable!()
    }
    async fn erase_some(&self, _: usize, passed_over: usize) -> Result<Option<ErasedBatch>> {
        let mut erasures = self.erasures.lock();
        match erasures.get(passed_over).copied() {
            None => Ok(None),
            Some((_, false)) => Err(Error::unavailable("test", "as the test wants it")),
            Some((tenant, true)) => {
                erasures.remove(passed_over);
                let tenant = TenantId::parse(tenant).unwrap();
                Ok(Some(ErasedBatch { tenant, requests: Vec::new(), total: Some(0) }))
            }
        }
    }
    async fn tenant_limits(&self) -> Result<Vec<TenantLimit>> {
        unreachable!()
    }
    async fn put_tenant_limit(&self, _: &TenantLimit) -> Result<bool> {
        unreachable!()
    }
    async fn delete_tenant_limit(&self, _: &TenantId) -> Result<bool> {
        unreachable!()
    }
    async fn discard_request(&self, _: RequestId) -> Result<bool> {
        unreachable!()
    }
    async fn count_dead_requests(&self) -> Result<u64> {
        self.engine.count_dead_requests().await
    }
    async fn purge_requests(&self, _: Duration, _: usize) -> Result<u64> {
        self.is_purging.store(true, Ordering::SeqCst);
        std::future::pending().await
    }
    async fn rollout(&self) -> Result<Option<Rollout>> {
        unreachable!()
    }
    async fn change_rollout(&self, _: RolloutChange, _: Rollout) -> Result<Rollout> {
        unreachable!()
    }
    async fn audit_requests(&self) -> Result<RequestAudit> {
        unreachable!()
    }
    async fn find_summaries(&self, _: &[RequestId]) -> Result<Vec<Request>> {
        unreachable!()
    }
    async fn sealing_keys(&self) -> Result<Vec<(SealingKey, Timestamp)>> {
        unreachable!()
    }
    async fn register_sealing_key(&self, _: &SealingKey) -> Result<()> {
        unreachable!()
    }
    async fn remove_sealing_key(&self, _: &str, _: &str) -> Result<()> {
        unreachable!()
    }
    async fn find_sealed_with(&self, _: &str, _: Option<RequestId>, _: usize) -> Result<SealedSearch> {
        unreachable!()
    }
    async fn newest_request(&self) -> Result<Option<Request>> {
        unreachable!()
    }
    async fn hash_keys(&self) -> Result<HashKeys> {
        self.engine.hash_keys().await
    }
    async fn begin_hashing(&self, _: &SealedHashKey) -> Result<()> {
        unreachable!()
    }
    async fn prepare_hash_key(&self, _: &SealedHashKey) -> Result<()> {
        unreachable!()
    }
    async fn add_hash_key(&self, _: &SealedHashKey) -> Result<()> {
        unreachable!()
    }
    async fn remove_hash_key(&self, _: &str, _: &str) -> Result<()> {
        unreachable!()
    }
    async fn sealed_names(&self, _: Option<RequestId>, _: usize) -> Result<Vec<SealedNames>> {
        unreachable!()
    }
    async fn reseal_request(&self, _: &ResealedRequest) -> Result<()> {
        unreachable!()
    }
}

async fn work_through(is_transient: bool) -> Arc<Outage> {
    let server = FakeDownstream::always(200, "done").await;
    let fixture = Fixture::new(Some(&server.url));
    let store = Outage::new(&fixture, 3, is_transient);
    let mut parts = fixture.parts();
    parts.store = Arc::<Outage>::clone(&store);
    let worker = RunningWorker::new(parts);
    let mut ids = Vec::new();
    for _ in 0..20 {
        ids.push(fixture.submit("1").await);
    }
    for id in ids {
        assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    }
    worker.stop().await;
    assert_eq!(server.calls(), 20, "no call is made again because its report was held up");
    store
}

#[tokio::test]
async fn reports_are_retried_until_the_store_returns() {
    let store = work_through(true).await;
    assert_eq!(store.failing.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_report_that_the_store_rejects_does_not_delay_the_others() {
    let store = work_through(false).await;
    assert!(store.tried.lock().contains(&1), "they are tried one by one");
}

/// Maintenance of a store, without a broker.
fn maintenance_of(fixture: &Fixture, store: &Arc<Outage>) -> Maintenance {
    Maintenance {
        store: Arc::<Outage>::clone(store),
        broker: None,
        retention: fixture.settings.retention,
        is_reconciling: Arc::new(|| Box::pin(std::future::ready(true))),
        clock: fixture.engine.clock(),
        metrics: fixture.metrics.clone(),
        on_change: Arc::new(|_, _| ()),
    }
}

#[tokio::test(start_paused = true)]
async fn an_erasure_that_fails_delays_no_other_and_is_tried_again() {
    let fixture = Fixture::new(None);
    let store = Outage::new(&fixture, 0, true);
    *store.erasures.lock() = vec![("a", false), ("b", true), ("c", false), ("d", true)];
    let closing = CancellationToken::new();
    let running = tokio::spawn(maintenance_of(&fixture, &store).run(closing.clone()));
    let left = async |tenants: &[&str]| {
        let what = format!("only {tenants:?} are left");
        until(&what, || async {
            store.erasures.lock().iter().map(|(tenant, _)| *tenant).eq(tenants.iter().copied())
        })
        .await;
    };
    left(&["a", "c"]).await;
    store.erasures.lock().push(("e", true));
    left(&["a", "c"]).await;
    store.erasures.lock().iter_mut().for_each(|(_, is_possible)| *is_possible = true);
    left(&[]).await;
    closing.cancel();
    running.await.unwrap();
}

#[tokio::test]
async fn a_slow_purge_delays_neither_the_reconciler_nor_a_stop() {
    let fixture = Fixture::new(None);
    let store = Outage::new(&fixture, 0, true);
    let maintenance = maintenance_of(&fixture, &store);
    let closing = CancellationToken::new();
    let running = tokio::spawn(maintenance.run(closing.clone()));
    let is_purging = || async { store.is_purging.load(Ordering::SeqCst) };
    until("a purge is under way", is_purging).await;
    until("the reconciler looks", || async { fixture.metrics.reconciler_heartbeat_seconds.get() > 0 }).await;
    closing.cancel();
    tokio::time::timeout(TEST_TIMEOUT, running).await.expect("a stop does not wait for the purge").unwrap();
}
