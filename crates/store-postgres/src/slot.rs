//! Slot in Postgres: reads, configuration and release. `slot/assign.rs` assigns batches, `slot/retention.rs` deletes what is old.
//!
//! A batch holds a shared lock on each of its configs, so batches run concurrently. A change of a config locks it exclusively, so
//! that a pace never changes during a batch; so does a batch that finds all windows locked by others.

mod assign;
mod config;
mod config_locks;
mod due;
mod retention;

use std::time::Duration;

use async_trait::async_trait;
use tokio_postgres::Row;
use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_queue::due::DUE_LEASE;
use weir_store::slot::{
    Assign, AssignOutcome, MoveOutcome, Slot, SlotAudit, SlotConfig, SlotConfigVersion, SlotPosition,
    SlotStore, WindowCount,
};
use weir_store::{Batch, Error, Result};

pub(crate) use self::config_locks::ConfigLocks;
use crate::connection::Values;
use crate::pool::Session;
use crate::row::{self, column, int, timestamp, unreadable, unsigned};
use crate::{ENGINE, Postgres, time};

const FIND: &str = "
    SELECT event_id, config_name, requested_time, window_start, scheduled_time
    FROM rate_limit_event_slot WHERE event_id = ANY($1)";
/// Also deletes the record for dispatch, so that a released slot is not published.
const DELETE: &str = "
    WITH deleted AS (
        DELETE FROM rate_limit_event_slot WHERE event_id = $1 AND scheduled_time = $2
        RETURNING event_id, config_name, requested_time, window_start, scheduled_time),
    due_deleted AS (
        DELETE FROM rate_limit_event_due
        WHERE scheduled_time = (SELECT scheduled_time FROM deleted) AND event_id = (SELECT event_id FROM deleted))
    SELECT event_id, config_name, requested_time, window_start, scheduled_time FROM deleted";
const LOCK_WINDOW: &str = "
    SELECT FROM rate_limit_window_counter WHERE config_name = $1 AND window_start = $2 FOR UPDATE";
const DECREMENT: &str = "
    UPDATE rate_limit_window_counter
    SET slot_count = slot_count - 1, status = CASE WHEN slot_count - 1 < $3 THEN 'OPEN' ELSE 'CLOSED' END
    WHERE config_name = $1 AND window_start = $2";
const WINDOWS: &str = "
    SELECT window_start, slot_count, status FROM rate_limit_window_counter
    WHERE config_name = $1 AND window_start >= $2 AND window_start < $3 AND slot_count > 0
    ORDER BY window_start LIMIT $4";
/// No event is empty, so an empty one stands before all events of its time.
const SLOTS: &str = "
    SELECT event_id, config_name, requested_time, window_start, scheduled_time FROM rate_limit_event_slot
    WHERE config_name = $1 AND scheduled_time >= $2 AND (scheduled_time, event_id) > ($2, $3) AND scheduled_time < $4
    ORDER BY scheduled_time, event_id LIMIT $5";
pub(crate) const AUDIT: &str = "
    WITH pace AS (
        SELECT DISTINCT ON (config_name) config_name, max_per_window, window_size_ms * interval '1 ms' AS size
        FROM rate_limit_config ORDER BY config_name, version DESC)
    SELECT (SELECT count(*) FROM rate_limit_event_slot),
           (SELECT coalesce(sum(slot_count), 0)::bigint FROM rate_limit_window_counter),
           (SELECT count(*) FROM rate_limit_window_counter JOIN pace USING (config_name)
            WHERE slot_count > max_per_window),
           ARRAY(SELECT c.config_name || ' ' || c.window_start
                 FROM rate_limit_window_counter c JOIN pace USING (config_name)
                 WHERE slot_count <> (SELECT count(*) FROM rate_limit_event_slot s
                     WHERE s.config_name = c.config_name AND s.scheduled_time >= c.window_start
                       AND s.scheduled_time < c.window_start + pace.size)
                 LIMIT 10)";

#[async_trait]
impl SlotStore for Postgres {
    async fn put_config(&self, name: &ConfigName, pace: Pace) -> Result<SlotConfig> {
        config::put(self, name, pace).await
    }

    async fn config(&self, name: &ConfigName) -> Result<Option<SlotConfig>> {
        config::active(self, name).await
    }

    async fn configs(&self, after: Option<&ConfigName>, limit: usize) -> Result<Vec<SlotConfig>> {
        config::list(self, after, limit).await
    }

    async fn config_versions(
        &self,
        name: &ConfigName,
        before: Option<u32>,
        limit: usize,
    ) -> Result<Vec<SlotConfigVersion>> {
        config::versions(self, name, before, limit).await
    }

    async fn deactivate(&self, name: &ConfigName) -> Result<bool> {
        config::deactivate(self, name).await
    }

