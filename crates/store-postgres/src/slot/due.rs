//! Slots recorded for dispatch. The dispatcher holds a lease, like that of a topic's shard, so that one server at a time
//! publishes and slots stay in order of time.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures_util::future::try_join;
use tokio_postgres::Row;
use weir_core::{ConfigName, EventId, Timestamp};
use weir_queue::due::{DUE_LEASE, DispatchOutcome, DueSlots, DueStore, encode};
use weir_queue::{ClaimReceipt, MessageSource, ShardLease};
use weir_store::Result;
use weir_store::slot::Slot;

use crate::pool::Session;
use crate::queue::{LOCK_LEASES, RELEASE, SHARDS};
use crate::row::{self, column, timestamp, unreadable};
use crate::{Postgres, quota, time};

/// Slots per commit of [`DueStore::record_due`].
const PAGE: i64 = 5_000;

const RECORD_PAGE: &str = "
    WITH page AS (
        SELECT event_id, scheduled_time FROM rate_limit_event_slot
        WHERE event_id > $1 ORDER BY event_id LIMIT $2),
    due AS (
        INSERT INTO rate_limit_event_due (scheduled_time, event_id)
        SELECT scheduled_time, event_id FROM page WHERE scheduled_time > coalesce($3, clock_timestamp())
        ON CONFLICT DO NOTHING)
    SELECT max(event_id) FROM page";
/// Microseconds until the first recorded slot is due: negative if it is overdue.
const FIRST: &str = "
    SELECT (extract(epoch FROM scheduled_time - coalesce($1, clock_timestamp())) * 1000000)::bigint
    FROM rate_limit_event_due ORDER BY scheduled_time, event_id LIMIT 1";
const LEASE: &str = "
    INSERT INTO queue_shard AS lease (topic, shard, token, leased_at, leased_until)
    VALUES ($1, 0, 1, coalesce($3, clock_timestamp()),
            coalesce($3, clock_timestamp()) + $2::bigint * interval '1 microsecond')
    ON CONFLICT (topic, shard) DO UPDATE
    SET token = lease.token + 1, leased_at = excluded.leased_at, leased_until = excluded.leased_until
    WHERE lease.leased_until <= coalesce($3, clock_timestamp())
       OR lease.leased_at > coalesce($3, clock_timestamp()) + interval '1 second' -- the clock was set back since
    RETURNING token";
const TAKE: &str = "
    SELECT due.scheduled_time, due.event_id, slot.config_name, slot.requested_time, slot.window_start
    FROM (SELECT * FROM rate_limit_event_due WHERE scheduled_time <= coalesce($2, clock_timestamp())
          ORDER BY scheduled_time, event_id LIMIT $1) AS due
    LEFT JOIN LATERAL (
        SELECT * FROM rate_limit_event_slot
        WHERE event_id = due.event_id AND scheduled_time = due.scheduled_time OFFSET 0) AS slot ON true
    ORDER BY due.scheduled_time, due.event_id";
const DELETE: &str = "
    DELETE FROM rate_limit_event_due WHERE ctid = ANY(ARRAY(
        SELECT row_id FROM unnest($1::timestamptz[], $2::text[]) AS deleted (at, event_id)
        CROSS JOIN LATERAL (
            SELECT ctid AS row_id FROM rate_limit_event_due
            WHERE scheduled_time = deleted.at AND event_id = deleted.event_id OFFSET 0) AS found))";

#[async_trait]
impl DueStore for Postgres {
    async fn record_due(&self, after: Option<&EventId>) -> Result<Option<EventId>> {
        let (after, now) = (after.map_or("", EventId::as_str), self.clock_override());
        let row = self.inner.pool.query_one(RECORD_PAGE, &[&after, &PAGE, &now]).await?;
        let last: Option<&str> = column(&row, 0)?;
        last.map(|last| EventId::parse(last).map_err(unreadable)).transpose()
    }

