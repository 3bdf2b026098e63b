//! Claims of jobs, and reports of workers and downstreams. The plans of `weir-store` decide; this file loads and saves.

use std::collections::HashMap;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, Rows, params};
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestProgress, RequestStatus, TransitionError};
use weir_core::{RequestId, RequestType, TenantId, Timestamp};
use weir_store::request::{
    AttemptOutcome, CallbackOutcome, CallbackReport, CancelOutcome, ClaimRow, ClaimedJobs,
    DownstreamCapacity, JobChange, JobCounts, JobReport, JobRow, ReportPlan, RequestRow, Sealed,
    TenantCapacity, WEBHOOKS_TOPIC, plan_callback, plan_cancel, plan_claim, plan_report, stored_progress,
};

#[cfg(test)]
use super::turns::{DUE_OF_TENANT, EXPRESS};
use super::{limited, read_id, read_status, read_trace};
use crate::error::fault;
use crate::queue::enqueue;

const FIRST: &str = "
    SELECT min(claimable_at) FROM request_record WHERE downstream = ?1 AND claimable_at IS NOT NULL";
/// With the columns that [`read_job`] reads.
const JOB: &str = "
    SELECT id, request_id, status, attempts, claimable_at, is_leased, token, downstream, callback_url FROM request_record
    WHERE request_id = ?1 AND claimable_at IS NOT NULL";
/// With the columns that [`read_claim`] reads.
pub(super) const CLAIM: &str = "
    SELECT id, request_id, status, attempts, claimable_at, is_leased, token, downstream, callback_url,
           tenant_id, request_type, payload, payload_key_id, created_at, traceparent, tracestate
    FROM request_record";
const NAMED: &str = "WHERE request_id = ?1 AND claimable_at IS NOT NULL";
const DOWNSTREAMS: &str = "
    WITH RECURSIVE name (downstream) AS (
        SELECT min(downstream) FROM request_record WHERE claimable_at IS NOT NULL
        UNION ALL
        SELECT (SELECT min(downstream) FROM request_record
                WHERE downstream > name.downstream AND claimable_at IS NOT NULL)
        FROM name WHERE name.downstream IS NOT NULL)
    SELECT downstream FROM name WHERE downstream IS NOT NULL";
const COUNT_DUE: &str = "
    SELECT count(*), min(claimable_at)
    FROM (SELECT claimable_at FROM request_record
          WHERE downstream = ?1 AND claimable_at <= ?2 ORDER BY claimable_at LIMIT ?3)";
const COUNT_LATER: &str = "
    SELECT count(*), count(*) FILTER (WHERE is_leased)
    FROM (SELECT is_leased FROM request_record
          WHERE downstream = ?1 AND claimable_at > ?2 ORDER BY claimable_at LIMIT ?3)";
/// Keeps the result or failure of the last attempt. A cancelled request has an outcome, so [`SAVE_OUTCOME`] saves it.
const SAVE: &str = "
    UPDATE request_record
    SET status = ?2, attempts = ?3, updated_at = ?4, claimable_at = ?5, is_leased = ?6, token = ?7, is_parked = ?8,
        is_express = 0
    WHERE id = ?1";
const SAVE_OUTCOME: &str = "
    UPDATE request_record
    SET status = CASE ?2 WHEN 'CANCELLED' THEN 'FAILED_PERMANENT' ELSE ?2 END,
        is_cancelled = nullif(?2 = 'CANCELLED', 0), attempts = ?3, updated_at = ?4, claimable_at = ?5,
        is_leased = ?6, token = ?7, is_parked = ?8, is_express = 0, failure_code = ?9, failure_message = ?10,
        result = ?11, result_key_id = ?12
    WHERE id = ?1";
const INSERT_DEAD: &str = "
    INSERT INTO request_dead (request_id, downstream, token, died_at) VALUES (?1, ?2, ?3, ?4)";
const STATUS: &str = "SELECT CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END FROM request_record WHERE request_id = ?1";

/// The statements that are composed at run time.
#[cfg(test)]
pub(super) fn composed_sql() -> impl Iterator<Item = (&'static str, String)> {
    let parts = [("NAMED", NAMED), ("DUE_OF_TENANT", DUE_OF_TENANT), ("EXPRESS", EXPRESS)];
    parts.into_iter().map(|(name, part)| (name, format!("{CLAIM} {part}")))
}

