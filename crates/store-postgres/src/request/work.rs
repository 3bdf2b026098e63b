//! Claims jobs, and takes the reports of workers and downstreams. The first round trip locks and reads jobs, the second writes what
//! their plan has decided.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use futures_util::future::{try_join, try_join3, try_join5};
use tokio_postgres::Row;
use uuid::Uuid;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_core::{RequestId, RequestType, TenantId, Timestamp};
use weir_store::request::{
    CallbackOutcome, CallbackReport, CancelOutcome, ClaimRow, ClaimedJobs, JobChange, JobCounts, JobReport,
    JobRow, RequestRow, Sealed, TenantCapacity, WEBHOOKS_TOPIC, plan_callback, plan_cancel, plan_claim,
    plan_report, stored_progress,
};
use weir_store::{Error, Result, shard};

use super::{read_id, read_status, read_trace, uuids};
use crate::clock::CLOCK;
use crate::connection::{Prepared, Values};
use crate::pool::Session;
use crate::queue::SHARDS;
use crate::row::{self, column, int, timestamp, unreadable, unsigned};
use crate::{Postgres, quota, time};

const CLAIM_NAMED: &str = "
    SELECT job.request_id, record.status, job.attempts, job.claimable_at, job.is_leased, job.token, job.downstream,
           record.callback_url IS NOT NULL, record.tenant_id, record.request_type, record.payload,
           record.payload_key_id, record.created_at, record.traceparent, record.tracestate
    FROM (SELECT * FROM request_job WHERE request_id = ANY($1) ORDER BY request_id FOR UPDATE SKIP LOCKED) AS job
    CROSS JOIN LATERAL (SELECT * FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record";
const LOCK: &str = "
    SELECT job.request_id, record.status, job.attempts, job.claimable_at, job.is_leased, job.token, job.downstream,
           record.callback_url IS NOT NULL
    FROM (SELECT * FROM request_job WHERE request_id = ANY($1) ORDER BY request_id FOR UPDATE) AS job
    CROSS JOIN LATERAL (SELECT * FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record";
const STATUS: &str = "
    SELECT request_id, CASE WHEN is_cancelled THEN 'CANCELLED' ELSE status END
    FROM request_record WHERE request_id = ANY($1)";
/// Without a new result or failure, those of the last attempt stay. `ANY(ARRAY[…])` is an equality that Postgres cannot reverse: see
/// `query_plan_tests.rs`.
const SAVE_RECORDS: &str = "
    UPDATE request_record AS record
    SET status = CASE new.status WHEN 'CANCELLED' THEN 'FAILED_PERMANENT' ELSE new.status END,
        is_cancelled = nullif(new.status = 'CANCELLED', false), attempts = new.attempts, updated_at = $9,
        failure_code = CASE WHEN new.has_ended THEN new.code ELSE record.failure_code END,
        failure_message = CASE WHEN new.has_ended THEN new.message ELSE record.failure_message END,
        result = CASE WHEN new.has_ended THEN new.result ELSE record.result END,
        result_key_id = CASE WHEN new.has_ended THEN new.result_key_id ELSE record.result_key_id END
    FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::boolean[], $5::text[], $6::text[], $7::bytea[], $8::text[])
        AS new (request_id, status, attempts, has_ended, code, message, result, result_key_id)
    WHERE record.request_id = ANY(ARRAY[new.request_id])";
const SAVE_JOBS: &str = "
    UPDATE request_job AS job
    SET claimable_at = new.claimable_at, is_leased = new.is_leased, token = new.token, attempts = new.attempts,
        is_pending = false, waiting_tenant = CASE WHEN new.is_parked THEN NULL ELSE job.waiting_tenant END,
        is_express = false
    FROM unnest($1::uuid[], $2::timestamptz[], $3::boolean[], $4::bigint[], $5::integer[], $6::boolean[])
        AS new (request_id, claimable_at, is_leased, token, attempts, is_parked)
    WHERE job.request_id = ANY(ARRAY[new.request_id])";
const END_JOBS: &str = "
    WITH deleted AS (DELETE FROM request_job WHERE request_id = ANY($1) RETURNING request_id, downstream, token)
    INSERT INTO request_dead (request_id, downstream, token, died_at)
    SELECT deleted.request_id, downstream, deleted.token, $3 FROM deleted WHERE deleted.request_id = ANY($2)";
const DOWNSTREAMS: &str = "
    WITH RECURSIVE name (downstream) AS (
        (SELECT downstream FROM request_job ORDER BY downstream LIMIT 1)
        UNION ALL
        SELECT (SELECT job.downstream FROM request_job AS job WHERE job.downstream > name.downstream
                ORDER BY job.downstream LIMIT 1)
        FROM name WHERE name.downstream IS NOT NULL)
    SELECT downstream FROM name WHERE downstream IS NOT NULL";

/// A job whose lease has ended is waiting again.
const COUNT_JOBS: &str = "
    SELECT asked.name, due.jobs, due.since, later.jobs, later.running
    FROM unnest($1::text[]) WITH ORDINALITY AS asked (name, position)
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs, (extract(epoch FROM $3 - min(claimable_at)) * 1000000)::bigint AS since
        FROM (SELECT claimable_at FROM request_job WHERE downstream = asked.name AND claimable_at <= $3
              ORDER BY claimable_at LIMIT $2) AS job) AS due
    CROSS JOIN LATERAL (
        SELECT count(*) AS jobs, count(*) FILTER (WHERE is_leased) AS running
        FROM (SELECT is_leased FROM request_job WHERE downstream = asked.name AND claimable_at > $3
              ORDER BY claimable_at LIMIT $2) AS job) AS later
    ORDER BY asked.position";

