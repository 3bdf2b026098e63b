//! Holds: settled once, spent in full when they expire, durable across restarts.

use std::time::Duration;

use futures_util::future::{join, join_all};
use serde_json::{Value, json};
use weir_testkit::http::{Client, Response};
use weir_testkit::wait;

use super::fixtures::{check_one, expect_error, put_policy, remaining, slow_bucket};
use crate::fixtures::{InProcess, Running, Store, TEST_TIMEOUT, audit, on_each_engine};

/// A timeout that a busy machine does not exceed, for tests with many concurrent callers.
const LONG_TIMEOUT: [(&str, &str); 1] = [("WEIR_HTTP_TIMEOUT", "60s")];

async fn hold(caller: &Client, cost: u32) -> Value {
    let body = json!({"policy": "p", "key": "k", "cost": cost, "ttl": "PT1M"});
    let response = caller.post("/v1/hold", &body).await.unwrap();
    assert_eq!(response.status, 200, "{:?}", response.body);
    response.json()
}

async fn settle(caller: &Client, hold: &Value, cost: u32) -> Response {
    caller.post("/v1/settle", &json!({"holdId": hold["holdId"], "cost": cost})).await.unwrap()
}

async fn a_hold_is_settled_once(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(100)).await;
    let held = hold(&operator, 60).await;
    assert_eq!((&held["allowed"], &held["remaining"]), (&json!(true), &json!(40)));
    assert!(held["expiresAt"].is_string() && held["holdId"].is_string());
    let denied = hold(&operator, 41).await;
    assert_eq!(
        (&denied["allowed"], &denied["holdId"], &denied["expiresAt"]),
        (&json!(false), &Value::Null, &Value::Null)
    );
    let settled = settle(&operator, &held, 25).await.json();
    assert_eq!((&settled["held"], &settled["cost"]), (&json!(60), &json!(25)));
    assert_eq!((&settled["refunded"], &settled["charged"]), (&json!(35), &json!(0)));
    assert_eq!(remaining(&operator, "p", "k").await, 75);
    for cost in [25, 99] {
        assert_eq!(
            settle(&operator, &held, cost).await.json(),
            settled,
            "a repeated settlement gets the same response"
        );
    }
    assert_eq!(remaining(&operator, "p", "k").await, 75);
    let costly = hold(&operator, 10).await;
    assert_eq!(settle(&operator, &costly, 200).await.json()["charged"], 190);
    assert_eq!(check_one(&operator, "p", "k", 1).await["allowed"], false, "the rest is a debt");
    operator.delete("/admin/policies/p/keys/k").await.unwrap();
    assert_eq!(remaining(&operator, "p", "k").await, 100);
}

async fn an_invalid_hold_is_400_and_names_the_field(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(100)).await;
    let with = |field: &str, value: Value| {
        let mut body = json!({"policy": "p", "key": "k", "cost": 1, "ttl": "PT1M"});
        body[field] = value;
        body
    };
    for (field, bad) in [
        ("cost", json!(-1)),
        ("cost", json!(null)),
        ("key", json!("")),
        ("ttl", json!("1m")),
        ("ttl", json!("PT0S")),
        ("ttl", json!("P2D")),
        ("ttl", json!("P1M")),
    ] {
        let response = operator.post("/v1/hold", &with(field, bad)).await.unwrap();
        expect_error(&response, 400, "INVALID_REQUEST", field);
    }
    let response = operator.post("/v1/hold", &with("policy", json!("none"))).await.unwrap();
    expect_error(&response, 404, "NOT_FOUND", "none");
    for unknown in ["", "x", "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10"] {
        expect_error(&settle(&operator, &json!({"holdId": unknown}), 1).await, 404, "NOT_FOUND", "hold");
    }
    assert_eq!(remaining(&operator, "p", "k").await, 100);
}

async fn a_hold_survives_kill_9(store: Store) {
    let mut server = Running::start(store).await;
    put_policy(&server.operator(), "p", slow_bucket(100)).await;
    let (open, done) = (hold(&server.operator(), 60).await, hold(&server.operator(), 10).await);
    let answer = settle(&server.operator(), &done, 5).await.json();
    server.weir.kill_9();
    server.weir.restart().await;
    let operator = server.operator();
    assert_eq!(settle(&operator, &done, 7).await.json(), answer, "a settlement survives the crash");
    assert_eq!(settle(&operator, &open, 20).await.json()["refunded"], 40);
}

