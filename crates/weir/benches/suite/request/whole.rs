//! From submission to `COMPLETED`, with all roles in one process and the built-in downstream.

use std::time::Instant;

use anyhow::Result;

use super::{Server, closed_loop};
use crate::Bench;
use crate::results::{Row, Run};
use crate::weir::Engines;

/// Measures the rate of completed requests, from the first submission until the last completion.
pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>) -> Result<Run> {
    let name = format!("weir {}, requests accepted and completed", engines.name());
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines, &[]).await?;
    let began = Instant::now();
    let report = server.load("whole", closed_loop(bench)).await?;
    let completed = server.finished().await?;
    let rate = completed as f64 / began.elapsed().as_secs_f64();
    let failures = server.stop_and_audit(report.expected()).await;
    let row = Row { requests_per_s: rate, ..Row::from_report(&report) };
    Ok(Run { row, failures })
}
