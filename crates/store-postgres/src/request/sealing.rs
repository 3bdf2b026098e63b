//! The keys that requests are sealed with: their registry, checked when a server starts, and searches for what is sealed with one.
//! Also the switch to hashed idempotency keys (`begin_hashing`): it stores the key of the hashes, adds the constraint that refuses
//! any other form, and shuts out older servers. `reseal` replaces what is sealed with an old key.

use uuid::Uuid;
use weir_core::request::idempotency::RETENTION;
use weir_core::{RequestId, STORED_MARK, Timestamp};
use weir_store::Result;
use weir_store::request::{
    HashKeys, Request, ResealedRequest, Sealed, SealedHashKey, SealedNames, SealedSearch, SealingKey,
};

use super::{read_id, read_request};
use crate::connection::Values;
use crate::migrate::{HASHED_KEYS_VERSION, LOCK_MIGRATIONS, REFUSE_OLDER_SERVERS};
use crate::row::{self, column, timestamp};
use crate::{Postgres, time};

const KEYS: &str = "SELECT name, digest, check_value, registered_at FROM sealing_key ORDER BY name, digest";
const REGISTER: &str = "
    INSERT INTO sealing_key (name, digest, check_value, registered_at)
    VALUES ($1, $2, $3, coalesce($4, clock_timestamp()))
    ON CONFLICT (name, digest) DO UPDATE
    SET check_value = excluded.check_value, registered_at = excluded.registered_at";
const FORGET: &str = "DELETE FROM sealing_key WHERE name = $1 AND digest = $2";
const SEALED_WITH: &str = "
    SELECT request_id, payload_key_id = $2 OR coalesce(result_key_id = $2, false)
           OR coalesce(starts_with(failure_message, $4), false) OR coalesce(starts_with(callback_url, $4), false)
    FROM request_record WHERE request_id > $1 ORDER BY request_id LIMIT $3";
const HASH_KEYS: &str = "SELECT name, digest, sealed FROM request_index_key ORDER BY name, digest";
const HASHING_STATE: &str = "
    SELECT coalesce((SELECT plain_until > coalesce($1, clock_timestamp()) FROM request_index WHERE id = 1), false),
           (SELECT created_version < $2 FROM weir_schema_state WHERE id = 1),
           EXISTS (SELECT FROM request_index WHERE id = 1)";
/// Keys of before can be in use for a day; twice that, so that a clock that is set back does not matter.
const BEGIN_HASHING: &str = "
    INSERT INTO request_index (id, plain_until)
    SELECT 1, CASE WHEN EXISTS (SELECT FROM idempotency_record)
                   THEN coalesce($1, clock_timestamp()) + $2::bigint * interval '2 microseconds' END
    ON CONFLICT DO NOTHING";
const ADD_HASH_KEY: &str = "
    INSERT INTO request_index_key (name, digest, sealed) SELECT $1, $2, $3
    WHERE EXISTS (SELECT FROM request_index_key) ON CONFLICT DO NOTHING";
/// Under the lock of migrations, so that there is only one key.
const ADD_FIRST_HASH_KEY: &str = "
    INSERT INTO request_index_key (name, digest, sealed) SELECT $1, $2, $3
    WHERE NOT EXISTS (SELECT FROM request_index_key)";
const REMOVE_HASH_KEY: &str = "
    DELETE FROM request_index_key
    WHERE name = $1 AND digest = $2 AND (SELECT count(*) FROM request_index_key) > 1";
const NAMES: &str = "
    SELECT request_id, payload_key_id, result_key_id, left(failure_message, $3), left(callback_url, $3)
    FROM request_record WHERE request_id > $1 ORDER BY request_id LIMIT $2";
const RESEAL: &str = "
    UPDATE request_record
    SET payload = CASE WHEN substring(payload FOR 12) = $2 THEN $3 ELSE payload END,
        payload_key_id = CASE WHEN substring(payload FOR 12) = $2 THEN $4 ELSE payload_key_id END,
        result = CASE WHEN substring(result FOR 12) = $5 THEN $6 ELSE result END,
        result_key_id = CASE WHEN substring(result FOR 12) = $5 THEN $7 ELSE result_key_id END,
        failure_message = CASE WHEN failure_message = $8 THEN $9 ELSE failure_message END,
        callback_url = CASE WHEN callback_url = $10 THEN $11 ELSE callback_url END
    WHERE request_id = $1";

