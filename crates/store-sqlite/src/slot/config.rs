//! The versions of slot configs.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::slot::Pace;
use weir_core::{ConfigName, Timestamp};
use weir_store::slot::{SlotConfig, SlotConfigVersion, window_text};

use crate::error::fault;

const LATEST: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at, generation FROM rate_limit_config
    WHERE config_name = ?1 ORDER BY version DESC LIMIT 1";
const ACTIVE: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at, generation FROM rate_limit_config
    WHERE config_name = ?1 AND is_active ORDER BY version DESC LIMIT 1";
const LIST: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at, generation FROM rate_limit_config
    WHERE config_name > ?1 AND is_active ORDER BY config_name LIMIT ?2";
const VERSIONS: &str = "
    SELECT config_name, version, max_per_window, window_size_ms, created_at, generation, is_active FROM rate_limit_config
    WHERE config_name = ?1 AND version < ?2 ORDER BY version DESC LIMIT ?3";
const DEACTIVATE: &str = "UPDATE rate_limit_config SET is_active = 0 WHERE config_name = ?1 AND is_active";
const INSERT: &str = "
    INSERT INTO rate_limit_config
        (config_name, version, max_per_window, window_size, window_size_ms, is_active, created_at, generation)
    VALUES (?1, ?2, ?3, ?4, ?5, 1, ?6, ?7)";

/// A version of a config, and the generation of window counters that it uses.
pub(super) struct ConfigVersion {
    pub(super) config: SlotConfig,
    pub(super) generation: i64,
}

/// Inserts the next version and activates it.
pub(super) fn insert(
    connection: &Connection,
    name: &ConfigName,
    pace: Pace,
    generation: i64,
    now: Timestamp,
) -> rusqlite::Result<SlotConfig> {
    let before = latest(connection, name)?;
    let version = before.map_or(1, |before| before.config.version.saturating_add(1));
    deactivate(connection, name)?;
    let (max, size_ms) = (pace.max_per_window(), window_ms(&pace));
    let values =
        params![name.as_str(), version, max, window_text(&pace), size_ms, now.as_micros(), generation];
    connection.prepare_cached(INSERT)?.execute(values)?;
    Ok(SlotConfig { name: name.clone(), version, pace, created_at: now })
}

/// The newest version, active or not. Window counters follow it.
pub(super) fn latest(connection: &Connection, name: &ConfigName) -> rusqlite::Result<Option<ConfigVersion>> {
    connection.prepare_cached(LATEST)?.query_row([name.as_str()], read).optional()
}

pub(super) fn active(connection: &Connection, name: &ConfigName) -> rusqlite::Result<Option<ConfigVersion>> {
    connection.prepare_cached(ACTIVE)?.query_row([name.as_str()], read).optional()
}

pub(super) fn list(connection: &Connection, after: &str, limit: usize) -> rusqlite::Result<Vec<SlotConfig>> {
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    connection
        .prepare_cached(LIST)?
        .query_map(params![after, limit], read)?
        .map(|version| Ok(version?.config))
        .collect()
}

pub(super) fn versions(
    connection: &Connection,
    name: &ConfigName,
    before: Option<u32>,
    limit: usize,
) -> rusqlite::Result<Vec<SlotConfigVersion>> {
    let (before, limit) = (before.map_or(i64::MAX, i64::from), i64::try_from(limit).unwrap_or(i64::MAX));
    let read_version =
        |row: &Row<'_>| Ok(SlotConfigVersion { config: read(row)?.config, is_active: row.get(6)? });
    connection
        .prepare_cached(VERSIONS)?
        .query_map(params![name.as_str(), before, limit], read_version)?
        .collect()
}

pub(super) fn deactivate(connection: &Connection, name: &ConfigName) -> rusqlite::Result<bool> {
    connection.prepare_cached(DEACTIVATE)?.execute([name.as_str()]).map(|changed| changed > 0)
}

fn window_ms(pace: &Pace) -> i64 {
    i64::try_from(pace.window().as_millis()).unwrap_or(i64::MAX)
}

fn read(row: &Row<'_>) -> rusqlite::Result<ConfigVersion> {
    let pace = Pace::new(row.get(2)?, Duration::from_millis(row.get(3)?)).map_err(fault)?;
    let config = SlotConfig {
        name: ConfigName::parse(row.get_ref(0)?.as_str()?).map_err(fault)?,
        version: row.get(1)?,
        pace,
        created_at: Timestamp::from_micros(row.get(4)?),
    };
    Ok(ConfigVersion { config, generation: row.get(5)? })
}
