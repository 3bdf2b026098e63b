//! pgbench on the PostgreSQL that Weir runs on next, and the baseline of quota: one `SELECT … FOR UPDATE; UPDATE`
//! transaction per request.

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
/// The time that pgbench may take in addition, for example to connect.
const MARGIN: Duration = Duration::from_secs(30);

pub(crate) struct Pgbench {
    program: PathBuf,
    url: String,
    directory: PathBuf,
}

/// The result of a script.
pub(crate) struct Measured {
    pub(crate) row: Row,
    /// The number of transactions, including those of the warm-up.
    pub(crate) transactions: usize,
}

pub(crate) struct Baseline<'a> {
    postgres: &'a Postgres,
    pgbench: Pgbench,
}

impl<'a> Baseline<'a> {
    pub(crate) async fn new(bench: &Bench, postgres: &'a Postgres) -> Result<Self> {
        postgres.quota_baseline().await;
        Ok(Self { postgres, pgbench: Pgbench::new(bench, postgres, "quota", SCRIPT)? })
    }

    /// Measures transactions per second on one hot row or over many.
    pub(crate) async fn measure(&self, bench: &Bench, keys: u64) -> Result<Row> {
        let name = format!("pgbench, {}", spread(keys, "row"));
        eprintln!("measuring: {name}");
        self.postgres.tidy("rate_limit_store").await;
        let variables = [("first", FIRST_KEY), ("last", FIRST_KEY + keys - 1)];
        Ok(self.pgbench.measure(bench, name, &variables).await?.row)
    }
}

impl Pgbench {
    /// Prepares a script. `what` it is the baseline of names its directory.
    pub(crate) fn new(bench: &Bench, postgres: &Postgres, what: &str, script: &str) -> Result<Self> {
        let program = postgres.bin_dir()?.join("pgbench");
        let url = postgres.baselines().url().to_owned();
        let directory = bench.path().join(format!("pgbench {what}"));
        fs::create_dir_all(&directory).context("create a directory for pgbench")?;
        fs::write(directory.join("script.sql"), script).context("write pgbench's script")?;
        Ok(Self { program, url, directory })
    }

    pub(crate) fn conditions() -> String {
        format!("pgbench -c {CLIENTS} -j 2 -M prepared")
    }

    /// Warms up, then measures the transactions per second.
    pub(crate) async fn measure(
        &self,
        bench: &Bench,
        name: String,
        variables: &[(&str, u64)],
    ) -> Result<Measured> {
        let (_, warm_up) = self.run(bench.warmup, variables, "warm-up").await?;
        let (output, latencies_us) = self.run(bench.duration, variables, "measured").await?;
        ensure!(!latencies_us.is_empty(), "pgbench logged no transaction: {output}");
        let transactions = warm_up.len() + latencies_us.len();
        let rate = number_after(&output, "tps = ")?;
        let failed = number_after(&output, "number of failed transactions: ")?;
        let [p50_ms, p99_ms] = percentiles_ms(latencies_us, [50, 99]);
        Ok(Measured { row: Row::new(name, rate, p50_ms, p99_ms, failed), transactions })
    }

    /// Runs pgbench once. Returns its output and the latency of each transaction.
    async fn run(
        &self,
        duration: Duration,
        variables: &[(&str, u64)],
        what: &str,
    ) -> Result<(String, Vec<u64>)> {
        let directory = self.directory.join(what);
        // Otherwise the logs of an earlier run would count again.
        let _ = fs::remove_dir_all(&directory);
        let mut command = Command::new(&self.program);
        command
            .args(["-n", "-M", "prepared", "-c", CLIENTS, "-j", "2", "-T", &duration.as_secs().to_string()])
            .args(variables.iter().map(|(name, value)| format!("--define={name}={value}")))
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

/// Reads the third field of every line of pgbench's transaction logs, one file per thread.
fn latencies_us(directory: &Path) -> Result<Vec<u64>> {
    let mut latencies = Vec::new();
    for entry in fs::read_dir(directory).context("list pgbench's logs")? {
        let entry = entry.context("list pgbench's logs")?;
        if entry.file_name().to_string_lossy().starts_with("transactions") {
            let text = fs::read_to_string(entry.path()).context("read a log of pgbench")?;
            latencies.extend(text.lines().filter_map(|line| line.split(' ').nth(2)?.parse::<u64>().ok()));
        }
    }
    Ok(latencies)
}

fn number_after<T: FromStr>(output: &str, words: &str) -> Result<T> {
    let rest = output.split_once(words).map(|(_, rest)| rest);
    let number = rest.and_then(|rest| rest.split(|c: char| !c.is_ascii_digit() && c != '.').next());
    number.and_then(|number| number.parse().ok()).with_context(|| format!("no {words:?} in: {output}"))
}
