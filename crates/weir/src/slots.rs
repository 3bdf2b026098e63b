//! `weir slots`: assigns slots to the events of a file, and forecasts a load.

mod events;
mod import;

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use crate::client::{Client, TlsArgs};

#[derive(Debug, Subcommand)]
pub(crate) enum SlotsCommand {
    /// Assign a slot to every event of a file; run it again to resume
    Import(import::ImportArgs),
    /// Forecast when a load would be done, without assigning it
    Forecast(ForecastArgs),
}

#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct ServerArgs {
    /// The server's HTTP API [env: WEIR_LISTEN] [default: http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The server's data directory, to send the admin key in it; WEIR_ADMIN_KEY is sent whenever it is set
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
}

impl ServerArgs {
    /// A client that sends the operator's key if the caller has named one. A server on loopback requires none by default.
    fn client(&self) -> anyhow::Result<Client> {
        if self.data.is_some() || std::env::var_os("WEIR_ADMIN_KEY").is_some() {
            Client::for_operator(self.url.as_deref(), self.data.as_deref(), &self.tls)
        } else {
            Client::new(self.url.as_deref(), &self.tls)
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ForecastArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// The slot config of the events
    #[arg(long, value_name = "NAME")]
    config: String,
    /// The requested time, such as 2026-01-01T12:00:00Z
    #[arg(long, value_name = "TIME")]
    time: String,
    /// The number of events
    #[arg(long, value_name = "COUNT")]
    events: u64,
}

pub(crate) fn run(command: SlotsCommand) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            SlotsCommand::Import(arguments) => import::run(arguments).await,
            SlotsCommand::Forecast(arguments) => forecast(arguments).await,
        }
    })
}

async fn forecast(arguments: ForecastArgs) -> anyhow::Result<ExitCode> {
    let ForecastArgs { server, config, time, events } = arguments;
    let client = server.client()?;
    let body = json!({"configName": config, "requestedTime": time, "events": events});
    let (status, answer) =
        client.post("/api/v1/slots/forecast", "application/json", body.to_string().into()).await?;
    let answer: serde_json::Value = serde_json::from_slice(&answer)?;
    let text = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
    anyhow::ensure!(status == 200, "{}", text("message"));
    let mut out = std::io::stdout();
    writeln!(out, "{events} events of {config} for {time}")?;
    writeln!(out, "  first window   {}", text("firstWindow"))?;
    writeln!(out, "  last window    {}", text("lastWindow"))?;
    writeln!(out, "  done by        {}", text("finishesBy"))?;
    writeln!(out, "  windows used   {}", answer["windows"])?;
    Ok(ExitCode::SUCCESS)
}
