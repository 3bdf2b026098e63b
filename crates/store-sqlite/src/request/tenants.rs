//! What operators do with a whole tenant: erase its data, and set its limit.

use std::ops::ControlFlow;

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::quota::QuotaLimits;
use weir_core::request::idempotency::RETENTION;
use weir_core::{RequestId, TenantId, Timestamp};
use weir_store::request::{ErasedBatch, TENANT_LIMITS_MAX, TenantLimit, WEBHOOKS_TOPIC};

use super::idempotency_journal::IdempotencyJournal;
use super::{limited, read_id};
use crate::error::fault;
use crate::writer::WriterTurn;

/// Requests erased between two checks of the turn. Their payloads may be large.
const REQUEST_CHUNK: usize = 16;
/// Keys deleted between two checks of the turn.
const KEY_CHUNK: usize = 128;
/// Journal rows folded between two checks of the turn.
const FOLD_CHUNK: usize = 256;

/// A tenant may begin again while an erasure runs: it then goes further.
const BEGIN: &str = "
    INSERT INTO request_erasure (tenant_id, begun_at) VALUES (?1, ?2)
    ON CONFLICT (tenant_id) DO UPDATE SET begun_at = max(begun_at, excluded.begun_at)";
const COUNT: &str =
    "SELECT count(*) FROM (SELECT 1 FROM request_record WHERE tenant_id = ?1 ORDER BY tenant_id LIMIT ?2)";
const NEXT: &str = "SELECT tenant_id, begun_at FROM request_erasure ORDER BY begun_at LIMIT 1 OFFSET ?1";
const FIND: &str = "
    SELECT request_id FROM request_record WHERE tenant_id = ?1 AND created_at <= ?2 ORDER BY request_id LIMIT ?3";
const DELETE_DEAD: &str = "DELETE FROM request_dead WHERE request_id = ?1";
/// With its job, which is part of the row.
const DELETE: &str = "DELETE FROM request_record WHERE request_id = ?1";
const COUNT_ERASED: &str =
    "UPDATE request_ledger SET purged = purged + ?1, erased = erased + ?1 WHERE id = 1";
const PROGRESS: &str = "UPDATE request_erasure SET erased = erased + ?2 WHERE tenant_id = ?1";
const DELETE_KEYS: &str = "
    DELETE FROM idempotency_record WHERE id IN (
        SELECT id FROM idempotency_record WHERE tenant_id = ?1 AND expires_at <= ?2 LIMIT ?3)";
const DELETE_WEBHOOKS: &str = "DELETE FROM dead_letter WHERE topic = ?1 AND key = ?2";
const COUNT_DISCARDED: &str = "UPDATE queue_ledger SET discarded = discarded + ?2 WHERE topic = ?1";
const END: &str = "DELETE FROM request_erasure WHERE tenant_id = ?1 RETURNING erased";
const LIMITS: &str = "SELECT tenant_id, per_minute FROM request_tenant_limit ORDER BY tenant_id";
const PUT_LIMIT: &str = "
    INSERT INTO request_tenant_limit (tenant_id, per_minute)
    SELECT ?1, ?2 WHERE ?3 > (SELECT count(*) FROM request_tenant_limit WHERE tenant_id <> ?1)
    ON CONFLICT (tenant_id) DO UPDATE SET per_minute = excluded.per_minute";
const DELETE_LIMIT: &str = "DELETE FROM request_tenant_limit WHERE tenant_id = ?1";

pub(super) fn begin_erasure(
    connection: &Connection,
    tenant: &TenantId,
    now: Timestamp,
) -> rusqlite::Result<()> {
    connection.prepare_cached(BEGIN)?.execute(params![tenant.as_str(), now.as_micros()]).map(drop)
}

pub(super) fn count(connection: &Connection, tenant: &TenantId, max: usize) -> rusqlite::Result<u64> {
    connection.prepare_cached(COUNT)?.query_row(params![tenant.as_str(), limited(max)], |row| row.get(0))
}

/// The tenant whose erasure began first, after so many others, and when it did.
pub(super) fn next_erasure(
    connection: &Connection,
    passed_over: usize,
) -> rusqlite::Result<Option<(TenantId, Timestamp)>> {
    let read = |row: &Row<'_>| {
        let tenant = TenantId::parse(row.get_ref(0)?.as_str()?).map_err(fault)?;
        Ok((tenant, Timestamp::from_micros(row.get(1)?)))
    };
    connection.prepare_cached(NEXT)?.query_row([limited(passed_over)], read).optional()
}

/// Erases some of a tenant's data, up to a limit.
pub(super) struct EraseJob {
    limit: usize,
    passed_over: usize,
    requests: Vec<RequestId>,
    /// Keys that were deleted.
    keys: usize,
}

