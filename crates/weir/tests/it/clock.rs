//! Clocks that step: no caller is denied for longer than its own window, none gets more than one extra window, and operators
//! are notified.

use std::time::Duration;

use serde_json::json;
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::clock::FakeClock;
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::{Builder, Weir};
use weir_testkit::redis::{self, Options};
use weir_testkit::{skip, wait};

use crate::fixtures::{FAR_FUTURE, TEST_TIMEOUT, configure, message, operator, weir};

const HOURS: i64 = 7_200;
/// Slightly longer than the window of the quotas here.
const WINDOW: Duration = Duration::from_secs(61);

/// Starts a server with its own clock.
async fn embedded(clock: &FakeClock) -> Weir {
    with_clock(weir(), clock).spawn().await
}

fn with_clock(mut builder: Builder, clock: &FakeClock) -> Builder {
    for (name, value) in clock.environment() {
        builder = builder.env(name, value);
    }
    builder
}

/// Sends `count` messages and returns a letter for each: `A` if it was allowed, `D` if it was denied.
async fn send(client: &Client, user: &str, count: usize) -> String {
    let mut letters = String::new();
    for _ in 0..count {
        let response = client.post("/api/send", &message(user, "hi")).await.unwrap();
        letters.push(match response.status {
            200 => 'A',
            429 => {
                let wait: u64 = response.header("retry-after").unwrap().parse().unwrap();
                assert!(wait <= 60, "{user} has to wait for {wait} s, and a window is a minute");
                'D'
            }
            other => panic!("{other}"),
        });
    }
    letters
}

/// Waits until the server's time differs from the true time by about `seconds`.
async fn wait_until_followed(client: &Client, seconds: i64) {
    wait::until("the server follows the clock", TEST_TIMEOUT, async || {
        let body = json!({"userId": "clock", "rateLimit": 1, "timeWindow": 1});
        let saved = client.post("/api/config", &body).await.unwrap().json();
        let shown: jiff::Timestamp = saved["lastRefreshTime"].as_str().unwrap().parse().unwrap();
        (shown.as_second() - jiff::Timestamp::now().as_second() - seconds).abs() < 60
    })
    .await;
}

