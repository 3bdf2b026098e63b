//! Throttles that all servers on one Redis share.

use std::time::{Duration, Instant};

use serde_json::json;
use weir_testkit::http::{Client, Response};
use weir_testkit::postgres;
use weir_testkit::redis::Cluster;
use weir_testkit::wait;

use super::fixtures::{UNTHROTTLED, attempt, buy, create_active, metric, wait_for_state};
use super::redis::{Fleet, skipped};
use crate::fixtures::{TEST_TIMEOUT, operator, weir_with_long_timeouts};

const SECOND: Duration = Duration::from_secs(1);
const OWN_CALLS: &str = "weir_redis_call_seconds_count{call=\"sale_attempt\"}";
const SALE_CALLS: &str = "weir_redis_sale_call_seconds_count{call=\"sale_buy\"}";

/// When a call was sent, and when its response had arrived: it was decided in between.
#[derive(Clone, Copy, Debug)]
struct Passed {
    sent: Instant,
    answered: Instant,
}

/// Calls the servers in turn until three calls have passed, and returns these.
async fn pass_three_times(servers: &[Client], call: impl AsyncFn(&Client) -> Response) -> Vec<Passed> {
    let mut passed = Vec::new();
    for server in servers.iter().cycle() {
        let sent = Instant::now();
        let response = call(server).await;
        if response.status == 429 {
            let error = response.json()["error"].clone();
            assert_eq!((&error["code"], &error["retryAfter"]), (&json!("RATE_LIMITED"), &json!(1)));
            assert_eq!(response.header("retry-after"), Some("1"));
        } else {
            passed.push(Passed { sent, answered: Instant::now() });
        }
        if passed.len() == 3 {
            break;
        }
    }
    passed
}

/// Fails if two calls have passed within a second.
fn expect_one_a_second(passed: &[Passed]) {
    for pair in passed.windows(2) {
        assert!(pair[1].answered - pair[0].sent >= SECOND, "two within a second: {passed:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_user_has_one_attempt_a_second_over_all_servers() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start_with(|proxy, _direct| proxy, &[]).await;
    create_active(&fleet.operator(), "W", 100).await;
    wait_for_state(&fleet.clients[1], "W", "ACTIVE").await;
    let passed = pass_three_times(&fleet.clients, async |client| {
        let response = attempt(client, "W", "a").await;
        assert_eq!(response.header("x-ratelimit-limit"), Some("1"), "also if Redis has refused it");
        let is_refused = response.status == 429;
        assert!(!is_refused || response.header("x-ratelimit-remaining") == Some("0"));
        response
    })
    .await;
    expect_one_a_second(&passed);
    fleet.expect_audit("W", 100, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purchase_takes_one_call_of_redis_and_no_further_one_to_be_counted() {
    if skipped() {
        return;
    }
    let limit = [("WEIR_EDGE_PER_IP_PER_SECOND", "1000"), ("WEIR_EDGE_PER_IP_BURST", "1000")];
    let fleet = Fleet::start_with(|proxy, _direct| proxy, &limit).await;
    create_active(&fleet.operator(), "W", 100).await;
    let client = &fleet.clients[0];
    let before = [metric(client, SALE_CALLS).await, metric(client, OWN_CALLS).await];
    assert!(before[1] > 0, "the other requests of the address were counted");
    for n in 0..20 {
        assert!(buy(client, "W", &format!("a-{n}")).await.is_ok());
    }
    let after = [metric(client, SALE_CALLS).await, metric(client, OWN_CALLS).await];
    assert_eq!(after, [before[0] + 20, before[1]], "calls of sale_buy, and of sale_attempt");
    fleet.expect_audit("W", 100, 20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_an_attempt_is_counted_by_one_call_if_the_own_memory_lets_it_pass() {
    if skipped() {
        return;
    }
    let cluster = tokio::task::spawn_blocking(Cluster::private).await.expect("the cluster forms");
    let database = postgres::Server::shared().database("sale").await;
    let start = || {
        let builder = weir_with_long_timeouts().env("WEIR_STORE", database.url());
        builder.env("WEIR_CACHE", cluster.url()).spawn()
    };
    let weirs = [start().await, start().await];
    let clients = weirs.each_ref().map(|weir| Client::new(weir.base_url()));
    create_active(&operator(&weirs[0]), "W", 100).await;
    wait_for_state(&clients[1], "W", "ACTIVE").await;
    let since = Instant::now();
    let passed = pass_three_times(&clients, async |client| attempt(client, "W", "a").await).await;
    expect_one_a_second(&passed);
    let (mut counted, mut decided) = (0, 0);
    for client in &clients {
        counted += metric(client, OWN_CALLS).await;
        decided += metric(client, SALE_CALLS).await;
    }
    assert_eq!(decided, passed.len() as u64, "what is refused is not decided");
    // The own memory of each server lets one attempt a second pass.
    let most = 2 * (since.elapsed().as_secs() + 1);
    assert!((decided..=most).contains(&counted), "{counted} attempts were counted");
}

/// Requests of one address, of which one a second passes.
const ONE_A_SECOND: [(&str, &str); 3] =
    [("WEIR_EDGE_PER_IP_PER_SECOND", "1"), ("WEIR_EDGE_PER_IP_BURST", "0"), UNTHROTTLED];

async fn status_of(client: &Client) -> Response {
    client.get("/api/v1/sales").await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_address_has_its_requests_over_all_servers_and_on_each_while_redis_is_away() {
    if skipped() {
        return;
    }
    let fleet = Fleet::start_with(|proxy, _direct| proxy, &ONE_A_SECOND).await;
    let passed = pass_three_times(&fleet.clients, status_of).await;
    expect_one_a_second(&passed);
    fleet.to_redis.refuse();
    fleet.to_redis.cut();
    // Only the own memory of each decides: both let one pass within a second.
    wait::until("each server counts for itself", TEST_TIMEOUT * 2, async || {
        for server in fleet.clients.chunks(1) {
            expect_one_a_second(&pass_three_times(server, status_of).await);
        }
        let passed = pass_three_times(&fleet.clients, status_of).await;
        passed[2].answered - passed[0].sent < SECOND * 2
    })
    .await;
}
