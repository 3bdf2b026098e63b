//! Packs: messages that were enqueued together are one row for each shard, so that a batch costs a few inserts, and as many
//! deletes when all of it is done.
//!
//! A pack's first id comes from `queue_message`'s sequence, whose step is the size of the largest pack; its messages have the ids
//! from there on. When only some of them are done, or some are retried or dead, the remaining ones become rows of `queue_message`
//! with the same ids. A message is in a pack or in a row, never in both.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::SystemTime;

use futures_util::future::try_join;
use tokio_postgres::Row;
use weir_queue::{Message, Position, pack};
use weir_store::{Error, Result, shard};

use super::SHARDS;
use super::columns::SettlementColumns;
use crate::ENGINE;
use crate::connection::Prepared;
use crate::pool::Session;
use crate::row::column;

/// The largest pack. With its row's other columns it fits on one page.
const BYTES_MAX: usize = 7_000;
/// What a message takes in addition to its key and its payload.
const MESSAGE_BYTES: usize = 8;

pub(crate) const ENQUEUE: &str = "
    INSERT INTO queue_pack (topic, shard, first_id, count, messages)
    SELECT $1, new.shard, nextval('queue_message_id_seq'), new.count, new.messages
    FROM (SELECT * FROM unnest($2::smallint[], $3::integer[], $4::bytea[]) WITH ORDINALITY
              AS new (shard, count, messages, position)
          ORDER BY position) AS new";
/// The next packs of each shard, and whether the shard has delayed messages, for which others may have to wait.
pub(super) const NEXT: &str = "
    SELECT pack.shard, pack.first_id, pack.count, pack.messages, leased.has_delayed
    FROM (SELECT requested.shard, requested.after, EXISTS (
              SELECT FROM queue_message AS delayed
              WHERE delayed.topic = $1 AND delayed.shard = requested.shard AND delayed.delayed_until IS NOT NULL) AS has_delayed
          FROM unnest($2::smallint[], $3::bigint[]) AS requested (shard, after) OFFSET 0) AS leased
    CROSS JOIN LATERAL (
        SELECT * FROM queue_pack AS candidate
        WHERE candidate.topic = $1 AND candidate.shard = leased.shard AND candidate.first_id > leased.after
        ORDER BY candidate.first_id LIMIT $4
    ) AS pack
    ORDER BY pack.shard, pack.first_id";
/// Messages in packs that must wait for a delayed one of their key.
const HELD_BACK: &str = "
    SELECT requested.shard, requested.id
    FROM unnest($2::smallint[], $3::bigint[], $4::text[]) AS requested (shard, id, key)
    WHERE EXISTS (
        SELECT FROM queue_message AS before
        WHERE before.topic = $1 AND before.shard = requested.shard AND before.key = requested.key AND before.id < requested.id
          AND before.delayed_until > coalesce($5, now()))";
/// Deletes packs whose messages are all done: every id from the first on.
const FINISH: &str = "
    DELETE FROM queue_pack WHERE ctid = ANY(ARRAY(
        SELECT row_id FROM unnest($2::smallint[], $3::bigint[], $4::integer[]) AS done (shard, first_id, count)
        CROSS JOIN LATERAL (
            SELECT ctid AS row_id FROM queue_pack
            WHERE topic = $1 AND shard = done.shard AND first_id = done.first_id AND count = done.count OFFSET 0) AS found))
    RETURNING shard, first_id, count";
/// The packs whose first id is in one of these ranges.
const BETWEEN: &str = "
    SELECT pack.shard, pack.first_id, pack.count, pack.messages
    FROM unnest($2::smallint[], $3::bigint[], $4::bigint[]) AS requested (shard, first, last)
    CROSS JOIN LATERAL (
        SELECT * FROM queue_pack AS candidate
        WHERE candidate.topic = $1 AND candidate.shard = requested.shard
          AND candidate.first_id BETWEEN requested.first AND requested.last OFFSET 0) AS pack";
const REMOVE: &str = "
    DELETE FROM queue_pack WHERE ctid = ANY(ARRAY(
        SELECT row_id FROM unnest($2::smallint[], $3::bigint[]) AS deleted (shard, first_id)
        CROSS JOIN LATERAL (
            SELECT ctid AS row_id FROM queue_pack
            WHERE topic = $1 AND shard = deleted.shard AND first_id = deleted.first_id OFFSET 0) AS found))";
const UNPACK: &str = "
    INSERT INTO queue_message (topic, shard, id, key, payload)
    SELECT $1, new.* FROM unnest($2::smallint[], $3::bigint[], $4::text[], $5::bytea[]) AS new (shard, id, key, payload)";

