//! Migrates the schema. Servers that start at the same time migrate one after the other.

use tokio_postgres::Transaction;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::connection::connect;
use crate::error::classify;
use crate::requirements;
use crate::target::PostgresTarget;

/// The migrations in order. A released one is never changed.
const MIGRATIONS: &[&str] = &[
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
    include_str!("../migrations/0013_request_trace.sql"),
    include_str!("../migrations/0014_dead_letter_topic.sql"),
];

/// Serializes migrations. The number is arbitrary and unlikely to be used by another program ("weir" in ASCII).
const LOCK_MIGRATIONS: &str = "SELECT pg_advisory_xact_lock(2003134834)";
const CREATE_HISTORY: &str = "
    CREATE TABLE IF NOT EXISTS weir_schema (
        version    integer     PRIMARY KEY,
        applied_at timestamptz NOT NULL DEFAULT now()
    )";
const VERSION: &str = "SELECT coalesce(max(version), 0) FROM weir_schema";
const RECORD: &str = "INSERT INTO weir_schema (version) VALUES ($1)";

/// Applies all missing migrations in one transaction, so a server that dies half-way leaves nothing behind.
pub(crate) async fn run(target: &PostgresTarget) -> Result<()> {
    let (mut client, _driver) = connect(target).await?;
    requirements::check(&client, target).await?;
    let transaction = client.transaction().await.map_err(classify)?;
    let applied = version(&transaction).await.map_err(classify)?;
    let latest = i32::try_from(MIGRATIONS.len()).unwrap_or(i32::MAX);
    if applied > latest {
        let advice = format!(
            "the database is at schema version {applied} and this weir knows {latest}: start the weir that wrote it, or a newer one"
        );
        return Err(Error::failed(ENGINE, advice));
    }
    for (version, sql) in (1..).zip(MIGRATIONS).skip_while(|(version, _)| *version <= applied) {
        transaction.batch_execute(sql).await.map_err(classify)?;
        transaction.execute(RECORD, &[&version]).await.map_err(classify)?;
        tracing::info!(version, "migrated the Postgres schema");
    }
    transaction.commit().await.map_err(classify)
}

async fn version(transaction: &Transaction<'_>) -> Result<i32, tokio_postgres::Error> {
    transaction.batch_execute(LOCK_MIGRATIONS).await?;
    transaction.batch_execute(CREATE_HISTORY).await?;
    transaction.query_one(VERSION, &[]).await?.try_get(0)
}
