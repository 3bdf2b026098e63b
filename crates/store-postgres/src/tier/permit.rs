//! Concurrency policies and their permits in Postgres.
//!
//! A batch locks its keys, so all servers decide about a key one after the other; the clock is read after the locks.

use std::time::{Duration, SystemTime};

use futures_util::future::{try_join3, try_join4};
use tokio_postgres::Row;
use uuid::Uuid;
use weir_core::tier::{OpenPermit, Permit, PermitRelease};
use weir_core::{PermitId, PolicyName, Timestamp};
use weir_store::tier::{
    ConcurrencyPolicy, ConcurrencySpec, NewPermit, OnOutage, OpenPermits, Origin, POLICIES_MAX,
    PermitsOutcome, ReleasedPermit, TakePermits, permit_keys, plan_permits,
};
use weir_store::{Error, Result};

use crate::clock::CLOCK;
use crate::connection::Values;
use crate::pool::Session;
use crate::row::{self, column, int, timestamp, unreadable, unsigned};
use crate::{Postgres, time};

const ALL: &str = "
    SELECT scope, name, max_in_use, ttl_ms, shadow, on_outage FROM tier_concurrency ORDER BY name";
const ONE: &str = "
    SELECT scope, name, max_in_use, ttl_ms, shadow, on_outage FROM tier_concurrency WHERE name = $1";
/// In place of a policy of another kind, unless an operator has put that and this one is of the file. The version's row
/// serializes servers.
const PUT: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version) SELECT version FROM next),
    replaced AS (DELETE FROM tier_policy WHERE name = $1 AND ($6 = 'operator' OR origin = 'file') RETURNING scope),
    spent_deleted AS (DELETE FROM tier_spent WHERE scope = ANY(ARRAY(SELECT scope FROM replaced)))
    INSERT INTO tier_concurrency (name, max_in_use, ttl_ms, shadow, on_outage, origin)
    SELECT $1, $2, $3, $4, $5, $6 FROM next
    WHERE (SELECT count(*) FROM tier_policy WHERE name <> $1) + (SELECT count(*) FROM tier_concurrency WHERE name <> $1) < $7
        AND ($6 = 'operator' OR NOT EXISTS (SELECT FROM tier_policy WHERE name = $1 AND origin = 'operator'))
    ON CONFLICT (name) DO UPDATE SET max_in_use = excluded.max_in_use, ttl_ms = excluded.ttl_ms,
        shadow = excluded.shadow, on_outage = excluded.on_outage, origin = excluded.origin
    WHERE excluded.origin = 'operator' OR tier_concurrency.origin = 'file'";
const DELETE: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version) SELECT version FROM next)
    DELETE FROM tier_concurrency WHERE name = $1";
/// In the order of the locks' numbers, so that two servers cannot deadlock. Keys with the same number only wait for each other.
const LOCK_KEYS: &str = "
    SELECT pg_advisory_xact_lock(2003134836, number) FROM (
        SELECT DISTINCT hashtext(scope || ':' || key) AS number
        FROM unnest($1::integer[], $2::text[]) AS wanted (scope, key) ORDER BY number OFFSET 0) AS numbers";
const OPEN: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($3, clock_timestamp()) AS now)
    SELECT wanted.scope, wanted.key, open.expires_at, open.cost
    FROM unnest($1::integer[], $2::text[]) AS wanted (scope, key)
    CROSS JOIN LATERAL (
        SELECT expires_at, cost FROM tier_permit
        WHERE scope = wanted.scope AND key = wanted.key AND NOT is_released AND expires_at > (SELECT now FROM clock)
        OFFSET 0) AS open";
const TAKE: &str = "
    INSERT INTO tier_permit (permit_id, scope, policy, key, cost, expires_at, is_released)
    SELECT permit_id, scope, policy, key, cost, expires_at, false
    FROM unnest($1::uuid[], $2::integer[], $3::text[], $4::text[], $5::integer[], $6::timestamptz[])
        AS new (permit_id, scope, policy, key, cost, expires_at)";