impl EraseJob {
    pub(super) fn new(limit: usize, passed_over: usize) -> Self {
        Self { limit, passed_over, requests: Vec::new(), keys: 0 }
    }

    /// Erases for one turn. Breaks with what was erased in all turns at the limit, or when nothing is left.
    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        keys: &mut IdempotencyJournal,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<Option<ErasedBatch>>> {
        let Some((tenant, begun_at)) = next_erasure(connection, self.passed_over)? else {
            return Ok(ControlFlow::Break(None));
        };
        while turn.has_time() {
            if self.requests.len() < self.limit && self.erase_requests(connection, &tenant, begun_at)? {
                continue;
            }
            let is_full = self.requests.len() + self.keys >= self.limit;
            // Only when their requests are gone: a key without one is free, a request without its key would be accepted twice.
            if !is_full && self.erase_keys(connection, keys, &tenant, begun_at)? {
                continue;
            }
            let mut end = connection.prepare_cached(END)?;
            let total =
                if is_full { None } else { end.query_row([tenant.as_str()], |row| row.get(0)).optional()? };
            let requests = std::mem::take(&mut self.requests);
            return Ok(ControlFlow::Break(Some(ErasedBatch { tenant, requests, total })));
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Erases some requests. Returns whether there were any.
    fn erase_requests(
        &mut self,
        connection: &Connection,
        tenant: &TenantId,
        begun_at: Timestamp,
    ) -> rusqlite::Result<bool> {
        let limit = REQUEST_CHUNK.min(self.limit - self.requests.len());
        let ids: Vec<RequestId> = connection
            .prepare_cached(FIND)?
            .query_map(params![tenant.as_str(), begun_at.as_micros(), limited(limit)], |row| read_id(row, 0))?
            .collect::<rusqlite::Result<_>>()?;
        if ids.is_empty() {
            return Ok(false);
        }
        let mut delete_dead = connection.prepare_cached(DELETE_DEAD)?;
        let mut delete = connection.prepare_cached(DELETE)?;
        let mut delete_webhooks = connection.prepare_cached(DELETE_WEBHOOKS)?;
        let mut webhooks = 0;
        for id in &ids {
            let id = id.to_string();
            delete_dead.execute([&id])?;
            delete.execute([&id])?;
            webhooks += delete_webhooks.execute([WEBHOOKS_TOPIC, &id])?;
        }
        connection.prepare_cached(COUNT_DISCARDED)?.execute(params![WEBHOOKS_TOPIC, webhooks])?;
        connection.prepare_cached(COUNT_ERASED)?.execute([ids.len()])?;
        connection.prepare_cached(PROGRESS)?.execute(params![tenant.as_str(), ids.len()])?;
        self.requests.extend(ids);
        Ok(true)
    }

    /// Erases some idempotency keys, once the journal has none of those that are to be erased. Returns whether there may be more.
    fn erase_keys(
        &mut self,
        connection: &Connection,
        keys: &mut IdempotencyJournal,
        tenant: &TenantId,
        begun_at: Timestamp,
    ) -> rusqlite::Result<bool> {
        if keys.has_unfolded_rows() {
            keys.fold(connection, FOLD_CHUNK)?;
            return Ok(true);
        }
        let until = begun_at.plus(RETENTION).as_micros();
        let values = params![tenant.as_str(), until, limited(KEY_CHUNK)];
        let deleted = connection.prepare_cached(DELETE_KEYS)?.execute(values)?;
        self.keys += deleted;
        Ok(deleted > 0)
    }
}

pub(super) fn limits(connection: &Connection) -> rusqlite::Result<Vec<TenantLimit>> {
    let read = |row: &Row<'_>| {
        let tenant = TenantId::parse(row.get_ref(0)?.as_str()?).map_err(fault)?;
        // 0 is no limit.
        Ok(TenantLimit { tenant, limits: QuotaLimits::new(row.get(1)?, 1).ok() })
    };
    connection.prepare_cached(LIMITS)?.query_map([], read)?.collect()
}

pub(super) fn put_limit(connection: &Connection, limit: &TenantLimit) -> rusqlite::Result<bool> {
    let per_minute = limit.limits.map_or(0, |limits| limits.rate_limit());
    let values = params![limit.tenant.as_str(), per_minute, TENANT_LIMITS_MAX];
    connection.prepare_cached(PUT_LIMIT)?.execute(values).map(|changed| changed > 0)
}

pub(super) fn delete_limit(connection: &Connection, tenant: &TenantId) -> rusqlite::Result<bool> {
    connection.prepare_cached(DELETE_LIMIT)?.execute([tenant.as_str()]).map(|deleted| deleted > 0)
}
