//! Versions of configs. A new one recounts or reopens the windows of its config.

use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use weir_core::ConfigName;
use weir_core::slot::Pace;
use weir_store::slot::{SlotConfig, SlotConfigVersion, window_text};
use weir_store::{Error, Result};

use crate::pool::Session;
use crate::row::{bigint, column, int, unreadable, unsigned};
use crate::{ENGINE, Postgres, time};

const LOCK: &str = "SELECT pg_advisory_xact_lock(hashtextextended('weir slot ' || $1, 0))";
const LATEST: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name = $1 ORDER BY version DESC LIMIT 1";
const ACTIVE: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name = $1 AND is_active";
const LIST: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name > $1 AND is_active ORDER BY config_name LIMIT $2";
const VERSIONS: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at, is_active FROM rate_limit_config
    WHERE config_name = $1 AND version < $2 ORDER BY version DESC LIMIT $3";
const DEACTIVATE: &str =
    "UPDATE rate_limit_config SET is_active = false WHERE config_name = $1 AND is_active";
const INSERT: &str = "
    INSERT INTO rate_limit_config
        (config_name, version, max_per_window, window_size, window_size_ms, is_active, created_at)
    VALUES ($1, $2, $3, $4, $5, true, coalesce($6, clock_timestamp())) RETURNING created_at";
const DROP_COUNTERS: &str = "DELETE FROM rate_limit_window_counter WHERE config_name = $1";
const RECOUNT: &str = "
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
    SELECT $1, date_bin($2 * interval '1 ms', scheduled_time, 'epoch'::timestamptz), count(*),
           CASE WHEN count(*) < $3 THEN 'OPEN' ELSE 'CLOSED' END
    FROM rate_limit_event_slot WHERE config_name = $1 GROUP BY 2";
const UPDATE_STATUSES: &str = "
    UPDATE rate_limit_window_counter SET status = CASE WHEN slot_count < $2 THEN 'OPEN' ELSE 'CLOSED' END
    WHERE config_name = $1 AND status <> CASE WHEN slot_count < $2 THEN 'OPEN' ELSE 'CLOSED' END";
const FOLLOW_UP: &str = "
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
    SELECT config_name, window_start + $2 * interval '1 ms', 0, 'OPEN' FROM rate_limit_window_counter
    WHERE config_name = $1 AND status = 'CLOSED'
    ON CONFLICT DO NOTHING";

pub(super) async fn put(engine: &Postgres, name: &ConfigName, pace: Pace) -> Result<SlotConfig> {
    let session = engine.inner.pool.session().await?;
    session.run("BEGIN").await?;
    session.query_one(LOCK, &[&name.as_str()]).await?;
    let before = latest(&session, name).await?;
    let version = before.as_ref().map_or(1, |config| config.version.saturating_add(1));
    session.execute(DEACTIVATE, &[&name.as_str()]).await?;
    let max = i32::try_from(pace.max_per_window()).unwrap_or(i32::MAX);
    let (number, size, now) =
        (i32::try_from(version).unwrap_or(i32::MAX), window_ms(&pace), engine.clock_override());
    let values: [&(dyn tokio_postgres::types::ToSql + Sync); 6] =
        [&name.as_str(), &number, &max, &window_text(&pace), &size, &now];
    let row = session.query_one(INSERT, &values).await?;
    let created_at = time::from_system(column::<SystemTime>(&row, 0)?);
    let needs_follow_ups = match before {
        Some(before) if before.pace.window() != pace.window() => {
            session.execute(DROP_COUNTERS, &[&name.as_str()]).await?;
            let (size, max) = (window_ms(&pace) as f64, i64::from(max));
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 3] = [&name.as_str(), &size, &max];
            session.execute(RECOUNT, &values).await?;
            true
        }
        Some(before) if before.pace != pace => {
            session.execute(UPDATE_STATUSES, &[&name.as_str(), &max]).await?;
            true
        }
        _ => false,
    };
    if needs_follow_ups {
        let size = window_ms(&pace) as f64;
        session.execute(FOLLOW_UP, &[&name.as_str(), &size]).await?;
    }
    session.run("COMMIT").await?;
    session.keep();
    Ok(SlotConfig { name: name.clone(), version, pace, created_at })
}

/// Returns the newest version, active or not: the one by which windows are counted.
pub(super) async fn latest(session: &Session, name: &ConfigName) -> Result<Option<SlotConfig>> {
    let row = session.query_opt(LATEST, &[&name.as_str()]).await?;
    row.as_ref().map(read).transpose()
}

pub(super) async fn active(engine: &Postgres, name: &ConfigName) -> Result<Option<SlotConfig>> {
    let session = engine.inner.pool.session().await?;
    let row = session.query_opt(ACTIVE, &[&name.as_str()]).await?;
    session.keep();
    row.as_ref().map(read).transpose()
}

pub(super) async fn list(
    engine: &Postgres,
    after: Option<&ConfigName>,
    limit: usize,
) -> Result<Vec<SlotConfig>> {
    let session = engine.inner.pool.session().await?;
    let (after, limit) = (after.map_or("", ConfigName::as_str), i64::try_from(limit).unwrap_or(i64::MAX));
    let rows = session.query(LIST, &[&after, &limit]).await?;
    session.keep();
    rows.iter().map(read).collect()
}

pub(super) async fn versions(
    engine: &Postgres,
    name: &ConfigName,
    before: Option<u32>,
    limit: usize,
) -> Result<Vec<SlotConfigVersion>> {
    let before = before.map_or(i32::MAX, int);
    let rows = engine.inner.pool.query(VERSIONS, &[&name.as_str(), &before, &bigint(limit)]).await?;
    let read_version = |row| Ok(SlotConfigVersion { config: read(row)?, is_active: column(row, 5)? });
    rows.iter().map(read_version).collect()
}

pub(super) async fn deactivate(engine: &Postgres, name: &ConfigName) -> Result<bool> {
    let session = engine.inner.pool.session().await?;
    let changed = session.execute(DEACTIVATE, &[&name.as_str()]).await?;
    session.keep();
    Ok(changed > 0)
}

pub(super) fn window_ms(pace: &Pace) -> i64 {
    i64::try_from(pace.window().as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn read(row: &Row) -> Result<SlotConfig> {
    let (version, max, size): (i32, i32, i64) = (column(row, 1)?, column(row, 2)?, column(row, 3)?);
    let pace = Pace::new(unsigned(max), Duration::from_millis(size.unsigned_abs()))
        .map_err(|out| Error::failed(ENGINE, out))?;
    Ok(SlotConfig {
        name: ConfigName::parse(column::<&str>(row, 0)?).map_err(unreadable)?,
        version: unsigned(version),
        pace,
        created_at: time::from_system(column(row, 4)?),
    })
}
