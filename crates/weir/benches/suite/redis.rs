//! A private Redis, and the baseline of Weir with Redis: `redis-benchmark` calling Weir's own script, for one unit of
//! one user per call.

use std::fs;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use weir_testkit::redis::{Options, Server};

use crate::Bench;
use crate::process::Process;
use crate::results::Row;
use crate::table::spread;

/// A Lua script of Weir, with the part that Weir prepends.
macro_rules! script {
    ($file:literal) => {
        concat!(
            include_str!("../../../store-redis/src/scripts/trust.lua"),
            include_str!(concat!("../../../store-redis/src/scripts/", $file))
        )
    };
}

const SPEND: &str = script!("quota_spend.lua");
const INSTALL: &str = script!("quota_install.lua");
pub(crate) const BUY: &str = script!("sale_buy.lua");
pub(crate) const OPEN: &str = script!("sale_open.lua");
/// As long as Weir's keys in this suite, with the twelve digits of redis-benchmark.
const KEY: &str = "RateLimiterCache:key-";
pub(crate) const RANDOM_DIGITS: &str = "__rand_int__";
/// As long as the epoch of a new database, and a nonce.
const EPOCH: &str = "0";
const NONCE: &str = "0123456789abcdef";
/// More units than any run takes.
const UNITS: &str = "2147483647";
const WINDOW_MINUTES: u64 = 1440;
/// Keys per call when the hashes are created.
const KEYS_PER_CALL: u64 = 1_000;

/// One thread and 50 connections: the fastest of its settings here, since Redis has the other core to itself.
const CLIENTS: &str = "50";
/// Calls of the warm-up, which also measures how many calls fill the measured time: redis-benchmark takes a number,
/// not a duration.
const FIRST_CALLS: u64 = 50_000;
const MARGIN: Duration = Duration::from_secs(60);

pub(crate) struct Redis {
    server: Server,
    /// The SHA-1 by which Redis knows the script.
    sha: String,
}

impl Redis {
    pub(crate) async fn start() -> Result<Self> {
        eprintln!("starting Redis");
        let options = Options { appendonly: false, ..Options::default() };
        let server = tokio::task::spawn_blocking(move || Server::private(&options)).await?;
        let has_benchmark = Command::new("redis-benchmark").arg("--version").output();
        has_benchmark
            .context("redis-benchmark is needed; it comes with redis-server (Debian: redis-tools)")?;
        let sha = server.command(&["SCRIPT", "LOAD", SPEND]).await.text();
        Ok(Self { server, sha })
    }

    pub(crate) const fn server(&self) -> &Server {
        &self.server
    }

    pub(crate) fn url(&self) -> &str {
        self.server.url()
    }

    pub(crate) async fn conditions(&self) -> String {
        let info = self.server.command(&["INFO", "server"]).await.text();
        let version = info.lines().find_map(|line| line.strip_prefix("redis_version:")).unwrap_or("?").trim();
        format!("Redis {version}: nothing is written to disk; redis-benchmark -c {CLIENTS} -P 1, one thread")
    }

    /// Deletes everything except the scripts.
    pub(crate) async fn clear(&self) {
        self.server.command(&["FLUSHALL", "SYNC"]).await;
    }

    /// Measures the calls per second of the bare script, and checks that every call counts.
    pub(crate) async fn measure(&self, bench: &Bench, keys: u64) -> Result<Row> {
        let name = format!("redis-benchmark, {}", spread(keys, "key"));
        eprintln!("measuring: {name}");
        self.clear().await;
        self.install(keys).await?;
        let (row, calls) = self.run(bench, keys, &self.spend(keys)).await?;
        let counted = self.counted(keys).await?;
        ensure!(counted >= calls, "of {calls} calls only {counted} counted");
        Ok(Row { name, ..row })
    }