/// The clock is read after this lock, so that a wait for the lock counts.
const FIND: &str = "
    SELECT policy, key, cost, expires_at, is_released FROM tier_permit WHERE permit_id = $1 FOR UPDATE";
const RELEASE: &str = "UPDATE tier_permit SET is_released = true WHERE permit_id = $1";
const VOID: &str = "DELETE FROM tier_permit WHERE permit_id = ANY($1)";
const RESET: &str = "DELETE FROM tier_permit WHERE scope = $1 AND key = $2 AND NOT is_released";
const PURGE: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($1, clock_timestamp()) AS now)
    DELETE FROM tier_permit WHERE permit_id = ANY(ARRAY(
        SELECT permit_id FROM tier_permit
        WHERE expires_at < (SELECT now FROM clock) - $2::bigint * interval '1 microsecond'
        ORDER BY expires_at LIMIT $3 FOR UPDATE SKIP LOCKED))";

pub(super) async fn all(engine: &Postgres) -> Result<Vec<ConcurrencyPolicy>> {
    engine.inner.pool.query(ALL, &[]).await?.iter().map(read).collect()
}

pub(super) async fn put(
    engine: &Postgres,
    name: &PolicyName,
    spec: &ConcurrencySpec,
    origin: Origin,
) -> Result<Option<ConcurrencyPolicy>> {
    let (limit, ttl_ms) = (int(spec.rule.limit()), spec.ttl_ms());
    let (on_outage, origin, most) = (spec.on_outage.as_str(), origin.as_str(), row::bigint(POLICIES_MAX));
    let values: Values<'_> = &[&name.as_str(), &limit, &ttl_ms, &spec.shadow, &on_outage, &origin, &most];
    engine.inner.pool.execute(PUT, values).await?;
    let row = engine.inner.pool.query_opt(ONE, &[&name.as_str()]).await?;
    row.as_ref().map(read).transpose()
}

/// Deletes a policy. Its permits are purged when their time is over: nobody looks for them by a scope that is never used again.
pub(super) async fn delete(engine: &Postgres, name: &PolicyName) -> Result<bool> {
    Ok(engine.inner.pool.execute(DELETE, &[&name.as_str()]).await? > 0)
}

pub(super) async fn take(engine: &Postgres, batch: &[TakePermits]) -> Result<Vec<PermitsOutcome>> {
    let (session, outcomes) = decide(engine, batch).await.map_err(Error::before_commit)?;
    session.run("COMMIT").await?;
    session.keep();
    Ok(outcomes)
}

/// Decides a batch, and stores the permits that it gives in a transaction that is left open.
async fn decide(engine: &Postgres, batch: &[TakePermits]) -> Result<(Session, Vec<PermitsOutcome>)> {
    let mut open = permit_keys(batch);
    let scopes: Vec<i32> = open.keys().map(|(scope, _)| int(*scope)).collect();
    let keys: Vec<String> = open.keys().map(|(_, key)| key.clone()).collect();
    let session = engine.inner.pool.session().await?;
    let [lock, find, clock] = session.prepare([LOCK_KEYS, OPEN, CLOCK]).await?;
    let now = engine.clock_override();
    let (_, _, rows, clock) = session
        .bounded(try_join4(
            session.batch_execute("BEGIN"),
            lock.query(&[&scopes, &keys]),
            find.query(&[&scopes, &keys, &now]),
            clock.query_one(&[]),
        ))
        .await?;
    read_open(&rows, &mut open)?;
    let (outcomes, new) = plan_permits(open, batch, engine.now(&clock)?);
    if !new.is_empty() {
        save(&session, &new).await?;
    }
    Ok((session, outcomes))
}

