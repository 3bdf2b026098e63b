//! Everything but the way of a job: dead letters, jobs that the broker does not have yet, purges, the rollout and the audit.

use std::ops::ControlFlow;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::request::canary::Percent;
use weir_core::{RequestId, Timestamp};
use weir_store::request::{DeadRequest, PendingRequest, RequestAudit, Rollout, RolloutChange, plan_replay};

use super::{limited, read_id, read_request};
use crate::error::fault;
use crate::writer::WriterTurn;

/// Requests purged between two checks of the turn. Their payloads may be large.
const REQUEST_CHUNK: usize = 16;
/// Idempotency keys deleted between two checks of the turn.
const KEY_CHUNK: usize = 128;

const PENDING: &str = "
    SELECT request_id, updated_at FROM request_record
    WHERE status = 'PENDING_ENQUEUE' AND updated_at <= ?1 ORDER BY updated_at LIMIT ?2";
const MARK_ENQUEUED: &str = "
    UPDATE request_record SET status = 'ACCEPTED', updated_at = ?2
    WHERE request_id = ?1 AND status = 'PENDING_ENQUEUE'";
/// The columns of [`read_request`], with an empty payload if it is too long. A dead letter has no result.
const DEAD: &str = "
    SELECT request_id, tenant_id, request_type, status, attempts,
           CASE WHEN length(payload) <= ?3 THEN payload ELSE x'' END, payload_key_id, NULL, NULL,
           failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate, died_at
    FROM request_dead JOIN request_record USING (request_id)
    WHERE request_id > ?1 ORDER BY request_id LIMIT ?2";
const TAKE_DEAD: &str = "DELETE FROM request_dead WHERE request_id = ?1 RETURNING downstream, token";
const RESTART: &str = "
    UPDATE request_record
    SET status = ?2, attempts = ?3, failure_code = NULL, failure_message = NULL, updated_at = ?4,
        downstream = ?5, claimable_at = ?6, is_leased = 0, token = ?7, is_parked = 0, is_express = 0
    WHERE request_id = ?1";
const DISCARD: &str = "DELETE FROM request_dead WHERE request_id = ?1";
const COUNT: &str = "SELECT count(*) FROM request_dead";
/// Ids sort by time, so the oldest requests come first.
const OLD: &str = "
    SELECT request_id FROM request_record
    WHERE request_id < ?1 AND status IN ('COMPLETED', 'FAILED_PERMANENT', 'FAILED_RETRY_EXHAUSTED')
    ORDER BY request_id LIMIT ?2";
const DELETE: &str = "DELETE FROM request_record WHERE request_id = ?1";
const COUNT_PURGED: &str = "UPDATE request_ledger SET purged = purged + ?1 WHERE id = 1";
const DELETE_KEYS: &str = "
    DELETE FROM idempotency_record WHERE id IN (
        SELECT id FROM (SELECT id, expires_at FROM idempotency_record ORDER BY id LIMIT ?2) WHERE expires_at <= ?1)";
const ROLLOUT: &str = "SELECT processing_enabled, reconciler_enabled, canary_percent, accepting_enabled FROM request_rollout WHERE id = 1";
const BEGIN_ROLLOUT: &str = "
    INSERT INTO request_rollout (id, processing_enabled, reconciler_enabled, canary_percent) VALUES (1, ?1, ?2, ?3)
    ON CONFLICT (id) DO NOTHING";
const CHANGE_ROLLOUT: &str = "
    UPDATE request_rollout
    SET processing_enabled = coalesce(?1, processing_enabled),
        reconciler_enabled = coalesce(?2, reconciler_enabled), canary_percent = coalesce(?3, canary_percent),
        accepting_enabled = coalesce(?4, accepting_enabled)
    WHERE id = 1
    RETURNING processing_enabled, reconciler_enabled, canary_percent, accepting_enabled";
const AUDIT: &str = "
    SELECT (SELECT accepted FROM request_ledger WHERE id = 1), (SELECT purged - erased FROM request_ledger WHERE id = 1),
           count(*) FILTER (WHERE status = 'COMPLETED'),
           count(*) FILTER (WHERE status = 'FAILED_PERMANENT' AND is_cancelled IS NOT TRUE),
           count(*) FILTER (WHERE status = 'FAILED_RETRY_EXHAUSTED'),
           count(*) FILTER (WHERE status IN ('ACCEPTED', 'PENDING_ENQUEUE', 'IN_PROGRESS')),
           count(claimable_at), count(*) FILTER (WHERE is_cancelled),
           (SELECT erased FROM request_ledger WHERE id = 1)
    FROM request_record";

pub(super) fn pending(
    connection: &Connection,
    older_than: Duration,
    limit: usize,
    now: Timestamp,
) -> rusqlite::Result<Vec<PendingRequest>> {
    let span = i64::try_from(older_than.as_micros()).unwrap_or(i64::MAX);
    let since = now.as_micros().saturating_sub(span);
    let mut statement = connection.prepare_cached(PENDING)?;
    statement
        .query_map(params![since, limited(limit)], |row| {
            let age = now.since(Timestamp::from_micros(row.get(1)?));
            Ok(PendingRequest { id: read_id(row, 0)?, age })
        })?
        .collect()
}

pub(super) fn mark_enqueued(connection: &Connection, id: RequestId, now: Timestamp) -> rusqlite::Result<()> {
    connection.prepare_cached(MARK_ENQUEUED)?.execute(params![id.to_string(), now.as_micros()]).map(drop)
}

