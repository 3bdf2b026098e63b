//! Redis as a cache of requests: a request that was read is cached for 30 s, or until it changes. Every other call goes to
//! the store behind it.
//!
//! A change replaces the cached request by a marker that lasts longer than a read may take, so that a slow read cannot cache
//! what it read before the change. When Redis does not answer, or loses a marker, a status may be up to 30 s old. The store
//! decides by its own rows alone.

mod encoding;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use redis::Value;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_core::{RequestId, TenantId, Timestamp};
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, ClaimOrder, ClaimedJobs, DeadRequest, DownstreamCapacity,
    ErasedBatch, HashKeys, JobCounts, JobReport, PendingRequest, Request, RequestAudit, RequestFilter,
    RequestPage, RequestStore, ResealedRequest, Rollout, RolloutChange, SealedHashKey, SealedNames,
    SealedSearch, SealingKey, Submit, SubmitOutcome, TenantCapacity, TenantLimit, UnfinishedRequest,
};
use weir_store::{Batch, Result};

use crate::Redis;
use crate::client::KeyCall;
use crate::script::Script;

/// How long a request is cached, in milliseconds.
const CACHED_FOR_MS: &str = "30000";
/// How long the marker of a change lasts: longer than the 2 s that a read may take.
const MARKED_FOR_MS: &str = "5000";
/// The longest encoding that is cached; larger requests are read from the store each time.
const ENCODED_MAX: usize = 64 * 1024;

/// A store of requests with Redis as a cache of its reads.
#[derive(Clone)]
pub struct RedisRequests {
    redis: Redis,
    store: Arc<dyn RequestStore>,
}

impl RedisRequests {
    #[must_use]
    pub fn new(redis: Redis, store: Arc<dyn RequestStore>) -> Self {
        Self { redis, store }
    }

    async fn read_cached(&self, id: RequestId) -> Option<Request> {
        let call = KeyCall { key: key(id), arguments: Vec::new() };
        match self.redis.call_each(Script::RequestRead, &[], &[call]).await.pop()? {
            Ok(Value::BulkString(bytes)) => encoding::decode(std::str::from_utf8(&bytes).ok()?, id),
            _ => None,
        }
    }

    async fn cache(&self, request: &Request) {
        let encoded = encoding::encode(request);
        if encoded.len() <= ENCODED_MAX {
            let call = KeyCall { key: key(request.id), arguments: vec![encoded] };
            // If it fails, the next read goes to the store again.
            let _ = self.redis.call_each(Script::RequestCache, &[CACHED_FOR_MS], &[call]).await;
        }
    }

    async fn invalidate(&self, ids: impl IntoIterator<Item = RequestId>) {
        let calls: Vec<KeyCall> =
            ids.into_iter().map(|id| KeyCall { key: key(id), arguments: Vec::new() }).collect();
        if !calls.is_empty() {
            // If it fails, the cached request expires by itself.
            let _ = self.redis.call_each(Script::RequestInvalidate, &[MARKED_FOR_MS], &calls).await;
        }
    }
}

fn key(id: RequestId) -> String {
    format!("RequestStatus:{id}")
}

#[async_trait]
impl RequestStore for RedisRequests {
    async fn submit_batch(&self, batch: Batch<Submit>) -> Result<Vec<SubmitOutcome>> {
        self.store.submit_batch(batch).await
    }

    async fn find_request(&self, id: RequestId) -> Result<Option<Request>> {
        if let Some(cached) = self.read_cached(id).await {
            return Ok(Some(cached));
        }
        let found = self.store.find_request(id).await?;
        if let Some(request) = &found {
            self.cache(request).await;
        }
        Ok(found)
    }

    async fn find_summaries(&self, ids: &[RequestId]) -> Result<Vec<Request>> {
        self.store.find_summaries(ids).await
    }

