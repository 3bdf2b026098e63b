//! Checks and refunds.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::fixtures::{check, check_one, expect_error, put_policy, remaining, slow_bucket};
use crate::fixtures::{InProcess, Running, Store, on_each_engine};

async fn a_check_of_several_keys_is_all_or_nothing(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "few", slow_bucket(1)).await;
    put_policy(&operator, "many", slow_bucket(10)).await;
    let both = json!([{"policy": "many", "key": "a", "cost": 4}, {"policy": "few", "key": "b"}]);
    let first = check(&operator, both.clone()).await;
    assert_eq!(first["allowed"], true);
    let part = |answer: &Value, at: usize| {
        (answer["checks"][at]["allowed"].clone(), answer["checks"][at]["remaining"].clone())
    };
    assert_eq!((part(&first, 0), part(&first, 1)), ((json!(true), json!(6)), (json!(true), json!(0))));
    let second = check(&operator, both).await;
    assert_eq!(second["allowed"], false);
    assert_eq!((part(&second, 0), part(&second, 1)), ((json!(true), json!(6)), (json!(false), json!(0))));
    let wait = second["checks"][1]["retryAfterMs"].as_u64().unwrap();
    assert!((1..=300 * 86_400_000).contains(&wait), "{wait}");
    let unknown = json!({"checks": [{"policy": "many", "key": "a"}, {"policy": "none", "key": "b"}]});
    expect_error(&operator.post("/v1/check", &unknown).await.unwrap(), 404, "NOT_FOUND", "none");
    assert_eq!(remaining(&operator, "many", "a").await, 6, "nothing was spent");
    let twice = json!([{"policy": "many", "key": "a", "cost": 4}, {"policy": "many", "key": "a", "cost": 3}]);
    assert_eq!(check(&operator, twice).await["allowed"], false, "the same key twice adds up");
    let twice = json!([{"policy": "many", "key": "a", "cost": 4}, {"policy": "many", "key": "a", "cost": 2}]);
    assert_eq!(check(&operator, twice).await["allowed"], true);
    assert_eq!(remaining(&operator, "many", "a").await, 0);
}

async fn a_check_explains_itself_when_asked(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "few", slow_bucket(1)).await;
    let checks = json!([{"policy": "few", "key": "k"}]);
    let explain = async |explain: Value| {
        let body = json!({"checks": checks, "explain": explain});
        operator.post("/v1/check", &body).await.unwrap()
    };
    let first = explain(json!(true)).await.json();
    let sentence = first["checks"][0]["explanation"].as_str().unwrap();
    assert!(sentence.contains("1 is spent, 0 of 1 left"), "{sentence}");
    let denied = explain(json!(true)).await.json();
    let sentence = denied["checks"][0]["explanation"].as_str().unwrap();
    assert!(sentence.starts_with("Policy few allows 1 at once and 1 more every P"), "{sentence}");
    assert!(sentence.contains("and decided: it would allow that in "), "{sentence}");
    assert_eq!(denied["allowed"], false);
    for body in [explain(json!(false)).await.json(), check(&operator, checks.clone()).await] {
        assert_eq!(body["checks"][0].get("explanation"), None);
    }
    expect_error(&explain(json!("yes")).await, 400, "INVALID_REQUEST", "explain");
}

async fn a_peek_spends_nothing(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(3)).await;
    for _ in 0..5 {
        let peek = json!({"checks": [{"policy": "p", "key": "k", "cost": 2}], "peek": true});
        let answer = operator.post("/v1/check", &peek).await.unwrap().json();
        assert_eq!((&answer["allowed"], &answer["checks"][0]["remaining"]), (&json!(true), &json!(3)));
        assert_eq!(check_one(&operator, "p", "k", 0).await["remaining"], 3);
    }
    check_one(&operator, "p", "k", 3).await;
    assert_eq!(check_one(&operator, "p", "k", 0).await["allowed"], true, "a cost of 0 is always allowed");
    let peek = json!({"checks": [{"policy": "p", "key": "k", "cost": 1}], "peek": true});
    assert_eq!(operator.post("/v1/check", &peek).await.unwrap().json()["allowed"], false);
    let above = check_one(&operator, "p", "k", 4).await;
    assert_eq!((&above["allowed"], &above["retryAfterMs"]), (&json!(false), &Value::Null));
}

