//! Health, metrics, documentation.

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;
use weir_server::routes::openapi_document;

use crate::fixtures::{Running, Store, configure, message, on_each_engine, send_in_parallel};

async fn health_names_the_engine_and_readiness_follows_it(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    let health = client.get("/health").await.unwrap();
    let engine = if store == Store::Embedded { "sqlite" } else { "postgresql" };
    assert_eq!(health.status, 200);
    let body = health.json();
    assert_eq!((&body["success"], &body["data"]["status"]), (&json!(true), &json!("healthy")));
    assert_eq!(body["data"]["checks"][engine]["status"], "up");
    assert!(body["data"]["uptime"].is_u64() && body["data"]["checks"][engine]["latencyMs"].is_u64());
    let alive = client.get("/livez").await.unwrap();
    assert_eq!((alive.status, &alive.body[..]), (200, &b"ok"[..]));
    let ready = client.get("/readyz").await.unwrap();
    assert_eq!((ready.status, &ready.json()["status"]), (200, &json!("ready")));
}

async fn metrics_count_requests_lanes_and_outcomes(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    configure(&client, "u", 10, 60).await;
    send_in_parallel(&[server.client()], "u", 30).await;
    client.post("/api/send", &message("nobody", "x")).await.unwrap();
    client.get("/api/config/some-user-of-ours").await.unwrap();
    let accept = [("accept", "application/openmetrics-text;version=1.0.0")];
    let metrics = client.request(http::Method::GET, "/metrics", &accept, "").await.unwrap();
    assert!(metrics.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    let count = |outcome: &str| -> u32 {
        let line =
            text.lines().find(|line| line.contains(&format!("quota_sends_total{{outcome=\"{outcome}\"")));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
    };
    assert_eq!(count("denied") + count("denied_from_memory"), 20);
    for line in [
        "weir_quota_sends_total{outcome=\"accepted\"} 10",
        "weir_quota_sends_total{outcome=\"not_configured\"} 1",
        "weir_http_requests_total{method=\"GET\",route=\"/api/config/{userId}\",status=\"404\"} 1",
        "weir_lane_wait_seconds_count{lane=\"quota\"}",
        "weir_lane_rejected_total{lane=\"quota\"} 0",
        "# EOF",
    ] {
        assert!(text.contains(line), "{line} is not in:\n{text}");
    }
    let through_lanes = 31 - count("denied_from_memory");
    assert!(text.contains(&format!("weir_lane_batch_size_sum{{lane=\"quota\"}} {through_lanes}")), "{text}");
    assert!(!text.contains("some-user-of-ours"), "callers cannot create labels");
}

on_each_engine!(health_names_the_engine_and_readiness_follows_it, metrics_count_requests_lanes_and_outcomes,);

/// Returns the metrics of a server after several kinds of requests, in the text format and in `OpenMetrics`, which Prometheus
/// asks for.
async fn metrics_in_both_formats() -> (String, String) {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    configure(&client, "u", 10, 60).await;
    send_in_parallel(&[server.client()], "u", 30).await;
    client.get("/api/v1/sales").await.unwrap();
    client.post("/v1/check", &json!({})).await.unwrap();
    let text = client.get("/metrics").await.unwrap();
    assert_eq!(text.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let accept =
        [("accept", "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.3")];
    let open_metrics = client.request(http::Method::GET, "/metrics", &accept, "").await.unwrap();
    let open_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(open_metrics.header("content-type"), Some(open_type));
    let as_text = |response: weir_testkit::http::Response| String::from_utf8(response.body.to_vec()).unwrap();
    (as_text(text), as_text(open_metrics))
}

/// Runs `promtool` on `input`. Fails with its output.
fn promtool(arguments: &[&str], input: &str) -> Result<(), String> {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let promtool = weir_testkit::promtool().unwrap_or_else(|why| {
        panic!("cannot find promtool: {why}. Install Debian's package prometheus, or set WEIR_TEST_SKIP=prometheus")
    });
    let mut child = Command::new(promtool)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&printed).into_owned()) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_accepts_the_metrics_in_both_formats() {
    if weir_testkit::skip("prometheus") {
        return;
    }
    let (text, open_metrics) = metrics_in_both_formats().await;
    assert_eq!(promtool(&["check", "metrics"], &text), Ok(()));
    // promtool does not lint OpenMetrics, but its parser reads them to create blocks. That needs a timestamp on every sample.
    assert!(open_metrics.ends_with("\n# EOF\n"));
    let with_timestamps = open_metrics
        .lines()
        .map(|line| if line.starts_with('#') { format!("{line}\n") } else { format!("{line} 1700000000\n") });
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("metrics.om");
    std::fs::write(&file, with_timestamps.collect::<String>()).unwrap();
    let blocks = directory.path().join("blocks");
    let arguments =
        ["tsdb", "create-blocks-from", "openmetrics", file.to_str().unwrap(), blocks.to_str().unwrap()];
    assert_eq!(promtool(&arguments, ""), Ok(()));
}

#[tokio::test]
async fn the_openapi_document_is_served() {
    let server = Running::start(Store::Embedded).await;
    let served = server.client().get("/openapi.json").await.unwrap();
    assert_eq!(served.header("content-type"), Some("application/json"));
    assert_eq!(served.body, openapi_document().as_bytes());
}

#[tokio::test]
async fn pages_are_complete_and_load_nothing_from_other_origins() {
    let server = Running::start(Store::Embedded).await;
    for path in ["/", "/docs"] {
        let page = server.client().get(path).await.unwrap();
        assert_eq!(page.status, 200);
        assert!(page.header("content-type").unwrap().starts_with("text/html"));
        assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));
        let html = String::from_utf8(page.body.to_vec()).unwrap();
        assert!(html.contains("</html>") && !html.contains("src=\"http") && !html.contains("href=\"http"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_health_command_reports_whether_a_server_is_ready() {
    let health_with = |address: &str, more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_weir"));
        command.args(["health", "--listen", address]).args(more).output().unwrap()
    };
    let health = |address: String| health_with(&address, &[]);
    let running = Running::start(Store::Embedded).await;
    let address = running.weir.addr().to_string();
    let ready = health(address.clone());
    assert!(ready.status.success());
    assert!(String::from_utf8_lossy(&ready.stdout).contains(&address));
    assert!(health_with(&address, &["--capability", "sale"]).status.success());
    assert_eq!(health_with(&address, &["--capability", "coffee"]).status.code(), Some(2));
    drop(running);
    let stopped = health(address);
    assert_eq!(stopped.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&stopped.stderr).contains("cannot reach a server"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_reports_a_full_disk_until_it_accepts_writes_again() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    configure(&client, "u", 1_000, 60).await;
    let send = async || client.post("/api/send", &message("u", "x")).await.unwrap().status;
    let health = async || {
        let health = client.get("/health").await.unwrap();
        (health.status, health.json()["data"]["checks"]["sqlite"].clone())
    };
    assert_eq!((send().await, health().await.0), (200, 200));
    let pid = Pid::from_raw(i32::try_from(server.weir.pid()).unwrap());
    let limit = |current| prlimit(pid, Resource::Fsize, Rlimit { current, maximum: None }).unwrap();
    // Every write to the write-ahead log exceeds this limit.
    limit(Some(1));
    assert_eq!(send().await, 503);
    let (status, check) = health().await;
    assert_eq!((status, &check["status"]), (503, &json!("down")), "{check}");
    assert!(check["reason"].as_str().unwrap().contains("writes to the data directory fail"), "{check}");
    assert_eq!(client.get("/readyz/quota").await.unwrap().status, 503);
    limit(None);
    assert_eq!(send().await, 200);
    let (status, check) = health().await;
    assert_eq!((status, &check["status"], check.get("reason")), (200, &json!("up"), None), "{check}");
}
