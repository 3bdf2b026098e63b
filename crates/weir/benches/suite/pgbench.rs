//! The baseline of the Postgres engine: pgbench, one `SELECT … FOR UPDATE; UPDATE` transaction a request, on the
//! PostgreSQL that Weir then runs on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::Bench;
use crate::postgres::{FIRST_KEY, Postgres};
use crate::process::Process;
use crate::results::{Row, percentiles_ms};
use crate::table::spread;

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

pub(crate) struct Baseline<'a> {
    postgres: &'a Postgres,
    /// Of the baselines' database.
    url: String,
    pgbench: PathBuf,
    directory: PathBuf,
}

impl<'a> Baseline<'a> {
    pub(crate) async fn new(bench: &Bench, postgres: &'a Postgres) -> Result<Self> {
        let pgbench = postgres.bin_dir()?.join("pgbench");
        let url = postgres.baseline().await.url().to_owned();
        let directory = bench.path().join("pgbench");
        fs::create_dir_all(&directory).context("create a directory for pgbench")?;
        fs::write(directory.join("script.sql"), SCRIPT).context("write pgbench's script")?;
        Ok(Self { postgres, url, pgbench, directory })
    }

    pub(crate) fn conditions() -> String {
        format!("pgbench -c {CLIENTS} -j 2 -M prepared")
    }

    /// Transactions a second on one hot row or over many.
    pub(crate) async fn measure(&self, bench: &Bench, keys: u64) -> Result<Row> {
        let name = format!("pgbench, {}", spread(keys, "row"));
        eprintln!("measuring: {name}");
        self.postgres.tidy().await;
        self.run(bench.warmup, keys, "warm-up").await?;
        let (output, latencies_us) = self.run(bench.duration, keys, "measured").await?;
        ensure!(!latencies_us.is_empty(), "pgbench logged no transaction: {output}");
        let rate = number_after(&output, "tps = ")?;
        let failed = number_after(&output, "number of failed transactions: ")?;
        let [p50_ms, p99_ms] = percentiles_ms(latencies_us, [50, 99]);
        Ok(Row::new(name, rate, p50_ms, p99_ms, failed))
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
            .arg(&self.url);
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
