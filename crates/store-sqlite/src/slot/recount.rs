//! Creates a new version of a config. If its pace differs from the one before, the window counters are recounted into a new
//! generation, a part with every turn of the writer. That generation comes into use in the commit that inserts the version;
//! until then readers see the old version and its counters.
//!
//! The slots of a config must not change during its recount. So give-backs and further versions wait outside of the writer
//! ([`Recounts::wait`]), and its events are returned to the caller unassigned. After a crash either the old or the new
//! version is active, and the counters of the other generation are removed when the engine opens.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::{Connection, params};
use tokio::sync::{Semaphore, watch};
use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, Timestamp};
use weir_store::slot::SlotConfig;
use weir_store::{Error, Result};

use super::config::{self, ConfigVersion};
use super::status_text;
use crate::writer::{QUEUED_JOBS_MAX, WriterTurn};

/// Rows of one step.
const PAGE: usize = 500;
/// Calls that may wait for the end of a recount. When it ends, all of them may submit a job to the writer at once; half
/// of the writer's queue is then left to others.
const WAITERS_MAX: usize = QUEUED_JOBS_MAX / 2;

const SLOTS: &str = "
    SELECT scheduled_time, event_id FROM rate_limit_event_slot
    WHERE config_name = ?1 AND (scheduled_time, event_id) > (?2, ?3)
    ORDER BY scheduled_time, event_id LIMIT ?4";
const COUNTERS: &str = "
    SELECT window_start, slot_count FROM rate_limit_window_counter
    WHERE config_name = ?1 AND generation = ?2 AND window_start > ?3 ORDER BY window_start LIMIT ?4";
const INSERT: &str = "
    INSERT INTO rate_limit_window_counter (config_name, generation, window_start, slot_count, status)
    VALUES (?1, ?2, ?3, ?4, ?5)";
const PAGE_END: &str = "
    SELECT window_start FROM rate_limit_window_counter
    WHERE config_name = ?1 AND generation = ?2 ORDER BY window_start LIMIT ?3";
const DELETE_PAGE: &str = "
    DELETE FROM rate_limit_window_counter WHERE config_name = ?1 AND generation = ?2 AND window_start <= ?3";
const INSERT_UNUSED: &str = "INSERT INTO rate_limit_unused_generation (config_name, generation) VALUES (?1, ?2) ON CONFLICT DO NOTHING";
const DELETE_UNUSED: &str =
    "DELETE FROM rate_limit_unused_generation WHERE config_name = ?1 AND generation = ?2";
const UNUSED: &str = "SELECT config_name, generation FROM rate_limit_unused_generation";
const DELETE_GENERATION: &str =
    "DELETE FROM rate_limit_window_counter WHERE config_name = ?1 AND generation = ?2";

/// The recounts in progress.
#[derive(Debug)]
pub(crate) struct Recounts {
    /// Dropping the sender at the end of a recount wakes the calls that wait for it.
    in_progress: Mutex<HashMap<ConfigName, watch::Sender<()>>>,
    waiter_permits: Semaphore,
}

impl Default for Recounts {
    fn default() -> Self {
        Self { in_progress: Mutex::default(), waiter_permits: Semaphore::new(WAITERS_MAX) }
    }
}

impl Recounts {
    /// Whether a config is being recounted, so that its slots must not change.
    pub(super) fn contains(&self, name: &ConfigName) -> bool {
        self.in_progress.lock().contains_key(name)
    }

    /// Waits until a config is not being recounted. Fails if too many calls wait.
    pub(super) async fn wait(&self, name: &ConfigName) -> Result<()> {
        let recount = self.in_progress.lock().get(name).map(watch::Sender::subscribe);
        let Some(mut recount) = recount else { return Ok(()) };
        let full = |_| Error::Overloaded { lane: "slot recount" };
        let _permit = self.waiter_permits.try_acquire().map_err(full)?;
        // Nothing is ever sent: this returns when the sender is dropped.
        let _ = recount.changed().await;
        Ok(())
    }

    fn begin(recounts: &Arc<Self>, name: &ConfigName) -> RecountGuard {
        recounts.in_progress.lock().insert(name.clone(), watch::Sender::new(()));
        RecountGuard { recounts: Arc::clone(recounts), name: name.clone() }
    }
}