    async fn claim_due(&self, max: usize, lease: Duration) -> Result<DueSlots> {
        let session = self.inner.pool.session().await?;
        let now = self.clock_override();
        let first = session.query_opt(FIRST, &[&now]).await?;
        let first: Option<i64> = first.as_ref().map(|row| column(row, 0)).transpose()?;
        // Nothing is written while nothing is due.
        if first.is_none_or(|micros| micros > 0) {
            session.keep();
            let next = first.map(|micros| Duration::from_micros(micros.unsigned_abs()));
            return Ok(DueSlots { next_due_in: next, ..DueSlots::default() });
        }
        let lease_row = session.query_opt(LEASE, &[&DUE_LEASE, &time::micros(lease), &now]).await?;
        let Some(lease_row) = lease_row else {
            session.keep();
            return Ok(DueSlots::default());
        };
        let leases = vec![ShardLease { shard: 0, token: column(&lease_row, 0)? }];
        let rows = session.query(TAKE, &[&row::bigint(max), &now]).await?;
        session.keep();
        let mut due =
            DueSlots { receipt: ClaimReceipt { topic: DUE_LEASE.to_owned(), leases }, ..DueSlots::default() };
        for row in &rows {
            read_due(row, &mut due)?;
        }
        if due.is_empty() {
            // Another server was faster. The lease is released at once.
            self.settle_due(&due, DispatchOutcome::Published(0)).await?;
        }
        Ok(due)
    }

    async fn settle_due(&self, due: &DueSlots, dispatched: DispatchOutcome<'_>) -> Result<bool> {
        let session = self.inner.pool.session().await?;
        let now = self.clock_override();
        let [lock] = session.prepare([LOCK_LEASES]).await?;
        let tokens: Vec<i64> = due.receipt.leases.iter().map(|lease| lease.token).collect();
        let (_, held) = session
            .bounded(try_join(
                session.batch_execute("BEGIN"),
                lock.query(&[&DUE_LEASE, &vec![0_i16; tokens.len()], &tokens, &now]),
            ))
            .await?;
        let is_held = !held.is_empty();
        if is_held {
            let (slots, topic) = match dispatched {
                DispatchOutcome::Published(count) => (&due.slots[..count.min(due.slots.len())], None),
                DispatchOutcome::Enqueue(topic) => (&due.slots[..], Some(topic)),
            };
            delete_recorded(&session, slots, &due.released).await?;
            session.execute(RELEASE, &[&DUE_LEASE, &[0_i16].as_slice(), &now]).await?;
            if let Some(topic) = topic {
                enqueue(&session, topic, slots).await?;
            }
        }
        session.run("COMMIT").await?;
        session.keep();
        if let (true, DispatchOutcome::Enqueue(topic)) = (is_held, dispatched) {
            self.inner.topic_notify.notify(topic);
        }
        Ok(is_held)
    }

    async fn wait_due(&self, at_most: Duration) {
        self.wait(DUE_LEASE, at_most).await;
    }
}

fn read_due(row: &Row, due: &mut DueSlots) -> Result<()> {
    let scheduled = timestamp(row, 0)?;
    let event = EventId::parse(column::<&str>(row, 1)?).map_err(unreadable)?;
    match column::<Option<&str>>(row, 2)? {
        None => due.released.push((scheduled, event)),
        Some(config) => due.slots.push(Slot {
            event,
            config: ConfigName::parse(config).map_err(unreadable)?,
            requested: timestamp(row, 3)?,
            window_start: timestamp(row, 4)?,
            scheduled,
        }),
    }
    Ok(())
}

async fn delete_recorded(session: &Session, slots: &[Slot], released: &[(Timestamp, EventId)]) -> Result<()> {
    let recorded = slots.iter().map(|slot| (slot.scheduled, &slot.event));
    let recorded = recorded.chain(released.iter().map(|(at, event)| (*at, event)));
    let (times, events): (Vec<SystemTime>, Vec<&str>) =
        recorded.map(|(at, event)| (time::to_system(at), event.as_str())).unzip();
    session.execute(DELETE, &[&times, &events]).await.map(drop)
}

/// Locks the ledger row last: see `quota::save`.
async fn enqueue(session: &Session, topic: &str, slots: &[Slot]) -> Result<()> {
    let shards: Vec<i16> =
        slots.iter().map(|slot| weir_store::shard::of(slot.config.as_str(), SHARDS).cast_signed()).collect();
    let keys: Vec<&str> = slots.iter().map(|slot| slot.config.as_str()).collect();
    let payloads: Vec<Vec<u8>> = slots.iter().map(encode).collect();
    let [enqueue, count_accepted] = session.prepare([quota::ENQUEUE, quota::COUNT_ACCEPTED]).await?;
    session
        .bounded(try_join(
            enqueue.execute(&[&topic, &shards, &keys, &payloads]),
            count_accepted.execute(&[&topic, &session.ledger_row, &row::bigint(slots.len())]),
        ))
        .await
        .map(drop)
}
