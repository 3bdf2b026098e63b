//! Compares AI calls through the gateway with calls through nginx and without a gateway; and checks of a policy.

use std::fs;
use std::num::NonZeroU32;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weir_bench::{Body, LoadOptions, Report, Target, Template, resolve};
use weir_testkit::http::Client;

use crate::nginx::Nginx;
use crate::process::{self, Process};
use crate::results::{Row, Run};
use crate::weir::{Engines, HOST, serve};
use crate::{Bench, SPREAD};

const PATH: &str = "/api/v1/ai/chat";
/// A limit that no run reaches.
const UNREACHABLE: &str = "2147483647";
const POLICY: &str = "bench";
/// The secret of tokens that are signed before the server starts.
const SECRET: (&str, &str) = ("WEIR_JWT_SECRET", "a secret that is good enough for a measurement");

/// Calls per second, and their connections, where latency is measured.
const RATE: u32 = 500;
const RATE_CONNECTIONS: usize = 16;

/// The latency that the gateway adds to a call.
pub(crate) struct AddedLatency {
    pub(crate) direct: Row,
    pub(crate) through: Row,
    pub(crate) p99_ms: f64,
}

/// The upstream of both gateways: a handler that does nothing. Also holds a caller's token.
pub(crate) struct Upstream {
    process: Process,
    url: String,
    /// nginx only reads the header and does not verify it.
    authorization: String,
}

impl Upstream {
    pub(crate) async fn start(bench: &Bench) -> Result<Self> {
        let directory = bench.path().join("ai upstream");
        let mut command = process::weir();
        command.args(["bench", "empty"]);
        let mut process = Process::spawn(command, &directory)?;
        let url = process.ready_url().await.context("start the upstream")?;
        Ok(Self { process, url, authorization: token("")? })
    }

    pub(crate) async fn measure_nginx(&self, bench: &Bench) -> Result<Row> {
        let name = "nginx with limit_req";
        eprintln!("measuring: {name}");
        let nginx = Nginx::start(&bench.path().join("nginx"), &self.url).await?;
        let report = self.load(bench, name, &nginx.url).await?;
        nginx.stop().await?;
        let row = Row::from_report(&report);
        ensure!(row.failed == 0, "nginx answered {} calls otherwise", row.failed);
        Ok(row)
    }

    pub(crate) async fn measure_weir(&self, bench: &Bench) -> Result<Run> {
        let name = "weir embedded, AI calls";
        eprintln!("measuring: {name}");
        let directory = bench.path().join("ai weir");
        let mut server = Process::spawn(self.serve(&directory.join("data")), &directory)?;
        let url = server.ready_url().await.context("start weir")?;
        let report = self.load(bench, name, &url).await?;
        let mut failures = check_forwarded(&url, &report).await?;
        if let Err(error) = server.stop().await {
            failures.push(format!("{name}: {error:#}"));
        }
        Ok(Run { row: Row::from_report(&report), failures })
    }

    /// Returns a server in front of the upstream, with limits that no run reaches.
    fn serve(&self, data: &Path) -> Command {
        let mut command = serve(data, Engines::EMBEDDED);
        command.env("WEIR_AI_UPSTREAM", &self.url).env(SECRET.0, SECRET.1);
        for setting in ["REQUESTS_PER_MINUTE", "BURST_CAPACITY", "DAILY_LIMIT"] {
            command.env(format!("WEIR_RATE_LIMIT_TIERS_FREE_{setting}"), UNREACHABLE);
        }
        command
    }

    async fn load(&self, bench: &Bench, name: &str, url: &str) -> Result<Report> {
        drive(name, url, self.template(), &options(bench, 1)).await
    }

    fn template(&self) -> Template {
        let body = Body {
            before: r#"{"model":"small","user":"u"#.to_owned(),
            after: r#"","messages":[{"role":"user","content":"hello"}]}"#.to_owned(),
        };
        let headers = [("Authorization", self.authorization.as_str())];
        Template::post_json_with(HOST, PATH, &headers, &body)
    }