/// Marks a config as being recounted until it is dropped with its job, whether that finishes or fails.
struct RecountGuard {
    recounts: Arc<Recounts>,
    name: ConfigName,
}

impl Drop for RecountGuard {
    fn drop(&mut self) {
        self.recounts.in_progress.lock().remove(&self.name);
    }
}

/// The job that creates a new version.
pub(super) struct PutConfigJob {
    name: ConfigName,
    pace: Pace,
    now: Timestamp,
    recounts: Arc<Recounts>,
    stage: Stage,
}

enum Stage {
    Begin,
    Recount(SlotRecount),
    /// The version is active, and the counters of this old generation are being removed.
    RemoveOld(SlotConfig, i64),
}

impl PutConfigJob {
    pub(super) fn new(name: ConfigName, pace: Pace, now: Timestamp, recounts: Arc<Recounts>) -> Self {
        Self { name, pace, now, recounts, stage: Stage::Begin }
    }

    /// Works for one turn. Breaks with `None` if another recount of this config is in progress; the caller has to wait
    /// for that and try again.
    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<Option<SlotConfig>>> {
        if matches!(self.stage, Stage::Begin) && self.recounts.contains(&self.name) {
            return Ok(ControlFlow::Break(None));
        }
        while turn.has_time() {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Begin) {
                Stage::Begin => match self.begin(connection)? {
                    ControlFlow::Continue(recount) => Stage::Recount(recount),
                    ControlFlow::Break(config) => return Ok(ControlFlow::Break(Some(config))),
                },
                Stage::Recount(mut recount) => {
                    if recount.step(connection)? {
                        self.activate(connection, recount)?
                    } else {
                        Stage::Recount(recount)
                    }
                }
                Stage::RemoveOld(config, unused) => {
                    if remove(connection, &self.name, unused)? {
                        connection
                            .prepare_cached(DELETE_UNUSED)?
                            .execute(params![self.name.as_str(), unused])?;
                        return Ok(ControlFlow::Break(Some(config)));
                    }
                    Stage::RemoveOld(config, unused)
                }
            };
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Starts a recount. If the pace is unchanged, or the version is the first, breaks with the version instead.
    fn begin(&self, connection: &Connection) -> rusqlite::Result<ControlFlow<SlotConfig, SlotRecount>> {
        let before = match config::latest(connection, &self.name)? {
            Some(before) if before.config.pace != self.pace => before,
            same_pace => {
                let generation = same_pace.map_or(0, |before| before.generation);
                let config = config::insert(connection, &self.name, self.pace, generation, self.now)?;
                return Ok(ControlFlow::Break(config));
            }
        };
        let generation = before.generation.saturating_add(1);
        connection.prepare_cached(INSERT_UNUSED)?.execute(params![self.name.as_str(), generation])?;
        Ok(ControlFlow::Continue(SlotRecount {
            pace: self.pace,
            generation,
            before,
            is_clear: false,
            after: (i64::MIN, String::new()),
            window: None,
            _guard: Recounts::begin(&self.recounts, &self.name),
        }))
    }

    /// Activates the new version with the recounted generation. Waiting calls continue.
    fn activate(&self, connection: &Connection, recount: SlotRecount) -> rusqlite::Result<Stage> {
        let (name, unused) = (self.name.as_str(), recount.before.generation);
        let config = config::insert(connection, &self.name, self.pace, recount.generation, self.now)?;
        connection.prepare_cached(DELETE_UNUSED)?.execute(params![name, recount.generation])?;
        connection.prepare_cached(INSERT_UNUSED)?.execute(params![name, unused])?;
        Ok(Stage::RemoveOld(config, unused))
    }
}

/// A recount in progress.
struct SlotRecount {
    pace: Pace,
    generation: i64,
    before: ConfigVersion,
    /// Whether the counters that a failed recount has left in this generation are removed.
    is_clear: bool,
    /// The last row that was counted: its time, and its event if slots are counted.
    after: (i64, String),
    /// The window that is being counted, and its count so far.
    window: Option<(Timestamp, u32)>,
    _guard: RecountGuard,
}

impl SlotRecount {
    /// Counts one page. Returns true after the last one.
    fn step(&mut self, connection: &Connection) -> rusqlite::Result<bool> {
        if !self.is_clear {
            self.is_clear = remove(connection, &self.before.config.name, self.generation)?;
            return Ok(false);
        }
        let page = if self.before.config.pace.window() == self.pace.window() {
            self.counters(connection)?
        } else {
            self.slots(connection)?
        };
        for (start, count) in &page {
            match &mut self.window {
                Some((window, sum)) if window == start => *sum = sum.saturating_add(*count),
                _ => {
                    let done = self.window.replace((*start, *count));
                    self.save(connection, done, Some(*start))?;
                }
            }
        }
        let is_last = page.len() < PAGE;
        if is_last {
            let done = self.window.take();
            self.save(connection, done, None)?;
        }
        Ok(is_last)
    }

