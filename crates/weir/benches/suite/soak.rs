//! Request over hours: a given rate of submissions, with all roles, while statuses are read and conflicts submitted. Latencies count
//! from when a request was due, so that a server that stalls cannot hide it. Memory and tables must not grow: that is decided by the
//! slope of a line through the samples. A last run has a downstream that is slow and fails.
//!
//! `make soak` runs it whole; `SCALE=0.02` shortens every run.

mod downstream;
mod samples;
mod status;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use weir_bench::{Body, Expect, LoadOptions, Report, Target, Template, resolve};
use weir_testkit::postgres::Database;

use self::downstream::Downstream;
use self::samples::Growth;
use crate::Bench;
use crate::postgres::Postgres;
use crate::request::{KEYS, Server};
use crate::results::{Bound, Results, Row, Run};
use crate::weir::{Engines, HOST};

/// Submissions a second, and for how many seconds.
const RUNS: [(u32, f64); 2] = [(150, 3_600.0), (500, 900.0)];
/// The rate and the seconds of the run with a degraded downstream.
const DEGRADED: (u32, f64) = (150, 300.0);
const SHORTEST: Duration = Duration::from_secs(8);
const ACCEPT_P95_TARGET_MS: f64 = 120.0;
const ACCEPT_P99_TARGET_MS: f64 = 250.0;
const STATUS_P95_TARGET_MS: f64 = 80.0;
const MEMORY_GROWTH_TARGET_MB: f64 = 16.0;
const JOBS_GROWTH_TARGET_MB: f64 = 8.0;
/// Bytes stored for a request in the second half of a run, compared with the first half.
const STORED_RATIO_TARGET: f64 = 1.25;
/// Completed requests in a second while the downstream is degraded, as a share of the submissions.
const DEGRADED_SHARE_TARGET: f64 = 0.9;
/// One of so many submissions is a conflict.
const CONFLICTS: u32 = 10;

/// Runs everything on the embedded engine and on Postgres. `scale` shortens the runs.
pub(crate) async fn measure(bench: &Bench, scale: f64, results: &mut Results) -> Result<()> {
    ensure!(scale > 0.0 && scale <= 10.0, "the scale is a number above 0, 1 for the whole run");
    let postgres = Postgres::start().await?;
    results.note(postgres.conditions().await?);
    results.note([format!(
        "soak at scale {scale}: {}",
        RUNS.map(|(rate, seconds)| { format!("{rate}/s for {:.0} s", scaled(seconds, scale).as_secs_f64()) })
            .join(", ")
    )]);
    for is_postgres in [false, true] {
        for (rate, seconds) in RUNS {
            let database = if is_postgres { Some(postgres.database().await) } else { None };
            soak(bench, database.as_ref(), rate, scaled(seconds, scale), results).await?;
            if let Some(database) = database {
                postgres.drop_database(database).await?;
            }
        }
        let database = if is_postgres { Some(postgres.database().await) } else { None };
        degrade(bench, database.as_ref(), scaled(DEGRADED.1, scale), results).await?;
        if let Some(database) = database {
            postgres.drop_database(database).await?;
        }
    }
    Ok(())
}

fn scaled(seconds: f64, scale: f64) -> Duration {
    Duration::from_secs_f64(seconds * scale).max(SHORTEST)
}

fn engines(database: Option<&Database>) -> Engines<'_> {
    Engines { postgres: database.map(Database::url), ..Engines::EMBEDDED }
}

/// One run at a rate.
async fn soak(
    bench: &Bench,
    database: Option<&Database>,
    rate: u32,
    duration: Duration,
    results: &mut Results,
) -> Result<()> {
    let engines = engines(database);
    let name = format!("weir {}, soak at {rate}/s", engines.name());
    eprintln!("measuring: {name} for {:.0} s", duration.as_secs_f64());
    let downstream = Downstream::start().await?;
    let settings = [("WEIR_DOWNSTREAM", downstream.url())];
    let server = Server::start(bench, &name, engines, &settings).await?;
    let options = LoadOptions { rate_per_s: NonZeroU32::new(rate), duration, ..LoadOptions::default() };
    let data = bench.path().join(&name).join("data");
    let whole = options.warmup + duration;
    let (report, conflicts, status, growth) = tokio::try_join!(
        server.load("soak", options.clone()),
        conflicts(&server, rate / CONFLICTS, duration),
        status::probe(server.caller(), rate / 2, options.warmup, duration),
        samples::growth(server.id(), &data, database, whole),
    )?;
    server.finished().await?;
    let promised = report.expected();
    judge(&name, &report, &conflicts, status, growth, database.is_some(), results);
    let failures = server.stop_and_audit(promised).await;
    results.add(Run { row: Row::from_report(&report), failures });
    Ok(())
}

