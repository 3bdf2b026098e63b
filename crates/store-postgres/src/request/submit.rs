//! Accepts submissions. A batch of new idempotency keys is one round trip (`first_use`) while tenants have no limit. Any other batch
//! is two: the first reads the entries of the keys (and locks the tenants' windows, if there is a limit), the second writes
//! records, keys and jobs. When two servers insert the same key at the same time, the second waits for the other's commit, writes
//! nothing, and reads the other's entry.

mod columns;
mod first_use;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::SystemTime;

use futures_util::future::{try_join, try_join3, try_join4};
use tokio_postgres::Row;
use tokio_postgres::error::DbError;
use uuid::Uuid;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::request::canonical::Fingerprint;
use weir_core::request::idempotency::IdempotencyRecord;
use weir_core::{RequestId, Timestamp};
use weir_store::request::{
    IdempotencyEntries, IdempotencyEntry, PlainKeysRefused, Submit, SubmitOutcome, SubmitPlan, SubmitReceipt,
    plan_submit,
};
use weir_store::{Batch, Error, Result};

use self::columns::SubmitColumns;
use super::read_status;
use super::sealing::HASHED_KEYS;
use super::turns;
use crate::clock::CLOCK;
use crate::connection::{Prepared, Values};
use crate::pool::Session;
use crate::row::{column, int, timestamp, unreadable, unsigned};
use crate::{ENGINE, Postgres, time};

/// The entries of idempotency keys, also of those from before keys were hashed. The status is NULL if the request was purged.
const FIND_KEYS: &str = "
    SELECT entry.tenant_id, requested.key, entry.payload_hash, entry.request_id, entry.expires_at,
           CASE WHEN record.is_cancelled THEN 'CANCELLED' ELSE record.status END, record.created_at,
           entry.idempotency_key = requested.key
    FROM unnest($1::text[], $2::text[], $3::text[]) AS requested (tenant_id, key, plain)
    CROSS JOIN LATERAL (
        SELECT * FROM idempotency_record
        WHERE tenant_id = requested.tenant_id AND idempotency_key = ANY(ARRAY[requested.key, requested.plain])
        OFFSET 0) AS entry
    LEFT JOIN LATERAL (
        SELECT status, is_cancelled, created_at FROM request_record WHERE request_id = entry.request_id OFFSET 0) AS record ON true";
const CREATE_TENANTS: &str = "
    INSERT INTO request_tenant (tenant_id, current_count, last_refresh_time)
    SELECT tenant_id, 0, '-infinity' FROM unnest($1::text[]) AS requested (tenant_id) ORDER BY tenant_id
    ON CONFLICT DO NOTHING";
const LOCK_TENANTS: &str = "
    SELECT tenant_id, current_count, nullif(last_refresh_time, '-infinity') FROM request_tenant
    WHERE tenant_id = ANY($1) ORDER BY tenant_id FOR UPDATE";
const SAVE_TENANTS: &str = "
    UPDATE request_tenant AS tenant
    SET current_count = new.current_count, last_refresh_time = new.last_refresh_time
    FROM unnest($1::text[], $2::integer[], $3::timestamptz[]) AS new (tenant_id, current_count, last_refresh_time)
    WHERE tenant.tenant_id = ANY(ARRAY[new.tenant_id])";
