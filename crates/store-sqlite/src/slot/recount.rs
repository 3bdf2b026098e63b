//! A new version of a config. Where its pace differs from the one before, its counters are made beside those in use, a part
//! with every turn of the writer, and take their place in one commit with the version: until then readers see the old one.
//!
//! Meanwhile the slots of that config must not change, so its give-backs and further versions wait ([`Recounts::wait`]), outside of the
//! writer, and its events are handed back to whoever wants to assign them. After a crash the old version is in service, or the
//! new one, and the counters of the other are removed when the engine opens.

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

use super::config::{self, Version};
use super::status_text;
use crate::writer::{Turn, WAITING_MAX};

/// Rows of one step.
const PAGE: usize = 500;
/// Calls that may wait for the end of a recount. Then all of them may come to the writer at once, and half of its places are left
/// to others.
const WAITERS_MAX: usize = WAITING_MAX / 2;

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
const REMOVE: &str = "
    DELETE FROM rate_limit_window_counter WHERE config_name = ?1 AND generation = ?2 AND window_start <= ?3";
const NOTE_UNUSED: &str = "INSERT INTO rate_limit_unused_generation (config_name, generation) VALUES (?1, ?2) ON CONFLICT DO NOTHING";
const FORGET_UNUSED: &str =
    "DELETE FROM rate_limit_unused_generation WHERE config_name = ?1 AND generation = ?2";
const UNUSED: &str = "SELECT config_name, generation FROM rate_limit_unused_generation";
const REMOVE_ALL: &str = "DELETE FROM rate_limit_window_counter WHERE config_name = ?1 AND generation = ?2";

/// Configs whose slots must not change.
#[derive(Debug)]
pub(crate) struct Recounts {
    /// A sender goes with its recount, which is how those who wait hear of its end.
    names: Mutex<HashMap<ConfigName, watch::Sender<()>>>,
    places: Semaphore,
}

impl Default for Recounts {
    fn default() -> Self {
        Self { names: Mutex::default(), places: Semaphore::new(WAITERS_MAX) }
    }
}

impl Recounts {
    /// Whether whoever wants to change slots of this config has to wait.
    pub(super) fn contains(&self, name: &ConfigName) -> bool {
        self.names.lock().contains_key(name)
    }

    /// Waits until a config is not being counted.
    pub(super) async fn wait(&self, name: &ConfigName) -> Result<()> {
        let recount = self.names.lock().get(name).map(watch::Sender::subscribe);
        let Some(mut recount) = recount else { return Ok(()) };
        let full = |_| Error::Overloaded { lane: "slot recount" };
        let _place = self.places.try_acquire().map_err(full)?;
        // Nothing is sent: this ends when the sender is dropped.
        let _ = recount.changed().await;
        Ok(())
    }

    fn mark(recounts: &Arc<Self>, name: &ConfigName) -> Mark {
        recounts.names.lock().insert(name.clone(), watch::Sender::new(()));
        Mark { recounts: Arc::clone(recounts), name: name.clone() }
    }
}

/// Goes with the job that counts, whatever becomes of it.
struct Mark {
    recounts: Arc<Recounts>,
    name: ConfigName,
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.recounts.names.lock().remove(&self.name);
    }
}

/// The job that makes a new version.
pub(super) struct NewVersion {
    name: ConfigName,
    pace: Pace,
    now: Timestamp,
    recounts: Arc<Recounts>,
    stage: Stage,
}

enum Stage {
    Begin,
    Count(Count),
    /// The version is there, and the counters of this generation are removed.
    Remove(SlotConfig, i64),
}

impl NewVersion {
    pub(super) fn new(name: ConfigName, pace: Pace, now: Timestamp, recounts: Arc<Recounts>) -> Self {
        Self { name, pace, now, recounts, stage: Stage::Begin }
    }

