//! Claiming jobs, and taking what workers and downstreams report. Every change of a request goes through the rule.

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::request::retry::Policy;
use weir_core::request::state::{Claim, Lease, Progress, Refused, Report, Status};
use weir_core::{RequestId, RequestType, TenantId, Timestamp};
use weir_store::request::{
    CLAIM_BYTES_MAX, CallbackOutcome, CallbackReport, Claimed, Job, JobReport, Room, Sealed, Told, WEBHOOKS,
};

use super::{read_id, read_status};
use crate::error::fault;
use crate::queue::enqueue;

const FIRST: &str = "SELECT min(claimable_at) FROM request_job WHERE downstream = ?1";
/// As [`read_entry`] reads them.
const ENTRY: &str = "
    SELECT job.request_id, record.status, job.attempts, job.claimable_at, job.is_leased, job.token, job.downstream,
           record.callback_url
    FROM request_job AS job JOIN request_record AS record USING (request_id)";
const DUE: &str = "WHERE job.downstream = ?1 AND job.claimable_at <= ?2 ORDER BY job.claimable_at LIMIT ?3";
const NAMED: &str = "WHERE job.request_id = ?1";
const TASK: &str = "
    SELECT tenant_id, request_type, payload, payload_key_id, created_at FROM request_record WHERE request_id = ?1";
const DOWNSTREAMS: &str = "
    WITH RECURSIVE name (downstream) AS (
        SELECT min(downstream) FROM request_job
        UNION ALL
        SELECT (SELECT min(downstream) FROM request_job WHERE downstream > name.downstream) FROM name
        WHERE name.downstream IS NOT NULL)
    SELECT downstream FROM name WHERE downstream IS NOT NULL";
const SAVE_JOB: &str = "
    UPDATE request_job SET claimable_at = ?2, is_leased = ?3, token = ?4, attempts = ?5 WHERE request_id = ?1";
const END_JOB: &str = "DELETE FROM request_job WHERE request_id = ?1";
const BURY: &str = "
    INSERT INTO request_dead (request_id, downstream, token, died_at) VALUES (?1, ?2, ?3, ?4)";
const SAVE_RECORD: &str = "
    UPDATE request_record SET status = ?2, attempts = ?3, updated_at = ?4 WHERE request_id = ?1";
const SAVE_OUTCOME: &str = "
    UPDATE request_record
    SET status = ?2, attempts = ?3, updated_at = ?4, failure_code = ?5, failure_message = ?6, result = ?7,
        result_key_id = ?8
    WHERE request_id = ?1";
const STATUS: &str = "SELECT status FROM request_record WHERE request_id = ?1";

/// A request that is in the queue, as far as the rule needs it.
struct Entry {
    id: RequestId,
    downstream: String,
    callback_url: Option<String>,
    progress: Progress,
}

/// When the first job of these downstreams may be claimed.
pub(super) fn next(connection: &Connection, room: &[Room]) -> rusqlite::Result<Option<Timestamp>> {
    let mut first = connection.prepare_cached(FIRST)?;
    let mut next = None;
    for Room { downstream, jobs } in room {
        if *jobs > 0 {
            let at: Option<i64> = first.query_row([downstream], |row| row.get(0))?;
            next = [next, at].into_iter().flatten().min();
        }
    }
    Ok(next.map(Timestamp::from_micros))
}

pub(super) fn claim_due(
    connection: &Connection,
    room: &[Room],
    policy: &Policy,
    now: Timestamp,
) -> rusqlite::Result<Claimed> {
    let mut claimed = Claimed::default();
    let mut bytes = 0;
    for Room { downstream, jobs } in room {
        let limit = i64::try_from(*jobs).unwrap_or(i64::MAX);
        let mut statement = connection.prepare_cached(&format!("{ENTRY} {DUE}"))?;
        let entries: Vec<Entry> = statement
            .query_map(params![downstream, now.as_micros(), limit], read_entry)?
            .collect::<rusqlite::Result<_>>()?;
        for entry in entries {
            if bytes >= CLAIM_BYTES_MAX {
                return Ok(claimed);
            }
            let before = claimed.jobs.len();
            claim(connection, entry, policy, now, &mut claimed)?;
            bytes += claimed.jobs.get(before).map_or(0, |job| job.payload.bytes.len());
        }
    }
    if claimed.jobs.is_empty() && claimed.exhausted.is_empty() {
        // Others were faster.
        claimed.next = next(connection, room)?.map(|next| next.since(now));
    }
    Ok(claimed)
}

pub(super) fn claim_named(
    connection: &Connection,
    ids: &[RequestId],
    policy: &Policy,
    now: Timestamp,
) -> rusqlite::Result<Claimed> {
    let mut claimed = Claimed::default();
    for id in ids {
        if let Some(entry) = entry(connection, *id)? {
            claim(connection, entry, policy, now, &mut claimed)?;
        }
    }
    Ok(claimed)
}

pub(super) fn downstreams(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    connection.prepare_cached(DOWNSTREAMS)?.query_map([], |row| row.get(0))?.collect()
}

fn claim(
    connection: &Connection,
    mut entry: Entry,
    policy: &Policy,
    now: Timestamp,
    claimed: &mut Claimed,
) -> rusqlite::Result<()> {
    match entry.progress.claim(policy, now) {
        Ok(Claim::Granted(lease)) => {
            save(connection, &entry, None, now)?;
            claimed.jobs.push(job(connection, &entry, lease)?);
        }
        Ok(Claim::Exhausted(cause)) => {
            save(connection, &entry, Some(Told::failed(Some(cause), None)), now)?;
            claimed.exhausted.push(entry.id);
        }
        // Another claim has it, or it is not due: nothing to do about it now.
        Err(_refused) => {}
    }
    Ok(())
}

