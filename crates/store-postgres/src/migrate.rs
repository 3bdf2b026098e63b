//! Migrates the schema while servers use it: those of this version, and those of the version before.
//!
//! A migration only adds: tables, columns without a rewrite, constraints that are not checked on rows of before. What the version
//! before must not miss is not begun by a migration but later, when all servers are new (see `request/sealing.rs`); that raises
//! `oldest_version`, and older servers do not start any more.
//!
//! Triggers that count rows (see `book.rs`) are created with a new database, and on tables of before by the servers that run.
//!
//! An index on a table of before is created concurrently, outside of the migrations, and is not part of the version.
//!
//! `weir_schema` has a row for each migration up to [`RECORDED_EACH`], and for all in a database that this version created. Programs
//! that know no more than those refuse a database with a higher number there, so later migrations of older databases are recorded
//! in `weir_schema_state` only.

use tokio_postgres::{Client, Transaction};
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::book;
use crate::connection::connect;
use crate::error::classify;
use crate::requirements::{self, Unsuitable};
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
    include_str!("../migrations/0014_request_index.sql"),
    include_str!("../migrations/0015_quota_reserved.sql"),
    include_str!("../migrations/0016_row_count.sql"),
    include_str!("../migrations/0017_request_turns.sql"),
    include_str!("../migrations/0018_tier_subscription.sql"),
    include_str!("../migrations/0019_sale_end.sql"),
    include_str!("../migrations/0020_tier_concurrency.sql"),
    include_str!("../migrations/0021_request_control.sql"),
    include_str!("../migrations/0022_quota_idempotency.sql"),
];

/// The schema version of this program.
const VERSION: i32 = 22;
/// The last migration with a row of its own in `weir_schema`.
const RECORDED_EACH: i32 = 13;
/// The oldest schema that servers can use while it is migrated: those of earlier ones do not know the packs of the queue.
const OLDEST_MIGRATED: i32 = 9;
/// The first version that stores idempotency keys as keyed hashes.
pub(crate) const HASHED_KEYS_VERSION: i32 = 14;
/// The first version that counts `reserved_count` of quota.
pub(crate) const RESERVED_COUNT_VERSION: i32 = 15;

/// Indexes on tables that may be large. Each is created without a lock that blocks writes. Queries are right without
/// it, and those that would take too long are not used until it is there (see `request/turns.rs`).
const INDEXES: &[(&str, &str)] = &[
    ("dead_letter_key", "dead_letter (topic, key)"),
    (
        "request_job_turn",
        "request_job (downstream, waiting_tenant, claimable_at) WHERE waiting_tenant IS NOT NULL",
    ),
    ("request_job_parked", "request_job (downstream, claimable_at) WHERE waiting_tenant IS NULL"),
    ("request_job_express", "request_job (downstream, claimable_at) WHERE is_express"),
    ("tier_subscription_expiry", "tier_subscription (expires_at) WHERE expires_at IS NOT NULL"),
];
/// Held while indexes are created. It is only tried: one who waits for it would hold a snapshot, which the creation waits for.
const TRY_LOCK_INDEXES: &str = "SELECT pg_try_advisory_lock(2003134835)";
/// Whether an index is complete. A server that dies while it creates one leaves an invalid one behind.
const IS_VALID: &str = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass($1::text)";
/// Serializes migrations. The number is arbitrary and unlikely to be used by another program ("weir" in ASCII).
pub(crate) const LOCK_MIGRATIONS: &str = "SELECT pg_advisory_xact_lock(2003134834)";
/// A table that a long transaction uses is not waited for: every other statement would wait behind the migration. The start tries
/// again.
const BOUND_LOCKS: &str = "SET LOCAL lock_timeout = '2s'";
/// `version` is the last migration, `oldest_version` the schema version of the oldest program that may use the database,
/// `created_version` that of the program that created it.
const CREATE_HISTORY: &str = "
    CREATE TABLE IF NOT EXISTS weir_schema (
        version    integer     PRIMARY KEY,
        applied_at timestamptz NOT NULL DEFAULT now()
    );
    CREATE TABLE IF NOT EXISTS weir_schema_state (
        id              smallint PRIMARY KEY CHECK (id = 1),
        version         integer  NOT NULL,
        oldest_version  integer  NOT NULL,
        created_version integer  NOT NULL
    )";
const STATE: &str = "
    SELECT coalesce(max(state.version), (SELECT max(version) FROM weir_schema), 0), coalesce(max(oldest_version), 0)
    FROM weir_schema_state AS state";
/// Servers of versions before `$1` do not start from here on: those before `weir_schema_state` look at `weir_schema`.
pub(crate) const REFUSE_OLDER_SERVERS: &str = "
    WITH stated AS (
        UPDATE weir_schema_state SET oldest_version = greatest(oldest_version, $1) WHERE id = 1)
    INSERT INTO weir_schema (version) VALUES ($1) ON CONFLICT DO NOTHING";