/// Waits until `/health`, the metrics and the log report a step.
async fn wait_until_reported(weir: &Weir, clock: &str, is_back: bool) {
    let operator = operator(weir);
    wait::until("health reports the step", TEST_TIMEOUT, async || {
        let health = operator.get("/health").await.unwrap();
        assert_eq!(health.status, 200, "the server can do its work");
        let clock = &health.json()["data"]["clocks"][clock];
        clock["status"] == "stepped" && (clock["stepSeconds"].as_f64().unwrap() < 0.0) == is_back
    })
    .await;
    let metrics = String::from_utf8(operator.get("/metrics").await.unwrap().body.to_vec()).unwrap();
    assert!(metrics.contains(&format!("weir_clock_steps_total{{clock=\"{clock}\"}}")), "{metrics}");
    weir.wait_for_log(|line| line.contains(&format!("the clock of {clock} has stepped")), TEST_TIMEOUT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_system_clock_that_jumps_and_returns_changes_nothing_but_is_reported() {
    let clock = FakeClock::new();
    let weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 2, 1).await;
    assert_eq!(send(&client, "alice", 3).await, "AAD");
    clock.set(HOURS);
    wait_until_reported(&weir, "system", false).await;
    assert_eq!(send(&client, "alice", 2).await, "DD", "no window ends for a clock that may return");
    configure(&client, "bob", 1, 1).await;
    assert_eq!(send(&client, "bob", 2).await, "AD");
    clock.set(0);
    wait_until_reported(&weir, "system", true).await;
    assert_eq!(send(&client, "alice", 1).await + &send(&client, "bob", 1).await, "DD");
    // A minute passes on every clock of the machine.
    clock.suspend(WINDOW);
    assert_eq!(send(&client, "alice", 3).await, "AAD");
    assert_eq!(send(&client, "bob", 2).await, "AD");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_system_clock_that_is_set_ahead_and_back_denies_nobody_for_longer_not_even_after_a_crash() {
    let clock = FakeClock::new();
    let mut weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 2, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AA");
    clock.set(HOURS);
    wait_until_followed(&client, HOURS).await;
    assert_eq!(send(&client, "alice", 1).await, "A", "the window has passed by the new clock");
    clock.set(0);
    wait_until_followed(&client, 0).await;
    assert_eq!(send(&client, "alice", 2).await, "AD", "one extra window and no more");
    weir.kill_9();
    weir.restart().await;
    let client = Client::new(weir.base_url());
    assert_eq!(send(&client, "alice", 1).await, "D");
    clock.suspend(WINDOW);
    assert_eq!(send(&client, "alice", 3).await, "AAD");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_starts_with_a_clock_behind_its_rows_denies_nobody_for_longer() {
    let clock = FakeClock::new();
    clock.set(HOURS);
    let mut weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 1, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AD");
    let bucket = json!({"kind": "token_bucket", "capacity": 1, "refill": 1, "period": "PT1M"});
    assert_eq!(operator(&weir).put("/admin/policies/p", &bucket).await.unwrap().status, 200);
    let check = json!({"checks": [{"policy": "p", "key": "k"}]});
    let allowed = operator(&weir).post("/v1/check", &check).await.unwrap().json();
    assert_eq!(allowed["allowed"], true);
    weir.terminate();
    assert!(weir.wait(TEST_TIMEOUT).await.success());
    clock.set(0);
    weir.restart().await;
    let client = Client::new(weir.base_url());
    assert_eq!(send(&client, "alice", 1).await, "D", "what was spent stays spent");
    let denied = operator(&weir).post("/v1/check", &check).await.unwrap().json();
    assert!(denied["checks"][0]["retryAfterMs"].as_u64().unwrap() <= 60_000, "{denied}");
    clock.suspend(WINDOW);
    assert_eq!(send(&client, "alice", 1).await, "A");
    assert_eq!(operator(&weir).post("/v1/check", &check).await.unwrap().json()["allowed"], true);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_set_back_for_good_denies_nobody_for_longer_and_stops_no_work() {
    let clock = FakeClock::new();
    let weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 1, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AD");
    clock.set(-HOURS);
    wait_until_reported(&weir, "system", true).await;
    wait_until_followed(&client, -HOURS).await;
    assert_eq!(send(&client, "alice", 1).await, "D");
    complete_a_request(&weir).await;
    clock.suspend(WINDOW);
    // The first send after the step moves the window back with the clock.
    let _ = send(&client, "alice", 1).await;
    clock.suspend(WINDOW);
    assert_eq!(send(&client, "alice", 1).await, "A");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_pass_while_the_machine_sleeps() {
    let clock = FakeClock::new();
    let weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 1, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AD");
    clock.suspend(Duration::from_secs(7_200));
    assert_eq!(send(&client, "alice", 2).await, "AD", "the window has passed");
    wait_until_followed(&client, HOURS).await;
    let health = client.get("/health").await.unwrap().json();
    assert_eq!(health["data"]["clocks"]["system"]["status"], "steady", "{health}");
}

/// Submits a request and waits until it is completed.
async fn complete_a_request(weir: &Weir) {
    let id = submit(weir).await;
    wait_until_completed(weir, &id).await;
}

fn tenant(weir: &Weir) -> Client {
    let secret = std::fs::read_to_string(weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims {
        sub: "a@b.c".into(),
        exp: FAR_FUTURE,
        tenant_id: Some("acme".into()),
        scope: Some("requests:create requests:read".into()),
    };
    let token = jwt::sign(&secret, &claims).unwrap();
    Client::new(weir.base_url()).with_header("authorization", &format!("Bearer {token}"))
}

async fn submit(weir: &Weir) -> String {
    let key = format!("{:016x}", fastrand::u64(..));
    let body = json!({"idempotencyKey": key, "requestType": "t", "payload": 1});
    let response = tenant(weir).post("/v1/requests", &body).await.unwrap();
    assert_eq!(response.status, 202, "{:?}", response.json());
    response.json()["requestId"].as_str().unwrap().to_owned()
}

async fn wait_until_completed(weir: &Weir, id: &str) {
    let client = tenant(weir);
    wait::until("the request is completed", TEST_TIMEOUT, async || {
        client.get(&format!("/v1/requests/{id}")).await.unwrap().json()["status"] == "COMPLETED"
    })
    .await;
}

/// Starts a server on a Postgres with its own clock.
async fn on_postgres(clock: &FakeClock) -> (postgres::Server, Database, Weir) {
    let postgres = postgres::Server::private_with_clock(clock);
    let database = postgres.database("clock").await;
    let weir = weir().env("WEIR_STORE", database.url()).spawn().await;
    (postgres, database, weir)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_postgres_that_goes_ahead_and_back_denies_nobody_for_longer_and_stops_no_work() {
    if skip("postgres") {
        return;
    }
    let clock = FakeClock::new();
    let (_postgres, _database, weir) = on_postgres(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 2, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AA");
    clock.set(HOURS);
    assert_eq!(send(&client, "alice", 1).await, "A", "the window has passed by the clock that decides");
    let id = submit(&weir).await;
    clock.set(0);
    assert_eq!(send(&client, "alice", 2).await, "AD", "one extra window and no more");
    wait_until_reported(&weir, "postgresql", true).await;
    wait_until_completed(&weir, &id).await;
    complete_a_request(&weir).await;
    clock.set(61);
    // A cached denial ends with the window by the server's own clock, which did not step.
    configure(&client, "bob", 1, 1).await;
    assert_eq!(send(&client, "bob", 2).await, "AD");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_redis_that_goes_ahead_and_back_denies_nobody_for_longer() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let clock = FakeClock::new();
    let environment = clock.environment().map(|(name, value)| (name.into(), value.into())).to_vec();
    let redis = redis::Server::private(&Options { appendonly: false, environment, ..Options::default() });
    let database = postgres::Server::shared().database("clock").await;
    let weir = weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url()).spawn().await;
    let operator = operator(&weir);
    wait::until("the server has read the clock of Redis", TEST_TIMEOUT, async || {
        operator.get("/health").await.unwrap().json()["data"]["clocks"]["redis"]["status"] == "steady"
    })
    .await;
    let policies = [
        ("bucket", json!({"kind": "token_bucket", "capacity": 1, "refill": 1, "period": "PT1M"})),
        ("fixed", json!({"kind": "fixed_window", "limit": 1, "window": "PT1M"})),
        ("sliding", json!({"kind": "sliding_window", "limit": 1, "window": "PT1M"})),
    ];
    for (name, policy) in &policies {
        assert_eq!(operator.put(&format!("/admin/policies/{name}"), policy).await.unwrap().status, 200);
    }
    let check = async |name: &str| {
        let body = json!({"checks": [{"policy": name, "key": "k"}]});
        let outcome = operator.post("/v1/check", &body).await.unwrap().json();
        (outcome["allowed"].as_bool().unwrap(), outcome["checks"][0]["retryAfterMs"].as_u64())
    };
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 3, 1).await;
    clock.set(HOURS);
    for (name, _) in &policies {
        assert!(check(name).await.0, "{name}");
    }
    assert_eq!(send(&client, "alice", 1).await, "A");
    wait_until_reported(&weir, "redis", false).await;
    clock.set(0);
    for (name, _) in &policies {
        let (is_allowed, retry_after) = check(name).await;
        assert!(!is_allowed, "{name}: what was spent stays spent");
        // A sliding window counts for twice its length.
        assert!(retry_after.unwrap() <= 120_000, "{name}: {retry_after:?} ms");
    }
    let counted = "Postgres still has the count, and one unit that Redis held ahead";
    assert_eq!(send(&client, "alice", 2).await, "AD", "{counted}");
    wait_until_reported(&weir, "redis", true).await;
    clock.set(121);
    for (name, _) in &policies {
        assert!(check(name).await.0, "{name} allows again");
    }
}