fn judge(
    name: &str,
    report: &Report,
    conflicts: &Report,
    status: status::Statuses,
    growth: Growth,
    is_postgres: bool,
    results: &mut Results,
) {
    let mut target = |what: &str, measured: f64, bound: Bound, unit: &'static str| {
        results.target(&format!("{name}, {what}"), measured, bound, unit);
    };
    target("accepted, p95", report.latency_ms.p95, Bound::Below(ACCEPT_P95_TARGET_MS), "ms");
    target("accepted, p99", report.latency_ms.p99, Bound::Below(ACCEPT_P99_TARGET_MS), "ms");
    let lost = report.unsent + report.errors.total() + report.requests - report.expected();
    target("submissions without a 202", lost as f64, Bound::Below(1.0), "");
    target("conflicts, p95", conflicts.latency_ms.p95, Bound::Below(ACCEPT_P95_TARGET_MS), "ms");
    // The first one takes the key.
    let others = conflicts.unsent + conflicts.errors.total() + conflicts.requests - conflicts.expected();
    target("conflicts without a 409", others as f64, Bound::Below(2.0), "");
    target("statuses, p95", status.p95_ms, Bound::Below(STATUS_P95_TARGET_MS), "ms");
    target("statuses without a 200", status.failed as f64, Bound::Below(1.0), "");
    target("growth of memory", growth.memory_mb, Bound::Below(MEMORY_GROWTH_TARGET_MB), "MB");
    if is_postgres {
        target("growth of the jobs' table", growth.jobs_mb, Bound::Below(JOBS_GROWTH_TARGET_MB), "MB");
    }
    target("stored per request, later / first", growth.stored_ratio, Bound::Below(STORED_RATIO_TARGET), "×");
}

/// Submissions that use the key of another one: all but the first are conflicts.
async fn conflicts(server: &Server, rate: u32, duration: Duration) -> Result<Report> {
    let (address, _) = resolve(server.url(), false).await?;
    let before = r#"{"idempotencyKey":"the same","requestType":"payment","payload":{"n":1"#.to_owned();
    let body = Body { before, after: "}}".to_owned() };
    let authorization = server.authorization();
    let headers = [("Authorization", authorization.as_str())];
    let template = Template::post_json_with(HOST, "/v1/requests", &headers, &body);
    let target = Target { name: "conflicts".to_owned(), address, template };
    let options = LoadOptions {
        connections: 16,
        rate_per_s: NonZeroU32::new(rate.max(1)),
        duration,
        keys: KEYS,
        expect: Expect::Status(409),
        ..LoadOptions::default()
    };
    weir_bench::measure(&target, &options).await.context("submit conflicts")
}

/// A run whose downstream takes long and fails for a fifth of the calls: submissions must not notice, and all but the retries keep
/// up.
async fn degrade(
    bench: &Bench,
    database: Option<&Database>,
    duration: Duration,
    results: &mut Results,
) -> Result<()> {
    let (rate, engines) = (DEGRADED.0, engines(database));
    let name = format!("weir {}, degraded downstream at {rate}/s", engines.name());
    eprintln!("measuring: {name} for {:.0} s", duration.as_secs_f64());
    let downstream = Downstream::start().await?;
    downstream.degrade();
    let settings = [("WEIR_DOWNSTREAM", downstream.url()), ("WEIR_REQUEST_MAX_ATTEMPTS", "20")];
    let server = Server::start(bench, &name, engines, &settings).await?;
    let options = LoadOptions { rate_per_s: NonZeroU32::new(rate), duration, ..LoadOptions::default() };
    let whole = options.warmup + duration;
    let began = Instant::now();
    let report = server.load("degraded", options).await?;
    let completed = downstream.answered() as f64 / began.elapsed().as_secs_f64();
    downstream.recover();
    let recovering = Instant::now();
    server.finished().await?;
    results.note([format!(
        "{name}: {completed:.0} calls a second succeeded; all requests were completed {:.1} s after the downstream was well again \
         ({:.0} s of load)",
        recovering.elapsed().as_secs_f64(),
        whole.as_secs_f64()
    )]);
    let p95 = report.latency_ms.p95;
    results.target(&format!("{name}, accepted, p95"), p95, Bound::Below(ACCEPT_P95_TARGET_MS), "ms");
    let share = completed / f64::from(rate);
    results.target(
        &format!("{name}, completed / submitted"),
        share,
        Bound::AtLeast(DEGRADED_SHARE_TARGET),
        "×",
    );
    let failures = server.stop_and_audit(report.expected()).await;
    results.add(Run { row: Row::from_report(&report), failures });
    Ok(())
}
