//! Assigning a batch. Windows are read as they are needed and remembered for one turn of it; one that fills up is written at
//! once, with the counter behind it, so that the index always finds the end of a run of full windows.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::slot::{Pace, Place, WindowStatus, Windows};
use weir_core::{ConfigName, Timestamp};
use weir_store::slot::{Assign, AssignOutcome, Slot};

use super::{config, due, find, status_text};
use crate::writer::{BatchInTurns, Turn};

const COUNTER: &str = "
    SELECT slot_count, status FROM rate_limit_window_counter WHERE config_name = ?1 AND window_start = ?2";
/// The index is named because SQLite prefers the primary key, and with it walks every window that is closed.
const NEXT_OPEN: &str = "
    SELECT window_start, slot_count FROM rate_limit_window_counter INDEXED BY rate_limit_window_counter_status
    WHERE config_name = ?1 AND status = 'OPEN' AND window_start > ?2 ORDER BY window_start LIMIT 1";
const SAVE_COUNTER: &str = "
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status) VALUES (?1, ?2, ?3, ?4)
    ON CONFLICT (config_name, window_start) DO UPDATE SET slot_count = excluded.slot_count, status = excluded.status";
const FOLLOW_UP: &str = "
    INSERT INTO rate_limit_window_counter (config_name, window_start, slot_count, status) VALUES (?1, ?2, 0, 'OPEN')
    ON CONFLICT DO NOTHING";
const INSERT: &str = "
    INSERT INTO rate_limit_event_slot (event_id, config_name, requested_time, window_start, scheduled_time)
    VALUES (?1, ?2, ?3, ?4, ?5)";

/// With one writer nothing is held by others, so the first window with room is always usable.
const HEADROOM: u32 = 0;

pub(super) fn assign(
    connection: &Connection,
    batch: &mut BatchInTurns<Assign, AssignOutcome>,
    is_dispatching: bool,
    turn: &Turn,
) -> rusqlite::Result<()> {
    let mut views: HashMap<ConfigName, Option<View>> = HashMap::new();
    let mut insert = connection.prepare_cached(INSERT)?;
    while let Some(Assign { event, config, requested }) = batch.next(turn) {
        if let Some(slot) = find(connection, &event)? {
            batch.outcomes.push(AssignOutcome::Existing(slot));
            continue;
        }
        if !views.contains_key(&config) {
            views.insert(config.clone(), View::open(connection, &config)?);
        }
        let Some(Some(view)) = views.get_mut(&config) else {
            batch.outcomes.push(AssignOutcome::UnknownConfig);
            continue;
        };
        let Some(Place { window_start, scheduled }) = view.place(connection, requested)? else {
            batch.outcomes.push(AssignOutcome::Exhausted);
            continue;
        };
        insert.execute(params![
            event.as_str(),
            config.as_str(),
            requested.as_micros(),
            window_start.as_micros(),
            scheduled.as_micros(),
        ])?;
        if is_dispatching {
            connection.prepare_cached(due::NOTE)?.execute(params![scheduled.as_micros(), event.as_str()])?;
        }
        batch.outcomes.push(AssignOutcome::New(Slot { event, config, requested, window_start, scheduled }));
    }
    for view in views.into_values().flatten() {
        view.save(connection)?;
    }
    Ok(())
}

/// The windows of one config, as far as a batch has needed them.
struct View {
    config: ConfigName,
    pace: Pace,
    windows: Windows,
    /// For each window that events asked for, the first open one after it when it was last looked for.
    next_open: HashMap<Timestamp, Timestamp>,
}

impl View {
    fn open(connection: &Connection, name: &ConfigName) -> rusqlite::Result<Option<Self>> {
        let config = config::active(connection, name)?;
        Ok(config.map(|config| Self {
            windows: Windows::new(config.pace, HEADROOM),
            pace: config.pace,
            config: config.name,
            next_open: HashMap::new(),
        }))
    }

    fn place(&mut self, connection: &Connection, requested: Timestamp) -> rusqlite::Result<Option<Place>> {
        let first = self.pace.window_of(requested);
        if !self.next_open.contains_key(&first) {
            let count = self.counter(connection, first)?.map_or(0, |(count, _)| count);
            self.learn(first, count);
            self.next_open.insert(first, first);
        }
        if !self.windows.offers(requested) {
            self.look_after(connection, first)?;
        }
        let place = self.windows.place(requested, fastrand::u64(..));
        if let Some(place) = place
            && self.windows.count(place.window_start).is_none()
        {
            self.close(connection, place.window_start)?;
        }
        Ok(place)
    }

    /// Makes sure that the first open window after `first` is known.
    fn look_after(&mut self, connection: &Connection, first: Timestamp) -> rusqlite::Result<()> {
        let known = self.next_open.get(&first).copied().filter(|start| *start != first);
        if known.is_some_and(|start| self.windows.count(start).is_some()) {
            return Ok(());
        }
        let next = self.pace.later(first, 1);
        let (start, count) = match self.counter(connection, next)? {
            None => (next, 0),
            Some((count, WindowStatus::Open)) => (next, count),
            Some((_, WindowStatus::Closed)) => connection
                .prepare_cached(NEXT_OPEN)?
                .query_row(params![self.config.as_str(), next.as_micros()], |row| {
                    Ok((Timestamp::from_micros(row.get(0)?), row.get(1)?))
                })?,
        };
        self.learn(start, count);
        self.next_open.insert(first, start);
        Ok(())
    }

    /// What the batch has done to a window is newer than its counter.
    fn learn(&mut self, start: Timestamp, count: u32) {
        if self.windows.count(start).is_none() {
            self.windows.add(start, count);
        }
    }

    fn counter(
        &self,
        connection: &Connection,
        start: Timestamp,
    ) -> rusqlite::Result<Option<(u32, WindowStatus)>> {
        let read = |row: &rusqlite::Row<'_>| {
            let is_open = row.get_ref(1)?.as_str()? == "OPEN";
            Ok((row.get(0)?, if is_open { WindowStatus::Open } else { WindowStatus::Closed }))
        };
        connection
            .prepare_cached(COUNTER)?
            .query_row(params![self.config.as_str(), start.as_micros()], read)
            .optional()
    }

    fn close(&self, connection: &Connection, start: Timestamp) -> rusqlite::Result<()> {
        let max = self.pace.max_per_window();
        self.write(connection, start, max, WindowStatus::Closed)?;
        let next = self.pace.later(start, 1).as_micros();
        connection.prepare_cached(FOLLOW_UP)?.execute(params![self.config.as_str(), next])?;
        Ok(())
    }

    fn write(
        &self,
        connection: &Connection,
        start: Timestamp,
        count: u32,
        status: WindowStatus,
    ) -> rusqlite::Result<()> {
        let values = params![self.config.as_str(), start.as_micros(), count, status_text(status)];
        connection.prepare_cached(SAVE_COUNTER)?.execute(values)?;
        Ok(())
    }

    /// Writes the counters of the windows that have room left.
    fn save(self, connection: &Connection) -> rusqlite::Result<()> {
        for (start, count, status) in self.windows.changed() {
            if status == WindowStatus::Open {
                self.write(connection, start, count, status)?;
            }
        }
        Ok(())
    }
}
