//! Versions of configs, and what a new one means for counters.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::slot::Pace;
use weir_core::{ConfigName, Timestamp};
use weir_store::slot::{Config, window_text};

use crate::error::fault;

const LATEST: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name = ?1 ORDER BY version DESC LIMIT 1";
const ACTIVE: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name = ?1 AND is_active ORDER BY version DESC LIMIT 1";
const LIST: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at FROM rate_limit_config
    WHERE config_name > ?1 AND is_active ORDER BY config_name LIMIT ?2";
const DEACTIVATE: &str = "UPDATE rate_limit_config SET is_active = 0 WHERE config_name = ?1 AND is_active";
const INSERT: &str = "
    INSERT INTO rate_limit_config
        (config_name, version, max_per_window, window_size, window_size_ms, is_active, created_at)
    VALUES (?1, ?2, ?3, ?4, ?5, 1, ?6)";
const DROP_COUNTERS: &str = "DELETE FROM rate_limit_window_counter WHERE config_name = ?1";
/// The remainder is made positive, for times before 1970.
const RECOUNT: &str = "
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
    SELECT ?1, scheduled_time - ((scheduled_time % ?2) + ?2) % ?2, count(*), iif(count(*) < ?3, 'OPEN', 'CLOSED')
    FROM rate_limit_event_slot WHERE config_name = ?1 GROUP BY 2";
const RESTATE: &str = "
    UPDATE rate_limit_window_counter SET status = iif(slot_count < ?2, 'OPEN', 'CLOSED')
    WHERE config_name = ?1 AND status <> iif(slot_count < ?2, 'OPEN', 'CLOSED')";
const FOLLOW_UP: &str = "
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status)
    SELECT config_name, window_start + ?2, 0, 'OPEN' FROM rate_limit_window_counter
    WHERE config_name = ?1 AND status = 'CLOSED'
    ON CONFLICT DO NOTHING";

pub(super) fn put(
    connection: &Connection,
    name: &ConfigName,
    pace: Pace,
    now: Timestamp,
) -> rusqlite::Result<Config> {
    let before = latest(connection, name)?;
    let version = before.as_ref().map_or(1, |config| config.version.saturating_add(1));
    deactivate(connection, name)?;
    let (max, window_ms) = (pace.max_per_window(), window_ms(&pace));
    let values = params![name.as_str(), version, max, window_text(&pace), window_ms, now.as_micros()];
    connection.prepare_cached(INSERT)?.execute(values)?;
    let window_us = window_ms.saturating_mul(1_000);
    match before {
        Some(before) if before.pace.window() != pace.window() => {
            connection.prepare_cached(DROP_COUNTERS)?.execute([name.as_str()])?;
            connection.prepare_cached(RECOUNT)?.execute(params![name.as_str(), window_us, max])?;
        }
        Some(before) if before.pace != pace => {
            connection.prepare_cached(RESTATE)?.execute(params![name.as_str(), max])?;
        }
        _ => return Ok(Config { name: name.clone(), version, pace, created_at: now }),
    }
    connection.prepare_cached(FOLLOW_UP)?.execute(params![name.as_str(), window_us])?;
    Ok(Config { name: name.clone(), version, pace, created_at: now })
}

/// The newest version, in service or not: what counters follow.
pub(super) fn latest(connection: &Connection, name: &ConfigName) -> rusqlite::Result<Option<Config>> {
    connection.prepare_cached(LATEST)?.query_row([name.as_str()], read).optional()
}

pub(super) fn active(connection: &Connection, name: &ConfigName) -> rusqlite::Result<Option<Config>> {
    connection.prepare_cached(ACTIVE)?.query_row([name.as_str()], read).optional()
}

pub(super) fn list(connection: &Connection, after: &str, limit: usize) -> rusqlite::Result<Vec<Config>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    connection.prepare_cached(LIST)?.query_map(params![after, limit], read)?.collect()
}

pub(super) fn deactivate(connection: &Connection, name: &ConfigName) -> rusqlite::Result<bool> {
    connection.prepare_cached(DEACTIVATE)?.execute([name.as_str()]).map(|changed| changed > 0)
}

pub(super) fn window_ms(pace: &Pace) -> i64 {
    i64::try_from(pace.window().as_millis()).unwrap_or(i64::MAX)
}

fn read(row: &Row<'_>) -> rusqlite::Result<Config> {
    let pace = Pace::new(row.get(2)?, Duration::from_millis(row.get(3)?)).map_err(fault)?;
    Ok(Config {
        name: ConfigName::parse(row.get_ref(0)?.as_str()?).map_err(fault)?,
        version: row.get(1)?,
        pace,
        created_at: Timestamp::from_micros(row.get(4)?),
    })
}
