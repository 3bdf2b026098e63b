//! Events one a call: `POST /api/v1/slots` on keep-alive connections in a closed loop, each with an id of its own.

use anyhow::{Context as _, Result};
use weir_bench::{Body, LoadOptions, Report, Target, Template, resolve};

use super::{CONFIG, Server, TIME};
use crate::Bench;
use crate::postgres::Postgres;
use crate::results::{Row, Run};
use crate::weir::{Engines, HOST};

const CLIENTS: usize = 64;
/// All that the generator's digits can say. It draws ids at random, so that hardly any comes twice.
const IDS: u64 = 10_000_000_000;
/// More ids that were there before than chance can bring.
const REPEATS: u64 = 20;

/// Loads a fresh server on an empty database, then holds its books against the answers it gave.
pub(crate) async fn measure(bench: &Bench, postgres: &Postgres) -> Result<Run> {
    let name = format!("weir Postgres, {CLIENTS} clients, one event a call");
    eprintln!("measuring: {name}");
    let database = postgres.database().await;
    let engines = Engines { postgres: Some(database.url()), ..Engines::EMBEDDED };
    let server = Server::start(bench, &name, engines).await?;
    let report = load(bench, &name, &server.url, "single", CLIENTS).await?;
    let mut failures = repeats(&report);
    failures.extend(server.hold_to_account(new(&report)..).await);
    postgres.drop_database(database).await?;
    Ok(Run { row: Row::from_report(&report), failures })
}

/// Events whose ids begin with `ids`, from this many clients. Loads of one server must differ in `ids`, since the
/// generator draws the same numbers each time.
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

/// Slots that were assigned while it was measured; those of the warm-up come on top.
pub(super) fn new(report: &Report) -> u64 {
    report.statuses.get(&201).copied().unwrap_or_default()
}

/// A load of events that have slots would be another measurement.
pub(super) fn repeats(report: &Report) -> Vec<String> {
    let existing = report.statuses.get(&200).copied().unwrap_or_default();
    let failure = format!("{}: {existing} events had slots already", report.name);
    (existing > REPEATS).then_some(failure).into_iter().collect()
}
