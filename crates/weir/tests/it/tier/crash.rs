//! What limits remember of before a stop, and of before a crash.

use serde_json::Value;
use weir_testkit::http::Client;
use weir_testkit::wait;

use super::fixtures::{check_one, put_policy, remaining, slow_bucket};
use crate::fixtures::{PATIENCE, Running, Store, on_each_engine};

const LIMIT: u32 = 1_000_000;

async fn a_clean_stop_forgets_nothing(store: Store) {
    let mut server = Running::start(store).await;
    put_policy(&server.operator(), "p", slow_bucket(LIMIT)).await;
    for key in 0..100 {
        check_one(&server.operator(), "p", &key.to_string(), key + 1).await;
    }
    server.weir.terminate();
    assert!(server.weir.wait(PATIENCE).await.success());
    server.weir.restart().await;
    for key in 0..100 {
        let left = remaining(&server.operator(), "p", &key.to_string()).await;
        assert_eq!(left, u64::from(LIMIT - key - 1), "key {key}");
    }
}

/// Spends one after the other until the server is gone; answers how many were allowed.
async fn spend_until_gone(caller: Client) -> u64 {
    let body = serde_json::json!({"checks": [{"policy": "p", "key": "k"}]});
    let mut allowed = 0;
    while let Ok(response) = caller.post("/v1/check", &body).await {
        assert_eq!(response.status, 200);
        allowed += u64::from(response.json()["allowed"] == Value::Bool(true));
    }
    allowed
}

/// Everything but what was spent since the last commit: what had settled before the last half second or so is there, and
/// nothing is counted that was not spent.
async fn kill_9_forgets_what_was_spent_last_and_no_more(store: Store) {
    let mut server = Running::start(store).await;
    put_policy(&server.operator(), "p", slow_bucket(LIMIT)).await;
    let first = 1_000;
    for _ in 0..first {
        check_one(&server.operator(), "p", "k", 1).await;
    }
    // The journal commits in order, so what is spent on another key later and found on disk proves that this is there.
    let kept = kept_on_disk(&server).await;
    assert!(kept, "what was spent is written within the patience of the test");
    let spender = tokio::spawn(spend_until_gone(server.operator()));
    wait::until("some more is spent", PATIENCE, async || {
        remaining(&server.operator(), "p", "k").await < u64::from(LIMIT - first - 100)
    })
    .await;
    server.weir.kill_9();
    let allowed = u64::from(first) + spender.await.unwrap();
    server.weir.restart().await;
    let spent = u64::from(LIMIT) - remaining(&server.operator(), "p", "k").await;
    assert!(spent >= u64::from(first), "{spent} remembered, {first} were on disk");
    // One call may have been under way when the server went.
    assert!(spent <= allowed + 1, "{spent} remembered, {allowed} allowed");
}

/// Waits until the table has the key as it is in memory.
async fn kept_on_disk(server: &Running) -> bool {
    let metrics = || async {
        let text = server.client().get("/metrics").await.unwrap().body;
        String::from_utf8(text.to_vec()).unwrap()
    };
    wait::until("everything spent is kept", PATIENCE, async || {
        metrics().await.lines().any(|line| line == "weir_tier_unsaved 0")
    })
    .await;
    true
}

on_each_engine!(a_clean_stop_forgets_nothing, kill_9_forgets_what_was_spent_last_and_no_more);
