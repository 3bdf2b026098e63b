//! Request in Postgres. Whoever changes a request locks its job first; claims pass over jobs that others hold. Submissions,
//! claims and reports are batches of two round trips each.

mod sealing;
mod submit;
mod upkeep;
mod work;

use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::{Row, Statement};
use uuid::Uuid;
use weir_core::quota::Limits;
use weir_core::request::retry::Policy;
use weir_core::request::state::{Refused, Status};
use weir_core::{RequestId, RequestType, TenantId, Timestamp};
use weir_queue::Source;
use weir_store::request::{
    Books, CallbackOutcome, CallbackReport, Claimed, DeadRequest, Failure, JobReport, LOOKED_AT_MAX, Listed,
    Pending, Request, RequestStore, Rollout, RolloutChange, Room, Sealed, SealedSearch, SealingKey, Submit,
    SubmitOutcome, WEBHOOKS,
};
use weir_store::{Batch, Error, Result};

use crate::quota::{column, unsigned};
use crate::{ENGINE, Postgres, time};

/// What whoever waits for jobs is woken by. No topic has a space in its name.
const JOBS: &str = "request jobs";

/// As [`read_request`] reads them, without what a list does not show, and what may be large.
const SUMMARY: &str = "
    record.request_id, record.tenant_id, record.request_type, record.status, record.attempts, ''::bytea,
    record.payload_key_id, NULL::bytea, NULL::text, record.failure_code, record.failure_message,
    record.callback_url, record.created_at, record.updated_at";

const FIND: &str = "
    SELECT request_id, tenant_id, request_type, status, attempts, payload, payload_key_id, result, result_key_id,
           failure_code, failure_message, callback_url, created_at, updated_at
    FROM request_record WHERE request_id = $1";

/// The last of those that are looked through; none when there are not so many.
const LAST_LOOKED_AT: &str = "
    SELECT request_id FROM request_record WHERE tenant_id = $1 AND request_id < $2
    ORDER BY request_id DESC LIMIT 1 OFFSET $3";

/// In the order of [`Statements::from_prepared`].
pub(crate) fn sql() -> impl Iterator<Item = &'static str> {
    [FIND].into_iter().chain(submit::SQL).chain(work::SQL)
}

#[cfg(test)]
pub(crate) use upkeep::BATCHES as UPKEEP;

#[derive(Debug)]
pub(crate) struct Statements {
    find: Statement,
    submit: submit::Statements,
    work: work::Statements,
}

impl Statements {
    pub(crate) fn from_prepared(next: &mut impl FnMut() -> Statement) -> Self {
        Self {
            find: next(),
            submit: submit::Statements::from_prepared(next),
            work: work::Statements::from_prepared(next),
        }
    }
}

#[async_trait]
impl RequestStore for Postgres {
    async fn submit_batch(&self, batch: Batch<Submit>, limits: Option<Limits>) -> Result<Vec<SubmitOutcome>> {
        let outcomes = submit::submit(self, batch, limits).await?;
        if outcomes.iter().any(|outcome| matches!(outcome, SubmitOutcome::Accepted(_))) {
            self.inner.bells.ring(JOBS);
        }
        Ok(outcomes)
    }

    async fn find_request(&self, id: RequestId) -> Result<Option<Request>> {
        let session = self.inner.pool.request_session().await?;
        let statement = &session.statements.request.find;
        let row = session.bounded(session.client.query_opt(statement, &[id.as_uuid()])).await?;
        session.keep();
        row.as_ref().map(read_request).transpose()
    }

    async fn find_summaries(&self, ids: &[RequestId]) -> Result<Vec<Request>> {
        let sql = format!("SELECT {SUMMARY} FROM request_record AS record WHERE request_id = ANY($1)");
        let ids: Vec<Uuid> = ids.iter().map(|id| *id.as_uuid()).collect();
        let session = self.inner.pool.request_session().await?;
        let rows = session.bounded(session.client.query(&sql, &[&ids])).await?;
        session.keep();
        rows.iter().map(read_request).collect()
    }

