//! Request in SQLite. Every change runs on the writer thread, so no rows are locked and no two changes conflict.

pub(crate) mod idempotency_journal;
mod jobs;
mod maintenance;
mod sealing;
pub(crate) mod submit;
mod tenants;
mod turns;

use std::ops::ControlFlow;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
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

use crate::Sqlite;
use crate::error::fault;
use crate::writer::{BatchInTurns, Scheduling};

/// The topic that wakes workers. Names of real topics have no space.
const JOBS: &str = "request jobs";
/// As [`JOBS`], for express jobs.
const EXPRESS_JOBS: &str = "express request jobs";

/// The columns that [`read_request`] reads.
const COLUMNS: &str = "
    request_id, tenant_id, request_type, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END, attempts,
    payload, payload_key_id, result, result_key_id,
    failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate";

/// The same columns, without payload and result: lists do not show them, and they may be large.
const SUMMARY: &str = "
    request_id, tenant_id, request_type, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END, attempts,
    x'', payload_key_id, NULL, NULL,
    failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate";

const SCAN_END: &str = "
    SELECT request_id FROM request_record WHERE tenant_id = ?1 AND request_id < ?2
    ORDER BY request_id DESC LIMIT 1 OFFSET ?3";
/// As [`SCAN_END`], of every tenant.
const SCAN_END_OF_ALL: &str = "
    SELECT request_id FROM request_record WHERE request_id < ?1 ORDER BY request_id DESC LIMIT 1 OFFSET ?2";

