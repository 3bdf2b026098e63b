//! Clocks that step: nobody is kept out for longer than their own window, nobody is given more than one window more, and
//! operators are told.

use std::time::Duration;

use serde_json::json;
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::clock::FakeClock;
use weir_testkit::http::Client;
use weir_testkit::postgres::{self, Database};
use weir_testkit::process::{Builder, Weir};
use weir_testkit::redis::{self, Options};
use weir_testkit::{skip, wait};

use crate::fixtures::{PATIENCE, configure, message, operator, weir};

const HOURS: i64 = 7_200;
/// A window of the quotas here, and a little more.
const WINDOW: Duration = Duration::from_secs(61);

/// A server that goes by a clock of its own.
async fn embedded(clock: &FakeClock) -> Weir {
    by(weir(), clock).spawn().await
}

fn by(mut builder: Builder, clock: &FakeClock) -> Builder {
    for (name, value) in clock.environment() {
        builder = builder.env(name, value);
    }
    builder
}

/// Sends so many messages, and says which were allowed.
async fn send(client: &Client, user: &str, count: usize) -> String {
    let mut letters = String::new();
    for _ in 0..count {
        let answer = client.post("/api/send", &message(user, "hi")).await.unwrap();
        letters.push(match answer.status {
            200 => 'A',
            429 => {
                let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
                assert!(wait <= 60, "{user} has to wait for {wait} s, and a window is a minute");
                'D'
            }
            other => panic!("{other}"),
        });
    }
    letters
}

/// Waits until the server's own time is about so many seconds from the true one.
async fn until_followed(client: &Client, seconds: i64) {
    wait::until("the server follows the clock", PATIENCE, async || {
        let body = json!({"userId": "clock", "rateLimit": 1, "timeWindow": 1});
        let saved = client.post("/api/config", &body).await.unwrap().json();
        let shown: jiff::Timestamp = saved["lastRefreshTime"].as_str().unwrap().parse().unwrap();
        (shown.as_second() - jiff::Timestamp::now().as_second() - seconds).abs() < 60
    })
    .await;
}

