//! Concurrency policies: permits, their release, and that no more are in use than the limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::wait;

use super::fixtures::{bearing, check, check_one, expect_error, put_policy, remaining, slow_bucket};
use crate::fixtures::{InProcess, LONG_TIMEOUTS, Running, Store, TEST_TIMEOUT, on_each_engine, operator};

fn concurrency(limit: u32, ttl: &str) -> Value {
    json!({"kind": "concurrency", "limit": limit, "ttl": ttl})
}

async fn release(caller: &Client, permit: &Value) -> weir_testkit::http::Response {
    caller.post("/v1/release", &json!({ "permitId": permit })).await.unwrap()
}

async fn a_permit_is_in_use_until_it_is_given_back(store: Store) {
    let server = Running::start_with(store, &LONG_TIMEOUTS).await;
    let operator = server.operator();
    put_policy(&operator, "jobs", concurrency(3, "PT5M")).await;
    let caller = bearing(&server.weir, "svc", Some("limits:check"));
    let first = check_one(&caller, "jobs", "k", 2).await;
    assert_eq!(
        (&first["allowed"], &first["remaining"], &first["limit"]),
        (&json!(true), &json!(1), &json!(3))
    );
    let denied = check_one(&caller, "jobs", "k", 2).await;
    assert_eq!((&denied["allowed"], denied.get("permitId")), (&json!(false), None));
    let wait = denied["retryAfterMs"].as_u64().unwrap();
    assert!((200_000..=300_000).contains(&wait), "{wait}: when the first one ends by itself");
    assert_eq!(check_one(&caller, "jobs", "k", 4).await["retryAfterMs"], Value::Null);
    let looked = check_one(&caller, "jobs", "k", 0).await;
    assert_eq!((&looked["remaining"], looked.get("permitId")), (&json!(1), None));
    let peek = json!({"checks": [{"policy": "jobs", "key": "k"}], "peek": true, "explain": true});
    let peeked = caller.post("/v1/check", &peek).await.unwrap().json();
    assert_eq!((&peeked["allowed"], peeked["checks"][0].get("permitId")), (&json!(true), None));
    let sentence = peeked["checks"][0]["explanation"].as_str().unwrap();
    assert!(sentence.contains("3 in use at once") && sentence.contains("1 of 3 free"), "{sentence}");
    let released = release(&caller, &first["permitId"]).await;
    let expected = json!({"permitId": first["permitId"], "policy": "jobs", "key": "k", "cost": 2});
    assert_eq!((released.status, released.json()), (200, expected.clone()));
    assert_eq!(release(&caller, &first["permitId"]).await.json(), expected, "the same answer");
    assert_eq!(remaining(&caller, "jobs", "k").await, 3);
    for unknown in ["019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10", "x", ""] {
        expect_error(&release(&caller, &json!(unknown)).await, 404, "NOT_FOUND", "permit");
    }
    expect_error(&caller.post("/v1/release", &json!({})).await.unwrap(), 400, "INVALID_REQUEST", "permitId");
    let stranger = bearing(&server.weir, "svc", Some("requests:read"));
    assert_eq!(release(&stranger, &first["permitId"]).await.status, 403);
    for path in ["/v1/refund", "/v1/hold"] {
        let body = json!({"policy": "jobs", "key": "k", "cost": 1});
        expect_error(&caller.post(path, &body).await.unwrap(), 400, "INVALID_REQUEST", "/v1/release");
    }
    check_one(&caller, "jobs", "k", 3).await;
    assert_eq!(operator.delete("/admin/policies/jobs/keys/k").await.unwrap().status, 204);
    assert_eq!(remaining(&caller, "jobs", "k").await, 3);
}

async fn a_permit_ends_with_its_time(store: Store) {
    let server = InProcess::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "jobs", concurrency(1, "PT30S")).await;
    let dead = check_one(&operator, "jobs", "k", 1).await["permitId"].clone();
    server.clock.advance(Duration::from_millis(29_999));
    let denied = check_one(&operator, "jobs", "k", 1).await;
    assert_eq!((&denied["allowed"], &denied["retryAfterMs"]), (&json!(false), &json!(1)));
    server.clock.advance(Duration::from_millis(1));
    assert_eq!(check_one(&operator, "jobs", "k", 1).await["allowed"], true);
    expect_error(&release(&operator, &dead).await, 410, "PERMIT_EXPIRED", "time");
    server.stop().await;
}

