//! The stack of `compose.yaml`, started without Docker: nginx in front of the gateway, Kafka to the sender, all scraped by
//! Prometheus, and nothing left after it was stopped.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::stack::Stack;
use weir_testkit::{skip, wait};

use crate::dashboards::{all_queries, metric_names};
use crate::fixtures::{TEST_TIMEOUT, configure, message};

/// Calls Prometheus.
async fn prometheus(client: &Client, path: &str) -> Value {
    let response = client.get(path).await.expect("an answer");
    let body = response.json();
    assert_eq!((response.status, &body["status"]), (200, &json!("success")), "{path}: {body}");
    body["data"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stack_of_the_compose_file_starts_sends_is_scraped_and_stops() {
    if ["postgres", "redis", "kafka", "nginx", "prometheus"].into_iter().any(skip) {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let stack = Stack::start(&root, env!("CARGO_BIN_EXE_weir").as_ref(), |line| eprintln!("{line}")).await;
    let stack = stack.unwrap_or_else(|reason| panic!("{reason}"));
    let mut running = stack.running();
    running.sort_unstable();
    let without_containers =
        ["gateway", "kafka", "nginx", "postgres", "prometheus", "redis", "sender", "worker"];
    assert_eq!(running, without_containers);

    let entrance = format!("http://{}", stack.address("nginx", 8000));
    let anybody = Client::new(&entrance).unchecked();
    assert_eq!(anybody.get("/readyz").await.unwrap().status, 200);
    assert_eq!(anybody.post("/api/send", &message("alice", "hello")).await.unwrap().status, 401);
    for path in ["/admin/audit", "/metrics"] {
        assert_eq!(anybody.get(path).await.unwrap().status, 404, "{path} is not for callers");
    }
    let key = stack.compose().services["gateway"].environment()["WEIR_ADMIN_KEY"].clone();
    let operator = Client::new(&entrance).with_header("x-admin-key", &key);
    configure(&operator, "alice", 2, 60).await;
    for expected in [200, 200, 429] {
        let sent = operator.post("/api/send", &message("alice", "hello")).await.unwrap();
        assert_eq!(sent.status, expected, "{:?}", sent.body);
    }
    wait::until("both messages are delivered", TEST_TIMEOUT, async || {
        stack.log("sender").lines().filter(|line| line.contains("SMS SENT")).count() == 2
    })
    .await;

    let metrics = Client::new(format!("http://{}", stack.address("prometheus", 9090))).unchecked();
    wait::until("every target is scraped", TEST_TIMEOUT, async || {
        let targets = prometheus(&metrics, "/api/v1/targets").await;
        let targets = targets["activeTargets"].as_array().unwrap().clone();
        targets.len() == 3 && targets.iter().all(|target| target["health"] == "up")
    })
    .await;
    let rules = prometheus(&metrics, "/api/v1/rules").await;
    assert!(rules["groups"].as_array().unwrap().len() > 3, "the alerts are loaded: {rules}");
    let names = prometheus(&metrics, "/api/v1/label/__name__/values").await;
    let names: Vec<&str> = names.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for (dashboard, query) in all_queries() {
        let encoded: String = url::form_urlencoded::byte_serialize(query.as_bytes()).collect();
        prometheus(&metrics, &format!("/api/v1/query?query={encoded}")).await;
        // Other dashboards also have what this stack does not run, such as the embedded engine.
        let metric = metric_names(&query).into_iter().next().filter(|_| dashboard == "overview");
        if let Some(metric) = metric {
            let is_exported = names.iter().any(|name| name.starts_with(&metric));
            assert!(is_exported || metric.ends_with("_total"), "no process exports {metric}");
        }
    }

    assert!(stack.processes().len() >= running.len(), "{:?}", stack.processes());
    let left = stack.stop().await;
    assert!(left.is_empty(), "processes are left: {left:?}");
    let refused =
        tokio::time::timeout(Duration::from_secs(5), tokio::net::TcpStream::connect(&entrance[7..]));
    assert!(refused.await.unwrap().is_err(), "nobody listens any more");
}
