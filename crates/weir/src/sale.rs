//! `weir sale`: demo sales.

mod crowd;
mod demo;

use std::process::ExitCode;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum SaleCommand {
    /// Run a sale that opens in a few seconds, with simulated buyers
    Demo(demo::DemoArgs),
}

pub(crate) fn run(command: SaleCommand) -> anyhow::Result<ExitCode> {
    let SaleCommand::Demo(arguments) = command;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(demo::run(&arguments))?;
    Ok(ExitCode::SUCCESS)
}
