//! The registry of the keys that requests are sealed with, and searches for what is sealed with one; these keys themselves are not
//! stored. Also the switch to hashed idempotency keys (`begin_hashing`), whose key is stored, sealed, and `reseal`, which
//! replaces what is sealed with an old key.

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::request::idempotency::RETENTION;
use weir_core::{RequestId, STORED_MARK, Timestamp};
use weir_store::request::{
    HashKeys, Request, ResealedRequest, Sealed, SealedHashKey, SealedNames, SealedSearch, SealingKey,
};

use super::{COLUMNS, limited, read_id, read_request};

const KEYS: &str = "SELECT name, digest, check_value, registered_at FROM sealing_key ORDER BY name, digest";
const REGISTER: &str = "
    INSERT INTO sealing_key (name, digest, check_value, registered_at) VALUES (?1, ?2, ?3, ?4)
    ON CONFLICT (name, digest) DO UPDATE
    SET check_value = excluded.check_value, registered_at = excluded.registered_at";
const FORGET: &str = "DELETE FROM sealing_key WHERE name = ?1 AND digest = ?2";
const SEALED_WITH: &str = "
    SELECT request_id, payload_key_id = ?2 OR ifnull(result_key_id = ?2, 0)
           OR ifnull(substr(failure_message, 1, length(?4)) = ?4, 0) OR ifnull(substr(callback_url, 1, length(?4)) = ?4, 0)
    FROM request_record WHERE request_id > ?1 ORDER BY request_id LIMIT ?3";
const HASH_KEYS: &str = "SELECT name, digest, sealed FROM request_index_key ORDER BY name, digest";
const HASHING_STATE: &str = "SELECT plain_until FROM request_index WHERE id = 1";
/// Keys of before can be in use for a day; twice that, so that a clock that is set back does not matter.
const BEGIN_HASHING: &str = "
    INSERT INTO request_index (id, plain_until)
    SELECT 1, CASE WHEN accepted > 0 THEN ?1 END FROM request_ledger WHERE id = 1 ON CONFLICT DO NOTHING";
const ADD_HASH_KEY: &str = "
    INSERT INTO request_index_key (name, digest, sealed) SELECT ?1, ?2, ?3 FROM request_index WHERE id = 1
    ON CONFLICT DO NOTHING";
const REMOVE_HASH_KEY: &str = "
    DELETE FROM request_index_key
    WHERE name = ?1 AND digest = ?2 AND (SELECT count(*) FROM request_index_key) > 1";
const NAMES: &str = "
    SELECT request_id, payload_key_id, result_key_id, substr(failure_message, 1, ?3), substr(callback_url, 1, ?3)
    FROM request_record WHERE request_id > ?1 ORDER BY request_id LIMIT ?2";
const RESEAL: &str = "
    UPDATE request_record
    SET payload = CASE WHEN substr(payload, 1, 12) = ?2 THEN ?3 ELSE payload END,
        payload_key_id = CASE WHEN substr(payload, 1, 12) = ?2 THEN ?4 ELSE payload_key_id END,
        result = CASE WHEN substr(result, 1, 12) = ?5 THEN ?6 ELSE result END,
        result_key_id = CASE WHEN substr(result, 1, 12) = ?5 THEN ?7 ELSE result_key_id END,
        failure_message = CASE WHEN failure_message = ?8 THEN ?9 ELSE failure_message END,
        callback_url = CASE WHEN callback_url = ?10 THEN ?11 ELSE callback_url END
    WHERE request_id = ?1";

pub(super) fn keys(connection: &Connection) -> rusqlite::Result<Vec<(SealingKey, Timestamp)>> {
    let mut statement = connection.prepare_cached(KEYS)?;
    let keys = statement.query_map([], |row| {
        let name: String = row.get(0)?;
        let check = Sealed { key_id: name.clone(), bytes: row.get(2)? };
        Ok((SealingKey { name, digest: row.get(1)?, check }, Timestamp::from_micros(row.get(3)?)))
    })?;
    keys.collect()
}

pub(super) fn register(connection: &Connection, key: &SealingKey, now: Timestamp) -> rusqlite::Result<()> {
    let values = params![key.name, key.digest, key.check.bytes, now.as_micros()];
    connection.prepare_cached(REGISTER)?.execute(values).map(drop)
}

pub(super) fn forget(connection: &Connection, name: &str, digest: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(FORGET)?.execute([name, digest]).map(drop)
}

