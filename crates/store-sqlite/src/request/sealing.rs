//! The registry of encryption keys, and searches for requests that are encrypted with one. The keys themselves are not
//! stored.

use rusqlite::{Connection, OptionalExtension, params};
use weir_core::{RequestId, Timestamp};
use weir_store::request::{Request, Sealed, SealedSearch, SealingKey};

use super::{COLUMNS, limited, read_id, read_request};

const KEYS: &str = "SELECT name, digest, check_value, registered_at FROM sealing_key ORDER BY name, digest";
const REGISTER: &str = "
    INSERT INTO sealing_key (name, digest, check_value, registered_at) VALUES (?1, ?2, ?3, ?4)
    ON CONFLICT (name, digest) DO UPDATE
    SET check_value = excluded.check_value, registered_at = excluded.registered_at";
const FORGET: &str = "DELETE FROM sealing_key WHERE name = ?1 AND digest = ?2";
const SEALED_WITH: &str = "
    SELECT request_id, payload_key_id = ?2 OR ifnull(result_key_id = ?2, 0) FROM request_record
    WHERE request_id > ?1 ORDER BY request_id LIMIT ?3";

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
    let mut statement = connection.prepare_cached(SEALED_WITH)?;
    let mut rows = statement.query(params![after, name, limited(limit)])?;
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