/// A row of `request_record` with its integer id.
type Numbered<T> = (i64, T);

/// The time at which the first job of these downstreams may be claimed.
pub(super) fn next(
    connection: &Connection,
    room: &[DownstreamCapacity],
) -> rusqlite::Result<Option<Timestamp>> {
    let mut first = connection.prepare_cached(FIRST)?;
    let mut next = None;
    for DownstreamCapacity { downstream, jobs } in room {
        if *jobs > 0 {
            let at: Option<i64> = first.query_row([downstream], |row| row.get(0))?;
            next = [next, at].into_iter().flatten().min();
        }
    }
    Ok(next.map(Timestamp::from_micros))
}

/// Reads jobs to claim, until their payloads have so many bytes.
pub(super) fn read_claims(
    rows: &mut Rows<'_>,
    mut bytes: usize,
) -> rusqlite::Result<Vec<Numbered<ClaimRow>>> {
    let mut due = Vec::new();
    while bytes > 0
        && let Some(row) = rows.next()?
    {
        let row = read_claim(row)?;
        bytes = bytes.saturating_sub(row.1.payload.bytes.len());
        due.push(row);
    }
    Ok(due)
}

pub(super) fn claim_named(
    connection: &Connection,
    id: RequestId,
    tenants: &mut TenantCapacity,
    policy: &RetryPolicy,
    now: Timestamp,
    claimed: &mut ClaimedJobs,
) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(&format!("{CLAIM} {NAMED}"))?;
    match statement.query_row([id.to_string()], read_claim).optional()? {
        Some(row) if tenants.admit(row.1.tenant.as_str()) => claim(connection, row, policy, now, claimed),
        Some(_) => {
            claimed.is_held_back = true;
            Ok(())
        }
        None => Ok(()),
    }
}

pub(super) fn downstreams(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    connection.prepare_cached(DOWNSTREAMS)?.query_map([], |row| row.get(0))?.collect()
}

