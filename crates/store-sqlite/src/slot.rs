//! Slot in SQLite. Only the writer thread assigns, so no window is locked or skipped.

mod assign;
mod config;
mod due;
mod recount;
mod retention;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_queue::due::DUE_LEASE;
use weir_store::slot::{
    Assign, AssignOutcome, MoveOutcome, Slot, SlotAudit, SlotConfig, SlotConfigVersion, SlotPosition,
    SlotStore, WindowCount,
};
use weir_store::{Batch, Result};

use self::assign::AssignJob;
use self::recount::PutConfigJob;
pub(crate) use self::recount::{Recounts, remove_unused};
use crate::Sqlite;
use crate::book::count_slots;
use crate::error::fault;
use crate::writer::{Scheduling, WriterState, WriterTurn};

const FIND: &str = "
    SELECT event_id, config_name, requested_time, window_start, scheduled_time
    FROM rate_limit_event_slot WHERE event_id = ?1";
const DELETE: &str = "
    DELETE FROM rate_limit_event_slot WHERE event_id = ?1
    RETURNING event_id, config_name, requested_time, window_start, scheduled_time";
const SUBTRACT_SLOT: &str = "
    UPDATE rate_limit_window_counter
    SET slot_count = slot_count - 1, status = iif(slot_count - 1 < ?3, 'OPEN', 'CLOSED')
    WHERE config_name = ?1 AND generation = ?4 AND window_start = ?2";
const WINDOWS: &str = "
    SELECT window_start, slot_count, status FROM rate_limit_window_counter
    WHERE config_name = ?1 AND window_start >= ?2 AND window_start < ?3 AND slot_count > 0
      AND generation = (SELECT generation FROM rate_limit_config WHERE config_name = ?1 ORDER BY version DESC LIMIT 1)
    ORDER BY window_start LIMIT ?4";
/// No event is empty, so an empty one stands before all events of its time.
const SLOTS: &str = "
    SELECT event_id, config_name, requested_time, window_start, scheduled_time FROM rate_limit_event_slot
    WHERE config_name = ?1 AND scheduled_time >= ?2 AND (scheduled_time, event_id) > (?2, ?3) AND scheduled_time < ?4
    ORDER BY scheduled_time, event_id LIMIT ?5";
const TOTALS: &str = "
    SELECT (SELECT count(*) FROM rate_limit_event_slot),
           coalesce(sum(slot_count), 0), count(*) FILTER (WHERE slot_count > max_per_window)
    FROM rate_limit_config k JOIN rate_limit_window_counter c USING (config_name, generation)
    WHERE version = (SELECT max(version) FROM rate_limit_config n WHERE n.config_name = k.config_name)";
const DIFFERENT: &str = "
    SELECT c.config_name || ' ' || c.window_start
    FROM rate_limit_config k JOIN rate_limit_window_counter c USING (config_name, generation)
    WHERE version = (SELECT max(version) FROM rate_limit_config n WHERE n.config_name = k.config_name)
      AND slot_count <> (
        SELECT count(*) FROM rate_limit_event_slot s
        WHERE s.config_name = c.config_name AND s.scheduled_time >= c.window_start
          AND s.scheduled_time < c.window_start + 1000 * k.window_size_ms)
    LIMIT 10";

#[async_trait]
impl SlotStore for Sqlite {
    async fn put_config(&self, name: &ConfigName, pace: Pace) -> Result<SlotConfig> {
        loop {
            let recounts = Arc::clone(&self.inner.recounts);
            let mut job = PutConfigJob::new(name.clone(), pace, self.inner.clock.now(), recounts);
            let work = move |connection: &Connection, _: &mut WriterState, turn: &WriterTurn| {
                job.run_turn(connection, turn)
            };
            match self.inner.writer.run_in_turns(Scheduling::Prioritized, work).await? {
                Some(config) => return Ok(config),
                None => self.inner.recounts.wait(name).await?,
            }
        }
    }

    async fn config(&self, name: &ConfigName) -> Result<Option<SlotConfig>> {
        let name = name.clone();
        let find = move |connection: &Connection| {
            Ok(config::active(connection, &name)?.map(|version| version.config))
        };
        self.read(find).await
    }

    async fn configs(&self, after: Option<&ConfigName>, limit: usize) -> Result<Vec<SlotConfig>> {
        let after = after.map(|name| name.as_str().to_owned()).unwrap_or_default();
        self.read(move |connection| config::list(connection, &after, limit)).await
    }