/// Removes the dead rows of ended jobs. They are at the front of the index, where a claim begins. Autovacuum runs once a minute: by
/// then a claim may have to skip hundreds of thousands of them.
const VACUUM_JOBS: &str = "VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON, TRUNCATE OFF) request_job";
/// Ended jobs between two runs of [`VACUUM_JOBS`].
const VACUUM_EVERY: u64 = 10_000;

pub(super) async fn claim_named(
    engine: &Postgres,
    ids: &[RequestId],
    tenants: &TenantCapacity,
    policy: &RetryPolicy,
) -> Result<ClaimedJobs> {
    let session = engine.inner.pool.session().await?;
    let [claim_named, clock] = session.prepare([CLAIM_NAMED, CLOCK]).await?;
    let (_, rows, clock) = session
        .bounded(try_join3(
            session.batch_execute("BEGIN"),
            claim_named.query(&[&uuids(ids)]),
            clock.query_one(&[]),
        ))
        .await?;
    let now = engine.now(&clock)?;
    let rows = rows.iter().map(read_claim).collect::<Result<Vec<_>>>()?;
    let claimed = save_claim(&session, rows, tenants, policy, now).await?;
    session.keep();
    Ok(claimed)
}

pub(super) async fn downstreams(engine: &Postgres) -> Result<Vec<String>> {
    let rows = engine.inner.pool.query(DOWNSTREAMS, &[]).await?;
    rows.iter().map(|row| column(row, 0)).collect()
}

pub(super) async fn count(engine: &Postgres, downstreams: &[String], limit: usize) -> Result<Vec<JobCounts>> {
    let session = engine.inner.pool.session().await?;
    let clock = session.query_one(CLOCK, &[]).await?;
    let now = time::to_system(engine.now(&clock)?);
    let rows = session.query(COUNT_JOBS, &[&downstreams, &row::bigint(limit), &now]).await?;
    session.keep();
    rows.iter().map(read_counts).collect()
}

fn read_counts(row: &Row) -> Result<JobCounts> {
    let (others, running) = (row::count(row, 3)?, row::count(row, 4)?);
    let oldest: Option<i64> = column(row, 2)?;
    Ok(JobCounts {
        downstream: column(row, 0)?,
        waiting: row::count(row, 1)?,
        running,
        parked: others - running,
        oldest_waiting: oldest.map(|micros| Duration::from_micros(micros.max(0).unsigned_abs())),
    })
}

/// The last round trip of a claim: leases the jobs whose tenants have capacity.
pub(super) async fn save_claim(
    session: &Session,
    mut rows: Vec<ClaimRow>,
    tenants: &TenantCapacity,
    policy: &RetryPolicy,
    now: Timestamp,
) -> Result<ClaimedJobs> {
    let (mut tenants, found) = (tenants.clone(), rows.len());
    rows.retain(|row| tenants.admit(row.tenant.as_str()));
    let is_held_back = rows.len() < found;
    let plan = plan_claim(rows, policy, now);
    save(session, &plan.changed, now).await?;
    Ok(ClaimedJobs { is_held_back, ..plan.claimed })
}

/// Returns the outcomes, and whether there are webhooks to be sent.
pub(super) async fn report(
    engine: &Postgres,
    batch: Vec<JobReport>,
    policy: &RetryPolicy,
) -> Result<(Vec<Result<RequestStatus, TransitionError>>, bool)> {
    let session = engine.inner.pool.session().await?;
    let ids: Vec<RequestId> = batch.iter().map(|report| report.id).collect();
    let (mut rows, now) = lock(engine, &session, &ids).await?;
    let plan = plan_report(batch, &mut rows, policy, now);
    save(&session, &plan.changed, now).await?;
    session.keep();
    vacuum_when_due(engine, plan.changed.iter().filter(|change| change.status().is_final()).count());
    Ok((plan.outcomes, plan.changed.iter().any(JobChange::needs_webhook)))
}

