//! The table queue in SQLite. Leases of topics are in memory, since one process owns the file. Messages that are enqueued
//! together are stored as one row ([`pack`]).

mod pack;

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::ControlFlow;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use weir_core::{MessageId, Timestamp};
use weir_queue::{
    ClaimReceipt, DeadLetter, Message, MessageClaim, MessageSource, Position, Queue, QueueAudit, Settlement,
    ShardLease,
};
use weir_store::Result;
use weir_store::clock::STEP_MIN;
use weir_store::quota::random_bytes;

use crate::Sqlite;
use crate::writer::{Scheduling, WriterTurn};

/// Every topic has one shard: with one process there is one claim at a time.
const SHARD: u16 = 0;

/// The smallest number of messages that is stored as a pack. Fewer become rows, which a person can read.
const PACK_MIN: usize = 4;

/// Messages settled between two checks of the turn.
const SETTLE_CHUNK: usize = 512;
/// Dead letters replayed between two checks of the turn. Each may be large.
const REPLAY_CHUNK: usize = 16;

const RESERVE_IDS: &str = "
    INSERT INTO queue_ledger (topic, accepted) VALUES (?1, ?2)
    ON CONFLICT (topic) DO UPDATE SET accepted = accepted + excluded.accepted
    RETURNING accepted";
const INSERT: &str = "INSERT INTO queue_message (topic, id, key, payload) VALUES (?1, ?2, ?3, ?4)";
/// With the cast, a payload that was inserted by hand as text is readable, too. Otherwise it would stop the queue.
const SCAN: &str = "
    SELECT id, key, CAST(payload AS BLOB), attempts, delayed_until FROM queue_message WHERE topic = ?1 ORDER BY id";
const PACKS: &str = "SELECT first_id, messages FROM queue_pack WHERE topic = ?1 ORDER BY first_id";
const DELETE: &str = "DELETE FROM queue_message WHERE topic = ?1 AND id BETWEEN ?2 AND ?3";
const COUNT_DONE: &str = "UPDATE queue_ledger SET done = done + ?2 WHERE topic = ?1";
const DELAY: &str = "
    UPDATE queue_message SET attempts = attempts + ?4, delayed_until = ?3, delayed_at = ?5
    WHERE topic = ?1 AND id = ?2";
const MOVE_TO_DEAD: &str = "
    INSERT INTO dead_letter (id, topic, message_id, key, payload, reason, attempts, died_at)
    SELECT ?3, topic, id, key, payload, ?4, attempts + 1, ?5 FROM queue_message WHERE topic = ?1 AND id = ?2";