/// Enqueues messages in the open transaction, in order for each key. The statement is [`ENQUEUE`].
pub(crate) async fn enqueue(
    statement: &Prepared<'_>,
    topic: &str,
    messages: &[(&str, Vec<u8>)],
) -> Result<(), tokio_postgres::Error> {
    let mut by_shard: HashMap<u16, Vec<(&str, &[u8])>> = HashMap::new();
    for (key, payload) in messages {
        by_shard.entry(shard::of(key, SHARDS)).or_default().push((key, payload));
    }
    let (mut shards, mut counts, mut packs) = (Vec::new(), Vec::new(), Vec::new());
    for (shard, messages) in &by_shard {
        let mut rest = messages.as_slice();
        while !rest.is_empty() {
            let lengths = rest.iter().map(|(key, payload)| MESSAGE_BYTES + key.len() + payload.len());
            let (part, after) = rest.split_at(pack::count_fitting(lengths, BYTES_MAX));
            rest = after;
            shards.push(shard.cast_signed());
            counts.push(i32::try_from(part.len()).unwrap_or(i32::MAX));
            packs.push(pack::write(part.iter().copied()));
        }
    }
    statement.execute(&[&topic, &shards, &counts, &packs]).await.map(drop)
}

/// A row of `queue_pack`.
pub(super) struct Pack {
    pub(super) shard: i16,
    pub(super) ids: Range<i64>,
    pub(super) messages: Vec<Message>,
    /// Whether its shard has delayed messages.
    pub(super) has_delayed: bool,
}

impl Pack {
    pub(super) fn read(row: &Row) -> Result<Self> {
        let (shard, first, count): (i16, i64, i32) = (column(row, 0)?, column(row, 1)?, column(row, 2)?);
        let ids = first..first.saturating_add(i64::from(count));
        let messages = ids.clone().zip(pack::read(column(row, 3)?)).map(|(id, message)| {
            let (key, payload) = message.map_err(|cut| Error::failed(ENGINE, cut))?;
            let position = Position { shard: shard.cast_unsigned(), id };
            Ok(Message { position, key: key.to_owned(), payload: payload.to_vec(), attempts: 0, trace: None })
        });
        let has_delayed = row.len() > 4 && column(row, 4)?;
        let messages = messages.collect::<Result<Vec<_>>>()?;
        if i32::try_from(messages.len()) != Ok(count) {
            return Err(Error::failed(ENGINE, pack::TruncatedPack));
        }
        Ok(Self { shard, ids, messages, has_delayed })
    }
}

/// Removes messages that must wait for a delayed one of their key.
pub(super) async fn remove_held_back(
    session: &Session,
    topic: &str,
    packs: &mut [Pack],
    now: Option<SystemTime>,
) -> Result<()> {
    let candidates = || packs.iter().filter(|pack| pack.has_delayed).flat_map(|pack| &pack.messages);
    let (shards, ids): (Vec<i16>, Vec<i64>) =
        candidates().map(|message| (message.position.shard.cast_signed(), message.position.id)).unzip();
    if shards.is_empty() {
        return Ok(());
    }
    let keys: Vec<&str> = candidates().map(|message| message.key.as_str()).collect();
    let rows = session.query(HELD_BACK, &[&topic, &shards, &ids, &keys, &now]).await?;
    let held_back = rows.iter().map(|row| Ok((column(row, 0)?, column(row, 1)?)));
    let held_back = held_back.collect::<Result<HashSet<(i16, i64)>>>()?;
    for pack in packs {
        let shard = pack.shard;
        pack.messages.retain(|message| !held_back.contains(&(shard, message.position.id)));
    }
    Ok(())
}

