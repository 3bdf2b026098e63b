//! Everything of requests beside submission and work: dead letters, jobs that the broker lacks, old records, the rollout, and the
//! audit.

use std::time::{Duration, Instant};

use futures_util::future::try_join3;
use uuid::Uuid;
use weir_core::request::canary::Percent;
use weir_core::request::state::RequestProgress;
use weir_core::{RequestId, Timestamp};
use weir_store::Result;
use weir_store::request::{DeadRequest, PendingRequest, RequestAudit, Rollout, RolloutChange, plan_replay};

use super::{JOBS, read_id, read_request, uuids};
use crate::clock::CLOCK;
use crate::connection::Values;
use crate::pool::Session;
use crate::purge_size::PurgeSize;
use crate::row::{self, column, int, timestamp, unreadable};
use crate::{Postgres, time};

const PENDING: &str = "
    SELECT job.request_id, (extract(epoch FROM coalesce($3, clock_timestamp()) - created_at) * 1000000)::bigint
    FROM request_job AS job
    CROSS JOIN LATERAL (
        SELECT status, created_at FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record
    WHERE job.is_pending AND record.status = 'PENDING_ENQUEUE'
      AND created_at <= coalesce($3, clock_timestamp()) - $1::bigint * interval '1 microsecond'
    ORDER BY job.request_id LIMIT $2";
/// The longest age that is searched for: longer than any request waits, and within the range of Postgres's timestamps.
const AGE_MAX: Duration = Duration::from_secs(100 * 366 * 86_400);
/// Locks jobs first, as every change does. A worker that has claimed one has set its request to `IN_PROGRESS` already.
const MARK_ENQUEUED: &str = "
    WITH locked AS MATERIALIZED (
        SELECT request_id, is_pending FROM request_job WHERE request_id = ANY($1) ORDER BY request_id FOR UPDATE),
    published AS (
        UPDATE request_job AS job SET is_pending = false FROM locked
        WHERE job.request_id = ANY(ARRAY[locked.request_id]) AND locked.is_pending)
    UPDATE request_record AS record SET status = 'ACCEPTED', updated_at = coalesce($2, clock_timestamp())
    FROM locked WHERE record.request_id = ANY(ARRAY[locked.request_id]) AND record.status = 'PENDING_ENQUEUE'";
/// The columns of [`read_request`], the payload only if it is not too long. A dead letter has no result.
const DEAD: &str = "
    SELECT record.request_id, tenant_id, request_type, status, attempts,
           CASE WHEN octet_length(payload) <= $3::bigint THEN payload ELSE ''::bytea END, payload_key_id,
           NULL::bytea, NULL::text, failure_code, failure_message, callback_url, created_at, updated_at,
           traceparent, tracestate, dead.died_at
    FROM (SELECT * FROM request_dead WHERE request_id > $1 ORDER BY request_id LIMIT $2) AS dead
    CROSS JOIN LATERAL (SELECT * FROM request_record WHERE request_id = dead.request_id OFFSET 0) AS record
    ORDER BY dead.request_id";
const LETTERS: &str = "
    DELETE FROM request_dead WHERE request_id = ANY(ARRAY(
        SELECT request_id FROM request_dead WHERE request_id = ANY($1) ORDER BY request_id FOR UPDATE))
    RETURNING request_id, downstream, token";
const RESTART: &str = "
    WITH replayed AS (
        SELECT * FROM unnest($1::uuid[], $2::text[], $3::bigint[]) AS replayed (request_id, downstream, token)),
    queued AS (
        INSERT INTO request_job (request_id, downstream, claimable_at, token)
        SELECT request_id, downstream, $6, token FROM replayed)
    UPDATE request_record AS record
    SET status = $4, attempts = $5, failure_code = NULL, failure_message = NULL, updated_at = $6
    FROM replayed WHERE record.request_id = ANY(ARRAY[replayed.request_id])";
const DISCARD: &str = "DELETE FROM request_dead WHERE request_id = $1";
const COUNT: &str = "SELECT count(*) FROM request_dead";
/// Ids are ordered by time, so the oldest are first.
const OLD: &str = "
    SELECT request_id FROM request_record
    WHERE request_id < $1 AND status IN ('COMPLETED', 'FAILED_PERMANENT', 'FAILED_RETRY_EXHAUSTED')
    ORDER BY request_id LIMIT $2";
/// Dead letters first: a replay has its dead letter locked, and afterwards the record is not final any more.
const FORGET_DEAD: &str = "DELETE FROM request_dead WHERE request_id = ANY($1)";
const DELETE: &str = "
    WITH deleted AS (
        DELETE FROM request_record
        WHERE request_id = ANY($1) AND status IN ('COMPLETED', 'FAILED_PERMANENT', 'FAILED_RETRY_EXHAUSTED')
        RETURNING request_id),
    dead_deleted AS (DELETE FROM request_dead WHERE request_id = ANY(ARRAY(SELECT request_id FROM deleted))),
    counted AS (
        INSERT INTO request_ledger (slot, purged) SELECT $2, count(*) FROM deleted
        ON CONFLICT (slot) DO UPDATE SET purged = request_ledger.purged + excluded.purged)
    SELECT count(*) FROM deleted";
const FORGET_KEYS: &str = "
    DELETE FROM idempotency_record WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM idempotency_record
        WHERE expires_at <= coalesce($1, clock_timestamp()) ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED))";