    async fn list_requests(
        &self,
        tenant: &TenantId,
        status: Option<Status>,
        before: Option<RequestId>,
        limit: usize,
    ) -> Result<Listed> {
        let sql = format!(
            "SELECT {SUMMARY} FROM request_record AS record
             WHERE tenant_id = $1 AND request_id < $2 AND request_id >= $3 AND ($4::text IS NULL OR status = $4)
             ORDER BY request_id DESC LIMIT $5"
        );
        let session = self.inner.pool.request_session().await?;
        let (tenant, before) = (tenant.as_str(), before.map_or(Uuid::max(), |id| *id.as_uuid()));
        let mut last: Option<Uuid> = None;
        if status.is_some() {
            let place = limited(LOOKED_AT_MAX - 1);
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 3] = [&tenant, &before, &place];
            let row = session.bounded(session.client.query_opt(LAST_LOOKED_AT, &values)).await?;
            last = row.map(|row| column(&row, 0)).transpose()?;
        }
        let down_to = last.unwrap_or_default();
        let values: [&(dyn tokio_postgres::types::ToSql + Sync); 5] =
            [&tenant, &before, &down_to, &status.map(Status::as_str), &limited(limit)];
        let rows = session.bounded(session.client.query(&sql, &values)).await?;
        session.keep();
        let requests = rows.iter().map(read_request).collect::<Result<Vec<_>>>()?;
        let rest_before = last.filter(|_| requests.len() < limit).map(RequestId::from_uuid);
        Ok(Listed { requests, rest_before })
    }

    async fn claim_jobs(&self, room: &[Room], policy: &Policy) -> Result<Claimed> {
        let claimed = work::claim_due(self, room, policy).await?;
        self.tell_of(&claimed);
        Ok(claimed)
    }

    async fn claim_named(&self, ids: &[RequestId], policy: &Policy) -> Result<Claimed> {
        let claimed = work::claim_named(self, ids, policy).await?;
        self.tell_of(&claimed);
        Ok(claimed)
    }

    async fn job_downstreams(&self) -> Result<Vec<String>> {
        work::downstreams(self).await
    }

    async fn report_batch(
        &self,
        batch: Vec<JobReport>,
        policy: &Policy,
    ) -> Result<Vec<Result<Status, Refused>>> {
        let outcomes = work::report(self, batch, policy).await?;
        if outcomes.iter().flatten().any(|status| status.is_final()) {
            self.inner.bells.ring(WEBHOOKS);
        }
        Ok(outcomes)
    }

    async fn call_back(&self, id: RequestId, report: CallbackReport) -> Result<CallbackOutcome> {
        let outcome = work::call_back(self, id, report).await?;
        if matches!(outcome, CallbackOutcome::Taken(_)) {
            self.inner.bells.ring(WEBHOOKS);
        }
        Ok(outcome)
    }

    async fn wait_for_jobs(&self, at_most: Duration) {
        self.wait(JOBS, at_most).await;
    }

    async fn pending_requests(&self, older_than: Duration, limit: usize) -> Result<Vec<Pending>> {
        upkeep::pending(self, older_than, limit).await
    }

    async fn mark_enqueued(&self, ids: &[RequestId]) -> Result<()> {
        upkeep::mark_enqueued(self, ids).await?;
        self.inner.bells.ring(JOBS);
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

    async fn replay_request(&self, id: RequestId) -> Result<bool> {
        let replayed = upkeep::replay(self, Some(id), 1).await?;
        Ok(!replayed.is_empty())
    }

    async fn replay_requests(&self, limit: usize) -> Result<Vec<RequestId>> {
        upkeep::replay(self, None, limit).await
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

    async fn audit_requests(&self) -> Result<Books> {
        upkeep::books(self).await
    }

    async fn sealing_keys(&self) -> Result<Vec<(SealingKey, Timestamp)>> {
        sealing::keys(self).await
    }

    async fn register_sealing_key(&self, key: &SealingKey) -> Result<()> {
        sealing::register(self, key).await
    }

    async fn forget_sealing_key(&self, name: &str, digest: &str) -> Result<()> {
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
}

impl Postgres {
    /// Wakes whoever sends webhooks: a request that a claim gave up may have one.
    fn tell_of(&self, claimed: &Claimed) {
        if !claimed.exhausted.is_empty() {
            self.inner.bells.ring(WEBHOOKS);
        }
    }
}

fn read_request(row: &Row) -> Result<Request> {
    let (result, result_key): (Option<Vec<u8>>, Option<String>) = (column(row, 7)?, column(row, 8)?);
    let (code, message): (Option<String>, Option<String>) = (column(row, 9)?, column(row, 10)?);
    Ok(Request {
        id: read_id(row, 0)?,
        tenant: TenantId::parse(column::<&str>(row, 1)?).map_err(fault)?,
        request_type: RequestType::parse(column::<&str>(row, 2)?).map_err(fault)?,
        status: read_status(column(row, 3)?)?,
        attempts: unsigned(column(row, 4)?),
        payload: Sealed { bytes: column(row, 5)?, key_id: column(row, 6)? },
        result: result.map(|bytes| Sealed { bytes, key_id: result_key.unwrap_or_default() }),
        failure: code.map(|code| Failure { code, message: message.unwrap_or_default() }),
        callback_url: column(row, 11)?,
        accepted_at: time::from_system(column(row, 12)?),
        updated_at: time::from_system(column(row, 13)?),
    })
}

fn read_id(row: &Row, index: usize) -> Result<RequestId> {
    Ok(RequestId::from_uuid(column(row, index)?))
}

fn read_status(text: &str) -> Result<Status> {
    Status::parse(text).ok_or_else(unreadable)
}

fn limited(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

/// A row that only somebody's edit can hold.
fn unreadable() -> Error {
    fault("a request's row holds what no request has")
}

fn fault(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::failed(ENGINE, cause)
}
