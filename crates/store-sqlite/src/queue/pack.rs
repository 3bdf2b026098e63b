//! Packs: messages that were enqueued together, stored as one row. A batch costs one insert, and one delete when all of it
//! is done.
//!
//! The messages of a pack have consecutive ids. When some are done, the others are packed again. A message that is
//! retried, deferred or dead needs columns of its own, so its whole pack is split into rows of `queue_message`. A message
//! is in a pack or in a row, never in both.

use std::ops::Range;

use rusqlite::{Connection, params};
use weir_queue::pack;
use weir_queue::pack::MESSAGES_MAX;

use crate::error::fault;

/// A pack is read and written as a whole, so packs of long messages have fewer of them.
pub(super) const BYTES_MAX: usize = 256 * 1_024;

const INSERT: &str = "INSERT INTO queue_pack (topic, first_id, count, messages) VALUES (?1, ?2, ?3, ?4)";
const DELETE: &str = "DELETE FROM queue_pack WHERE topic = ?1 AND first_id = ?2";
const BETWEEN: &str = "
    SELECT first_id, count FROM queue_pack WHERE topic = ?1 AND first_id BETWEEN ?2 AND ?3 ORDER BY first_id";
const MESSAGES: &str = "SELECT messages FROM queue_pack WHERE topic = ?1 AND first_id = ?2";

/// Inserts messages with consecutive ids as one row.
pub(super) fn insert<'a>(
    connection: &Connection,
    topic: &str,
    first_id: i64,
    messages: impl IntoIterator<Item = (&'a str, &'a [u8])> + Clone,
) -> rusqlite::Result<()> {
    let count = messages.clone().into_iter().count();
    let packed = pack::write(messages);
    connection.prepare_cached(INSERT)?.execute(params![topic, first_id, count, packed])?;
    Ok(())
}

/// The messages of a pack, in order.
pub(super) fn read(messages: &[u8]) -> impl Iterator<Item = rusqlite::Result<(&str, &[u8])>> {
    pack::read(messages).map(|message| message.map_err(fault))
}

/// The message ids of a settlement. Both lists are sorted and have no duplicates.
pub(super) struct PackSettlement<'a> {
    pub(super) done: &'a [i64],
    /// Retried, deferred or dead.
    pub(super) not_done: &'a [i64],
}

impl PackSettlement<'_> {
    /// Removes done messages from their packs, and splits packs with a message that is not done into rows. Returns how
    /// many messages were removed. Messages in rows are left to the caller.
    pub(super) fn apply(&self, connection: &Connection, topic: &str) -> rusqlite::Result<usize> {
        let ends = [self.done.first(), self.done.last(), self.not_done.first(), self.not_done.last()];
        let ends = || ends.into_iter().flatten().copied();
        let (Some(first), Some(last)) = (ends().min(), ends().max()) else { return Ok(0) };
        let from = first.saturating_sub(i64::try_from(MESSAGES_MAX).unwrap_or(i64::MAX));
        let mut between = connection.prepare_cached(BETWEEN)?;
        let packs = between
            .query_map(params![topic, from, last], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<rusqlite::Result<Vec<(i64, i64)>>>()?;
        let mut removed = 0;
        for (first_id, count) in packs {
            let ids = first_id..first_id.saturating_add(count);
            let (done, not_done) = (within(self.done, &ids), within(self.not_done, &ids));
            if done.is_empty() && not_done.is_empty() {
                continue;
            }
            let is_whole = i64::try_from(done.len()) == Ok(count);
            let messages = if is_whole { Vec::new() } else { messages(connection, topic, first_id)? };
            connection.prepare_cached(DELETE)?.execute(params![topic, first_id])?;
            let mut others = (first_id..)
                .zip(read(&messages))
                .map(|(id, message)| Ok((id, message?)))
                .collect::<rusqlite::Result<Vec<_>>>()?;
            others.retain(|(id, _)| done.binary_search(id).is_err());
            if not_done.is_empty() {
                for run in others.chunk_by(|(a, _), (b, _)| a + 1 == *b) {
                    insert(connection, topic, run[0].0, run.iter().map(|(_, message)| *message))?;
                }
            } else {
                super::insert(connection, topic, others)?;
            }
            removed += done.len();
        }
        Ok(removed)
    }
}

