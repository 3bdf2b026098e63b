//! Servers with workers: accepted requests are completed, even if servers are killed.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::sync::Notify;
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::Client;
use weir_testkit::kafka::Broker;
use weir_testkit::postgres::{Database, Server};
use weir_testkit::process::{Builder, Weir};
use weir_testkit::{skip, wait};

use super::fixtures::{Api, BOTH, body, submit};
use crate::fixtures::{
    FAR_FUTURE, Running, Store, TEST_TIMEOUT, audit, on_each_engine, weir_with_long_timeouts,
};

/// All roles, and a lease that a test can wait for: a second longer than a call may take.
const WORKING: [(&str, &str); 4] = [
    ("WEIR_ROLES", "api,worker,reconciler"),
    ("WEIR_REQUEST_LEASE", "2s"),
    ("WEIR_REQUEST_CONNECT_TIMEOUT", "500ms"),
    ("WEIR_REQUEST_READ_TIMEOUT", "500ms"),
];

async fn working(store: Store) -> Api {
    Api { running: Running::start_with(store, &WORKING).await }
}

async fn wait_until_completed(caller: &Client, id: &str) {
    wait::until("the request is completed", TEST_TIMEOUT, async || {
        let answer = caller.get(&format!("/v1/requests/{id}?wait=1s")).await;
        answer.is_ok_and(|answer| answer.json()["status"] == "COMPLETED")
    })
    .await;
}

async fn an_accepted_request_is_completed_and_its_result_can_be_read(store: Store) {
    let api = working(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    wait_until_completed(&caller, &id).await;
    let request = caller.get(&format!("/v1/requests/{id}")).await.unwrap().json();
    assert_eq!(request["attempts"], 1);
    assert_eq!(request["result"], json!({"amount": 1, "card": "4111-secret"}), "the echo's answer");
    let line = api.wait_for_log("IN_PROGRESS->COMPLETED").await;
    assert!(line.contains(&id) && line.contains("acme"), "{line}");
    assert!(api.log_lines().iter().all(|line| !line.contains("4111-secret")), "payloads are not logged");
}

async fn a_hundred_concurrent_submissions_of_one_key_are_processed_once(store: Store) {
    let api = working(store).await;
    let caller = api.caller("acme");
    let body = body("same", "pay", json!(1));
    let answers = join_all((0..100).map(|_| submit(&caller, &body))).await;
    let ids: std::collections::BTreeSet<String> =
        answers.iter().map(|answer| answer.json()["requestId"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids.len(), 1);
    wait_until_completed(&caller, ids.first().unwrap()).await;
    // The log line is written after the work.
    let claims = || api.log_lines().iter().filter(|line| line.contains("ACCEPTED->IN_PROGRESS")).count();
    wait::until("the claim is logged", TEST_TIMEOUT, async || claims() >= 1).await;
    assert_eq!(claims(), 1);
}

async fn every_accepted_request_is_completed_after_kill_9(store: Store) {
    let mut api = working(store).await;
    let caller = api.caller("acme");
    let keys: Vec<String> = (0..200).map(|n| format!("k{n}")).collect();
    let first_answer = Arc::new(Notify::new());
    let submits = keys.iter().map(|key| {
        let (caller, body) = (caller.clone(), body(key, "pay", json!(key)));
        let first_answer = first_answer.clone();
        async move {
            let answer = caller.post("/v1/requests", &body).await.ok()?;
            first_answer.notify_one();
            (answer.status == 202).then(|| answer.json()["requestId"].as_str().unwrap().to_owned())
        }
    });
    let all = tokio::spawn(join_all(submits.collect::<Vec<_>>()));
    // Killed while requests are submitted and worked on: a worker may complete a request before its caller has the 202.
    api.wait_for_log("IN_PROGRESS->COMPLETED").await;
    first_answer.notified().await;
    api.running.weir.kill_9();
    let accepted: Vec<String> = all.await.unwrap().into_iter().flatten().collect();
    assert!(!accepted.is_empty());
    api.running.weir.restart().await;
    let caller = api.caller("acme");
    for id in &accepted {
        wait_until_completed(&caller, id).await;
    }
    wait::until("nothing is in flight", TEST_TIMEOUT, async || {
        audit(&api.operator()).await["request"]["inFlight"] == 0
    })
    .await;
}

on_each_engine!(
    an_accepted_request_is_completed_and_its_result_can_be_read,
    a_hundred_concurrent_submissions_of_one_key_are_processed_once,
    every_accepted_request_is_completed_after_kill_9,
);

const SECRET: &str = "development-only-jwt-secret-32-bytes";
const KEYS: &str = "a:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

fn on(database: &Database, broker: &str, roles: &str) -> Builder {
    weir_with_long_timeouts()
        .env("WEIR_STORE", database.url())
        .env("WEIR_BROKER", broker)
        .env("WEIR_KAFKA_GROUP", "request-work")
        .env("WEIR_JWT_SECRET", SECRET)
        .env("WEIR_REQUEST_KEYS", KEYS)
        .env("WEIR_ROLES", roles)
}

fn caller(weir: &Weir) -> Client {
    let claims = Claims {
        sub: "a@b.c".into(),
        exp: FAR_FUTURE,
        tenant_id: Some("acme".into()),
        scope: Some(BOTH.into()),
    };
    let token = jwt::sign(SECRET, &claims).unwrap();
    Client::new(weir.base_url()).with_header("authorization", &format!("Bearer {token}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_kafka_a_job_is_published_after_its_commit_or_by_the_reconciler_when_kafka_is_back() {
    if skip("postgres") || skip("kafka") {
        return;
    }
    let mut broker = Broker::private();
    let database = Server::shared().database("request_kafka").await;
    let api = on(&database, &broker.url(), "api,reconciler").spawn().await;
    let caller = caller(&api);
    wait::until("Kafka answers", TEST_TIMEOUT, async || caller.get("/health").await.unwrap().status == 200)
        .await;
    assert_eq!(submit(&caller, &body("first", "pay", json!(1))).await.json()["status"], "ACCEPTED");
    broker.stop().await;
    let stranded = submit(&caller, &body("stranded", "pay", json!(1))).await;
    assert_eq!((stranded.status, &stranded.json()["status"]), (202, &json!("PENDING_ENQUEUE")));
    let id = stranded.json()["requestId"].as_str().unwrap().to_owned();
    broker.start().await;
    wait::until("the reconciler has published it", Duration::from_secs(60), async || {
        caller.get(&format!("/v1/requests/{id}")).await.unwrap().json()["status"] == "ACCEPTED"
    })
    .await;
    let worker = on(&database, &broker.url(), "worker").spawn().await;
    wait_until_completed(&caller, &id).await;
    drop(worker);
}