/// Takes a key that is new, has expired, or belongs to a request that the first round trip found purged. That cannot be checked
/// here: a record that was committed while this statement waited for its key is not visible to it. `IS TRUE` keeps the tests of
/// `inserted` from becoming joins, which without a hash would compare every new row with every other.
const INSERT: &str = "
    WITH new AS (
        SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::bytea[],
                             $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::integer[])
            AS new (request_id, tenant_id, key, hash, request_type, status, payload, key_id, callback_url, downstream,
                    traceparent, tracestate, plain, place)),
    inserted AS (
        INSERT INTO idempotency_record AS entry (tenant_id, idempotency_key, payload_hash, request_id, expires_at)
        SELECT tenant_id, key, hash, request_id, $16 FROM new ORDER BY tenant_id, key
        ON CONFLICT (tenant_id, idempotency_key) DO UPDATE
        SET payload_hash = excluded.payload_hash, request_id = excluded.request_id, expires_at = excluded.expires_at
        WHERE entry.expires_at <= $15 OR entry.request_id = ANY($18::uuid[])
        RETURNING request_id),
    recorded AS (
        INSERT INTO request_record (request_id, tenant_id, request_type, status, payload, payload_key_id, callback_url,
                                    created_at, updated_at, traceparent, tracestate)
        SELECT request_id, tenant_id, request_type, status, payload, key_id, callback_url, $15, $15,
               traceparent, tracestate
        FROM new WHERE (request_id IN (SELECT request_id FROM inserted)) IS TRUE),
    queued AS (
        INSERT INTO request_job (request_id, downstream, claimable_at, is_pending, waiting_tenant, is_express)
        SELECT request_id, downstream, $15, status = 'PENDING_ENQUEUE', tenant_id,
               CASE WHEN place < $19::bigint THEN place + (
                   SELECT count(*) FROM (
                       SELECT FROM request_job AS unfinished
                       WHERE unfinished.downstream = new.downstream AND unfinished.waiting_tenant = new.tenant_id
                       LIMIT $19::bigint) AS few) < $19::bigint ELSE false END
        FROM new WHERE (request_id IN (SELECT request_id FROM inserted)) IS TRUE
        RETURNING is_express),
    counted AS (
        INSERT INTO request_ledger (slot, accepted) SELECT $17, count(*) FROM inserted
        ON CONFLICT (slot) DO UPDATE SET accepted = request_ledger.accepted + excluded.accepted)
    SELECT request_id, (SELECT bool_or(is_express) FROM queued) FROM inserted";

/// The rows that the first round trip reads.
struct Loaded<'a> {
    keys: IdempotencyEntries<'a>,
    /// Purged requests whose keys are still there.
    purged: Vec<Uuid>,
    /// The windows of tenants with limits.
    windows: HashMap<&'a str, Quota>,
    now: Timestamp,
}

pub(super) async fn submit(engine: &Postgres, batch: Batch<Submit>) -> Result<Vec<SubmitOutcome>> {
    let session = engine.inner.pool.session().await?;
    let batch = batch.take();
    if batch.is_empty() {
        session.keep();
        return Ok(Vec::new());
    }
    let batch: Vec<&Submit> = batch.iter().collect();
    let outcomes = if batch.iter().any(|submit| submit.limits.is_some()) {
        submit_any(engine, &session, &batch).await
    } else {
        submit_new(engine, &session, &batch).await
    };
    let outcomes = outcomes.map_err(explain_plain_keys)?;
    session.keep();
    Ok(outcomes)
}

/// Names the error of a batch with keys that are not hashed although they must be by now.
fn explain_plain_keys(error: Error) -> Error {
    let cause = error.cause().and_then(|cause| cause.downcast_ref::<tokio_postgres::Error>());
    let constraint = cause.and_then(tokio_postgres::Error::as_db_error).and_then(DbError::constraint);
    let is_refused = constraint == Some(HASHED_KEYS);
    if is_refused { Error::unavailable(ENGINE, PlainKeysRefused).before_commit() } else { error }
}

/// Submits new keys first, then decides the rest.
async fn submit_new(engine: &Postgres, session: &Session, batch: &[&Submit]) -> Result<Vec<SubmitOutcome>> {
    let outcomes = first_use::insert(engine, session, batch).await?;
    let rest = outcomes.iter().zip(batch).filter(|(outcome, _)| outcome.is_none());
    let rest: Vec<&Submit> = rest.map(|(_, submit)| *submit).collect();
    let mut decided = Vec::new().into_iter();
    if !rest.is_empty() {
        decided = submit_any(engine, session, &rest).await?.into_iter();
    }
    outcomes
        .into_iter()
        .map(|outcome| {
            outcome.or_else(|| decided.next()).ok_or_else(|| unreadable("a submission has no outcome"))
        })
        .collect()
}

