//! Readiness by capability, under the outage it is about: a capability that `/readyz` calls ready is served, one that it does
//! not call ready is not.

use http::Method;
use jiff::{SignedDuration, Timestamp};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::postgres;
use weir_testkit::process::Weir;
use weir_testkit::redis::{self, Options};
use weir_testkit::{skip, wait};

use crate::fixtures::{Running, Store, TEST_TIMEOUT, configure, message, operator, weir};

const CAPABILITIES: [&str; 5] = ["quota", "slot", "request", "tier", "sale"];

/// What `/readyz` says: its status code, its word, and the capabilities that are not ready.
async fn readiness(client: &Client) -> (u16, String, Vec<&'static str>) {
    let response = client.get("/readyz").await.expect("an answer");
    let body = response.json();
    let is_ready = |name: &str| body["capabilities"][name]["ready"].as_bool();
    let unready = CAPABILITIES.into_iter().filter(|name| is_ready(name) == Some(false)).collect();
    (response.status, body["status"].as_str().expect("a status").to_owned(), unready)
}

/// Waits until exactly these capabilities are not ready, and compares `/readyz/{capability}` with that.
async fn expect_unready(client: &Client, expected: &[&str]) {
    wait::until("readiness follows the engines", TEST_TIMEOUT, async || {
        readiness(client).await.2 == expected
    })
    .await;
    let word = if expected.is_empty() { "ready" } else { "degraded" };
    assert_eq!(readiness(client).await, (200, word.to_owned(), expected.to_vec()));
    for name in CAPABILITIES {
        let response = client.get(&format!("/readyz/{name}")).await.unwrap();
        let is_unready = expected.contains(&name);
        assert_eq!(response.status, if is_unready { 503 } else { 200 }, "{name}: {:?}", response.body);
        assert_eq!(response.json()["ready"], json!(!is_unready));
        assert_eq!(response.json()["reason"].is_string(), is_unready, "{name}: {:?}", response.body);
    }
    let health = client.get("/health").await.unwrap();
    let is_healthy = health.status == 200;
    assert_eq!((&health.json()["success"], is_healthy), (&json!(is_healthy), expected.is_empty()));
}

/// A sale that is on.
async fn open_sale(weir: &Weir) {
    let start = Timestamp::now() + SignedDuration::from_millis(500);
    let product = json!({
        "sku": "READY", "productName": "Readiness", "initialStock": 1_000,
        "startTime": start.to_string(), "endTime": (start + SignedDuration::from_hours(1)).to_string(),
    });
    let operator = operator(weir);
    assert_eq!(operator.post("/api/v1/products", &product).await.unwrap().status, 201);
    wait::until("the sale is on", TEST_TIMEOUT, async || {
        operator.get("/api/v1/sales").await.unwrap().json()["data"]["state"] == "ACTIVE"
    })
    .await;
}

async fn buy(client: &Client, buyer: &str) -> (u16, Value) {
    let headers = [("x-user-id", buyer), ("content-type", "application/json")];
    let body = r#"{"sku":"READY","qty":1}"#;
    let response = client.request(Method::POST, "/api/v1/purchases", &headers, body).await.unwrap();
    (response.status, response.json())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_postgres_down_sales_and_tiers_are_ready_and_served_with_redis_down_all_but_sales() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let mut postgres = postgres::Server::private();
    let database = postgres.database("readiness").await;
    let mut redis = redis::Server::private(&Options { appendonly: true, ..Options::default() });
    let weir = weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url()).spawn().await;
    let client = Client::new(weir.base_url());
    configure(&client, "u", 1_000, 60).await;
    open_sale(&weir).await;
    expect_unready(&client, &[]).await;

    postgres.stop().await;
    expect_unready(&client, &["quota", "slot", "request"]).await;
    let (status, purchase) = buy(&client, "first").await;
    assert_eq!((status, &purchase["success"]), (200, &json!(true)), "sales are served: {purchase}");
    let config = json!({"userId": "v", "rateLimit": 1, "timeWindow": 1});
    assert_eq!(client.post("/api/config", &config).await.unwrap().status, 503, "quota is not");
    postgres.start().await;
    expect_unready(&client, &[]).await;

    redis.stop().await;
    expect_unready(&client, &["sale"]).await;
    assert_eq!(buy(&client, "second").await.0, 503, "sales are not served");
    assert_eq!(client.post("/api/send", &message("u", "m")).await.unwrap().status, 200, "quota is");
    redis.start().await;
    expect_unready(&client, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_leaves_only_what_is_decided_in_memory_ready() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    configure(&client, "u", 1_000, 60).await;
    expect_unready(&client, &[]).await;
    let pid = Pid::from_raw(i32::try_from(server.weir.pid()).unwrap());
    let limit = |current| prlimit(pid, Resource::Fsize, Rlimit { current, maximum: None }).unwrap();
    limit(Some(1));
    assert_eq!(client.post("/api/send", &message("u", "m")).await.unwrap().status, 503);
    expect_unready(&client, &["quota", "slot", "request", "sale"]).await;
    limit(None);
    assert_eq!(client.post("/api/send", &message("u", "m")).await.unwrap().status, 200);
    expect_unready(&client, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_can_serve_nothing_of_its_roles_is_unavailable() {
    if skip("postgres") {
        return;
    }
    let mut postgres = postgres::Server::private();
    let database = postgres.database("worker").await;
    let builder = weir().env("WEIR_STORE", database.url()).env("WEIR_ROLES", "worker");
    let weir = builder.spawn().await;
    let client = Client::new(weir.base_url());
    assert_eq!(readiness(&client).await, (200, "ready".to_owned(), vec![]));
    assert_eq!(client.get("/readyz/request").await.unwrap().status, 200);
    assert_eq!(client.get("/readyz/quota").await.unwrap().status, 404, "a worker has nothing to do with it");
    assert_eq!(client.get("/readyz/coffee").await.unwrap().status, 404);
    postgres.stop().await;
    wait::until("the worker is unavailable", TEST_TIMEOUT, async || {
        readiness(&client).await == (503, "unavailable".to_owned(), vec!["request"])
    })
    .await;
    postgres.start().await;
    wait::until("the worker is ready again", TEST_TIMEOUT, async || readiness(&client).await.0 == 200).await;
}