pub(super) fn find_sealed_with(
    connection: &Connection,
    name: &str,
    after: Option<RequestId>,
    limit: usize,
) -> rusqlite::Result<SealedSearch> {
    let after = after.map(|id| id.to_string()).unwrap_or_default();
    let text = format!("{STORED_MARK}{name}:");
    let mut statement = connection.prepare_cached(SEALED_WITH)?;
    let mut rows = statement.query(params![after, name, limited(limit), text])?;
    let mut outcome = SealedSearch::None;
    while let Some(row) = rows.next()? {
        let id = read_id(row, 0)?;
        if row.get(1)? {
            return Ok(SealedSearch::Found(id));
        }
        outcome = SealedSearch::NoneUpTo(id);
    }
    Ok(outcome)
}

pub(super) fn newest(connection: &Connection) -> rusqlite::Result<Option<Request>> {
    let sql = format!("SELECT {COLUMNS} FROM request_record ORDER BY request_id DESC LIMIT 1");
    connection.prepare_cached(&sql)?.query_row([], read_request).optional()
}

pub(super) fn hash_keys(connection: &Connection, now: Timestamp) -> rusqlite::Result<HashKeys> {
    let mut statement = connection.prepare_cached(HASH_KEYS)?;
    let keys = statement.query_map([], |row| {
        Ok(SealedHashKey { name: row.get(0)?, digest: row.get(1)?, bytes: row.get(2)? })
    })?;
    let keys = keys.collect::<rusqlite::Result<_>>()?;
    let state: Option<Option<i64>> =
        connection.prepare_cached(HASHING_STATE)?.query_row([], |row| row.get(0)).optional()?;
    let has_begun = state.is_some();
    let plain_until = state.flatten().map(Timestamp::from_micros);
    // One process owns the file, so no other version uses it.
    let plain_keys_may_be_in_use = plain_until.is_some_and(|until| now < until);
    Ok(HashKeys { keys, has_begun, plain_keys_may_be_in_use, is_upgraded: false })
}

pub(super) fn begin_hashing(
    connection: &Connection,
    key: &SealedHashKey,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let plain_until = now.plus(RETENTION).plus(RETENTION);
    if connection.prepare_cached(BEGIN_HASHING)?.execute([plain_until.as_micros()])? > 0 {
        add_hash_key(connection, key)?;
    }
    Ok(())
}

pub(super) fn add_hash_key(connection: &Connection, key: &SealedHashKey) -> rusqlite::Result<()> {
    let values = params![key.name, key.digest, key.bytes];
    connection.prepare_cached(ADD_HASH_KEY)?.execute(values).map(drop)
}

pub(super) fn remove_hash_key(connection: &Connection, name: &str, digest: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(REMOVE_HASH_KEY)?.execute([name, digest]).map(drop)
}

pub(super) fn names(
    connection: &Connection,
    after: Option<RequestId>,
    limit: usize,
) -> rusqlite::Result<Vec<SealedNames>> {
    let after = after.map(|id| id.to_string()).unwrap_or_default();
    let mut statement = connection.prepare_cached(NAMES)?;
    let names = statement.query_map(params![after, limited(limit), SealedNames::TEXT_CHARS], |row| {
        Ok(SealedNames {
            id: read_id(row, 0)?,
            payload: row.get(1)?,
            result: row.get(2)?,
            failure_message: row.get(3)?,
            callback_url: row.get(4)?,
        })
    })?;
    names.collect()
}

pub(super) fn reseal(connection: &Connection, resealed: &ResealedRequest) -> rusqlite::Result<()> {
    let ResealedRequest { id, payload, result, failure_message, callback_url } = resealed;
    let [payload, result] = [payload, result].map(|field| {
        let field = field.as_ref().map(|(old, new)| (ResealedRequest::nonce_of(old), new));
        (field.map(|(old, _)| old), field.map(|(_, new)| &new.bytes), field.map(|(_, new)| &new.key_id))
    });
    let [message, url] =
        [failure_message, callback_url].map(|field| field.as_ref().map(|(old, new)| (old, new)).unzip());
    let values = params![
        id.to_string(),
        payload.0,
        payload.1,
        payload.2,
        result.0,
        result.1,
        result.2,
        message.0,
        message.1,
        url.0,
        url.1,
    ];
    connection.prepare_cached(RESEAL)?.execute(values).map(drop)
}