const DEAD_EXISTS: &str = "SELECT 1 FROM dead_letter WHERE id = ?1";
const INSERT_DEAD: &str = "
    INSERT INTO dead_letter (id, topic, message_id, key, payload, reason, attempts, died_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
const DEAD_LETTERS: &str = "
    SELECT id, topic, key, substr(CAST(payload AS BLOB), 1, ?3), substr(reason, 1, ?3), attempts, died_at
    FROM dead_letter WHERE id > ?1 ORDER BY id LIMIT ?2";
const MOVE_TO_MESSAGES: &str = "
    INSERT INTO queue_message (topic, id, key, payload)
    SELECT topic, message_id, key, payload FROM dead_letter WHERE id = ?1";
const LAST_DEAD_ID: &str = "SELECT max(id) FROM dead_letter";
const DEAD_IDS: &str = "SELECT id FROM dead_letter WHERE id <= ?1 ORDER BY id LIMIT ?2";
const DELETE_DEAD: &str = "DELETE FROM dead_letter WHERE id = ?1 RETURNING topic";
const COUNT_DISCARDED: &str = "UPDATE queue_ledger SET discarded = discarded + 1 WHERE topic = ?1";
const COUNT_DEAD: &str =
    "SELECT count(*) FROM (SELECT 1 FROM dead_letter WHERE topic = ?1 ORDER BY topic LIMIT ?2)";
const AUDIT: &str = "
    SELECT coalesce(sum(accepted), 0), coalesce(sum(done), 0), coalesce(sum(discarded), 0),
           (SELECT count(*) FROM dead_letter WHERE topic = ?1),
           (SELECT count(*) FROM queue_message WHERE topic = ?1)
               + (SELECT coalesce(sum(count), 0) FROM queue_pack WHERE topic = ?1)
    FROM queue_ledger WHERE topic = ?1";

/// Topics with a lease in memory. Operators may claim topics of any name. When there are this many, expired leases make
/// room; while none has expired, no further topic is leased.
const LEASES_MAX: usize = 1_024;

/// Leases by topic.
pub(crate) type Leases = HashMap<String, TopicLease>;

/// The last lease of a topic.
#[derive(Debug)]
pub(crate) struct TopicLease {
    token: i64,
    /// When it was granted. If this is more than [`STEP_MIN`] in the future, the clock was set back since, and the lease
    /// counts as expired.
    granted_at: Timestamp,
    expires_at: Timestamp,
}

/// Appends messages within the current transaction. The ledger's count of accepted messages is also the last id.
pub(crate) fn enqueue<'a>(
    connection: &Connection,
    topic: &str,
    messages: impl ExactSizeIterator<Item = (&'a str, Vec<u8>)>,
) -> rusqlite::Result<()> {
    let count = i64::try_from(messages.len()).unwrap_or(i64::MAX);
    if count == 0 {
        return Ok(());
    }
    let last: i64 =
        connection.prepare_cached(RESERVE_IDS)?.query_row(params![topic, count], |row| row.get(0))?;
    let messages: Vec<(i64, (&str, Vec<u8>))> = (last - count + 1..).zip(messages).collect();
    let mut rest = messages.as_slice();
    while !rest.is_empty() {
        let lengths = rest.iter().map(|(_, (_, payload))| payload.len());
        let (chunk, after) = rest.split_at(weir_queue::pack::count_fitting(lengths, pack::BYTES_MAX));
        rest = after;
        let chunk_messages = chunk.iter().map(|(id, (key, payload))| (*id, (*key, payload.as_slice())));
        if chunk.len() < PACK_MIN {
            insert(connection, topic, chunk_messages)?;
        } else {
            pack::insert(connection, topic, chunk[0].0, chunk_messages.map(|(_, message)| message))?;
        }
    }
    Ok(())
}

/// Inserts each message as a row of its own.
fn insert<'a>(
    connection: &Connection,
    topic: &str,
    messages: impl IntoIterator<Item = (i64, (&'a str, &'a [u8]))>,
) -> rusqlite::Result<()> {
    let mut insert = connection.prepare_cached(INSERT)?;
    for (id, (key, payload)) in messages {
        insert.execute(params![topic, id, key, payload])?;
    }
    Ok(())
}

/// Inserts a dead letter that was never a message of this queue, within the current transaction, unless its id exists. A
/// replay turns it into a message.
pub(crate) fn insert_dead_letter(connection: &Connection, letter: &DeadLetter) -> rusqlite::Result<()> {
    let DeadLetter { id, topic, key, payload, reason, attempts, died_at } = letter;
    if connection.prepare_cached(DEAD_EXISTS)?.exists([id])? {
        return Ok(());
    }
    let message_id: i64 =
        connection.prepare_cached(RESERVE_IDS)?.query_row(params![topic, 1], |row| row.get(0))?;
    let died_at = died_at.as_micros();
    let mut insert = connection.prepare_cached(INSERT_DEAD)?;
    insert.execute(params![id, topic, message_id, key, payload, reason, attempts, died_at])?;
    Ok(())
}

#[async_trait]
impl MessageSource for Sqlite {
    async fn claim(&self, topic: &str, max: usize, visibility: Duration) -> Result<MessageClaim> {
        let now = self.inner.clock.now();
        let Some(lease) = self.acquire_lease(topic, now, visibility) else {
            return Ok(MessageClaim::default());
        };
        let receipt = ClaimReceipt { topic: topic.to_owned(), leases: vec![lease] };
        let messages = {
            let topic = topic.to_owned();
            self.read(move |connection| find_claimable(connection, &topic, max, now)).await
        };
        if !matches!(&messages, Ok(found) if !found.is_empty()) {
            self.release_lease(&receipt);
        }
        Ok(MessageClaim { messages: messages?, receipt })
    }

    async fn settle(&self, receipt: &ClaimReceipt, settlement: Settlement) -> Result<bool> {
        let (engine, claim) = (self.clone(), receipt.clone());
        let mut chunks = split(settlement);
        let settle = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            // Checked on the writer thread, after all earlier settlements.
            if !engine.holds_lease(&claim, engine.inner.clock.now()) {
                return Ok(ControlFlow::Break(false));
            }
            while turn.has_time() {
                let Some(chunk) = chunks.pop_front() else { return Ok(ControlFlow::Break(true)) };
                settle(connection, &claim.topic, &chunk, engine.inner.clock.now())?;
            }
            Ok(ControlFlow::Continue(()))
        });
        let settled = settle.await?;
        if settled {
            self.release_lease(receipt);
        }
        Ok(settled)
    }

    async fn wait(&self, topic: &str, at_most: Duration) {
        self.inner.topic_notify.wait(topic, at_most).await;
    }
}

