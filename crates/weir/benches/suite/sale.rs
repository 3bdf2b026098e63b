//! Sale: attempts to buy, status requests, and event streams, on a server that throttles nobody.

pub(crate) mod listeners;
pub(crate) mod script;

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use weir_bench::{LoadOptions, Target, Template, resolve};
use weir_testkit::http::Client;

use crate::process::Process;
use crate::redis::Redis;
use crate::results::{Row, Run, Sender};
use crate::weir::{Engines, HOST, serve};
use crate::{Bench, audit};

/// The number of buyers, who are drawn at random.
const BUYERS: u64 = 10_000_000_000;
/// A run of half a million attempts draws a few buyers twice within a second, who must not be throttled. So the
/// throttle checks every attempt, as always, but allows more of them.
const ATTEMPTS_PER_S: &str = "100";
const SKU: &str = "BENCH";
/// The stock of a flash sale, and more than any run sells.
const FLASH_SALE_UNITS: u32 = 100;
const UNLIMITED_UNITS: u32 = 2_000_000_000;
/// How long the sale lasts.
const OPEN_FOR: SignedDuration = SignedDuration::from_hours(1);

/// How long it may take until purchases decided by Redis are in the store.
const PERSISTED_WITHIN: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
const STREAM_POLL: Duration = Duration::from_millis(2);

/// The load.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
    /// Attempts to buy one of a hundred units: a flash sale after its first moment.
    Attempts,
    /// Attempts that all succeed.
    Units,
    /// Requests for the status of the sale.
    Status,
}

impl Load {
    const fn stock(self) -> u32 {
        match self {
            Self::Attempts => FLASH_SALE_UNITS,
            Self::Units | Self::Status => UNLIMITED_UNITS,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Attempts => "attempts to buy, 100 units",
            Self::Units => "units sold",
            Self::Status => "status of a sale",
        }
    }

    fn template(self) -> Template {
        let buyer = ("X-User-Id", "buyer-");
        match self {
            Self::Attempts | Self::Units => {
                let body = format!(r#"{{"sku":"{SKU}","qty":1}}"#);
                Template::keyed_by_header("POST", HOST, "/api/v1/purchases", buyer, Some(&body))
            }
            Self::Status => Template::keyed_by_header("GET", HOST, "/api/v1/sales", buyer, None),
        }
    }
}

/// `weir serve` on an empty store, with an active sale.
struct Server {
    name: String,
    process: Process,
    url: String,
    operator: Client,
}

impl Server {
    async fn start(bench: &Bench, name: &str, engines: Engines<'_>, stock: u32) -> Result<Self> {
        let directory = bench.path().join(name);
        let data = directory.join("data");
        let mut command = serve(&data, engines);
        command.env("WEIR_HTTP_MAX_CONNECTIONS", "20000").env("WEIR_SALE_USER_PER_SECOND", ATTEMPTS_PER_S);
        // All event streams come from the same address here.
        command.env("WEIR_EDGE_SSE_PER_IP", "0");
        let mut process = Process::spawn(command, &directory)?;
        let url = process.ready_url().await.context("start weir")?;
        let admin_key = fs::read_to_string(data.join("admin.key")).context("read the admin key")?;
        let operator = Client::new(&url).with_header("x-admin-key", admin_key.trim());
        let server = Self { name: name.to_owned(), process, url, operator };
        server.open(stock).await?;
        Ok(server)
    }

    /// Creates the sale and waits until it is active.
    async fn open(&self, stock: u32) -> Result<()> {
        let start = Timestamp::now() + SignedDuration::from_secs(1);
        let product = json!({
            "sku": SKU, "productName": "Bench", "initialStock": stock,
            "startTime": start.to_string(), "endTime": (start + OPEN_FOR).to_string(),
        });
        let answer = self.operator.post("/api/v1/products", &product).await.context("make a sale")?;
        ensure!(answer.status == 201, "making a sale was answered {}: {:?}", answer.status, answer.body);
        loop {
            let answer = self.operator.get("/api/v1/sales").await.context("look at the sale")?;
            if answer.json()["data"]["state"] == "ACTIVE" {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn books(&self) -> Result<Value> {
        Ok(audit::read_all(&self.operator).await?["sale"]["items"][0].clone())
    }

    /// Waits until every purchase is in the store, then stops the server. Returns failed checks: at least `sold_at_least`
    /// purchases, and no more than the stock.
    async fn stop_and_audit(self, sold_at_least: u64) -> Vec<String> {
        let mut failures = match self.audit(sold_at_least).await {
            Err(error) => vec![format!("it could not be audited: {error:#}")],
            Ok(failures) => failures,
        };
        if let Err(error) = self.process.stop().await {
            failures.push(format!("{error:#}"));
        }
        failures.iter().map(|failure| format!("{}: {failure}", self.name)).collect()
    }

    async fn audit(&self, sold_at_least: u64) -> Result<Vec<String>> {
        let ended = Instant::now();
        loop {
            let books = self.books().await?;
            let number = |name: &str| books[name].as_u64().unwrap_or_default();
            let (sold, persisted, stock) = (number("sold"), number("persisted"), number("initialStock"));
            if sold != persisted && ended.elapsed() < PERSISTED_WITHIN {
                tokio::time::sleep(POLL).await;
                continue;
            }
            let holds = sold == persisted && sold <= stock && sold >= sold_at_least.min(stock);
            return Ok(if holds { Vec::new() } else { vec![format!("the books do not balance: {books}")] });
        }
    }
}

/// Waits until the store has recorded every purchase, which is when the stream of the sale is empty. Its length is what the
/// store is behind by; an audit would take longer than that.
async fn wait_until_recorded(redis: &Redis) -> Sender {
    let (ended, stream) = (Instant::now(), format!("sale:{{{SKU}}}:stream"));
    let mut backlog = None;
    loop {
        let length = redis.server().command(&["XLEN", &stream]).await.integer();
        let length = u64::try_from(length).unwrap_or_default();
        let backlog = *backlog.get_or_insert(length);
        if length == 0 || ended.elapsed() > PERSISTED_WITHIN {
            return Sender { backlog, lag_s: ended.elapsed().as_secs_f64(), caught_up: length == 0 };
        }
        tokio::time::sleep(STREAM_POLL).await;
    }
}

/// Measures `load`. With the Redis that decides, it also measures how far the store is behind.
pub(crate) async fn measure(
    bench: &Bench,
    engines: Engines<'_>,
    redis: Option<&Redis>,
    load: Load,
) -> Result<Run> {
    let name = format!("weir {}, {}", engines.name(), load.name());
    eprintln!("measuring: {name}");
    let server = Server::start(bench, &name, engines, load.stock()).await?;
    let (address, _) = resolve(&server.url, false).await?;
    let target = Target { name: name.clone(), address, template: load.template() };
    let options = LoadOptions {
        connections: bench.connections,
        warmup: bench.warmup,
        duration: bench.duration,
        keys: BUYERS,
        ..LoadOptions::default()
    };
    let report = weir_bench::measure(&target, &options).await.with_context(|| format!("load {name}"))?;
    let sold_at_least = if matches!(load, Load::Status) { 0 } else { report.expected() };
    let sender = match redis {
        Some(redis) if matches!(load, Load::Units) => Some(wait_until_recorded(redis).await),
        _ => None,
    };
    let failures = server.stop_and_audit(sold_at_least).await;
    Ok(Run { row: Row { sender, ..Row::from_report(&report) }, failures })
}