#[async_trait]
impl RequestStore for Sqlite {
    async fn submit_batch(&self, batch: Batch<Submit>) -> Result<Vec<SubmitOutcome>> {
        let clock = self.inner.clock.clone();
        let mut submit = submit::SubmitJob::new(batch);
        let submit =
            self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, state, turn| {
                submit.run_turn(connection, &mut state.idempotency, clock.now(), turn)
            });
        let submitted = submit.await;
        // A batch that failed in a later turn may have accepted jobs in earlier ones.
        if submitted.as_ref().map_or(true, |(_, is_express)| *is_express) {
            self.inner.topic_notify.notify(EXPRESS_JOBS);
        }
        let outcomes = submitted.map(|(outcomes, _)| outcomes);
        let is_accepted = |outcome: &SubmitOutcome| matches!(outcome, SubmitOutcome::Accepted(_));
        if outcomes.as_ref().map_or(true, |outcomes| outcomes.iter().any(is_accepted)) {
            self.inner.topic_notify.notify(JOBS);
        }
        outcomes
    }

    async fn find_request(&self, id: RequestId) -> Result<Option<Request>> {
        self.read(move |connection| find(connection, id)).await
    }

    async fn find_summaries(&self, ids: &[RequestId]) -> Result<Vec<Request>> {
        let ids = ids.to_vec();
        self.read(move |connection| summaries(connection, &ids)).await
    }

    async fn list_requests(
        &self,
        filter: &RequestFilter,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<RequestPage> {
        let filter = filter.clone();
        self.read(move |connection| list(connection, &filter, before, limit)).await
    }

    async fn unfinished_requests(&self, downstream: &str, limit: usize) -> Result<Vec<UnfinishedRequest>> {
        let downstream = downstream.to_owned();
        self.read(move |connection| unfinished(connection, &downstream, limit)).await
    }

    async fn claim_jobs(
        &self,
        room: &[DownstreamCapacity],
        order: &ClaimOrder,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let now = self.inner.clock.now();
        // A read connection checks first, so that workers that find no job do not load the writer.
        let next = {
            let room = room.to_vec();
            self.read(move |connection| jobs::next(connection, &room)).await?
        };
        match next {
            Some(next) if next <= now => {}
            next => {
                return Ok(ClaimedJobs {
                    next_due_in: next.map(|next| next.since(now)),
                    ..ClaimedJobs::default()
                });
            }
        }
        let mut claim = turns::TurnClaimJob::new(room, order, *policy, now);
        let claim = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            claim.run_turn(connection, turn)
        });
        let claimed = claim.await?;
        self.notify_webhooks(&claimed);
        Ok(claimed)
    }

    async fn claim_express(
        &self,
        room: &[DownstreamCapacity],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let (room, tenants, policy, now) = (room.to_vec(), tenants.clone(), *policy, self.inner.clock.now());
        let has_express = {
            let room = room.clone();
            self.read(move |connection| turns::has_express(connection, &room, now)).await?
        };
        if !has_express {
            return Ok(ClaimedJobs::default());
        }
        let claim = self.inner.writer.run_in_turns(Scheduling::Prioritized, move |connection, _, _| {
            turns::claim_express(connection, &room, &tenants, &policy, now).map(ControlFlow::Break)
        });
        let claimed = claim.await?;
        self.notify_webhooks(&claimed);
        Ok(claimed)
    }

    async fn claim_named(
        &self,
        ids: &[RequestId],
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
    ) -> Result<ClaimedJobs> {
        let (ids, mut tenants) = (ids.to_vec(), tenants.clone());
        let (policy, now) = (*policy, self.inner.clock.now());
        let mut batch = BatchInTurns::<_, ()>::new(ids);
        let mut claimed = ClaimedJobs::default();
        let claim = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            while let Some(id) = batch.next(turn) {
                jobs::claim_named(connection, id, &mut tenants, &policy, now, &mut claimed)?;
            }
            Ok(batch.finish().map_break(|_| std::mem::take(&mut claimed)))
        });
        let claimed = claim.await?;
        self.notify_webhooks(&claimed);
        Ok(claimed)
    }

    async fn job_downstreams(&self) -> Result<Vec<String>> {
        self.read(jobs::downstreams).await
    }

    async fn count_jobs(&self, downstreams: &[String], limit: usize) -> Result<Vec<JobCounts>> {
        let (downstreams, now) = (downstreams.to_vec(), self.inner.clock.now());
        let count = move |connection: &Connection| {
            downstreams.iter().map(|name| jobs::count(connection, name, limit, now)).collect()
        };
        self.read(count).await
    }

    async fn report_batch(
        &self,
        batch: Vec<JobReport>,
        policy: &RetryPolicy,
    ) -> Result<Vec<Result<RequestStatus, TransitionError>>> {
        let (policy, now) = (*policy, self.inner.clock.now());
        let mut batch = BatchInTurns::new(batch);
        let mut has_webhooks = false;
        let report = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            while let Some(report) = batch.next(turn) {
                let (outcome, needs_webhook) = jobs::report(connection, report, &policy, now)?;
                batch.outcomes.push(outcome);
                has_webhooks |= needs_webhook;
            }
            Ok(batch.finish().map_break(|outcomes| (outcomes, has_webhooks)))
        });
        let reported = report.await;
        // A batch that failed in a later turn may have enqueued webhooks in earlier ones.
        if reported.as_ref().map_or(true, |(_, has_webhooks)| *has_webhooks) {
            self.inner.topic_notify.notify(WEBHOOKS_TOPIC);
        }
        reported.map(|(outcomes, _)| outcomes)
    }

    async fn call_back(&self, id: RequestId, report: CallbackReport) -> Result<CallbackOutcome> {
        let now = self.inner.clock.now();
        let call_back = move |connection: &Connection| jobs::call_back(connection, id, report, now);
        let outcome = self.inner.writer.run(call_back).await?;
        if matches!(outcome, CallbackOutcome::Applied(_)) {
            self.inner.topic_notify.notify(WEBHOOKS_TOPIC);
        }
        Ok(outcome)
    }

    async fn cancel_request(&self, id: RequestId) -> Result<CancelOutcome> {
        let now = self.inner.clock.now();
        self.inner.writer.run(move |connection| jobs::cancel(connection, id, now)).await
    }

    async fn wait_for_jobs(&self, at_most: Duration) {
        self.wait(JOBS, at_most).await;
    }

    async fn wait_for_express_jobs(&self, at_most: Duration) {
        self.wait(EXPRESS_JOBS, at_most).await;
    }

    async fn pending_requests(&self, older_than: Duration, limit: usize) -> Result<Vec<PendingRequest>> {
        let now = self.inner.clock.now();
        self.read(move |connection| maintenance::pending(connection, older_than, limit, now)).await
    }

    async fn mark_enqueued(&self, ids: &[RequestId]) -> Result<()> {
        let (ids, now) = (ids.to_vec(), self.inner.clock.now());
        let mut batch = BatchInTurns::<_, ()>::new(ids);
        let mark = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            while let Some(id) = batch.next(turn) {
                maintenance::mark_enqueued(connection, id, now)?;
            }
            Ok(batch.finish())
        });
        mark.await?;
        self.inner.topic_notify.notify(JOBS);
        Ok(())
    }

    async fn dead_requests(
        &self,
        after: Option<RequestId>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadRequest>> {
        self.read(move |connection| maintenance::list(connection, after, limit, payload_max)).await
    }

    async fn replay_requests(&self, ids: &[RequestId]) -> Result<Vec<RequestId>> {
        let (mut ids, now) = (ids.to_vec(), self.inner.clock.now());
        ids.sort_unstable();
        let mut batch = BatchInTurns::<_, RequestId>::new(ids);
        let replay = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            while let Some(id) = batch.next(turn) {
                if maintenance::replay(connection, id, now)? {
                    batch.outcomes.push(id);
                }
            }
            Ok(batch.finish())
        });
        let replayed = replay.await?;
        self.inner.topic_notify.notify(JOBS);
        Ok(replayed)
    }

    async fn discard_request(&self, id: RequestId) -> Result<bool> {
        self.inner.writer.run(move |connection| maintenance::discard(connection, id)).await
    }

    async fn count_dead_requests(&self) -> Result<u64> {
        self.read(maintenance::count).await
    }

    async fn purge_requests(&self, keep: Duration, limit: usize) -> Result<u64> {
        let mut purge = maintenance::PurgeJob::new(keep, limit, self.inner.clock.now());
        self.inner
            .writer
            .run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
                purge.run_turn(connection, turn)
            })
            .await
    }

    async fn rollout(&self) -> Result<Option<Rollout>> {
        self.read(maintenance::rollout).await
    }

    async fn change_rollout(&self, change: RolloutChange, default: Rollout) -> Result<Rollout> {
        self.inner
            .writer
            .run(move |connection| maintenance::change_rollout(connection, change, default))
            .await
    }

    async fn audit_requests(&self) -> Result<RequestAudit> {
        self.read(maintenance::audit).await
    }

    async fn begin_erasure(&self, tenant: &TenantId, count_max: usize) -> Result<u64> {
        let (erased, now) = (tenant.clone(), self.inner.clock.now());
        self.inner.writer.run(move |connection| tenants::begin_erasure(connection, &erased, now)).await?;
        let tenant = tenant.clone();
        self.read(move |connection| tenants::count(connection, &tenant, count_max)).await
    }

    async fn erase_some(&self, limit: usize, passed_over: usize) -> Result<Option<ErasedBatch>> {
        // A read connection checks first, so that the writer is not disturbed while there is nothing to erase.
        if self.read(move |connection| tenants::next_erasure(connection, passed_over)).await?.is_none() {
            return Ok(None);
        }
        let mut erase = tenants::EraseJob::new(limit, passed_over);
        let erase =
            self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, state, turn| {
                erase.run_turn(connection, &mut state.idempotency, turn)
            });
        erase.await
    }

    async fn tenant_limits(&self) -> Result<Vec<TenantLimit>> {
        self.read(tenants::limits).await
    }

    async fn put_tenant_limit(&self, limit: &TenantLimit) -> Result<bool> {
        let limit = limit.clone();
        self.inner.writer.run(move |connection| tenants::put_limit(connection, &limit)).await
    }

    async fn delete_tenant_limit(&self, tenant: &TenantId) -> Result<bool> {
        let tenant = tenant.clone();
        self.inner.writer.run(move |connection| tenants::delete_limit(connection, &tenant)).await
    }

    async fn sealing_keys(&self) -> Result<Vec<(SealingKey, Timestamp)>> {
        self.read(sealing::keys).await
    }

    async fn register_sealing_key(&self, key: &SealingKey) -> Result<()> {
        let (key, now) = (key.clone(), self.inner.clock.now());
        self.inner.writer.run(move |connection| sealing::register(connection, &key, now)).await
    }

    async fn remove_sealing_key(&self, name: &str, digest: &str) -> Result<()> {
        let (name, digest) = (name.to_owned(), digest.to_owned());
        self.inner.writer.run(move |connection| sealing::forget(connection, &name, &digest)).await
    }

    async fn find_sealed_with(
        &self,
        name: &str,
        after: Option<RequestId>,
        limit: usize,
    ) -> Result<SealedSearch> {
        let name = name.to_owned();
        self.read(move |connection| sealing::find_sealed_with(connection, &name, after, limit)).await
    }

    async fn newest_request(&self) -> Result<Option<Request>> {
        self.read(sealing::newest).await
    }

    async fn hash_keys(&self) -> Result<HashKeys> {
        let now = self.inner.clock.now();
        self.read(move |connection| sealing::hash_keys(connection, now)).await
    }

    async fn begin_hashing(&self, key: &SealedHashKey) -> Result<()> {
        let (key, now) = (key.clone(), self.inner.clock.now());
        self.inner.writer.run(move |connection| sealing::begin_hashing(connection, &key, now)).await
    }

    /// No server of another version uses the file, so the index begins with its key.
    async fn prepare_hash_key(&self, key: &SealedHashKey) -> Result<()> {
        self.begin_hashing(key).await
    }

    async fn add_hash_key(&self, key: &SealedHashKey) -> Result<()> {
        let key = key.clone();
        self.inner.writer.run(move |connection| sealing::add_hash_key(connection, &key)).await
    }

    async fn remove_hash_key(&self, name: &str, digest: &str) -> Result<()> {
        let (name, digest) = (name.to_owned(), digest.to_owned());
        self.inner.writer.run(move |connection| sealing::remove_hash_key(connection, &name, &digest)).await
    }

    async fn sealed_names(&self, after: Option<RequestId>, limit: usize) -> Result<Vec<SealedNames>> {
        self.read(move |connection| sealing::names(connection, after, limit)).await
    }

    async fn reseal_request(&self, resealed: &ResealedRequest) -> Result<()> {
        let resealed = resealed.clone();
        self.inner.writer.run(move |connection| sealing::reseal(connection, &resealed)).await
    }
}

