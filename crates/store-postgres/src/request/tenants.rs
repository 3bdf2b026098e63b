//! What operators do with a whole tenant: erase its data, and set its limit.
//!
//! An erasure locks like every other change: dead letters, then jobs, then records. A batch deletes the records that have neither
//! dead letter nor job afterwards; a request that a replay or a report has changed at that moment has one of them, and the next
//! batch gets it.

use tokio_postgres::Row;
use uuid::Uuid;
use weir_core::quota::QuotaLimits;
use weir_core::request::idempotency::RETENTION;
use weir_core::{RequestId, TenantId};
use weir_store::Result;
use weir_store::request::{ErasedBatch, TENANT_LIMITS_MAX, TenantLimit, WEBHOOKS_TOPIC};

use super::read_id;
use crate::Postgres;
use crate::connection::Values;
use crate::pool::Session;
use crate::row::{self, column, unreadable, unsigned};

/// A tenant may begin again while an erasure runs: it then goes further.
const BEGIN: &str = "
    INSERT INTO request_erasure AS present (tenant_id, begun_at) VALUES ($1, coalesce($2, clock_timestamp()))
    ON CONFLICT (tenant_id) DO UPDATE SET begun_at = greatest(present.begun_at, excluded.begun_at)";
const COUNT: &str = "
    SELECT count(*) FROM (SELECT FROM request_record WHERE tenant_id = $1 ORDER BY tenant_id LIMIT $2) AS request";
/// One server at a time erases a tenant.
const NEXT: &str = "
    SELECT tenant_id, begun_at FROM request_erasure ORDER BY begun_at OFFSET $1 LIMIT 1 FOR UPDATE SKIP LOCKED";
const FIND: &str = "
    SELECT request_id FROM request_record WHERE tenant_id = $1 AND created_at <= $2
    ORDER BY tenant_id, request_id LIMIT $3";
const DELETE_DEAD: &str = "
    DELETE FROM request_dead WHERE request_id = ANY(ARRAY(
        SELECT request_id FROM request_dead WHERE request_id = ANY($1) ORDER BY request_id FOR UPDATE))";
const DELETE_JOBS: &str = "
    DELETE FROM request_job WHERE request_id = ANY(ARRAY(
        SELECT request_id FROM request_job WHERE request_id = ANY($1) ORDER BY request_id FOR UPDATE))";
/// `IS NULL` keeps the look-ups from becoming joins. What is erased counts as purged, too, for servers of the version before.
const DELETE_RECORDS: &str = "
    WITH deleted AS (
        DELETE FROM request_record AS record
        WHERE request_id = ANY($1)
          AND (SELECT true FROM request_job WHERE request_id = record.request_id OFFSET 0) IS NULL
          AND (SELECT true FROM request_dead WHERE request_id = record.request_id OFFSET 0) IS NULL
        RETURNING request_id),
    counted AS (
        INSERT INTO request_ledger (slot, purged, erased) SELECT $2, count(*), count(*) FROM deleted
        ON CONFLICT (slot) DO UPDATE
        SET purged = request_ledger.purged + excluded.purged, erased = request_ledger.erased + excluded.erased),
    progressed AS (
        UPDATE request_erasure SET erased = erased + (SELECT count(*) FROM deleted) WHERE tenant_id = $3)
    SELECT request_id FROM deleted";
const DELETE_KEYS: &str = "
    DELETE FROM idempotency_record WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM idempotency_record WHERE tenant_id = $1 AND expires_at <= $2
        ORDER BY tenant_id, idempotency_key LIMIT $3 FOR UPDATE SKIP LOCKED))";
/// Of these requests. One that an operator is replaying or discarding is left: when it is sent, it finds nothing.
const DELETE_WEBHOOKS: &str = "
    WITH deleted AS (
        DELETE FROM dead_letter WHERE id = ANY(ARRAY(
            SELECT id FROM dead_letter WHERE topic = $1 AND key = ANY($2) FOR UPDATE SKIP LOCKED))
        RETURNING id)
    INSERT INTO queue_ledger (topic, slot, discarded) SELECT $1, $3, count(*) FROM deleted HAVING count(*) > 0
    ON CONFLICT (topic, slot) DO UPDATE SET discarded = queue_ledger.discarded + excluded.discarded";
