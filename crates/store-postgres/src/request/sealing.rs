//! The keys with which requests are sealed, as registered in the store. Checked when a server starts.

use uuid::Uuid;
use weir_core::{RequestId, Timestamp};
use weir_store::Result;
use weir_store::request::{Request, Sealed, SealedSearch, SealingKey};

use super::{read_id, read_request};
use crate::Postgres;
use crate::connection::Values;
use crate::row::{self, column, timestamp};

const KEYS: &str = "SELECT name, digest, check_value, registered_at FROM sealing_key ORDER BY name, digest";
const REGISTER: &str = "
    INSERT INTO sealing_key (name, digest, check_value, registered_at)
    VALUES ($1, $2, $3, coalesce($4, clock_timestamp()))
    ON CONFLICT (name, digest) DO UPDATE
    SET check_value = excluded.check_value, registered_at = excluded.registered_at";
const FORGET: &str = "DELETE FROM sealing_key WHERE name = $1 AND digest = $2";
const SEALED_WITH: &str = "
    SELECT request_id, payload_key_id = $2 OR coalesce(result_key_id = $2, false) FROM request_record
    WHERE request_id > $1 ORDER BY request_id LIMIT $3";
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
    let rows = engine.inner.pool.query(SEALED_WITH, &[&after, &name, &row::bigint(limit)]).await?;
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