impl Sqlite {
    /// Wakes the webhook sender if the claim gave up requests, which may have callbacks.
    fn notify_webhooks(&self, claimed: &ClaimedJobs) {
        if !claimed.exhausted.is_empty() {
            self.inner.topic_notify.notify(WEBHOOKS_TOPIC);
        }
    }
}

/// The statements that are composed at run time, each with its file and a name.
#[cfg(test)]
pub(crate) fn composed_sql() -> Vec<(&'static str, &'static str, String)> {
    let mut all = vec![("request.rs", "find", find_sql()), ("request.rs", "list", list_sql())];
    all.push(("request.rs", "list_all", list_all_sql()));
    all.push(("request.rs", "unfinished", unfinished_sql()));
    all.push(("request.rs", "summary", summary_sql()));
    all.extend(jobs::composed_sql().map(|(name, sql)| ("request/jobs.rs", name, sql)));
    all
}

fn find_sql() -> String {
    format!("SELECT {COLUMNS} FROM request_record WHERE request_id = ?1")
}

fn summary_sql() -> String {
    format!("SELECT {SUMMARY} FROM request_record WHERE request_id = ?1")
}

fn list_sql() -> String {
    format!(
        "SELECT {SUMMARY} FROM request_record
         WHERE tenant_id = ?1 AND request_id < ?2 AND request_id >= ?3
           AND (?4 IS NULL OR CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END = ?4)
           AND (?5 IS NULL OR request_type = ?5)
         ORDER BY request_id DESC LIMIT ?6"
    )
}

