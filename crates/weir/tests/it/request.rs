//! Request over HTTP: submissions, reads, waiting, callbacks, dead letters, rollout and workers. Except in [`work`], servers
//! have only the role `api`: without workers a request keeps its status until a test changes it.

mod auth;
mod callback;
mod cancel;
mod crash;
mod dead;
mod fixtures;
mod https;
mod keys;
mod operators;
mod rotation;
mod stored_form;
mod tenants;
mod watch;
mod work;

use futures_util::future::join_all;
use http::Method;
use serde_json::{Value, json};

use self::fixtures::{Api, body, submit};
use crate::fixtures::{Store, audit, on_each_engine};

async fn equal_payloads_in_any_notation_are_one_request(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let first = submit(&caller, &body("k", "pay", json!({"amount": 1, "to": ["a", {"b": null}]}))).await;
    assert_eq!((first.status, first.header("idempotent-replayed")), (202, None), "{:?}", first.body);
    let receipt = first.json();
    assert_eq!((&receipt["status"], receipt.as_object().unwrap().len()), (&json!("ACCEPTED"), 3));
    for notation in [
        r#"{"idempotencyKey":"k","requestType":"pay","payload":{"amount":1,"to":["a",{"b":null}]}}"#,
        r#"{ "payload" : { "to" : [ "a" , {"b":null} ], "amount" : 1.0 }, "requestType":"pay", "idempotencyKey":"k" }"#,
        r#"{"idempotencyKey":"k","requestType":"p\u0061y","payload":{"amount":10e-1,"to":["\u0061",{"b":null}]}}"#,
    ] {
        let again = api.submit_text(&caller, notation).await;
        assert_eq!((again.status, again.header("idempotent-replayed")), (202, Some("true")), "{notation}");
        assert_eq!(again.json(), receipt, "{notation}");
    }
    for (kind, payload) in [
        ("pay", json!({"amount": 2, "to": ["a", {"b": null}]})),
        ("refund", json!({"amount": 1, "to": ["a", {"b": null}]})),
        ("pay", json!(null)),
    ] {
        let other = submit(&caller, &body("k", kind, payload)).await;
        assert_eq!((other.status, &other.json()["code"]), (409, &json!("IDEMPOTENCY_PAYLOAD_CONFLICT")));
    }
    let same_key = submit(&api.caller("other"), &body("k", "pay", json!("of another tenant"))).await;
    assert_eq!(same_key.status, 202);
    assert_ne!(same_key.json()["requestId"], receipt["requestId"]);
    let books = audit(&api.operator()).await;
    let request = &books["request"];
    assert_eq!(
        (&books["ok"], &request["accepted"], &request["inFlight"]),
        (&json!(true), &json!(2), &json!(2))
    );
    assert_eq!((&request["jobs"], &request["difference"]), (&json!(2), &json!(0)));
}

async fn a_hundred_concurrent_equal_submissions_are_one_request(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let body = body("k", "pay", json!({"amount": 1}));
    let answers = join_all((0..100).map(|_| submit(&caller, &body))).await;
    assert!(answers.iter().all(|answer| answer.status == 202), "{answers:?}");
    let first = answers[0].json()["requestId"].clone();
    assert!(answers.iter().all(|answer| answer.json()["requestId"] == first));
    let new = answers.iter().filter(|answer| answer.header("idempotent-replayed").is_none()).count();
    assert_eq!(new, 1);
    let books = audit(&api.operator()).await;
    assert_eq!((&books["ok"], &books["request"]["accepted"]), (&json!(true), &json!(1)), "{books}");
}

async fn the_idempotency_key_may_be_in_the_header_and_must_agree_with_the_body(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let send = async |header: &str, key: Option<&str>| {
        let mut body = json!({"requestType": "pay", "payload": 1});
        if let Some(key) = key {
            body["idempotencyKey"] = json!(key);
        }
        let headers = [("content-type", "application/json"), ("idempotency-key", header)];
        caller.request(Method::POST, "/v1/requests", &headers, body.to_string()).await.unwrap()
    };
    let first = send("\"k 1\"", None).await;
    assert_eq!(first.status, 202, "{:?}", first.body);
    for (header, key) in [("k 1", None), ("\"k 1\"", Some("k 1")), ("k 1", Some("k 1"))] {
        let again = send(header, key).await;
        assert_eq!((again.status, &again.json()["requestId"]), (202, &first.json()["requestId"]), "{header}");
    }
    for (header, key) in [("k 2", Some("k 1")), ("\"open", None), ("", None)] {
        let refused = send(header, key).await;
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!("INVALID_REQUEST")), "{header}");
    }
}