async fn a_check_takes_permits_and_spends_or_does_neither(store: Store) {
    let server = Running::start_with(store, &LONG_TIMEOUTS).await;
    let operator = server.operator();
    put_policy(&operator, "jobs", concurrency(2, "PT5M")).await;
    put_policy(&operator, "rate", slow_bucket(1)).await;
    let mixed = json!([{"policy": "rate", "key": "k"}, {"policy": "jobs", "key": "k"}]);
    let first = check(&operator, mixed.clone()).await;
    assert_eq!(first["allowed"], true);
    assert!(first["checks"][1]["permitId"].is_string() && first["checks"][0].get("permitId").is_none());
    let second = check(&operator, mixed.clone()).await;
    assert_eq!((&second["allowed"], &second["checks"][1]["allowed"]), (&json!(false), &json!(true)));
    assert_eq!(second["checks"][1].get("permitId"), None);
    assert_eq!(second["checks"][1]["remaining"], 1, "nothing is in use for a denied check");
    assert_eq!(remaining(&operator, "jobs", "k").await, 1);
    put_policy(&operator, "rate", slow_bucket(5)).await;
    assert_eq!(check_one(&operator, "jobs", "k", 1).await["allowed"], true);
    let before = remaining(&operator, "rate", "k").await;
    let third = check(&operator, mixed).await;
    assert_eq!((&third["allowed"], &third["checks"][0]["allowed"]), (&json!(false), &json!(true)));
    assert_eq!(remaining(&operator, "rate", "k").await, before, "nothing is spent without a permit");
}

async fn a_concurrency_policy_reads_back_as_it_was_put(store: Store) {
    let server = Running::start_with(store, &LONG_TIMEOUTS).await;
    let operator = server.operator();
    put_policy(&operator, "a", slow_bucket(1)).await;
    let put = operator.put("/admin/policies/jobs", &concurrency(5, "PT30S")).await.unwrap().json();
    let expected = json!({"name": "jobs", "kind": "concurrency", "limit": 5, "ttl": "PT30S", "shadow": false,
        "onOutage": "local"});
    assert_eq!(put, expected);
    assert_eq!(operator.get("/admin/policies/jobs").await.unwrap().json(), expected);
    let listed = operator.get("/admin/policies").await.unwrap().json();
    assert_eq!(
        listed["items"].as_array().unwrap().iter().map(|item| &item["name"]).collect::<Vec<_>>(),
        ["a", "jobs"]
    );
    for (field, bad) in [
        ("limit", json!(0)),
        ("limit", json!(10_001)),
        ("ttl", json!("30s")),
        ("ttl", json!(null)),
        ("window", json!("PT1M")),
        ("match", json!({"domain": "d", "entries": {"a": "*"}})),
    ] {
        let mut body = concurrency(5, "PT30S");
        body[field] = bad;
        let response = operator.put("/admin/policies/other", &body).await.unwrap();
        expect_error(&response, 400, "INVALID_REQUEST", field);
    }
    put_policy(&operator, "jobs", slow_bucket(2)).await;
    assert_eq!(operator.get("/admin/policies/jobs").await.unwrap().json()["kind"], "token_bucket");
    put_policy(&operator, "jobs", concurrency(5, "PT30S")).await;
    assert_eq!(operator.delete("/admin/policies/jobs").await.unwrap().status, 204);
    let gone = json!({"checks": [{"policy": "jobs", "key": "k"}]});
    expect_error(&operator.post("/v1/check", &gone).await.unwrap(), 404, "NOT_FOUND", "jobs");
}

/// What holders know of the permits that are in use.
#[derive(Default)]
struct Holders {
    in_use: AtomicI64,
    most: AtomicI64,
    given: AtomicI64,
}

impl Holders {
    /// Takes a permit and gives it back, until the server has gone or `rounds` are over. A holder that loses its server keeps its
    /// permit.
    async fn hold(&self, caller: &Client, rounds: u32) {
        let body = json!({"checks": [{"policy": "jobs", "key": "hot"}]});
        for _ in 0..rounds {
            let Ok(response) = caller.post("/v1/check", &body).await else { return };
            let permit = response.json()["checks"][0]["permitId"].clone();
            if !permit.is_string() {
                continue;
            }
            self.given.fetch_add(1, Ordering::SeqCst);
            let now = self.in_use.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            tokio::task::yield_now().await;
            // Counted as given back before it is asked for: the server may free it at any time from here on.
            self.in_use.fetch_sub(1, Ordering::SeqCst);
            let Ok(_) = caller.post("/v1/release", &json!({ "permitId": permit })).await else { return };
        }
    }
}

