//! Subscriptions in Postgres: finds, lists, saves and deletes them.
//!
//! A server of the version before saves plan and `updated_at` alone. `expires_at` and `anchor` of the subscription it replaces
//! stay in the row, but count only as long as `terms_at` is `updated_at`.

use std::time::SystemTime;

use tokio_postgres::Row;
use weir_core::UserId;
use weir_store::Result;
use weir_store::tier::{Subscription, SubscriptionTerms};

use super::CHANGES_STORED;
use crate::connection::Values;
use crate::row::{self, column, timestamp, unreadable};
use crate::{Postgres, time};

const FIND: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($2, clock_timestamp()) AS now)
    SELECT user_id, plan, updated_at, CASE WHEN terms_at = updated_at THEN expires_at END,
        CASE WHEN terms_at = updated_at THEN anchor END, (SELECT now FROM clock)
    FROM tier_subscription
    WHERE user_id = $1
        AND (terms_at IS DISTINCT FROM updated_at OR expires_at IS NULL OR expires_at > (SELECT now FROM clock))";
const LIST: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($2, clock_timestamp()) AS now)
    SELECT user_id, plan, updated_at, CASE WHEN terms_at = updated_at THEN expires_at END,
        CASE WHEN terms_at = updated_at THEN anchor END, (SELECT now FROM clock)
    FROM tier_subscription
    WHERE user_id > $1
        AND (terms_at IS DISTINCT FROM updated_at OR expires_at IS NULL OR expires_at > (SELECT now FROM clock))
    ORDER BY user_id LIMIT $3";
const SUBSCRIBE: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($3, clock_timestamp()) AS now),
    next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version, user_id) SELECT version, $1 FROM next),
    pruned AS (DELETE FROM tier_change WHERE version <= (SELECT version FROM next) - $4)
    INSERT INTO tier_subscription (user_id, plan, updated_at, terms_at, expires_at, anchor)
    SELECT $1, $2, now, now, $5, $6 FROM clock
    ON CONFLICT (user_id) DO UPDATE SET plan = excluded.plan, updated_at = excluded.updated_at,
        terms_at = excluded.terms_at, expires_at = excluded.expires_at, anchor = excluded.anchor
    RETURNING user_id, plan, updated_at, expires_at, anchor, updated_at";
const UNSUBSCRIBE: &str = "
    WITH next AS (UPDATE tier_version SET version = version + 1 WHERE id = 1 RETURNING version),
    logged AS (INSERT INTO tier_change (version, user_id) SELECT version, $1 FROM next),
    pruned AS (DELETE FROM tier_change WHERE version <= (SELECT version FROM next) - $2)
    DELETE FROM tier_subscription WHERE user_id = $1
    RETURNING (terms_at = updated_at AND expires_at <= coalesce($3, clock_timestamp())) IS TRUE";
/// Leaves those that are being changed to the next call.
const DELETE_EXPIRED: &str = "
    WITH clock AS MATERIALIZED (SELECT coalesce($1, clock_timestamp()) AS now)
    DELETE FROM tier_subscription WHERE user_id = ANY(ARRAY(
        SELECT user_id FROM tier_subscription
        WHERE expires_at <= (SELECT now FROM clock) AND terms_at = updated_at
        ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED))
    RETURNING user_id";
/// The row of the version is locked last, as by every other change.
const LOG_EXPIRED: &str = "
    WITH next AS (UPDATE tier_version SET version = version + cardinality($1::text[]) WHERE id = 1 RETURNING version),
    pruned AS (DELETE FROM tier_change WHERE version <= (SELECT version FROM next) - $2)
    INSERT INTO tier_change (version, user_id)
    SELECT (SELECT version FROM next) - cardinality($1) + number, user_id
    FROM unnest($1) WITH ORDINALITY AS deleted (user_id, number)";

pub(super) async fn find(engine: &Postgres, user: &UserId) -> Result<Option<Subscription>> {
    let row = engine.inner.pool.query_opt(FIND, &[&user.as_str(), &engine.clock_override()]).await?;
    row.as_ref().map(read).transpose()
}

pub(super) async fn list(
    engine: &Postgres,
    after: Option<&UserId>,
    limit: usize,
) -> Result<Vec<Subscription>> {
    // No user has an empty name, so all are after it.
    let after = after.map_or("", UserId::as_str);
    let values: Values<'_> = &[&after, &engine.clock_override(), &row::bigint(limit)];
    engine.inner.pool.query(LIST, values).await?.iter().map(read).collect()
}

pub(super) async fn put(engine: &Postgres, user: &UserId, terms: SubscriptionTerms) -> Result<Subscription> {
    let SubscriptionTerms { plan, expires_at, anchor } = terms;
    let (expires_at, anchor) = (expires_at.map(time::to_system), anchor.map(|anchor| anchor.to_string()));
    let now = engine.clock_override();
    let values: Values<'_> = &[&user.as_str(), &plan.as_str(), &now, &CHANGES_STORED, &expires_at, &anchor];
    read(&engine.inner.pool.query_one(SUBSCRIBE, values).await?)
}

pub(super) async fn delete(engine: &Postgres, user: &UserId) -> Result<bool> {
    let values: Values<'_> = &[&user.as_str(), &CHANGES_STORED, &engine.clock_override()];
    let deleted = engine.inner.pool.query_opt(UNSUBSCRIBE, values).await?;
    deleted.map_or(Ok(false), |row| column::<bool>(&row, 0).map(|had_expired| !had_expired))
}

pub(super) async fn purge(engine: &Postgres, limit: usize) -> Result<u64> {
    let session = engine.inner.pool.session().await?;
    session.run("BEGIN").await?;
    let values: Values<'_> = &[&engine.clock_override(), &row::bigint(limit)];
    let deleted = session.query(DELETE_EXPIRED, values).await?;
    let users = deleted.iter().map(|row| column(row, 0)).collect::<Result<Vec<String>>>()?;
    if !users.is_empty() {
        session.execute(LOG_EXPIRED, &[&users, &CHANGES_STORED]).await?;
    }
    session.run("COMMIT").await?;
    session.keep();
    Ok(users.len() as u64)
}

fn read(row: &Row) -> Result<Subscription> {
    let expires_at: Option<SystemTime> = column(row, 3)?;
    let anchor: Option<&str> = column(row, 4)?;
    let terms = SubscriptionTerms {
        plan: column::<&str>(row, 1)?.parse().map_err(unreadable)?,
        expires_at: expires_at.map(time::from_system),
        anchor: anchor.map(str::parse).transpose().map_err(unreadable)?,
    };
    let user = UserId::parse(column::<&str>(row, 0)?).map_err(unreadable)?;
    Ok(Subscription::new(user, terms, timestamp(row, 2)?, timestamp(row, 5)?))
}