/// The constraint that refuses keys that are not hashed. Its table is locked while it is added, so every key that was stored
/// without a hash is visible to all who store one with it.
pub(super) const HASHED_KEYS: &str = "idempotency_record_hashed";
/// Rows of before are not checked, so nothing is read.
const REFUSE_PLAIN_KEYS: &str = r"
    ALTER TABLE idempotency_record ADD CONSTRAINT idempotency_record_hashed
    CHECK (starts_with(idempotency_key, E'\x01')) NOT VALID";
const FIND_CONSTRAINT: &str = "
    SELECT true FROM pg_constraint
    WHERE conrelid = 'idempotency_record'::regclass AND conname = 'idempotency_record_hashed'";
/// How long to wait for each lock. Other writers wait behind this one, so where servers of before are in use it gives up early, and
/// is tried again by a later submission. On a new database servers that start together wait for each other instead.
const LIMIT_LOCK_WAIT: &str = "
    SELECT set_config('lock_timeout', CASE WHEN created_version < $1 THEN '50ms' ELSE '500ms' END, true)
    FROM weir_schema_state WHERE id = 1";
/// Longer than an autovacuum lets others wait: it ends when one has waited for `deadlock_timeout`, in milliseconds.
const OUTWAIT_AUTOVACUUM: &str = "
    SELECT set_config('lock_timeout', (setting::integer + 500)::text, true)
    FROM pg_settings WHERE name = 'deadlock_timeout'";
/// In the way of vacuums and changes of the schema, and of nobody who reads or writes rows.
const LOCK_OUT_VACUUM: &str = "LOCK TABLE idempotency_record IN SHARE UPDATE EXCLUSIVE MODE";
const NEWEST: &str = "
    SELECT request_id, tenant_id, request_type, status, attempts, payload, payload_key_id, result, result_key_id,
           failure_code, failure_message, callback_url, created_at, updated_at, traceparent, tracestate
    FROM request_record ORDER BY request_id DESC LIMIT 1";

pub(super) async fn keys(engine: &Postgres) -> Result<Vec<(SealingKey, Timestamp)>> {
    let rows = engine.inner.pool.query(KEYS, &[]).await?;
    rows.iter()
        .map(|row| {
            let name: String = column(row, 0)?;
            let check = Sealed { key_id: name.clone(), bytes: column(row, 2)? };
            Ok((SealingKey { name, digest: column(row, 1)?, check }, timestamp(row, 3)?))
        })
        .collect()
}

pub(super) async fn register(engine: &Postgres, key: &SealingKey) -> Result<()> {
    let values: Values<'_> = &[&key.name, &key.digest, &key.check.bytes, &engine.clock_override()];
    engine.inner.pool.execute(REGISTER, values).await.map(drop)
}

pub(super) async fn forget(engine: &Postgres, name: &str, digest: &str) -> Result<()> {
    engine.inner.pool.execute(FORGET, &[&name, &digest]).await.map(drop)
}

pub(super) async fn find_sealed_with(
    engine: &Postgres,
    name: &str,
    after: Option<RequestId>,
    limit: usize,
) -> Result<SealedSearch> {
    let after = after.map_or(Uuid::nil(), |id| *id.as_uuid());
    let text = format!("{STORED_MARK}{name}:");
    let rows = engine.inner.pool.query(SEALED_WITH, &[&after, &name, &row::bigint(limit), &text]).await?;
    let mut outcome = SealedSearch::None;
    for row in &rows {
        let id = read_id(row, 0)?;
        if column(row, 1)? {
            return Ok(SealedSearch::Found(id));
        }
        outcome = SealedSearch::NoneUpTo(id);
    }
    Ok(outcome)
}

pub(super) async fn newest(engine: &Postgres) -> Result<Option<Request>> {
    let row = engine.inner.pool.query_opt(NEWEST, &[]).await?;
    row.as_ref().map(read_request).transpose()
}

pub(super) async fn hash_keys(engine: &Postgres) -> Result<HashKeys> {
    let rows = engine.inner.pool.query(HASH_KEYS, &[]).await?;
    let read =
        |row| Ok(SealedHashKey { name: column(row, 0)?, digest: column(row, 1)?, bytes: column(row, 2)? });
    let keys = rows.iter().map(read).collect::<Result<_>>()?;
    // After the keys: where there are keys, the state is that of after hashing has begun.
    let values: Values<'_> = &[&engine.clock_override(), &HASHED_KEYS_VERSION];
    let row = engine.inner.pool.query_one(HASHING_STATE, values).await?;
    let (plain_keys_may_be_in_use, is_upgraded, has_begun) =
        (column(&row, 0)?, column(&row, 1)?, column(&row, 2)?);
    Ok(HashKeys { keys, has_begun, plain_keys_may_be_in_use, is_upgraded })
}