/// Counts the jobs of a downstream. A job whose lease has ended is waiting again.
pub(super) fn count(
    connection: &Connection,
    downstream: &str,
    limit: usize,
    now: Timestamp,
) -> rusqlite::Result<JobCounts> {
    let values = params![downstream, now.as_micros(), limited(limit)];
    let mut due = connection.prepare_cached(COUNT_DUE)?;
    let (waiting, oldest): (u64, Option<i64>) =
        due.query_row(values, |row| Ok((row.get(0)?, row.get(1)?)))?;
    let mut later = connection.prepare_cached(COUNT_LATER)?;
    let (others, running): (u64, u64) = later.query_row(values, |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(JobCounts {
        downstream: downstream.to_owned(),
        waiting,
        running,
        parked: others - running,
        oldest_waiting: oldest.map(|oldest| now.since(Timestamp::from_micros(oldest))),
    })
}

pub(super) fn claim(
    connection: &Connection,
    (number, row): Numbered<ClaimRow>,
    policy: &RetryPolicy,
    now: Timestamp,
    claimed: &mut ClaimedJobs,
) -> rusqlite::Result<()> {
    let plan = plan_claim([row], policy, now);
    for change in &plan.changed {
        save(connection, number, change, now)?;
    }
    claimed.jobs.extend(plan.claimed.jobs);
    claimed.exhausted.extend(plan.claimed.exhausted);
    claimed.taken_over += plan.claimed.taken_over;
    Ok(())
}

/// Applies the report of an attempt. Returns the outcome, and whether a webhook was enqueued.
pub(super) fn report(
    connection: &Connection,
    report: JobReport,
    policy: &RetryPolicy,
    now: Timestamp,
) -> rusqlite::Result<(Result<RequestStatus, TransitionError>, bool)> {
    let id = report.id;
    let (number, row) = find(connection, id)?;
    let mut rows: HashMap<_, _> = row.into_iter().map(|row| (id, row)).collect();
    let ReportPlan { mut outcomes, changed } = plan_report(vec![report], &mut rows, policy, now);
    for change in &changed {
        save(connection, number, change, now)?;
    }
    let outcome = outcomes.pop().unwrap_or(Err(TransitionError::LeaseLost));
    Ok((outcome, changed.iter().any(JobChange::needs_webhook)))
}

pub(super) fn call_back(
    connection: &Connection,
    id: RequestId,
    report: CallbackReport,
    now: Timestamp,
) -> rusqlite::Result<CallbackOutcome> {
    let (number, row) = find(connection, id)?;
    let (outcome, changed) = plan_callback(report, row);
    if let Some(change) = changed {
        save(connection, number, &change, now)?;
    }
    Ok(outcome)
}

pub(super) fn cancel(
    connection: &Connection,
    id: RequestId,
    now: Timestamp,
) -> rusqlite::Result<CancelOutcome> {
    let (number, row) = find(connection, id)?;
    let (outcome, changed) = plan_cancel(row);
    if let Some(change) = changed {
        save(connection, number, &change, now)?;
    }
    Ok(outcome)
}

/// Saves a planned change of a request: its row, its dead letter, its webhook.
fn save(connection: &Connection, number: i64, change: &JobChange, now: Timestamp) -> rusqlite::Result<()> {
    let RequestProgress { attempts, last_token, .. } = change.row.progress;
    let (status, at) = (change.status().as_str(), now.as_micros());
    let (claimable, is_leased) = (change.claimable_at().map(Timestamp::as_micros), change.is_leased());
    let (id, token) = (change.row.id.to_string(), last_token.cast_signed());
    if let Some(AttemptOutcome { result, failure }) = &change.outcome {
        connection.prepare_cached(SAVE_OUTCOME)?.execute(params![
            number,
            status,
            attempts,
            at,
            claimable,
            is_leased,
            token,
            change.is_parked(),
            failure.as_ref().map(|failure| &failure.code),
            failure.as_ref().map(|failure| &failure.message),
            result.as_ref().map(|sealed| &sealed.bytes),
            result.as_ref().map(|sealed| &sealed.key_id),
        ])?;
    } else {
        let values = params![number, status, attempts, at, claimable, is_leased, token, change.is_parked()];
        connection.prepare_cached(SAVE)?.execute(values)?;
    }
    if change.is_dead() {
        connection.prepare_cached(INSERT_DEAD)?.execute(params![id, change.row.downstream, token, at])?;
    }
    if change.needs_webhook() {
        enqueue(connection, WEBHOOKS_TOPIC, std::iter::once((id.as_str(), id.clone().into_bytes())))?;
    }
    Ok(())
}

/// Finds a request and the id of its row; the id is 0 if there is no job that could change.
fn find(connection: &Connection, id: RequestId) -> rusqlite::Result<(i64, Option<RequestRow>)> {
    let mut job = connection.prepare_cached(JOB)?;
    if let Some((number, job)) = job.query_row([id.to_string()], read_job).optional()? {
        return Ok((number, Some(RequestRow::Job(job))));
    }
    let mut statement = connection.prepare_cached(STATUS)?;
    let status = statement.query_row([id.to_string()], |row| read_status(row, 0)).optional()?;
    Ok((0, status.map(RequestRow::Final)))
}

fn read_job(row: &Row<'_>) -> rusqlite::Result<Numbered<JobRow>> {
    let (status, attempts, claimable_at) =
        (read_status(row, 2)?, row.get(3)?, Timestamp::from_micros(row.get(4)?));
    let last_token = row.get::<_, i64>(6)?.cast_unsigned();
    let job = JobRow {
        id: read_id(row, 1)?,
        downstream: row.get(7)?,
        has_callback: row.get_ref(8)? != ValueRef::Null,
        progress: stored_progress(status, attempts, claimable_at, row.get(5)?, last_token),
    };
    Ok((row.get(0)?, job))
}

fn read_claim(row: &Row<'_>) -> rusqlite::Result<Numbered<ClaimRow>> {
    let (number, job) = read_job(row)?;
    let claim = ClaimRow {
        job,
        tenant: TenantId::parse(row.get_ref(9)?.as_str()?).map_err(fault)?,
        request_type: RequestType::parse(row.get_ref(10)?.as_str()?).map_err(fault)?,
        payload: Sealed { bytes: row.get(11)?, key_id: row.get(12)? },
        trace: read_trace(row, 14)?,
        accepted_at: Timestamp::from_micros(row.get(13)?),
    };
    Ok((number, claim))
}
