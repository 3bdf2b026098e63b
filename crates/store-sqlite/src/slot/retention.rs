//! Deletes old slots with their counters, and old versions of configs, in turns of the writer. The oldest go first, so behind each
//! full window stands a counter at any time. A config that is being recounted is left for the next purge.

use std::ops::ControlFlow;
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::{ConfigName, Timestamp};

use super::config::{self, ConfigVersion};
use super::{Recounts, due};
use crate::book::count_slots;
use crate::error::fault;
use crate::writer::WriterTurn;

/// Configs of which one call deletes something.
const CONFIGS_MAX: usize = 100;
/// Rows of each kind that are deleted between two checks of the turn.
const CHUNK: usize = 128;

/// Configs with windows that ended before `?1`, or with versions that were replaced before it.
const OLD: &str = "
    SELECT config_name FROM rate_limit_config k
    WHERE version = (SELECT max(version) FROM rate_limit_config n WHERE n.config_name = k.config_name)
      AND (EXISTS (SELECT 1 FROM rate_limit_event_slot s
                   WHERE s.config_name = k.config_name AND s.scheduled_time < ?1 - ?1 % (1000 * window_size_ms))
        OR EXISTS (SELECT 1 FROM rate_limit_window_counter c
                   WHERE c.config_name = k.config_name AND c.generation = k.generation
                     AND c.window_start < ?1 - ?1 % (1000 * window_size_ms) AND c.slot_count = 0)
        OR EXISTS (SELECT 1 FROM rate_limit_config old JOIN rate_limit_config next
                       ON next.config_name = old.config_name AND next.version = old.version + 1
                   WHERE old.config_name = k.config_name AND next.created_at < ?1))
    LIMIT ?2";
const SLOTS: &str = "
    SELECT event_id, scheduled_time FROM rate_limit_event_slot
    WHERE config_name = ?1 AND scheduled_time < ?2 ORDER BY scheduled_time LIMIT ?3";
const DELETE_SLOT: &str = "DELETE FROM rate_limit_event_slot WHERE event_id = ?1";
const SUBTRACT_SLOTS: &str = "
    UPDATE rate_limit_window_counter
    SET slot_count = slot_count - ?5, status = iif(slot_count - ?5 < ?3, 'OPEN', 'CLOSED')
    WHERE config_name = ?1 AND generation = ?4 AND window_start = ?2";
const FIRST_LEFT: &str = "SELECT min(scheduled_time) FROM rate_limit_event_slot WHERE config_name = ?1";
/// Only empty ones: a counter without the slots that it counts is for the audit to find.
const DELETE_COUNTERS: &str = "
    DELETE FROM rate_limit_window_counter
    WHERE config_name = ?1 AND generation = ?2 AND slot_count = 0 AND window_start <= (
        SELECT max(window_start) FROM (
            SELECT window_start FROM rate_limit_window_counter
            WHERE config_name = ?1 AND generation = ?2 AND window_start < ?3 AND slot_count = 0
            ORDER BY window_start LIMIT ?4))";
/// The newest version has no next one, so it stays, active or not.
const DELETE_VERSIONS: &str = "
    DELETE FROM rate_limit_config WHERE config_name = ?1 AND version IN (
        SELECT old.version FROM rate_limit_config old JOIN rate_limit_config next
            ON next.config_name = old.config_name AND next.version = old.version + 1
        WHERE old.config_name = ?1 AND NOT old.is_active AND next.created_at < ?2
        ORDER BY old.version LIMIT ?3)";

/// The configs of which something is older than `before`.
pub(super) fn old_configs(connection: &Connection, before: Timestamp) -> rusqlite::Result<Vec<ConfigName>> {
    let mut statement = connection.prepare_cached(OLD)?;
    let names = statement.query_map(params![before.as_micros(), CONFIGS_MAX], |row| {
        ConfigName::parse(row.get_ref(0)?.as_str()?).map_err(fault)
    })?;
    names.collect()
}

/// A purge of these configs, up to about a limit of rows.
pub(super) struct PurgeJob {
    configs: std::vec::IntoIter<ConfigName>,
    config: Option<ConfigName>,
    before: Timestamp,
    /// Whether slots wait for their dispatch, so that they must stay until then.
    is_dispatching: bool,
    recounts: Arc<Recounts>,
    limit: usize,
    purged: usize,
}

