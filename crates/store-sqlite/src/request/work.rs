//! Claiming jobs, and taking what workers and downstreams report. Every change of a request goes through the rule.

use std::ops::ControlFlow;

use rusqlite::types::ValueRef;
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
use crate::writer::Turn;

/// Jobs that are read together: those that are left when a turn is over are read again.
const READ_AT_ONCE: usize = 64;

const FIRST: &str = "
    SELECT min(claimable_at) FROM request_record WHERE downstream = ?1 AND claimable_at IS NOT NULL";
/// As [`read_entry`] reads them.
const ENTRY: &str = "
    SELECT id, request_id, status, attempts, claimable_at, is_leased, token, downstream, callback_url FROM request_record
    WHERE request_id = ?1 AND claimable_at IS NOT NULL";
/// The same, and as [`read_task`] reads them.
const TASK: &str = "
    SELECT id, request_id, status, attempts, claimable_at, is_leased, token, downstream, callback_url,
           tenant_id, request_type, payload, payload_key_id, created_at
    FROM request_record";
const DUE: &str = "WHERE downstream = ?1 AND claimable_at <= ?2 ORDER BY claimable_at LIMIT ?3";
const NAMED: &str = "WHERE request_id = ?1 AND claimable_at IS NOT NULL";
const DOWNSTREAMS: &str = "
    WITH RECURSIVE name (downstream) AS (
        SELECT min(downstream) FROM request_record WHERE claimable_at IS NOT NULL
        UNION ALL
        SELECT (SELECT min(downstream) FROM request_record
                WHERE downstream > name.downstream AND claimable_at IS NOT NULL)
        FROM name WHERE name.downstream IS NOT NULL)
    SELECT downstream FROM name WHERE downstream IS NOT NULL";
/// Without an attempt that came to something, what the last one came to still stands.
const SAVE: &str = "
    UPDATE request_record
    SET status = ?2, attempts = ?3, updated_at = ?4, claimable_at = ?5, is_leased = ?6, token = ?7
    WHERE id = ?1";
const SAVE_OUTCOME: &str = "
    UPDATE request_record
    SET status = ?2, attempts = ?3, updated_at = ?4, claimable_at = ?5, is_leased = ?6, token = ?7,
        failure_code = ?8, failure_message = ?9, result = ?10, result_key_id = ?11
    WHERE id = ?1";
const BURY: &str = "
    INSERT INTO request_dead (request_id, downstream, token, died_at) VALUES (?1, ?2, ?3, ?4)";
const STATUS: &str = "SELECT status FROM request_record WHERE request_id = ?1";

/// The statements that are put together when they are used.
#[cfg(test)]
pub(super) fn composed_sql() -> impl Iterator<Item = (&'static str, String)> {
    [("DUE", DUE), ("NAMED", NAMED)].into_iter().map(|(name, part)| (name, format!("{TASK} {part}")))
}

/// A request that is in the queue, as far as the rule needs it.
struct Entry {
    row: i64,
    id: RequestId,
    downstream: String,
    has_callback: bool,
    progress: Progress,
}

/// What a worker needs besides.
struct Task {
    tenant: TenantId,
    request_type: RequestType,
    payload: Sealed,
    accepted_at: Timestamp,
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

/// A claim of jobs that are due: how much room is left for them, and what it has brought so far.
pub(super) struct ClaimDue {
    room: Vec<Room>,
    /// How many downstreams of them have been looked through.
    looked_through: usize,
    policy: Policy,
    now: Timestamp,
    bytes: usize,
    claimed: Claimed,
}

impl ClaimDue {
    pub(super) fn new(room: Vec<Room>, policy: Policy, now: Timestamp) -> Self {
        Self { room, looked_through: 0, policy, now, bytes: 0, claimed: Claimed::default() }
    }

    /// Claims for one turn; says what it has brought once it has come to its end.
    pub(super) fn go_on(
        &mut self,
        connection: &Connection,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<Claimed>> {
        let Self { room, looked_through, policy, now, bytes, claimed } = self;
        while let Some(Room { downstream, jobs }) = room.get_mut(*looked_through) {
            let most = (*jobs).min(READ_AT_ONCE);
            let due = due(connection, downstream, most, *now, *bytes)?;
            let is_last = due.len() < READ_AT_ONCE;
            for (entry, task) in due {
                if !turn.goes_on() {
                    return Ok(ControlFlow::Continue(()));
                }
                *bytes += task.payload.bytes.len();
                *jobs -= 1;
                claim(connection, entry, task, policy, *now, claimed)?;
            }
            *looked_through += usize::from(is_last);
        }
        if claimed.jobs.is_empty() && claimed.exhausted.is_empty() {
            // Others were faster.
            claimed.next = next(connection, room)?.map(|next| next.since(*now));
        }
        Ok(ControlFlow::Break(std::mem::take(claimed)))
    }
}

/// Jobs that are due, no further one once their payloads are [`CLAIM_BYTES_MAX`].
fn due(
    connection: &Connection,
    downstream: &str,
    limit: usize,
    now: Timestamp,
    mut bytes: usize,
) -> rusqlite::Result<Vec<(Entry, Task)>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut statement = connection.prepare_cached(&format!("{TASK} {DUE}"))?;
    let mut rows = statement.query(params![downstream, now.as_micros(), limit])?;
    let mut due = Vec::new();
    while bytes < CLAIM_BYTES_MAX
        && let Some(row) = rows.next()?
    {
        let task = read_task(row)?;
        bytes += task.payload.bytes.len();
        due.push((read_entry(row)?, task));
    }
    Ok(due)
}

pub(super) fn claim_named(
    connection: &Connection,
    id: RequestId,
    policy: &Policy,
    now: Timestamp,
    claimed: &mut Claimed,
) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(&format!("{TASK} {NAMED}"))?;
    let read = |row: &Row<'_>| Ok((read_entry(row)?, read_task(row)?));
    match statement.query_row([id.to_string()], read).optional()? {
        Some((entry, task)) => claim(connection, entry, task, policy, now, claimed),
        None => Ok(()),
    }
}

