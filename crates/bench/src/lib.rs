//! The load generator of Weir: what `weir bench` runs, and functions a suite can call to measure a server.
//!
//! It measures from outside, over HTTP, and knows no rule and no store. The server it loads is another process,
//! started by [`child`] from the same binary, or one that the caller names. Mounting the arguments is left to
//! the `weir` binary.

mod baseline;
mod child;
mod expect;
mod load;
mod quota;
mod report;
mod target;

pub use baseline::{EmptyArgs, serve_empty};
pub use expect::Expect;
pub use load::{Body, LoadOptions, Target, Template, configure, measure};
pub use quota::QuotaArgs;
pub use report::{Comparison, ErrorCounts, LatencyMs, Report, ratio};
pub use target::resolve;

use anyhow::{Context as _, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

/// What `weir bench` can measure.
#[derive(Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// Load POST /api/send and compare its rate with an empty handler's.
    Quota(QuotaArgs),
    /// Serve an empty handler, the baseline of the other benchmarks.
    #[command(hide = true)]
    Empty(EmptyArgs),
}

/// Runs one command to its end, or until SIGINT or SIGTERM; servers it started stop with it.
pub async fn run(command: BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Quota(args) => unless_interrupted(quota::run(args)).await,
        BenchCommand::Empty(args) => serve_empty(args.listen).await,
    }
}

async fn unless_interrupted(work: impl Future<Output = Result<()>>) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        _ = terminate.recv() => bail!("terminated"),
    }
}
