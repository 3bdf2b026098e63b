//! Slots that are to be dispatched at their time. One process owns the file, so the dispatcher's lease is in memory.

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, params};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_queue::due::{DUE_LEASE, DispatchOutcome, DueSlots, DueStore, encode};
use weir_queue::{ClaimReceipt, MessageSource};
use weir_store::Result;
use weir_store::slot::Slot;

use crate::Sqlite;
use crate::error::fault;
use crate::queue::enqueue;

/// Slots scanned in one commit of [`DueStore::record_due`].
const PAGE: i64 = 1_000;

pub(super) const INSERT: &str = "INSERT INTO rate_limit_event_due (scheduled_time, event_id) VALUES (?1, ?2)";
pub(super) const DELETE: &str =
    "DELETE FROM rate_limit_event_due WHERE scheduled_time = ?1 AND event_id = ?2";
const PAGE_END: &str = "
    SELECT max(event_id) FROM (
        SELECT event_id FROM rate_limit_event_slot WHERE event_id > ?1 ORDER BY event_id LIMIT ?2)";
const INSERT_PAGE: &str = "
    INSERT INTO rate_limit_event_due (scheduled_time, event_id)
    SELECT scheduled_time, event_id FROM rate_limit_event_slot
    WHERE event_id > ?1 AND event_id <= ?2 AND scheduled_time > ?3
    ON CONFLICT DO NOTHING";
pub(super) const FIRST: &str = "SELECT min(scheduled_time) FROM rate_limit_event_due";
const LIST_DUE: &str = "
    SELECT due.scheduled_time, due.event_id, slot.config_name, slot.requested_time, slot.window_start
    FROM (SELECT * FROM rate_limit_event_due WHERE scheduled_time <= ?1
          ORDER BY scheduled_time, event_id LIMIT ?2) AS due
    LEFT JOIN rate_limit_event_slot AS slot
      ON slot.event_id = due.event_id AND slot.scheduled_time = due.scheduled_time
    ORDER BY due.scheduled_time, due.event_id";

#[async_trait]
impl DueStore for Sqlite {
    async fn record_due(&self, after: Option<&EventId>) -> Result<Option<EventId>> {
        let after = after.map(|event| event.as_str().to_owned()).unwrap_or_default();
        let now = self.inner.clock.now();
        self.inner.writer.run(move |connection| insert_page(connection, &after, now)).await
    }

    async fn claim_due(&self, max: usize, lease: Duration) -> Result<DueSlots> {
        let now = self.inner.clock.now();
        let Some(lease) = self.acquire_lease(DUE_LEASE, now, lease) else { return Ok(DueSlots::default()) };
        let receipt = ClaimReceipt { topic: DUE_LEASE.to_owned(), leases: vec![lease] };
        let due = self.read(move |connection| list_due(connection, max, now)).await;
        if !matches!(&due, Ok(due) if !due.is_empty()) {
            self.release_lease(&receipt);
        }
        Ok(DueSlots { receipt, ..due? })
    }

    async fn settle_due(&self, due: &DueSlots, dispatched: DispatchOutcome<'_>) -> Result<bool> {
        let topic = match dispatched {
            DispatchOutcome::Published(_) => None,
            DispatchOutcome::Enqueue(topic) => Some(topic.to_owned()),
        };
        let settle = {
            let (engine, due, topic) = (self.clone(), due.clone(), topic.clone());
            let done = match dispatched {
                DispatchOutcome::Published(count) => count.min(due.slots.len()),
                DispatchOutcome::Enqueue(_) => due.slots.len(),
            };
            move |connection: &Connection| {
                if !engine.holds_lease(&due.receipt, engine.inner.clock.now()) {
                    return Ok(false);
                }
                settle(connection, &due, done, topic.as_deref())?;
                Ok(true)
            }
        };
        let settled = self.inner.writer.run(settle).await?;
        if settled {
            self.release_lease(&due.receipt);
            topic.iter().for_each(|topic| self.inner.topic_notify.notify(topic));
        }
        Ok(settled)
    }

    async fn wait_due(&self, at_most: Duration) {
        self.wait(DUE_LEASE, at_most).await;
    }
}

fn insert_page(connection: &Connection, after: &str, now: Timestamp) -> rusqlite::Result<Option<EventId>> {
    let last: Option<String> =
        connection.prepare_cached(PAGE_END)?.query_row(params![after, PAGE], |row| row.get(0))?;
    let Some(last) = last else { return Ok(None) };
    connection.prepare_cached(INSERT_PAGE)?.execute(params![after, last, now.as_micros()])?;
    EventId::parse(&last).map(Some).map_err(fault)
}

fn list_due(connection: &Connection, max: usize, now: Timestamp) -> rusqlite::Result<DueSlots> {
    let mut due = DueSlots::default();
    let limit = i64::try_from(max).unwrap_or(i64::MAX);
    let mut statement = connection.prepare_cached(LIST_DUE)?;
    let mut rows = statement.query(params![now.as_micros(), limit])?;
    while let Some(row) = rows.next()? {
        let scheduled = Timestamp::from_micros(row.get(0)?);
        let event = EventId::parse(row.get_ref(1)?.as_str()?).map_err(fault)?;
        match row.get_ref(2)?.as_str_or_null()? {
            None => due.released.push((scheduled, event)),
            Some(config) => due.slots.push(Slot {
                event,
                config: ConfigName::parse(config).map_err(fault)?,
                requested: Timestamp::from_micros(row.get(3)?),
                window_start: Timestamp::from_micros(row.get(4)?),
                scheduled,
            }),
        }
    }
    if due.is_empty() {
        let first: Option<i64> = connection.prepare_cached(FIRST)?.query_row([], |row| row.get(0))?;
        due.next_due_in = first.map(|first| Timestamp::from_micros(first).since(now));
    }
    Ok(due)
}

fn settle(connection: &Connection, due: &DueSlots, done: usize, topic: Option<&str>) -> rusqlite::Result<()> {
    let slots = &due.slots[..done];
    let mut delete = connection.prepare_cached(DELETE)?;
    let published = slots.iter().map(|slot| (slot.scheduled, &slot.event));
    for (scheduled, event) in published.chain(due.released.iter().map(|(at, event)| (*at, event))) {
        delete.execute(params![scheduled.as_micros(), event.as_str()])?;
    }
    match topic {
        Some(topic) => {
            enqueue(connection, topic, slots.iter().map(|slot| (slot.config.as_str(), encode(slot))))
        }
        None => Ok(()),
    }
}