#[async_trait]
impl Queue for Sqlite {
    async fn dead_letters(
        &self,
        after: Option<&str>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadLetter>> {
        let after = after.unwrap_or_default().to_owned();
        let [limit, payload_max] = [limit, payload_max].map(|n| i64::try_from(n).unwrap_or(i64::MAX));
        let list = move |connection: &Connection| {
            let mut statement = connection.prepare_cached(DEAD_LETTERS)?;
            statement.query_map(params![after, limit, payload_max], read_dead_letter)?.collect()
        };
        self.read(list).await
    }

    async fn settle_deferred(&self, topic: &str, settlement: Settlement) -> Result<()> {
        let (engine, topic) = (self.clone(), topic.to_owned());
        let settle =
            move |connection: &Connection| settle(connection, &topic, &settlement, engine.inner.clock.now());
        self.inner.writer.run(settle).await
    }

    async fn replay(&self, id: &str) -> Result<bool> {
        let id = id.to_owned();
        let topic = self.inner.writer.run(move |connection| replay(connection, &id)).await?;
        topic.iter().for_each(|topic| self.inner.topic_notify.notify(topic));
        Ok(topic.is_some())
    }

    async fn replay_all(&self) -> Result<u64> {
        let mut job = ReplayAllJob::default();
        let replay = self.inner.writer.run_in_turns(Scheduling::Interleaved, move |connection, _, turn| {
            let progress = job.run_turn(connection, turn)?;
            Ok(progress.map_break(|()| std::mem::take(&mut job)))
        });
        let ReplayAllJob { topics, replayed, .. } = replay.await?;
        topics.iter().for_each(|topic| self.inner.topic_notify.notify(topic));
        Ok(replayed)
    }

    async fn discard(&self, id: &str) -> Result<bool> {
        let id = id.to_owned();
        let discard = move |connection: &Connection| {
            let mut delete = connection.prepare_cached(DELETE_DEAD)?;
            let topic = delete.query_row([&id], |row| row.get::<_, String>(0)).optional()?;
            if let Some(topic) = &topic {
                connection.prepare_cached(COUNT_DISCARDED)?.execute([topic])?;
            }
            Ok(topic.is_some())
        };
        self.inner.writer.run(discard).await
    }

    async fn count_dead_letters(&self, topic: &str, limit: usize) -> Result<u64> {
        let (topic, limit) = (topic.to_owned(), i64::try_from(limit).unwrap_or(i64::MAX));
        self.read(move |connection| {
            connection.prepare_cached(COUNT_DEAD)?.query_row(params![topic, limit], |row| row.get(0))
        })
        .await
    }

    async fn audit(&self, topic: &str) -> Result<QueueAudit> {
        let topic = topic.to_owned();
        let audit = move |connection: &Connection| {
            connection.prepare_cached(AUDIT)?.query_row([&topic], |row| {
                Ok(QueueAudit {
                    accepted: row.get(0)?,
                    done: row.get(1)?,
                    discarded: row.get(2)?,
                    dead: row.get(3)?,
                    in_flight: row.get(4)?,
                })
            })
        };
        self.read(audit).await
    }
}

impl Sqlite {
    /// Leases a topic, or returns `None` if it is leased or there are too many leases.
    pub(crate) fn acquire_lease(
        &self,
        topic: &str,
        now: Timestamp,
        visibility: Duration,
    ) -> Option<ShardLease> {
        let mut leases = self.inner.leases.lock();
        if leases.len() >= LEASES_MAX && !leases.contains_key(topic) {
            leases.retain(|_, lease| lease.expires_at > now);
            if leases.len() >= LEASES_MAX {
                return None;
            }
        }
        // A random first token, so that receipts of an earlier run of the process are not valid in this one.
        let first = || TopicLease { token: fastrand::i64(0..i64::MAX / 2), granted_at: now, expires_at: now };
        let lease = leases.entry(topic.to_owned()).or_insert_with(first);
        // `granted_at` may be slightly ahead of `now`: this caller may have read the clock before a faster one did.
        if lease.expires_at > now && lease.granted_at <= now.plus(STEP_MIN) {
            return None;
        }
        lease.token += 1;
        lease.granted_at = now;
        lease.expires_at = now.plus(visibility);
        Some(ShardLease { shard: SHARD, token: lease.token })
    }

