//! `POST /v1/requests/{requestId}/cancel`.

use http::Method;
use serde_json::{Value, json};
use weir_testkit::http::{Client, Response};

use super::fixtures::{Api, body, get, now, submit};
use crate::fixtures::{Store, audit, on_each_engine};

async fn cancel(caller: &Client, id: &str) -> Response {
    caller.request(Method::POST, &format!("/v1/requests/{id}/cancel"), &[], String::new()).await.unwrap()
}

async fn a_request_is_cancelled_once_and_stays_so(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let (waiting, called) = (api.accepted(&caller, "a").await, api.accepted(&caller, "b").await);
    api.begin(&called).await;
    for id in [&waiting, &called] {
        let cancelled = cancel(&caller, id).await;
        assert_eq!(
            (cancelled.status, cancelled.json()),
            (200, json!({"requestId": id, "status": "CANCELLED"}))
        );
        let request = get(&caller, id).await;
        assert_eq!(
            (&request["status"], &request["failureCode"], &request["result"]),
            (&json!("CANCELLED"), &json!("CANCELLED"), &Value::Null)
        );
        let again = cancel(&caller, id).await;
        assert_eq!((again.status, &again.json()["code"]), (409, &json!("ALREADY_FINAL")));
        assert!(again.json()["message"].as_str().unwrap().contains("is CANCELLED already"));
        assert_eq!(get(&caller, id).await, request);
    }
    let late = api.call_back(&called, &json!({"status": "COMPLETED", "result": 1}), now()).await;
    assert_eq!((late.status, &late.json()["status"]), (200, &json!("CANCELLED")), "it changes nothing");
    let again = submit(&caller, &body("a", "pay", json!({"amount": 1, "card": "4111-secret"}))).await;
    assert_eq!((again.status, &again.json()["status"]), (202, &json!("CANCELLED")), "the key stays used");
    let listed = caller.get("/v1/requests?status=CANCELLED").await.unwrap().json();
    assert_eq!(listed["items"].as_array().unwrap().len(), 2);
    let books = audit(&api.operator()).await;
    assert_eq!(
        (&books["ok"], &books["request"]["cancelled"], &books["request"]["jobs"]),
        (&json!(true), &json!(2), &json!(0)),
        "{books}"
    );
    if let Some(database) = &api.running.database {
        // A server of the version before reads these columns, and knows no other final status.
        let stored = database.query_strings("SELECT DISTINCT status, failure_code FROM request_record").await;
        let expected = ["FAILED_PERMANENT", "CANCELLED"].map(|text| Some(text.to_owned()));
        assert_eq!(stored, [expected.to_vec()]);
    }
    let line = api.wait_for_log("IN_PROGRESS->CANCELLED").await;
    assert!(line.contains(&called), "{line}");
}

async fn only_its_own_tenant_cancels_a_request_and_only_before_its_end(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    for other in [id.as_str(), "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10", "x"] {
        assert_eq!(cancel(&api.caller("other"), other).await.status, 404, "{other}");
    }
    assert_eq!(get(&caller, &id).await["status"], "ACCEPTED");
    api.begin(&id).await;
    api.call_back(&id, &json!({"status": "COMPLETED", "result": 7}), now()).await;
    let late = cancel(&caller, &id).await;
    assert_eq!((late.status, &late.json()["code"]), (409, &json!("ALREADY_FINAL")));
    assert_eq!(get(&caller, &id).await["result"], 7);
    let dead = api.accepted(&caller, "dead").await;
    api.bury(&dead).await;
    assert_eq!(cancel(&caller, &dead).await.status, 409);
}

async fn a_waiting_caller_hears_of_a_cancellation_at_once(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let path = format!("/v1/requests/{id}?wait=30s");
    let (changed, cancelled) = tokio::join!(caller.get(&path), cancel(&caller, &id));
    assert_eq!((cancelled.status, &changed.unwrap().json()["status"]), (200, &json!("CANCELLED")));
}

on_each_engine!(
    a_request_is_cancelled_once_and_stays_so,
    only_its_own_tenant_cancels_a_request_and_only_before_its_end,
    a_waiting_caller_hears_of_a_cancellation_at_once,
);
