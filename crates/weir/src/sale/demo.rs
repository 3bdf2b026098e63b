//! `weir sale demo`: creates a sale that opens in a few seconds, runs a crowd of buyers, and shows the progress.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use bytes::Bytes;
use clap::Args;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::crowd::{self, SaleTally};
use crate::client::{Client, TlsArgs};

/// How often the progress line is redrawn on a terminal, and how often a line is written elsewhere.
const REDRAW_EVERY: Duration = Duration::from_millis(200);
const LINE_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
#[expect(clippy::doc_markdown, reason = "the comments are the help text people read")]
pub(crate) struct DemoArgs {
    /// The server's HTTP API [env: WEIR_LISTEN] [default: http://127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The server's data directory, where its admin key is unless WEIR_ADMIN_KEY is set [env: WEIR_DATA] [default: ./data]
    #[arg(long, value_name = "DIRECTORY")]
    data: Option<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// The number of units
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    units: u32,
    /// The number of buyers
    #[arg(long, value_name = "COUNT", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    buyers: u32,
    /// Seconds until it opens
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    starts_in: u32,
    /// Seconds for which it stays open unless it is sold out earlier
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    lasts: u32,
}

pub(crate) async fn run(arguments: &DemoArgs) -> anyhow::Result<()> {
    let client = Client::for_operator(arguments.url.as_deref(), arguments.data.as_deref(), &arguments.tls)?;
    let starts_in = Duration::from_secs(arguments.starts_in.into());
    let opening = Instant::now() + starts_in;
    let sku = create_sale(&client, arguments, starts_in).await?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{} units go on sale in {} s, and {} buyers will try to get one.\nWatch it: {}/sale/?sku={sku}\n",
        arguments.units,
        arguments.starts_in,
        arguments.buyers,
        client.base()
    )?;
    let tally = Arc::new(SaleTally::default());
    let shown = show(&client, &sku, opening, arguments.units, &tally);
    tokio::select! {
        () = crowd::run_buyers(&client, &sku, arguments.buyers, opening, &tally) => {}
        () = shown => {}
    }
    print_summary(&client, &sku, arguments, &tally).await
}

/// Creates the sale and returns its sku.
async fn create_sale(client: &Client, arguments: &DemoArgs, starts_in: Duration) -> anyhow::Result<String> {
    let now = SystemTime::now();
    let sku = format!("DEMO-{}", now.duration_since(UNIX_EPOCH)?.as_millis());
    let start = now + starts_in;
    let product = json!({
        "sku": sku,
        "productName": "Weir demo",
        "initialStock": arguments.units,
        "startTime": Timestamp::try_from(start)?.to_string(),
        "endTime": Timestamp::try_from(start + Duration::from_secs(arguments.lasts.into()))?.to_string(),
    });
    let (status, body) =
        client.post("/api/v1/products", "application/json", Bytes::from(product.to_string())).await?;
    let answer: Value = serde_json::from_slice(&body).with_context(|| {
        format!("the server responded {status} without JSON; is this the address of Weir?")
    })?;
    let why = answer["error"]["message"].as_str().unwrap_or("the server rejected it");
    ensure!(status == 201, "cannot create the sale: {why}");
    Ok(sku)
}

/// Shows the progress until it is dropped.
async fn show(client: &Client, sku: &str, opening: Instant, units: u32, tally: &SaleTally) {
    let is_terminal = std::io::stderr().is_terminal();
    let mut ticks = interval(if is_terminal { REDRAW_EVERY } else { LINE_EVERY });
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let time_left = opening.saturating_duration_since(Instant::now());
        let line = if time_left.is_zero() {
            let stock = status(client, sku).await.and_then(|sale| sale["stock"].as_u64());
            progress_line(stock, units, tally)
        } else {
            format!("opens in {} s", time_left.as_secs() + 1)
        };
        // A failed write to the terminal must not end the sale.
        let _ = if is_terminal {
            write!(std::io::stderr(), "\r\x1b[2K{line}")
        } else {
            writeln!(std::io::stderr(), "{line}")
        };
    }
}

fn progress_line(stock: Option<u64>, units: u32, tally: &SaleTally) -> String {
    let attempts = SaleTally::count(&tally.attempts);
    let Some(stock) = stock else { return format!("the server does not respond  {attempts} attempts") };
    let filled = "█".repeat(usize::try_from(stock * 20 / u64::from(units)).unwrap_or(0).min(20));
    format!("{filled:░<20} {stock} of {units} left  {attempts} attempts")
}

async fn status(client: &Client, sku: &str) -> Option<Value> {
    let (status, body) = client.call(http::Method::GET, &format!("/api/v1/sales?sku={sku}")).await.ok()?;
    let answer: Value = serde_json::from_slice(&body).ok().filter(|_| status == 200)?;
    Some(answer["data"].clone())
}

/// Prints the summary. Fails if more units were sold than existed, which must never happen.
async fn print_summary(
    client: &Client,
    sku: &str,
    arguments: &DemoArgs,
    tally: &SaleTally,
) -> anyhow::Result<()> {
    if std::io::stderr().is_terminal() {
        let _ = write!(std::io::stderr(), "\r\x1b[2K");
    }
    let sale = status(client, sku).await.context("the server stopped responding")?;
    let sold = u64::from(arguments.units).saturating_sub(sale["stock"].as_u64().unwrap_or_default());
    let mut out = std::io::stdout();
    writeln!(out, "{sold} of {} units sold to {} buyers", arguments.units, SaleTally::count(&tally.bought))?;
    let rows = [
        ("attempts", &tally.attempts),
        ("sold out", &tally.sold_out),
        ("too early", &tally.too_early),
        ("too late", &tally.too_late),
        ("rate limited", &tally.limited),
        ("failed", &tally.failed),
    ];
    for (name, counter) in rows {
        writeln!(out, "{:>8}  {name}", SaleTally::count(counter))?;
    }
    let bought = SaleTally::count(&tally.bought);
    ensure!(
        bought <= u64::from(arguments.units),
        "oversold: {bought} buyers got one of {} units",
        arguments.units
    );
    Ok(())
}
