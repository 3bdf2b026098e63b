//! Gauges of the work in the store: they are true, and absent while the store does not answer.

use serde_json::json;
use weir_testkit::postgres::Server;
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::wait;

use crate::fixtures::{Running, Store, TEST_TIMEOUT, on_each_engine, operator, weir};
use crate::trace::traced;

async fn metrics(weir: &Weir) -> String {
    let answer = operator(weir).get("/metrics").await.unwrap();
    assert_eq!(answer.status, 200);
    String::from_utf8(answer.body.to_vec()).unwrap()
}

async fn submit(weir: &Weir, key: &str) {
    let submission = json!({"idempotencyKey": key, "requestType": "pay", "payload": 1});
    let answer = traced(weir).post("/v1/requests", &submission).await.unwrap();
    assert_eq!(answer.status, 202, "{:?}", answer.body);
}

/// Waits until `/metrics` has these lines. Values may be five seconds old.
async fn wait_for(weir: &Weir, lines: &[&str]) {
    wait::until(&format!("/metrics shows {lines:?}"), TEST_TIMEOUT, async || {
        let shown = metrics(weir).await;
        lines.iter().all(|line| shown.lines().any(|shown| shown == *line))
    })
    .await;
}

async fn waiting_requests_are_counted(store: Store) {
    let running = Running::start_with(store, &[("WEIR_ROLES", "api")]).await;
    for key in ["a", "b", "c"] {
        submit(&running.weir, key).await;
    }
    let lines = [
        "weir_request_jobs{downstream=\"default\",state=\"waiting\"} 3",
        "weir_request_jobs{downstream=\"default\",state=\"running\"} 0",
        "weir_request_jobs{downstream=\"default\",state=\"parked\"} 0",
        "weir_dlq_depth 0",
        "weir_dead_letters{topic=\"request-webhooks\"} 0",
        "weir_dead_letters{topic=\"sms-outbound\"} 0",
        "weir_dead_letters{topic=\"sale-purchases\"} 0",
    ];
    wait_for(&running.weir, &lines).await;
}

async fn dead_requests_are_counted(store: Store) {
    // Port 1 on loopback refuses.
    let settings = [("WEIR_DOWNSTREAM", "http://127.0.0.1:1"), ("WEIR_REQUEST_MAX_ATTEMPTS", "1")];
    let running = Running::start_with(store, &settings).await;
    for key in ["a", "b", "c"] {
        submit(&running.weir, key).await;
    }
    let lines = [
        "weir_request_jobs{downstream=\"default\",state=\"waiting\"} 0",
        "weir_request_oldest_waiting_seconds{downstream=\"default\"} 0",
        "weir_dlq_depth 3",
        "weir_request_finished_total{status=\"FAILED_RETRY_EXHAUSTED\"} 3",
    ];
    wait_for(&running.weir, &lines).await;
}

on_each_engine!(waiting_requests_are_counted, dead_requests_are_counted);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_does_not_answer_leaves_no_old_values() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Server::shared();
    let database = server.database("backlog").await;
    let proxy = Proxy::start(server.addr()).await;
    let weir =
        weir().env("WEIR_STORE", database.url_via(proxy.addr())).env("WEIR_ROLES", "api").spawn().await;
    submit(&weir, "a").await;
    let known = ["weir_dlq_depth 0", "weir_request_jobs{downstream=\"default\",state=\"waiting\"} 1"];
    wait_for(&weir, &known).await;
    // It accepts nothing, and then it accepts and does not answer.
    for fault in [Proxy::refuse, Proxy::black_hole] {
        fault(&proxy);
        proxy.cut();
        wait::until("the values are gone", TEST_TIMEOUT, async || {
            let shown = metrics(&weir).await;
            let gauges =
                ["weir_dlq_depth", "weir_request_jobs", "weir_request_oldest_waiting", "weir_dead_letters"];
            shown.contains("weir_engine_up{engine=\"postgresql\"} 0")
                && shown.lines().all(|line| gauges.iter().all(|gauge| !line.starts_with(gauge)))
        })
        .await;
        proxy.pass();
        wait_for(&weir, &known).await;
    }
}