const END: &str = "DELETE FROM request_erasure WHERE tenant_id = $1 AND begun_at = $2 RETURNING erased";
const LIMITS: &str = "SELECT tenant_id, per_minute FROM request_tenant_limit ORDER BY tenant_id";
const PUT_LIMIT: &str = "
    INSERT INTO request_tenant_limit (tenant_id, per_minute)
    SELECT $1, $2 WHERE $3 > (SELECT count(*) FROM request_tenant_limit WHERE tenant_id <> $1)
    ON CONFLICT (tenant_id) DO UPDATE SET per_minute = excluded.per_minute";
const DELETE_LIMIT: &str = "DELETE FROM request_tenant_limit WHERE tenant_id = $1";

pub(super) async fn begin_erasure(engine: &Postgres, tenant: &TenantId, count_max: usize) -> Result<u64> {
    let session = engine.inner.pool.session().await?;
    session.execute(BEGIN, &[&tenant.as_str(), &engine.clock_override()]).await?;
    let count = session.query_one(COUNT, &[&tenant.as_str(), &row::bigint(count_max)]).await?;
    session.keep();
    row::count(&count, 0)
}

pub(super) async fn erase_some(
    engine: &Postgres,
    limit: usize,
    passed_over: usize,
) -> Result<Option<ErasedBatch>> {
    let session = engine.inner.pool.session().await?;
    session.run("BEGIN").await?;
    let erased = match session.query_opt(NEXT, &[&row::bigint(passed_over)]).await? {
        Some(erasure) => Some(erase(&session, &erasure, limit).await?),
        None => None,
    };
    session.run("COMMIT").await?;
    session.keep();
    Ok(erased)
}

/// Erases a part of what an erasure, whose row is locked, has left.
async fn erase(session: &Session, erasure: &Row, limit: usize) -> Result<ErasedBatch> {
    let (tenant, begun_at): (&str, std::time::SystemTime) = (column(erasure, 0)?, column(erasure, 1)?);
    let mut batch = ErasedBatch {
        tenant: TenantId::parse(tenant).map_err(unreadable)?,
        requests: Vec::new(),
        total: None,
    };
    let limit = row::bigint(limit);
    let found = session.query(FIND, &[&tenant, &begun_at, &limit]).await?;
    if !found.is_empty() {
        let ids: Vec<Uuid> = found.iter().map(|row| column(row, 0)).collect::<Result<_>>()?;
        session.execute(DELETE_DEAD, &[&ids]).await?;
        session.execute(DELETE_JOBS, &[&ids]).await?;
        let deleted = session.query(DELETE_RECORDS, &[&ids, &session.ledger_row, &tenant]).await?;
        batch.requests = deleted.iter().map(|row| read_id(row, 0)).collect::<Result<_>>()?;
        let keys: Vec<String> = batch.requests.iter().map(RequestId::to_string).collect();
        session.execute(DELETE_WEBHOOKS, &[&WEBHOOKS_TOPIC, &keys, &session.ledger_row]).await?;
        return Ok(batch);
    }
    // Only when their requests are gone: a key without one is free, a request without its key would be accepted twice.
    let keys_until = begun_at + RETENTION;
    if session.execute(DELETE_KEYS, &[&tenant, &keys_until, &limit]).await? == 0 {
        let total = session.query_opt(END, &[&tenant, &begun_at]).await?;
        batch.total = total.map(|row| row::count(&row, 0)).transpose()?;
    }
    Ok(batch)
}

pub(super) async fn limits(engine: &Postgres) -> Result<Vec<TenantLimit>> {
    let rows = engine.inner.pool.query(LIMITS, &[]).await?;
    let read = |row: &Row| {
        let tenant = TenantId::parse(column::<&str>(row, 0)?).map_err(unreadable)?;
        // 0 is no limit.
        Ok(TenantLimit { tenant, limits: QuotaLimits::new(unsigned(column(row, 1)?), 1).ok() })
    };
    rows.iter().map(read).collect()
}

pub(super) async fn put_limit(engine: &Postgres, limit: &TenantLimit) -> Result<bool> {
    let per_minute = row::int(limit.limits.map_or(0, |limits| limits.rate_limit()));
    let values: Values<'_> = &[&limit.tenant.as_str(), &per_minute, &row::bigint(TENANT_LIMITS_MAX)];
    Ok(engine.inner.pool.execute(PUT_LIMIT, values).await? > 0)
}

pub(super) async fn delete_limit(engine: &Postgres, tenant: &TenantId) -> Result<bool> {
    Ok(engine.inner.pool.execute(DELETE_LIMIT, &[&tenant.as_str()]).await? > 0)
}
