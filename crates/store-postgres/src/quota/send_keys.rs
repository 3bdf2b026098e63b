//! Idempotency keys of sends in Postgres. Rows of keys are always locked in order of the hash, so batches cannot deadlock.

use std::collections::{HashMap, HashSet};
use std::time::SystemTime;

use futures_util::future::try_join3;
use tokio_postgres::Row;
use uuid::Uuid;
use weir_core::quota::Grant;
use weir_core::{MessageId, Timestamp};
use weir_store::Result;
use weir_store::quota::send_keys::{self, SendKeyChanges};
use weir_store::quota::{SendKeyHash, SendMessage, SendRecord, random_bytes};

use crate::clock::CLOCK;
use crate::connection::Prepared;
use crate::pool::Session;
use crate::row::{bigint, column, int, timestamp, unreadable, unsigned};
use crate::{Postgres, time};

const FIND: &str = "
    SELECT key_hash, message_hash, message_id, remaining, reset_at, expires_at
    FROM quota_idempotency WHERE key_hash = ANY($1)";
/// A record that has expired makes room for a new one. One whose message may be published stays, but is marked by a later expiry:
/// whoever has created it must not forget it any more, since this batch may publish under its id.
const RESERVE: &str = "
    INSERT INTO quota_idempotency AS old (key_hash, message_hash, message_id, expires_at)
    SELECT new.* FROM unnest($1::bytea[], $2::bytea[], $3::uuid[], $4::timestamptz[]) AS new
    ON CONFLICT (key_hash) DO UPDATE
    SET message_hash = CASE WHEN old.expires_at <= $5 THEN excluded.message_hash ELSE old.message_hash END,
        message_id = CASE WHEN old.expires_at <= $5 THEN excluded.message_id ELSE old.message_id END,
        remaining = NULL, reset_at = NULL,
        expires_at = CASE WHEN old.expires_at <= $5 THEN excluded.expires_at
                          ELSE old.expires_at + interval '1 microsecond' END
    WHERE old.expires_at <= $5 OR old.remaining IS NULL
    RETURNING key_hash, message_id";
const SAVE: &str = "
    INSERT INTO quota_idempotency (key_hash, message_hash, message_id, remaining, reset_at, expires_at)
    SELECT new.* FROM unnest($1::bytea[], $2::bytea[], $3::uuid[], $4::integer[], $5::timestamptz[], $6::timestamptz[]) AS new
    ON CONFLICT (key_hash) DO UPDATE
    SET message_hash = excluded.message_hash, message_id = excluded.message_id, remaining = excluded.remaining,
        reset_at = excluded.reset_at, expires_at = excluded.expires_at";
/// Only records that nobody has marked since they were created, nor confirmed (see [`RESERVE`]).
const FORGET: &str = "
    DELETE FROM quota_idempotency WHERE key_hash = ANY($1) AND expires_at = $2 AND remaining IS NULL";
/// In order, as [`RESERVE`] does.
const LOCK: &str = "
    SELECT FROM quota_idempotency WHERE key_hash = ANY($1) ORDER BY key_hash FOR UPDATE";
/// Keys that a batch is using are left to the next purge.
const PURGE: &str = "
    DELETE FROM quota_idempotency WHERE key_hash = ANY(ARRAY(
        SELECT key_hash FROM quota_idempotency WHERE expires_at <= coalesce($1, clock_timestamp())
        ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED))";

/// The keys whose records a batch has created before it publishes.
#[derive(Default)]
pub(super) struct ReservedKeys {
    pub(super) hashes: HashSet<SendKeyHash>,
    expires_at: Timestamp,
}

impl Postgres {
    /// Records, in a commit of its own, the ids that messages with keys are published under. Without a broker nothing is
    /// published, and nothing to be recorded.
    pub(super) async fn reserve_message_ids(
        &self,
        session: &Session,
        batch: &[SendMessage],
    ) -> Result<ReservedKeys> {
        if self.publisher.is_none() || batch.iter().all(|send| send.key.is_none()) {
            return Ok(ReservedKeys::default());
        }
        let now = self.now(&session.query_one(CLOCK, &[]).await?)?;
        let records = send_keys::reservations(batch, now, random_bytes);
        let columns = RecordColumns::of(&records);
        let RecordColumns { hashes, messages, ids, expiries, .. } = &columns;
        let values: crate::connection::Values<'_> = &[hashes, messages, ids, expiries, &time::to_system(now)];
        let mut created = HashSet::new();
        for row in session.query(RESERVE, values).await? {
            // Of those that were there before it is another.
            if ids.contains(&column(&row, 1)?) {
                created.insert(bytes(&row, 0)?);
            }
        }
        let expires_at = records.first().map(|(_, record)| record.expires_at).unwrap_or_default();
        Ok(ReservedKeys { hashes: created, expires_at })
    }

