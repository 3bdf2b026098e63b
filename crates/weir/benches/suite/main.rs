//! `cargo bench -p weir --bench suite`: Weir next to what it is compared with, in one run on one machine.
//!
//! This file has the order of the runs and the targets. Each ratio's two sides are adjacent in time and the baseline
//! is the mean of a run before and a run after, so that a machine that speeds up or slows down bends a ratio little.
//! How a number is taken is left to the modules; docs/performance.md says what it means.

mod audit;
mod empty;
mod pgbench;
mod process;
mod results;
mod startup;
mod table;
mod weir;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

use crate::pgbench::Baseline;
use crate::results::{Bound, Results};
use crate::weir::Store;

/// Users the messages are spread over: one hot key, and many.
const HOT: u64 = 1;
const SPREAD: u64 = 10_000;

const EMBEDDED_TARGETS: [(u64, f64); 2] = [(HOT, 0.6), (SPREAD, 0.45)];
const POSTGRES_TARGETS: [(u64, f64); 2] = [(HOT, 15.0), (SPREAD, 2.5)];
const P99_TARGET_MS: f64 = 20.0;
const MEMORY_TARGET_MB: f64 = 40.0;
const READY_TARGET_MS: f64 = 300.0;

/// Weir next to an empty handler and to one transaction a request.
#[derive(Debug, Parser)]
struct Arguments {
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure for 2 s each instead of 8 s: to see that it works, not to quote
    #[arg(long)]
    quick: bool,
    /// Fail when a target is missed, not only when a check fails
    #[arg(long)]
    strict: bool,
    /// Run these parts alone
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Part::Embedded, Part::Postgres, Part::Process])]
    only: Vec<Part>,
    /// What cargo adds for `cargo bench` and leaves out for `cargo test`
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Embedded,
    Postgres,
    Process,
}

/// What every measurement is given.
struct Bench {
    /// Holds the data directories and the servers' logs, and goes with this value.
    scratch: TempDir,
    warmup: Duration,
    duration: Duration,
}

impl Bench {
    fn new(quick: bool) -> Result<Self> {
        let (warmup, duration) = if quick { (1, 2) } else { (2, 8) };
        let scratch = tempfile::Builder::new().prefix("suite-").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        Ok(Self {
            scratch: scratch.context("create a directory under target/")?,
            warmup: Duration::from_secs(warmup),
            duration: Duration::from_secs(duration),
        })
    }

    fn path(&self) -> &Path {
        self.scratch.path()
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if !arguments.bench {
        eprintln!("nothing to test here: run `cargo bench -p weir --bench suite`");
        return ExitCode::SUCCESS;
    }
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("suite: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let results = runtime.block_on(unless_interrupted(measure_all(arguments)))?;
    write!(std::io::stdout().lock(), "{}", table::render(&results)).context("write to stdout")?;
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&results).context("write the results as JSON")?;
        std::fs::write(path, json).with_context(|| format!("write {}", path.display()))?;
    }
    let failed = !results.failures.is_empty() || (arguments.strict && !results.meets_targets());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Dropping the work stops every process it started.
async fn unless_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}

async fn measure_all(arguments: &Arguments) -> Result<Results> {
    let bench = Bench::new(arguments.quick)?;
    let mut results = Results::new(&bench);
    if arguments.quick {
        results.notes.push("a quick run: too short to quote".to_owned());
    }
    for part in &arguments.only {
        match part {
            Part::Embedded => measure_embedded(&bench, &mut results).await?,
            Part::Postgres => measure_postgres(&bench, &mut results).await?,
            Part::Process => measure_process(&bench, &mut results).await?,
        }
    }
    Ok(results)
}

async fn measure_embedded(bench: &Bench, results: &mut Results) -> Result<()> {
    let mut before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    for (keys, at_least) in EMBEDDED_TARGETS {
        let run = weir::measure(bench, Store::Embedded, keys).await?;
        let after = empty::measure(bench).await?;
        results.compare(run, [&before, &after], at_least);
        results.rows.push(after.clone());
        before = after;
    }
    Ok(())
}

async fn measure_postgres(bench: &Bench, results: &mut Results) -> Result<()> {
    let baseline = Baseline::start(bench.path()).await?;
    results.notes.extend(baseline.conditions().await?);
    for (keys, at_least) in POSTGRES_TARGETS {
        let before = baseline.measure(bench, keys).await?;
        results.rows.push(before.clone());
        let database = baseline.database(keys).await?;
        let run = weir::measure(bench, Store::Postgres(database.url()), keys).await?;
        baseline.drop_database(database).await?;
        let after = baseline.measure(bench, keys).await?;
        results.compare(run, [&before, &after], at_least);
        results.rows.push(after);
    }
    Ok(())
}

async fn measure_process(bench: &Bench, results: &mut Results) -> Result<()> {
    let idle_mb = startup::idle_memory_mb(bench.path()).await?;
    results.target("idle memory", idle_mb, Bound::Below(MEMORY_TARGET_MB), "MB");
    for (name, times) in startup::start_times(bench.path()).await? {
        results.target(&format!("start to ready, {name}, median"), times.median_ms, READY, "ms");
        results.target(&format!("start to ready, {name}, best"), times.best_ms, READY, "ms");
    }
    Ok(())
}

const READY: Bound = Bound::Below(READY_TARGET_MS);
