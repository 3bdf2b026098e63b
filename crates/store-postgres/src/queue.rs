//! The table queue in Postgres. A claim leases whole shards, so that claiming a message does not write to its row, and two
//! holders never have messages of one key. Messages that are enqueued together are stored as one row ([`pack`]).

mod columns;
mod merge;
pub(crate) mod pack;

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures_util::future::{try_join, try_join3, try_join5};
use tokio_postgres::Row;
use weir_core::MessageId;
use weir_queue::{
    ClaimReceipt, DeadLetter, Message, MessageClaim, MessageSource, Position, Queue, QueueAudit, Settlement,
    ShardLease,
};
use weir_store::Result;
use weir_store::quota::random_bytes;

use crate::connection::Values;
use crate::pool::Session;
use crate::row::{self, column, timestamp, unsigned};
use crate::{Inner, Postgres, time};
use columns::SettlementColumns;
use merge::ClaimLimits;
use pack::Pack;

/// Shards of a topic: the most claims at the same time. A message's shard is stored with it, so this never changes.
pub(crate) const SHARDS: u16 = 16;
/// The most shards of one claim, so that a second server finds free ones.
const SHARDS_PER_CLAIM: i64 = 8;

const CREATE_SHARDS: &str = "
    INSERT INTO queue_shard (topic, shard)
    SELECT $1, generate_series(0, 15)::smallint
    WHERE NOT EXISTS (SELECT FROM queue_shard WHERE topic = $1)
      AND (EXISTS (SELECT FROM queue_message WHERE topic = $1) OR EXISTS (SELECT FROM queue_pack WHERE topic = $1))
    ON CONFLICT DO NOTHING";
