//! Claims by turns of tenants, and claims of express jobs. The first round trip reads which tenants have due jobs, the second locks
//! and reads the jobs that the plan grants them, and the last one writes what was claimed. Tenants with fewer jobs than they were
//! granted leave the rest to the others, in one more round trip.
//!
//! A job has its tenant in `waiting_tenant` while it is in the circle of turns. Parked jobs are not, or thousands of tenants that wait
//! for callbacks would be looked at in vain. When parked jobs are due, a claim gives them their tenant back; so it does for the jobs of
//! servers of the version before, which do not know the column. Where a job may be claimed depends on no other row, so no crash leaves
//! anything to be repaired.
//!
//! On a database of an earlier version the indexes are built beside the running servers. Until they are there, jobs are claimed in the
//! order of time alone.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use futures_util::future::{try_join_all, try_join3};
use tokio_postgres::Row;
use weir_core::Timestamp;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::turn::EXPRESS_JOBS;
use weir_store::Result;
use weir_store::request::{
    CLAIM_BYTES_MAX, ClaimOrder, ClaimRow, ClaimedJobs, DownstreamCapacity, TenantCapacity, TurnClaim,
    TurnGrant, TurnScan,
};

use super::work::{read_claim, save_claim};
use crate::Postgres;
use crate::clock::CLOCK;
use crate::connection::{Prepared, Values};
use crate::pool::Session;
use crate::row::{self, column};

/// Parked jobs that one claim puts back into the circle.
const UNPARKED_MAX: i64 = 1_000;

// The present time stands in subqueries of its own: only what is read once can be searched for in an index. Otherwise all jobs that
// are due later would be read.

/// Whether the three indexes can be used.
const HAS_INDEXES: &str = "
    SELECT count(found.indexrelid) = 3
    FROM unnest(ARRAY['request_job_turn', 'request_job_parked', 'request_job_express']) AS wanted (name)
    CROSS JOIN LATERAL (
        SELECT indexrelid FROM pg_index WHERE indexrelid = to_regclass(wanted.name) AND indisvalid OFFSET 0) AS found";
/// Microseconds until the first job of these downstreams may be claimed: negative if it is overdue.
const FIRST: &str = "
    SELECT (extract(epoch FROM min(job.claimable_at) - coalesce($2, clock_timestamp())) * 1000000)::bigint
    FROM unnest($1::text[]) AS room (downstream)
    CROSS JOIN LATERAL (
        SELECT claimable_at FROM request_job WHERE downstream = room.downstream
        ORDER BY claimable_at LIMIT 1) AS job";
const HAS_PARKED: &str = "
    SELECT count(*) > 0
    FROM unnest($1::text[]) AS room (downstream)
    CROSS JOIN LATERAL (
        SELECT FROM request_job
        WHERE downstream = room.downstream AND waiting_tenant IS NULL AND claimable_at <= (SELECT coalesce($2, clock_timestamp()))
        ORDER BY claimable_at LIMIT 1) AS job";
