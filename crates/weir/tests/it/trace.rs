//! Traces and log lines: a caller's trace goes on wherever Weir calls, and the cause of a response is found by its ids.

use http::Method;
use serde_json::{Value, json};
use weir_core::TraceParent;
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::{Client, Response};
use weir_testkit::postgres::Server;
use weir_testkit::process::Weir;
use weir_testkit::proxy::Proxy;
use weir_testkit::raw_connection::{Head, Listener};
use weir_testkit::wait;

use crate::fixtures::{FAR_FUTURE, Running, Store, TEST_TIMEOUT, message, on_each_engine, operator, weir};

pub(crate) const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";
/// Not sampled, which is what Weir would not begin a trace with.
const FLAGS: &str = "00";
pub(crate) const STATE: &str = "vendor=1,other=2";

pub(crate) fn traceparent() -> String {
    format!("00-{TRACE}-{SPAN}-{FLAGS}")
}

/// A caller of tenant `acme` with the trace of the tests.
pub(crate) fn traced(weir: &Weir) -> Client {
    let secret = std::fs::read_to_string(weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims {
        sub: "a@b.c".into(),
        exp: FAR_FUTURE,
        tenant_id: Some("acme".into()),
        scope: Some("requests:create requests:read".into()),
    };
    let token = jwt::sign(&secret, &claims).unwrap();
    Client::new(weir.base_url())
        .with_header("authorization", &format!("Bearer {token}"))
        .with_header("traceparent", &traceparent())
        .with_header("tracestate", STATE)
}

/// Answers the next call to a listener and returns its head.
pub(crate) async fn answer_next(listener: &mut Listener, status: &str) -> Head {
    let mut call = listener.next().await;
    let head = call.head().await;
    let length = head.get("content-length").map_or(0, |length| length.parse().unwrap());
    call.bytes(length).await;
    call.send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")).await;
    call.finish().await;
    head
}

/// Checks that a call goes on with the trace of the tests, and returns its span.
fn span_of(head: &Head) -> String {
    let value = head.get("traceparent").expect("a traceparent").to_owned();
    let parent = TraceParent::parse(value.as_bytes()).expect("a valid traceparent");
    assert_eq!(parent.trace_id.to_string(), TRACE, "{value}");
    assert!(value.ends_with(&format!("-{FLAGS}")), "{value}");
    assert_eq!(head.get("tracestate"), Some(STATE));
    format!("{:?}", parent.span_id)
}

/// The log lines with this text, as JSON.
fn lines_with(weir: &Weir, text: &str) -> Vec<Value> {
    let lines = weir.log_lines().into_iter().filter(|line| line.contains(text));
    lines.map(|line| serde_json::from_str(&line).expect("a JSON log line")).collect()
}

async fn line_with(weir: &Weir, parts: &[&str]) -> Value {
    let is_wanted = |line: &str| parts.iter().all(|part| line.contains(part));
    serde_json::from_str(&weir.wait_for_log(is_wanted, TEST_TIMEOUT).await).expect("a JSON log line")
}

async fn a_request_keeps_its_trace_through_failure_restart_and_replay(store: Store) {
    let (mut downstream, mut receiver) = (Listener::start().await, Listener::start().await);
    let url = downstream.url();
    let settings = [
        ("WEIR_DOWNSTREAM", url.as_str()),
        ("WEIR_REQUEST_MAX_ATTEMPTS", "1"),
        ("WEIR_REQUEST_WEBHOOK_ALLOW_PRIVATE", "true"),
        ("WEIR_REQUEST_READ_TIMEOUT", "10s"),
    ];
    let mut running = Running::start_with(store, &settings).await;
    let submission = json!({
        "idempotencyKey": "k", "requestType": "pay", "payload": 1, "callbackUrl": receiver.url(),
    });
    let answer = traced(&running.weir).post("/v1/requests", &submission).await.unwrap();
    assert_eq!(answer.status, 202, "{:?}", answer.body);
    let id = answer.json()["requestId"].as_str().unwrap().to_owned();
    let accepted = line_with(&running.weir, &["request accepted", &id]).await;
    assert_eq!(accepted["httpRequestId"].as_str(), answer.header("x-request-id"));

    let mut spans = vec![SPAN.to_owned()];
    spans.push(span_of(&answer_next(&mut downstream, "500 Broken").await));
    spans.push(span_of(&answer_next(&mut receiver, "204 Fine").await));
    running.weir.kill_9();
    running.weir.restart().await;
    let replay = format!("/admin/dlq/{id}/replay");
    let replayed = operator(&running.weir).post(&replay, &json!({})).await.unwrap();
    assert_eq!(replayed.status, 200, "{:?}", replayed.body);
    spans.push(span_of(&answer_next(&mut downstream, "200 Done").await));
    spans.push(span_of(&answer_next(&mut receiver, "204 Fine").await));
    spans.sort();
    spans.dedup();
    assert_eq!(spans.len(), 5, "each hop has a span of its own: {spans:?}");

    for transition in [
        "NEW->ACCEPTED",
        "ACCEPTED->IN_PROGRESS",
        "IN_PROGRESS->FAILED_RETRY_EXHAUSTED",
        "FAILED_RETRY_EXHAUSTED->ACCEPTED",
        "IN_PROGRESS->COMPLETED",
    ] {
        let line = line_with(&running.weir, &[&format!("\"{transition}\""), &id]).await;
        assert_eq!((&line["traceId"], &line["tenantId"]), (&json!(TRACE), &json!("acme")), "{line}");
    }
    let replay_line = line_with(&running.weir, &["request replayed", &id]).await;
    assert_eq!(replay_line["httpRequestId"].as_str(), replayed.header("x-request-id"));
}

async fn a_conflict_is_one_line_with_its_ids(store: Store) {
    let running = Running::start_with(store, &[("WEIR_ROLES", "api")]).await;
    let caller = traced(&running.weir);
    let submission =
        |payload: u32| json!({"idempotencyKey": "k-1", "requestType": "pay", "payload": payload});
    assert_eq!(caller.post("/v1/requests", &submission(1)).await.unwrap().status, 202);
    let refused = caller.post("/v1/requests", &submission(2)).await.unwrap();
    assert_eq!(refused.status, 409);
    let line = line_with(&running.weir, &[refused.header("x-request-id").unwrap()]).await;
    assert_eq!((&line["traceId"], &line["tenantId"]), (&json!(TRACE), &json!("acme")), "{line}");
    assert_eq!(line["idempotencyKey"], "k-1");
}

on_each_engine!(
    a_request_keeps_its_trace_through_failure_restart_and_replay,
    a_conflict_is_one_line_with_its_ids,
);

/// Calls the AI service and returns the head that its upstream sees.
async fn forwarded(running: &Running, upstream: &mut Listener, headers: &[(&str, &str)]) -> Head {
    let client = traced(&running.weir);
    let call = client.request(Method::GET, "/api/v1/ai/x", headers, "");
    let (answer, head) = tokio::join!(call, answer_next(upstream, "200 OK"));
    assert_eq!(answer.unwrap().status, 200);
    head
}

#[tokio::test]
async fn an_ai_upstream_gets_the_trace_of_its_caller_or_a_new_one() {
    let mut upstream = Listener::start().await;
    let url = upstream.url();
    let running = Running::start_with(Store::Embedded, &[("WEIR_AI_UPSTREAM", &url)]).await;
    assert_ne!(span_of(&forwarded(&running, &mut upstream, &[]).await), SPAN);
    for malformed in ["", "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "00-0-0-0"] {
        let head = forwarded(&running, &mut upstream, &[("traceparent", malformed)]).await;
        let begun = TraceParent::parse(head.get("traceparent").unwrap().as_bytes()).unwrap();
        assert_ne!(begun.trace_id.to_string(), TRACE, "{malformed}");
        assert_eq!(head.get("tracestate"), None, "a state belongs to a trace: {malformed}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_line_behind_a_503_names_its_answer() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let server = Server::shared();
    let database = server.database("trace").await;
    let proxy = Proxy::start(server.addr()).await;
    let weir = weir().env("WEIR_STORE", database.url_via(proxy.addr())).spawn().await;
    let caller = traced(&weir);
    crate::fixtures::configure(&caller, "u", 1_000_000, 60).await;
    proxy.refuse();
    proxy.cut();
    let mut refused = None;
    wait::until("the outage is answered with 503", TEST_TIMEOUT, async || {
        let answer = caller.post("/api/send", &message("u", "m")).await.unwrap();
        refused = Some(answer).filter(|answer| answer.status == 503);
        refused.is_some()
    })
    .await;
    let refused: Response = refused.unwrap();
    let id = refused.header("x-request-id").unwrap();
    let cause = line_with(&weir, &[id]).await;
    assert_eq!(cause["message"], "the store is unavailable; answered 503", "{cause}");
    assert_eq!((&cause["httpRequestId"], &cause["traceId"]), (&json!(id), &json!(TRACE)), "{cause}");
    assert!(cause["error"].as_str().unwrap().contains("postgres"), "{cause}");
    assert_eq!(lines_with(&weir, id).len(), 1, "exactly one line");
}

/// A change by an operator: the call, what its log line says, a value of it, and a value before it.
type Change = (Method, &'static str, Value, &'static str, &'static str, Option<&'static str>);

fn changes() -> Vec<Change> {
    let product = json!({
        "sku": "W-1", "productName": "Widget", "initialStock": 5,
        "startTime": "2099-01-01T00:00:00.000Z", "endTime": "2099-01-02T00:00:00.000Z",
    });
    let policy = |limit: u32| json!({"kind": "fixed_window", "limit": limit, "window": "PT1M"});
    let tier = |limit: u32| json!({"requestsPerMinute": 11, "burstCapacity": 12, "dailyLimit": limit});
    let plan = |plan: &str| json!({"plan": plan});
    let quota = |limit: u32| json!({"userId": "alice", "rateLimit": limit, "timeWindow": 3});
    let slot = |max: u32| json!({"configName": "slow", "maxPerWindow": max, "windowSize": "PT4S"});
    let (post, put, delete) = (Method::POST, Method::PUT, Method::DELETE);
    let (stock, canary, none) = (json!({"initialStock": 7}), json!({"canaryPercent": 21}), Value::Null);
    let (products, sku) = ("/api/v1/products", "/api/v1/products/W-1");
    let (p1, free, bob) = ("/admin/policies/p1", "/admin/tiers/free", "/admin/subscriptions/bob");
    let (quotas, alice) = ("/api/config", "/api/config/alice");
    let (configs, slow) = ("/admin/rate-limit/config", "/admin/rate-limit/config/slow");
    let policy_changed = "a policy was changed";
    let plan_changed = "a subscription was changed";
    let quota_changed = "a quota was configured";
    let slot_changed = "a slot config was changed";
    let slot_ended = "a slot config was deactivated";
    let rollout_changed = "the rollout of request was changed";
    vec![
        (post.clone(), products, product, "a product was created", "Widget", None),
        (put.clone(), sku, stock, "a product was changed", "7", Some("initialStock=5")),
        (delete.clone(), sku, none.clone(), "a product was deleted", "W-1", Some("initialStock=7")),
        (put.clone(), p1, policy(5), policy_changed, "FixedWindow", None),
        (put.clone(), p1, policy(6), policy_changed, "6", Some("limit: 5")),
        (delete.clone(), p1, none.clone(), "a policy was deleted", "p1", Some("limit: 6")),
        (put.clone(), free, tier(13), "a tier was changed", "13", Some("limit")),
        (put.clone(), free, tier(14), "a tier was changed", "14", Some("13")),
        (put.clone(), bob, plan("PRO_MONTHLY"), plan_changed, "PRO_MONTHLY", None),
        (put.clone(), bob, plan("PRO_YEARLY"), plan_changed, "PRO_YEARLY", Some("PRO_MONTHLY")),
        (delete.clone(), bob, none.clone(), "a subscription was ended", "bob", Some("PRO_YEARLY")),
        (post.clone(), quotas, quota(17), quota_changed, "17", None),
        (post.clone(), quotas, quota(18), quota_changed, "18", Some("rateLimit=17")),
        (delete.clone(), alice, none.clone(), "a quota was deleted", "alice", Some("rateLimit=18")),
        (post.clone(), configs, slot(19), slot_changed, "19", None),
        (post, configs, slot(20), slot_changed, "20", Some("maxPerWindow=19")),
        (delete, slow, none, slot_ended, "slow", Some("maxPerWindow=20")),
        (put, "/admin/request/rollout", canary, rollout_changed, "21", Some("100")),
    ]
}

async fn expect_one_line(
    weir: &Weir,
    client: &Client,
    (method, path, body, said, value, before): Change,
) -> Value {
    let (headers, body) = match &body {
        Value::Null => (&[][..], String::new()),
        body => (&[("content-type", "application/json")][..], body.to_string()),
    };
    let answer = client.request(method.clone(), path, headers, body).await.unwrap();
    assert!(answer.status < 300, "{method} {path}: {:?}", answer.body);
    let id = answer.header("x-request-id").unwrap();
    let line = line_with(weir, &[id]).await;
    assert_eq!((&line["message"], &line["traceId"]), (&json!(said), &json!(TRACE)), "{method} {path}");
    assert!(line.to_string().contains(value), "{value} in {line}");
    match before {
        Some(before) => assert!(line["before"].as_str().unwrap().contains(before), "{before} in {line}"),
        None => assert_eq!(line["before"], Value::Null, "{line}"),
    }
    assert_eq!(lines_with(weir, id).len(), 1, "{method} {path}");
    line
}

#[tokio::test]
async fn each_change_by_an_operator_is_one_log_line() {
    // Anonymous callers may otherwise change quotas on a loopback address.
    let settings = [("WEIR_ROLES", "api"), ("WEIR_ALLOW_ANONYMOUS", "false")];
    let running = Running::start_with(Store::Embedded, &settings).await;
    let secret = std::fs::read_to_string(running.weir.data_dir().join("jwt.secret")).unwrap();
    let claims = Claims {
        sub: "a@b.c".into(),
        exp: FAR_FUTURE,
        tenant_id: Some("acme".into()),
        scope: Some("admin".into()),
    };
    let token = jwt::sign(&secret, &claims).unwrap();
    let by_token =
        Client::new(running.weir.base_url()).with_header("authorization", &format!("Bearer {token}"));
    let callers =
        [(running.operator(), json!("admin key"), Value::Null), (by_token, json!("admin"), json!("acme"))];
    for (client, scope, tenant) in callers {
        let client = client.with_header("traceparent", &traceparent());
        for change in changes() {
            let line = expect_one_line(&running.weir, &client, change).await;
            assert_eq!((&line["callerScope"], &line["tenantId"]), (&scope, &tenant), "{line}");
            assert!(!line.to_string().contains(&token), "no credentials: {line}");
        }
        // The next caller finds the rollout as it was.
        let rollout = client.put("/admin/request/rollout", &json!({"canaryPercent": 100})).await.unwrap();
        assert_eq!(rollout.status, 200);
    }
}