    /// Whether the receipt has the topic's current lease, and that has not expired.
    pub(crate) fn holds_lease(&self, receipt: &ClaimReceipt, now: Timestamp) -> bool {
        let leases = self.inner.leases.lock();
        let current = leases.get(&receipt.topic).filter(|lease| lease.expires_at > now);
        current.is_some_and(|current| receipt.leases.iter().any(|lease| lease.token == current.token))
    }

    pub(crate) fn release_lease(&self, receipt: &ClaimReceipt) {
        if let Some(current) = self.inner.leases.lock().get_mut(&receipt.topic)
            && receipt.leases.iter().any(|lease| lease.token == current.token)
        {
            current.expires_at = Timestamp::from_micros(i64::MIN);
        }
    }
}

/// Turns a dead letter into a message. Returns its topic, or `None` if there is no such dead letter.
fn replay(connection: &Connection, id: &str) -> rusqlite::Result<Option<String>> {
    connection.prepare_cached(MOVE_TO_MESSAGES)?.execute([id])?;
    connection.prepare_cached(DELETE_DEAD)?.query_row([id], |row| row.get(0)).optional()
}

/// Replays all dead letters that exist at the start. Later ones are left, or it might never end.
#[derive(Debug, Default)]
struct ReplayAllJob {
    /// The id of the last dead letter at the start.
    last: Option<String>,
    topics: HashSet<String>,
    replayed: u64,
}

impl ReplayAllJob {
    fn run_turn(&mut self, connection: &Connection, turn: &WriterTurn) -> rusqlite::Result<ControlFlow<()>> {
        if self.last.is_none() {
            self.last = connection.prepare_cached(LAST_DEAD_ID)?.query_row([], |row| row.get(0))?;
        }
        let Some(last) = &self.last else { return Ok(ControlFlow::Break(())) };
        while turn.has_time() {
            let ids: Vec<String> = connection
                .prepare_cached(DEAD_IDS)?
                .query_map(params![last, REPLAY_CHUNK], |row| row.get(0))?
                .collect::<rusqlite::Result<_>>()?;
            for id in &ids {
                self.topics.extend(replay(connection, id)?);
                self.replayed += 1;
            }
            if ids.len() < REPLAY_CHUNK {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// The first messages that may be claimed: none that is delayed, and none behind a delayed one of the same key.
fn find_claimable(
    connection: &Connection,
    topic: &str,
    max: usize,
    now: Timestamp,
) -> rusqlite::Result<Vec<Message>> {
    let mut claim = ClaimScan { delayed_keys: HashSet::new(), messages: Vec::new(), max, now };
    let (mut scan, mut packs) = (connection.prepare_cached(SCAN)?, connection.prepare_cached(PACKS)?);
    let (mut rows, mut packs) = (scan.query([topic])?, packs.query([topic])?);
    let (mut row, mut pack) = (rows.next()?, packs.next()?);
    while claim.has_room() {
        let id_of = |row: Option<&Row<'_>>| row.map(|row| row.get::<_, i64>(0)).transpose();
        match (id_of(row)?, id_of(pack)?, row, pack) {
            (id, Some(first), _, Some(found)) if id.is_none_or(|id| first < id) => {
                for (id, message) in (first..).zip(pack::read(found.get_ref(1)?.as_blob()?)) {
                    let (key, payload) = message?;
                    claim.add(id, key, payload, 0, None);
                }
                pack = packs.next()?;
            }
            (Some(id), _, Some(found), _) => {
                let (key, payload) = (found.get_ref(1)?.as_str()?, found.get_ref(2)?.as_blob()?);
                claim.add(id, key, payload, found.get(3)?, found.get(4)?);
                row = rows.next()?;
            }
            _ => break,
        }
    }
    Ok(claim.messages)
}

/// The messages that a claim has collected so far.
struct ClaimScan {
    /// Keys with a delayed message.
    delayed_keys: HashSet<String>,
    messages: Vec<Message>,
    max: usize,
    now: Timestamp,
}

impl ClaimScan {
    fn has_room(&self) -> bool {
        self.messages.len() < self.max
    }

    fn add(&mut self, id: i64, key: &str, payload: &[u8], attempts: u32, delayed_until: Option<i64>) {
        if delayed_until.is_some_and(|until| until > self.now.as_micros()) {
            self.delayed_keys.insert(key.to_owned());
        } else if self.has_room() && !self.delayed_keys.contains(key) {
            let position = Position { shard: SHARD, id };
            self.messages.push(Message {
                position,
                key: key.to_owned(),
                payload: payload.to_vec(),
                attempts,
                trace: None,
            });
        }
    }
}

/// Splits a settlement into parts of at most [`SETTLE_CHUNK`] messages: done, then retried, then deferred, then dead.
fn split(settlement: Settlement) -> VecDeque<Settlement> {
    let Settlement { done, retry, deferred, dead } = &settlement;
    if done.len() + retry.len() + deferred.len() + dead.len() <= SETTLE_CHUNK {
        return VecDeque::from([settlement]);
    }
    let done =
        done.chunks(SETTLE_CHUNK).map(|done| Settlement { done: done.to_vec(), ..Settlement::default() });
    let retry =
        retry.chunks(SETTLE_CHUNK).map(|retry| Settlement { retry: retry.to_vec(), ..Settlement::default() });
    let deferred = deferred
        .chunks(SETTLE_CHUNK)
        .map(|deferred| Settlement { deferred: deferred.to_vec(), ..Settlement::default() });
    let dead =
        dead.chunks(SETTLE_CHUNK).map(|dead| Settlement { dead: dead.to_vec(), ..Settlement::default() });
    done.chain(retry).chain(deferred).chain(dead).collect()
}

fn settle(
    connection: &Connection,
    topic: &str,
    settlement: &Settlement,
    now: Timestamp,
) -> rusqlite::Result<()> {
    // Positions of other shards belong to no message of this engine.
    let message_id = |position: &Position| (position.shard == SHARD).then_some(position.id);
    let attempts = settlement.retry.iter().map(|(position, after)| (position, after, 1));
    let delays = attempts.chain(settlement.deferred.iter().map(|(position, after)| (position, after, 0)));
    let dead = settlement.dead.iter().map(|(position, _)| position);
    let ids = sorted(settlement.done.iter().filter_map(message_id));
    let not_done = delays.clone().map(|(position, ..)| position).chain(dead);
    let not_done = sorted(not_done.filter_map(message_id));
    let packed = pack::PackSettlement { done: &ids, not_done: &not_done }.apply(connection, topic)?;
    let done = if packed == ids.len() { packed } else { packed + delete(connection, topic, &ids)? };
    connection.prepare_cached(COUNT_DONE)?.execute(params![topic, done])?;
    let mut delay = connection.prepare_cached(DELAY)?;
    for (position, after, attempts) in delays {
        let until = now.plus(*after).as_micros();
        delay.execute(params![topic, message_id(position), until, attempts, now.as_micros()])?;
    }
    let mut move_to_dead = connection.prepare_cached(MOVE_TO_DEAD)?;
    for (position, reason) in &settlement.dead {
        let letter_id = MessageId::new(now, random_bytes()).to_string();
        move_to_dead.execute(params![topic, message_id(position), letter_id, reason, now.as_micros()])?;
        // Deleted at once, so that a message named twice becomes one dead letter.
        delete(connection, topic, message_id(position).as_slice())?;
    }
    Ok(())
}

/// Sorts ids and removes duplicates.
fn sorted(ids: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut ids: Vec<i64> = ids.collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Deletes the rows of sorted ids, one run of consecutive ids per statement.
fn delete(connection: &Connection, topic: &str, ids: &[i64]) -> rusqlite::Result<usize> {
    let mut statement = connection.prepare_cached(DELETE)?;
    let mut deleted = 0;
    for run in ids.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        if let (Some(first), Some(last)) = (run.first(), run.last()) {
            deleted += statement.execute(params![topic, first, last])?;
        }
    }
    Ok(deleted)
}

fn read_dead_letter(row: &Row<'_>) -> rusqlite::Result<DeadLetter> {
    Ok(DeadLetter {
        id: row.get(0)?,
        topic: row.get(1)?,
        key: row.get(2)?,
        payload: row.get(3)?,
        reason: row.get(4)?,
        attempts: row.get(5)?,
        died_at: Timestamp::from_micros(row.get(6)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_more_leases_than_the_bound() {
        let directory = tempfile::tempdir().unwrap();
        let engine = Sqlite::open(directory.path()).unwrap();
        let (now, minute) = (Timestamp::from_seconds(1), Duration::from_secs(60));
        for n in 0..LEASES_MAX {
            assert!(engine.acquire_lease(&format!("topic {n}"), now, minute).is_some());
        }
        assert!(engine.acquire_lease("one more", now, minute).is_none());
        assert!(engine.acquire_lease("topic 0", now, minute).is_none(), "the topic is leased");
        let later = now.plus(minute);
        assert!(engine.acquire_lease("one more", later, minute).is_some());
        assert_eq!(engine.inner.leases.lock().len(), 1, "expired leases make room");
    }
}