impl PurgeJob {
    pub(super) fn new(
        configs: Vec<ConfigName>,
        before: Timestamp,
        limit: usize,
        is_dispatching: bool,
        recounts: Arc<Recounts>,
    ) -> Self {
        let mut configs = configs.into_iter();
        let config = configs.next();
        Self { configs, config, before, is_dispatching, recounts, limit, purged: 0 }
    }

    /// Purges for one turn. Breaks with the number of deleted rows at the end.
    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<u64>> {
        while let Some(name) = self.config.as_ref().filter(|_| self.purged < self.limit) {
            if !turn.has_time() {
                return Ok(ControlFlow::Continue(()));
            }
            let deleted = self.purge_chunk(connection, name)?;
            self.purged += deleted;
            if deleted == 0 {
                self.config = self.configs.next();
            }
        }
        Ok(ControlFlow::Break(self.purged as u64))
    }

    /// Deletes some rows of a config. Returns how many; 0 if none is left.
    fn purge_chunk(&self, connection: &Connection, name: &ConfigName) -> rusqlite::Result<usize> {
        if self.recounts.contains(name) {
            return Ok(0);
        }
        let Some(latest) = config::latest(connection, name)? else { return Ok(0) };
        let rows = CHUNK.min(self.limit - self.purged);
        let dispatched = self.first_due(connection)?.map_or(self.before, |first| first.min(self.before));
        let boundary = latest.config.pace.window_of(dispatched);
        let slots = delete_slots(connection, name, &latest, boundary, rows)?;
        let first_left: Option<i64> =
            connection.prepare_cached(FIRST_LEFT)?.query_row([name.as_str()], |row| row.get(0))?;
        let first_window =
            first_left.map(|first| latest.config.pace.window_of(Timestamp::from_micros(first)));
        let counters_before = first_window.map_or(boundary, |first| first.min(boundary)).as_micros();
        let counters = connection.prepare_cached(DELETE_COUNTERS)?.execute(params![
            name.as_str(),
            latest.generation,
            counters_before,
            rows
        ])?;
        let versions = connection.prepare_cached(DELETE_VERSIONS)?.execute(params![
            name.as_str(),
            self.before.as_micros(),
            rows
        ])?;
        Ok(slots + counters + versions)
    }

    /// When the first slot is due that waits to be dispatched. While nothing is dispatched, what was recorded before does not
    /// count.
    fn first_due(&self, connection: &Connection) -> rusqlite::Result<Option<Timestamp>> {
        if !self.is_dispatching {
            return Ok(None);
        }
        let first: Option<Option<i64>> =
            connection.prepare_cached(due::FIRST)?.query_row([], |row| row.get(0)).optional()?;
        Ok(first.flatten().map(Timestamp::from_micros))
    }
}

/// Deletes up to `rows` slots that are scheduled before `boundary`, the oldest first, and subtracts them from their windows.
fn delete_slots(
    connection: &Connection,
    name: &ConfigName,
    latest: &ConfigVersion,
    boundary: Timestamp,
    rows: usize,
) -> rusqlite::Result<usize> {
    let pace = latest.config.pace;
    let slots: Vec<(String, i64)> = connection
        .prepare_cached(SLOTS)?
        .query_map(params![name.as_str(), boundary.as_micros(), rows], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let (mut delete, mut delete_due) =
        (connection.prepare_cached(DELETE_SLOT)?, connection.prepare_cached(due::DELETE)?);
    let mut subtract = connection.prepare_cached(SUBTRACT_SLOTS)?;
    let window_of = |(_, scheduled): &(String, i64)| pace.window_of(Timestamp::from_micros(*scheduled));
    for window in slots.chunk_by(|a, b| window_of(a) == window_of(b)) {
        for (event, scheduled) in window {
            delete.execute([event])?;
            delete_due.execute(params![scheduled, event])?;
        }
        let start = window_of(&window[0]).as_micros();
        let max = pace.max_per_window();
        subtract.execute(params![name.as_str(), start, max, latest.generation, window.len()])?;
    }
    count_slots(connection, -i64::try_from(slots.len()).unwrap_or(i64::MAX))?;
    Ok(slots.len())
}