/// Puts jobs back into the circle. Waits for no lock: a job that is locked is being changed.
const UNPARK: &str = "
    WITH due AS MATERIALIZED (
        SELECT job.request_id, record.tenant_id
        FROM unnest($1::text[]) AS room (downstream)
        CROSS JOIN LATERAL (
            SELECT request_id FROM request_job AS parked
            WHERE parked.downstream = room.downstream AND parked.waiting_tenant IS NULL
              AND parked.claimable_at <= (SELECT coalesce($2, clock_timestamp()))
            ORDER BY parked.claimable_at LIMIT $3 FOR UPDATE SKIP LOCKED) AS job
        CROSS JOIN LATERAL (
            SELECT tenant_id FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record)
    UPDATE request_job AS job SET waiting_tenant = due.tenant_id
    FROM due WHERE job.request_id = ANY(ARRAY[due.request_id])";
/// The tenants behind `$2`, up to `$3` of them, and whether the first job of each is due. Behind the last name follow those from the
/// first name up to `$2` itself. Each is one look-up from the name before it; the second arm is run only if the first finds none.
const TURNS: &str = "
    WITH RECURSIVE circle (tenant, is_wrapped, place) AS (
        SELECT $2::text COLLATE \"C\", false, 0::bigint
        UNION ALL
        SELECT next.tenant, next.is_wrapped, circle.place + 1
        FROM circle CROSS JOIN LATERAL (
            (SELECT waiting_tenant AS tenant, circle.is_wrapped FROM request_job
             WHERE downstream = $1 AND waiting_tenant > circle.tenant ORDER BY waiting_tenant LIMIT 1)
            UNION ALL
            (SELECT waiting_tenant, true FROM request_job
             WHERE downstream = $1 AND waiting_tenant > '' AND NOT circle.is_wrapped ORDER BY waiting_tenant LIMIT 1)
            LIMIT 1) AS next
        WHERE circle.place < $3 AND (NOT next.is_wrapped OR next.tenant <= $2))
    SELECT circle.tenant, first.claimable_at <= (SELECT coalesce($4, clock_timestamp()))
    FROM circle CROSS JOIN LATERAL (
        SELECT claimable_at FROM request_job WHERE downstream = $1 AND waiting_tenant = circle.tenant
        ORDER BY claimable_at LIMIT 1) AS first
    WHERE circle.place > 0 ORDER BY circle.place";
/// The columns that [`read_claim`] reads. Of each tenant the longest due, without those that this transaction has already. If their
/// payloads have too many bytes, every tenant gives up its last ones. `OFFSET 0` keeps the look-up of records from becoming another
/// plan, here and below (see `query_plan_tests.rs`).
const CLAIM_GRANTED: &str = "
    SELECT request_id, status, attempts, claimable_at, is_leased, token, downstream, has_callback, tenant_id,
           request_type, payload, payload_key_id, created_at, traceparent, tracestate
    FROM (
        SELECT ranked.*,
               sum(octet_length(payload)) OVER (
                   ORDER BY rank, claimable_at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
        FROM (
            SELECT job.request_id, record.status, job.attempts, job.claimable_at, job.is_leased, job.token, job.downstream,
                   record.callback_url IS NOT NULL AS has_callback, record.tenant_id, record.request_type,
                   record.payload, record.payload_key_id, record.created_at, record.traceparent, record.tracestate,
                   row_number() OVER (PARTITION BY granted.place ORDER BY job.claimable_at) AS rank
            FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) WITH ORDINALITY
                AS granted (downstream, tenant, jobs, taken, place)
            CROSS JOIN LATERAL (
                SELECT * FROM request_job AS due
                WHERE due.downstream = granted.downstream AND due.waiting_tenant = granted.tenant
                  AND due.claimable_at <= (SELECT coalesce($5, clock_timestamp()))
                ORDER BY due.claimable_at LIMIT granted.jobs OFFSET granted.taken FOR UPDATE SKIP LOCKED) AS job
            CROSS JOIN LATERAL (
                SELECT * FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record) AS ranked) AS claimable
    WHERE coalesce(bytes_before, 0) < $6 ORDER BY claimable_at";
/// As [`CLAIM_GRANTED`], in the order of time.
const CLAIM_OLDEST: &str = "
    SELECT request_id, status, attempts, claimable_at, is_leased, token, downstream, has_callback, tenant_id,
           request_type, payload, payload_key_id, created_at, traceparent, tracestate
    FROM (
        SELECT job.request_id, record.status, job.attempts, job.claimable_at, job.is_leased, job.token, job.downstream,
               record.callback_url IS NOT NULL AS has_callback, record.tenant_id, record.request_type, record.payload,
               record.payload_key_id, record.created_at, record.traceparent, record.tracestate,
               sum(octet_length(record.payload)) OVER (
                   ORDER BY job.claimable_at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
        FROM unnest($1::text[], $2::bigint[]) AS room (downstream, jobs)
        CROSS JOIN LATERAL (
            SELECT * FROM request_job AS due
            WHERE due.downstream = room.downstream AND due.claimable_at <= (SELECT coalesce($3, clock_timestamp()))
            ORDER BY due.claimable_at LIMIT room.jobs FOR UPDATE SKIP LOCKED) AS job
        CROSS JOIN LATERAL (
            SELECT * FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record) AS claimable
    WHERE coalesce(bytes_before, 0) < $4 ORDER BY claimable_at";
/// Whether there is an express job to claim.
const HAS_EXPRESS: &str = "
    SELECT count(*) > 0
    FROM unnest($1::text[]) AS room (downstream)
    CROSS JOIN LATERAL (
        SELECT FROM request_job
        WHERE downstream = room.downstream AND is_express AND claimable_at <= (SELECT coalesce($2, clock_timestamp()))
        ORDER BY claimable_at DESC LIMIT 1) AS job";
/// As [`CLAIM_OLDEST`], the last accepted first, without the tenants in `$5`.
const CLAIM_EXPRESS: &str = "
    SELECT request_id, status, attempts, claimable_at, is_leased, token, downstream, has_callback, tenant_id,
           request_type, payload, payload_key_id, created_at, traceparent, tracestate
    FROM (
        SELECT job.request_id, record.status, job.attempts, job.claimable_at, job.is_leased, job.token, job.downstream,
               record.callback_url IS NOT NULL AS has_callback, record.tenant_id, record.request_type, record.payload,
               record.payload_key_id, record.created_at, record.traceparent, record.tracestate,
               sum(octet_length(record.payload)) OVER (
                   ORDER BY job.claimable_at DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS bytes_before
        FROM unnest($1::text[], $2::bigint[]) AS room (downstream, jobs)
        CROSS JOIN LATERAL (
            SELECT * FROM request_job AS due
            WHERE due.downstream = room.downstream AND due.is_express AND due.waiting_tenant <> ALL($5::text[])
              AND due.claimable_at <= (SELECT coalesce($3, clock_timestamp()))
            ORDER BY due.claimable_at DESC LIMIT room.jobs FOR UPDATE SKIP LOCKED) AS job
        CROSS JOIN LATERAL (
            SELECT * FROM request_record WHERE request_id = job.request_id OFFSET 0) AS record) AS claimable
    WHERE coalesce(bytes_before, 0) < $4 ORDER BY claimable_at DESC";

/// The arrays of a claim's capacity.
struct RoomColumns<'a> {
    names: Vec<&'a str>,
    counts: Vec<i64>,
}

impl<'a> RoomColumns<'a> {
    fn new(room: &'a [DownstreamCapacity]) -> Self {
        let room = room.iter().filter(|room| room.jobs > 0);
        let (names, counts) = room.map(|room| (room.downstream.as_str(), row::bigint(room.jobs))).unzip();
        Self { names, counts }
    }
}

/// How many unfinished jobs make the next one no express job: 0, so that there are none, until the indexes are there.
pub(super) async fn express_jobs(engine: &Postgres, session: &Session) -> Result<i64> {
    Ok(if has_indexes(engine, session).await? { row::bigint(EXPRESS_JOBS) } else { 0 })
}

/// Wakes those who wait for express jobs if submissions were some. `column` has whether any of them was.
pub(super) fn notify_express(engine: &Postgres, submitted: &[Row], index: usize) -> Result<()> {
    let is_any: Option<bool> = submitted.first().map(|row| column(row, index)).transpose()?.flatten();
    if is_any == Some(true) {
        engine.inner.topic_notify.notify(super::EXPRESS_JOBS);
    }
    Ok(())
}

/// Whether the indexes are there. They are not removed, so once they are, nobody asks again.
async fn has_indexes(engine: &Postgres, session: &Session) -> Result<bool> {
    if !engine.inner.has_turn_indexes.load(Ordering::Relaxed) {
        let row = session.query_one(HAS_INDEXES, &[]).await?;
        engine.inner.has_turn_indexes.store(column(&row, 0)?, Ordering::Relaxed);
    }
    Ok(engine.inner.has_turn_indexes.load(Ordering::Relaxed))
}

pub(super) async fn claim(
    engine: &Postgres,
    room: &[DownstreamCapacity],
    order: &ClaimOrder,
    policy: &RetryPolicy,
) -> Result<ClaimedJobs> {
    let session = engine.inner.pool.session().await?;
    let mut claimed = if has_indexes(engine, &session).await? {
        claim_by_turns(engine, &session, room, order, policy).await?
    } else {
        claim_oldest(engine, &session, room, &order.tenants, policy).await?
    };
    if claimed.jobs.is_empty() && claimed.exhausted.is_empty() && claimed.next_due_in.is_none() {
        // Other servers were faster, or tenants have as many calls as they may have.
        claimed.next_due_in = first(engine, &session, &RoomColumns::new(room)).await?;
    }
    session.keep();
    Ok(claimed)
}

async fn first(engine: &Postgres, session: &Session, room: &RoomColumns<'_>) -> Result<Option<Duration>> {
    let row = session.query_one(FIRST, &[&room.names, &engine.clock_override()]).await?;
    read_first(&row)
}

fn read_first(row: &Row) -> Result<Option<Duration>> {
    let micros: Option<i64> = column(row, 0)?;
    Ok(micros.map(|micros| Duration::from_micros(micros.max(0).unsigned_abs())))
}

async fn claim_by_turns(
    engine: &Postgres,
    session: &Session,
    room: &[DownstreamCapacity],
    order: &ClaimOrder,
    policy: &RetryPolicy,
) -> Result<ClaimedJobs> {
    let columns = RoomColumns::new(room);
    let test_clock = engine.clock_override();
    let mut plan = TurnClaim::new(room, order);
    let [first, has_parked, turns] = session.prepare([FIRST, HAS_PARKED, TURNS]).await?;
    let values: Values<'_> = &[&columns.names, &test_clock];
    let scans = plan.scans();
    let (first, has_parked, read) = session
        .bounded(try_join3(
            first.query_one(values),
            has_parked.query_one(values),
            scan(&turns, &scans, test_clock),
        ))
        .await?;
    let next = read_first(&first)?;
    // Nothing is locked while nothing is due.
    if next.is_none_or(|next| !next.is_zero()) {
        return Ok(ClaimedJobs { next_due_in: next, ..ClaimedJobs::default() });
    }
    take_found(&mut plan, &scans, &read)?;
    if column(&has_parked, 0)? {
        session.execute(UNPARK, &[&columns.names, &test_clock, &UNPARKED_MAX]).await?;
        let read = session.bounded(scan(&turns, &scans, test_clock)).await?;
        take_found(&mut plan, &scans, &read)?;
    }
    claim_granted(engine, session, plan, policy).await
}

/// Reads the tenants of all downstreams at once.
async fn scan(
    statement: &Prepared<'_>,
    scans: &[TurnScan],
    test_clock: Option<SystemTime>,
) -> Result<Vec<Vec<Row>>, tokio_postgres::Error> {
    let read = scans.iter().map(async |TurnScan { downstream, after, limit }: &TurnScan| {
        statement.query(&[downstream, after, &row::bigint(*limit), &test_clock]).await
    });
    try_join_all(read).await
}

fn take_found(plan: &mut TurnClaim, scans: &[TurnScan], read: &[Vec<Row>]) -> Result<()> {
    for (index, (scan, rows)) in scans.iter().zip(read).enumerate() {
        let tenants = rows.iter().map(|row| Ok((column(row, 0)?, column(row, 1)?)));
        plan.found(index, scan.limit, tenants.collect::<Result<Vec<(String, bool)>>>()?);
    }
    Ok(())
}

/// Locks and reads what the plan grants, pass by pass, and saves the claim.
async fn claim_granted(
    engine: &Postgres,
    session: &Session,
    mut plan: TurnClaim,
    policy: &RetryPolicy,
) -> Result<ClaimedJobs> {
    let mut grants = plan.grants();
    let [claim_granted, clock] = session.prepare([CLAIM_GRANTED, CLOCK]).await?;
    let (mut rows, mut ids, mut now) = (Vec::new(), HashSet::new(), None);
    while !grants.is_empty() {
        let columns = GrantColumns::new(&grants);
        let (test_clock, bytes) = (engine.clock_override(), row::bigint(plan.bytes_left()));
        let values: Values<'_> =
            &[&columns.downstreams, &columns.tenants, &columns.jobs, &columns.taken, &test_clock, &bytes];
        let begin = async {
            match now {
                None => session.batch_execute("BEGIN").await,
                Some(_) => Ok(()),
            }
        };
        let (_, read, clock) =
            session.bounded(try_join3(begin, claim_granted.query(values), clock.query_one(&[]))).await?;
        now = Some(engine.now(&clock)?);
        for row in &read {
            let row = read_claim(row)?;
            // A job that others have released between two passes may move one that this claim has back into sight.
            if ids.insert(row.job.id) {
                plan.claimed(&row.job.downstream, row.tenant.as_str(), row.payload.bytes.len());
                rows.push(row);
            }
        }
        grants = plan.grants();
    }
    let Some(now) = now else {
        let mut claimed = ClaimedJobs::default();
        plan.finish(&mut claimed);
        return Ok(claimed);
    };
    let mut claimed = save_claim(session, rows, &TenantCapacity::default(), policy, now).await?;
    plan.finish(&mut claimed);
    Ok(claimed)
}

/// The arrays of granted jobs.
struct GrantColumns<'a> {
    downstreams: Vec<&'a str>,
    tenants: Vec<&'a str>,
    jobs: Vec<i64>,
    taken: Vec<i64>,
}

impl<'a> GrantColumns<'a> {
    fn new(grants: &'a [TurnGrant]) -> Self {
        Self {
            downstreams: grants.iter().map(|grant| grant.downstream.as_str()).collect(),
            tenants: grants.iter().map(|grant| grant.tenant.as_str()).collect(),
            jobs: grants.iter().map(|grant| row::bigint(grant.jobs)).collect(),
            taken: grants.iter().map(|grant| row::bigint(grant.taken)).collect(),
        }
    }
}

async fn claim_oldest(
    engine: &Postgres,
    session: &Session,
    room: &[DownstreamCapacity],
    tenants: &TenantCapacity,
    policy: &RetryPolicy,
) -> Result<ClaimedJobs> {
    let columns = RoomColumns::new(room);
    let next = first(engine, session, &columns).await?;
    if next.is_none_or(|next| !next.is_zero()) {
        return Ok(ClaimedJobs { next_due_in: next, ..ClaimedJobs::default() });
    }
    let (test_clock, bytes) = (engine.clock_override(), row::bigint(CLAIM_BYTES_MAX));
    let values: Values<'_> = &[&columns.names, &columns.counts, &test_clock, &bytes];
    claim_at_once(engine, session, CLAIM_OLDEST, values, tenants, policy).await
}

pub(super) async fn claim_express(
    engine: &Postgres,
    room: &[DownstreamCapacity],
    tenants: &TenantCapacity,
    policy: &RetryPolicy,
) -> Result<ClaimedJobs> {
    let session = engine.inner.pool.session().await?;
    let (columns, test_clock) = (RoomColumns::new(room), engine.clock_override());
    let mut claimed = ClaimedJobs::default();
    if has_indexes(engine, &session).await? && !columns.names.is_empty() {
        let found = session.query_one(HAS_EXPRESS, &[&columns.names, &test_clock]).await?;
        if column(&found, 0)? {
            let (without, bytes) = (tenants.without_express(), row::bigint(CLAIM_BYTES_MAX));
            let values: Values<'_> = &[&columns.names, &columns.counts, &test_clock, &bytes, &without];
            claimed = claim_at_once(engine, &session, CLAIM_EXPRESS, values, tenants, policy).await?;
        }
    }
    session.keep();
    Ok(claimed)
}

/// Claims what one statement locks and reads.
async fn claim_at_once(
    engine: &Postgres,
    session: &Session,
    sql: &'static str,
    values: Values<'_>,
    tenants: &TenantCapacity,
    policy: &RetryPolicy,
) -> Result<ClaimedJobs> {
    let [claim, clock] = session.prepare([sql, CLOCK]).await?;
    let (_, rows, clock) = session
        .bounded(try_join3(session.batch_execute("BEGIN"), claim.query(values), clock.query_one(&[])))
        .await?;
    let now: Timestamp = engine.now(&clock)?;
    let rows = rows.iter().map(read_claim).collect::<Result<Vec<ClaimRow>>>()?;
    save_claim(session, rows, tenants, policy, now).await
}