async fn an_invalid_check_is_400_and_names_the_field(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(3)).await;
    let many: Vec<Value> = (0..65).map(|n| json!({"policy": "p", "key": n.to_string()})).collect();
    let item = |item: Value| json!({"checks": [item]});
    for (body, part) in [
        (json!({}), "checks is required"),
        (json!({"checks": []}), "checks must have"),
        (json!({"checks": many}), "checks must have"),
        (json!({"checks": {}}), "checks"),
        (item(json!({"key": "k"})), "policy is required"),
        (item(json!({"policy": "p"})), "key is required"),
        (item(json!({"policy": "p", "key": ""})), "checks[0].key must not be empty"),
        (item(json!({"policy": "p", "key": "x".repeat(256)})), "checks[0].key"),
        (item(json!({"policy": "p", "key": "a\u{0}"})), "checks[0].key"),
        (item(json!({"policy": "p", "key": 5})), "checks[0].key"),
        (item(json!({"policy": "p", "key": "k", "cost": -1})), "checks[0].cost must be an integer from 0"),
        (item(json!({"policy": "p", "key": "k", "cost": 1.5})), "checks[0].cost"),
        (item(json!({"policy": "p", "key": "k", "cost": "1"})), "checks[0].cost"),
        (item(json!({"policy": "p", "key": "k", "cost": 2_147_483_648_u64})), "checks[0].cost"),
        (json!({"checks": [{"policy": "p", "key": "k"}], "peek": 1}), "peek"),
    ] {
        expect_error(&operator.post("/v1/check", &body).await.unwrap(), 400, "INVALID_REQUEST", part);
    }
    assert_eq!(remaining(&operator, "p", "k").await, 3, "nothing was spent");
}

async fn a_refund_never_exceeds_the_capacity(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(5)).await;
    check_one(&operator, "p", "k", 4).await;
    let refund = async |cost: u32| {
        let body = json!({"policy": "p", "key": "k", "cost": cost});
        operator.post("/v1/refund", &body).await.unwrap().json()["remaining"].clone()
    };
    assert_eq!(refund(1).await, 2);
    assert_eq!(refund(1_000).await, 5);
    assert_eq!(check_one(&operator, "p", "k", 6).await["allowed"], false);
    let unknown = json!({"policy": "none", "key": "k", "cost": 1});
    expect_error(&operator.post("/v1/refund", &unknown).await.unwrap(), 404, "NOT_FOUND", "none");
}

async fn parallel_checks_of_one_key_allow_exactly_its_limit(store: Store) {
    let server = Running::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(8)).await;
    let checks = (0..200).map(|_| check_one(&operator, "p", "k", 1));
    let allowed = join_all(checks).await.iter().filter(|answer| answer["allowed"] == true).count();
    assert_eq!(allowed, 8);
}

on_each_engine!(
    a_check_explains_itself_when_asked,
    a_check_of_several_keys_is_all_or_nothing,
    a_peek_spends_nothing,
    an_invalid_check_is_400_and_names_the_field,
    a_refund_never_exceeds_the_capacity,
    parallel_checks_of_one_key_allow_exactly_its_limit,
);

async fn each_kind_refills_to_the_millisecond(store: Store) {
    let server = InProcess::start(store).await;
    let operator = server.operator();
    put_policy(&operator, "fixed", json!({"kind": "fixed_window", "limit": 5, "window": "PT1M"})).await;
    put_policy(&operator, "sliding", json!({"kind": "sliding_window", "limit": 5, "window": "PT1M"})).await;
    let bucket = json!({"kind": "token_bucket", "capacity": 5, "refill": 5, "period": "PT1M"});
    put_policy(&operator, "bucket", bucket).await;
    // Sliding windows start at whole minutes, and the clock of the test is set to one.
    for (policy, retry, reset) in
        [("fixed", 60_000, 60_000), ("sliding", 72_000, 120_000), ("bucket", 12_000, 60_000)]
    {
        assert_eq!(check_one(&operator, policy, "k", 5).await["remaining"], 0);
        let denied = check_one(&operator, policy, "k", 1).await;
        assert_eq!(denied["allowed"], false);
        assert_eq!(
            (&denied["retryAfterMs"], &denied["resetAfterMs"]),
            (&json!(retry), &json!(reset)),
            "{policy}"
        );
    }
    let mut now = 0;
    for (policy, due) in [("bucket", 12_000), ("fixed", 60_000), ("sliding", 72_000)] {
        server.clock.advance(Duration::from_millis(due - 1 - now));
        now = due - 1;
        assert_eq!(check_one(&operator, policy, "k", 1).await["retryAfterMs"], 1, "{policy}");
        server.clock.advance(Duration::from_millis(1));
        now += 1;
        assert_eq!(check_one(&operator, policy, "k", 1).await["allowed"], true, "{policy}");
    }
    server.stop().await;
}

mod refill {
    use super::*;

    on_each_engine!(each_kind_refills_to_the_millisecond);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_above_the_bound_is_refused_with_the_name_of_the_setting() {
    let server = Running::start_with(Store::Embedded, &[("WEIR_RATE_LIMIT_KEYS_MAX", "1")]).await;
    let operator = server.operator();
    put_policy(&operator, "p", slow_bucket(3)).await;
    check_one(&operator, "p", "first", 1).await;
    let second = json!({"checks": [{"policy": "p", "key": "second"}]});
    let refused = operator.post("/v1/check", &second).await.unwrap();
    expect_error(&refused, 503, "DEPENDENCY_UNAVAILABLE", "rate_limit.keys_max");
    expect_error(&refused, 503, "DEPENDENCY_UNAVAILABLE", "tracks 1 keys");
    assert!(refused.header("retry-after").is_some());
    check_one(&operator, "p", "first", 1).await;
}
