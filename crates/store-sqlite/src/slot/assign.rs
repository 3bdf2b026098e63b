//! The job that assigns a batch. It plans and writes the batch in chunks.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::slot::WindowStatus;
use weir_core::{ConfigName, EventId, Timestamp};
use weir_store::Batch;
use weir_store::slot::{Assign, AssignOutcome, AssignPlan, PlanStep, Slot, WindowCounter, WindowQuery};

use super::config::ConfigVersion;
use super::recount::Recounts;
use super::{config, due, find, status_text};
use crate::book::count_slots;
use crate::writer::{BatchInTurns, WriterTurn};

const COUNTER: &str = "
    SELECT slot_count, status FROM rate_limit_window_counter 
    WHERE config_name = ?1 AND generation = ?2 AND window_start = ?3";
/// The index is named because SQLite prefers the primary key, with which it scans every closed window.
const NEXT_OPEN: &str = "
    SELECT window_start, slot_count FROM rate_limit_window_counter INDEXED BY rate_limit_window_counter_status
    WHERE config_name = ?1 AND generation = ?2 AND status = 'OPEN' AND window_start > ?3 ORDER BY window_start LIMIT 1";
const SAVE_COUNTER: &str = "
    INSERT INTO rate_limit_window_counter (config_name, generation, window_start, slot_count, status)
    VALUES (?1, ?2, ?3, ?4, ?5)
    ON CONFLICT (config_name, generation, window_start) DO UPDATE SET slot_count = excluded.slot_count, status = excluded.status";
const FOLLOW_UP: &str = "
    INSERT INTO rate_limit_window_counter (config_name, generation, window_start, slot_count, status)
    VALUES (?1, ?2, ?3, 0, 'OPEN')
    ON CONFLICT DO NOTHING";
const INSERT: &str = "
    INSERT INTO rate_limit_event_slot (event_id, config_name, requested_time, window_start, scheduled_time)
    VALUES (?1, ?2, ?3, ?4, ?5)";

/// Events planned and written between two checks of the turn.
const CHUNK_MAX: usize = 64;
/// Spare windows to load. With one writer no window is locked by others, so the first one with room is always usable.
const HEADROOM: u32 = 0;

pub(super) struct AssignJob {
    batch: BatchInTurns<Assign, AssignOutcome>,
    recounts: Arc<Recounts>,
    /// Configs with a deferred event. Later events of such a config are deferred, too, even if the recount has ended
    /// meanwhile: the events of a config stay in order.
    deferred_configs: Vec<ConfigName>,
    /// Events that were deferred. Another command for such an event is deferred, too, whatever its config: the first
    /// command decides.
    deferred_events: HashSet<EventId>,
    is_dispatching: bool,
}

impl AssignJob {
    pub(super) fn new(batch: Batch<Assign>, recounts: Arc<Recounts>, is_dispatching: bool) -> Self {
        Self {
            batch: BatchInTurns::new(batch),
            recounts,
            deferred_configs: Vec::new(),
            deferred_events: HashSet::new(),
            is_dispatching,
        }
    }

    pub(super) fn run_turn(
        &mut self,
        connection: &Connection,
        turn: &WriterTurn,
    ) -> rusqlite::Result<ControlFlow<Vec<AssignOutcome>>> {
        loop {
            let chunk = self.batch.next_chunk(CHUNK_MAX, turn);
            if chunk.is_empty() {
                return Ok(self.batch.finish());
            }
            let outcomes = self.assign(connection, chunk)?;
            self.batch.outcomes.extend(outcomes);
        }
    }

    /// Assigns a chunk, except for events whose config is being recounted.
    fn assign(
        &mut self,
        connection: &Connection,
        chunk: Vec<Assign>,
    ) -> rusqlite::Result<Vec<AssignOutcome>> {
        let is_deferred = chunk.iter().map(|assign| self.must_defer(connection, assign));
        let is_deferred = is_deferred.collect::<rusqlite::Result<Vec<bool>>>()?;
        if !is_deferred.contains(&true) {
            return assign_chunk(connection, &chunk, self.is_dispatching);
        }
        let assignable = chunk.iter().zip(&is_deferred).filter(|(_, is_deferred)| !**is_deferred);
        let assignable: Vec<Assign> = assignable.map(|(assign, _)| assign.clone()).collect();
        let mut outcomes = assign_chunk(connection, &assignable, self.is_dispatching)?.into_iter();
        let merge = |(assign, is_deferred)| match is_deferred {
            true => Some(AssignOutcome::Recounting(assign)),
            false => outcomes.next(),
        };
        Ok(chunk.into_iter().zip(is_deferred).filter_map(merge).collect())
    }

    /// Whether an event has to wait for a recount. An event that has a slot keeps it and need not wait.
    fn must_defer(&mut self, connection: &Connection, assign: &Assign) -> rusqlite::Result<bool> {
        let Assign { event, config, .. } = assign;
        if !self.deferred_events.contains(event) {
            if !self.is_recounting(config) || find(connection, event)?.is_some() {
                return Ok(false);
            }
            self.deferred_events.insert(event.clone());
        }
        Ok(true)
    }

