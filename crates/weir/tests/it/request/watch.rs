//! `?wait=` and `/v1/requests/{requestId}/events`: waiting callers are notified of changes on any server.

use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use weir_testkit::http::Client;
use weir_testkit::skip;

use super::fixtures::{Api, KEYS, get, now};
use crate::fixtures::{FAR_FUTURE, Store, TEST_TIMEOUT, on_each_engine};

/// Waits for the next change of a request. Returns its status, and how long that took.
async fn wait(caller: &Client, id: &str, span: &str) -> (Value, Duration) {
    let started = Instant::now();
    let answer = caller.get(&format!("/v1/requests/{id}?wait={span}")).await.unwrap();
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    (answer.json()["status"].clone(), started.elapsed())
}

async fn a_waiting_call_returns_at_a_change(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    api.begin(&id).await;
    let waiting = tokio::spawn({
        let (caller, id) = (caller.clone(), id.clone());
        async move { wait(&caller, &id, "20s").await }
    });
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert!(!waiting.is_finished(), "a wait may exceed the timeout of other calls");
    let changed = Instant::now();
    api.call_back(&id, &json!({"status": "COMPLETED", "result": 5}), now()).await;
    let (status, _) = waiting.await.unwrap();
    assert_eq!(status, "COMPLETED");
    assert!(changed.elapsed() < Duration::from_secs(2), "{:?}", changed.elapsed());
    let (status, took) = wait(&caller, &id, "20s").await;
    assert_eq!(status, "COMPLETED");
    assert!(took < Duration::from_secs(2), "a final request is returned at once: {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_by_another_process_ends_the_wait() {
    if skip("postgres") {
        return;
    }
    let api = Api::start(Store::Postgres).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let (waited, ()) = tokio::join!(wait(&caller, &id, "20s"), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        api.begin(&id).await;
    });
    assert_eq!(waited.0, "IN_PROGRESS");
    assert!(waited.1 < Duration::from_secs(5), "{:?}", waited.1);
}

async fn a_wait_without_a_change_is_answered_and_an_invalid_span_is_400(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let (status, took) = wait(&caller, &id, "300ms").await;
    assert_eq!(status, "ACCEPTED");
    assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(5), "{took:?}");
    assert_eq!(wait(&caller, &id, "0s").await.0, "ACCEPTED");
    for bad in ["", "10", "-1s", "soon", "1y"] {
        let answer = caller.get(&format!("/v1/requests/{id}?wait={bad}")).await.unwrap();
        assert_eq!(answer.status, 400, "{bad}");
        assert!(answer.json()["message"].as_str().unwrap().contains("wait"), "{bad}");
    }
}

/// The events of a stream that has ended.
fn events(body: &[u8]) -> Vec<Value> {
    let text = String::from_utf8(body.to_vec()).unwrap();
    let blocks = text.split("\n\n").filter(|block| block.contains("event: status"));
    let data = blocks.map(|block| block.lines().find_map(|line| line.strip_prefix("data: ")).unwrap());
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

async fn a_stream_has_every_status_and_ends_with_the_final_one(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let stream = tokio::spawn({
        let (caller, path) = (caller.clone(), format!("/v1/requests/{id}/events"));
        async move { caller.request(Method::GET, &path, &[], "").await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    api.begin(&id).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!stream.is_finished());
    api.call_back(&id, &json!({"status": "COMPLETED", "result": {"a": [1, 2]}}), now()).await;
    let answer = tokio::time::timeout(TEST_TIMEOUT, stream).await.unwrap().unwrap();
    assert_eq!(answer.status, 200);
    assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    let received = events(&answer.body);
    let statuses: Vec<_> = received.iter().map(|event| event["status"].as_str().unwrap()).collect();
    let expected = match store {
        // The embedded engine is not notified when another process, such as this test, writes to its file.
        Store::Embedded => &["ACCEPTED", "COMPLETED"][..],
        Store::Postgres => &["ACCEPTED", "IN_PROGRESS", "COMPLETED"],
    };
    assert_eq!(statuses, expected);
    assert_eq!(received.last(), Some(&get(&caller, &id).await));
    let final_one = caller.get(&format!("/v1/requests/{id}/events")).await.unwrap();
    assert_eq!(events(&final_one.body).len(), 1, "a final request is sent once, then the stream ends");
}

async fn a_stop_ends_streams_and_waits_cleanly(store: Store) {
    let mut api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let stream = tokio::spawn({
        let (caller, path) = (caller.clone(), format!("/v1/requests/{id}/events"));
        async move { caller.request(Method::GET, &path, &[], "").await.unwrap() }
    });
    let waiting = tokio::spawn(async move { wait(&caller, &id, "30s").await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    let started = Instant::now();
    api.running.weir.terminate();
    assert!(api.running.weir.wait(TEST_TIMEOUT).await.success());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(events(&stream.await.unwrap().body).len(), 1);
    assert_eq!(waiting.await.unwrap().0, "ACCEPTED");
}

on_each_engine!(
    a_waiting_call_returns_at_a_change,
    a_wait_without_a_change_is_answered_and_an_invalid_span_is_400,
    a_stream_has_every_status_and_ends_with_the_final_one,
    a_stop_ends_streams_and_waits_cleanly,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_callback_to_another_server_ends_the_wait_here() {
    if skip("postgres") {
        return;
    }
    let secret = ("WEIR_JWT_SECRET", "0123456789abcdef0123456789abcdef");
    let webhook = ("WEIR_WEBHOOK_SECRET", "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD");
    let api = Api::start_with(Store::Postgres, &[secret, webhook, KEYS]).await;
    let database = api.running.database.as_ref().unwrap();
    let second = crate::fixtures::weir()
        .env("WEIR_STORE", database.url())
        .env("WEIR_ROLES", "api")
        .env(secret.0, secret.1)
        .env(KEYS.0, KEYS.1)
        .spawn()
        .await;
    let claims = weir_server::auth::jwt::Claims {
        sub: "a".into(),
        exp: FAR_FUTURE,
        tenant_id: Some("acme".into()),
        scope: Some(super::fixtures::BOTH.into()),
    };
    let token = format!("Bearer {}", weir_server::auth::jwt::sign(secret.1, &claims).unwrap());
    let here = api.running.client().with_header("authorization", &token);
    let there = Client::new(second.base_url()).with_header("authorization", &token);
    let id = api.accepted(&here, "k").await;
    api.begin(&id).await;
    let body = json!({"status": "FAILED", "failureCode": "X"}).to_string();
    let (waited, answer) = tokio::join!(wait(&there, &id, "20s"), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let sent = now();
        let key = weir_core::webhook::SigningSecret::parse(webhook.1).ok().unwrap();
        let signature = weir_core::webhook::sign(&key, &id, sent, body.as_bytes());
        api.call_back_signed(&id, &body, sent, &signature).await
    });
    assert_eq!((answer.status, &waited.0), (200, &json!("FAILED_PERMANENT")));
    assert!(waited.1 < Duration::from_secs(5), "{:?}", waited.1);
}
