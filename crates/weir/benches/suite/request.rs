//! Request: accepting submissions, and completing them.
//!
//! Shared by its runs: a server with a token, whose audit is compared with its responses. `accept` measures
//! submissions only, `whole` also their execution, `wake` how soon an idle worker starts, `jobs` the effect of a
//! million finished jobs, and `fair` how much tenants delay each other.

pub(crate) mod accept;
pub(crate) mod fair;
pub(crate) mod jobs;
pub(crate) mod wake;
pub(crate) mod whole;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::time::sleep;
use weir_bench::{Body, Expect, LoadOptions, Report, Target, Template, resolve};
use weir_testkit::http::Client;

use crate::process::{self, Process};
use crate::weir::{Engines, HOST, serve};
use crate::{Bench, audit};

/// The range of the generator's digits. It draws keys at random, so that hardly any key occurs twice.
pub(crate) const KEYS: u64 = 10_000_000_000;
const TENANT: &str = "bench";
const PAYLOAD: &str =
    r#"","requestType":"payment","payload":{"amount":12.5,"currency":"EUR","to":"DE00 1234"}}"#;
/// How long finishing accepted requests may take.
const FINISHED_WITHIN: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);

/// `weir serve` on an empty store, and a caller's token.
pub(crate) struct Server {
    name: String,
    process: Process,
    url: String,
    token: String,
    operator: Client,
}

impl Server {
    pub(crate) async fn start(
        bench: &Bench,
        name: &str,
        engines: Engines<'_>,
        settings: &[(&str, &str)],
    ) -> Result<Self> {
        let directory = bench.path().join(name);
        let data = directory.join("data");
        let mut command = serve(&data, engines);
        command.envs(settings.iter().copied());
        let mut process = Process::spawn(command, &directory)?;
        let url = process.ready_url().await.context("start weir")?;
        let admin_key = fs::read_to_string(data.join("admin.key")).context("read the admin key")?;
        let operator = Client::new(&url).with_header("x-admin-key", admin_key.trim());
        Ok(Self { name: name.to_owned(), process, url, token: token(data)?, operator })
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn authorization(&self) -> String {
        format!("Bearer {}", self.token)
    }

    pub(crate) fn caller(&self) -> Client {
        Client::new(&self.url).with_header("authorization", &self.authorization())
    }

    /// Runs a load of submissions. Loads of one server must differ in `keys`.
    pub(crate) async fn load(&self, keys: &str, options: LoadOptions) -> Result<Report> {
        let (address, _) = resolve(&self.url, false).await?;
        let body = Body { before: format!(r#"{{"idempotencyKey":"{keys}-"#), after: PAYLOAD.to_owned() };
        let authorization = self.authorization();
        let headers = [("Authorization", authorization.as_str())];
        let template = Template::post_json_with(HOST, "/v1/requests", &headers, &body);
        let target = Target { name: self.name.clone(), address, template };
        let options = LoadOptions { keys: KEYS, expect: Expect::Status(202), ..options };
        weir_bench::measure(&target, &options).await.with_context(|| format!("load {}", self.name))
    }

    async fn books(&self) -> Result<Value> {
        Ok(audit::read_all(&self.operator).await?["request"].clone())
    }

    /// Waits until nothing is in flight, and returns the number of completed requests.
    pub(crate) async fn finished(&self) -> Result<u64> {
        let deadline = Instant::now() + FINISHED_WITHIN;
        loop {
            let books = self.books().await?;
            if books["inFlight"] == 0 {
                return books["completed"].as_u64().context("the books have a number of completed requests");
            }
            ensure!(Instant::now() < deadline, "requests are still in flight: {books}");
            sleep(POLL).await;
        }
    }

    /// Stops the server and returns failed checks: the audit must balance and contain at least `promised` accepted
    /// requests.
    pub(crate) async fn stop_and_audit(self, promised: u64) -> Vec<String> {
        let mut failures = match self.books().await {
            Err(error) => vec![format!("it could not be audited: {error:#}")],
            Ok(books) => {
                let accepted = books["accepted"].as_u64().unwrap_or_default();
                let checks = [
                    (
                        books["difference"] == 0 && books["jobs"] == books["inFlight"],
                        "the books do not balance",
                    ),
                    (accepted >= promised, "fewer were accepted than answered with 202"),
                    (books["dead"] == 0 && books["failed"] == 0, "some have failed"),
                ];
                let failed = checks.into_iter().filter(|(holds, _)| !holds);
                failed.map(|(_, failure)| format!("{failure}: {books}")).collect()
            }
        };
        if let Err(error) = self.process.stop().await {
            failures.push(format!("{error:#}"));
        }
        failures.iter().map(|failure| format!("{}: {failure}", self.name)).collect()
    }
}

fn token(data: PathBuf) -> Result<String> {
    let mut command = process::weir();
    command.args(["token", "--sub", "bench", "--tenant", TENANT, "--ttl", "2h"]);
    command.args(["--scope", "requests:create,requests:read"]).env("WEIR_DATA", data);
    let output = command.output().context("run weir token")?;
    ensure!(output.status.success(), "weir token failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the options of a closed loop.
fn closed_loop(bench: &Bench) -> LoadOptions {
    let Bench { connections, warmup, duration, .. } = *bench;
    LoadOptions { connections, warmup, duration, ..LoadOptions::default() }
}
