//! From submission to `COMPLETED`, every role in one process, with the downstream that is built in.

use std::time::Instant;

use anyhow::Result;

use super::{Server, closed_loop};
use crate::Bench;
use crate::results::{Row, Run};
use crate::weir::Engines;

/// The rate is of completed requests, from the first submission until the last is completed.
pub(crate) async fn measure(bench: &Bench, engines: Engines<'_>) -> Result<Run> {
    let name = format!("weir {}, requests accepted and completed", engines.name());
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines, &[]).await?;
    let began = Instant::now();
    let report = server.load("whole", closed_loop(bench)).await?;
    let completed = server.finished().await?;
    let rate = completed as f64 / began.elapsed().as_secs_f64();
    let failures = server.hold_to_account(report.expected()).await;
    let row = Row { requests_per_s: rate, ..Row::from_report(&report) };
    Ok(Run { row, failures })
}
