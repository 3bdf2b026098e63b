//! `cargo bench -p weir --bench suite`: compares Weir with its baselines in one run on one machine.
//!
//! This file defines the order of the runs and the targets. The two sides of a ratio are measured one after the other,
//! and a baseline that is another server is the mean of a run before and a run after, so that a machine that changes
//! its speed distorts a ratio little; throttlecrab, connections and added latency have one run. The other modules
//! measure; docs/performance.md explains the numbers.

mod audit;
mod empty;
mod gateway;
mod kafka;
mod nginx;
mod pgbench;
mod postgres;
mod process;
mod record;
mod redis;
mod request;
mod results;
mod sale;
mod slot;
mod soak;
mod startup;
mod table;
mod throttlecrab;
mod weir;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
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

/// The number of users: one hot key, or many.
const HOT: u64 = 1;
const SPREAD: u64 = 10_000;

/// Connections of a closed loop: a number that has latency targets, and one so large that they never all wait for the
/// same commit.
const CONNECTIONS: usize = 128;
const MANY_CONNECTIONS: usize = 512;

const EMBEDDED_TARGETS: [(u64, f64); 2] = [(HOT, 0.68), (SPREAD, 0.58)];
const POSTGRES_TARGETS: [(u64, f64); 2] = [(HOT, 15.0), (SPREAD, 2.5)];
const REDIS_TARGETS: [(u64, f64); 2] = [(HOT, 0.6), (SPREAD, 0.4)];
const REFUSALS_TARGET: f64 = 0.8;
const KAFKA_TARGET: f64 = 10.0;
const SLOT_EMBEDDED_TARGET_PER_S: f64 = 60_000.0;
const SLOT_POSTGRES_TARGET_PER_S: f64 = 30_000.0;
const SLOT_BASELINE_TARGET: f64 = 20.0;
const SLOT_BULKS_AT_ONCE: u64 = 4;
const SLOT_BULKS_AT_ONCE_TARGET: f64 = 0.8;
const SLOT_SINGLE_TARGET_PER_S: f64 = 5_000.0;
const SLOT_FULL_WINDOWS_TARGET: f64 = 1.5;
const REQUEST_EMBEDDED_TARGET_PER_S: f64 = 25_000.0;
const REQUEST_POSTGRES_TARGET_PER_S: f64 = 10_000.0;
const REQUEST_AT_RATE_P99_TARGET_MS: f64 = 25.0;
const REQUEST_WHOLE_TARGET_PER_S: f64 = 5_000.0;
const REQUEST_WAKE_P50_TARGET_MS: f64 = 10.0;
const REQUEST_JOBS_TARGET: f64 = 1.5;
const REQUEST_QUIET_P99_TARGET_MS: f64 = 50.0;
const REQUEST_QUIET_RATIO_TARGET: f64 = 2.0;
const CONNECTIONS_TARGET: f64 = 0.6;
const GATEWAY_TARGET: f64 = 0.66;
const GATEWAY_ADDED_P99_TARGET_MS: f64 = 0.3;
const CHECK_TARGET: f64 = 0.75;
const THROTTLECRAB_TARGET: f64 = 1.0;
const SALE_ATTEMPTS_TARGET: f64 = 0.65;
const SALE_REDIS_TARGET: f64 = 0.35;
const SALE_STATUS_TARGET: f64 = 0.9;
const SALE_EVENT_TARGET_MS: f64 = 1_000.0;
const SALE_LISTENER_TARGET_KB: f64 = 10.0;
const P99_TARGET_MS: f64 = 20.0;
const MEMORY_TARGET_MB: f64 = 40.0;
const READY_TARGET_MS: f64 = 300.0;

/// Compares Weir with an empty handler, with one transaction per request, and with Redis alone.
#[derive(Debug, Parser)]
struct Arguments {
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure for 2 s each instead of 8 s, and load a tenth of the events: to test the suite, not to quote
    #[arg(long)]
    quick: bool,
    /// Save the results of each part in bench/results/ and generate the table in docs/performance.md
    #[arg(long)]
    record: bool,
    /// Fail when a target is missed, not only when a check fails
    #[arg(long)]
    strict: bool,
    /// Run only these parts [default: all but soak]
    #[arg(long, value_enum, value_delimiter = ',', hide_default_value = true, default_values_t = Part::usual())]
    only: Vec<Part>,
    /// How long the runs of soak take, as a part of 2 h 40 min in all
    #[arg(long, value_name = "SCALE", default_value_t = 1.0)]
    scale: f64,
    /// Also measure this binary, alternating with the one that was just built
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// The number of jobs of request after which a claim is timed again [default: 200000]
    #[arg(long, value_name = "COUNT")]
    jobs: Option<u64>,
    /// Skip what needs Kafka, which needs Java
    #[arg(long)]
    without_kafka: bool,
    /// Passed by `cargo bench` but not by `cargo test`
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
    Connections,
    Request,
    Fair,
    Soak,
    Gateway,
    Check,
    Sale,
    Process,
}

