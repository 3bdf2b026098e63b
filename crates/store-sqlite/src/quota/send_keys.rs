//! Idempotency keys of sends in SQLite, in the order in which they expire.

use std::collections::{HashMap, HashSet};

use rusqlite::{Connection, OptionalExtension, Row, params};
use uuid::Uuid;
use weir_core::quota::Grant;
use weir_core::{MessageId, Timestamp};
use weir_store::quota::send_keys::{self, SendKeyChanges};
use weir_store::quota::{SendKeyHash, SendMessage, SendRecord, random_bytes};

const FIND: &str = "
    SELECT message_hash, message_id, remaining, reset_at, expires_at FROM quota_idempotency WHERE key_hash = ?1";
/// A record that is there moves to the end of the table.
const SAVE: &str = "
    INSERT OR REPLACE INTO quota_idempotency (key_hash, message_hash, message_id, remaining, reset_at, expires_at)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
const FORGET: &str = "DELETE FROM quota_idempotency WHERE key_hash = ?1";
const PURGE: &str = "
    DELETE FROM quota_idempotency
    WHERE id IN (SELECT id FROM quota_idempotency ORDER BY id LIMIT ?2) AND expires_at <= ?1";

/// The records of a batch's keys.
pub(super) fn find(
    connection: &Connection,
    batch: &[SendMessage],
) -> rusqlite::Result<HashMap<SendKeyHash, SendRecord>> {
    let mut records = HashMap::new();
    for hash in send_keys::hashes(batch) {
        if let Some(record) = connection.prepare_cached(FIND)?.query_row([hash], read).optional()? {
            records.insert(hash, record);
        }
    }
    Ok(records)
}

/// Records the ids that messages with keys are published under. Returns the keys whose records are new.
pub(super) fn reserve_message_ids(
    connection: &Connection,
    batch: &[SendMessage],
    now: Timestamp,
) -> rusqlite::Result<HashSet<SendKeyHash>> {
    let found = find(connection, batch)?;
    let is_used = |hash: &SendKeyHash| found.get(hash).is_some_and(|record| record.is_live(now));
    let mut records = send_keys::reservations(batch, now, random_bytes);
    records.retain(|(hash, _)| !is_used(hash));
    save(connection, &records)?;
    Ok(records.into_iter().map(|(hash, _)| hash).collect())
}

pub(super) fn apply(connection: &Connection, changes: &SendKeyChanges) -> rusqlite::Result<()> {
    save(connection, &changes.saved)?;
    changes.forgotten.iter().try_for_each(|hash| connection.prepare_cached(FORGET)?.execute([hash]).map(drop))
}

pub(super) fn purge(connection: &Connection, now: Timestamp, limit: usize) -> rusqlite::Result<usize> {
    connection.prepare_cached(PURGE)?.execute(params![now.as_micros(), crate::request::limited(limit)])
}

fn save(connection: &Connection, records: &[(SendKeyHash, SendRecord)]) -> rusqlite::Result<()> {
    for (hash, record) in records {
        connection.prepare_cached(SAVE)?.execute(params![
            hash,
            record.message,
            record.message_id.as_uuid().as_bytes(),
            record.grant.map(|grant| grant.remaining),
            record.grant.map(|grant| grant.reset_at.as_micros()),
            record.expires_at.as_micros(),
        ])?;
    }
    Ok(())
}

fn read(row: &Row<'_>) -> rusqlite::Result<SendRecord> {
    let (remaining, reset_at): (Option<u32>, Option<i64>) = (row.get(2)?, row.get(3)?);
    let grant = remaining
        .zip(reset_at)
        .map(|(remaining, at)| Grant { remaining, reset_at: Timestamp::from_micros(at) });
    Ok(SendRecord {
        message: row.get(0)?,
        message_id: MessageId::from_uuid(Uuid::from_bytes(row.get(1)?)),
        grant,
        expires_at: Timestamp::from_micros(row.get(4)?),
    })
}
