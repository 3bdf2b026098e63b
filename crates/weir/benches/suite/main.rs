//! `cargo bench -p weir --bench suite`: Weir next to what it is compared with, in one run on one machine.
//!
//! This file has the order of the runs and the targets. Each ratio's two sides are adjacent in time and the baseline
//! is the mean of a run before and a run after, so that a machine that speeds up or slows down bends a ratio little.
//! How a number is taken is left to the modules; docs/performance.md says what it means.

mod ai;
mod audit;
mod empty;
mod kafka;
mod nginx;
mod pgbench;
mod postgres;
mod process;
mod redis;
mod request;
mod results;
mod sale;
mod slot;
mod startup;
mod table;
mod weir;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

use crate::kafka::Kafka;
use crate::pgbench::Pgbench;
use crate::postgres::Postgres;
use crate::redis::Redis;
use crate::results::{Bound, Results, Run};
use crate::table::spread;
use crate::weir::{Engines, Load};
use weir_testkit::postgres::Database;

/// Users the messages are spread over: one hot key, and many.
const HOT: u64 = 1;
const SPREAD: u64 = 10_000;

/// Callers of a closed loop: those for whom latency has targets, and a crowd that is never all waiting for the same commit.
const CONNECTIONS: usize = 128;
const CROWD: usize = 512;

const EMBEDDED_TARGETS: [(u64, f64); 2] = [(HOT, 0.6), (SPREAD, 0.45)];
const POSTGRES_TARGETS: [(u64, f64); 2] = [(HOT, 15.0), (SPREAD, 2.5)];
const REDIS_TARGETS: [(u64, f64); 2] = [(HOT, 0.6), (SPREAD, 0.4)];
const REFUSALS_TARGET: f64 = 0.8;
const KAFKA_TARGET: f64 = 10.0;
const SLOT_EMBEDDED_TARGET_PER_S: f64 = 60_000.0;
const SLOT_POSTGRES_TARGET_PER_S: f64 = 30_000.0;
const SLOT_BASELINE_TARGET: f64 = 20.0;
const SLOT_SINGLE_TARGET_PER_S: f64 = 5_000.0;
const SLOT_FULL_WINDOWS_TARGET: f64 = 1.5;
const REQUEST_EMBEDDED_TARGET_PER_S: f64 = 25_000.0;
const REQUEST_POSTGRES_TARGET_PER_S: f64 = 10_000.0;
const REQUEST_AT_RATE_P99_TARGET_MS: f64 = 25.0;
const REQUEST_WHOLE_TARGET_PER_S: f64 = 5_000.0;
const REQUEST_WAKE_P50_TARGET_MS: f64 = 10.0;
const REQUEST_JOBS_TARGET: f64 = 1.5;
const AI_TARGET: f64 = 0.8;
const CHECK_TARGET: f64 = 0.8;
const SALE_ATTEMPTS_TARGET: f64 = 0.6;
const SALE_REDIS_TARGET: f64 = 0.35;
const SALE_STATUS_TARGET: f64 = 0.9;
const SALE_TOLD_TARGET_MS: f64 = 1_000.0;
const SALE_LISTENER_TARGET_KB: f64 = 10.0;
const P99_TARGET_MS: f64 = 20.0;
const MEMORY_TARGET_MB: f64 = 40.0;
const READY_TARGET_MS: f64 = 300.0;

/// Weir next to an empty handler, to one transaction a request, and to Redis alone.
#[derive(Debug, Parser)]
struct Arguments {
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure for 2 s each instead of 8 s, and load a tenth of the events: to see that it works, not to quote
    #[arg(long)]
    quick: bool,
    /// Fail when a target is missed, not only when a check fails
    #[arg(long)]
    strict: bool,
    /// Run these parts alone
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::value_variants().to_vec())]
    only: Vec<Part>,
    /// Jobs of request after which a claim is timed again [default: 200000]
    #[arg(long, value_name = "COUNT")]
    jobs: Option<u64>,
    /// Leave out what needs Kafka, which needs Java
    #[arg(long)]
    without_kafka: bool,
    /// What cargo adds for `cargo bench` and leaves out for `cargo test`
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Embedded,
    Refusals,
    Postgres,
    Redis,
    Kafka,
    Slot,
    Request,
    Ai,
    Sale,
    Process,
}

/// What every measurement is given.
#[derive(Clone)]
struct Bench {
    /// Holds the data directories and the servers' logs, and goes with the last clone.
    scratch: Arc<TempDir>,
    warmup: Duration,
    duration: Duration,
    connections: usize,
    /// Of a bulk load.
    events: u64,
    /// Of request, to see what they leave behind.
    jobs: u64,
}