    fn is_recounting(&mut self, config: &ConfigName) -> bool {
        if self.deferred_configs.contains(config) {
            return true;
        }
        let is_recounting = self.recounts.contains(config);
        if is_recounting {
            self.deferred_configs.push(config.clone());
        }
        is_recounting
    }
}

pub(super) fn assign_chunk(
    connection: &Connection,
    chunk: &[Assign],
    is_dispatching: bool,
) -> rusqlite::Result<Vec<AssignOutcome>> {
    let (mut existing, mut paces, mut generations) = (Vec::new(), HashMap::new(), HashMap::new());
    for Assign { event, config, .. } in chunk {
        existing.extend(find(connection, event)?);
        if !paces.contains_key(config)
            && let Some(ConfigVersion { config: active, generation }) = config::active(connection, config)?
        {
            paces.insert(active.name, active.pace);
            generations.insert(config, generation);
        }
    }
    let mut plan = AssignPlan::new(chunk, existing, &paces, HEADROOM);
    while let PlanStep::Load(needs) = plan.place(|| fastrand::u64(..)) {
        for need in needs {
            let Some(generation) = generations.get(need.config) else { continue };
            load(connection, &mut plan, need, *generation)?;
        }
    }
    save(connection, &plan, &generations, is_dispatching)?;
    Ok(plan.outcomes())
}

/// Loads windows until they have room for all events that need one.
fn load(
    connection: &Connection,
    plan: &mut AssignPlan<'_>,
    need: WindowQuery<'_>,
    generation: i64,
) -> rusqlite::Result<()> {
    let Some(windows) = plan.windows(need.config) else { return Ok(()) };
    let (mut next, mut room) = (Some(need.from), 0_u32);
    while let Some(start) = next.filter(|_| room < need.events) {
        let (open, count) = match counter(connection, need.config, generation, start)? {
            None => (start, 0),
            Some((count, WindowStatus::Open)) => (start, count),
            Some((_, WindowStatus::Closed)) => {
                let end_of_time = (Timestamp::from_micros(i64::MAX), windows.pace().max_per_window());
                next_open(connection, need.config, generation, start)?.unwrap_or(end_of_time)
            }
        };
        windows.add_full(start, open);
        windows.add(open, count);
        room = room.saturating_add(windows.pace().max_per_window().saturating_sub(count));
        next = windows.next_window(open);
    }
    Ok(())
}

fn counter(
    connection: &Connection,
    config: &ConfigName,
    generation: i64,
    start: Timestamp,
) -> rusqlite::Result<Option<(u32, WindowStatus)>> {
    let read = |row: &rusqlite::Row<'_>| {
        let is_open = row.get_ref(1)?.as_str()? == "OPEN";
        Ok((row.get(0)?, if is_open { WindowStatus::Open } else { WindowStatus::Closed }))
    };
    let values = params![config.as_str(), generation, start.as_micros()];
    connection.prepare_cached(COUNTER)?.query_row(values, read).optional()
}

fn next_open(
    connection: &Connection,
    config: &ConfigName,
    generation: i64,
    after: Timestamp,
) -> rusqlite::Result<Option<(Timestamp, u32)>> {
    let read = |row: &rusqlite::Row<'_>| Ok((Timestamp::from_micros(row.get(0)?), row.get(1)?));
    let values = params![config.as_str(), generation, after.as_micros()];
    connection.prepare_cached(NEXT_OPEN)?.query_row(values, read).optional()
}

fn save(
    connection: &Connection,
    plan: &AssignPlan<'_>,
    generations: &HashMap<&ConfigName, i64>,
    is_dispatching: bool,
) -> rusqlite::Result<()> {
    let inserted = i64::try_from(plan.slots().len()).unwrap_or(i64::MAX);
    count_slots(connection, inserted)?;
    let mut insert = connection.prepare_cached(INSERT)?;
    let mut insert_due = connection.prepare_cached(due::INSERT)?;
    for Slot { event, config, requested, window_start, scheduled } in plan.slots() {
        insert.execute(params![
            event.as_str(),
            config.as_str(),
            requested.as_micros(),
            window_start.as_micros(),
            scheduled.as_micros(),
        ])?;
        if is_dispatching {
            insert_due.execute(params![scheduled.as_micros(), event.as_str()])?;
        }
    }
    let mut save_counter = connection.prepare_cached(SAVE_COUNTER)?;
    for WindowCounter { config, start, count, status } in plan.counters() {
        let values =
            params![config.as_str(), generations.get(config), start.as_micros(), count, status_text(status)];
        save_counter.execute(values)?;
    }
    let mut follow_up = connection.prepare_cached(FOLLOW_UP)?;
    for (config, start) in plan.follow_ups() {
        follow_up.execute(params![config.as_str(), generations.get(config), start.as_micros()])?;
    }
    Ok(())
}