fn job(connection: &Connection, entry: &Entry, lease: Lease) -> rusqlite::Result<Job> {
    connection.prepare_cached(TASK)?.query_row([entry.id.to_string()], |row| {
        Ok(Job {
            id: entry.id,
            tenant: TenantId::parse(row.get_ref(0)?.as_str()?).map_err(fault)?,
            request_type: RequestType::parse(row.get_ref(1)?.as_str()?).map_err(fault)?,
            downstream: entry.downstream.clone(),
            payload: Sealed { bytes: row.get(2)?, key_id: row.get(3)? },
            token: lease.token,
            attempt: entry.progress.attempts,
            accepted_at: Timestamp::from_micros(row.get(4)?),
        })
    })
}

/// The outcomes, and whether somebody is to be told of one.
pub(super) fn report(
    connection: &Connection,
    batch: Vec<JobReport>,
    policy: &Policy,
    now: Timestamp,
) -> rusqlite::Result<(Vec<Result<Status, Refused>>, bool)> {
    let (mut outcomes, mut has_webhooks) = (Vec::with_capacity(batch.len()), false);
    for report in batch {
        let Some(mut entry) = entry(connection, report.id)? else {
            // A request without a job is final, or was never there.
            outcomes.push(Err(match status(connection, report.id)? {
                Some(status) => Refused::Final(status),
                None => Refused::LeaseLost,
            }));
            continue;
        };
        let JobReport { token, report: said, result, detail, chance, .. } = report;
        let outcome = entry.progress.report(token, said, policy, now, chance);
        if let Ok(status) = outcome {
            let told = match said {
                Report::Called(judgement) => Some(Told { result, ..Told::failed(judgement.cause(), detail) }),
                Report::NotCalled { .. } => None,
            };
            save(connection, &entry, told, now)?;
            has_webhooks |= status.is_final() && entry.callback_url.is_some();
        }
        outcomes.push(outcome);
    }
    Ok((outcomes, has_webhooks))
}

pub(super) fn call_back(
    connection: &Connection,
    id: RequestId,
    report: CallbackReport,
    now: Timestamp,
) -> rusqlite::Result<CallbackOutcome> {
    let Some(mut entry) = entry(connection, id)? else {
        return Ok(match status(connection, id)? {
            Some(status) => CallbackOutcome::Refused(Refused::Final(status)),
            None => CallbackOutcome::Unknown,
        });
    };
    match entry.progress.call_back(report.callback) {
        Ok(status) => {
            let told = Told { result: report.result, failure: report.failure };
            save(connection, &entry, Some(told), now)?;
            Ok(CallbackOutcome::Taken(status))
        }
        Err(refused) => Ok(CallbackOutcome::Refused(refused)),
    }
}

/// Writes what the rule has made of a request: its record, its job, and whoever is to be told of its end. Without an
/// attempt that came to something, what the last one came to still stands.
fn save(connection: &Connection, entry: &Entry, told: Option<Told>, now: Timestamp) -> rusqlite::Result<()> {
    let (id, progress) = (entry.id.to_string(), &entry.progress);
    let (status, attempts, at) = (progress.status.as_str(), progress.attempts, now.as_micros());
    if let Some(Told { result, failure }) = told {
        connection.prepare_cached(SAVE_OUTCOME)?.execute(params![
            id,
            status,
            attempts,
            at,
            failure.as_ref().map(|failure| &failure.code),
            failure.as_ref().map(|failure| &failure.message),
            result.as_ref().map(|sealed| &sealed.bytes),
            result.as_ref().map(|sealed| &sealed.key_id),
        ])?;
    } else {
        connection.prepare_cached(SAVE_RECORD)?.execute(params![id, status, attempts, at])?;
    }
    let token = progress.last_token.cast_signed();
    if !progress.status.is_final() {
        let (claimable, is_leased) = match progress.lease {
            Some(lease) => (lease.until.as_micros(), true),
            None => (progress.due.as_micros(), false),
        };
        let values = params![id, claimable, is_leased, token, progress.attempts];
        connection.prepare_cached(SAVE_JOB)?.execute(values)?;
        return Ok(());
    }
    connection.prepare_cached(END_JOB)?.execute([&id])?;
    if progress.status == Status::FailedRetryExhausted {
        connection.prepare_cached(BURY)?.execute(params![id, entry.downstream, token, now.as_micros()])?;
    }
    if entry.callback_url.is_some() {
        enqueue(connection, WEBHOOKS, std::iter::once((id.as_str(), id.clone().into_bytes())))?;
    }
    Ok(())
}

fn entry(connection: &Connection, id: RequestId) -> rusqlite::Result<Option<Entry>> {
    let mut statement = connection.prepare_cached(&format!("{ENTRY} {NAMED}"))?;
    statement.query_row([id.to_string()], read_entry).optional()
}

fn status(connection: &Connection, id: RequestId) -> rusqlite::Result<Option<Status>> {
    let mut statement = connection.prepare_cached(STATUS)?;
    statement.query_row([id.to_string()], |row| read_status(row, 0)).optional()
}

fn read_entry(row: &Row<'_>) -> rusqlite::Result<Entry> {
    let (claimable_at, is_leased) = (Timestamp::from_micros(row.get(3)?), row.get(4)?);
    let last_token = row.get::<_, i64>(5)?.cast_unsigned();
    let lease = Lease { token: last_token, until: claimable_at };
    let progress = Progress {
        status: read_status(row, 1)?,
        attempts: row.get(2)?,
        due: claimable_at,
        lease: Some(lease).filter(|_| is_leased),
        last_token,
    };
    Ok(Entry { id: read_id(row, 0)?, downstream: row.get(6)?, callback_url: row.get(7)?, progress })
}