pub(super) fn list(
    connection: &Connection,
    after: Option<RequestId>,
    limit: usize,
    payload_max: usize,
) -> rusqlite::Result<Vec<DeadRequest>> {
    let after = after.map(|id| id.to_string()).unwrap_or_default();
    let mut statement = connection.prepare_cached(DEAD)?;
    statement
        .query_map(params![after, limited(limit), limited(payload_max)], |row| {
            Ok(DeadRequest {
                request: read_request(row)?,
                died_at: Timestamp::from_micros(row.get("died_at")?),
            })
        })?
        .collect()
}

pub(super) fn replay(connection: &Connection, id: RequestId, now: Timestamp) -> rusqlite::Result<bool> {
    let text = id.to_string();
    let mut statement = connection.prepare_cached(TAKE_DEAD)?;
    let mut rows = statement.query([&text])?;
    let Some(row) = rows.next()? else { return Ok(false) };
    let (downstream, token): (String, i64) = (row.get(0)?, row.get(1)?);
    let progress = plan_replay(token.cast_unsigned(), now);
    connection.prepare_cached(RESTART)?.execute(params![
        text,
        progress.status.as_str(),
        progress.attempts,
        now.as_micros(),
        downstream,
        progress.due.as_micros(),
        token,
    ])?;
    Ok(true)
}

pub(super) fn discard(connection: &Connection, id: RequestId) -> rusqlite::Result<bool> {
    connection.prepare_cached(DISCARD)?.execute([id.to_string()]).map(|deleted| deleted > 0)
}

pub(super) fn count(connection: &Connection) -> rusqlite::Result<u64> {
    connection.prepare_cached(COUNT)?.query_row([], |row| row.get(0))
}

/// A purge: first of requests, then of idempotency keys, up to a limit of each.
pub(super) struct PurgeJob {
    /// Finished requests with smaller ids are purged.
    oldest: RequestId,
    now: Timestamp,
    requests_left: usize,
    keys_left: usize,
    purged: u64,
}

impl PurgeJob {
    pub(super) fn new(keep: Duration, limit: usize, now: Timestamp) -> Self {
        let span = i64::try_from(keep.as_micros()).unwrap_or(i64::MAX);
        let oldest = RequestId::new(Timestamp::from_micros(now.as_micros().saturating_sub(span)), [0; 10]);
        Self { oldest, now, requests_left: limit, keys_left: limit, purged: 0 }
    }

    /// Purges for one turn. Breaks with the number of deleted rows at the end.
    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<u64>> {
        while self.requests_left > 0 && turn.has_time() {
            let chunk = self.requests_left.min(REQUEST_CHUNK);
            let deleted = purge_requests(connection, self.oldest, chunk)?;
            self.purged += deleted as u64;
            self.requests_left = if deleted < chunk { 0 } else { self.requests_left - deleted };
        }
        while self.requests_left == 0 && self.keys_left > 0 && turn.has_time() {
            let chunk = self.keys_left.min(KEY_CHUNK);
            let values = params![self.now.as_micros(), limited(chunk)];
            let deleted = connection.prepare_cached(DELETE_KEYS)?.execute(values)?;
            self.purged += deleted as u64;
            self.keys_left = if deleted < chunk { 0 } else { self.keys_left - deleted };
        }
        Ok(if self.requests_left + self.keys_left == 0 {
            ControlFlow::Break(self.purged)
        } else {
            ControlFlow::Continue(())
        })
    }
}

fn purge_requests(connection: &Connection, oldest: RequestId, limit: usize) -> rusqlite::Result<usize> {
    let old: Vec<RequestId> = connection
        .prepare_cached(OLD)?
        .query_map(params![oldest.to_string(), limited(limit)], |row| read_id(row, 0))?
        .collect::<rusqlite::Result<_>>()?;
    let mut delete = connection.prepare_cached(DELETE)?;
    for id in &old {
        discard(connection, *id)?;
        delete.execute([id.to_string()])?;
    }
    if !old.is_empty() {
        connection.prepare_cached(COUNT_PURGED)?.execute([old.len()])?;
    }
    Ok(old.len())
}

pub(super) fn audit(connection: &Connection) -> rusqlite::Result<RequestAudit> {
    connection.prepare_cached(AUDIT)?.query_row([], |row| {
        Ok(RequestAudit {
            accepted: row.get(0)?,
            purged: row.get(1)?,
            completed: row.get(2)?,
            failed: row.get(3)?,
            dead: row.get(4)?,
            in_flight: row.get(5)?,
            jobs: row.get(6)?,
            cancelled: row.get(7)?,
            erased: row.get(8)?,
        })
    })
}

pub(super) fn rollout(connection: &Connection) -> rusqlite::Result<Option<Rollout>> {
    connection.prepare_cached(ROLLOUT)?.query_row([], read_rollout).optional()
}

pub(super) fn change_rollout(
    connection: &Connection,
    change: RolloutChange,
    default: Rollout,
) -> rusqlite::Result<Rollout> {
    let Rollout { processing_enabled, reconciler_enabled, canary, .. } = default;
    let begin = params![processing_enabled, reconciler_enabled, canary.get()];
    connection.prepare_cached(BEGIN_ROLLOUT)?.execute(begin)?;
    let RolloutChange { processing_enabled, reconciler_enabled, canary, accepting_enabled } = change;
    let change = params![processing_enabled, reconciler_enabled, canary.map(Percent::get), accepting_enabled];
    connection.prepare_cached(CHANGE_ROLLOUT)?.query_row(change, read_rollout)
}

fn read_rollout(row: &rusqlite::Row<'_>) -> rusqlite::Result<Rollout> {
    Ok(Rollout {
        processing_enabled: row.get(0)?,
        reconciler_enabled: row.get(1)?,
        canary: Percent::new(row.get(2)?).map_err(fault)?,
        accepting_enabled: row.get::<_, Option<bool>>(3)?.unwrap_or(true),
    })
}