/// The lock is weaker than a settlement's, so that a claim does not skip shards that [`LOCK_SHARDS`] has locked.
const LEASE: &str = "
    WITH free AS (
        SELECT topic, shard FROM queue_shard AS candidate
        WHERE topic = $1
          AND (leased_until <= coalesce($3, clock_timestamp())
            OR leased_at > coalesce($3, clock_timestamp()) + interval '1 second') -- the clock was set back since
          AND (EXISTS (
              SELECT FROM queue_pack AS pack WHERE pack.topic = candidate.topic AND pack.shard = candidate.shard)
            OR EXISTS (
              SELECT FROM queue_message AS message
              WHERE message.topic = candidate.topic AND message.shard = candidate.shard
                AND (message.delayed_until IS NULL OR message.delayed_until <= coalesce($3, clock_timestamp()))))
        ORDER BY leased_until, shard LIMIT $4
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE queue_shard AS leased
    SET token = leased.token + 1, leased_at = coalesce($3, clock_timestamp()),
        leased_until = coalesce($3, clock_timestamp()) + $2::bigint * interval '1 microsecond'
    FROM free WHERE leased.topic = $1 AND leased.shard = ANY(ARRAY[free.shard])
    RETURNING leased.shard, leased.token";
const VISIBLE: &str = "
    SELECT message.shard, message.id, message.key, message.payload, message.attempts
    FROM unnest($2::smallint[], $3::bigint[]) AS leased (shard, after)
    CROSS JOIN LATERAL (
        SELECT * FROM queue_message AS candidate
        WHERE candidate.topic = $1 AND candidate.shard = leased.shard AND candidate.id > leased.after
          AND (candidate.delayed_until IS NULL OR candidate.delayed_until <= coalesce($5, now()))
          AND NOT EXISTS (
              SELECT FROM queue_message AS before
              WHERE before.topic = candidate.topic AND before.shard = candidate.shard
                AND before.key = candidate.key AND before.id < candidate.id
                AND before.delayed_until > coalesce($5, now()))
        ORDER BY candidate.id LIMIT $4
    ) AS message
    ORDER BY message.shard, message.id";
/// Checks the fencing tokens of a claim and locks its shards: a lease that has expired or that another process has taken over
/// settles nothing.
pub(crate) const LOCK_LEASES: &str = "
    SELECT locked.shard
    FROM (SELECT * FROM unnest($2::smallint[], $3::bigint[]) AS own_lease (shard, token) ORDER BY shard OFFSET 0) AS own_lease
    CROSS JOIN LATERAL (
        SELECT shard FROM queue_shard
        WHERE topic = $1 AND shard = own_lease.shard AND token = own_lease.token
          AND leased_until > coalesce($4, clock_timestamp())
        FOR UPDATE) AS locked";
/// Blocks settlements by lease in these shards until the commit. Locks in order, as [`LOCK_LEASES`] does.
const LOCK_SHARDS: &str = "
    SELECT locked.shard
    FROM (SELECT DISTINCT shard FROM unnest($2::smallint[]) AS requested (shard) ORDER BY shard OFFSET 0) AS requested
    CROSS JOIN LATERAL (
        SELECT shard FROM queue_shard WHERE topic = $1 AND shard = requested.shard FOR KEY SHARE) AS locked";
const LOCK_MESSAGES: &str = "
    SELECT message.shard, message.id
    FROM unnest($2::smallint[], $3::bigint[]) AS requested (shard, id)
    CROSS JOIN LATERAL (
        SELECT shard, id FROM queue_message WHERE topic = $1 AND shard = requested.shard AND id = requested.id
        FOR UPDATE SKIP LOCKED) AS message";
/// The caller has locked either the messages or their shards, so looking messages up one by one (see `query_plan_tests.rs`)
/// sees no change.
const DELAY: &str = "
    UPDATE queue_message AS message
    SET attempts = message.attempts + retry.attempts, delayed_at = coalesce($6, clock_timestamp()),
        delayed_until = coalesce($6, clock_timestamp()) + retry.delay * interval '1 microsecond'
    FROM unnest($2::smallint[], $3::bigint[], $4::bigint[], $5::integer[]) AS retry (shard, id, delay, attempts)
    CROSS JOIN LATERAL (
        SELECT ctid AS row_id FROM queue_message WHERE topic = $1 AND shard = retry.shard AND id = retry.id OFFSET 0) AS found
    WHERE message.ctid = found.row_id";
const BURY: &str = "
    WITH deleted AS (
        DELETE FROM queue_message AS message
        USING unnest($2::smallint[], $3::bigint[], $4::text[], $5::text[]) AS dead (shard, id, letter, reason)
        CROSS JOIN LATERAL (
            SELECT ctid AS row_id FROM queue_message WHERE topic = $1 AND shard = dead.shard AND id = dead.id OFFSET 0) AS found
        WHERE message.ctid = found.row_id
        RETURNING dead.letter, message.topic, message.shard, message.id, message.key, message.payload,
                  dead.reason, message.attempts + 1
    )
    INSERT INTO dead_letter (id, topic, shard, message_id, key, payload, reason, attempts, died_at)
    SELECT deleted.*, coalesce($6, clock_timestamp()) FROM deleted";
pub(crate) const RELEASE: &str = "
    UPDATE queue_shard SET leased_until = coalesce($3, clock_timestamp())
    WHERE topic = $1 AND shard = ANY($2)";
const FINISH: &str = "
    WITH deleted AS (
        DELETE FROM queue_message WHERE ctid = ANY(ARRAY(
            SELECT row_id FROM unnest($3::smallint[], $4::bigint[]) AS done (shard, id)
            CROSS JOIN LATERAL (
                SELECT ctid AS row_id FROM queue_message
                WHERE topic = $1 AND shard = done.shard AND id = done.id OFFSET 0) AS found))
        RETURNING 1
    )
    INSERT INTO queue_ledger (topic, slot, done) SELECT $1, $2, count(*) + $5::bigint FROM deleted
    ON CONFLICT (topic, slot) DO UPDATE SET done = queue_ledger.done + excluded.done";
const DEAD_LETTERS: &str = "
    SELECT id, topic, key, substr(payload, 1, $3), substr(reason, 1, $3), attempts, died_at
    FROM dead_letter WHERE id > $1 ORDER BY id LIMIT $2";
const REPLAY: &str = "
    WITH replayed AS (
        DELETE FROM dead_letter WHERE $1::text IS NULL OR id = $1
        RETURNING topic, shard, message_id, key, payload
    )
    INSERT INTO queue_message (topic, shard, id, key, payload) SELECT * FROM replayed RETURNING topic";
const DISCARD: &str = "
    WITH deleted AS (DELETE FROM dead_letter WHERE id = $1 RETURNING topic)
    INSERT INTO queue_ledger (topic, slot, discarded) SELECT topic, $2, 1 FROM deleted
    ON CONFLICT (topic, slot) DO UPDATE SET discarded = queue_ledger.discarded + 1";
const COUNT_DEAD: &str = "
    SELECT count(*) FROM (SELECT FROM dead_letter WHERE topic = $1 ORDER BY topic LIMIT $2) AS letter";
const BOOKS: &str = "
    SELECT coalesce(sum(accepted), 0)::bigint, coalesce(sum(done), 0)::bigint, coalesce(sum(discarded), 0)::bigint,
           (SELECT count(*) FROM dead_letter WHERE topic = $1),
           (SELECT count(*) FROM queue_message WHERE topic = $1)
               + (SELECT coalesce(sum(count), 0)::bigint FROM queue_pack WHERE topic = $1)
    FROM queue_ledger WHERE topic = $1";

#[async_trait]
impl MessageSource for Postgres {
    async fn claim(&self, topic: &str, max: usize, visibility: Duration) -> Result<MessageClaim> {
        let leases = self.lease(topic, max, visibility).await?;
        if leases.is_empty() {
            return Ok(MessageClaim::default());
        }
        let receipt = ClaimReceipt { topic: topic.to_owned(), leases };
        let messages = self.visible(&receipt, max).await?;
        if messages.is_empty() {
            // Every message of the shards waits for an earlier delayed one of its key. Other servers may claim at once.
            self.settle(&receipt, Settlement::default()).await?;
            return Ok(MessageClaim::default());
        }
        let receipt = self.release_unused(receipt, &messages).await?;
        Ok(MessageClaim { messages, receipt })
    }

    async fn settle(&self, receipt: &ClaimReceipt, settlement: Settlement) -> Result<bool> {
        let session = self.inner.pool.session().await?;
        let (topic, now) = (receipt.topic.as_str(), self.clock_override());
        let (shards, tokens): (Vec<i16>, Vec<i64>) =
            receipt.leases.iter().map(|lease| (lease.shard.cast_signed(), lease.token)).unzip();
        let [lock] = session.prepare([LOCK_LEASES]).await?;
        let (_, locked) = session
            .bounded(try_join(session.batch_execute("BEGIN"), lock.query(&[&topic, &shards, &tokens, &now])))
            .await?;
        let held: Vec<i16> = locked.iter().map(|row| column(row, 0)).collect::<Result<_>>()?;
        let is_ours = |position: Position| held.contains(&position.shard.cast_signed());
        let mut columns = SettlementColumns::new(settlement, is_ours, || dead_letter_id(now));
        let packed = if columns.is_empty() { 0 } else { pack::settle(&session, topic, &mut columns).await? };
        save(&session, topic, &columns, packed, &held, now).await?;
        session.keep();
        Ok(held.len() == receipt.leases.len())
    }

    async fn wait(&self, topic: &str, at_most: Duration) {
        self.inner.topic_notify.wait(topic, at_most).await;
    }
}

#[async_trait]
impl Queue for Postgres {
    async fn dead_letters(
        &self,
        after: Option<&str>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadLetter>> {
        let after = storable(after.unwrap_or_default());
        // Values in Postgres are never longer.
        let payload_max = i32::try_from(payload_max).unwrap_or(i32::MAX - 1);
        let values: Values<'_> = &[&after, &row::bigint(limit), &payload_max];
        let rows = self.inner.pool.query(DEAD_LETTERS, values).await?;
        rows.iter().map(read_dead_letter).collect()
    }

    /// The caller has no lease, so others may work on the same messages. A server that has claimed them since, because the delay
    /// was too short, settles them by its lease: the locks of the shards serialize the two. Another server that settles without a
    /// lease, too, gets the messages that this one has not locked; neither waits for the other, which might deadlock. A claim only
    /// reads messages, and its locks are compatible with these.
    async fn settle_deferred(&self, topic: &str, settlement: Settlement) -> Result<()> {
        let session = self.inner.pool.session().await?;
        let now = self.clock_override();
        let [lock_shards, lock_messages] = session.prepare([LOCK_SHARDS, LOCK_MESSAGES]).await?;
        let (shards, ids): (Vec<i16>, Vec<i64>) =
            settlement.positions().map(|position| (position.shard.cast_signed(), position.id)).unzip();
        let (_, _, locked) = session
            .bounded(try_join3(
                session.batch_execute("BEGIN"),
                lock_shards.query(&[&topic, &shards]),
                lock_messages.query(&[&topic, &shards, &ids]),
            ))
            .await?;
        let locked = locked.iter().map(|row| Ok((column(row, 0)?, column(row, 1)?)));
        let locked = locked.collect::<Result<HashSet<(i16, i64)>>>()?;
        let is_ours = |position: Position| locked.contains(&(position.shard.cast_signed(), position.id));
        let columns = SettlementColumns::new(settlement, is_ours, || dead_letter_id(now));
        // A deferred message is a row of its own, never in a pack.
        save(&session, topic, &columns, 0, &[], now).await?;
        session.keep();
        Ok(())
    }

    async fn replay(&self, id: &str) -> Result<bool> {
        Ok(self.replay_some(Some(storable(id))).await? > 0)
    }

    async fn replay_all(&self) -> Result<u64> {
        self.replay_some(None).await
    }

    async fn discard(&self, id: &str) -> Result<bool> {
        let session = self.inner.pool.session().await?;
        let discarded = session.execute(DISCARD, &[&storable(id), &session.ledger_row]).await?;
        session.keep();
        Ok(discarded > 0)
    }

    async fn count_dead_letters(&self, topic: &str, limit: usize) -> Result<u64> {
        let row = self.inner.pool.query_one(COUNT_DEAD, &[&topic, &row::bigint(limit)]).await?;
        row::count(&row, 0)
    }

    async fn audit(&self, topic: &str) -> Result<QueueAudit> {
        let row = self.inner.pool.query_one(BOOKS, &[&topic]).await?;
        let count = |index| row::count(&row, index);
        Ok(QueueAudit {
            accepted: count(0)?,
            done: count(1)?,
            discarded: count(2)?,
            dead: count(3)?,
            in_flight: count(4)?,
        })
    }
}

impl Inner {
    /// Returns the average number of messages per pack in the last claim.
    fn pack_size(&self) -> usize {
        self.pack_size.load(Ordering::Relaxed).max(1)
    }

    fn update_pack_size(&self, packs: &[Pack]) {
        let messages: usize = packs.iter().map(|pack| pack.messages.len()).sum();
        if let Some(size) = messages.checked_div(packs.len()) {
            self.pack_size.store(size, Ordering::Relaxed);
        }
    }
}

impl Postgres {
    /// Leases some free shards that have messages to claim.
    async fn lease(&self, topic: &str, max: usize, visibility: Duration) -> Result<Vec<ShardLease>> {
        let session = self.inner.pool.session().await?;
        let [create_shards, lease] = session.prepare([CREATE_SHARDS, LEASE]).await?;
        let (now, micros) = (self.clock_override(), time::micros(visibility));
        let shards = row::bigint(max).min(SHARDS_PER_CLAIM);
        let (_, rows) = session
            .bounded(try_join(
                create_shards.execute(&[&topic]),
                lease.query(&[&topic, &micros, &now, &shards]),
            ))
            .await?;
        session.keep();
        rows.iter()
            .map(|row| {
                let shard: i16 = column(row, 0)?;
                Ok(ShardLease { shard: shard.cast_unsigned(), token: column(row, 1)? })
            })
            .collect()
    }

    /// Releases the leased shards of which the claim has no message.
    async fn release_unused(&self, receipt: ClaimReceipt, messages: &[Message]) -> Result<ClaimReceipt> {
        let is_used =
            |lease: &ShardLease| messages.iter().any(|message| message.position.shard == lease.shard);
        let ClaimReceipt { topic, leases } = receipt;
        let (used, unused): (Vec<ShardLease>, Vec<ShardLease>) = leases.into_iter().partition(is_used);
        if !unused.is_empty() {
            let unused = ClaimReceipt { topic: topic.clone(), leases: unused };
            self.settle(&unused, Settlement::default()).await?;
        }
        Ok(ClaimReceipt { topic, leases: used })
    }

    /// Reads the messages of leased shards in a transaction of its own, so that it sees everything the last holder has settled,
    /// and from one snapshot. If rows were read before packs, a message in a row could be missed and the next of its key found in
    /// a pack. Every shard gives an equal share; shards with more messages then fill the rest.
    async fn visible(&self, receipt: &ClaimReceipt, max: usize) -> Result<Vec<Message>> {
        let session = self.inner.pool.session().await?;
        let (topic, now) = (receipt.topic.as_str(), self.clock_override());
        let [visible, next_packs] = session.prepare([VISIBLE, pack::NEXT]).await?;
        let mut cursors: Vec<(i16, i64)> =
            receipt.leases.iter().map(|lease| (lease.shard.cast_signed(), i64::MIN)).collect();
        let mut messages: Vec<Message> = Vec::new();
        session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        while messages.len() < max && !cursors.is_empty() {
            let share = ((max - messages.len()) / cursors.len()).max(1);
            let limits = ClaimLimits { messages: share, packs: (share / self.inner.pack_size()).max(1) };
            let (shards, after): (Vec<i16>, Vec<i64>) = cursors.iter().copied().unzip();
            let [rows, packs] = [limits.messages, limits.packs].map(row::bigint);
            let (rows, packs) = session
                .bounded(try_join(
                    visible.query(&[&topic, &shards, &after, &rows, &now]),
                    next_packs.query(&[&topic, &shards, &after, &packs]),
                ))
                .await?;
            let rows = rows.iter().map(read_message).collect::<Result<Vec<_>>>()?;
            let mut packs = packs.iter().map(Pack::read).collect::<Result<Vec<_>>>()?;
            self.inner.update_pack_size(&packs);
            pack::remove_held_back(&session, topic, &mut packs, now).await?;
            cursors = limits.merge(&cursors, rows, packs, &mut messages);
        }
        session.run("COMMIT").await?;
        session.keep();
        messages.truncate(max);
        Ok(messages)
    }

    async fn replay_some(&self, id: Option<&str>) -> Result<u64> {
        let rows = self.inner.pool.query(REPLAY, &[&id]).await?;
        for row in &rows {
            self.inner.topic_notify.notify(column(row, 0)?);
        }
        Ok(rows.len() as u64)
    }
}

/// Saves a settlement, releases the `held` shards, and commits.
async fn save(
    session: &Session,
    topic: &str,
    columns: &SettlementColumns,
    packed: i64,
    held: &[i16],
    now: Option<SystemTime>,
) -> Result<()> {
    let [delay, bury, release, finish] = session.prepare([DELAY, BURY, RELEASE, FINISH]).await?;
    let SettlementColumns { done, retry, dead } = columns;
    session
        .bounded(try_join5(
            delay.execute(&[&topic, &retry.0, &retry.1, &retry.2, &retry.3, &now]),
            bury.execute(&[&topic, &dead.0, &dead.1, &dead.2, &dead.3, &now]),
            release.execute(&[&topic, &held, &now]),
            // The ledger row is locked last: see `quota::save`.
            finish.execute(&[&topic, &session.ledger_row, &done.0, &done.1, &packed]),
            session.batch_execute("COMMIT"),
        ))
        .await
        .map(drop)
}

fn dead_letter_id(now: Option<SystemTime>) -> MessageId {
    MessageId::new(time::from_system(now.unwrap_or_else(SystemTime::now)), random_bytes())
}

/// Cuts a text at the first NUL, which Postgres cannot store. No id of Weir contains one, so a text that was cut matches nothing.
fn storable(text: &str) -> &str {
    text.split('\0').next().unwrap_or_default()
}

fn read_message(row: &Row) -> Result<Message> {
    let shard: i16 = column(row, 0)?;
    Ok(Message {
        position: Position { shard: shard.cast_unsigned(), id: column(row, 1)? },
        key: column(row, 2)?,
        payload: column(row, 3)?,
        attempts: unsigned(column(row, 4)?),
        trace: None,
    })
}

fn read_dead_letter(row: &Row) -> Result<DeadLetter> {
    Ok(DeadLetter {
        id: column(row, 0)?,
        topic: column(row, 1)?,
        key: column(row, 2)?,
        payload: column(row, 3)?,
        reason: column(row, 4)?,
        attempts: unsigned(column(row, 5)?),
        died_at: timestamp(row, 6)?,
    })
}