/// The table is new, so its triggers count all of its rows.
const COUNTED_WHOLE: &str = "INSERT INTO row_count_complete (table_name) VALUES ($1)";
const RECORD: &str = "INSERT INTO weir_schema (version) VALUES ($1)";
const RECORD_STATE: &str = "
    INSERT INTO weir_schema_state AS state (id, version, oldest_version, created_version) VALUES (1, $1, $2, $3)
    ON CONFLICT (id) DO UPDATE SET version = greatest(state.version, excluded.version)";

/// What the database says of its schema.
#[derive(Clone, Copy, Debug)]
struct SchemaState {
    /// The last migration; 0 if the database is empty.
    version: i32,
    /// The oldest program that may use it.
    oldest_version: i32,
}

/// Applies all missing migrations in one transaction, so a server that dies half-way leaves nothing behind. Servers that start at
/// the same time migrate one after the other.
pub(crate) async fn run(target: &PostgresTarget) -> Result<()> {
    let (mut client, driver) = connect(target).await?;
    requirements::check(&client, target).await?;
    let transaction = client.transaction().await.map_err(classify)?;
    let state = lock(&transaction).await.map_err(classify)?;
    check(state).map_err(|sentence| Error::failed(ENGINE, Unsuitable::Schema(sentence)))?;
    migrate(&transaction, state).await.map_err(classify)?;
    transaction.commit().await.map_err(classify)?;
    // Not waited for: the creation of an index waits for every transaction in the database, such as a backup.
    tokio::spawn(async move {
        let _driver = driver;
        if let Err(error) = create_indexes(&client).await {
            tracing::warn!(%error, "cannot create an index in Postgres; the next start tries again");
        }
    });
    Ok(())
}

/// Creates missing indexes, unless another server is at it.
async fn create_indexes(client: &Client) -> Result<(), tokio_postgres::Error> {
    for (name, columns) in INDEXES {
        if is_valid(client, name).await? == Some(true) {
            continue;
        }
        let is_locked: bool = client.query_one(TRY_LOCK_INDEXES, &[]).await?.try_get(0)?;
        if !is_locked {
            return Ok(());
        }
        match is_valid(client, name).await? {
            Some(true) => continue,
            Some(false) => client.batch_execute(&format!("DROP INDEX CONCURRENTLY {name}")).await?,
            None => {}
        }
        client.batch_execute(&format!("CREATE INDEX CONCURRENTLY {name} ON {columns}")).await?;
        tracing::info!(index = name, "created an index in Postgres");
    }
    Ok(())
}

/// `None` if there is no such index, `false` if a server died, or is busy, creating it.
async fn is_valid(client: &Client, index: &str) -> Result<Option<bool>, tokio_postgres::Error> {
    let found = client.query_opt(IS_VALID, &[&index]).await?;
    found.map(|row| row.try_get(0)).transpose()
}

async fn lock(transaction: &Transaction<'_>) -> Result<SchemaState, tokio_postgres::Error> {
    transaction.batch_execute(LOCK_MIGRATIONS).await?;
    transaction.batch_execute(BOUND_LOCKS).await?;
    transaction.batch_execute(CREATE_HISTORY).await?;
    let row = transaction.query_one(STATE, &[]).await?;
    Ok(SchemaState { version: row.try_get(0)?, oldest_version: row.try_get(1)? })
}

/// Whether this program may use the schema; if not, why and what to do.
fn check(SchemaState { version, oldest_version }: SchemaState) -> Result<(), String> {
    if oldest_version > VERSION {
        return Err(format!(
            "its schema is for programs from schema version {oldest_version} on, and this weir has version {VERSION}: \
             start a newer weir"
        ));
    }
    if version > 0 && version < OLDEST_MIGRATED {
        return Err(format!(
            "its schema has version {version}, and this weir, with version {VERSION}, migrates from version \
             {OLDEST_MIGRATED} on: start an earlier weir first, which migrates it"
        ));
    }
    Ok(())
}