    /// Works for one turn. None when there is another new version on its way, whose end has to be waited for.
    pub(super) fn work(
        &mut self,
        connection: &Connection,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<Option<SlotConfig>>> {
        if matches!(self.stage, Stage::Begin) && self.recounts.contains(&self.name) {
            return Ok(ControlFlow::Break(None));
        }
        while turn.goes_on() {
            self.stage = match std::mem::replace(&mut self.stage, Stage::Begin) {
                Stage::Begin => match self.begin(connection)? {
                    ControlFlow::Continue(count) => Stage::Count(count),
                    ControlFlow::Break(config) => return Ok(ControlFlow::Break(Some(config))),
                },
                Stage::Count(mut count) => {
                    if count.step(connection)? {
                        self.take_over(connection, count)?
                    } else {
                        Stage::Count(count)
                    }
                }
                Stage::Remove(config, unused) => {
                    if remove(connection, &self.name, unused)? {
                        connection
                            .prepare_cached(FORGET_UNUSED)?
                            .execute(params![self.name.as_str(), unused])?;
                        return Ok(ControlFlow::Break(Some(config)));
                    }
                    Stage::Remove(config, unused)
                }
            };
        }
        Ok(ControlFlow::Continue(()))
    }

    /// A version whose counters are those there are is made at once.
    fn begin(&self, connection: &Connection) -> rusqlite::Result<ControlFlow<SlotConfig, Count>> {
        let before = match config::latest(connection, &self.name)? {
            Some(before) if before.config.pace != self.pace => before,
            same => {
                let generation = same.map_or(0, |before| before.generation);
                let config = config::insert(connection, &self.name, self.pace, generation, self.now)?;
                return Ok(ControlFlow::Break(config));
            }
        };
        let generation = before.generation.saturating_add(1);
        connection.prepare_cached(NOTE_UNUSED)?.execute(params![self.name.as_str(), generation])?;
        Ok(ControlFlow::Continue(Count {
            pace: self.pace,
            generation,
            before,
            is_clear: false,
            after: (i64::MIN, String::new()),
            window: None,
            _mark: Recounts::mark(&self.recounts, &self.name),
        }))
    }

    /// From here on the new version is in service, and whoever waited goes on.
    fn take_over(&self, connection: &Connection, count: Count) -> rusqlite::Result<Stage> {
        let (name, unused) = (self.name.as_str(), count.before.generation);
        let config = config::insert(connection, &self.name, self.pace, count.generation, self.now)?;
        connection.prepare_cached(FORGET_UNUSED)?.execute(params![name, count.generation])?;
        connection.prepare_cached(NOTE_UNUSED)?.execute(params![name, unused])?;
        Ok(Stage::Remove(config, unused))
    }
}

/// The counters of a new pace, as far as they were made.
struct Count {
    pace: Pace,
    generation: i64,
    before: Version,
    /// Whether what a recount that failed has left of this generation is gone.
    is_clear: bool,
    /// The last row that was counted: its time, and its event where slots are counted.
    after: (i64, String),
    /// The window that rows are being counted for.
    window: Option<(Timestamp, u32)>,
    _mark: Mark,
}

impl Count {
    /// One page. True when that was the last.
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

    /// The next slots, each with the window it is in.
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

    /// The next counters of the version before, whose windows are the same.
    fn counters(&mut self, connection: &Connection) -> rusqlite::Result<Vec<(Timestamp, u32)>> {
        let mut page = Vec::with_capacity(PAGE);
        let mut statement = connection.prepare_cached(COUNTERS)?;
        let Version { config, generation } = &self.before;
        let mut rows = statement.query(params![config.name.as_str(), generation, self.after.0, PAGE])?;
        while let Some(row) = rows.next()? {
            self.after.0 = row.get(0)?;
            page.push((Timestamp::from_micros(self.after.0), row.get(1)?));
        }
        Ok(page)
    }

    /// Writes a counter, and the one behind a full window unless it is the next to be counted.
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
        let behind = self.pace.window_after(start, 1);
        if status == WindowStatus::Closed && next != Some(behind) {
            write(behind, 0, WindowStatus::Open)?;
        }
        Ok(())
    }
}

/// Removes a page of the counters of a generation. True when none is left.
fn remove(connection: &Connection, name: &ConfigName, generation: i64) -> rusqlite::Result<bool> {
    let mut statement = connection.prepare_cached(PAGE_END)?;
    let starts = statement.query_map(params![name.as_str(), generation, PAGE], |row| row.get::<_, i64>(0))?;
    let Some(last) = starts.last().transpose()? else { return Ok(true) };
    let gone = connection.prepare_cached(REMOVE)?.execute(params![name.as_str(), generation, last])?;
    Ok(gone < PAGE)
}

/// Removes what a crash has left of generations that are not in use. Nobody waits for the writer yet.
pub(crate) fn remove_unused(connection: &mut Connection) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    let unused: Vec<(String, i64)> = {
        let mut statement = transaction.prepare(UNUSED)?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect::<rusqlite::Result<_>>()?
    };
    for (name, generation) in unused {
        transaction.execute(REMOVE_ALL, params![name, generation])?;
        transaction.execute(FORGET_UNUSED, params![name, generation])?;
    }
    transaction.commit()
}

#[cfg(test)]
mod tests;