fn messages(connection: &Connection, topic: &str, first_id: i64) -> rusqlite::Result<Vec<u8>> {
    connection.prepare_cached(MESSAGES)?.query_row(params![topic, first_id], |row| row.get(0))
}

/// The ids within a range, of sorted ids.
fn within<'a>(ids: &'a [i64], range: &Range<i64>) -> &'a [i64] {
    let from = ids.partition_point(|id| *id < range.start);
    let to = ids.partition_point(|id| *id < range.end);
    &ids[from..to]
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOPIC: &str = "t";

    fn database() -> Connection {
        let mut connection = Connection::open_in_memory().unwrap();
        crate::migrate::run(&mut connection).unwrap();
        connection
    }

    /// A pack of messages 1 to 5.
    fn packed() -> Connection {
        let connection = database();
        let keys = ["a", "b", "c", "d", "e"];
        insert(&connection, TOPIC, 1, keys.map(|key| (key, key.as_bytes()))).unwrap();
        connection
    }

    /// The first id and the keys of every pack.
    fn packs(connection: &Connection) -> Vec<(i64, String)> {
        let mut all =
            connection.prepare("SELECT first_id, count, messages FROM queue_pack ORDER BY first_id").unwrap();
        all.query_map([], |row| {
            let messages: Vec<u8> = row.get(2)?;
            let keys: String = read(&messages).map(|message| message.unwrap().0).collect();
            assert_eq!(row.get::<_, usize>(1)?, keys.len());
            Ok((row.get(0)?, keys))
        })
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap()
    }

    fn rows(connection: &Connection) -> Vec<(i64, String)> {
        let mut all = connection.prepare("SELECT id, key FROM queue_message ORDER BY id").unwrap();
        all.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn a_pack_whose_messages_are_done_is_deleted() {
        let connection = packed();
        let settlement = PackSettlement { done: &[1, 2, 3, 4, 5], not_done: &[] };
        assert_eq!(settlement.apply(&connection, TOPIC).unwrap(), 5);
        assert!(packs(&connection).is_empty() && rows(&connection).is_empty());
    }

    #[test]
    fn the_remaining_messages_of_a_pack_are_packed_again() {
        let connection = packed();
        let settle = |done: &[i64]| PackSettlement { done, not_done: &[] }.apply(&connection, TOPIC).unwrap();
        assert_eq!(settle(&[2, 3, 9]), 2);
        assert_eq!(packs(&connection), [(1, "a".to_owned()), (4, "de".to_owned())]);
        assert_eq!(settle(&[2, 3]), 0, "nothing is removed twice");
        assert_eq!(settle(&[4]), 1);
        assert_eq!(packs(&connection), [(1, "a".to_owned()), (5, "e".to_owned())]);
        assert!(rows(&connection).is_empty());
    }

    #[test]
    fn a_message_that_is_not_done_splits_its_pack_into_rows() {
        let connection = packed();
        assert_eq!(PackSettlement { done: &[1], not_done: &[3] }.apply(&connection, TOPIC).unwrap(), 1);
        assert!(packs(&connection).is_empty());
        let left = [(2, "b"), (3, "c"), (4, "d"), (5, "e")].map(|(id, key)| (id, key.to_owned()));
        assert_eq!(rows(&connection), left);
    }

    #[test]
    fn other_topics_and_packs_are_unchanged() {
        let connection = packed();
        insert(&connection, TOPIC, 6, [("f", &b"f"[..])]).unwrap();
        insert(&connection, "other", 1, [("x", &b"x"[..])]).unwrap();
        assert_eq!(PackSettlement { done: &[6], not_done: &[] }.apply(&connection, TOPIC).unwrap(), 1);
        assert_eq!(PackSettlement { done: &[], not_done: &[7] }.apply(&connection, TOPIC).unwrap(), 0);
        assert_eq!(packs(&connection), [(1, "x".to_owned()), (1, "abcde".to_owned())]);
    }
}
