//! Request in Postgres. A change of a request locks its job first; claims skip jobs that others have locked. Submissions, claims
//! and reports are batches of two round trips each.

mod sealing;
mod submit;
mod tenants;
mod turns;
mod upkeep;
mod work;

use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::Row;
use uuid::Uuid;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_core::{RequestId, RequestType, TenantId, Timestamp, TraceContext};
use weir_queue::MessageSource;
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, ClaimOrder, ClaimedJobs, DeadRequest, DownstreamCapacity,
    ErasedBatch, Failure, HashKeys, JobCounts, JobReport, LIST_SCAN_MAX, PendingRequest, Request,
    RequestAudit, RequestFilter, RequestPage, RequestStore, ResealedRequest, Rollout, RolloutChange, Sealed,
    SealedHashKey, SealedNames, SealedSearch, SealingKey, Submit, SubmitOutcome, TenantCapacity, TenantLimit,
    UnfinishedRequest, WEBHOOKS_TOPIC,
};
use weir_store::{Batch, Result};

use crate::Postgres;
use crate::connection::Values;
use crate::row::{self, column, timestamp, unreadable, unsigned};

/// The name under which tasks that wait for jobs are notified. No topic's name has a space.
const JOBS: &str = "request jobs";
/// As [`JOBS`], for express jobs.
const EXPRESS_JOBS: &str = "express request jobs";

/// A cancelled request is stored as `FAILED_PERMANENT` and `is_cancelled`: servers of the version before know no other status.
const FIND: &str = "
    SELECT request_id, tenant_id, request_type, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END, attempts,
           payload, payload_key_id, result, result_key_id,
           failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate
    FROM request_record WHERE request_id = $1";

/// Requests without payload and result, which may be large, for lists.
const SUMMARIES: &str = "
    SELECT request_id, tenant_id, request_type, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END, attempts,
           ''::bytea, payload_key_id, NULL::bytea, NULL::text,
           failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate
    FROM request_record WHERE request_id = ANY($1)";
const LIST: &str = "
    SELECT request_id, tenant_id, request_type, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END, attempts,
           ''::bytea, payload_key_id, NULL::bytea, NULL::text,
           failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate
    FROM request_record
    WHERE tenant_id = $1 AND request_id < $2 AND request_id >= $3
      AND ($4::text IS NULL OR CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END = $4)
      AND ($5::text IS NULL OR request_type = $5)
    ORDER BY request_id DESC LIMIT $6";
/// As [`LIST`], of every tenant.
const LIST_ALL: &str = "
    SELECT request_id, tenant_id, request_type, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END, attempts,
           ''::bytea, payload_key_id, NULL::bytea, NULL::text,
           failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate
    FROM request_record
    WHERE request_id < $1 AND request_id >= $2
      AND ($3::text IS NULL OR CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END = $3)
      AND ($4::text IS NULL OR request_type = $4)
    ORDER BY request_id DESC LIMIT $5";

/// The last request that one page of a list scans; no row if there are fewer.
const LAST_SCANNED: &str = "
    SELECT request_id FROM request_record WHERE tenant_id = $1 AND request_id < $2
    ORDER BY request_id DESC LIMIT 1 OFFSET $3";
/// As [`LAST_SCANNED`], of every tenant.
const LAST_SCANNED_OF_ALL: &str = "
    SELECT request_id FROM request_record WHERE request_id < $1 ORDER BY request_id DESC LIMIT 1 OFFSET $2";