impl Bench {
    fn new(quick: bool, jobs: Option<u64>) -> Result<Self> {
        let (warmup, duration, events) = if quick { (1, 2, 50_000) } else { (2, 8, 500_000) };
        let jobs = jobs.unwrap_or(if quick { 50_000 } else { 200_000 });
        let scratch = tempfile::Builder::new().prefix("suite-").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        Ok(Self {
            scratch: Arc::new(scratch.context("create a directory under target/")?),
            warmup: Duration::from_secs(warmup),
            duration: Duration::from_secs(duration),
            connections: CONNECTIONS,
            events,
            jobs,
        })
    }

    fn path(&self) -> &Path {
        self.scratch.path()
    }

    /// The same for a crowd.
    fn crowded(&self) -> Self {
        Self { connections: CROWD, ..self.clone() }
    }

    /// What a run is called: what sets it apart, and how many call where they are not as many as ever.
    fn name(&self, what: &str) -> String {
        match self.connections {
            CONNECTIONS => what.to_owned(),
            others => format!("{what}, {others} connections"),
        }
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
    let bench = Bench::new(arguments.quick, arguments.jobs)?;
    let mut results = Results::new(&bench);
    if arguments.quick {
        results.notes.push("a quick run: too short to quote".to_owned());
    }
    let without_kafka = arguments.without_kafka;
    if without_kafka {
        let left_out =
            "left out because of --without-kafka: Weir on Postgres + Kafka, with and without Redis";
        results.notes.push(left_out.to_owned());
    }
    for part in &arguments.only {
        match part {
            Part::Embedded => {
                measure_embedded(&bench, &mut results).await?;
                measure_embedded(&bench.crowded(), &mut results).await?;
            }
            Part::Refusals => measure_refusals(&bench, &mut results).await?,
            Part::Postgres => measure_postgres(&bench, &mut results).await?,
            Part::Redis => measure_redis(&bench, without_kafka, &mut results).await?,
            Part::Kafka if without_kafka => {}
            Part::Kafka => measure_kafka(&bench, &mut results).await?,
            Part::Slot => measure_slot(&bench, &mut results).await?,
            Part::Request => measure_request(&bench, &mut results).await?,
            Part::Ai => measure_ai(&bench, &mut results).await?,
            Part::Sale => measure_sale(&bench, &mut results).await?,
            Part::Process => measure_process(&bench, &mut results).await?,
        }
    }
    Ok(results)
}

async fn measure_embedded(bench: &Bench, results: &mut Results) -> Result<()> {
    let mut before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    for (keys, at_least) in EMBEDDED_TARGETS {
        let run = weir::measure(bench, Engines::EMBEDDED, Load::Accepted { keys }).await?;
        let after = empty::measure(bench).await?;
        let name = format!("{} / {}", run.row.name, before.name);
        // How long somebody waits has a target for a few callers alone: a crowd is in its own way.
        let is_crowd = bench.connections == CROWD;
        let around = [&before, &after];
        let ratio = if is_crowd { results.relate(run, around) } else { results.record(run, around) };
        results.target(&name, ratio, Bound::AtLeast(at_least), "×");
        results.rows.push(after.clone());
        before = after;
    }
    Ok(())
}

async fn measure_refusals(bench: &Bench, results: &mut Results) -> Result<()> {
    let before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    let run = weir::measure(bench, Engines::EMBEDDED, Load::Refused).await?;
    let between = empty::measure(bench).await?;
    results.compare(run, [&before, &between], REFUSALS_TARGET);
    results.rows.push(between.clone());
    let postgres = Postgres::start().await?;
    results.note(postgres.conditions().await?);
    let run = on_postgres(bench, &postgres, Engines::EMBEDDED, Load::Refused).await?;
    let after = empty::measure(bench).await?;
    results.compare(run, [&between, &after], REFUSALS_TARGET);
    results.rows.push(after);
    Ok(())
}

async fn measure_postgres(bench: &Bench, results: &mut Results) -> Result<()> {
    let postgres = Postgres::start().await?;
    let baseline = pgbench::Baseline::new(bench, &postgres).await?;
    results.note(postgres.conditions().await?);
    results.note([Pgbench::conditions()]);
    for (keys, at_least) in POSTGRES_TARGETS {
        let before = baseline.measure(bench, keys).await?;
        results.rows.push(before.clone());
        let run = on_postgres(bench, &postgres, Engines::EMBEDDED, Load::Accepted { keys }).await?;
        let after = baseline.measure(bench, keys).await?;
        results.compare(run, [&before, &after], at_least);
        results.rows.push(after);
    }
    Ok(())
}

/// The target is for the faster of the two ways that messages can take from there.
async fn measure_redis(bench: &Bench, without_kafka: bool, results: &mut Results) -> Result<()> {
    let (postgres, redis) = (Postgres::start().await?, Redis::start().await?);
    let kafka = if without_kafka { None } else { Some(Kafka::start().await?) };
    results.note(postgres.conditions().await?);
    results.note([redis.conditions().await]);
    results.note(kafka.as_ref().map(|_| Kafka::conditions()));
    let kafka_url = kafka.as_ref().map(Kafka::url);
    let brokers = std::iter::once(None).chain(kafka_url.as_deref().map(Some));
    for (keys, at_least) in REDIS_TARGETS {
        let mut before = redis.measure(bench, keys).await?;
        results.rows.push(before.clone());
        let mut best = f64::MIN;
        for kafka in brokers.clone() {
            redis.clear().await;
            let engines = Engines { redis: Some(redis.url()), kafka, ..Engines::EMBEDDED };
            let run = on_postgres(bench, &postgres, engines, Load::Accepted { keys }).await?;
            let after = redis.measure(bench, keys).await?;
            best = best.max(results.record(run, [&before, &after]));
            results.rows.push(after.clone());
            before = after;
        }
        let name = format!("weir Postgres + Redis, {}, better broker / {}", spread(keys, "key"), before.name);
        results.target(&name, best, Bound::AtLeast(at_least), "×");
    }
    Ok(())
}

async fn measure_kafka(bench: &Bench, results: &mut Results) -> Result<()> {
    let (postgres, kafka) = (Postgres::start().await?, Kafka::start().await?);
    let baseline = kafka::Baseline::new(&kafka, &postgres).await?;
    results.note(postgres.conditions().await?);
    results.note([Kafka::conditions()]);
    let before = baseline.measure(bench).await?;
    results.rows.push(before.clone());
    let url = kafka.url();
    let engines = Engines { kafka: Some(&url), ..Engines::EMBEDDED };
    let run = on_postgres(bench, &postgres, engines, Load::Accepted { keys: HOT }).await?;
    let after = baseline.measure(bench).await?;
    results.compare(run, [&before, &after], KAFKA_TARGET);
    results.rows.push(after);
    Ok(())
}

async fn measure_slot(bench: &Bench, results: &mut Results) -> Result<()> {
    let run = slot::bulk::measure(bench, Engines::EMBEDDED).await?;
    results.rate_target(&run.row, SLOT_EMBEDDED_TARGET_PER_S);
    results.take(run);
    let postgres = Postgres::start().await?;
    let baseline = slot::Baseline::new(bench, &postgres).await?;
    results.note(postgres.conditions().await?);
    results.note([Pgbench::conditions()]);
    let before = baseline.measure(bench).await?;
    results.rows.push(before.clone());
    let run = slot::bulk::measure_on_postgres(bench, &postgres).await?;
    let after = baseline.measure(bench).await?;
    results.rate_target(&run.row, SLOT_POSTGRES_TARGET_PER_S);
    let name = format!("{} / {}", run.row.name, before.name);
    let ratio = results.relate(run, [&before, &after]);
    results.target(&name, ratio, Bound::AtLeast(SLOT_BASELINE_TARGET), "×");
    results.rows.push(after);
    let run = slot::single::measure(bench, &postgres).await?;
    results.rate_target(&run.row, SLOT_SINGLE_TARGET_PER_S);
    results.take(run);
    let slot::full::Found { runs, name, ratio } = slot::full::measure(bench, &postgres).await?;
    runs.into_iter().for_each(|run| results.take(run));
    results.target(&name, ratio, Bound::Below(SLOT_FULL_WINDOWS_TARGET), "×");
    Ok(())
}

/// A run on an empty database, which is gone afterwards.
async fn on_postgres(bench: &Bench, postgres: &Postgres, others: Engines<'_>, load: Load) -> Result<Run> {
    let database = postgres.database().await;
    let run = weir::measure(bench, Engines { postgres: Some(database.url()), ..others }, load).await?;
    postgres.drop_database(database).await?;
    Ok(run)
}

/// Accepting is compared with an empty handler; the rest has targets of its own.
async fn measure_request(bench: &Bench, results: &mut Results) -> Result<()> {
    for bench in [&bench.crowded(), bench] {
        let before = empty::measure(bench).await?;
        results.rows.push(before.clone());
        let run = request::accept::measure(bench, Engines::EMBEDDED).await?;
        let after = empty::measure(bench).await?;
        results.rate_target(&run.row, REQUEST_EMBEDDED_TARGET_PER_S);
        results.relate(run, [&before, &after]);
        results.rows.push(after);
    }
    let postgres = Postgres::start().await?;
    results.note(postgres.conditions().await?);
    let before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    let database = postgres.database().await;
    let run = request::accept::measure(bench, on(&database)).await?;
    postgres.drop_database(database).await?;
    let after = empty::measure(bench).await?;
    results.rate_target(&run.row, REQUEST_POSTGRES_TARGET_PER_S);
    results.relate(run, [&before, &after]);
    results.rows.push(after);
    let database = postgres.database().await;
    let run = request::accept::measure_at_rate(bench, on(&database)).await?;
    postgres.drop_database(database).await?;
    let bound = Bound::Below(REQUEST_AT_RATE_P99_TARGET_MS);
    results.target(&format!("{}, p99", run.row.name), run.row.p99_ms.unwrap_or(f64::NAN), bound, "ms");
    results.take(run);
    let run = request::whole::measure(bench, Engines::EMBEDDED).await?;
    results.take(run);
    let database = postgres.database().await;
    let run = request::whole::measure(bench, on(&database)).await?;
    postgres.drop_database(database).await?;
    results.rate_target(&run.row, REQUEST_WHOLE_TARGET_PER_S);
    results.take(run);
    let database = postgres.database().await;
    let run = request::wake::measure(bench, on(&database)).await?;
    postgres.drop_database(database).await?;
    let bound = Bound::Below(REQUEST_WAKE_P50_TARGET_MS);
    results.target(&format!("{}, p50", run.row.name), run.row.p50_ms.unwrap_or(f64::NAN), bound, "ms");
    results.take(run);
    let request::jobs::Found { name, ratio, note } = request::jobs::measure(&postgres, bench.jobs).await?;
    results.target(&name, ratio, Bound::Below(REQUEST_JOBS_TARGET), "×");
    results.note([note]);
    Ok(())
}

fn on(database: &Database) -> Engines<'_> {
    Engines { postgres: Some(database.url()), ..Engines::EMBEDDED }
}