async fn no_more_are_in_use_than_the_limit_while_a_server_is_killed(store: Store) {
    let mut server = Running::start_with(store, &LONG_TIMEOUTS).await;
    put_policy(&server.operator(), "jobs", concurrency(4, "PT1H")).await;
    // Permits of holders that live through the kill, and never give back.
    let mut kept = Vec::new();
    for _ in 0..2 {
        kept.push(check_one(&server.operator(), "jobs", "hot", 1).await["permitId"].clone());
    }
    let holders = Arc::new(Holders::default());
    let tasks: Vec<_> = (0..12)
        .map(|_| {
            let (holders, caller) = (Arc::clone(&holders), server.operator());
            tokio::spawn(async move { holders.hold(&caller, u32::MAX).await })
        })
        .collect();
    wait::until("permits are given and given back", TEST_TIMEOUT, async || {
        holders.given.load(Ordering::SeqCst) > 20
    })
    .await;
    server.weir.kill_9();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(holders.most.load(Ordering::SeqCst) <= 2, "two of four are kept");
    server.weir.restart().await;
    // Permits whose holders lost the server are in use until their time is over; the two that are kept must be.
    let left = remaining(&server.operator(), "jobs", "hot").await;
    assert!(left <= 2, "{left} are free, although two are kept");
    for permit in &kept {
        assert_eq!(release(&server.operator(), permit).await.status, 200, "the restart has forgotten none");
    }
    assert_eq!(remaining(&server.operator(), "jobs", "hot").await, left + 2);
}

on_each_engine!(
    a_permit_is_in_use_until_it_is_given_back,
    a_permit_ends_with_its_time,
    a_check_takes_permits_and_spends_or_does_neither,
    a_concurrency_policy_reads_back_as_it_was_put,
    no_more_are_in_use_than_the_limit_while_a_server_is_killed,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_on_postgres_count_permits_together_also_when_one_is_paused() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Running::start_with(Store::Postgres, &LONG_TIMEOUTS).await;
    let other = server.second_with(&LONG_TIMEOUTS).await;
    put_policy(&server.operator(), "jobs", concurrency(5, "PT1H")).await;
    wait::until("the other server has the policy", TEST_TIMEOUT, async || {
        operator(&other).get("/admin/policies/jobs").await.unwrap().status == 200
    })
    .await;
    let holders = Arc::new(Holders::default());
    let spawn = |caller: Client, rounds| {
        let holders = Arc::clone(&holders);
        tokio::spawn(async move { holders.hold(&caller, rounds).await })
    };
    let paused: Vec<_> = (0..8).map(|_| spawn(operator(&other), 20)).collect();
    let running: Vec<_> = (0..8).map(|_| spawn(server.operator(), 20)).collect();
    wait::until("both give permits", TEST_TIMEOUT, async || holders.given.load(Ordering::SeqCst) > 20).await;
    other.pause();
    for task in running {
        task.await.unwrap();
    }
    other.resume();
    for task in paused {
        task.await.unwrap();
    }
    let most = holders.most.load(Ordering::SeqCst);
    assert!((1..=5).contains(&most), "{most} were in use");
    // One server's permit is given back on the other.
    let permit = check_one(&server.operator(), "jobs", "cold", 5).await["permitId"].clone();
    assert_eq!(check_one(&operator(&other), "jobs", "cold", 1).await["allowed"], false);
    assert_eq!(release(&operator(&other), &permit).await.status, 200);
    assert_eq!(check_one(&server.operator(), "jobs", "cold", 5).await["allowed"], true);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_store_only_open_policies_allow() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let mut postgres = weir_testkit::postgres::Server::private();
    let database = postgres.database("permits").await;
    let weir = crate::fixtures::weir().env("WEIR_STORE", database.url()).spawn().await;
    let caller = operator(&weir);
    for (name, choice) in [("closed", "closed"), ("local", "local"), ("open", "open")] {
        let mut policy = concurrency(1, "PT5M");
        policy["onOutage"] = json!(choice);
        put_policy(&caller, name, policy).await;
    }
    postgres.stop().await;
    wait::until("the store is away", TEST_TIMEOUT, async || {
        check_one(&caller, "closed", "k", 1).await["allowed"] == false
    })
    .await;
    for name in ["closed", "local"] {
        let denied = check_one(&caller, name, "k", 1).await;
        assert_eq!((&denied["allowed"], &denied["retryAfterMs"]), (&json!(false), &json!(1_000)));
    }
    let open = check_one(&caller, "open", "k", 1).await;
    assert_eq!((&open["allowed"], open.get("permitId")), (&json!(true), None), "nobody counts it");
    let unknown = release(&caller, &json!("019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10")).await;
    assert_eq!(unknown.status, 503, "whether there is such a permit is not known");
    postgres.start().await;
    wait::until("permits are given again", TEST_TIMEOUT, async || {
        check_one(&caller, "closed", "new", 1).await["permitId"].is_string()
    })
    .await;
}