/// As [`list_sql`], of every tenant.
fn list_all_sql() -> String {
    format!(
        "SELECT {SUMMARY} FROM request_record
         WHERE request_id < ?1 AND request_id >= ?2
           AND (?3 IS NULL OR CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END = ?3)
           AND (?4 IS NULL OR request_type = ?4)
         ORDER BY request_id DESC LIMIT ?5"
    )
}

fn unfinished_sql() -> String {
    format!(
        "SELECT {SUMMARY}, claimable_at, is_leased FROM request_record
         WHERE downstream = ?1 AND claimable_at IS NOT NULL ORDER BY claimable_at LIMIT ?2"
    )
}

fn find(connection: &Connection, id: RequestId) -> rusqlite::Result<Option<Request>> {
    connection.prepare_cached(&find_sql())?.query_row([id.to_string()], read_request).optional()
}

fn summaries(connection: &Connection, ids: &[RequestId]) -> rusqlite::Result<Vec<Request>> {
    let mut statement = connection.prepare_cached(&summary_sql())?;
    let found = ids.iter().map(|id| statement.query_row([id.to_string()], read_request).optional());
    found.filter_map(rusqlite::Result::transpose).collect()
}

fn list(
    connection: &Connection,
    filter: &RequestFilter,
    before: Option<RequestId>,
    limit: usize,
) -> rusqlite::Result<RequestPage> {
    // Ids are hexadecimal, so "g" sorts behind all of them.
    let before = before.map_or_else(|| "g".to_owned(), |id| id.to_string());
    let tenant = filter.tenant.as_ref().map(TenantId::as_str);
    let scan_end = if filter.needs_scan() { find_scan_end(connection, tenant, &before)? } else { None };
    let down_to = scan_end.map(|id| id.to_string()).unwrap_or_default();
    let status = filter.status.map(RequestStatus::as_str);
    let (request_type, rows) = (filter.request_type.as_ref().map(RequestType::as_str), limited(limit));
    let requests: Vec<Request> = match tenant {
        Some(tenant) => connection
            .prepare_cached(&list_sql())?
            .query_map(params![tenant, before, down_to, status, request_type, rows], read_request)?
            .collect::<rusqlite::Result<_>>()?,
        None => connection
            .prepare_cached(&list_all_sql())?
            .query_map(params![before, down_to, status, request_type, rows], read_request)?
            .collect::<rusqlite::Result<_>>()?,
    };
    let next_before = scan_end.filter(|_| requests.len() < limit);
    Ok(RequestPage { requests, next_before })
}