async fn save(session: &Session, new: &[NewPermit]) -> Result<()> {
    let ids: Vec<Uuid> = new.iter().map(|permit| *permit.id.as_uuid()).collect();
    let scopes: Vec<i32> = new.iter().map(|permit| int(permit.scope)).collect();
    let policies: Vec<&str> = new.iter().map(|permit| permit.policy.as_str()).collect();
    let keys: Vec<&str> = new.iter().map(|permit| permit.key.as_str()).collect();
    let costs: Vec<i32> = new.iter().map(|permit| int(permit.cost)).collect();
    let ends: Vec<SystemTime> = new.iter().map(|permit| time::to_system(permit.expires_at)).collect();
    session.execute(TAKE, &[&ids, &scopes, &policies, &keys, &costs, &ends]).await.map(drop)
}

pub(super) async fn release(engine: &Postgres, id: PermitId) -> Result<Option<ReleasedPermit>> {
    let session = engine.inner.pool.session().await?;
    let id: &Uuid = id.as_uuid();
    let [find, clock] = session.prepare([FIND, CLOCK]).await?;
    let (_, found, clock) = session
        .bounded(try_join3(session.batch_execute("BEGIN"), find.query_opt(&[id]), clock.query_one(&[])))
        .await?;
    let now: Timestamp = engine.now(&clock)?;
    let mut released = found.as_ref().map(read_permit).transpose()?;
    if let Some(released) = &mut released {
        released.release = released.permit.release(now);
        if released.release == PermitRelease::Released {
            session.execute(RELEASE, &[id]).await?;
        }
    }
    session.run("COMMIT").await?;
    session.keep();
    Ok(released)
}

pub(super) async fn void(engine: &Postgres, ids: &[PermitId]) -> Result<()> {
    let ids: Vec<Uuid> = ids.iter().map(|id| *id.as_uuid()).collect();
    engine.inner.pool.execute(VOID, &[&ids]).await.map(drop)
}

pub(super) async fn reset(engine: &Postgres, scope: u32, key: &str) -> Result<()> {
    engine.inner.pool.execute(RESET, &[&int(scope), &key]).await.map(drop)
}

pub(super) async fn purge(engine: &Postgres, keep: Duration, limit: usize) -> Result<u64> {
    let values: Values<'_> = &[&engine.clock_override(), &time::micros(keep), &row::bigint(limit)];
    engine.inner.pool.execute(PURGE, values).await
}

fn read_open(rows: &[Row], open: &mut OpenPermits) -> Result<()> {
    for row in rows {
        let key = (unsigned(column(row, 0)?), column::<String>(row, 1)?);
        let permit = OpenPermit { expires_at: timestamp(row, 2)?, cost: unsigned(column(row, 3)?) };
        open.entry(key).or_default().push(permit);
    }
    Ok(())
}

fn read(row: &Row) -> Result<ConcurrencyPolicy> {
    let on_outage = OnOutage::parse(column::<&str>(row, 5)?);
    let rule = ConcurrencySpec::rule_from_columns(unsigned(column(row, 2)?), column(row, 3)?);
    let spec = ConcurrencySpec {
        rule: rule.map_err(unreadable)?,
        shadow: column(row, 4)?,
        on_outage: on_outage.ok_or_else(|| unreadable("a policy has an unknown on_outage"))?,
    };
    let name = PolicyName::parse(column::<&str>(row, 1)?).map_err(unreadable)?;
    Ok(ConcurrencyPolicy { name, scope: unsigned(column(row, 0)?), spec })
}

fn read_permit(row: &Row) -> Result<ReleasedPermit> {
    let permit = Permit {
        cost: unsigned(column(row, 2)?),
        expires_at: timestamp(row, 3)?,
        is_released: column(row, 4)?,
    };
    let policy = PolicyName::parse(column::<&str>(row, 0)?).map_err(unreadable)?;
    Ok(ReleasedPermit { policy, key: column(row, 1)?, permit, release: PermitRelease::Expired })
}