    async fn assign_batch(&self, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>> {
        let outcomes = assign::assign(self, batch).await?;
        if self.slots.is_dispatching {
            self.inner.topic_notify.notify(DUE_LEASE);
        }
        Ok(outcomes)
    }

    async fn find_slot(&self, event: &EventId) -> Result<Option<Slot>> {
        let row = self.inner.pool.query_opt(FIND, &[&[event.as_str()].as_slice()]).await?;
        row.as_ref().map(read_slot).transpose()
    }

    async fn release_slot(&self, event: &EventId) -> Result<Option<Slot>> {
        let session = self.inner.pool.session().await?;
        loop {
            let found = session.query_opt(FIND, &[&[event.as_str()].as_slice()]).await?;
            let Some(slot) = found.as_ref().map(read_slot).transpose()? else {
                session.keep();
                return Ok(None);
            };
            session.run("BEGIN").await?;
            // As for an assignment: the pace must not change before the counter is updated.
            assign::lock_configs_shared(&session, &[slot.config.as_str()]).await?;
            let config = config::latest(&session, &slot.config).await?;
            let config =
                config.ok_or_else(|| Error::failed(ENGINE, "a slot of a config that does not exist"))?;
            if free(&session, &slot, &config.pace).await? {
                session.run("COMMIT").await?;
                session.keep();
                return Ok(Some(slot));
            }
            // Another call has released or moved it meanwhile.
            session.run("ROLLBACK").await?;
        }
    }

    async fn move_slot(&self, event: &EventId, requested: Timestamp) -> Result<MoveOutcome> {
        let outcome = assign::move_slot(self, event, requested).await?;
        if self.slots.is_dispatching {
            self.inner.topic_notify.notify(DUE_LEASE);
        }
        Ok(outcome)
    }

    async fn windows(
        &self,
        config: &ConfigName,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<WindowCount>> {
        let (from, to) = (time::to_system(from), time::to_system(to));
        let values: Values<'_> = &[&config.as_str(), &from, &to, &row::bigint(limit)];
        let rows = self.inner.pool.query(WINDOWS, values).await?;
        rows.iter().map(read_window).collect()
    }

    async fn slots(
        &self,
        config: &ConfigName,
        after: SlotPosition,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<Slot>> {
        let (from, to) = (time::to_system(after.scheduled), time::to_system(to));
        let event = after.event.as_ref().map_or("", EventId::as_str);
        let values: Values<'_> = &[&config.as_str(), &from, &event, &to, &row::bigint(limit)];
        self.inner.pool.query(SLOTS, values).await?.iter().map(read_slot).collect()
    }

    async fn purge_slots(&self, keep: Duration, limit: usize) -> Result<u64> {
        retention::purge(self, keep, limit).await
    }

    async fn audit_slots(&self) -> Result<SlotAudit> {
        let row = self.inner.pool.query_one(AUDIT, &[]).await?;
        let count = |index| row::count(&row, index);
        Ok(SlotAudit {
            slots: count(0)?,
            counted: count(1)?,
            above_maximum: count(2)?,
            different: column(&row, 3)?,
        })
    }
}

/// Frees a slot. Returns `false` if it is not the event's slot any more. Everybody locks a window before the slots in it: a batch
/// that holds the window may be about to insert the same event, and would wait for its deletion.
async fn free(session: &Session, slot: &Slot, pace: &Pace) -> Result<bool> {
    let (config, window) = (slot.config.as_str(), time::to_system(pace.window_of(slot.scheduled)));
    session.query(LOCK_WINDOW, &[&config, &window]).await?;
    let values: Values<'_> = &[&slot.event.as_str(), &time::to_system(slot.scheduled)];
    let deleted = session.query_opt(DELETE, values).await?;
    if deleted.as_ref().map(read_slot).transpose()?.as_ref() != Some(slot) {
        return Ok(false);
    }
    session.execute(DECREMENT, &[&config, &window, &int(pace.max_per_window())]).await?;
    Ok(true)
}

fn read_slot(row: &Row) -> Result<Slot> {
    Ok(Slot {
        event: EventId::parse(column::<&str>(row, 0)?).map_err(unreadable)?,
        config: ConfigName::parse(column::<&str>(row, 1)?).map_err(unreadable)?,
        requested: timestamp(row, 2)?,
        window_start: timestamp(row, 3)?,
        scheduled: timestamp(row, 4)?,
    })
}

fn read_window(row: &Row) -> Result<WindowCount> {
    let status = read_status(column(row, 2)?);
    Ok(WindowCount { start: timestamp(row, 0)?, count: unsigned(column(row, 1)?), status })
}

fn read_status(text: &str) -> WindowStatus {
    if text == "OPEN" { WindowStatus::Open } else { WindowStatus::Closed }
}