    /// Forgets the keys of a batch that has published nothing, on another connection than the one that failed.
    pub(super) async fn forget(&self, ReservedKeys { hashes, expires_at }: ReservedKeys) {
        if hashes.is_empty() {
            return;
        }
        let hashes: Vec<&[u8]> = hashes.iter().map(SendKeyHash::as_slice).collect();
        if let Err(error) = self.inner.pool.execute(FORGET, &[&hashes, &time::to_system(expires_at)]).await {
            tracing::warn!(
                error = %error.with_causes(),
                "cannot forget the idempotency keys of sends that were not published; until they expire, other messages with \
                 them are refused"
            );
        }
    }

    pub(super) async fn purge_expired_keys(&self, limit: usize) -> Result<usize> {
        let purged = self.inner.pool.execute(PURGE, &[&self.clock_override(), &bigint(limit)]).await?;
        Ok(usize::try_from(purged).unwrap_or(usize::MAX))
    }
}

/// The records of a batch's keys. Must be read after the rows of their users are locked: then no other batch changes them.
pub(super) async fn find(
    session: &Session,
    batch: &[SendMessage],
) -> Result<HashMap<SendKeyHash, SendRecord>> {
    let hashes = send_keys::hashes(batch);
    if hashes.is_empty() {
        return Ok(HashMap::new());
    }
    let hashes: Vec<&[u8]> = hashes.iter().map(SendKeyHash::as_slice).collect();
    let rows = session.query(FIND, &[&hashes]).await?;
    rows.iter().map(|row| Ok((bytes(row, 0)?, read(row)?))).collect()
}

/// Saves the changes when it is first polled. The statements are prepared before, so that they arrive before a `COMMIT` that
/// is sent afterwards.
pub(super) struct SaveKeys<'s> {
    statements: Option<[Prepared<'s>; 3]>,
    columns: RecordColumns,
    forgotten: Vec<Vec<u8>>,
    /// Of the records that were created for this batch.
    expires_at: SystemTime,
}

impl<'s> SaveKeys<'s> {
    pub(super) async fn prepare(
        session: &'s Session,
        changes: &SendKeyChanges,
        reserved: &ReservedKeys,
    ) -> Result<Self> {
        let is_empty = changes.is_empty();
        let statements = if is_empty { None } else { Some(session.prepare([LOCK, SAVE, FORGET]).await?) };
        let forgotten = changes.forgotten.iter().map(|hash| hash.to_vec()).collect();
        let expires_at = time::to_system(reserved.expires_at);
        Ok(Self { statements, columns: RecordColumns::of(&changes.saved), forgotten, expires_at })
    }

    pub(super) async fn run(&self, session: &Session) -> Result<()> {
        let Some([lock, save, forget]) = &self.statements else { return Ok(()) };
        let RecordColumns { hashes, messages, ids, remaining, resets, expiries } = &self.columns;
        let values: crate::connection::Values<'_> = &[hashes, messages, ids, remaining, resets, expiries];
        if self.forgotten.is_empty() {
            return session.bounded(save.execute(values)).await.map(drop);
        }
        let all: crate::connection::Values<'_> = &[&[hashes.as_slice(), &self.forgotten].concat()];
        let forgotten: crate::connection::Values<'_> = &[&self.forgotten, &self.expires_at];
        let save = async { if hashes.is_empty() { Ok(0) } else { save.execute(values).await } };
        let changes = try_join3(lock.query(all), save, forget.execute(forgotten));
        session.bounded(changes).await.map(drop)
    }
}

/// Records as the columns of `unnest`.
#[derive(Default)]
struct RecordColumns {
    hashes: Vec<Vec<u8>>,
    messages: Vec<Vec<u8>>,
    ids: Vec<Uuid>,
    remaining: Vec<Option<i32>>,
    resets: Vec<Option<SystemTime>>,
    expiries: Vec<SystemTime>,
}

impl RecordColumns {
    fn of(records: &[(SendKeyHash, SendRecord)]) -> Self {
        let mut columns = Self::default();
        for (hash, record) in records {
            columns.hashes.push(hash.to_vec());
            columns.messages.push(record.message.to_vec());
            columns.ids.push(*record.message_id.as_uuid());
            columns.remaining.push(record.grant.map(|grant| int(grant.remaining)));
            columns.resets.push(record.grant.map(|grant| time::to_system(grant.reset_at)));
            columns.expiries.push(time::to_system(record.expires_at));
        }
        columns
    }
}

fn bytes(row: &Row, index: usize) -> Result<[u8; 16]> {
    column::<&[u8]>(row, index)?.try_into().map_err(unreadable)
}

fn read(row: &Row) -> Result<SendRecord> {
    let (remaining, reset_at): (Option<i32>, Option<SystemTime>) = (column(row, 3)?, column(row, 4)?);
    let grant = remaining
        .zip(reset_at)
        .map(|(remaining, at)| Grant { remaining: unsigned(remaining), reset_at: time::from_system(at) });
    Ok(SendRecord {
        message: bytes(row, 1)?,
        message_id: MessageId::from_uuid(column(row, 2)?),
        grant,
        expires_at: timestamp(row, 5)?,
    })
}