/// The gateway next to nginx in front of the same upstream, and checks next to an empty handler.
async fn measure_ai(bench: &Bench, results: &mut Results) -> Result<()> {
    let upstream = ai::Upstream::start(bench).await?;
    let before = upstream.measure_nginx(bench).await?;
    results.rows.push(before.clone());
    let run = upstream.measure_weir(bench).await?;
    let after = upstream.measure_nginx(bench).await?;
    results.compare(run, [&before, &after], AI_TARGET);
    results.rows.push(after);
    upstream.stop().await?;
    let before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    let run = ai::measure_check(bench).await?;
    let after = empty::measure(bench).await?;
    results.compare(run, [&before, &after], CHECK_TARGET);
    results.rows.push(after);
    Ok(())
}

async fn measure_sale(bench: &Bench, results: &mut Results) -> Result<()> {
    let mut before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    let loads = [
        (sale::Load::Attempts, Some(SALE_ATTEMPTS_TARGET)),
        (sale::Load::Units, None),
        (sale::Load::Status, Some(SALE_STATUS_TARGET)),
    ];
    for (load, at_least) in loads {
        let run = sale::measure(bench, Engines::EMBEDDED, load).await?;
        let after = empty::measure(bench).await?;
        match at_least {
            Some(at_least) => results.compare(run, [&before, &after], at_least),
            None => drop(results.relate(run, [&before, &after])),
        }
        results.rows.push(after.clone());
        before = after;
    }
    let postgres = Postgres::start().await?;
    results.note(postgres.conditions().await?);
    let database = postgres.database().await;
    let run = sale::measure(bench, on(&database), sale::Load::Attempts).await?;
    postgres.drop_database(database).await?;
    results.take(run);
    sale::script::compare(bench, &postgres, results, SALE_REDIS_TARGET).await?;
    let sale::listeners::Found { told_ms, kb_each, failures } = sale::listeners::measure(bench).await?;
    let count = sale::listeners::COUNT;
    results.target(
        &format!("sold out, until {count} streams have it"),
        told_ms,
        Bound::Below(SALE_TOLD_TARGET_MS),
        "ms",
    );
    results.target(
        &format!("memory of each of {count} streams"),
        kb_each,
        Bound::Below(SALE_LISTENER_TARGET_KB),
        "kB",
    );
    results.failures.extend(failures);
    Ok(())
}

async fn measure_process(bench: &Bench, results: &mut Results) -> Result<()> {
    let idle_mb = startup::idle_memory_mb(bench.path()).await?;
    results.target("idle memory", idle_mb, Bound::Below(MEMORY_TARGET_MB), "MB");
    for (name, times) in startup::start_times(bench).await? {
        results.target(&format!("start to ready, {name}, median"), times.median_ms, READY, "ms");
        results.target(&format!("start to ready, {name}, best"), times.best_ms, READY, "ms");
    }
    Ok(())
}

const READY: Bound = Bound::Below(READY_TARGET_MS);
