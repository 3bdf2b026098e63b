//! `kill -9` at any time, and an unavailable store: requests answered with 202 are durable, and an outage is answered with
//! 503.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use weir_testkit::http::Client;
use weir_testkit::postgres::Server;
use weir_testkit::proxy::Proxy;
use weir_testkit::{skip, wait};

use super::fixtures::{Api, body, submit};
use crate::fixtures::{Running, Store, TEST_TIMEOUT, audit, on_each_engine, weir};

const CALLERS: usize = 16;

/// Submits until the server is down, and returns what was answered with 202.
async fn submit_until_down(client: Client, caller: usize, count: Arc<AtomicUsize>) -> Vec<(String, String)> {
    let mut accepted = Vec::new();
    for n in 0.. {
        let key = format!("{caller}-{n}");
        match client.post("/v1/requests", &body(&key, "pay", json!({"n": n}))).await {
            Ok(answer) if answer.status == 202 => {
                accepted.push((key, answer.json()["requestId"].as_str().unwrap().to_owned()));
                count.fetch_add(1, Ordering::SeqCst);
            }
            _ => break,
        }
    }
    accepted
}

async fn everything_answered_with_202_survives_kill_9(store: Store) {
    let mut api = Api::start(store).await;
    let count = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| tokio::spawn(submit_until_down(api.caller("acme"), caller, Arc::clone(&count))))
        .collect();
    wait::until("a few hundred are accepted", TEST_TIMEOUT, async || count.load(Ordering::SeqCst) > 300)
        .await;
    api.running.weir.kill_9();
    let mut accepted = Vec::new();
    for caller in callers {
        accepted.extend(caller.await.unwrap());
    }
    api.running.weir.restart().await;
    let caller = api.caller("acme");
    for (key, id) in &accepted {
        let n: u64 = key.split_once('-').unwrap().1.parse().unwrap();
        let again = submit(&caller, &body(key, "pay", json!({"n": n}))).await;
        assert_eq!((again.status, again.header("idempotent-replayed")), (202, Some("true")), "{key}");
        assert_eq!(again.json()["requestId"], json!(id));
    }
    let books = audit(&api.operator()).await;
    assert_eq!(books["ok"], true, "{books}");
    assert!(books["request"]["inFlight"].as_u64().unwrap() >= accepted.len() as u64, "{books}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_store_is_503_in_time_and_the_same_call_is_safe_afterwards() {
    if skip("postgres") {
        return;
    }
    let database = Server::shared().database("it").await;
    let proxy = Proxy::start(Server::shared().addr()).await;
    let weir =
        weir().env("WEIR_STORE", database.url_via(proxy.addr())).env("WEIR_ROLES", "api").spawn().await;
    let api = Api { running: Running { weir, database: Some(database) } };
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    proxy.black_hole();
    for n in 0..3 {
        for path in [None, Some(format!("/v1/requests/{id}")), Some("/v1/requests".to_owned())] {
            let started = Instant::now();
            let answer = match &path {
                None => submit(&caller, &body(&format!("k{n}"), "pay", json!(n))).await,
                Some(path) => caller.get(path).await.unwrap(),
            };
            let code = answer.json()["code"].clone();
            assert_eq!((answer.status, code), (503, json!("DEPENDENCY_UNAVAILABLE")), "{path:?}");
            assert!(started.elapsed() < Duration::from_secs(3), "{path:?} took {:?}", started.elapsed());
            assert!(answer.header("retry-after").is_some());
        }
        // Long enough for the cached rollout to be read again.
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    proxy.cut();
    proxy.pass();
    wait::until("service is back without a restart", TEST_TIMEOUT, async || {
        submit(&caller, &body("k0", "pay", json!(0))).await.status == 202
    })
    .await;
    assert_eq!(audit(&api.operator()).await["ok"], true);
}

on_each_engine!(everything_answered_with_202_survives_kill_9);