/// Vacuums the jobs in the background whenever [`VACUUM_EVERY`] more have ended.
fn vacuum_when_due(engine: &Postgres, ended: usize) {
    let ended = ended as u64;
    let before = engine.inner.ended_jobs.fetch_add(ended, Ordering::Relaxed);
    if before / VACUUM_EVERY == before.wrapping_add(ended) / VACUUM_EVERY {
        return;
    }
    let engine = engine.clone();
    tokio::spawn(async move {
        let vacuumed = async {
            let session = engine.inner.pool.session().await?;
            session.run(VACUUM_JOBS).await?;
            session.keep();
            Ok(())
        };
        if let Err::<(), Error>(error) = vacuumed.await {
            tracing::debug!(error = %error.with_causes(), "cannot vacuum request_job; left to autovacuum");
        }
    });
}

pub(super) async fn call_back(
    engine: &Postgres,
    id: RequestId,
    report: CallbackReport,
) -> Result<CallbackOutcome> {
    let session = engine.inner.pool.session().await?;
    let (mut rows, now) = lock(engine, &session, &[id]).await?;
    let (outcome, changed) = plan_callback(report, rows.remove(&id));
    save(&session, changed.as_slice(), now).await?;
    session.keep();
    Ok(outcome)
}

pub(super) async fn cancel(engine: &Postgres, id: RequestId) -> Result<CancelOutcome> {
    let session = engine.inner.pool.session().await?;
    let (mut rows, now) = lock(engine, &session, &[id]).await?;
    let (outcome, changed) = plan_cancel(rows.remove(&id));
    save(&session, changed.as_slice(), now).await?;
    session.keep();
    vacuum_when_due(engine, usize::from(changed.is_some()));
    Ok(outcome)
}

/// The first round trip of a report: locks the jobs of the requests in order of id. The statuses of requests without a job, which
/// are few, are read in another.
async fn lock(
    engine: &Postgres,
    session: &Session,
    ids: &[RequestId],
) -> Result<(HashMap<RequestId, RequestRow>, Timestamp)> {
    let ids = uuids(ids);
    let [lock, clock] = session.prepare([LOCK, CLOCK]).await?;
    let (_, locked, clock) = session
        .bounded(try_join3(session.batch_execute("BEGIN"), lock.query(&[&ids]), clock.query_one(&[])))
        .await?;
    let jobs = locked.iter().map(|row| read_job(row).map(|job| (job.id, RequestRow::Job(job))));
    let mut rows: HashMap<RequestId, RequestRow> = jobs.collect::<Result<_>>()?;
    let mut others = ids;
    others.retain(|id| !rows.contains_key(&RequestId::from_uuid(*id)));
    if !others.is_empty() {
        for row in session.query(STATUS, &[&others]).await? {
            rows.insert(read_id(&row, 0)?, RequestRow::Final(read_status(column(&row, 1)?)?));
        }
    }
    Ok((rows, engine.now(&clock)?))
}

/// The second round trip: saves the changes to requests whose jobs are locked, and commits.
async fn save(session: &Session, changed: &[JobChange], now: Timestamp) -> Result<()> {
    if changed.is_empty() {
        return session.run("COMMIT").await;
    }
    let [records, jobs, ends, webhooks, count_accepted] =
        session.prepare([SAVE_RECORDS, SAVE_JOBS, END_JOBS, quota::ENQUEUE, quota::COUNT_ACCEPTED]).await?;
    session
        .bounded(try_join5(
            save_records(&records, changed, now),
            save_jobs(&jobs, changed),
            end_jobs(&ends, changed, now),
            // The ledger row is locked last: see `quota::save`.
            enqueue_webhooks(&webhooks, &count_accepted, session.ledger_row, changed),
            session.batch_execute("COMMIT"),
        ))
        .await
        .map(drop)
}