/// The last id that a filtered list scans, or `None` if fewer than [`LIST_SCAN_MAX`] requests remain.
fn find_scan_end(
    connection: &Connection,
    tenant: Option<&str>,
    before: &str,
) -> rusqlite::Result<Option<RequestId>> {
    let offset = limited(LIST_SCAN_MAX - 1);
    match tenant {
        Some(tenant) => connection
            .prepare_cached(SCAN_END)?
            .query_row(params![tenant, before, offset], |row| read_id(row, 0))
            .optional(),
        None => connection
            .prepare_cached(SCAN_END_OF_ALL)?
            .query_row(params![before, offset], |row| read_id(row, 0))
            .optional(),
    }
}

fn unfinished(
    connection: &Connection,
    downstream: &str,
    limit: usize,
) -> rusqlite::Result<Vec<UnfinishedRequest>> {
    let mut statement = connection.prepare_cached(&unfinished_sql())?;
    let read = |row: &Row<'_>| {
        let claimable_at = Timestamp::from_micros(row.get(16)?);
        Ok(UnfinishedRequest { request: read_request(row)?, claimable_at, is_leased: row.get(17)? })
    };
    statement.query_map(params![downstream, limited(limit)], read)?.collect()
}

pub(crate) fn limited(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

fn read_request(row: &Row<'_>) -> rusqlite::Result<Request> {
    let (result, result_key): (Option<Vec<u8>>, Option<String>) = (row.get(7)?, row.get(8)?);
    let (code, message): (Option<String>, Option<String>) = (row.get(9)?, row.get(10)?);
    Ok(Request {
        id: read_id(row, 0)?,
        tenant: TenantId::parse(row.get_ref(1)?.as_str()?).map_err(fault)?,
        request_type: RequestType::parse(row.get_ref(2)?.as_str()?).map_err(fault)?,
        status: read_status(row, 3)?,
        attempts: row.get(4)?,
        payload: Sealed { bytes: row.get(5)?, key_id: row.get(6)? },
        result: result.map(|bytes| Sealed { bytes, key_id: result_key.unwrap_or_default() }),
        failure: code.map(|code| Failure { code, message: message.unwrap_or_default() }),
        callback_url: row.get(11)?,
        trace: read_trace(row, 14)?,
        accepted_at: Timestamp::from_micros(row.get(12)?),
        updated_at: Timestamp::from_micros(row.get(13)?),
    })
}

/// Reads `traceparent` and the `tracestate` in the column behind it.
fn read_trace(row: &Row<'_>, index: usize) -> rusqlite::Result<Option<TraceContext>> {
    let (parent, state) = (row.get_ref(index)?, row.get_ref(index + 1)?);
    Ok(TraceContext::stored(parent.as_str_or_null()?, state.as_str_or_null()?))
}

fn read_id(row: &Row<'_>, index: usize) -> rusqlite::Result<RequestId> {
    RequestId::parse(row.get_ref(index)?.as_str()?).ok_or_else(unreadable)
}

fn read_status(row: &Row<'_>, index: usize) -> rusqlite::Result<RequestStatus> {
    RequestStatus::parse(row.get_ref(index)?.as_str()?).ok_or_else(unreadable)
}

/// The error for a row that Weir cannot have written.
fn unreadable() -> rusqlite::Error {
    fault("a request in the database has an unknown id or status")
}
