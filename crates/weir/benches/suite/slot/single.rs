//! One event per call: `POST /api/v1/slots` on keep-alive connections in a closed loop, each with its own id.

use anyhow::{Context as _, Result};
use weir_bench::{Body, LoadOptions, Report, Target, Template, resolve};

use super::{CONFIG, Server, TIME};
use crate::Bench;
use crate::postgres::Postgres;
use crate::results::{Row, Run};
use crate::weir::{Engines, HOST};

const CLIENTS: usize = 64;
/// The range of the generator's digits. It draws ids at random, so that hardly any id occurs twice.
const IDS: u64 = 10_000_000_000;
/// More repeated ids than random draws can produce.
const REPEATS: u64 = 20;

/// Loads a fresh server on an empty database, then compares its audit with its responses.
pub(crate) async fn measure(bench: &Bench, postgres: &Postgres) -> Result<Run> {
    let name = format!("weir Postgres, {CLIENTS} clients, one event a call");
    eprintln!("measuring: {name}");
    let database = postgres.database().await;
    let engines = Engines { postgres: Some(database.url()), ..Engines::EMBEDDED };
    let server = Server::start(bench, &name, engines).await?;
    let report = load(bench, &name, &server.url, "single", CLIENTS).await?;
    let mut failures = repeats(&report);
    failures.extend(server.stop_and_audit(new(&report)..).await);
    postgres.drop_database(database).await?;
    Ok(Run { row: Row::from_report(&report), failures })
}

/// Runs a load of events whose ids start with `ids`. Loads of one server must differ in `ids`, since the generator
/// draws the same numbers each time.
pub(super) async fn load(bench: &Bench, name: &str, url: &str, ids: &str, clients: usize) -> Result<Report> {
    let (address, _) = resolve(url, false).await?;
    let body = Body {
        before: format!(r#"{{"eventId":"{ids}-"#),
        after: format!(r#"","configName":"{CONFIG}","requestedTime":"{TIME}"}}"#),
    };
    let template = Template::post_json(HOST, "/api/v1/slots", &body);
    let target = Target { name: name.to_owned(), address, template };
    let options = LoadOptions {
        connections: clients,
        warmup: bench.warmup,
        duration: bench.duration,
        keys: IDS,
        ..LoadOptions::default()
    };
    weir_bench::measure(&target, &options).await.with_context(|| format!("load {name}"))
}

/// Returns the slots assigned during the measured time, without the warm-up.
pub(super) fn new(report: &Report) -> u64 {
    report.statuses.get(&201).copied().unwrap_or_default()
}

/// Returns a failure if events had slots already, which would be a different measurement.
pub(super) fn repeats(report: &Report) -> Vec<String> {
    let existing = report.statuses.get(&200).copied().unwrap_or_default();
    let failure = format!("{}: {existing} events had slots already", report.name);
    (existing > REPEATS).then_some(failure).into_iter().collect()
}
