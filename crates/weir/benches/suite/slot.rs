//! Slot: many events for one time, at most 100 in each window of 4 s.
//!
//! Shared by its runs: the pace, the time, and a server whose audit is compared with its responses. `bulk` sends
//! events in one stream, `single` one per call, `full` does the same behind full windows, and `baseline` is what they
//! are compared with.

mod baseline;
pub(crate) mod bulk;
pub(crate) mod full;
pub(crate) mod single;

use std::fmt::Debug;
use std::fs;
use std::ops::RangeBounds;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weir_testkit::http::Client;

pub(crate) use baseline::Baseline;

use crate::process::Process;
use crate::weir::{Engines, serve};
use crate::{Bench, audit};

const CONFIG: &str = "bench";
const MAX_PER_WINDOW: u64 = 100;
const WINDOW_SIZE: &str = "PT4S";
/// The requested time of every event: the start of a window, so that its whole capacity is available.
const TIME: &str = "2026-06-01T12:00:00Z";

/// `weir serve` on an empty store, with the pace configured.
struct Server {
    /// The name of the run.
    name: String,
    process: Process,
    url: String,
    operator: Client,
}

impl Server {
    async fn start(bench: &Bench, name: &str, engines: Engines<'_>) -> Result<Self> {
        let directory = bench.path().join(name);
        let data = directory.join("data");
        let mut process = Process::spawn(serve(&data, engines), &directory)?;
        let url = process.ready_url().await.context("start weir")?;
        let admin_key = fs::read_to_string(data.join("admin.key")).context("read the admin key")?;
        let operator = Client::new(&url).with_header("x-admin-key", admin_key.trim());
        let pace = json!({"configName": CONFIG, "maxPerWindow": MAX_PER_WINDOW, "windowSize": WINDOW_SIZE});
        let answer = operator.post("/admin/rate-limit/config", &pace).await.context("configure a pace")?;
        ensure!(answer.status == 200, "configuring a pace was answered {}", answer.status);
        Ok(Self { name: name.to_owned(), process, url, operator })
    }

    /// Stops the server and returns failed checks: the audit must balance with this many slots, and the server must
    /// stop cleanly.
    async fn stop_and_audit(self, promised: impl RangeBounds<u64> + Debug) -> Vec<String> {
        let mut failures = self
            .examine(promised)
            .await
            .unwrap_or_else(|error| vec![format!("it could not be audited: {error:#}")]);
        if let Err(error) = self.process.stop().await {
            failures.push(format!("{error:#}"));
        }
        failures.iter().map(|failure| format!("{}: {failure}", self.name)).collect()
    }

    async fn examine(&self, promised: impl RangeBounds<u64> + Debug) -> Result<Vec<String>> {
        let books = audit::read_all(&self.operator).await?;
        let number = |name: &str| {
            books["slot"][name]
                .as_u64()
                .with_context(|| format!("GET /admin/audit has no slot.{name}: {books}"))
        };
        let (slots, above_maximum) = (number("slots")?, number("aboveMaximum")?);
        let checks = [
            (books["ok"] == true, format!("the books do not balance: {books}")),
            (promised.contains(&slots), format!("{slots} slots, and the answers promised {promised:?}")),
            (above_maximum == 0, format!("{above_maximum} windows have more slots than allowed")),
        ];
        Ok(checks.into_iter().filter(|(holds, _)| !holds).map(|(_, failure)| failure).collect())
    }
}
