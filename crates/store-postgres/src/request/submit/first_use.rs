//! Inserts submissions whose keys are new, as nearly all are: one statement, which is its own transaction, and one round trip. A
//! submission that it does not insert has a key that is in use, has expired, outlived its request, or was stored before keys were
//! hashed; `submit_any` decides it, with the entry of the key at hand.

use std::collections::HashSet;

use weir_core::request::idempotency::RETENTION;
use weir_core::{RequestId, Timestamp};
use weir_store::Result;
use weir_store::request::{NewRequest, Submit, SubmitOutcome};

use super::super::turns;
use super::columns::SubmitColumns;
use crate::pool::Session;
use crate::row::{column, timestamp};
use crate::{Postgres, time};

/// Writes nothing if no key is new. See [`INSERT`](super::INSERT) for `IS TRUE`. Express jobs are those that
/// [`is_express`](weir_core::request::turn::is_express) says.
const INSERT: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($15, clock_timestamp()) AS now),
    submitted AS (
        SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::bytea[],
                             $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::integer[])
            AS new (request_id, tenant_id, key, hash, request_type, status, payload, key_id, callback_url, downstream,
                    traceparent, tracestate, plain, place)),
    new AS (
        SELECT * FROM submitted
        WHERE plain IS NULL OR (
            SELECT true FROM idempotency_record AS entry
            WHERE entry.tenant_id = submitted.tenant_id AND entry.idempotency_key = submitted.plain OFFSET 0) IS NULL),
    inserted AS (
        INSERT INTO idempotency_record (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
        SELECT tenant_id, key, hash, request_id, (SELECT now FROM clock) + $16::bigint * interval '1 microsecond'
        FROM new ORDER BY tenant_id, key
        ON CONFLICT (tenant_id, idempotency_key) DO NOTHING
        RETURNING request_id),
    recorded AS (
        INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, callback_url,
                                    created_at, updated_at, traceparent, tracestate)
        SELECT request_id, tenant_id, request_type, status, payload, key_id, callback_url,
               (SELECT now FROM clock), (SELECT now FROM clock), traceparent, tracestate
        FROM new WHERE (request_id IN (SELECT request_id FROM inserted)) IS TRUE),
    queued AS (
        INSERT INTO request_job (request_id, downstream, claimable_at, is_pending, waiting_tenant, is_express)
        SELECT request_id, downstream, (SELECT now FROM clock), status = 'PENDING_ENQUEUE', tenant_id,
               CASE WHEN place < $18::bigint THEN place + (
                   SELECT count(*) FROM (
                       SELECT FROM request_job AS unfinished
                       WHERE unfinished.downstream = new.downstream AND unfinished.waiting_tenant = new.tenant_id
                       LIMIT $18::bigint) AS few) < $18::bigint ELSE false END
        FROM new WHERE (request_id IN (SELECT request_id FROM inserted)) IS TRUE
        RETURNING is_express),
    counted AS (
        INSERT INTO request_ledger (slot, accepted) SELECT $17, count(*) FROM inserted HAVING count(*) > 0
        ON CONFLICT (slot) DO UPDATE SET accepted = request_ledger.accepted + excluded.accepted)
    SELECT request_id, (SELECT now FROM clock), (SELECT bool_or(is_express) FROM queued) FROM inserted";

/// Returns the outcomes of submissions whose keys were new, and `None` for the others. Of several with the same key only the
/// first is tried.
pub(super) async fn insert(
    engine: &Postgres,
    session: &Session,
    batch: &[&Submit],
) -> Result<Vec<Option<SubmitOutcome>>> {
    let express_jobs = turns::express_jobs(engine, session).await?;
    let mut keys = HashSet::with_capacity(batch.len());
    let mut tried = batch.to_vec();
    tried.retain(|submit| keys.insert((submit.tenant.as_str(), submit.key.as_str())));
    let accepted: Vec<NewRequest<'_>> =
        tried.iter().map(|submit| NewRequest::accept(submit, Timestamp::EPOCH)).collect();
    let columns = SubmitColumns::new(&accepted);
    let (clock, retention) = (engine.clock_override(), time::micros(RETENTION));
    let values = columns.values_with([&clock, &retention, &session.ledger_row, &express_jobs]);
    let rows = session.query(INSERT, &values).await?;
    let mut inserted = HashSet::with_capacity(rows.len());
    for row in &rows {
        inserted.insert(RequestId::from_uuid(column(row, 0)?));
    }
    let now = rows.first().map_or(Ok(Timestamp::EPOCH), |row| timestamp(row, 1))?;
    turns::notify_express(engine, &rows, 2)?;
    let outcome = |submit: &&Submit| {
        let is_inserted = inserted.contains(&submit.id);
        is_inserted.then(|| SubmitOutcome::Accepted(NewRequest::accept(submit, now).receipt()))
    };
    Ok(batch.iter().map(outcome).collect())
}