    /// Measures the latency that the gateway adds to a call, at a rate far below saturation.
    pub(crate) async fn measure_added(&self, bench: &Bench) -> Result<AddedLatency> {
        let direct =
            self.load_at_rate(bench, &format!("AI calls without a gateway, {RATE}/s"), &self.url).await?;
        let directory = bench.path().join("ai weir at a rate");
        let mut server = Process::spawn(self.serve(&directory.join("data")), &directory)?;
        let url = server.ready_url().await.context("start weir")?;
        let through = self.load_at_rate(bench, &format!("weir embedded, AI calls, {RATE}/s"), &url).await?;
        server.stop().await.context("stop weir")?;
        let p99 = |row: &Row| row.p99_ms.unwrap_or(f64::NAN);
        let p99_ms = p99(&through) - p99(&direct);
        Ok(AddedLatency { direct, through, p99_ms })
    }

    async fn load_at_rate(&self, bench: &Bench, name: &str, url: &str) -> Result<Row> {
        eprintln!("measuring: {name}");
        let options = LoadOptions {
            connections: RATE_CONNECTIONS,
            rate_per_s: NonZeroU32::new(RATE),
            ..options(bench, 1)
        };
        let report = drive(name, url, self.template(), &options).await?;
        let row = Row::from_report(&report);
        ensure!(row.failed == 0, "{name}: {} calls were answered otherwise", row.failed);
        Ok(row)
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.process.stop().await.context("stop the upstream")
    }
}

/// Checks that every response came from the upstream.
async fn check_forwarded(url: &str, report: &Report) -> Result<Vec<String>> {
    let metrics = Client::new(url).get("/metrics").await.context("read the metrics")?;
    let text = String::from_utf8_lossy(&metrics.body).into_owned();
    let line = text.lines().find(|line| line.starts_with("weir_ai_calls_total{outcome=\"answered\"}"));
    let answered: u64 = line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0);
    let failure = format!("{}: {answered} calls were passed on, {} answered", report.name, report.expected());
    Ok((answered < report.expected()).then_some(failure).into_iter().collect())
}

/// Measures checks of one policy with one key per call.
pub(crate) async fn measure_check(bench: &Bench) -> Result<Run> {
    let name = "weir embedded, POST /v1/check";
    eprintln!("measuring: {name}");
    let directory = bench.path().join("check weir");
    let data = directory.join("data");
    let mut command = serve(&data, Engines::EMBEDDED);
    command.env(SECRET.0, SECRET.1);
    let mut server = Process::spawn(command, &directory)?;
    let url = server.ready_url().await.context("start weir")?;
    let key = fs::read_to_string(data.join("admin.key")).context("read the admin key")?;
    let operator = Client::new(&url).with_header("x-admin-key", key.trim());
    let policy =
        json!({"kind": "token_bucket", "capacity": 2_147_483_647, "refill": 2_147_483_647, "period": "PT1M"});
    let made =
        operator.put(&format!("/admin/policies/{POLICY}"), &policy).await.context("make the policy")?;
    ensure!(made.status / 100 == 2, "the policy was answered with {}", made.status);
    let body = Body {
        before: format!(r#"{{"checks":[{{"policy":"{POLICY}","key":"u"#),
        after: r#"","cost":1}]}"#.to_owned(),
    };
    let authorization = token("limits:check")?;
    let headers = [("Authorization", authorization.as_str())];
    let template = Template::post_json_with(HOST, "/v1/check", &headers, &body);
    let report = drive(name, &url, template, &options(bench, SPREAD)).await?;
    let failures = server.stop().await.err().map(|error| format!("{name}: {error:#}"));
    Ok(Run { row: Row::from_report(&report), failures: failures.into_iter().collect() })
}

/// Returns the options of a closed loop over this many keys.
pub(crate) fn options(bench: &Bench, keys: u64) -> LoadOptions {
    let Bench { connections, warmup, duration, .. } = *bench;
    LoadOptions { connections, warmup, duration, keys, ..LoadOptions::default() }
}

pub(crate) async fn drive(
    name: &str,
    url: &str,
    template: Template,
    options: &LoadOptions,
) -> Result<Report> {
    let (address, _) = resolve(url, false).await?;
    let target = Target { name: name.to_owned(), address, template };
    weir_bench::measure(&target, options).await.with_context(|| format!("load {name}"))
}

fn token(scope: &str) -> Result<String> {
    let mut command = process::weir();
    command.args(["token", "--sub", "bench@example.com", "--ttl", "2h"]).env(SECRET.0, SECRET.1);
    if !scope.is_empty() {
        command.args(["--scope", scope]);
    }
    let output = command.output().context("run weir token")?;
    ensure!(output.status.success(), "weir token failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(format!("Bearer {}", String::from_utf8_lossy(&output.stdout).trim()))
}
