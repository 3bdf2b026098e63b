//! Submissions taken by a server that leaves the work to others, as fast as they come and at a given rate.

use std::num::NonZeroU32;

use anyhow::Result;
use weir_bench::LoadOptions;

use super::{Server, closed_loop};
use crate::Bench;
use crate::results::{Row, Run};
use crate::weir::Engines;

const RATE: u32 = 500;
const ALONE: (&str, &str) = ("WEIR_ROLES", "api");

/// As fast as they come.
pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>) -> Result<Run> {
    let name = bench.name(&format!("weir {}, requests accepted", engines.name()));
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines, &[ALONE]).await?;
    let report = server.load("accept", closed_loop(bench)).await?;
    let failures = server.hold_to_account(report.expected()).await;
    Ok(Run { row: Row::from_report(&report), failures })
}

/// At 500 a second, with every role on.
pub(crate) async fn measure_at_rate(bench: &Bench, engines: Engines<'_>) -> Result<Run> {
    let name = format!("weir {}, {RATE} requests a second", engines.name());
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines, &[]).await?;
    let options = LoadOptions { rate_per_s: NonZeroU32::new(RATE), ..closed_loop(bench) };
    let report = server.load("rate", options).await?;
    server.finished().await?;
    let failures = server.hold_to_account(report.expected()).await;
    Ok(Run { row: Row::from_report(&report), failures })
}
