//! Holds in Postgres: creates, settles and purges them.

use std::time::Duration;

use futures_util::future::try_join3;
use tokio_postgres::Row;
use uuid::Uuid;
use weir_core::tier::{Hold, HoldSettlement};
use weir_core::{HoldId, PolicyName, Timestamp};
use weir_store::Result;
use weir_store::tier::{HoldAudit, NewHold, SettledHold};

use crate::clock::CLOCK;
use crate::connection::Values;
use crate::row::{self, column, int, timestamp, unreadable, unsigned};
use crate::{Postgres, time};

const PUT: &str = "
    INSERT INTO tier_hold (hold_id, scope, policy, key, cost, taken_at, expires_at)
    VALUES ($1, $2, $3, $4, $5, $6, coalesce($7, clock_timestamp()) + $8::bigint * interval '1 microsecond')
    RETURNING expires_at";
/// The clock is read after this lock, so that a wait for the lock counts.
const FIND: &str = "
    SELECT scope, policy, key, cost, taken_at, expires_at, settled FROM tier_hold WHERE hold_id = $1 FOR UPDATE";
const SETTLE: &str = "UPDATE tier_hold SET settled = $2 WHERE hold_id = $1";
const PURGE: &str = "
    DELETE FROM tier_hold WHERE hold_id = ANY(ARRAY(
        SELECT hold_id FROM tier_hold
        WHERE expires_at < coalesce($1, clock_timestamp()) - $2::bigint * interval '1 microsecond'
        ORDER BY expires_at LIMIT $3 FOR UPDATE SKIP LOCKED))";
const AUDIT: &str = "
    WITH clock AS (SELECT coalesce($1, clock_timestamp()) AS now)
    SELECT count(*), count(*) FILTER (WHERE settled IS NULL AND expires_at > now),
        coalesce(sum(cost) FILTER (WHERE settled IS NULL AND expires_at > now), 0)::bigint, count(settled),
        count(*) FILTER (WHERE settled IS NULL AND expires_at <= now)
    FROM tier_hold, clock";

pub(super) async fn put(engine: &Postgres, hold: &NewHold) -> Result<Timestamp> {
    let (scope, cost) = (int(hold.scope), i64::from(hold.cost));
    let (taken_at, now) = (time::to_system(hold.taken_at), engine.clock_override());
    let ttl = time::micros(hold.ttl);
    let values: Values<'_> =
        &[hold.id.as_uuid(), &scope, &hold.policy.as_str(), &hold.key, &cost, &taken_at, &now, &ttl];
    timestamp(&engine.inner.pool.query_one(PUT, values).await?, 0)
}

pub(super) async fn settle(engine: &Postgres, id: HoldId, cost: u32) -> Result<Option<SettledHold>> {
    let session = engine.inner.pool.session().await?;
    let id: &Uuid = id.as_uuid();
    let [find, clock] = session.prepare([FIND, CLOCK]).await?;
    let (_, found, clock) = session
        .bounded(try_join3(session.batch_execute("BEGIN"), find.query_opt(&[id]), clock.query_one(&[])))
        .await?;
    let now = engine.now(&clock)?;
    let mut settled = found.as_ref().map(read).transpose()?;
    if let Some(settled) = &mut settled {
        settled.settlement = settled.hold.settle(cost, now);
        if matches!(settled.settlement, HoldSettlement::Settled(_)) {
            session.execute(SETTLE, &[id, &i64::from(cost)]).await?;
        }
    }
    session.run("COMMIT").await?;
    session.keep();
    Ok(settled)
}

pub(super) async fn purge(engine: &Postgres, keep: Duration, limit: usize) -> Result<u64> {
    let values: Values<'_> = &[&engine.clock_override(), &time::micros(keep), &row::bigint(limit)];
    engine.inner.pool.execute(PURGE, values).await
}

pub(super) async fn audit(engine: &Postgres) -> Result<HoldAudit> {
    let row = engine.inner.pool.query_one(AUDIT, &[&engine.clock_override()]).await?;
    let count = |index| row::count(&row, index);
    Ok(HoldAudit {
        holds: count(0)?,
        open: count(1)?,
        open_cost: count(2)?,
        settled: count(3)?,
        expired: count(4)?,
    })
}

fn read(row: &Row) -> Result<SettledHold> {
    let amount = |number: i64| u32::try_from(number).map_err(unreadable);
    let hold = Hold {
        cost: amount(column(row, 3)?)?,
        taken_at: timestamp(row, 4)?,
        expires_at: timestamp(row, 5)?,
        settled: column::<Option<i64>>(row, 6)?.map(amount).transpose()?,
    };
    Ok(SettledHold {
        policy: PolicyName::parse(column::<&str>(row, 1)?).map_err(unreadable)?,
        scope: unsigned(column(row, 0)?),
        key: column(row, 2)?,
        hold,
        settlement: HoldSettlement::Expired,
    })
}