/// The first settlement decides. All others get the same response, and the spent amount is corrected once.
async fn concurrent_settlements_count_once(store: Store) {
    let server = Running::start_with(store, &LONG_TIMEOUT).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(1_000)).await;
    let held = hold(&operator, 500).await;
    let settle_all = (0..16).map(|n| settle(&operator, &held, n * 50));
    let answers: Vec<Value> = join_all(settle_all).await.iter().map(Response::json).collect();
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let cost = answers[0]["cost"].as_u64().unwrap();
    assert_eq!(remaining(&operator, "p", "k").await, 1_000 - cost);
}

/// Settlements and concurrent refunds of the same key never add up to more than the capacity.
async fn concurrent_settlements_and_refunds_never_exceed_the_capacity(store: Store) {
    let server = Running::start_with(store, &LONG_TIMEOUT).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(100)).await;
    let held = join_all((0..5).map(|_| hold(&operator, 20))).await;
    assert!(held.iter().all(|held| held["allowed"] == true), "{held:?}");
    assert_eq!(remaining(&operator, "p", "k").await, 0);
    let refund = json!({"policy": "p", "key": "k", "cost": 1_000});
    let (settled, _) = join(
        join_all(held.iter().map(|held| settle(&operator, held, 0))),
        join_all((0..5).map(|_| operator.post("/v1/refund", &refund))),
    )
    .await;
    assert!(settled.iter().all(|answer| answer.status == 200));
    assert_eq!(remaining(&operator, "p", "k").await, 100);
    assert_eq!(check_one(&operator, "p", "k", 101).await["allowed"], false);
}

async fn the_audit_counts_every_hold(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(100)).await;
    let (open, done) = (hold(&operator, 60).await, hold(&operator, 10).await);
    settle(&operator, &done, 5).await;
    let audit_report = audit(&operator).await;
    assert_eq!(audit_report["ok"], true);
    let tier = &audit_report["tier"];
    let counts = ["holds", "open", "held", "settled", "expired", "keys"].map(|name| tier[name].as_u64());
    assert_eq!(counts, [2, 1, 60, 1, 0, 1].map(Some));
    settle(&operator, &open, 60).await;
    wait::until("all is on disk", TEST_TIMEOUT, async || audit(&operator).await["tier"]["unsaved"] == 0)
        .await;
    assert_eq!(audit(&operator).await["tier"]["settled"], 2);
}

/// A caller can settle its hold after a crash. If the estimate were lost, that would refund what others have spent.
async fn the_estimate_of_an_answered_hold_survives_kill_9(store: Store) {
    let mut server = Running::start_with(store, &LONG_TIMEOUT).await;
    put_policy(&server.operator(), "p", slow_bucket(1_000)).await;
    let mut spent = 0;
    for _ in 0..3 {
        let caller = server.operator();
        assert_eq!(check_one(&caller, "p", "k", 50).await["allowed"], true);
        let held = hold(&caller, 40).await;
        server.weir.kill_9();
        server.weir.restart().await;
        let operator = server.operator();
        spent += 50;
        assert_eq!(remaining(&operator, "p", "k").await, 1_000 - spent - 40);
        assert_eq!(settle(&operator, &held, 0).await.json()["refunded"], 40);
        assert_eq!(remaining(&operator, "p", "k").await, 1_000 - spent);
        // A refund need not survive the next crash, but this test needs it to. An answered hold is durable with all before
        // it.
        assert_eq!(hold(&operator, 1).await["allowed"], true);
        spent += 1;
    }
}

on_each_engine!(
    a_hold_is_settled_once,
    an_invalid_hold_is_400_and_names_the_field,
    a_hold_survives_kill_9,
    the_estimate_of_an_answered_hold_survives_kill_9,
    concurrent_settlements_count_once,
    concurrent_settlements_and_refunds_never_exceed_the_capacity,
    the_audit_counts_every_hold,
);

async fn a_hold_that_expires_is_spent_in_full(store: Store) {
    let server = InProcess::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", json!({"kind": "fixed_window", "limit": 100, "window": "P1D"})).await;
    let (late, in_time) = (hold(&operator, 60).await, hold(&operator, 10).await);
    server.clock.advance(Duration::from_millis(59_999));
    assert_eq!(settle(&operator, &in_time, 0).await.status, 200);
    server.clock.advance(Duration::from_millis(1));
    for _ in 0..2 {
        expect_error(&settle(&operator, &late, 1).await, 410, "HOLD_EXPIRED", "expired");
    }
    assert_eq!(settle(&operator, &in_time, 5).await.json()["refunded"], 10, "a settled hold does not expire");
    assert_eq!(remaining(&operator, "p", "k").await, 40);
    server.stop().await;
}

mod expiry {
    use super::*;

    on_each_engine!(a_hold_that_expires_is_spent_in_full);
}