    async fn list_requests(
        &self,
        filter: &RequestFilter,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<RequestPage> {
        self.store.list_requests(filter, before, limit).await
    }

    async fn unfinished_requests(&self, downstream: &str, limit: usize) -> Result<Vec<UnfinishedRequest>> {
        self.store.unfinished_requests(downstream, limit).await
    }

    async fn claim_jobs(
        &self,
        room: &[DownstreamCapacity],
        order: &ClaimOrder,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let claimed = self.store.claim_jobs(room, order, policy).await?;
        self.invalidate(changed_by(&claimed)).await;
        Ok(claimed)
    }

    async fn claim_express(
        &self,
        room: &[DownstreamCapacity],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let claimed = self.store.claim_express(room, tenants, policy).await?;
        self.invalidate(changed_by(&claimed)).await;
        Ok(claimed)
    }

    async fn claim_named(
        &self,
        ids: &[RequestId],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let claimed = self.store.claim_named(ids, tenants, policy).await?;
        self.invalidate(changed_by(&claimed)).await;
        Ok(claimed)
    }

    async fn job_downstreams(&self) -> Result<Vec<String>> {
        self.store.job_downstreams().await
    }

    async fn count_jobs(&self, downstreams: &[String], limit: usize) -> Result<Vec<JobCounts>> {
        self.store.count_jobs(downstreams, limit).await
    }

    async fn report_batch(
        &self,
        batch: Vec<JobReport>,
        policy: &RetryPolicy,
    ) -> Result<Vec<Result<RequestStatus, TransitionError>>> {
        let ids: Vec<RequestId> = batch.iter().map(|report| report.id).collect();
        let outcomes = self.store.report_batch(batch, policy).await;
        // Also after an error, which may hide a commit.
        self.invalidate(ids).await;
        outcomes
    }

    async fn call_back(&self, id: RequestId, report: CallbackReport) -> Result<CallbackOutcome> {
        let outcome = self.store.call_back(id, report).await;
        self.invalidate([id]).await;
        outcome
    }

    async fn cancel_request(&self, id: RequestId) -> Result<CancelOutcome> {
        let outcome = self.store.cancel_request(id).await;
        self.invalidate([id]).await;
        outcome
    }

    async fn wait_for_jobs(&self, at_most: Duration) {
        self.store.wait_for_jobs(at_most).await;
    }

    async fn wait_for_express_jobs(&self, at_most: Duration) {
        self.store.wait_for_express_jobs(at_most).await;
    }

    async fn pending_requests(&self, older_than: Duration, limit: usize) -> Result<Vec<PendingRequest>> {
        self.store.pending_requests(older_than, limit).await
    }

    async fn mark_enqueued(&self, ids: &[RequestId]) -> Result<()> {
        let marked = self.store.mark_enqueued(ids).await;
        self.invalidate(ids.iter().copied()).await;
        marked
    }

    async fn dead_requests(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadRequest>> {
        self.store.dead_requests(after, limit, payload_max).await
    }

    async fn replay_requests(&self, ids: &[RequestId]) -> Result<Vec<RequestId>> {
        let replayed = self.store.replay_requests(ids).await;
        // Also after an error, which may hide a commit.
        self.invalidate(ids.iter().copied()).await;
        replayed
    }

    async fn discard_request(&self, id: RequestId) -> Result<bool> {
        self.store.discard_request(id).await
    }

    async fn count_dead_requests(&self) -> Result<u64> {
        self.store.count_dead_requests().await
    }

    async fn purge_requests(&self, keep: Duration, limit: usize) -> Result<u64> {
        self.store.purge_requests(keep, limit).await
    }

    async fn rollout(&self) -> Result<Option<Rollout>> {
        self.store.rollout().await
    }

    async fn change_rollout(&self, change: RolloutChange, default: Rollout) -> Result<Rollout> {
        self.store.change_rollout(change, default).await
    }

    async fn audit_requests(&self) -> Result<RequestAudit> {
        self.store.audit_requests().await
    }

    async fn begin_erasure(&self, tenant: &TenantId, count_max: usize) -> Result<u64> {
        self.store.begin_erasure(tenant, count_max).await
    }

    async fn erase_some(&self, limit: usize, passed_over: usize) -> Result<Option<ErasedBatch>> {
        let erased = self.store.erase_some(limit, passed_over).await?;
        self.invalidate(erased.iter().flat_map(|batch| batch.requests.iter().copied())).await;
        Ok(erased)
    }

    async fn tenant_limits(&self) -> Result<Vec<TenantLimit>> {
        self.store.tenant_limits().await
    }

    async fn put_tenant_limit(&self, limit: &TenantLimit) -> Result<bool> {
        self.store.put_tenant_limit(limit).await
    }

    async fn delete_tenant_limit(&self, tenant: &TenantId) -> Result<bool> {
        self.store.delete_tenant_limit(tenant).await
    }

    async fn sealing_keys(&self) -> Result<Vec<(SealingKey, Timestamp)>> {
        self.store.sealing_keys().await
    }

    async fn register_sealing_key(&self, key: &SealingKey) -> Result<()> {
        self.store.register_sealing_key(key).await
    }

    async fn remove_sealing_key(&self, name: &str, digest: &str) -> Result<()> {
        self.store.remove_sealing_key(name, digest).await
    }

    async fn find_sealed_with(
        &self,
        name: &str,
        after: Option<RequestId>,
        limit: usize,
    ) -> Result<SealedSearch> {
        self.store.find_sealed_with(name, after, limit).await
    }

    async fn newest_request(&self) -> Result<Option<Request>> {
        self.store.newest_request().await
    }

    async fn hash_keys(&self) -> Result<HashKeys> {
        self.store.hash_keys().await
    }

    async fn begin_hashing(&self, key: &SealedHashKey) -> Result<()> {
        self.store.begin_hashing(key).await
    }

    async fn prepare_hash_key(&self, key: &SealedHashKey) -> Result<()> {
        self.store.prepare_hash_key(key).await
    }

    async fn add_hash_key(&self, key: &SealedHashKey) -> Result<()> {
        self.store.add_hash_key(key).await
    }

    async fn remove_hash_key(&self, name: &str, digest: &str) -> Result<()> {
        self.store.remove_hash_key(name, digest).await
    }

    async fn sealed_names(&self, after: Option<RequestId>, limit: usize) -> Result<Vec<SealedNames>> {
        self.store.sealed_names(after, limit).await
    }

    async fn reseal_request(&self, resealed: &ResealedRequest) -> Result<()> {
        let done = self.store.reseal_request(resealed).await;
        self.invalidate([resealed.id]).await;
        done
    }
}

fn changed_by(claimed: &ClaimedJobs) -> Vec<RequestId> {
    claimed.jobs.iter().map(|job| job.id).chain(claimed.exhausted.iter().copied()).collect()
}
