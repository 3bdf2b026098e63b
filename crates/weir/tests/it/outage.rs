//! Outages of Postgres: while it is down, slow or unreachable callers get 503 in time, and afterwards the server recovers.

use std::time::{Duration, Instant};

use serde_json::json;
use weir_testkit::http::{Client, Response};
use weir_testkit::postgres::Server;
use weir_testkit::process::{Builder, Weir};
use weir_testkit::proxy::Proxy;
use weir_testkit::wait;

use crate::fixtures::{TEST_TIMEOUT, configure, message, weir};

/// The API's timeout of 2 s, with a margin for a busy machine.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// A server with short leases of messages: if the response to a claim is lost with its connection, the messages can be
/// claimed again only when the lease has expired, which must be well within the tests' timeouts.
fn weir_on(store: &str) -> Builder {
    weir().env("WEIR_STORE", store).env("WEIR_SENDER_VISIBILITY", "2s")
}

async fn send(client: &Client) -> (Response, Duration) {
    let started = Instant::now();
    let response = client.post("/api/send", &message("u", "m")).await.expect("an answer");
    (response, started.elapsed())
}

/// Waits for the first 503, since Postgres may still finish running commands, and checks that every response is in time.
async fn expect_503(client: &Client) {
    wait::until("the outage is answered with 503", TEST_TIMEOUT, async || {
        let (response, took) = send(client).await;
        assert!(took < ANSWER_WITHIN, "an answer took {took:?}");
        assert!(matches!(response.status, 200 | 503), "{:?}", response.body);
        if response.status == 503 {
            assert_eq!(response.json()["code"], json!("DEPENDENCY_UNAVAILABLE"));
            assert!(response.header("retry-after").is_some_and(|after| after.parse::<u64>().unwrap() >= 1));
        }
        response.status == 503
    })
    .await;
    let config =
        client.post("/api/config", &json!({"userId": "v", "rateLimit": 1, "timeWindow": 1})).await.unwrap();
    assert_eq!(config.status, 503);
    assert_eq!(client.get("/livez").await.unwrap().status, 200, "the process is alive");
    wait::until("health reports the outage", TEST_TIMEOUT, async || {
        let health = client.get("/health").await.unwrap();
        health.status == 503 && health.json()["data"]["checks"]["postgresql"]["status"] == "down"
    })
    .await;
    assert_eq!(client.get("/readyz/quota").await.unwrap().status, 503);
}

async fn expect_recovery(client: &Client, weir: &Weir) {
    wait::until("service is back without a restart", TEST_TIMEOUT, async || {
        send(client).await.0.status == 200
    })
    .await;
    wait::until("health is back", TEST_TIMEOUT, async || client.get("/health").await.unwrap().status == 200)
        .await;
    let books = crate::fixtures::wait_until_delivered(&crate::fixtures::operator(weir)).await;
    assert_eq!(books["ok"], true, "{books}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_outage_is_503_and_ends_without_a_restart() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let mut server = Server::private();
    let database = server.database("outage").await;
    let weir = weir_on(database.url()).spawn().await;
    let client = Client::new(weir.base_url());
    configure(&client, "u", 1_000_000, 60).await;
    server.stop().await;
    expect_503(&client).await;
    for key in ["", "k"] {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        let headers = if key.is_empty() { &headers[..1] } else { &headers[..] };
        let body = message("u", "refused").to_string();
        let refused = client.request(http::Method::POST, "/api/send", headers, body).await.unwrap();
        let text = refused.json()["message"].as_str().unwrap().to_owned();
        assert!(refused.status == 503 && text.contains("nothing was sent"), "{text}");
    }
    server.start().await;
    expect_recovery(&client, &weir).await;

    server.crash();
    expect_503(&client).await;
    server.start().await;
    expect_recovery(&client, &weir).await;

    server.pause();
    expect_503(&client).await;
    server.resume();
    expect_recovery(&client, &weir).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_network_to_postgres_is_503_and_heals() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Server::shared();
    let database = server.database("network").await;
    let proxy = Proxy::start(server.addr()).await;
    let weir = weir_on(&database.url_via(proxy.addr())).spawn().await;
    let client = Client::new(weir.base_url());
    configure(&client, "u", 1_000_000, 60).await;

    proxy.black_hole();
    expect_503(&client).await;
    proxy.pass();
    expect_recovery(&client, &weir).await;

    proxy.refuse();
    proxy.cut();
    expect_503(&client).await;
    proxy.pass();
    expect_recovery(&client, &weir).await;

    proxy.delay(Duration::from_millis(20));
    for _ in 0..20 {
        let (response, took) = send(&client).await;
        assert_eq!(response.status, 200);
        assert!(took < ANSWER_WITHIN);
    }
    for _ in 0..5 {
        proxy.cut();
        expect_recovery(&client, &weir).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_waits_for_a_postgres_that_is_still_starting() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let mut server = Server::private();
    let database = server.database("late").await;
    server.stop().await;
    let (weir, ()) = tokio::join!(weir_on(database.url()).spawn(), server.start());
    assert_eq!(Client::new(weir.base_url()).get("/readyz").await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_start_at_once_on_an_empty_database_agree_on_its_schema() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("fresh").await;
    let start = || weir_on(database.url()).spawn();
    let (a, b, c) = tokio::join!(start(), start(), start());
    for weir in [&a, &b, &c] {
        configure(&Client::new(weir.base_url()), "u", 5, 5).await;
    }
    let state = database.query_strings("SELECT version, created_version FROM weir_schema_state").await;
    let steps = concat!(env!("CARGO_MANIFEST_DIR"), "/../store-postgres/migrations");
    let steps = Some(std::fs::read_dir(steps).unwrap().count().to_string());
    assert_eq!(state, [[steps.clone(), steps]]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_server_loses_its_locks_and_other_servers_continue() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let database = Server::shared().database("paused").await;
    let start = || weir_on(database.url()).spawn();
    let (first, second) = tokio::join!(start(), start());
    let (a, b) = (Client::new(first.base_url()), Client::new(second.base_url()));
    configure(&a, "u", 1_000_000, 60).await;
    // Whatever the first server is doing when it is paused, also with row locks, the second is not blocked.
    let busy: Vec<_> = (0..64)
        .map(|_| {
            tokio::spawn({
                let a = a.clone();
                async move { a.post("/api/send", &message("u", "m")).await }
            })
        })
        .collect();
    first.pause();
    wait::until("the other server serves the same user", TEST_TIMEOUT, async || {
        send(&b).await.0.status == 200
    })
    .await;
    first.resume();
    for call in busy {
        let _ = call.await;
    }
    expect_recovery(&b, &second).await;
}