/// Deletes packs that are done as a whole and turns the other packs of the settlement into rows. Returns how many messages were
/// deleted with their packs, and removes these from `columns`.
pub(super) async fn settle(session: &Session, topic: &str, columns: &mut SettlementColumns) -> Result<i64> {
    let [finish, between] = session.prepare([FINISH, BETWEEN]).await?;
    let runs = runs(&columns.done);
    let (shards, firsts): (Vec<i16>, Vec<i64>) = runs.iter().map(|(shard, run)| (*shard, run.start)).unzip();
    let counts: Vec<i32> =
        runs.iter().map(|(_, run)| i32::try_from(run.end - run.start).unwrap_or(i32::MAX)).collect();
    let named = ids_by_shard(columns);
    let (in_shards, from, to) = candidate_ranges(&named);
    let (deleted, remaining) = session
        .bounded(try_join(
            finish.query(&[&topic, &shards, &firsts, &counts]),
            // Runs after the deletion and sees only the remaining packs.
            between.query(&[&topic, &in_shards, &from, &to]),
        ))
        .await?;
    let mut whole: HashMap<i16, Vec<Range<i64>>> = HashMap::new();
    let mut done = 0_i64;
    for row in &deleted {
        let (first, count) = (column::<i64>(row, 1)?, i64::from(column::<i32>(row, 2)?));
        whole.entry(column(row, 0)?).or_default().push(first..first + count);
        done += count;
    }
    columns.remove_done(|shard, id| {
        whole.get(&shard).is_some_and(|packs| packs.iter().any(|pack| pack.contains(&id)))
    });
    let remaining = remaining.iter().map(Pack::read).collect::<Result<Vec<_>>>()?;
    let is_named = |pack: &&Pack| {
        let ids = named.get(&pack.shard).map(Vec::as_slice).unwrap_or_default();
        let from = ids.partition_point(|id| *id < pack.ids.start);
        ids.get(from).is_some_and(|id| pack.ids.contains(id))
    };
    let touched: Vec<&Pack> = remaining.iter().filter(is_named).collect();
    if !touched.is_empty() {
        unpack(session, topic, &touched).await?;
    }
    Ok(done)
}

async fn unpack(session: &Session, topic: &str, packs: &[&Pack]) -> Result<()> {
    let [remove, unpack] = session.prepare([REMOVE, UNPACK]).await?;
    let (in_shards, firsts): (Vec<i16>, Vec<i64>) =
        packs.iter().map(|pack| (pack.shard, pack.ids.start)).unzip();
    let messages = || packs.iter().flat_map(|pack| &pack.messages);
    let (shards, ids): (Vec<i16>, Vec<i64>) =
        messages().map(|message| (message.position.shard.cast_signed(), message.position.id)).unzip();
    let (keys, payloads): (Vec<&str>, Vec<&[u8]>) =
        messages().map(|message| (message.key.as_str(), message.payload.as_slice())).unzip();
    session
        .bounded(try_join(
            remove.execute(&[&topic, &in_shards, &firsts]),
            unpack.execute(&[&topic, &shards, &ids, &keys, &payloads]),
        ))
        .await
        .map(drop)
}

/// Returns the runs of consecutive ids in each shard. Ids of two packs are never consecutive, so a pack that is done is one run.
fn runs((shards, ids): &(Vec<i16>, Vec<i64>)) -> Vec<(i16, Range<i64>)> {
    let mut positions: Vec<(i16, i64)> = shards.iter().copied().zip(ids.iter().copied()).collect();
    positions.sort_unstable();
    positions.dedup();
    let follows = |a: &(i16, i64), b: &(i16, i64)| a.0 == b.0 && a.1.checked_add(1) == Some(b.1);
    let ends = |run: &[(i16, i64)]| {
        let ((shard, first), (_, last)) = (*run.first()?, *run.last()?);
        Some((shard, first..last.checked_add(1)?))
    };
    positions.chunk_by(follows).filter_map(ends).collect()
}

/// Returns all ids of a settlement by shard, sorted.
fn ids_by_shard(columns: &SettlementColumns) -> HashMap<i16, Vec<i64>> {
    let SettlementColumns { done, retry, dead } = columns;
    let mut named: HashMap<i16, Vec<i64>> = HashMap::new();
    let pairs = [(&done.0, &done.1), (&retry.0, &retry.1), (&dead.0, &dead.1)];
    for (shard, id) in pairs.into_iter().flat_map(|(shards, ids)| shards.iter().zip(ids)) {
        named.entry(*shard).or_default().push(*id);
    }
    named.values_mut().for_each(|ids| ids.sort_unstable());
    named
}

/// Returns for each shard the range of first ids of the packs that may hold one of these ids.
fn candidate_ranges(named: &HashMap<i16, Vec<i64>>) -> (Vec<i16>, Vec<i64>, Vec<i64>) {
    let before = i64::try_from(pack::MESSAGES_MAX).unwrap_or(i64::MAX);
    let mut ranges = (Vec::new(), Vec::new(), Vec::new());
    for (shard, ids) in named {
        if let (Some(first), Some(last)) = (ids.first(), ids.last()) {
            ranges.0.push(*shard);
            ranges.1.push(first.saturating_sub(before));
            ranges.2.push(*last);
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_in_one_shard_and_has_no_gap() {
        let done = (vec![1, 0, 0, 0, 0, 1], vec![8, 7, 5, 6, 6, 10]);
        assert_eq!(runs(&done), [(0, 5..8), (1, 8..9), (1, 10..11)]);
        assert!(runs(&(vec![0], vec![i64::MAX])).is_empty(), "no pack ends there");
        assert!(runs(&(Vec::new(), Vec::new())).is_empty());
    }
}
