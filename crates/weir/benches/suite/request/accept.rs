//! Submissions to a server without workers, in a closed loop; and at a given rate with all roles.

use std::num::NonZeroU32;

use anyhow::Result;
use weir_bench::LoadOptions;

use super::{Server, closed_loop};
use crate::Bench;
use crate::results::{Row, Run};
use crate::weir::Engines;

const RATE: u32 = 500;
const API_ONLY: (&str, &str) = ("WEIR_ROLES", "api");

/// Measures submissions in a closed loop.
pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>) -> Result<Run> {
    let name = bench.name(&format!("weir {}, requests accepted", engines.name()));
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines, &[API_ONLY]).await?;
    let report = server.load("accept", closed_loop(bench)).await?;
    let failures = server.stop_and_audit(report.expected()).await;
    Ok(Run { row: Row::from_report(&report), failures })
}

/// Measures 500 submissions per second with all roles.
pub(crate) async fn measure_at_rate(bench: &Bench, engines: Engines<'_>) -> Result<Run> {
    let name = format!("weir {}, {RATE} requests a second", engines.name());
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines, &[]).await?;
    let options = LoadOptions { rate_per_s: NonZeroU32::new(RATE), ..closed_loop(bench) };
    let report = server.load("rate", options).await?;
    server.finished().await?;
    let failures = server.stop_and_audit(report.expected()).await;
    Ok(Run { row: Row::from_report(&report), failures })
}
