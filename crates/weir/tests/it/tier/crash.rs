//! Spent amounts after a stop and after a crash.

use serde_json::Value;
use weir_testkit::http::Client;
use weir_testkit::wait;

use super::fixtures::{check_one, put_policy, remaining, slow_bucket};
use crate::fixtures::{Running, Store, TEST_TIMEOUT, on_each_engine};

const LIMIT: u32 = 1_000_000;

async fn a_clean_stop_loses_no_spent_amount(store: Store) {
    let mut server = Running::start(store).await;
    put_policy(&server.operator(), "p", slow_bucket(LIMIT)).await;
    for key in 0..100 {
        check_one(&server.operator(), "p", &key.to_string(), key + 1).await;
    }
    server.weir.terminate();
    assert!(server.weir.wait(TEST_TIMEOUT).await.success());
    server.weir.restart().await;
    for key in 0..100 {
        let left_after_restart = remaining(&server.operator(), "p", &key.to_string()).await;
        assert_eq!(left_after_restart, u64::from(LIMIT - key - 1), "key {key}");
    }
}

/// Spends one call at a time until the server is down. Returns how many were allowed.
async fn spend_until_down(caller: Client) -> u64 {
    let body = serde_json::json!({"checks": [{"policy": "p", "key": "k"}]});
    let mut allowed = 0;
    while let Ok(response) = caller.post("/v1/check", &body).await {
        assert_eq!(response.status, 200);
        allowed += u64::from(response.json()["allowed"] == Value::Bool(true));
    }
    allowed
}

/// A crash may lose what was spent since the last commit, within about half a second. It must not lose more, nor count
/// more than was spent.
async fn kill_9_loses_only_what_was_spent_last(store: Store) {
    let mut server = Running::start(store).await;
    put_policy(&server.operator(), "p", slow_bucket(LIMIT)).await;
    let first = 1_000;
    for _ in 0..first {
        check_one(&server.operator(), "p", "k", 1).await;
    }
    wait_until_saved(&server).await;
    let spender = tokio::spawn(spend_until_down(server.operator()));
    wait::until("more is spent", TEST_TIMEOUT, async || {
        remaining(&server.operator(), "p", "k").await < u64::from(LIMIT - first - 100)
    })
    .await;
    server.weir.kill_9();
    let allowed = u64::from(first) + spender.await.unwrap();
    server.weir.restart().await;
    let spent = u64::from(LIMIT) - remaining(&server.operator(), "p", "k").await;
    assert!(spent >= u64::from(first), "{spent} found, {first} were on disk");
    // One call may have been decided without a response.
    assert!(spent <= allowed + 1, "{spent} found, {allowed} allowed");
}

/// Waits until everything spent is in the store.
async fn wait_until_saved(server: &Running) {
    let metrics = || async {
        let text = server.client().get("/metrics").await.unwrap().body;
        String::from_utf8(text.to_vec()).unwrap()
    };
    wait::until("everything spent is saved", TEST_TIMEOUT, async || {
        metrics().await.lines().any(|line| line == "weir_tier_unsaved 0")
    })
    .await;
}

on_each_engine!(a_clean_stop_loses_no_spent_amount, kill_9_loses_only_what_was_spent_last);