/// Waits until `/health`, the metrics and the log tell of a step.
async fn until_told(weir: &Weir, clock: &str, is_back: bool) {
    let operator = operator(weir);
    wait::until("health tells of the step", PATIENCE, async || {
        let health = operator.get("/health").await.unwrap();
        assert_eq!(health.status, 200, "the server can do its work");
        let clock = &health.json()["data"]["clocks"][clock];
        clock["status"] == "stepped" && (clock["stepSeconds"].as_f64().unwrap() < 0.0) == is_back
    })
    .await;
    let metrics = String::from_utf8(operator.get("/metrics").await.unwrap().body.to_vec()).unwrap();
    assert!(metrics.contains(&format!("weir_clock_steps_total{{clock=\"{clock}\"}}")), "{metrics}");
    weir.wait_for_log(|line| line.contains(&format!("the clock of {clock} has stepped")), PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_system_clock_that_jumps_and_returns_changes_nothing_but_is_told_of() {
    let clock = FakeClock::new();
    let weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 2, 1).await;
    assert_eq!(send(&client, "alice", 3).await, "AAD");
    clock.set(HOURS);
    until_told(&weir, "system", false).await;
    assert_eq!(send(&client, "alice", 2).await, "DD", "no window ends for a clock that may return");
    configure(&client, "bob", 1, 1).await;
    assert_eq!(send(&client, "bob", 2).await, "AD");
    clock.set(0);
    until_told(&weir, "system", true).await;
    assert_eq!(send(&client, "alice", 1).await + &send(&client, "bob", 1).await, "DD");
    // A minute, by every clock of the machine.
    clock.suspend(WINDOW);
    assert_eq!(send(&client, "alice", 3).await, "AAD");
    assert_eq!(send(&client, "bob", 2).await, "AD");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_system_clock_that_is_set_ahead_and_back_keeps_nobody_out_not_even_after_a_crash() {
    let clock = FakeClock::new();
    let mut weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 2, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AA");
    clock.set(HOURS);
    until_followed(&client, HOURS).await;
    assert_eq!(send(&client, "alice", 1).await, "A", "the window has passed, by the clock as it is now");
    clock.set(0);
    until_followed(&client, 0).await;
    assert_eq!(send(&client, "alice", 2).await, "AD", "one window more, and no other");
    weir.kill_9();
    weir.restart().await;
    let client = Client::new(weir.base_url());
    assert_eq!(send(&client, "alice", 1).await, "D");
    clock.suspend(WINDOW);
    assert_eq!(send(&client, "alice", 3).await, "AAD");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_starts_behind_its_own_rows_keeps_nobody_out() {
    let clock = FakeClock::new();
    clock.set(HOURS);
    let mut weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 1, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AD");
    let bucket = json!({"kind": "token_bucket", "capacity": 1, "refill": 1, "period": "PT1M"});
    assert_eq!(operator(&weir).put("/admin/policies/p", &bucket).await.unwrap().status, 200);
    let check = json!({"checks": [{"policy": "p", "key": "k"}]});
    let answer = operator(&weir).post("/v1/check", &check).await.unwrap().json();
    assert_eq!(answer["allowed"], true);
    weir.terminate();
    assert!(weir.wait(PATIENCE).await.success());
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
async fn a_clock_set_back_for_good_keeps_nobody_out_and_stops_no_work() {
    let clock = FakeClock::new();
    let weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 1, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AD");
    clock.set(-HOURS);
    until_told(&weir, "system", true).await;
    until_followed(&client, -HOURS).await;
    assert_eq!(send(&client, "alice", 1).await, "D");
    complete_a_request(&weir).await;
    clock.suspend(WINDOW);
    // The window goes back with the clock when it is first looked at after the step.
    let _ = send(&client, "alice", 1).await;
    clock.suspend(WINDOW);
    assert_eq!(send(&client, "alice", 1).await, "A");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_that_slept_goes_on_where_it_should_be() {
    let clock = FakeClock::new();
    let weir = embedded(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 1, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AD");
    clock.suspend(Duration::from_secs(7_200));
    assert_eq!(send(&client, "alice", 2).await, "AD", "its window has passed");
    until_followed(&client, HOURS).await;
    let health = client.get("/health").await.unwrap().json();
    assert_eq!(health["data"]["clocks"]["system"]["status"], "steady", "{health}");
}

/// Has a request done, and waits for it.
async fn complete_a_request(weir: &Weir) {
    let id = submit(weir).await;
    until_completed(weir, &id).await;
}

fn tenant(weir: &Weir) -> Client {
    let secret = std::fs::read_to_string(weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims {
        sub: "a@b.c".into(),
        exp: 4_000_000_000,
        tenant_id: Some("acme".into()),
        scope: Some("requests:create requests:read".into()),
    };
    let token = jwt::sign(&secret, &claims).unwrap();
    Client::new(weir.base_url()).with_header("authorization", &format!("Bearer {token}"))
}

async fn submit(weir: &Weir) -> String {
    let key = format!("{:016x}", fastrand::u64(..));
    let body = json!({"idempotencyKey": key, "requestType": "t", "payload": 1});
    let answer = tenant(weir).post("/v1/requests", &body).await.unwrap();
    assert_eq!(answer.status, 202, "{:?}", answer.json());
    answer.json()["requestId"].as_str().unwrap().to_owned()
}

async fn until_completed(weir: &Weir, id: &str) {
    let client = tenant(weir);
    wait::until("the request is done", PATIENCE, async || {
        client.get(&format!("/v1/requests/{id}")).await.unwrap().json()["status"] == "COMPLETED"
    })
    .await;
}

/// A server on a Postgres that goes by a clock of its own.
async fn on_postgres(clock: &FakeClock) -> (postgres::Server, Database, Weir) {
    let postgres = postgres::Server::private_with_clock(clock);
    let database = postgres.database("clock").await;
    let weir = weir().env("WEIR_STORE", database.url()).spawn().await;
    (postgres, database, weir)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_postgres_that_goes_ahead_and_back_keeps_nobody_out_and_stops_no_work() {
    if skip("postgres") {
        return;
    }
    let clock = FakeClock::new();
    let (_postgres, _database, weir) = on_postgres(&clock).await;
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 2, 1).await;
    assert_eq!(send(&client, "alice", 2).await, "AA");
    clock.set(HOURS);
    assert_eq!(send(&client, "alice", 1).await, "A", "the window has passed, by the clock that decides");
    let id = submit(&weir).await;
    clock.set(0);
    assert_eq!(send(&client, "alice", 2).await, "AD", "one window more, and no other");
    until_told(&weir, "postgresql", true).await;
    until_completed(&weir, &id).await;
    complete_a_request(&weir).await;
    clock.set(61);
    // What the server remembers of a denial ends with the window by its own clock, which did not step.
    configure(&client, "bob", 1, 1).await;
    assert_eq!(send(&client, "bob", 2).await, "AD");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_of_redis_that_goes_ahead_and_back_keeps_nobody_out() {
    if skip("postgres") || skip("redis") {
        return;
    }
    let clock = FakeClock::new();
    let environment = clock.environment().map(|(name, value)| (name.into(), value.into())).to_vec();
    let redis = redis::Server::private(&Options { appendonly: false, environment, ..Options::default() });
    let database = postgres::Server::shared().database("clock").await;
    let weir = weir().env("WEIR_STORE", database.url()).env("WEIR_CACHE", redis.url()).spawn().await;
    let operator = operator(&weir);
    wait::until("the clock of Redis is known", PATIENCE, async || {
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
        let answer = operator.post("/v1/check", &body).await.unwrap().json();
        (answer["allowed"].as_bool().unwrap(), answer["checks"][0]["retryAfterMs"].as_u64())
    };
    let client = Client::new(weir.base_url());
    configure(&client, "alice", 2, 1).await;
    clock.set(HOURS);
    for (name, _) in &policies {
        assert!(check(name).await.0, "{name}");
    }
    assert_eq!(send(&client, "alice", 1).await, "A");
    until_told(&weir, "redis", false).await;
    clock.set(0);
    for (name, _) in &policies {
        let (is_allowed, retry_after) = check(name).await;
        assert!(!is_allowed, "{name}: what was spent stays spent");
        // A sliding window counts for as long again as it lasts.
        assert!(retry_after.unwrap() <= 120_000, "{name}: {retry_after:?} ms");
    }
    assert_eq!(send(&client, "alice", 2).await, "AD", "Postgres still knows what was sent");
    until_told(&weir, "redis", true).await;
    clock.set(121);
    for (name, _) in &policies {
        assert!(check(name).await.0, "{name} is free again");
    }
}
