//! The `weir` command.

mod client;
mod dlq;
mod health;
mod keys;
mod sale;
mod serve;
mod slots;
mod token;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use weir_server::StartError;
use weir_server::settings::source::SettingError;

/// Every request allocates a little, which costs half as much with this allocator as with the system's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Decides who gets a share of something scarce: exactly, under any concurrency, durably and fast.
#[derive(Debug, Parser)]
#[command(name = "weir", version, about, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server
    Serve(serve::ServeArgs),
    /// Check whether a server is ready: exit code 0 if it is
    Health(health::HealthArgs),
    /// Print a token signed with the server's own secret
    Token(token::TokenArgs),
    /// Check the keys that requests are encrypted with, or encrypt all requests with the first of them
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Load events into slots, or forecast a load
    #[command(subcommand)]
    Slots(slots::SlotsCommand),
    /// List, show, replay or discard dead letters
    #[command(subcommand)]
    Dlq(dlq::DlqCommand),
    /// Run a demo sale
    #[command(subcommand)]
    Sale(sale::SaleCommand),
    /// Measure a server under load
    #[command(subcommand)]
    Bench(weir_bench::BenchCommand),
}

/// The exit code for an invalid setting.
const EXIT_SETTING: u8 = 2;

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Serve(arguments) => serve::run(arguments),
        Command::Health(arguments) => health::run(&arguments),
        Command::Token(arguments) => token::run(&arguments),
        Command::Keys(command) => keys::run(command),
        Command::Slots(command) => slots::run(command),
        Command::Dlq(command) => dlq::run(command),
        Command::Sale(command) => sale::run(command),
        Command::Bench(command) => bench(command),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            // One line that includes the causes.
            eprintln!("weir: {error:#}");
            let is_setting =
                error.is::<SettingError>() || matches!(error.downcast_ref(), Some(StartError::Setting(_)));
            if is_setting { ExitCode::from(EXIT_SETTING) } else { ExitCode::FAILURE }
        }
    }
}

fn bench(command: weir_bench::BenchCommand) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(weir_bench::run(command))?;
    Ok(ExitCode::SUCCESS)
}