/// Submits a batch of new or used keys.
async fn submit_any(engine: &Postgres, session: &Session, batch: &[&Submit]) -> Result<Vec<SubmitOutcome>> {
    let Loaded { mut keys, purged, mut windows, now } = load(engine, session, batch).await?;
    let plan = plan_submit(batch.iter().copied(), &mut keys, &mut windows, now);
    let saved = save(engine, session, &plan, &purged, now).await?;
    let mut outcomes = plan.outcomes;
    if saved.len() < plan.accepted.len() {
        resolve(session, batch, &saved, &mut outcomes, now).await?;
    }
    Ok(outcomes)
}

/// The first round trip. Windows are locked before keys are read, so that with a limit servers take a tenant's keys one after the
/// other.
async fn load<'a>(engine: &Postgres, session: &Session, batch: &[&'a Submit]) -> Result<Loaded<'a>> {
    let [create_tenants, lock_tenants, clock, find_keys] =
        session.prepare([CREATE_TENANTS, LOCK_TENANTS, CLOCK, FIND_KEYS]).await?;
    let limits: BTreeMap<&str, QuotaLimits> =
        batch.iter().filter_map(|submit| Some((submit.tenant.as_str(), submit.limits?))).collect();
    let tenants: Vec<&str> = limits.keys().copied().collect();
    let lock = async {
        if tenants.is_empty() {
            return Ok(Vec::new());
        }
        let values: Values<'_> = &[&tenants];
        let (_, locked) = try_join(create_tenants.execute(values), lock_tenants.query(values)).await?;
        Ok(locked)
    };
    let (_, locked, clock, entries) = session
        .bounded(try_join4(
            session.batch_execute("BEGIN"),
            lock,
            clock.query_one(&[]),
            entry_rows(&find_keys, batch),
        ))
        .await?;
    let now = engine.now(&clock)?;
    let windows = read_windows(&limits, &locked, now)?;
    let (keys, purged) = read_keys(batch, &entries)?;
    Ok(Loaded { keys, purged, windows, now })
}

/// What the key was stored as before keys were hashed, if such an entry may be in use.
fn plain_key(submit: &Submit) -> Option<&str> {
    submit.plain.as_ref().map(|plain| plain.key.as_str())
}

async fn entry_rows(find_keys: &Prepared<'_>, batch: &[&Submit]) -> Result<Vec<Row>, tokio_postgres::Error> {
    let tenants: Vec<&str> = batch.iter().map(|submit| submit.tenant.as_str()).collect();
    let keys: Vec<&str> = batch.iter().map(|submit| submit.key.as_str()).collect();
    let plain: Vec<Option<&str>> = batch.iter().map(|submit| plain_key(submit)).collect();
    find_keys.query(&[&tenants, &keys, &plain]).await
}

/// Returns the entries of the keys, and the ids of purged requests whose keys are still there.
fn read_keys<'a>(batch: &[&'a Submit], rows: &[Row]) -> Result<(IdempotencyEntries<'a>, Vec<Uuid>)> {
    let mut names: HashMap<(&str, &str), (&'a str, &'a str)> = HashMap::with_capacity(batch.len());
    for submit in batch {
        let name = (submit.tenant.as_str(), submit.key.as_str());
        names.insert(name, name);
    }
    let (mut keys, mut purged) = (HashMap::with_capacity(rows.len()), Vec::new());
    for row in rows {
        let name: (&str, &str) = (column(row, 0)?, column(row, 1)?);
        match (names.get(&name), column(row, 5)?, column(row, 7)?) {
            (Some(name), Some(status), true) => {
                keys.insert(*name, read_key(row, status)?);
            }
            // A later entry of the same key, hashed, takes precedence.
            (Some(name), Some(status), false) => {
                let entry = read_key(row, status)?;
                keys.entry(*name).or_insert(entry);
            }
            _ => purged.push(column(row, 3)?),
        }
    }
    Ok((keys, purged))
}

fn read_key(row: &Row, status: &str) -> Result<IdempotencyEntry> {
    let hash: &[u8] = column(row, 2)?;
    let hash: [u8; 32] = hash.try_into().map_err(unreadable)?;
    let id = RequestId::from_uuid(column::<Uuid>(row, 3)?);
    let record = IdempotencyRecord {
        fingerprint: Fingerprint::from_bytes(hash),
        request_id: id,
        expires: timestamp(row, 4)?,
    };
    let (status, accepted_at) = (read_status(status)?, timestamp(row, 6)?);
    let receipt = SubmitReceipt { id, status, accepted_at, window: None };
    Ok(IdempotencyEntry { record, receipt })
}

