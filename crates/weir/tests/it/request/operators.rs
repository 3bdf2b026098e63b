//! Requests of every tenant, for operators: `/admin/requests`, what has not ended and why, and cancelling many.

use serde_json::{Value, json};
use weir_testkit::http::Client;

use super::fixtures::{Api, body, get, submit};
use crate::fixtures::{Store, on_each_engine};

async fn accepted(caller: &Client, key: &str, kind: &str) -> String {
    let answer = submit(caller, &body(key, kind, json!({"amount": 1, "card": "4111"}))).await;
    answer.json()["requestId"].as_str().unwrap().to_owned()
}

fn ids(list: &Value) -> Vec<String> {
    list["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["requestId"].as_str().unwrap().to_owned())
        .collect()
}

async fn requests_of_every_tenant_are_listed_and_shown(store: Store) {
    let api = Api::start_with(store, &[("WEIR_REQUEST_SENSITIVE_FIELDS", "card")]).await;
    let (acme, other, operator) = (api.caller("acme"), api.caller("other"), api.operator());
    let (first, second) = (accepted(&acme, "a", "pay").await, accepted(&other, "b", "refund").await);
    let third = accepted(&acme, "c", "refund").await;
    api.bury(&third).await;
    let list =
        async |query: &str| ids(&operator.get(&format!("/admin/requests{query}")).await.unwrap().json());
    assert_eq!(list("").await, [third.clone(), second.clone(), first.clone()]);
    assert_eq!(list("?tenant=acme").await, [third.clone(), first.clone()]);
    assert_eq!(list("?type=refund").await, [third.clone(), second.clone()]);
    assert_eq!(list("?type=refund&tenant=other").await, [second.as_str()]);
    assert_eq!(list("?status=FAILED_RETRY_EXHAUSTED").await, [third.as_str()]);
    assert_eq!(list("?status=COMPLETED").await, Vec::<String>::new());
    let page = operator.get("/admin/requests?limit=2").await.unwrap().json();
    assert_eq!(list(&format!("?cursor={}", page["nextCursor"].as_str().unwrap())).await, [first.as_str()]);
    for bad in ["?status=DONE", "?limit=0", "?cursor=x", "?tenant=", "?type=%00"] {
        assert_eq!(operator.get(&format!("/admin/requests{bad}")).await.unwrap().status, 400, "{bad}");
    }
    let one = operator.get(&format!("/admin/requests/{first}")).await.unwrap().json();
    assert_eq!(
        (&one["tenantId"], &one["requestType"], &one["status"]),
        (&json!("acme"), &json!("pay"), &json!("ACCEPTED"))
    );
    assert_eq!(one["payload"], r#"{"amount":1,"card":"[REDACTED]"}"#);
    assert_eq!(one["traceId"].as_str().unwrap().len(), 32);
    assert_eq!((&one["job"]["state"], &one["job"]["downstream"]), (&json!("waiting"), &json!("")));
    let dead = operator.get(&format!("/admin/requests/{third}")).await.unwrap().json();
    assert_eq!((&dead["job"], &dead["failureCode"]), (&Value::Null, &json!("DOWNSTREAM_TIMEOUT")));
    for unknown in ["019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10", "x"] {
        assert_eq!(operator.get(&format!("/admin/requests/{unknown}")).await.unwrap().status, 404);
    }
}

async fn what_has_not_ended_says_why_and_many_can_be_cancelled(store: Store) {
    let api = Api::start(store).await;
    let (acme, other, operator) = (api.caller("acme"), api.caller("other"), api.operator());
    let (first, second) = (accepted(&acme, "a", "pay").await, accepted(&acme, "b", "refund").await);
    let of_other = accepted(&other, "c", "pay").await;
    let unfinished =
        async |query: &str| operator.get(&format!("/admin/requests/unfinished{query}")).await.unwrap().json();
    let all = unfinished("").await;
    assert_eq!(ids(&all), [first.clone(), second.clone(), of_other.clone()], "the longest due first");
    assert_eq!(all["partial"], json!(false));
    assert_eq!(all["items"][0]["job"]["state"], "waiting", "there is no worker");
    assert!(all["items"][0]["job"]["why"].as_str().unwrap().contains("no worker has taken it"), "{all}");
    assert_eq!(ids(&unfinished("?tenant=acme&type=refund").await), [second.as_str()]);
    assert_eq!(ids(&unfinished("?downstream=nowhere").await), Vec::<String>::new());
    assert_eq!(unfinished("?limit=2").await["partial"], json!(true));
    let cancel = async |body: Value| operator.post("/admin/requests/cancel", &body).await.unwrap();
    for bad in [json!({}), json!({"dryRun": true}), json!({"tenants": "acme"})] {
        assert_eq!(cancel(bad.clone()).await.status, 400, "{bad}");
    }
    let matched = cancel(json!({"tenant": "acme", "dryRun": true})).await.json();
    assert_eq!(matched, json!({"matched": 2, "cancelled": 0, "partial": false}));
    assert_eq!(ids(&unfinished("").await).len(), 3, "a dry run changes nothing");
    let cancelled = cancel(json!({"tenant": "acme", "type": "pay"})).await.json();
    assert_eq!(cancelled, json!({"matched": 1, "cancelled": 1, "partial": false}));
    assert_eq!(get(&acme, &first).await["status"], "CANCELLED");
    assert_eq!(ids(&unfinished("").await), [second, of_other]);
}

async fn dead_letters_are_grouped_by_error(store: Store) {
    let api = Api::start(store).await;
    let (acme, operator) = (api.caller("acme"), api.operator());
    let groups = async |query: &str| operator.get(&format!("/admin/dlq/groups{query}")).await.unwrap().json();
    assert_eq!(groups("").await, json!({"groups": [], "scanned": 0, "partial": false, "others": 0}));
    for (key, kind) in [("a", "pay"), ("b", "pay"), ("c", "refund")] {
        api.bury(&accepted(&acme, key, kind).await).await;
    }
    api.bury_message("00000000-0000-7000-8000-000000000001").await;
    let all = groups("").await;
    let shown: Vec<(&Value, &Value, &Value)> = all["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|group| (&group["topic"], &group["requestType"], &group["count"]))
        .collect();
    assert_eq!(shown[0], (&json!("requests"), &json!("pay"), &json!(2)), "{all}");
    assert_eq!(shown.len(), 3, "{all}");
    assert_eq!((&all["groups"][0]["error"], &all["scanned"]), (&json!("DOWNSTREAM_TIMEOUT"), &json!(4)));
    assert_eq!(all["groups"][0]["sample"]["tenantId"], "acme");
    assert_eq!(groups("?topic=requests&type=refund").await["scanned"], json!(1));
}

on_each_engine!(
    requests_of_every_tenant_are_listed_and_shown,
    what_has_not_ended_says_why_and_many_can_be_cancelled,
    dead_letters_are_grouped_by_error,
);
