//! The table queue in SQLite. Rows are only inserted and deleted; who holds a topic is known in memory, since one
//! process owns the file. Messages that come together stand together ([`pack`]).

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
use crate::writer::{Order, Turn};

/// One shard a topic: with one process there is one claim at a time.
const SHARD: u16 = 0;

/// So many messages that come together are worth a pack; fewer stand where a person can read them.
const PACKED_FROM: usize = 4;

/// Messages that are settled between two looks at how long it takes.
const SETTLED_AT_ONCE: usize = 512;
/// Dead letters that are replayed between two such looks. Each may be large.
const REPLAYED_AT_ONCE: usize = 16;

const TAKE_IDS: &str = "
    INSERT INTO queue_ledger (topic, accepted) VALUES (?1, ?2)
    ON CONFLICT (topic) DO UPDATE SET accepted = accepted + excluded.accepted
    RETURNING accepted";
const INSERT: &str = "INSERT INTO queue_message (topic, id, key, payload) VALUES (?1, ?2, ?3, ?4)";
/// The cast makes a payload that somebody typed in by hand (as text) readable too: it must not stop the queue.
const SCAN: &str = "
    SELECT id, key, CAST(payload AS BLOB), attempts, delayed_until FROM queue_message WHERE topic = ?1 ORDER BY id";
const PACKS: &str = "SELECT first_id, messages FROM queue_pack WHERE topic = ?1 ORDER BY first_id";
const DELETE: &str = "DELETE FROM queue_message WHERE topic = ?1 AND id BETWEEN ?2 AND ?3";
const COUNT_DONE: &str = "UPDATE queue_ledger SET done = done + ?2 WHERE topic = ?1";
const DELAY: &str = "
    UPDATE queue_message SET attempts = attempts + ?4, delayed_until = ?3, delayed_at = ?5
    WHERE topic = ?1 AND id = ?2";
const BURY: &str = "
    INSERT INTO dead_letter (id, topic, message_id, key, payload, reason, attempts, died_at)
    SELECT ?3, topic, id, key, payload, ?4, attempts + 1, ?5 FROM queue_message WHERE topic = ?1 AND id = ?2";
const IS_DEAD: &str = "SELECT 1 FROM dead_letter WHERE id = ?1";
const TAKE_IN: &str = "
    INSERT INTO dead_letter (id, topic, message_id, key, payload, reason, attempts, died_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
const DEAD_LETTERS: &str = "
    SELECT id, topic, key, substr(CAST(payload AS BLOB), 1, ?3), substr(reason, 1, ?3), attempts, died_at
    FROM dead_letter WHERE id > ?1 ORDER BY id LIMIT ?2";
const REVIVE: &str = "
    INSERT INTO queue_message (topic, id, key, payload)
    SELECT topic, message_id, key, payload FROM dead_letter WHERE id = ?1";
const LAST_DEAD: &str = "SELECT max(id) FROM dead_letter";
const DEAD_IDS: &str = "SELECT id FROM dead_letter WHERE id <= ?1 ORDER BY id LIMIT ?2";
const FORGET: &str = "DELETE FROM dead_letter WHERE id = ?1 RETURNING topic";
const COUNT_DISCARDED: &str = "UPDATE queue_ledger SET discarded = discarded + 1 WHERE topic = ?1";
const BOOKS: &str = "
    SELECT coalesce(sum(accepted), 0), coalesce(sum(done), 0), coalesce(sum(discarded), 0),
           (SELECT count(*) FROM dead_letter WHERE topic = ?1),
           (SELECT count(*) FROM queue_message WHERE topic = ?1)
               + (SELECT coalesce(sum(count), 0) FROM queue_pack WHERE topic = ?1)
    FROM queue_ledger WHERE topic = ?1";

/// Topics of which leases are remembered. Operators may claim topics of any name; leases that have run out make room for
/// others, and while none has, further topics are not handed out.
const LEASES_MAX: usize = 1_024;

/// Who holds which topic.
pub(crate) type Leases = HashMap<String, Held>;

/// The last lease given on a topic.
#[derive(Debug)]
pub(crate) struct Held {
    token: i64,
    /// When it was given. A time that is more than [`STEP_MIN`] ahead says that the clock has stepped back since: the lease is
    /// over then.
    since: Timestamp,
    until: Timestamp,
}

/// Appends messages in the transaction under way. The ledger's count of accepted messages is also the last id.
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
        connection.prepare_cached(TAKE_IDS)?.query_row(params![topic, count], |row| row.get(0))?;
    let messages: Vec<(i64, (&str, Vec<u8>))> = (last - count + 1..).zip(messages).collect();
    let mut rest = messages.as_slice();
    while !rest.is_empty() {
        let lengths = rest.iter().map(|(_, (_, payload))| payload.len());
        let (part, after) = rest.split_at(weir_queue::pack::count_fitting(lengths, pack::BYTES_MAX));
        rest = after;
        let texts = part.iter().map(|(id, (key, payload))| (*id, (*key, payload.as_slice())));
        if part.len() < PACKED_FROM {
            insert(connection, topic, texts)?;
        } else {
            pack::insert(connection, topic, part[0].0, texts.map(|(_, text)| text))?;
        }
    }
    Ok(())
}