pub(super) async fn begin_hashing(engine: &Postgres, key: &SealedHashKey) -> Result<()> {
    let session = engine.inner.pool.session().await?;
    session.run("BEGIN").await?;
    session.query(LIMIT_LOCK_WAIT, &[&HASHED_KEYS_VERSION]).await?;
    session.query(LOCK_MIGRATIONS, &[]).await?;
    if session.query_opt(FIND_CONSTRAINT, &[]).await?.is_none() {
        if let Err(error) = session.run(REFUSE_PLAIN_KEYS).await {
            if error.is_transient() {
                tokio::spawn(interrupt_autovacuum(engine.clone()));
            }
            return Err(error);
        }
        session.execute(BEGIN_HASHING, &[&engine.clock_override(), &time::micros(RETENTION)]).await?;
        session.execute(ADD_FIRST_HASH_KEY, &[&key.name, &key.digest, &key.bytes]).await?;
        session.execute(REFUSE_OLDER_SERVERS, &[&HASHED_KEYS_VERSION]).await?;
    }
    session.run("COMMIT").await?;
    session.keep();
    Ok(())
}

/// Makes an autovacuum of the table end, so that the next attempt to begin is not in vain. Writers would wait behind the lock that the
/// attempt needs, so it gives up sooner than an autovacuum yields; this lock keeps nobody waiting. An error is left to the next
/// attempt, which has a log line.
async fn interrupt_autovacuum(engine: Postgres) -> Result<()> {
    let session = engine.inner.pool.session().await?;
    session.run("BEGIN").await?;
    session.query(OUTWAIT_AUTOVACUUM, &[]).await?;
    session.run(LOCK_OUT_VACUUM).await?;
    session.run("COMMIT").await?;
    session.keep();
    Ok(())
}

pub(super) async fn prepare_hash_key(engine: &Postgres, key: &SealedHashKey) -> Result<()> {
    let session = engine.inner.pool.session().await?;
    session.run("BEGIN").await?;
    session.query(LOCK_MIGRATIONS, &[]).await?;
    session.execute(ADD_FIRST_HASH_KEY, &[&key.name, &key.digest, &key.bytes]).await?;
    session.run("COMMIT").await?;
    session.keep();
    Ok(())
}

pub(super) async fn add_hash_key(engine: &Postgres, key: &SealedHashKey) -> Result<()> {
    engine.inner.pool.execute(ADD_HASH_KEY, &[&key.name, &key.digest, &key.bytes]).await.map(drop)
}

pub(super) async fn remove_hash_key(engine: &Postgres, name: &str, digest: &str) -> Result<()> {
    let session = engine.inner.pool.session().await?;
    session.run("BEGIN").await?;
    // Two servers must not remove the last two forms at once.
    session.query(LOCK_MIGRATIONS, &[]).await?;
    session.execute(REMOVE_HASH_KEY, &[&name, &digest]).await?;
    session.run("COMMIT").await?;
    session.keep();
    Ok(())
}

pub(super) async fn names(
    engine: &Postgres,
    after: Option<RequestId>,
    limit: usize,
) -> Result<Vec<SealedNames>> {
    let after = after.map_or(Uuid::nil(), |id| *id.as_uuid());
    let chars = i32::try_from(SealedNames::TEXT_CHARS).unwrap_or(i32::MAX);
    let rows = engine.inner.pool.query(NAMES, &[&after, &row::bigint(limit), &chars]).await?;
    let read = |row| {
        Ok(SealedNames {
            id: read_id(row, 0)?,
            payload: column(row, 1)?,
            result: column(row, 2)?,
            failure_message: column(row, 3)?,
            callback_url: column(row, 4)?,
        })
    };
    rows.iter().map(read).collect()
}

pub(super) async fn reseal(engine: &Postgres, resealed: &ResealedRequest) -> Result<()> {
    let ResealedRequest { id, payload, result, failure_message, callback_url } = resealed;
    let [payload, result] = [payload, result].map(|field| {
        let field = field.as_ref().map(|(old, new)| (ResealedRequest::nonce_of(old), new));
        (field.map(|(old, _)| old), field.map(|(_, new)| &new.bytes), field.map(|(_, new)| &new.key_id))
    });
    let [message, url] =
        [failure_message, callback_url].map(|field| field.as_ref().map(|(old, new)| (old, new)).unzip());
    let values: Values<'_> = &[
        id.as_uuid(),
        &payload.0,
        &payload.1,
        &payload.2,
        &result.0,
        &result.1,
        &result.2,
        &message.0,
        &message.1,
        &url.0,
        &url.1,
    ];
    engine.inner.pool.execute(RESEAL, values).await.map(drop)
}