/// A request and its job are not locked: what was read may have changed by the time it is shown.
const UNFINISHED: &str = "
    SELECT record.request_id, tenant_id, request_type, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END,
           record.attempts, ''::bytea, payload_key_id, NULL::bytea, NULL::text,
           failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate,
           job.claimable_at, job.is_leased
    FROM (SELECT * FROM request_job WHERE downstream = $1 ORDER BY claimable_at LIMIT $2) AS job
    CROSS JOIN LATERAL (SELECT * FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record
    ORDER BY job.claimable_at";

#[async_trait]
impl RequestStore for Postgres {
    async fn submit_batch(&self, batch: Batch<Submit>) -> Result<Vec<SubmitOutcome>> {
        let outcomes = submit::submit(self, batch).await?;
        if outcomes.iter().any(|outcome| matches!(outcome, SubmitOutcome::Accepted(_))) {
            self.inner.topic_notify.notify(JOBS);
        }
        Ok(outcomes)
    }

    async fn find_request(&self, id: RequestId) -> Result<Option<Request>> {
        let row = self.inner.pool.query_opt(FIND, &[id.as_uuid()]).await?;
        row.as_ref().map(read_request).transpose()
    }

    async fn find_summaries(&self, ids: &[RequestId]) -> Result<Vec<Request>> {
        let rows = self.inner.pool.query(SUMMARIES, &[&uuids(ids)]).await?;
        rows.iter().map(read_request).collect()
    }

    async fn list_requests(
        &self,
        filter: &RequestFilter,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<RequestPage> {
        let session = self.inner.pool.session().await?;
        let before = before.map_or(Uuid::max(), |id| *id.as_uuid());
        let tenant = filter.tenant.as_ref().map(TenantId::as_str);
        let mut last: Option<Uuid> = None;
        if filter.needs_scan() {
            let offset = row::bigint(LIST_SCAN_MAX - 1);
            let row = match tenant {
                Some(tenant) => session.query_opt(LAST_SCANNED, &[&tenant, &before, &offset]).await?,
                None => session.query_opt(LAST_SCANNED_OF_ALL, &[&before, &offset]).await?,
            };
            last = row.map(|row| column(&row, 0)).transpose()?;
        }
        let (down_to, limited) = (last.unwrap_or_default(), row::bigint(limit));
        let status = filter.status.map(RequestStatus::as_str);
        let request_type = filter.request_type.as_ref().map(RequestType::as_str);
        let rows = match tenant {
            Some(tenant) => {
                let values: Values<'_> = &[&tenant, &before, &down_to, &status, &request_type, &limited];
                session.query(LIST, values).await?
            }
            None => {
                let values: Values<'_> = &[&before, &down_to, &status, &request_type, &limited];
                session.query(LIST_ALL, values).await?
            }
        };
        session.keep();
        let requests = rows.iter().map(read_request).collect::<Result<Vec<_>>>()?;
        let next_before = last.filter(|_| requests.len() < limit).map(RequestId::from_uuid);
        Ok(RequestPage { requests, next_before })
    }

    async fn unfinished_requests(&self, downstream: &str, limit: usize) -> Result<Vec<UnfinishedRequest>> {
        let rows = self.inner.pool.query(UNFINISHED, &[&downstream, &row::bigint(limit)]).await?;
        let read = |row: &Row| {
            let (request, claimable_at) = (read_request(row)?, timestamp(row, 16)?);
            Ok(UnfinishedRequest { request, claimable_at, is_leased: column(row, 17)? })
        };
        rows.iter().map(read).collect()
    }

    async fn claim_jobs(
        &self,
        room: &[DownstreamCapacity],
        order: &ClaimOrder,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let claimed = turns::claim(self, room, order, policy).await?;
        self.notify_webhooks(&claimed);
        Ok(claimed)
    }

    async fn claim_express(
        &self,
        room: &[DownstreamCapacity],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let claimed = turns::claim_express(self, room, tenants, policy).await?;
        self.notify_webhooks(&claimed);
        Ok(claimed)
    }

    async fn claim_named(
        &self,
        ids: &[RequestId],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let claimed = work::claim_named(self, ids, tenants, policy).await?;
        self.notify_webhooks(&claimed);
        Ok(claimed)
    }

    async fn job_downstreams(&self) -> Result<Vec<String>> {
        work::downstreams(self).await
    }

    async fn count_jobs(&self, downstreams: &[String], limit: usize) -> Result<Vec<JobCounts>> {
        work::count(self, downstreams, limit).await
    }

    async fn report_batch(
        &self,
        batch: Vec<JobReport>,
        policy: &RetryPolicy,
    ) -> Result<Vec<Result<RequestStatus, TransitionError>>> {
        let (outcomes, has_webhooks) = work::report(self, batch, policy).await?;
        if has_webhooks {
            self.inner.topic_notify.notify(WEBHOOKS_TOPIC);
        }
        Ok(outcomes)
    }

    async fn call_back(&self, id: RequestId, report: CallbackReport) -> Result<CallbackOutcome> {
        let outcome = work::call_back(self, id, report).await?;
        if matches!(outcome, CallbackOutcome::Applied(_)) {
            self.inner.topic_notify.notify(WEBHOOKS_TOPIC);
        }
        Ok(outcome)
    }

    async fn cancel_request(&self, id: RequestId) -> Result<CancelOutcome> {
        work::cancel(self, id).await
    }

    async fn wait_for_jobs(&self, at_most: Duration) {
        self.wait(JOBS, at_most).await;
    }

    async fn wait_for_express_jobs(&self, at_most: Duration) {
        self.wait(EXPRESS_JOBS, at_most).await;
    }

    async fn pending_requests(&self, older_than: Duration, limit: usize) -> Result<Vec<PendingRequest>> {
        upkeep::pending(self, older_than, limit).await
    }

    async fn mark_enqueued(&self, ids: &[RequestId]) -> Result<()> {
        upkeep::mark_enqueued(self, ids).await?;
        self.inner.topic_notify.notify(JOBS);
        Ok(())
    }

    async fn dead_requests(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadRequest>> {
        upkeep::list(self, after, limit, payload_max).await
    }

    async fn replay_requests(&self, ids: &[RequestId]) -> Result<Vec<RequestId>> {
        upkeep::replay(self, ids).await
    }

    async fn discard_request(&self, id: RequestId) -> Result<bool> {
        upkeep::discard(self, id).await
    }

    async fn count_dead_requests(&self) -> Result<u64> {
        upkeep::count(self).await
    }

    async fn purge_requests(&self, keep: Duration, limit: usize) -> Result<u64> {
        upkeep::purge(self, keep, limit).await
    }

    async fn rollout(&self) -> Result<Option<Rollout>> {
        upkeep::rollout(self).await
    }

    async fn change_rollout(&self, change: RolloutChange, default: Rollout) -> Result<Rollout> {
        upkeep::change_rollout(self, change, default).await
    }

    async fn audit_requests(&self) -> Result<RequestAudit> {
        upkeep::books(self).await
    }

    async fn begin_erasure(&self, tenant: &TenantId, count_max: usize) -> Result<u64> {
        tenants::begin_erasure(self, tenant, count_max).await
    }

    async fn erase_some(&self, limit: usize, passed_over: usize) -> Result<Option<ErasedBatch>> {
        tenants::erase_some(self, limit, passed_over).await
    }

    async fn tenant_limits(&self) -> Result<Vec<TenantLimit>> {
        tenants::limits(self).await
    }

    async fn put_tenant_limit(&self, limit: &TenantLimit) -> Result<bool> {
        tenants::put_limit(self, limit).await
    }

    async fn delete_tenant_limit(&self, tenant: &TenantId) -> Result<bool> {
        tenants::delete_limit(self, tenant).await
    }

    async fn sealing_keys(&self) -> Result<Vec<(SealingKey, Timestamp)>> {
        sealing::keys(self).await
    }

    async fn register_sealing_key(&self, key: &SealingKey) -> Result<()> {
        sealing::register(self, key).await
    }

    async fn remove_sealing_key(&self, name: &str, digest: &str) -> Result<()> {
        sealing::forget(self, name, digest).await
    }

    async fn find_sealed_with(
        &self,
        name: &str,
        after: Option<RequestId>,
        limit: usize,
    ) -> Result<SealedSearch> {
        sealing::find_sealed_with(self, name, after, limit).await
    }

    async fn newest_request(&self) -> Result<Option<Request>> {
        sealing::newest(self).await
    }

    async fn hash_keys(&self) -> Result<HashKeys> {
        sealing::hash_keys(self).await
    }

    async fn begin_hashing(&self, key: &SealedHashKey) -> Result<()> {
        sealing::begin_hashing(self, key).await
    }

    async fn prepare_hash_key(&self, key: &SealedHashKey) -> Result<()> {
        sealing::prepare_hash_key(self, key).await
    }

    async fn add_hash_key(&self, key: &SealedHashKey) -> Result<()> {
        sealing::add_hash_key(self, key).await
    }

    async fn remove_hash_key(&self, name: &str, digest: &str) -> Result<()> {
        sealing::remove_hash_key(self, name, digest).await
    }

    async fn sealed_names(&self, after: Option<RequestId>, limit: usize) -> Result<Vec<SealedNames>> {
        sealing::names(self, after, limit).await
    }

    async fn reseal_request(&self, resealed: &ResealedRequest) -> Result<()> {
        sealing::reseal(self, resealed).await
    }
}

impl Postgres {
    /// Notifies the webhook sender: a request that a claim has given up may have a webhook.
    fn notify_webhooks(&self, claimed: &ClaimedJobs) {
        if !claimed.exhausted.is_empty() {
            self.inner.topic_notify.notify(WEBHOOKS_TOPIC);
        }
    }
}

fn read_request(row: &Row) -> Result<Request> {
    let (result, result_key): (Option<Vec<u8>>, Option<String>) = (column(row, 7)?, column(row, 8)?);
    let (code, message): (Option<String>, Option<String>) = (column(row, 9)?, column(row, 10)?);
    Ok(Request {
        id: read_id(row, 0)?,
        tenant: TenantId::parse(column::<&str>(row, 1)?).map_err(unreadable)?,
        request_type: RequestType::parse(column::<&str>(row, 2)?).map_err(unreadable)?,
        status: read_status(column(row, 3)?)?,
        attempts: unsigned(column(row, 4)?),
        payload: Sealed { bytes: column(row, 5)?, key_id: column(row, 6)? },
        result: result.map(|bytes| Sealed { bytes, key_id: result_key.unwrap_or_default() }),
        failure: code.map(|code| Failure { code, message: message.unwrap_or_default() }),
        callback_url: column(row, 11)?,
        trace: read_trace(row, 14)?,
        accepted_at: timestamp(row, 12)?,
        updated_at: timestamp(row, 13)?,
    })
}

/// Reads `traceparent` and the `tracestate` in the column behind it.
fn read_trace(row: &Row, index: usize) -> Result<Option<TraceContext>> {
    Ok(TraceContext::stored(column(row, index)?, column(row, index + 1)?))
}

fn read_id(row: &Row, index: usize) -> Result<RequestId> {
    Ok(RequestId::from_uuid(column(row, index)?))
}

fn read_status(text: &str) -> Result<RequestStatus> {
    RequestStatus::parse(text)
        .ok_or_else(|| unreadable(format!("unknown request status {text:?} in the database")))
}

fn uuids(ids: &[RequestId]) -> Vec<Uuid> {
    ids.iter().map(|id| *id.as_uuid()).collect()
}