    /// Reads the next slots. Each counts 1 in its window.
    fn slots(&mut self, connection: &Connection) -> rusqlite::Result<Vec<(Timestamp, u32)>> {
        let mut page = Vec::with_capacity(PAGE);
        let mut statement = connection.prepare_cached(SLOTS)?;
        let name = self.before.config.name.as_str();
        let mut rows = statement.query(params![name, self.after.0, self.after.1, PAGE])?;
        while let Some(row) = rows.next()? {
            self.after = (row.get(0)?, row.get(1)?);
            page.push((self.pace.window_of(Timestamp::from_micros(self.after.0)), 1));
        }
        Ok(page)
    }

    /// Reads the next counters of the previous version, which has the same windows.
    fn counters(&mut self, connection: &Connection) -> rusqlite::Result<Vec<(Timestamp, u32)>> {
        let mut page = Vec::with_capacity(PAGE);
        let mut statement = connection.prepare_cached(COUNTERS)?;
        let ConfigVersion { config, generation } = &self.before;
        let mut rows = statement.query(params![config.name.as_str(), generation, self.after.0, PAGE])?;
        while let Some(row) = rows.next()? {
            self.after.0 = row.get(0)?;
            page.push((Timestamp::from_micros(self.after.0), row.get(1)?));
        }
        Ok(page)
    }

    /// Inserts a counter. Behind a full window it also inserts an empty one, unless `next` is that window.
    fn save(
        &self,
        connection: &Connection,
        window: Option<(Timestamp, u32)>,
        next: Option<Timestamp>,
    ) -> rusqlite::Result<()> {
        let Some((start, count)) = window else { return Ok(()) };
        let mut insert = connection.prepare_cached(INSERT)?;
        let mut write = |start: Timestamp, count, status| {
            let name = self.before.config.name.as_str();
            insert.execute(params![name, self.generation, start.as_micros(), count, status_text(status)])
        };
        let status = WindowStatus::from_count(count, &self.pace);
        write(start, count, status)?;
        let following = self.pace.window_after(start, 1);
        if status == WindowStatus::Closed && next != Some(following) {
            write(following, 0, WindowStatus::Open)?;
        }
        Ok(())
    }
}

/// Removes a page of the counters of a generation. Returns true when none remains.
fn remove(connection: &Connection, name: &ConfigName, generation: i64) -> rusqlite::Result<bool> {
    let mut statement = connection.prepare_cached(PAGE_END)?;
    let starts = statement.query_map(params![name.as_str(), generation, PAGE], |row| row.get::<_, i64>(0))?;
    let Some(last) = starts.last().transpose()? else { return Ok(true) };
    let removed =
        connection.prepare_cached(DELETE_PAGE)?.execute(params![name.as_str(), generation, last])?;
    Ok(removed < PAGE)
}

/// Removes unused generations that a crash has left. Runs when the engine opens, so it may take long: no job waits for the
/// writer yet.
pub(crate) fn remove_unused(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    let unused: Vec<(String, i64)> = {
        let mut statement = transaction.prepare(UNUSED)?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect::<rusqlite::Result<_>>()?
    };
    for (name, generation) in unused {
        transaction.execute(DELETE_GENERATION, params![name, generation])?;
        transaction.execute(DELETE_UNUSED, params![name, generation])?;
    }
    transaction.commit()
}

#[cfg(test)]
mod tests;