const ROLLOUT: &str = "
    SELECT processing_enabled, reconciler_enabled, canary_percent, accepting_enabled FROM request_rollout";
const CHANGE_ROLLOUT: &str = "
    INSERT INTO request_rollout AS present (id, processing_enabled, reconciler_enabled, canary_percent, accepting_enabled)
    VALUES (1, coalesce($1::boolean, $4), coalesce($2::boolean, $5), coalesce($3::smallint, $6), $7::boolean)
    ON CONFLICT (id) DO UPDATE
    SET processing_enabled = coalesce($1, present.processing_enabled),
        reconciler_enabled = coalesce($2, present.reconciler_enabled),
        canary_percent = coalesce($3, present.canary_percent),
        accepting_enabled = coalesce($7, present.accepting_enabled)
    RETURNING processing_enabled, reconciler_enabled, canary_percent, accepting_enabled";
const BOOKS: &str = "
    SELECT (SELECT coalesce(sum(accepted), 0)::bigint FROM request_ledger),
           (SELECT coalesce(sum(purged - erased), 0)::bigint FROM request_ledger),
           count(*) FILTER (WHERE status = 'COMPLETED'),
           count(*) FILTER (WHERE status = 'FAILED_PERMANENT' AND is_cancelled IS NOT TRUE),
           count(*) FILTER (WHERE status = 'FAILED_RETRY_EXHAUSTED'),
           count(*) FILTER (WHERE status IN ('ACCEPTED', 'PENDING_ENQUEUE', 'IN_PROGRESS')),
           (SELECT count(*) FROM request_job), count(*) FILTER (WHERE is_cancelled),
           (SELECT coalesce(sum(erased), 0)::bigint FROM request_ledger)
    FROM request_record";

pub(super) async fn pending(
    engine: &Postgres,
    older_than: Duration,
    limit: usize,
) -> Result<Vec<PendingRequest>> {
    let span = time::micros(older_than.min(AGE_MAX));
    let values: Values<'_> = &[&span, &row::bigint(limit), &engine.clock_override()];
    let rows = engine.inner.pool.query(PENDING, values).await?;
    rows.iter()
        .map(|row| {
            let age = Duration::from_micros(column::<i64>(row, 1)?.max(0).unsigned_abs());
            Ok(PendingRequest { id: read_id(row, 0)?, age })
        })
        .collect()
}

pub(super) async fn mark_enqueued(engine: &Postgres, ids: &[RequestId]) -> Result<()> {
    let values: Values<'_> = &[&uuids(ids), &engine.clock_override()];
    engine.inner.pool.execute(MARK_ENQUEUED, values).await.map(drop)
}

pub(super) async fn list(
    engine: &Postgres,
    after: Option<RequestId>,
    limit: usize,
    payload_max: usize,
) -> Result<Vec<DeadRequest>> {
    let after = after.map_or(Uuid::nil(), |id| *id.as_uuid());
    let values: Values<'_> = &[&after, &row::bigint(limit), &row::bigint(payload_max)];
    let rows = engine.inner.pool.query(DEAD, values).await?;
    let read = |row| Ok(DeadRequest { request: read_request(row)?, died_at: timestamp(row, 16)? });
    rows.iter().map(read).collect()
}

pub(super) async fn replay(engine: &Postgres, ids: &[RequestId]) -> Result<Vec<RequestId>> {
    let session = engine.inner.pool.session().await?;
    let [letters, clock] = session.prepare([LETTERS, CLOCK]).await?;
    let (_, letters, clock) = session
        .bounded(try_join3(
            session.batch_execute("BEGIN"),
            letters.query(&[&uuids(ids)]),
            clock.query_one(&[]),
        ))
        .await?;
    let now = engine.now(&clock)?;
    let (mut ids, mut downstreams, mut tokens) = (Vec::<Uuid>::new(), Vec::<String>::new(), Vec::new());
    for row in &letters {
        ids.push(column(row, 0)?);
        downstreams.push(column(row, 1)?);
        tokens.push(column::<i64>(row, 2)?);
    }
    // The token of the plan is not used: the row's own stays.
    let RequestProgress { status, attempts, due, .. } = plan_replay(0, now);
    let (status, attempts) = (status.as_str(), int(attempts));
    let values: Values<'_> = &[&ids, &downstreams, &tokens, &status, &attempts, &time::to_system(due)];
    session.execute(RESTART, values).await?;
    session.run("COMMIT").await?;
    session.keep();
    engine.inner.topic_notify.notify(JOBS);
    ids.sort_unstable();
    Ok(ids.into_iter().map(RequestId::from_uuid).collect())
}