/// The parameters of every measurement.
#[derive(Clone)]
struct Bench {
    /// Deleted with the last clone.
    _scratch: Arc<TempDir>,
    /// Contains the data directories and the servers' logs.
    directory: PathBuf,
    warmup: Duration,
    duration: Duration,
    connections: usize,
    /// Events of a bulk load.
    events: u64,
    /// Jobs of request, to measure their effect on later claims.
    jobs: u64,
    /// How long the runs of soak take.
    scale: f64,
}

impl Bench {
    fn new(Arguments { quick, jobs, scale, .. }: &Arguments) -> Result<Self> {
        let (quick, jobs) = (*quick, *jobs);
        let (warmup, duration, events) = if quick { (1, 2, 50_000) } else { (2, 8, 500_000) };
        let jobs = jobs.unwrap_or(if quick { 50_000 } else { 200_000 });
        let scratch = tempfile::Builder::new().prefix("suite-").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let scratch = Arc::new(scratch.context("create a directory under target/")?);
        Ok(Self {
            directory: scratch.path().to_owned(),
            _scratch: scratch,
            warmup: Duration::from_secs(warmup),
            duration: Duration::from_secs(duration),
            connections: CONNECTIONS,
            events,
            jobs,
            scale: *scale,
        })
    }

    fn path(&self) -> &Path {
        &self.directory
    }

    /// Returns a copy with its own directory.
    fn in_directory(&self, name: &str) -> Result<Self> {
        let directory = self.directory.join(name);
        std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        Ok(Self { directory, ..self.clone() })
    }

    /// Returns a copy with many connections.
    fn with_many_connections(&self) -> Self {
        Self { connections: MANY_CONNECTIONS, ..self.clone() }
    }

