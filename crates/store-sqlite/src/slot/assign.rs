//! Carrying out the plan of a batch. One that is long is planned and written in parts.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::slot::WindowStatus;
use weir_core::{ConfigName, EventId, Timestamp};
use weir_store::Batch;
use weir_store::slot::{Assign, AssignOutcome, AssignPlan, PlanStep, Slot, WindowCounter, WindowQuery};

use super::config::Version;
use super::recount::Recounts;
use super::{config, due, find, status_text};
use crate::writer::{BatchInTurns, Turn};

const COUNTER: &str = "
    SELECT slot_count, status FROM rate_limit_window_counter 
    WHERE config_name = ?1 AND generation = ?2 AND window_start = ?3";
/// The index is named because SQLite prefers the primary key, and with it walks every window that is closed.
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

/// Events planned and written together. Between two parts the turn may end.
const PART: usize = 64;
/// With one writer nothing is held by others, so the first window with room is always usable.
const HEADROOM: u32 = 0;

/// The job that assigns a batch.
pub(super) struct Assignment {
    batch: BatchInTurns<Assign, AssignOutcome>,
    recounts: Arc<Recounts>,
    /// Configs whose events are handed back. Once one is, so are those behind it, also when the recount has ended meanwhile:
    /// the events of a config stay in order.
    recounting: Vec<ConfigName>,
    /// Events that were handed back. Another line for one of them is too, whatever its config: the first one decides.
    handed_back: HashSet<EventId>,
    is_dispatching: bool,
}

impl Assignment {
    pub(super) fn new(batch: Batch<Assign>, recounts: Arc<Recounts>, is_dispatching: bool) -> Self {
        Self {
            batch: BatchInTurns::new(batch),
            recounts,
            recounting: Vec::new(),
            handed_back: HashSet::new(),
            is_dispatching,
        }
    }

    /// Works for one turn.
    pub(super) fn work(
        &mut self,
        connection: &Connection,
        turn: &Turn,
    ) -> rusqlite::Result<ControlFlow<Vec<AssignOutcome>>> {
        loop {
            let part = self.batch.next_chunk(PART, turn);
            if part.is_empty() {
                return Ok(self.batch.finish());
            }
            let outcomes = self.assign(connection, part)?;
            self.batch.outcomes.extend(outcomes);
        }
    }

    /// Assigns a part, other than events whose config is being counted anew.
    fn assign(&mut self, connection: &Connection, part: Vec<Assign>) -> rusqlite::Result<Vec<AssignOutcome>> {
        let must_wait = part.iter().map(|assign| self.must_wait(connection, assign));
        let must_wait = must_wait.collect::<rusqlite::Result<Vec<bool>>>()?;
        if !must_wait.contains(&true) {
            return assign_part(connection, &part, self.is_dispatching);
        }
        let now = part.iter().zip(&must_wait).filter(|(_, must_wait)| !**must_wait);
        let now: Vec<Assign> = now.map(|(assign, _)| assign.clone()).collect();
        let mut outcomes = assign_part(connection, &now, self.is_dispatching)?.into_iter();
        let merge = |(assign, must_wait)| match must_wait {
            true => Some(AssignOutcome::Recounting(assign)),
            false => outcomes.next(),
        };
        Ok(part.into_iter().zip(must_wait).filter_map(merge).collect())
    }

    /// Whether an event is handed back. One that has a slot is not: it keeps that, whatever is counted.
    fn must_wait(&mut self, connection: &Connection, assign: &Assign) -> rusqlite::Result<bool> {
        let Assign { event, config, .. } = assign;
        if !self.handed_back.contains(event) {
            if !self.is_recounting(config) || find(connection, event)?.is_some() {
                return Ok(false);
            }
            self.handed_back.insert(event.clone());
        }
        Ok(true)
    }

    fn is_recounting(&mut self, config: &ConfigName) -> bool {
        if self.recounting.contains(config) {
            return true;
        }
        let is_recounting = self.recounts.contains(config);
        if is_recounting {
            self.recounting.push(config.clone());
        }
        is_recounting
    }
}

fn assign_part(
    connection: &Connection,
    part: &[Assign],
    is_dispatching: bool,
) -> rusqlite::Result<Vec<AssignOutcome>> {
    let (mut existing, mut paces, mut generations) = (Vec::new(), HashMap::new(), HashMap::new());
    for Assign { event, config, .. } in part {
        existing.extend(find(connection, event)?);
        if !paces.contains_key(config)
            && let Some(Version { config: active, generation }) = config::active(connection, config)?
        {
            paces.insert(active.name, active.pace);
            generations.insert(config, generation);
        }
    }
    let mut plan = AssignPlan::new(part, existing, &paces, HEADROOM);
    while let PlanStep::Load(needs) = plan.place(|| fastrand::u64(..)) {
        for need in needs {
            let Some(generation) = generations.get(need.config) else { continue };
            load(connection, &mut plan, need, *generation)?;
        }
    }
    save(connection, &plan, &generations, is_dispatching)?;
    Ok(plan.outcomes())
}

/// Reads windows until they have room for as many events as need it.
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
    let mut insert = connection.prepare_cached(INSERT)?;
    let mut note = connection.prepare_cached(due::NOTE)?;
    for Slot { event, config, requested, window_start, scheduled } in plan.slots() {
        insert.execute(params![
            event.as_str(),
            config.as_str(),
            requested.as_micros(),
            window_start.as_micros(),
            scheduled.as_micros(),
        ])?;
        if is_dispatching {
            note.execute(params![scheduled.as_micros(), event.as_str()])?;
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