pub(super) async fn discard(engine: &Postgres, id: RequestId) -> Result<bool> {
    Ok(engine.inner.pool.execute(DISCARD, &[id.as_uuid()]).await? > 0)
}

pub(super) async fn count(engine: &Postgres) -> Result<u64> {
    row::count(&engine.inner.pool.query_one(COUNT, &[]).await?, 0)
}

pub(super) async fn purge(engine: &Postgres, keep: Duration, limit: usize) -> Result<u64> {
    let session = engine.inner.pool.session().await?;
    let clock = session.query_one(CLOCK, &[]).await?;
    let before = engine.now(&clock)?.as_micros().saturating_sub(time::micros(keep));
    let oldest = RequestId::new(Timestamp::from_micros(before), [0; 10]);
    let mut purged = 0;
    let (mut remaining, mut size) = (limit, PurgeSize::FIRST);
    while remaining > 0 {
        let (begun, rows) = (Instant::now(), size.rows().min(remaining));
        let (found, deleted) = purge_requests(&session, oldest, rows).await?;
        purged += deleted;
        remaining = if found < rows { 0 } else { remaining - rows };
        size = size.after(begun.elapsed());
    }
    let (mut remaining, mut size) = (limit, PurgeSize::FIRST);
    while remaining > 0 {
        let (begun, rows) = (Instant::now(), size.rows().min(remaining));
        let values: Values<'_> = &[&engine.clock_override(), &row::bigint(rows)];
        let deleted = session.execute(FORGET_KEYS, values).await?;
        purged += deleted;
        remaining = if deleted < rows as u64 { 0 } else { remaining - rows };
        size = size.after(begun.elapsed());
    }
    session.keep();
    Ok(purged)
}

/// Purges up to `limit` requests older than `before`. Returns how many were found and how many of them were deleted.
async fn purge_requests(session: &Session, before: RequestId, limit: usize) -> Result<(usize, u64)> {
    let old = session.query(OLD, &[before.as_uuid(), &row::bigint(limit)]).await?;
    let old: Vec<Uuid> = old.iter().map(|row| column(row, 0)).collect::<Result<_>>()?;
    if old.is_empty() {
        return Ok((0, 0));
    }
    session.run("BEGIN").await?;
    session.execute(FORGET_DEAD, &[&old]).await?;
    let deleted = session.query_one(DELETE, &[&old, &session.ledger_row]).await?;
    session.run("COMMIT").await?;
    Ok((old.len(), row::count(&deleted, 0)?))
}

pub(super) async fn rollout(engine: &Postgres) -> Result<Option<Rollout>> {
    let row = engine.inner.pool.query_opt(ROLLOUT, &[]).await?;
    row.as_ref().map(read_rollout).transpose()
}

pub(super) async fn change_rollout(
    engine: &Postgres,
    change: RolloutChange,
    default: Rollout,
) -> Result<Rollout> {
    let percent = |canary: Percent| i16::from(canary.get());
    let (canary, default_canary) = (change.canary.map(percent), percent(default.canary));
    let values: Values<'_> = &[
        &change.processing_enabled,
        &change.reconciler_enabled,
        &canary,
        &default.processing_enabled,
        &default.reconciler_enabled,
        &default_canary,
        &change.accepting_enabled,
    ];
    read_rollout(&engine.inner.pool.query_one(CHANGE_ROLLOUT, values).await?)
}

fn read_rollout(row: &tokio_postgres::Row) -> Result<Rollout> {
    let percent = u8::try_from(column::<i16>(row, 2)?).map_err(unreadable)?;
    Ok(Rollout {
        processing_enabled: column(row, 0)?,
        reconciler_enabled: column(row, 1)?,
        canary: Percent::new(percent).map_err(unreadable)?,
        accepting_enabled: column::<Option<bool>>(row, 3)?.unwrap_or(true),
    })
}

pub(super) async fn books(engine: &Postgres) -> Result<RequestAudit> {
    let row = engine.inner.pool.query_one(BOOKS, &[]).await?;
    let count = |index| row::count(&row, index);
    Ok(RequestAudit {
        accepted: count(0)?,
        purged: count(1)?,
        completed: count(2)?,
        failed: count(3)?,
        dead: count(4)?,
        in_flight: count(5)?,
        jobs: count(6)?,
        cancelled: count(7)?,
        erased: count(8)?,
    })
}