    /// Returns the name of a run, with the number of connections if it is not the usual one.
    fn name(&self, what: &str) -> String {
        match self.connections {
            CONNECTIONS => what.to_owned(),
            connections => format!("{what}, {connections} connections"),
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
    let all = runtime.block_on(unless_interrupted(measure_all(arguments)))?;
    for results in &all {
        write!(std::io::stdout().lock(), "{}", table::render(results)).context("write to stdout")?;
    }
    if let Some(path) = &arguments.json {
        let json = serde_json::to_string_pretty(&all).context("write the results as JSON")?;
        std::fs::write(path, json).with_context(|| format!("write {}", path.display()))?;
    }
    if arguments.record {
        record::publish()?;
    }
    // The earlier binary has no targets to meet.
    let failed =
        all.first().is_some_and(|now| !now.failures.is_empty() || arguments.strict && !now.meets_targets());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs the work until a signal arrives. Dropping it stops every process it started.
async fn unless_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}

/// Measures every part with each binary in turn, so that a machine that changes its speed affects them alike.
async fn measure_all(arguments: &Arguments) -> Result<Vec<Results>> {
    let bench = Bench::new(arguments)?;
    let without_kafka = arguments.without_kafka;
    let servers: Vec<_> = std::iter::once(None).chain(arguments.before.clone().map(Some)).collect();
    let mut all: Vec<Results> = servers.iter().map(|_| Results::new(&bench)).collect();
    for (results, server) in all.iter_mut().zip(&servers) {
        if let Some(path) = server {
            results.notes.push(format!("the binary {}", path.display()));
        }
        if arguments.quick {
            ensure!(!arguments.record, "a quick run is too short to record");
            results.notes.push("a quick run: too short to quote".to_owned());
        }
        if without_kafka {
            let left_out =
                "left out because of --without-kafka: Weir on Postgres + Kafka, with and without Redis";
            results.notes.push(left_out.to_owned());
        }
    }
    for part in &arguments.only {
        for (results, server) in all.iter_mut().zip(&servers) {
            process::set_server(server.as_deref());
            let bench = bench
                .in_directory(&format!("{part:?}-{}", if server.is_some() { "before" } else { "now" }))?;
            let mut part_results = Results { rows: Vec::new(), targets: Vec::new(), ..results.clone() };
            part.measure(&bench, without_kafka, &mut part_results).await?;
            if arguments.record && server.is_none() {
                record::save(*part, &part_results)?;
            }
            results.append(part_results);
        }
    }
    Ok(all)
}

impl Part {
    /// The parts of a run that is to end soon.
    fn usual() -> Vec<Self> {
        Self::value_variants().iter().copied().filter(|part| *part != Self::Soak).collect()
    }

    async fn measure(self, bench: &Bench, without_kafka: bool, results: &mut Results) -> Result<()> {
        match self {
            Self::Embedded => {
                measure_embedded(bench, results).await?;
                measure_embedded(&bench.with_many_connections(), results).await
            }
            Self::Refusals => measure_refusals(bench, results).await,
            Self::Connections => measure_connections(bench, results).await,
            Self::Postgres => measure_postgres(bench, results).await,
            Self::Redis => measure_redis(bench, without_kafka, results).await,
            Self::Kafka if without_kafka => Ok(()),
            Self::Kafka => measure_kafka(bench, results).await,
            Self::Slot => measure_slot(bench, results).await,
            Self::Request => measure_request(bench, results).await,
            Self::Fair => measure_fair(bench, results).await,
            Self::Soak => soak::measure(bench, bench.scale, results).await,
            Self::Gateway => measure_gateway(bench, results).await,
            Self::Check => measure_check(bench, results).await,
            Self::Sale => measure_sale(bench, results).await,
            Self::Process => measure_process(bench, results).await,
        }
    }
}

async fn measure_embedded(bench: &Bench, results: &mut Results) -> Result<()> {
    let mut before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    for (keys, at_least) in EMBEDDED_TARGETS {
        let run = weir::measure(bench, Engines::EMBEDDED, Load::Accepted { keys }).await?;
        let after = empty::measure(bench).await?;
        let name = format!("{} / {}", run.row.name, before.name);
        // Latency has a target for few connections only: many connections wait for each other.
        let has_many_connections = bench.connections == MANY_CONNECTIONS;
        let around = [&before, &after];
        let ratio =
            if has_many_connections { results.relate(run, around) } else { results.record(run, around) };
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

/// The target is for the faster of the two brokers.
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
    let run = slot::bulk::measure(bench, Engines::EMBEDDED, 1).await?;
    results.rate_target(&run.row, SLOT_EMBEDDED_TARGET_PER_S);
    results.add(run);
    let postgres = Postgres::start().await?;
    let baseline = slot::Baseline::new(bench, &postgres).await?;
    results.note(postgres.conditions().await?);
    results.note([Pgbench::conditions()]);
    let before = baseline.measure(bench).await?;
    results.rows.push(before.clone());
    let run = slot::bulk::measure_on_postgres(bench, &postgres, 1).await?;
    let one_bulk = (run.row.name.clone(), run.row.requests_per_s);
    let after = baseline.measure(bench).await?;
    results.rate_target(&run.row, SLOT_POSTGRES_TARGET_PER_S);
    let name = format!("{} / {}", run.row.name, before.name);
    let ratio = results.relate(run, [&before, &after]);
    results.target(&name, ratio, Bound::AtLeast(SLOT_BASELINE_TARGET), "×");
    results.rows.push(after);
    let run = slot::bulk::measure_on_postgres(bench, &postgres, SLOT_BULKS_AT_ONCE).await?;
    let name = format!("{} / {}", run.row.name, one_bulk.0);
    let ratio = run.row.requests_per_s / one_bulk.1;
    results.add(run);
    results.target(&name, ratio, Bound::AtLeast(SLOT_BULKS_AT_ONCE_TARGET), "×");
    let run = slot::single::measure(bench, &postgres).await?;
    results.rate_target(&run.row, SLOT_SINGLE_TARGET_PER_S);
    results.add(run);
    let slot::full::Found { runs, name, ratio } = slot::full::measure(bench, &postgres).await?;
    runs.into_iter().for_each(|run| results.add(run));
    results.target(&name, ratio, Bound::Below(SLOT_FULL_WINDOWS_TARGET), "×");
    Ok(())
}

/// Runs on an empty database, which is dropped afterwards.
async fn on_postgres(bench: &Bench, postgres: &Postgres, others: Engines<'_>, load: Load) -> Result<Run> {
    let database = postgres.database().await;
    let run = weir::measure(bench, Engines { postgres: Some(database.url()), ..others }, load).await?;
    postgres.drop_database(database).await?;
    Ok(run)
}

/// Accepting is compared with an empty handler; the other runs have absolute targets.
async fn measure_request(bench: &Bench, results: &mut Results) -> Result<()> {
    for bench in [&bench.with_many_connections(), bench] {
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
    results.add(run);
    let run = request::whole::measure(bench, Engines::EMBEDDED).await?;
    results.add(run);
    let database = postgres.database().await;
    let run = request::whole::measure(bench, on(&database)).await?;
    postgres.drop_database(database).await?;
    results.rate_target(&run.row, REQUEST_WHOLE_TARGET_PER_S);
    results.add(run);
    let database = postgres.database().await;
    let run = request::wake::measure(bench, on(&database)).await?;
    postgres.drop_database(database).await?;
    let bound = Bound::Below(REQUEST_WAKE_P50_TARGET_MS);
    results.target(&format!("{}, p50", run.row.name), run.row.p50_ms.unwrap_or(f64::NAN), bound, "ms");
    results.add(run);
    let request::jobs::ClaimComparison { name, ratio, note } =
        request::jobs::measure(&postgres, bench.jobs).await?;
    results.target(&name, ratio, Bound::Below(REQUEST_JOBS_TARGET), "×");
    results.note([note]);
    Ok(())
}

/// Measures how much a backlog of others delays a tenant with little work.
async fn measure_fair(bench: &Bench, results: &mut Results) -> Result<()> {
    let postgres = Postgres::start().await?;
    let database = postgres.database().await;
    for engines in [Engines::EMBEDDED, on(&database)] {
        let fairness = request::fair::measure(bench, engines, bench.jobs).await?;
        let [alone, beside] =
            [&fairness.alone, &fairness.beside].map(|run| run.row.p99_ms.unwrap_or(f64::NAN));
        let name = fairness.beside.row.name.clone();
        let bound = Bound::Below(REQUEST_QUIET_P99_TARGET_MS);
        results.target(&format!("{name}, p99"), beside, bound, "ms");
        results.target(
            &format!("{name} / alone, p99"),
            beside / alone,
            Bound::Below(REQUEST_QUIET_RATIO_TARGET),
            "×",
        );
        results.add(fairness.alone);
        results.add(fairness.beside);
        results.note([fairness.note]);
    }
    postgres.drop_database(database).await
}

fn on(database: &Database) -> Engines<'_> {
    Engines { postgres: Some(database.url()), ..Engines::EMBEDDED }
}

/// Compares connections that are closed after ten requests with keep-alive connections.
async fn measure_connections(bench: &Bench, results: &mut Results) -> Result<()> {
    let weir::Connections { lasting, short } = weir::measure_connections(bench).await?;
    let name = format!("{} / {}", short.name, lasting.name);
    let ratio = short.requests_per_s / lasting.requests_per_s;
    results.target(&name, ratio, Bound::AtLeast(CONNECTIONS_TARGET), "×");
    results.rows.extend([lasting, short]);
    Ok(())
}

/// Compares the gateway with nginx in front of the same upstream, and measures what it adds to a call.
async fn measure_gateway(bench: &Bench, results: &mut Results) -> Result<()> {
    let upstream = gateway::Upstream::start(bench).await?;
    let before = upstream.measure_nginx(bench).await?;
    results.rows.push(before.clone());
    let run = upstream.measure_weir(bench).await?;
    let after = upstream.measure_nginx(bench).await?;
    results.compare(run, [&before, &after], GATEWAY_TARGET);
    results.rows.push(after);
    let gateway::AddedLatency { direct, through, p99_ms } = upstream.measure_added(bench).await?;
    let name = format!("added p99: {} over {}", through.name, direct.name);
    results.target(&name, p99_ms, Bound::Below(GATEWAY_ADDED_P99_TARGET_MS), "ms");
    results.rows.extend([direct, through]);
    upstream.stop().await
}

/// Compares checks of a policy with an empty handler, and with a server that does nothing else.
async fn measure_check(bench: &Bench, results: &mut Results) -> Result<()> {
    let before = empty::measure(bench).await?;
    results.rows.push(before.clone());
    let run = gateway::measure_check(bench).await?;
    let after = empty::measure(bench).await?;
    let row = run.row.clone();
    results.compare(run, [&before, &after], CHECK_TARGET);
    results.rows.push(after);
    let program = match throttlecrab::install() {
        Ok(program) => program,
        Err(error) => {
            results.notes.push(format!("left out: throttlecrab, {error:#}"));
            return Ok(());
        }
    };
    let other = throttlecrab::measure(bench, &program).await?;
    let ratio = row.requests_per_s / other.requests_per_s;
    let name = format!("{} / {}", row.name, other.name);
    results.target(&name, ratio, Bound::AtLeast(THROTTLECRAB_TARGET), "×");
    results.rows.push(other);
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
        let run = sale::measure(bench, Engines::EMBEDDED, None, load).await?;
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
    let run = sale::measure(bench, on(&database), None, sale::Load::Attempts).await?;
    postgres.drop_database(database).await?;
    results.add(run);
    sale::script::compare(bench, &postgres, results, SALE_REDIS_TARGET).await?;
    let sale::listeners::StreamResults { notified_ms, kb_each, failures } =
        sale::listeners::measure(bench).await?;
    let count = sale::listeners::COUNT;
    results.target(
        &format!("sold out, until {count} streams have it"),
        notified_ms,
        Bound::Below(SALE_EVENT_TARGET_MS),
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
    for (name, median_ms) in startup::start_times(bench).await? {
        results.target(&format!("start to ready, {name}, median"), median_ms, READY, "ms");
    }
    Ok(())
}

const READY: Bound = Bound::Below(READY_TARGET_MS);
