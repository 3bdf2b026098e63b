//! Brings the schema to the present version. Servers that start at once take turns at it.

use tokio_postgres::Transaction;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::error::classify;
use crate::requirements;
use crate::session::connect;
use crate::target::PostgresTarget;

/// In order; a step that has been released is never changed.
const STEPS: &[&str] = &[
    include_str!("../migrations/0001_quota.sql"),
    include_str!("../migrations/0002_queue.sql"),
    include_str!("../migrations/0003_quota_cache.sql"),
    include_str!("../migrations/0004_slot.sql"),
    include_str!("../migrations/0005_slot_due.sql"),
    include_str!("../migrations/0006_request.sql"),
    include_str!("../migrations/0007_sale.sql"),
    include_str!("../migrations/0008_tier.sql"),
    include_str!("../migrations/0009_queue_pack.sql"),
    include_str!("../migrations/0010_clock.sql"),
    include_str!("../migrations/0011_request_key.sql"),
    include_str!("../migrations/0012_sealing_key.sql"),
];

/// An arbitrary number that no other program is likely to lock ("weir" in ASCII).
const TAKE_TURNS: &str = "SELECT pg_advisory_xact_lock(2003134834)";
const CREATE_HISTORY: &str = "
    CREATE TABLE IF NOT EXISTS weir_schema (
        version    integer     PRIMARY KEY,
        applied_at timestamptz NOT NULL DEFAULT now()
    )";
const VERSION: &str = "SELECT coalesce(max(version), 0) FROM weir_schema";
const RECORD: &str = "INSERT INTO weir_schema (version) VALUES ($1)";

/// All missing steps in one transaction: a server that dies half-way leaves nothing behind.
pub(crate) async fn run(target: &PostgresTarget) -> Result<()> {
    let (mut client, _driver) = connect(target).await?;
    requirements::check(&client, target).await?;
    let transaction = client.transaction().await.map_err(classify)?;
    let done = version(&transaction).await.map_err(classify)?;
    let known = i32::try_from(STEPS.len()).unwrap_or(i32::MAX);
    if done > known {
        let advice = format!(
            "the database is at schema version {done} and this weir knows {known}: start the weir that wrote it, or a newer one"
        );
        return Err(Error::failed(ENGINE, advice));
    }
    for (version, sql) in (1..).zip(STEPS).skip_while(|(version, _)| *version <= done) {
        transaction.batch_execute(sql).await.map_err(classify)?;
        transaction.execute(RECORD, &[&version]).await.map_err(classify)?;
        tracing::info!(version, "migrated the Postgres schema");
    }
    transaction.commit().await.map_err(classify)
}

async fn version(transaction: &Transaction<'_>) -> Result<i32, tokio_postgres::Error> {
    transaction.batch_execute(TAKE_TURNS).await?;
    transaction.batch_execute(CREATE_HISTORY).await?;
    transaction.query_one(VERSION, &[]).await?.try_get(0)
}