    /// Creates the hashes like Weir: with a call that finds nothing, then one that brings reserved units.
    async fn install(&self, keys: u64) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is set")?;
        let window = now.as_micros().to_string();
        let minutes = WINDOW_MINUTES.to_string();
        let expires = (now + Duration::from_secs(WINDOW_MINUTES * 60)).as_millis().to_string();
        let units = [NONCE, &window, UNITS, UNITS, UNITS, &minutes, &expires, "0"];
        for first in (0..keys).step_by(usize::try_from(KEYS_PER_CALL)?) {
            let names: Vec<String> = (first..keys.min(first + KEYS_PER_CALL)).map(key).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            self.call(SPEND, &names, &[EPOCH, "", NONCE], &["1"]).await;
            self.call(INSTALL, &names, &[EPOCH], &units).await;
        }
        Ok(())
    }

    async fn call(&self, script: &str, keys: &[&str], common: &[&str], for_each: &[&str]) {
        let count = keys.len().to_string();
        let mut words = vec!["EVAL", script, &count];
        words.extend(keys.iter().chain(common));
        words.extend(keys.iter().flat_map(|_| for_each));
        self.server.command(&words).await;
    }

    fn spend(&self, keys: u64) -> [String; 8] {
        let key = if keys == 1 { key(0) } else { format!("{KEY}{RANDOM_DIGITS}") };
        ["EVALSHA", &self.sha, "1", &key, EPOCH, "", NONCE, "1"].map(str::to_owned)
    }

    /// Runs a command repeatedly, with random numbers below `random`: first as a warm-up that measures the rate, then
    /// for the measured time. Also returns the total number of calls.
    pub(crate) async fn run(&self, bench: &Bench, random: u64, words: &[String]) -> Result<(Row, u64)> {
        let first = self.run_times(bench, random, FIRST_CALLS, words).await?;
        let calls = calls_in(bench.duration, first.requests_per_s);
        let row = self.run_times(bench, random, calls, words).await?;
        Ok((row, FIRST_CALLS + calls))
    }

    async fn run_times(&self, bench: &Bench, random: u64, calls: u64, words: &[String]) -> Result<Row> {
        let directory = bench.path().join("redis-benchmark");
        // Output of an earlier run.
        let _ = fs::remove_dir_all(&directory);
        let address = self.server.address();
        let mut command = Command::new("redis-benchmark");
        command
            .args(["-h", &address.ip().to_string(), "-p", &address.port().to_string()])
            .args(["-c", CLIENTS, "-P", "1", "-n", &calls.to_string(), "-r", &random.to_string(), "--csv"])
            .args(words);
        let mut process = Process::spawn(command, &directory)?;
        let status = process.wait(bench.duration + MARGIN).await.context("run redis-benchmark")?;
        let output = process.output();
        ensure!(status.success(), "redis-benchmark ended with {status}: {output}");
        parse(&output).with_context(|| format!("read what redis-benchmark printed: {output}"))
    }

    /// Adds up the counts of all hashes.
    async fn counted(&self, keys: u64) -> Result<u64> {
        let sum = "local sum = 0
                   for key = 0, ARGV[2] - 1 do
                     sum = sum + redis.call('HGET', ARGV[1] .. string.format('%012d', key), 'currentCount')
                   end
                   return sum";
        let sum = self.server.command(&["EVAL", sum, "0", KEY, &keys.to_string()]).await.integer();
        u64::try_from(sum).context("a sum of counts")
    }
}

fn key(number: u64) -> String {
    format!("{KEY}{number:012}")
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is positive and far below 2^53"
)]
fn calls_in(duration: Duration, per_s: f64) -> u64 {
    (per_s * duration.as_secs_f64()) as u64
}

/// Parses the last line of its CSV: …, rate, average, min, p50, p95, p99, max.
fn parse(output: &str) -> Option<Row> {
    let fields: Vec<&str> = output.lines().last()?.split(',').map(|field| field.trim_matches('"')).collect();
    let from_end = |index: usize| fields.get(fields.len().checked_sub(index)?)?.parse::<f64>().ok();
    Some(Row::new(String::new(), from_end(7)?, from_end(4)?, from_end(2)?, 0))
}