/// Returns the windows of tenants with these limits.
fn read_windows<'a>(
    limits: &BTreeMap<&'a str, QuotaLimits>,
    rows: &[Row],
    now: Timestamp,
) -> Result<HashMap<&'a str, Quota>> {
    let mut windows = HashMap::with_capacity(rows.len());
    for row in rows {
        let Some((tenant, limits)) = limits.get_key_value(column::<&str>(row, 0)?) else { continue };
        let limits = *limits;
        let refreshed: Option<SystemTime> = column(row, 2)?;
        let window = match refreshed.map(time::from_system) {
            None => Quota::new(limits, now),
            Some(last_refresh) => {
                Quota { current_count: unsigned(column(row, 1)?), ..Quota::new(limits, last_refresh) }
            }
        };
        windows.insert(*tenant, window);
    }
    Ok(windows)
}

/// The second round trip. Returns the ids that were inserted.
async fn save(
    engine: &Postgres,
    session: &Session,
    plan: &SubmitPlan<'_>,
    purged: &[Uuid],
    now: Timestamp,
) -> Result<HashSet<RequestId>> {
    let express_jobs = turns::express_jobs(engine, session).await?;
    let [insert, save_tenants] = session.prepare([INSERT, SAVE_TENANTS]).await?;
    let columns = SubmitColumns::new(&plan.accepted);
    // All keys of a batch expire at once.
    let expires = plan.accepted.first().map_or(now, |new| new.record.expires);
    let (now, expires) = (time::to_system(now), time::to_system(expires));
    let values = columns.values_with([&now, &expires, &session.ledger_row, &purged, &express_jobs]);
    let insert = async {
        if plan.accepted.is_empty() {
            return Ok(Vec::new());
        }
        insert.query(&values).await
    };
    let (inserted, _, ()) = session
        .bounded(try_join3(
            insert,
            save_windows(&save_tenants, &plan.windows),
            session.batch_execute("COMMIT"),
        ))
        .await?;
    turns::notify_express(engine, &inserted, 1)?;
    inserted.iter().map(|row| Ok(RequestId::from_uuid(column(row, 0)?))).collect()
}

async fn save_windows(
    statement: &Prepared<'_>,
    windows: &[(&str, Quota)],
) -> Result<u64, tokio_postgres::Error> {
    if windows.is_empty() {
        return Ok(0);
    }
    let names: Vec<&str> = windows.iter().map(|(tenant, _)| *tenant).collect();
    let counts: Vec<i32> = windows.iter().map(|(_, window)| int(window.current_count)).collect();
    let times: Vec<SystemTime> =
        windows.iter().map(|(_, window)| time::to_system(window.last_refresh)).collect();
    statement.execute(&[&names, &counts, &times]).await
}

/// Sets the outcomes of submissions whose keys another server has taken meanwhile, from what it accepted.
async fn resolve(
    session: &Session,
    batch: &[&Submit],
    saved: &HashSet<RequestId>,
    outcomes: &mut [SubmitOutcome],
    now: Timestamp,
) -> Result<()> {
    let [find_keys] = session.prepare([FIND_KEYS]).await?;
    let rows = session.bounded(entry_rows(&find_keys, batch)).await?;
    let (keys, _) = read_keys(batch, &rows)?;
    for (submit, outcome) in batch.iter().zip(outcomes) {
        let lost = match outcome {
            SubmitOutcome::Accepted(receipt) | SubmitOutcome::Replayed(receipt) => {
                !saved.contains(&receipt.id)
            }
            SubmitOutcome::Conflict => true,
            SubmitOutcome::Limited { .. } => false,
        };
        if lost {
            let entry = keys.get(&(submit.tenant.as_str(), submit.key.as_str()));
            let entry = entry.ok_or_else(|| {
                Error::unavailable(
                    ENGINE,
                    "an idempotency key was taken and purged by another server meanwhile; retry",
                )
            })?;
            *outcome = entry.answer(submit, now).unwrap_or(SubmitOutcome::Conflict);
        }
    }
    Ok(())
}