/// Puts each message into a row of its own.
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

/// Keeps a dead letter that never was a message here, in the transaction under way, unless it is there already. Replayed, it
/// becomes one.
pub(crate) fn take_in(connection: &Connection, letter: &DeadLetter) -> rusqlite::Result<()> {
    let DeadLetter { id, topic, key, payload, reason, attempts, died_at } = letter;
    if connection.prepare_cached(IS_DEAD)?.exists([id])? {
        return Ok(());
    }
    let place: i64 = connection.prepare_cached(TAKE_IDS)?.query_row(params![topic, 1], |row| row.get(0))?;
    let died_at = died_at.as_micros();
    let mut take_in = connection.prepare_cached(TAKE_IN)?;
    take_in.execute(params![id, topic, place, key, payload, reason, attempts, died_at])?;
    Ok(())
}

#[async_trait]
impl MessageSource for Sqlite {
    async fn claim(&self, topic: &str, max: usize, visibility: Duration) -> Result<MessageClaim> {
        let now = self.inner.clock.now();
        let Some(lease) = self.lease(topic, now, visibility) else {
            return Ok(MessageClaim::default());
        };
        let receipt = ClaimReceipt { topic: topic.to_owned(), leases: vec![lease] };
        let messages = {
            let topic = topic.to_owned();
            self.read(move |connection| visible(connection, &topic, max, now)).await
        };
        if !matches!(&messages, Ok(found) if !found.is_empty()) {
            self.give_up(&receipt);
        }
        Ok(MessageClaim { messages: messages?, receipt })
    }