async fn save_records(
    statement: &Prepared<'_>,
    changed: &[JobChange],
    now: Timestamp,
) -> Result<u64, tokio_postgres::Error> {
    let ids: Vec<Uuid> = changed.iter().map(|change| *change.row.id.as_uuid()).collect();
    let statuses: Vec<&str> = changed.iter().map(|change| change.status().as_str()).collect();
    let attempts: Vec<i32> = changed.iter().map(|change| int(change.row.progress.attempts)).collect();
    let has_ended: Vec<bool> = changed.iter().map(|change| change.outcome.is_some()).collect();
    let failures = changed.iter().map(|change| change.outcome.as_ref()?.failure.as_ref());
    let codes: Vec<Option<Cow<'_, str>>> = failures.clone().map(|f| f.map(|f| storable(&f.code))).collect();
    let messages: Vec<Option<Cow<'_, str>>> = failures.map(|f| f.map(|f| storable(&f.message))).collect();
    let results = changed.iter().map(|change| change.outcome.as_ref()?.result.as_ref());
    let bytes: Vec<Option<&[u8]>> = results.clone().map(|r| r.map(|r| r.bytes.as_slice())).collect();
    let keys: Vec<Option<&str>> = results.map(|r| r.map(|r| r.key_id.as_str())).collect();
    let now = time::to_system(now);
    let values: Values<'_> =
        &[&ids, &statuses, &attempts, &has_ended, &codes, &messages, &bytes, &keys, &now];
    statement.execute(values).await
}

/// Replaces NULs in a downstream's text, which Postgres cannot store. Such a text would fail its whole batch, again and again.
fn storable(text: &str) -> Cow<'_, str> {
    if text.contains('\0') { text.replace('\0', "\u{fffd}").into() } else { text.into() }
}

async fn save_jobs(statement: &Prepared<'_>, changed: &[JobChange]) -> Result<u64, tokio_postgres::Error> {
    let (mut ids, mut times, mut leased) = (Vec::new(), Vec::<SystemTime>::new(), Vec::new());
    let (mut tokens, mut attempts, mut parked) = (Vec::new(), Vec::new(), Vec::new());
    for change in changed {
        let Some(claimable_at) = change.claimable_at() else { continue };
        let JobRow { id, progress, .. } = &change.row;
        ids.push(*id.as_uuid());
        times.push(time::to_system(claimable_at));
        leased.push(change.is_leased());
        tokens.push(progress.last_token.cast_signed());
        attempts.push(int(progress.attempts));
        parked.push(change.is_parked());
    }
    if ids.is_empty() {
        return Ok(0);
    }
    statement.execute(&[&ids, &times, &leased, &tokens, &attempts, &parked]).await
}

async fn end_jobs(
    statement: &Prepared<'_>,
    changed: &[JobChange],
    now: Timestamp,
) -> Result<u64, tokio_postgres::Error> {
    let ids = |selects: fn(&JobChange) -> bool| -> Vec<Uuid> {
        let selected = changed.iter().filter(|change| selects(change));
        selected.map(|change| *change.row.id.as_uuid()).collect()
    };
    let (ended, dead) = (ids(|change| change.status().is_final()), ids(JobChange::is_dead));
    if ended.is_empty() {
        return Ok(0);
    }
    statement.execute(&[&ended, &dead, &time::to_system(now)]).await
}

/// Enqueues the webhooks of requests that are final.
async fn enqueue_webhooks(
    enqueue: &Prepared<'_>,
    count_accepted: &Prepared<'_>,
    ledger_row: i16,
    changed: &[JobChange],
) -> Result<(), tokio_postgres::Error> {
    let ended = changed.iter().filter(|change| change.needs_webhook());
    let keys: Vec<String> = ended.map(|change| change.row.id.to_string()).collect();
    if keys.is_empty() {
        return Ok(());
    }
    let shards: Vec<i16> = keys.iter().map(|key| shard::of(key, SHARDS).cast_signed()).collect();
    let payloads: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
    let count = row::bigint(keys.len());
    try_join(
        enqueue.execute(&[&WEBHOOKS_TOPIC, &shards, &keys, &payloads]),
        count_accepted.execute(&[&WEBHOOKS_TOPIC, &ledger_row, &count]),
    )
    .await
    .map(drop)
}

fn read_job(row: &Row) -> Result<JobRow> {
    let (status, attempts) = (read_status(column(row, 1)?)?, unsigned(column(row, 2)?));
    let last_token = column::<i64>(row, 5)?.cast_unsigned();
    Ok(JobRow {
        id: read_id(row, 0)?,
        downstream: column(row, 6)?,
        has_callback: column(row, 7)?,
        progress: stored_progress(status, attempts, timestamp(row, 3)?, column(row, 4)?, last_token),
    })
}

pub(super) fn read_claim(row: &Row) -> Result<ClaimRow> {
    Ok(ClaimRow {
        job: read_job(row)?,
        tenant: TenantId::parse(column::<&str>(row, 8)?).map_err(unreadable)?,
        request_type: RequestType::parse(column::<&str>(row, 9)?).map_err(unreadable)?,
        payload: Sealed { bytes: column(row, 10)?, key_id: column(row, 11)? },
        trace: read_trace(row, 13)?,
        accepted_at: timestamp(row, 12)?,
    })
}