async fn an_invalid_submission_is_400_and_names_the_field(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let with = |payload: &str| format!(r#"{{"idempotencyKey":"k","requestType":"pay","payload":{payload}}}"#);
    let long = "x".repeat(256);
    for (text, field) in [
        (r#"{"idempotencyKey":"k","requestType":"pay"}"#.to_owned(), "payload"),
        (r#"{"requestType":"pay","payload":1}"#.to_owned(), "idempotencyKey"),
        (r#"{"idempotencyKey":"","requestType":"pay","payload":1}"#.to_owned(), "idempotencyKey"),
        (r#"{"idempotencyKey":5,"requestType":"pay","payload":1}"#.to_owned(), "idempotencyKey"),
        (r#"{"idempotencyKey":"a\u0000","requestType":"pay","payload":1}"#.to_owned(), "idempotencyKey"),
        (format!(r#"{{"idempotencyKey":"{long}","requestType":"pay","payload":1}}"#), "idempotencyKey"),
        (r#"{"idempotencyKey":"k","payload":1}"#.to_owned(), "requestType"),
        (r#"{"idempotencyKey":"k","requestType":"","payload":1}"#.to_owned(), "requestType"),
        (r#"{"idempotencyKey":"k","requestType":null,"payload":1}"#.to_owned(), "requestType"),
        (with(&deep(10_000)), "payload"),
        (with(&deep(101)), "payload"),
        (with(r#"{"a":1,"a":2}"#), "payload"),
        (with(r#""\ud800""#), "payload"),
        (with("1e99999999999999999999"), "payload"),
        (with("{"), "not valid JSON"),
        (with("01"), "not valid JSON"),
        ("[]".to_owned(), "object"),
        (String::new(), "object"),
    ] {
        let answer = api.submit_text(&caller, &text).await;
        let shown = &text[..text.len().min(80)];
        assert_eq!((answer.status, &answer.json()["code"]), (400, &json!("INVALID_REQUEST")), "{shown}");
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains(field), "{shown}: {message}");
    }
    assert_eq!(api.submit_text(&caller, &with(&deep(100))).await.status, 202);
    let large = with(&format!("\"{}\"", "x".repeat(1 << 20)));
    assert_eq!(api.submit_text(&caller, &large).await.status, 413);
}

async fn a_callback_url_of_a_private_address_is_refused(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let mut body = body("k", "pay", json!(1));
    for url in
        ["ftp://example.com", "http://127.0.0.1/", "http://[::1]:80/x", "http://localhost/", "nonsense"]
    {
        body["callbackUrl"] = json!(url);
        let refused = submit(&caller, &body).await;
        assert_eq!(refused.status, 400, "{url}");
        assert!(refused.json()["message"].as_str().unwrap().contains("callbackUrl"));
    }
    body["callbackUrl"] = json!("https://example.com/done");
    assert_eq!(submit(&caller, &body).await.status, 202);
    let open = Api::start_with(store, &[("WEIR_REQUEST_WEBHOOK_ALLOW_PRIVATE", "true")]).await;
    body["callbackUrl"] = json!("http://127.0.0.1:9/");
    assert_eq!(submit(&open.caller("acme"), &body).await.status, 202);
}

async fn a_tenant_lists_its_own_requests_page_by_page(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let mut ids = Vec::new();
    for n in 0..7 {
        let answer = submit(&caller, &body(&format!("k{n}"), "pay", json!(n))).await;
        ids.push(answer.json()["requestId"].as_str().unwrap().to_owned());
    }
    submit(&api.caller("other"), &body("k", "pay", json!(1))).await;
    let (mut listed, mut path) = (Vec::new(), "/v1/requests?limit=3".to_owned());
    loop {
        let page = caller.get(&path).await.unwrap().json();
        let items = page["items"].as_array().unwrap();
        listed.extend(items.iter().map(|item| item["requestId"].as_str().unwrap().to_owned()));
        let Some(cursor) = page["nextCursor"].as_str() else { break };
        path = format!("/v1/requests?limit=3&cursor={cursor}");
    }
    // The newest first. Ids of the same millisecond are in any order, so ids are compared.
    ids.sort();
    ids.reverse();
    assert_eq!(listed, ids);
    let none = caller.get("/v1/requests?status=COMPLETED").await.unwrap().json();
    assert_eq!(none, json!({"items": [], "nextCursor": null}));
    let all = caller.get("/v1/requests?status=ACCEPTED").await.unwrap().json();
    assert_eq!(all["items"].as_array().unwrap().len(), 7);
    assert!(all["items"][0].get("payload").is_none() && all["items"][0].get("result").is_none());
    for bad in ["limit=0", "status=DONE", "cursor=x", "status="] {
        assert_eq!(caller.get(&format!("/v1/requests?{bad}")).await.unwrap().status, 400, "{bad}");
    }
}

async fn a_tenant_over_its_limit_is_429_with_retry_after(store: Store) {
    let api = Api::start_with(store, &[("WEIR_REQUEST_TENANT_LIMIT", "3")]).await;
    let caller = api.caller("acme");
    for n in 0..3 {
        let accepted = submit(&caller, &body(&format!("k{n}"), "pay", json!(n))).await;
        let left = (2 - n).to_string();
        assert_eq!((accepted.status, accepted.header("x-ratelimit-limit")), (202, Some("3")));
        assert_eq!(accepted.header("x-ratelimit-remaining"), Some(left.as_str()));
        assert_eq!(accepted.header("ratelimit-policy"), Some("\"request\";q=3;w=60"));
        let state = accepted.header("ratelimit").unwrap();
        assert!(state.starts_with(&format!("\"request\";r={left};t=")), "{state}");
        let reset: u64 = accepted.header("x-ratelimit-reset").unwrap().parse().unwrap();
        assert!((1..=60).contains(&reset), "{reset}");
    }
    let limited = submit(&caller, &body("k3", "pay", json!(3))).await;
    assert_eq!((limited.status, &limited.json()["code"]), (429, &json!("RATE_LIMITED")));
    let wait: u64 = limited.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");
    assert_eq!(limited.header("x-ratelimit-limit"), Some("3"));
    assert_eq!(limited.header("x-ratelimit-remaining"), Some("0"));
    assert_eq!(limited.header("ratelimit-policy"), Some("\"request\";q=3;w=60"));
    let again = submit(&caller, &body("k0", "pay", json!(0))).await;
    assert_eq!(
        (again.status, again.header("idempotent-replayed")),
        (202, Some("true")),
        "replays do not count"
    );
    assert_eq!(again.header("x-ratelimit-remaining"), Some("0"), "they say what is left");
    assert_eq!(submit(&api.caller("other"), &body("k", "pay", json!(1))).await.status, 202);
}

async fn rollout_changes_apply_at_once_and_name_the_reason(store: Store) {
    let api = Api::start(store).await;
    let (caller, operator) = (api.caller("acme"), api.operator());
    let rollout = async |change: Value| operator.put("/admin/request/rollout", &change).await.unwrap();
    let present = operator.get("/admin/request/rollout").await.unwrap().json();
    assert_eq!(
        present,
        json!({
            "processingEnabled": true, "acceptingEnabled": true, "reconcilerEnabled": true, "canaryPercent": 100
        })
    );
    let accepted = submit(&caller, &body("k", "pay", json!(1))).await.json();
    let off = rollout(json!({"processingEnabled": false})).await;
    assert_eq!(
        off.json(),
        json!({
            "processingEnabled": false, "acceptingEnabled": true, "reconcilerEnabled": true, "canaryPercent": 100
        })
    );
    let refused = submit(&caller, &body("k2", "pay", json!(1))).await;
    assert_eq!((refused.status, &refused.json()["code"]), (503, &json!("DEPENDENCY_UNAVAILABLE")));
    assert!(refused.json()["message"].as_str().unwrap().contains("switched requests off"));
    assert!(refused.header("retry-after").is_some());
    let path = format!("/v1/requests/{}", accepted["requestId"].as_str().unwrap());
    assert_eq!(caller.get(&path).await.unwrap().status, 200, "reads continue");
    rollout(json!({"processingEnabled": true, "canaryPercent": 0})).await;
    let refused = submit(&caller, &body("k2", "pay", json!(1))).await;
    assert_eq!(refused.status, 503);
    assert!(refused.json()["message"].as_str().unwrap().contains("tenant by tenant"));
    rollout(json!({"canaryPercent": 100})).await;
    assert_eq!(submit(&caller, &body("k2", "pay", json!(1))).await.status, 202);
    for bad in [json!({"canaryPercent": 101}), json!({"canaryPercent": "5"}), json!({"processingEnabled": 1})]
    {
        assert_eq!(rollout(bad.clone()).await.status, 400, "{bad}");
    }
    assert_eq!(caller.get("/admin/request/rollout").await.unwrap().status, 403, "a tenant is no operator");
}

async fn nothing_new_is_accepted_while_accepted_requests_are_finished(store: Store) {
    let api = Api::start(store).await;
    let (caller, operator) = (api.caller("acme"), api.operator());
    let (called, waiting) = (api.accepted(&caller, "a").await, api.accepted(&caller, "b").await);
    api.begin(&called).await;
    let off = operator.put("/admin/request/rollout", &json!({"acceptingEnabled": false})).await.unwrap();
    assert_eq!((off.status, &off.json()["acceptingEnabled"]), (200, &json!(false)));
    assert_eq!(off.json()["processingEnabled"], true, "workers go on");
    let refused = submit(&caller, &body("c", "pay", json!(1))).await;
    assert_eq!((refused.status, &refused.json()["code"]), (503, &json!("DEPENDENCY_UNAVAILABLE")));
    assert!(refused.header("retry-after").is_some());
    assert!(refused.json()["message"].as_str().unwrap().contains("no new requests"), "{:?}", refused.json());
    let read = caller.get(&format!("/v1/requests/{waiting}")).await.unwrap();
    assert_eq!((read.status, &read.json()["status"]), (200, &json!("ACCEPTED")));
    let done = api.call_back(&called, &json!({"status": "COMPLETED", "result": 1}), fixtures::now()).await;
    assert_eq!((done.status, &done.json()["status"]), (200, &json!("COMPLETED")), "callbacks go on");
    operator.put("/admin/request/rollout", &json!({"acceptingEnabled": true})).await.unwrap();
    assert_eq!(submit(&caller, &body("c", "pay", json!(1))).await.status, 202);
}

async fn metrics_and_logs_report_submissions_without_payloads(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme").with_header("x-request-id", "trace-42");
    let accepted = submit(&caller, &body("key-1", "pay", json!({"card": "4111-secret"}))).await.json();
    submit(&caller, &body("key-1", "pay", json!({"card": "4111-secret"}))).await;
    submit(&caller, &body("key-1", "pay", json!({"card": "another"}))).await;
    let metrics = api.operator().get("/metrics").await.unwrap();
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    for line in [
        "weir_request_accept_total{outcome=\"accepted\"} 1",
        "weir_request_accept_total{outcome=\"replayed\"} 1",
        "weir_request_accept_total{outcome=\"conflict\"} 1",
        "weir_request_accept_latency_seconds_count 3",
        "weir_idempotency_conflict_total 1",
        "weir_dlq_depth 0",
        "weir_lane_batch_size_sum{lane=\"request\"} 3",
    ] {
        assert!(text.contains(line), "{line} is not in:\n{text}");
    }
    let line = api.wait_for_log("request accepted").await;
    let line: Value = serde_json::from_str(&line).unwrap();
    for (field, value) in [
        ("httpRequestId", json!("trace-42")),
        ("requestId", accepted["requestId"].clone()),
        ("idempotencyKey", json!("key-1")),
        ("tenantId", json!("acme")),
        ("statusTransition", json!("NEW->ACCEPTED")),
        ("level", json!("INFO")),
    ] {
        assert_eq!(line[field], value, "{field} of {line}");
    }
    assert!(!api.log_lines().iter().any(|line| line.contains("4111-secret")));
    assert!(!api.stored_bytes_contain(b"4111-secret").await, "payloads are sealed");
}

on_each_engine!(
    equal_payloads_in_any_notation_are_one_request,
    a_hundred_concurrent_equal_submissions_are_one_request,
    the_idempotency_key_may_be_in_the_header_and_must_agree_with_the_body,
    an_invalid_submission_is_400_and_names_the_field,
    a_callback_url_of_a_private_address_is_refused,
    a_tenant_lists_its_own_requests_page_by_page,
    a_tenant_over_its_limit_is_429_with_retry_after,
    rollout_changes_apply_at_once_and_name_the_reason,
    nothing_new_is_accepted_while_accepted_requests_are_finished,
    metrics_and_logs_report_submissions_without_payloads,
);
