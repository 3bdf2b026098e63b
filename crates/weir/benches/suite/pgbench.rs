//! The baseline of the Postgres engine: pgbench, one `SELECT … FOR UPDATE; UPDATE` transaction a request, on the
//! PostgreSQL that Weir then runs on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use weir_testkit::postgres::{Database, Options, Server};

use crate::process::Process;
use crate::results::Row;
use crate::table::grouped;
use crate::{Bench, HOT, SPREAD};

/// The very table Weir uses.
const TABLE: &str = include_str!("../../../store-postgres/migrations/0001_quota.sql");
/// Ten digits, as Weir's keys here end in.
const FIRST_KEY: u64 = 1_000_000_000;
const SETTINGS: [(&str, &str); 4] =
    [("fsync", "on"), ("synchronous_commit", "on"), ("shared_buffers", "256MB"), ("max_connections", "100")];
const SCRIPT: &str = "\\set key random(:first, :last)
BEGIN;
SELECT rate_limit, time_window, current_count, last_refresh_time
    FROM rate_limit_store WHERE user_id = :key FOR UPDATE;
UPDATE rate_limit_store SET current_count = current_count + 1 WHERE user_id = :key;
COMMIT;
";
const CLIENTS: &str = "32";
/// What pgbench may take beyond its time, connecting included.
const MARGIN: Duration = Duration::from_secs(30);

/// A PostgreSQL of the suite's own, with the baseline's table in it.
pub(crate) struct Baseline {
    server: Server,
    database: Database,
    pgbench: PathBuf,
    directory: PathBuf,
}

impl Baseline {
    pub(crate) async fn start(scratch: &Path) -> Result<Self> {
        eprintln!("starting PostgreSQL");
        let settings = SETTINGS.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let options = Options { settings, tls: false };
        let server = tokio::task::spawn_blocking(move || Server::with_options(&options)).await?;
        let bin_dir = server.bin_dir().context("pgbench is needed, so PostgreSQL must be installed here")?;
        let database = server.database("baseline").await;
        database.execute(TABLE).await;
        database
            .execute(&format!(
                "INSERT INTO rate_limit_store SELECT ({FIRST_KEY} + n)::text, 2147483647, 1440, 0, now()
                 FROM generate_series(0, {SPREAD} - 1) AS n"
            ))
            .await;
        let directory = scratch.join("pgbench");
        fs::create_dir_all(&directory).context("create a directory for pgbench")?;
        fs::write(directory.join("script.sql"), SCRIPT).context("write pgbench's script")?;
        Ok(Self { server, database, pgbench: bin_dir.join("pgbench"), directory })
    }

    /// What to know about this PostgreSQL; an error when it is not as durable as it was asked to be.
    pub(crate) async fn conditions(&self) -> Result<Vec<String>> {
        let durable = "SELECT current_setting('fsync'), current_setting('synchronous_commit'),
                       current_setting('full_page_writes'), current_setting('server_version')";
        let rows = self.database.query_strings(durable).await;
        let values: Vec<&str> = rows.iter().flatten().flatten().map(String::as_str).collect();
        let [fsync, commit, pages, version] = values[..] else {
            anyhow::bail!("PostgreSQL did not tell its settings: {values:?}");
        };
        ensure!([fsync, commit, pages] == ["on"; 3], "PostgreSQL is not durable: {values:?}");
        let mut notes = vec![format!(
            "PostgreSQL {version}: fsync, synchronous_commit and full_page_writes are on; pgbench -c {CLIENTS} -j 2 \
             -M prepared"
        )];
        if is_in_memory(&std::env::temp_dir()) {
            notes.push("PostgreSQL wrote to memory (tmpfs), where an fsync is free; set TMPDIR".to_owned());
        }
        Ok(notes)
    }

    /// An empty database for Weir.
    pub(crate) async fn database(&self, keys: u64) -> Result<Database> {
        self.settle().await;
        Ok(self.server.database(&format!("weir_{keys}")).await)
    }

    /// Removes it, so that no vacuum of its dead rows runs beside the next measurement.
    pub(crate) async fn drop_database(&self, database: Database) -> Result<()> {
        let name = database.url().rsplit('/').next().context("a database URL ends in its name")?;
        self.database.execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
        Ok(())
    }

    /// Transactions a second on one hot row or over many.
    pub(crate) async fn measure(&self, bench: &Bench, keys: u64) -> Result<Row> {
        let rows =
            if keys == HOT { "one hot row".to_owned() } else { format!("{} rows", grouped(keys as f64)) };
        let name = format!("pgbench, {rows}");
        eprintln!("measuring: {name}");
        self.database.execute("VACUUM ANALYZE rate_limit_store").await;
        self.settle().await;
        self.run(bench.warmup, keys, "warm-up").await?;
        let (output, mut latencies_us) = self.run(bench.duration, keys, "measured").await?;
        ensure!(!latencies_us.is_empty(), "pgbench logged no transaction: {output}");
        latencies_us.sort_unstable();
        let percentile_ms = |percent: usize| latencies_us[latencies_us.len() * percent / 100] as f64 / 1000.0;
        let rate = number_after(&output, "tps = ")?;
        let failed = number_after(&output, "number of failed transactions: ")?;
        Ok(Row::new(name, rate, percentile_ms(50), percentile_ms(99), failed))
    }

    /// Writes out what earlier runs left dirty, so that each starts with the same debts: none.
    async fn settle(&self) {
        self.database.execute("CHECKPOINT").await;
    }

    /// One pgbench: what it printed, and how long each transaction took.
    async fn run(&self, duration: Duration, keys: u64, what: &str) -> Result<(String, Vec<u64>)> {
        let directory = self.directory.join(what);
        // The logs of an earlier run would count again.
        let _ = fs::remove_dir_all(&directory);
        let mut command = Command::new(&self.pgbench);
        command
            .args(["-n", "-M", "prepared", "-c", CLIENTS, "-j", "2", "-T", &duration.as_secs().to_string()])
            .args(["-D", &format!("first={FIRST_KEY}"), "-D", &format!("last={}", FIRST_KEY + keys - 1)])
            .arg("-f")
            .arg(self.directory.join("script.sql"))
            .args(["--log", "--log-prefix=transactions"])
            .arg(self.database.url());
        let mut process = Process::spawn(command, &directory)?;
        let status = process.wait(duration + MARGIN).await.context("run pgbench")?;
        ensure!(status.success(), "pgbench ended with {status}: {}", process.output());
        Ok((process.output(), latencies_us(&directory)?))
    }
}

/// Third field of every line of pgbench's transaction logs, one file a thread.
fn latencies_us(directory: &Path) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).context("list pgbench's logs")? {
        let entry = entry.context("list pgbench's logs")?;
        if entry.file_name().to_string_lossy().starts_with("transactions") {
            let text = fs::read_to_string(entry.path()).context("read a log of pgbench")?;
            found.extend(text.lines().filter_map(|line| line.split(' ').nth(2)?.parse::<u64>().ok()));
        }
    }
    Ok(found)
}

fn number_after<T: FromStr>(output: &str, words: &str) -> Result<T> {
    let rest = output.split_once(words).map(|(_, rest)| rest);
    let number = rest.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit() && c != '.').next());
    number.and_then(|number| number.parse().ok()).with_context(|| format!("no {words:?} in: {output}"))
}

/// Whether files there live in memory.
pub(crate) fn is_in_memory(directory: &Path) -> bool {
    const TMPFS_MAGIC: i128 = 0x0102_1994;
    rustix::fs::statfs(directory).is_ok_and(|stat| i128::from(stat.f_type) == TMPFS_MAGIC)
}
