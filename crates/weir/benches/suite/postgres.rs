//! A private PostgreSQL with durable settings, with a database for Weir and one for baselines.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use weir_testkit::postgres::{Database, Options, Server};

use crate::SPREAD;

/// The table that Weir uses.
const QUOTA_TABLE: &str = include_str!("../../../store-postgres/migrations/0001_quota.sql");
/// Ten digits, like the keys of Weir in this suite.
pub(crate) const FIRST_KEY: u64 = 1_000_000_000;
const SETTINGS: [(&str, &str); 4] =
    [("fsync", "on"), ("synchronous_commit", "on"), ("shared_buffers", "256MB"), ("max_connections", "100")];

pub(crate) struct Postgres {
    server: Server,
    /// The database of the baselines.
    database: Database,
}

impl Postgres {
    pub(crate) async fn start() -> Result<Self> {
        eprintln!("starting PostgreSQL");
        let settings = SETTINGS.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let options = Options { settings, ..Options::default() };
        let server = tokio::task::spawn_blocking(move || Server::with_options(&options)).await?;
        let database = server.database("baseline").await;
        Ok(Self { server, database })
    }

    /// Returns notes about it; fails if it is not as durable as configured.
    pub(crate) async fn conditions(&self) -> Result<Vec<String>> {
        let durable = "SELECT current_setting('fsync'), current_setting('synchronous_commit'),
                       current_setting('full_page_writes'), current_setting('server_version')";
        let rows = self.database.query_strings(durable).await;
        let values: Vec<&str> = rows.iter().flatten().flatten().map(String::as_str).collect();
        let [fsync, commit, pages, version] = values[..] else {
            bail!("PostgreSQL returned unexpected settings: {values:?}");
        };
        ensure!([fsync, commit, pages] == ["on"; 3], "PostgreSQL is not durable: {values:?}");
        let mut notes =
            vec![format!("PostgreSQL {version}: fsync, synchronous_commit and full_page_writes are on")];
        if is_in_memory(&std::env::temp_dir()) {
            notes.push("PostgreSQL wrote to memory (tmpfs), where an fsync is free; set TMPDIR".to_owned());
        }
        Ok(notes)
    }

    /// Returns the directory of PostgreSQL's programs.
    pub(crate) fn bin_dir(&self) -> Result<PathBuf> {
        self.server.bin_dir().context("pgbench is needed, so PostgreSQL must be installed here")
    }

    /// Returns the database of the baselines.
    pub(crate) fn baselines(&self) -> &Database {
        &self.database
    }

    /// Returns the database of the baselines, with quota's table and a row per key in it.
    pub(crate) async fn quota_baseline(&self) -> &Database {
        let exists = "SELECT 1 FROM pg_tables WHERE tablename = 'rate_limit_store'";
        if self.database.query_strings(exists).await.is_empty() {
            self.database.execute(QUOTA_TABLE).await;
            let fill = format!(
                "INSERT INTO rate_limit_store SELECT ({FIRST_KEY} + n)::text, 2147483647, 1440, 0, now()
                 FROM generate_series(0, {SPREAD} - 1) AS n"
            );
            self.database.execute(&fill).await;
        }
        &self.database
    }

    /// Vacuums `tables` after an earlier run, and writes a checkpoint.
    pub(crate) async fn tidy(&self, tables: &str) {
        self.database.execute(&format!("VACUUM ANALYZE {tables}")).await;
        self.settle().await;
    }

    /// Writes a checkpoint, so that each run starts without dirty pages of earlier ones.
    pub(crate) async fn settle(&self) {
        self.database.execute("CHECKPOINT").await;
    }

    /// Creates an empty database for Weir.
    pub(crate) async fn database(&self) -> Database {
        self.settle().await;
        self.server.database("weir").await
    }

    /// Drops the database, so that no vacuum of its dead rows runs during the next measurement.
    pub(crate) async fn drop_database(&self, database: Database) -> Result<()> {
        let name = database.url().rsplit('/').next().context("a database URL ends in its name")?;
        self.database.execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
        Ok(())
    }
}

/// Whether the directory is in memory (tmpfs).
pub(crate) fn is_in_memory(directory: &Path) -> bool {
    const TMPFS_MAGIC: i128 = 0x0102_1994;
    rustix::fs::statfs(directory).is_ok_and(|stat| i128::from(stat.f_type) == TMPFS_MAGIC)
}