    async fn config_versions(
        &self,
        name: &ConfigName,
        before: Option<u32>,
        limit: usize,
    ) -> Result<Vec<SlotConfigVersion>> {
        let name = name.clone();
        self.read(move |connection| config::versions(connection, &name, before, limit)).await
    }

    async fn deactivate(&self, name: &ConfigName) -> Result<bool> {
        let name = name.clone();
        self.inner.writer.run(move |connection| config::deactivate(connection, &name)).await
    }

    async fn assign_batch(&self, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>> {
        let is_dispatching = self.is_dispatching;
        let mut job = AssignJob::new(batch, Arc::clone(&self.inner.recounts), is_dispatching);
        let assign = self
            .inner
            .writer
            .run_in_turns(Scheduling::Interleaved, move |connection, _, turn| job.run_turn(connection, turn));
        let outcomes = assign.await;
        if is_dispatching {
            self.inner.topic_notify.notify(DUE_LEASE);
        }
        outcomes
    }

    async fn find_slot(&self, event: &EventId) -> Result<Option<Slot>> {
        let event = event.clone();
        self.read(move |connection| find(connection, &event)).await
    }

    async fn release_slot(&self, event: &EventId) -> Result<Option<Slot>> {
        loop {
            let (event, recounts) = (event.clone(), Arc::clone(&self.inner.recounts));
            let work = move |connection: &Connection| match find(connection, &event)? {
                Some(slot) if recounts.contains(&slot.config) => Ok(ControlFlow::Continue(slot.config)),
                _ => give_back(connection, &event).map(ControlFlow::Break),
            };
            match self.inner.writer.run(work).await? {
                ControlFlow::Break(slot) => return Ok(slot),
                ControlFlow::Continue(config) => self.inner.recounts.wait(&config).await?,
            }
        }
    }

    async fn move_slot(&self, event: &EventId, requested: Timestamp) -> Result<MoveOutcome> {
        let is_dispatching = self.is_dispatching;
        let outcome = loop {
            let (event, recounts) = (event.clone(), Arc::clone(&self.inner.recounts));
            let work = move |connection: &Connection| match find(connection, &event)? {
                Some(slot) if recounts.contains(&slot.config) => Ok(ControlFlow::Continue(slot.config)),
                Some(slot) => {
                    let assign = Assign { event, config: slot.config, requested };
                    move_to(connection, &assign, is_dispatching).map(ControlFlow::Break)
                }
                None => Ok(ControlFlow::Break(MoveOutcome::UnknownEvent)),
            };
            match self.inner.writer.run(work).await? {
                ControlFlow::Break(outcome) => break outcome,
                ControlFlow::Continue(config) => self.inner.recounts.wait(&config).await?,
            }
        };
        if is_dispatching {
            self.inner.topic_notify.notify(DUE_LEASE);
        }
        Ok(outcome)
    }

    async fn wait_for_recount(&self, config: &ConfigName) -> Result<()> {
        self.inner.recounts.wait(config).await
    }

    async fn windows(
        &self,
        config: &ConfigName,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<WindowCount>> {
        let config = config.clone();
        let list = move |connection: &Connection| {
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let mut statement = connection.prepare_cached(WINDOWS)?;
            statement
                .query_map(params![config.as_str(), from.as_micros(), to.as_micros(), limit], read_window)?
                .collect()
        };
        self.read(list).await
    }

    async fn slots(
        &self,
        config: &ConfigName,
        after: SlotPosition,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<Slot>> {
        let config = config.clone();
        let list = move |connection: &Connection| {
            let event = after.event.as_ref().map_or("", EventId::as_str);
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let values = params![config.as_str(), after.scheduled.as_micros(), event, to.as_micros(), limit];
            connection.prepare_cached(SLOTS)?.query_map(values, read_slot)?.collect()
        };
        self.read(list).await
    }

    async fn purge_slots(&self, keep: Duration, limit: usize) -> Result<u64> {
        let span = i64::try_from(keep.as_micros()).unwrap_or(i64::MAX);
        let before = Timestamp::from_micros(self.inner.clock.now().as_micros().saturating_sub(span));
        let configs = self.read(move |connection| retention::old_configs(connection, before)).await?;
        if configs.is_empty() {
            return Ok(0);
        }
        let recounts = Arc::clone(&self.inner.recounts);
        let mut job = retention::PurgeJob::new(configs, before, limit, self.is_dispatching, recounts);
        let work = move |connection: &Connection, _: &mut WriterState, turn: &WriterTurn| {
            job.run_turn(connection, turn)
        };
        self.inner.writer.run_in_turns(Scheduling::Interleaved, work).await
    }

    async fn audit_slots(&self) -> Result<SlotAudit> {
        let audit = |connection: &Connection| {
            let transaction = connection.unchecked_transaction()?;
            let (slots, counted, above_maximum) = totals(&transaction)?;
            Ok(SlotAudit { slots, counted, different: different(&transaction)?, above_maximum })
        };
        self.read(audit).await
    }
}

/// Some of the windows whose counters differ from their slots, and the number of those above their maximum.
pub(crate) fn differing_windows(connection: &Connection) -> rusqlite::Result<(Vec<String>, u64)> {
    Ok((different(connection)?, totals(connection)?.2))
}

fn different(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    connection.prepare(DIFFERENT)?.query_map([], |row| row.get(0))?.collect()
}

fn totals(connection: &Connection) -> rusqlite::Result<(u64, u64, u64)> {
    connection.query_row(TOTALS, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
}

fn find(connection: &Connection, event: &EventId) -> rusqlite::Result<Option<Slot>> {
    connection.prepare_cached(FIND)?.query_row([event.as_str()], read_slot).optional()
}

fn give_back(connection: &Connection, event: &EventId) -> rusqlite::Result<Option<Slot>> {
    let slot = connection.prepare_cached(DELETE)?.query_row([event.as_str()], read_slot).optional()?;
    if let Some(slot) = &slot {
        let values = params![slot.scheduled.as_micros(), event.as_str()];
        connection.prepare_cached(due::DELETE)?.execute(values)?;
        count_slots(connection, -1)?;
    }
    if let Some(slot) = &slot
        && let Some(config::ConfigVersion { config, generation }) = config::latest(connection, &slot.config)?
    {
        let window = config.pace.window_of(slot.scheduled).as_micros();
        let values = params![slot.config.as_str(), window, config.pace.max_per_window(), generation];
        connection.prepare_cached(SUBTRACT_SLOT)?.execute(values)?;
    }
    Ok(slot)
}

/// Frees the event's slot and assigns another one. The slot is unchanged if there is none.
fn move_to(connection: &Connection, assign: &Assign, is_dispatching: bool) -> rusqlite::Result<MoveOutcome> {
    connection.execute_batch("SAVEPOINT move_slot")?;
    give_back(connection, &assign.event)?;
    let outcome = assign::assign_chunk(connection, std::slice::from_ref(assign), is_dispatching)?.pop();
    let outcome = match outcome {
        Some(AssignOutcome::New(slot)) => MoveOutcome::Moved(slot),
        Some(AssignOutcome::UnknownConfig) => MoveOutcome::UnknownConfig(assign.config.clone()),
        _ => MoveOutcome::Exhausted,
    };
    if !matches!(outcome, MoveOutcome::Moved(_)) {
        connection.execute_batch("ROLLBACK TO move_slot")?;
    }
    connection.execute_batch("RELEASE move_slot")?;
    Ok(outcome)
}

fn read_slot(row: &Row<'_>) -> rusqlite::Result<Slot> {
    Ok(Slot {
        event: EventId::parse(row.get_ref(0)?.as_str()?).map_err(fault)?,
        config: ConfigName::parse(row.get_ref(1)?.as_str()?).map_err(fault)?,
        requested: Timestamp::from_micros(row.get(2)?),
        window_start: Timestamp::from_micros(row.get(3)?),
        scheduled: Timestamp::from_micros(row.get(4)?),
    })
}

fn read_window(row: &Row<'_>) -> rusqlite::Result<WindowCount> {
    let status = if row.get_ref(2)?.as_str()? == "OPEN" { WindowStatus::Open } else { WindowStatus::Closed };
    Ok(WindowCount { start: Timestamp::from_micros(row.get(0)?), count: row.get(1)?, status })
}

const fn status_text(status: WindowStatus) -> &'static str {
    match status {
        WindowStatus::Open => "OPEN",
        WindowStatus::Closed => "CLOSED",
    }
}