async fn migrate(transaction: &Transaction<'_>, state: SchemaState) -> Result<(), tokio_postgres::Error> {
    for (version, sql) in (1..).zip(MIGRATIONS).skip_while(|(version, _)| *version <= state.version) {
        transaction.batch_execute(sql).await?;
        if version <= RECORDED_EACH || state.version == 0 {
            transaction.execute(RECORD, &[&version]).await?;
        }
        tracing::info!(version, "migrated the Postgres schema");
    }
    if state.version == 0 {
        for (name, columns) in INDEXES {
            transaction.batch_execute(&format!("CREATE INDEX {name} ON {columns}")).await?;
        }
        for table in book::TABLES {
            transaction.batch_execute(&book::create_triggers(table)).await?;
            transaction.execute(COUNTED_WHOLE, &[&table.name]).await?;
        }
    }
    let created = if state.version == 0 { VERSION } else { state.version };
    // A database of an earlier program may be used by that program until something begins that it would miss.
    let oldest = if state.version == 0 { VERSION } else { OLDEST_MIGRATED };
    transaction.execute(RECORD_STATE, &[&VERSION, &oldest, &created]).await.map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use weir_testkit::postgres::{Database, Server};

    use super::*;
    use crate::{Postgres, unsuitable};

    async fn open(database: &Database) -> Result<Postgres> {
        Postgres::open(database.url().parse().expect("a Postgres URL"), 1).await
    }

    async fn numbers(database: &Database, sql: &str) -> Vec<i32> {
        let rows = database.query_strings(sql).await;
        rows.into_iter().flatten().map(|value| value.expect("a value").parse().expect("a number")).collect()
    }

    const STATE: &str = "SELECT version, oldest_version, created_version FROM weir_schema_state";
    const LEGACY: &str = "SELECT max(version) FROM weir_schema";

    #[test]
    fn the_version_is_that_of_the_last_migration() {
        assert_eq!(i32::try_from(MIGRATIONS.len()), Ok(VERSION));
    }

    #[tokio::test]
    async fn a_database_of_the_version_before_stays_usable_by_it() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("migrate").await;
        database.execute(CREATE_HISTORY).await;
        database.execute("DROP TABLE weir_schema_state").await;
        for (version, sql) in (1..=RECORDED_EACH).zip(MIGRATIONS) {
            database.execute(sql).await;
            database.execute(&format!("INSERT INTO weir_schema (version) VALUES ({version})")).await;
        }
        let target: PostgresTarget = database.url().parse().expect("a Postgres URL");
        let (a, b, c) = tokio::join!(run(&target), run(&target), run(&target));
        for outcome in [a, b, c] {
            outcome.expect("servers that start at once migrate one after the other");
        }
        assert_eq!(numbers(&database, STATE).await, [VERSION, OLDEST_MIGRATED, RECORDED_EACH]);
        // This is all that the version before looks at.
        assert_eq!(numbers(&database, LEGACY).await, [RECORDED_EACH]);
    }

    #[tokio::test]
    async fn missing_and_broken_indexes_are_created_while_others_write() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("migrate").await;
        open(&database).await.expect("it opens");
        let (name, _) = INDEXES[0];
        let break_index =
            format!("UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{name}'::regclass");
        for damage in [format!("DROP INDEX {name}"), break_index] {
            database.execute(&damage).await;
            let writer = database.connect().await.expect("a session");
            writer
                .batch_execute("BEGIN; LOCK dead_letter IN ROW EXCLUSIVE MODE")
                .await
                .expect("as an insert does");
            let (first, second) = (database.connect().await, database.connect().await);
            let (first, second) = (first.expect("a session"), second.expect("a session"));
            let create = create_indexes(&first);
            let end_writer = async {
                // Not from the writer: within a transaction the view stays as it was at its first reading.
                let waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%INDEX CONCURRENTLY%' AND \
                               wait_event_type = 'Lock' AND datname = current_database()";
                while second.query_one(waiting, &[]).await.expect("a count").get::<_, i64>(0) == 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                create_indexes(&second).await.expect("it leaves the index to the first one");
                writer.batch_execute("COMMIT").await.expect("it was never blocked");
            };
            tokio::join!(async { create.await.expect("it is created") }, end_writer);
            assert_eq!(is_valid(&first, name).await.expect("an answer"), Some(true), "{damage}");
        }
    }

    #[tokio::test]
    async fn a_database_of_this_version_is_not_for_the_version_before() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("migrate").await;
        open(&database).await.expect("it opens");
        open(&database).await.expect("it opens again");
        assert_eq!(numbers(&database, STATE).await, [VERSION; 3]);
        assert_eq!(numbers(&database, LEGACY).await, [VERSION]);
    }

    #[tokio::test]
    async fn the_database_says_which_programs_may_use_it() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = Server::shared().database("migrate").await;
        open(&database).await.expect("it opens");
        let (older, newer) = (OLDEST_MIGRATED - 1, VERSION + 5);
        for (version, oldest_version, refusal) in [
            (newer, OLDEST_MIGRATED, None),
            (newer, VERSION, None),
            (newer, VERSION + 1, Some("start a newer weir")),
            (older, 1, Some("start an earlier weir first")),
        ] {
            let state = format!("version = {version}, oldest_version = {oldest_version}");
            database.execute(&format!("UPDATE weir_schema_state SET {state}")).await;
            let opened = open(&database).await;
            let found = opened.as_ref().err().and_then(unsuitable).map(ToString::to_string);
            assert_eq!(found.is_some(), refusal.is_some(), "{state}: {found:?}");
            assert!(found.unwrap_or_default().contains(refusal.unwrap_or_default()), "{state}");
            let after = numbers(&database, "SELECT version FROM weir_schema_state").await;
            assert_eq!(after, [version], "a program that knows less leaves it as it is");
        }
    }
}