    async fn settle(&self, receipt: &ClaimReceipt, settlement: Settlement) -> Result<bool> {
        let (engine, held) = (self.clone(), receipt.clone());
        let mut parts = parts(settlement);
        let settle = self.inner.writer.in_turns(Order::Any, move |connection, _, turn| {
            // Asked on the writer thread, after everything that was settled before.
            if !engine.holds(&held, engine.inner.clock.now()) {
                return Ok(ControlFlow::Break(false));
            }
            while turn.goes_on() {
                let Some(part) = parts.pop_front() else { return Ok(ControlFlow::Break(true)) };
                settle(connection, &held.topic, &part, engine.inner.clock.now())?;
            }
            Ok(ControlFlow::Continue(()))
        });
        let settled = settle.await?;
        if settled {
            self.give_up(receipt);
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
        let mut all = ReplayAll::default();
        let replay = self.inner.writer.in_turns(Order::Any, move |connection, _, turn| {
            let progress = all.go_on(connection, turn)?;
            Ok(progress.map_break(|()| std::mem::take(&mut all)))
        });
        let ReplayAll { topics, replayed, .. } = replay.await?;
        topics.iter().for_each(|topic| self.inner.topic_notify.notify(topic));
        Ok(replayed)
    }

    async fn discard(&self, id: &str) -> Result<bool> {
        let id = id.to_owned();
        let discard = move |connection: &Connection| {
            let mut forget = connection.prepare_cached(FORGET)?;
            let topic = forget.query_row([&id], |row| row.get::<_, String>(0)).optional()?;
            if let Some(topic) = &topic {
                connection.prepare_cached(COUNT_DISCARDED)?.execute([topic])?;
            }
            Ok(topic.is_some())
        };
        self.inner.writer.run(discard).await
    }

    async fn audit(&self, topic: &str) -> Result<QueueAudit> {
        let topic = topic.to_owned();
        let audit = move |connection: &Connection| {
            connection.prepare_cached(BOOKS)?.query_row([&topic], |row| {
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
    /// Takes the topic, unless somebody else still has it.
    pub(crate) fn lease(&self, topic: &str, now: Timestamp, visibility: Duration) -> Option<ShardLease> {
        let mut leases = self.inner.leases.lock();
        if leases.len() >= LEASES_MAX && !leases.contains_key(topic) {
            leases.retain(|_, held| held.until > now);
            if leases.len() >= LEASES_MAX {
                return None;
            }
        }
        // Not from the beginning: receipts of an earlier run of the process must not pass for those of this one.
        let first = || Held { token: fastrand::i64(0..i64::MAX / 2), since: now, until: now };
        let held = leases.entry(topic.to_owned()).or_insert_with(first);
        // Whoever asks may have read the clock before somebody who was faster.
        if held.until > now && held.since <= now.plus(STEP_MIN) {
            return None;
        }
        held.token += 1;
        held.since = now;
        held.until = now.plus(visibility);
        Some(ShardLease { shard: SHARD, token: held.token })
    }

    /// Whether a lease is the topic's present one and has not run out.
    pub(crate) fn holds(&self, receipt: &ClaimReceipt, now: Timestamp) -> bool {
        let leases = self.inner.leases.lock();
        let held = leases.get(&receipt.topic).filter(|held| held.until > now);
        held.is_some_and(|held| receipt.leases.iter().any(|lease| lease.token == held.token))
    }

    pub(crate) fn give_up(&self, receipt: &ClaimReceipt) {
        if let Some(held) = self.inner.leases.lock().get_mut(&receipt.topic)
            && receipt.leases.iter().any(|lease| lease.token == held.token)
        {
            held.until = Timestamp::from_micros(i64::MIN);
        }
    }
}

/// Makes a dead letter a message again; says of which topic, or `None` when it is none.
fn replay(connection: &Connection, id: &str) -> rusqlite::Result<Option<String>> {
    connection.prepare_cached(REVIVE)?.execute([id])?;
    connection.prepare_cached(FORGET)?.query_row([id], |row| row.get(0)).optional()
}

/// A replay of all dead letters. Those that die meanwhile are left alone, or it might never end.
#[derive(Debug, Default)]
struct ReplayAll {
    /// The last of those that were there when it began.
    last: Option<String>,
    topics: HashSet<String>,
    replayed: u64,
}

impl ReplayAll {
    fn go_on(&mut self, connection: &Connection, turn: &Turn) -> rusqlite::Result<ControlFlow<()>> {
        if self.last.is_none() {
            self.last = connection.prepare_cached(LAST_DEAD)?.query_row([], |row| row.get(0))?;
        }
        let Some(last) = &self.last else { return Ok(ControlFlow::Break(())) };
        while turn.goes_on() {
            let ids: Vec<String> = connection
                .prepare_cached(DEAD_IDS)?
                .query_map(params![last, REPLAYED_AT_ONCE], |row| row.get(0))?
                .collect::<rusqlite::Result<_>>()?;
            for id in &ids {
                self.topics.extend(replay(connection, id)?);
                self.replayed += 1;
            }
            if ids.len() < REPLAYED_AT_ONCE {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// The first messages that may be handed out: none that is delayed, and none behind a delayed one of its key.
fn visible(
    connection: &Connection,
    topic: &str,
    max: usize,
    now: Timestamp,
) -> rusqlite::Result<Vec<Message>> {
    let mut view = View { held_back: HashSet::new(), messages: Vec::new(), max, now };
    let (mut scan, mut packs) = (connection.prepare_cached(SCAN)?, connection.prepare_cached(PACKS)?);
    let (mut rows, mut packs) = (scan.query([topic])?, packs.query([topic])?);
    let (mut row, mut pack) = (rows.next()?, packs.next()?);
    while view.has_room() {
        let place = |row: Option<&Row<'_>>| row.map(|row| row.get::<_, i64>(0)).transpose();
        match (place(row)?, place(pack)?, row, pack) {
            (id, Some(first), _, Some(found)) if id.is_none_or(|id| first < id) => {
                for (id, message) in (first..).zip(pack::read(found.get_ref(1)?.as_blob()?)) {
                    let (key, payload) = message?;
                    view.add(id, key, payload, 0, None);
                }
                pack = packs.next()?;
            }
            (Some(id), _, Some(found), _) => {
                let (key, payload) = (found.get_ref(1)?.as_str()?, found.get_ref(2)?.as_blob()?);
                view.add(id, key, payload, found.get(3)?, found.get(4)?);
                row = rows.next()?;
            }
            _ => break,
        }
    }
    Ok(view.messages)
}

/// What a claim has come upon.
struct View {
    /// Keys of which a message is delayed.
    held_back: HashSet<String>,
    messages: Vec<Message>,
    max: usize,
    now: Timestamp,
}

impl View {
    fn has_room(&self) -> bool {
        self.messages.len() < self.max
    }

    fn add(&mut self, id: i64, key: &str, payload: &[u8], attempts: u32, delayed_until: Option<i64>) {
        if delayed_until.is_some_and(|until| until > self.now.as_micros()) {
            self.held_back.insert(key.to_owned());
        } else if self.has_room() && !self.held_back.contains(key) {
            let position = Position { shard: SHARD, id };
            self.messages.push(Message {
                position,
                key: key.to_owned(),
                payload: payload.to_vec(),
                attempts,
            });
        }
    }
}

/// A settlement in parts that are short work: first what is done, then what is tried again or put off, then what is dead.
fn parts(settlement: Settlement) -> VecDeque<Settlement> {
    let Settlement { done, retry, deferred, dead } = &settlement;
    if done.len() + retry.len() + deferred.len() + dead.len() <= SETTLED_AT_ONCE {
        return VecDeque::from([settlement]);
    }
    let done =
        done.chunks(SETTLED_AT_ONCE).map(|done| Settlement { done: done.to_vec(), ..Settlement::default() });
    let retry = retry
        .chunks(SETTLED_AT_ONCE)
        .map(|retry| Settlement { retry: retry.to_vec(), ..Settlement::default() });
    let deferred = deferred
        .chunks(SETTLED_AT_ONCE)
        .map(|deferred| Settlement { deferred: deferred.to_vec(), ..Settlement::default() });
    let dead =
        dead.chunks(SETTLED_AT_ONCE).map(|dead| Settlement { dead: dead.to_vec(), ..Settlement::default() });
    done.chain(retry).chain(deferred).chain(dead).collect()
}

fn settle(
    connection: &Connection,
    topic: &str,
    settlement: &Settlement,
    now: Timestamp,
) -> rusqlite::Result<()> {
    // There is one shard; a position in another is no message of ours.
    let ours = |position: &Position| (position.shard == SHARD).then_some(position.id);
    let attempts = settlement.retry.iter().map(|(position, after)| (position, after, 1));
    let delays = attempts.chain(settlement.deferred.iter().map(|(position, after)| (position, after, 0)));
    let dead = settlement.dead.iter().map(|(position, _)| position);
    let ids = sorted(settlement.done.iter().filter_map(ours));
    let apart = sorted(delays.clone().map(|(position, ..)| position).chain(dead).filter_map(ours));
    let packed = pack::Touched { done: &ids, apart: &apart }.settle(connection, topic)?;
    let done = if packed == ids.len() { packed } else { packed + delete(connection, topic, &ids)? };
    connection.prepare_cached(COUNT_DONE)?.execute(params![topic, done])?;
    let mut delay = connection.prepare_cached(DELAY)?;
    for (position, after, attempts) in delays {
        let until = now.plus(*after).as_micros();
        delay.execute(params![topic, ours(position), until, attempts, now.as_micros()])?;
    }
    let mut bury = connection.prepare_cached(BURY)?;
    for (position, reason) in &settlement.dead {
        let letter = MessageId::new(now, random_bytes()).to_string();
        bury.execute(params![topic, ours(position), letter, reason, now.as_micros()])?;
        // At once, so that a message named twice dies once.
        delete(connection, topic, ours(position).as_slice())?;
    }
    Ok(())
}

/// Each once, in order.
fn sorted(ids: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut ids: Vec<i64> = ids.collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Deletes rows by runs of consecutive ids, of those that are sorted.
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
    fn no_more_leases_are_remembered_than_the_bound() {
        let directory = tempfile::tempdir().unwrap();
        let engine = Sqlite::open(directory.path()).unwrap();
        let (now, minute) = (Timestamp::from_seconds(1), Duration::from_secs(60));
        for n in 0..LEASES_MAX {
            assert!(engine.lease(&format!("topic {n}"), now, minute).is_some());
        }
        assert!(engine.lease("one more", now, minute).is_none());
        assert!(engine.lease("topic 0", now, minute).is_none(), "somebody has it");
        let later = now.plus(minute);
        assert!(engine.lease("one more", later, minute).is_some());
        assert_eq!(engine.inner.leases.lock().len(), 1, "those that have run out make room");
    }
}
