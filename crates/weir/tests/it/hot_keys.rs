//! The denial cache: a user over the limit is refused from memory until any server sets new limits.

use std::time::{Duration, Instant};

use weir_testkit::http::Client;
use weir_testkit::postgres::Server;
use weir_testkit::proxy::Proxy;
use weir_testkit::{skip, wait};

use crate::fixtures::{Running, Store, TEST_TIMEOUT, configure, message, on_each_engine, weir};

/// How long new limits may take to apply on other servers.
const LIMITS_APPLY_WITHIN: Duration = Duration::from_secs(1);

async fn send(client: &Client, user: &str) -> u16 {
    client.post("/api/send", &message(user, "m")).await.expect("an answer").status
}

async fn refused_from_memory(client: &Client) -> u64 {
    let metrics = client.get("/metrics").await.unwrap();
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    let line = text.lines().find(|line| line.contains(r#"outcome="denied_from_memory""#));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

async fn send_to_limit(client: &Client, user: &str) {
    configure(client, user, 1, 60).await;
    assert_eq!([send(client, user).await, send(client, user).await], [200, 429]);
    wait::until("the user is refused from memory", TEST_TIMEOUT, async || {
        let before = refused_from_memory(client).await;
        assert_eq!(send(client, user).await, 429);
        refused_from_memory(client).await == before + 1
    })
    .await;
}

async fn a_user_over_the_limit_is_refused_from_memory_and_new_limits_end_that_at_once(store: Store) {
    let running = Running::start(store).await;
    let client = running.client();
    send_to_limit(&client, "u").await;
    let refused = client.post("/api/send", &message("u", "m")).await.unwrap();
    let wait_s: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((3_500..=3_600).contains(&wait_s), "{wait_s} s of the hour remain");
    configure(&client, "u", 2, 60).await;
    assert_eq!(
        [send(&client, "u").await, send(&client, "u").await, send(&client, "u").await],
        [200, 200, 429]
    );
    assert_eq!(client.delete("/api/config/u").await.unwrap().status, 204);
    assert_eq!(send(&client, "u").await, 404);
}

on_each_engine!(a_user_over_the_limit_is_refused_from_memory_and_new_limits_end_that_at_once);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_limits_from_another_server_hold_within_a_second() {
    if skip("postgres") {
        return;
    }
    let running = Running::start(Store::Postgres).await;
    let other = running.second().await;
    let (a, b) = (running.client(), Client::new(other.base_url()));
    send_to_limit(&a, "u").await;
    for _ in 0..5 {
        configure(&b, "u", 1, 60).await;
        let configured = Instant::now();
        wait::until("the new limits apply", TEST_TIMEOUT, async || send(&a, "u").await == 200).await;
        assert!(configured.elapsed() < LIMITS_APPLY_WITHIN, "the new limits took {:?}", configured.elapsed());
        assert_eq!(send(&a, "u").await, 429);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_misses_new_limits_refuses_nobody_from_memory() {
    if skip("postgres") {
        return;
    }
    let server = Server::shared();
    let database = server.database("partition").await;
    let proxy = Proxy::start(server.addr()).await;
    let partitioned = weir().env("WEIR_STORE", database.url_via(proxy.addr())).spawn().await;
    let connected = weir().env("WEIR_STORE", database.url()).spawn().await;
    let (a, b) = (Client::new(partitioned.base_url()), Client::new(connected.base_url()));
    send_to_limit(&a, "u").await;
    proxy.black_hole();
    configure(&b, "u", 1, 60).await;
    let configured = Instant::now();
    // Refused from memory for a moment, then 503: without its store it cannot know the new limits.
    wait::until("it no longer answers from memory", TEST_TIMEOUT, async || send(&a, "u").await == 503).await;
    assert!(
        configured.elapsed() < LIMITS_APPLY_WITHIN + Duration::from_secs(2),
        "it took {:?}",
        configured.elapsed()
    );
    proxy.pass();
    proxy.cut();
    wait::until("the new limits apply", TEST_TIMEOUT, async || send(&a, "u").await == 200).await;
}