pub(super) fn downstreams(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    connection.prepare_cached(DOWNSTREAMS)?.query_map([], |row| row.get(0))?.collect()
}

fn claim(
    connection: &Connection,
    mut entry: Entry,
    task: Task,
    policy: &Policy,
    now: Timestamp,
    claimed: &mut Claimed,
) -> rusqlite::Result<()> {
    match entry.progress.claim(policy, now) {
        Ok(Claim::Granted(lease)) => {
            save(connection, &entry, None, now)?;
            let Task { tenant, request_type, payload, accepted_at } = task;
            let (id, attempt, downstream) = (entry.id, entry.progress.attempts, entry.downstream);
            let token = lease.token;
            claimed.jobs.push(Job {
                id,
                tenant,
                request_type,
                downstream,
                payload,
                token,
                attempt,
                accepted_at,
            });
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

/// The outcome, and whether somebody is to be told of it.
pub(super) fn report(
    connection: &Connection,
    report: JobReport,
    policy: &Policy,
    now: Timestamp,
) -> rusqlite::Result<(Result<Status, Refused>, bool)> {
    let Some(mut entry) = entry(connection, report.id)? else {
        // A request without a job is final, or was never there.
        let refused = status(connection, report.id)?.map_or(Refused::LeaseLost, Refused::Final);
        return Ok((Err(refused), false));
    };
    let JobReport { token, report: said, result, detail, chance, .. } = report;
    let outcome = entry.progress.report(token, said, policy, now, chance);
    let Ok(status) = outcome else { return Ok((outcome, false)) };
    let told = match said {
        Report::Called(judgement) => Some(Told { result, ..Told::failed(judgement.cause(), detail) }),
        Report::NotCalled { .. } => None,
    };
    save(connection, &entry, told, now)?;
    Ok((outcome, status.is_final() && entry.has_callback))
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

/// Writes what the rule has made of a request: its row, and whoever is to be told of its end.
fn save(connection: &Connection, entry: &Entry, told: Option<Told>, now: Timestamp) -> rusqlite::Result<()> {
    let progress = &entry.progress;
    let (status, attempts, at) = (progress.status.as_str(), progress.attempts, now.as_micros());
    let (claimable, is_leased) = match progress.lease {
        _ if progress.status.is_final() => (None, false),
        Some(lease) => (Some(lease.until.as_micros()), true),
        None => (Some(progress.due.as_micros()), false),
    };
    let token = progress.last_token.cast_signed();
    if let Some(Told { result, failure }) = told {
        connection.prepare_cached(SAVE_OUTCOME)?.execute(params![
            entry.row,
            status,
            attempts,
            at,
            claimable,
            is_leased,
            token,
            failure.as_ref().map(|failure| &failure.code),
            failure.as_ref().map(|failure| &failure.message),
            result.as_ref().map(|sealed| &sealed.bytes),
            result.as_ref().map(|sealed| &sealed.key_id),
        ])?;
    } else {
        let values = params![entry.row, status, attempts, at, claimable, is_leased, token];
        connection.prepare_cached(SAVE)?.execute(values)?;
    }
    if progress.status == Status::FailedRetryExhausted {
        let values = params![entry.id.to_string(), entry.downstream, token, now.as_micros()];
        connection.prepare_cached(BURY)?.execute(values)?;
    }
    if progress.status.is_final() && entry.has_callback {
        let id = entry.id.to_string();
        enqueue(connection, WEBHOOKS, std::iter::once((id.as_str(), id.clone().into_bytes())))?;
    }
    Ok(())
}

fn entry(connection: &Connection, id: RequestId) -> rusqlite::Result<Option<Entry>> {
    connection.prepare_cached(ENTRY)?.query_row([id.to_string()], read_entry).optional()
}

fn status(connection: &Connection, id: RequestId) -> rusqlite::Result<Option<Status>> {
    let mut statement = connection.prepare_cached(STATUS)?;
    statement.query_row([id.to_string()], |row| read_status(row, 0)).optional()
}

fn read_entry(row: &Row<'_>) -> rusqlite::Result<Entry> {
    let (claimable_at, is_leased) = (Timestamp::from_micros(row.get(4)?), row.get(5)?);
    let last_token = row.get::<_, i64>(6)?.cast_unsigned();
    let lease = Lease { token: last_token, until: claimable_at };
    let progress = Progress {
        status: read_status(row, 2)?,
        attempts: row.get(3)?,
        due: claimable_at,
        lease: Some(lease).filter(|_| is_leased),
        last_token,
    };
    let has_callback = row.get_ref(8)? != ValueRef::Null;
    Ok(Entry { row: row.get(0)?, id: read_id(row, 1)?, downstream: row.get(7)?, has_callback, progress })
}

fn read_task(row: &Row<'_>) -> rusqlite::Result<Task> {
    Ok(Task {
        tenant: TenantId::parse(row.get_ref(9)?.as_str()?).map_err(fault)?,
        request_type: RequestType::parse(row.get_ref(10)?.as_str()?).map_err(fault)?,
        payload: Sealed { bytes: row.get(11)?, key_id: row.get(12)? },
        accepted_at: Timestamp::from_micros(row.get(13)?),
    })
}
