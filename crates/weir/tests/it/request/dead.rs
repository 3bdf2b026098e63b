//! Dead letters of request: `/admin/dlq` and `weir dlq`.

use serde_json::{Value, json};

use super::fixtures::{Api, body, get, submit};
use crate::fixtures::{Store, audit, on_each_engine};

async fn dead_requests_are_listed_shown_replayed_and_discarded(store: Store) {
    let api = Api::start_with(store, &[("WEIR_REQUEST_SENSITIVE_FIELDS", "card")]).await;
    let (caller, operator) = (api.caller("acme"), api.operator());
    let mut ids = Vec::new();
    for n in 0..5 {
        let id = api.accepted(&caller, &format!("k{n}")).await;
        api.bury(&id).await;
        ids.push(id);
    }
    ids.sort();
    let all = operator.get("/admin/dlq").await.unwrap().json();
    let listed: Vec<_> = all["items"].as_array().unwrap().iter().map(|item| item["id"].clone()).collect();
    assert_eq!((json!(listed), &all["nextCursor"]), (json!(ids), &Value::Null));
    let one = operator.get(&format!("/admin/dlq/{}", ids[0])).await.unwrap();
    assert_eq!((one.status, &one.json()), (200, &all["items"][0]));
    let one = one.json();
    assert_eq!(
        (&one["topic"], &one["key"], &one["attempts"]),
        (&json!("requests"), &json!("acme"), &json!(5))
    );
    assert_eq!(
        (&one["reason"], &one["failureCode"]),
        (&json!("no answer in time"), &json!("DOWNSTREAM_TIMEOUT"))
    );
    assert_eq!(one["payload"], r#"{"amount":1,"card":"[REDACTED]"}"#);

    let page = operator.get("/admin/dlq?limit=2").await.unwrap().json();
    let cursor = page["nextCursor"].as_str().unwrap();
    assert_eq!(cursor, ids[1]);
    let rest = operator.get(&format!("/admin/dlq?limit=3&cursor={cursor}")).await.unwrap().json();
    assert_eq!((rest["items"].as_array().unwrap().len(), &rest["nextCursor"]), (3, &Value::Null));

    let discard = format!("/admin/dlq/{}", ids[0]);
    assert_eq!(operator.delete(&discard).await.unwrap().status, 204);
    assert_eq!(operator.delete(&discard).await.unwrap().status, 404);
    assert_eq!(operator.get(&discard).await.unwrap().status, 404);
    assert_eq!(get(&caller, &ids[0]).await["status"], "FAILED_RETRY_EXHAUSTED", "it stays failed");
    let replay = format!("/admin/dlq/{}/replay", ids[1]);
    assert_eq!(operator.post(&replay, &json!({})).await.unwrap().json(), json!({"replayed": 1}));
    assert_eq!(operator.post(&replay, &json!({})).await.unwrap().status, 404);
    let replayed = get(&caller, &ids[1]).await;
    assert_eq!((&replayed["status"], &replayed["attempts"]), (&json!("ACCEPTED"), &json!(0)));
    assert_eq!(replayed["failureCode"], Value::Null);
    let all = operator.post("/admin/dlq/replay", &json!({})).await.unwrap();
    assert_eq!(all.json(), json!({"matched": 3, "replayed": 3}));
    let books = audit(&operator).await;
    let request = &books["request"];
    assert_eq!((&books["ok"], &request["dead"], &request["jobs"]), (&json!(true), &json!(1), &json!(4)));
}

async fn messages_and_requests_are_one_list(store: Store) {
    let api = Api::start(store).await;
    let (caller, operator) = (api.caller("acme"), api.operator());
    let (first, last) = ("00000000-0000-7000-8000-000000000001", "ffffffff-0000-7000-8000-000000000001");
    let request = api.accepted(&caller, "k").await;
    for message in [last, first] {
        api.bury_message(message).await;
    }
    api.bury(&request).await;
    let (mut listed, mut cursor) = (Vec::new(), String::new());
    for topic in ["sms-outbound", "requests", "sms-outbound"] {
        let page = operator.get(&format!("/admin/dlq?limit=1{cursor}")).await.unwrap().json();
        assert_eq!(page["items"][0]["topic"], topic);
        listed.push(page["items"][0]["id"].as_str().unwrap().to_owned());
        cursor = format!("&cursor={}", page["nextCursor"].as_str().unwrap_or("end"));
    }
    assert_eq!(listed, [first, &request, last]);
    assert_eq!(cursor, "&cursor=end");
    for id in &listed {
        let one = operator.get(&format!("/admin/dlq/{id}")).await.unwrap();
        assert_eq!((one.status, &one.json()["id"]), (200, &json!(id)));
    }
    let message = operator.get(&format!("/admin/dlq/{first}")).await.unwrap().json();
    assert!(message.get("tenantId").is_none(), "{message}");
    let replay = operator.post(&format!("/admin/dlq/{first}/replay"), &json!({})).await.unwrap();
    assert_eq!(replay.json(), json!({"replayed": 1}));
    assert_eq!(operator.delete(&format!("/admin/dlq/{last}")).await.unwrap().status, 204);
    let all = operator.post("/admin/dlq/replay", &json!({})).await.unwrap();
    assert_eq!(all.json(), json!({"matched": 1, "replayed": 1}));
    assert_eq!(operator.get("/admin/dlq").await.unwrap().json()["items"], json!([]));
}

async fn dead_letters_are_filtered_and_replayed_by_the_same_filter(store: Store) {
    let api = Api::start(store).await;
    let (acme, other, operator) = (api.caller("acme"), api.caller("other"), api.operator());
    let send = async |caller, key: &str, kind: &str| {
        let answer = submit(caller, &body(key, kind, json!(1))).await;
        let id = answer.json()["requestId"].as_str().unwrap().to_owned();
        api.bury(&id).await;
        id
    };
    let pay = send(&acme, "a", "pay").await;
    let refund = send(&acme, "b", "refund").await;
    let of_other = send(&other, "c", "pay").await;
    let message = "00000000-0000-7000-8000-000000000001";
    api.bury_message(message).await;
    let mut of_acme = vec![pay.clone(), refund.clone()];
    of_acme.sort();
    let mut requests = vec![pay.clone(), refund.clone(), of_other.clone()];
    requests.sort();
    let all = [vec![message.to_owned()], requests.clone()].concat();
    let listed = async |query: &str| -> Vec<String> {
        let page = operator.get(&format!("/admin/dlq?{query}")).await.unwrap().json();
        page["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_owned()).collect()
    };
    for (query, expected) in [
        ("", all.clone()),
        ("topic=requests", requests.clone()),
        ("topic=sms-outbound", vec![message.to_owned()]),
        ("topic=nothing", vec![]),
        ("tenant=acme", of_acme.clone()),
        ("type=pay&tenant=acme", vec![pay.clone()]),
        ("error=DOWNSTREAM_TIMEOUT&type=refund", vec![refund.clone()]),
        ("error=malformed", vec![message.to_owned()]),
        ("error=DOWNSTREAM", vec![]),
        ("since=2020-01-01T00:00:00Z", all.clone()),
        ("until=2020-01-01T00:00:00Z", vec![]),
        ("since=2100-01-01T00:00:00Z", vec![]),
    ] {
        assert_eq!(listed(query).await, expected, "{query}");
    }
    let page = operator.get("/admin/dlq?tenant=acme&limit=1").await.unwrap().json();
    assert_eq!((&page["items"][0]["id"], &page["nextCursor"]), (&json!(of_acme[0]), &json!(of_acme[0])));
    assert_eq!(listed(&format!("tenant=acme&limit=1&cursor={}", of_acme[0])).await, [of_acme[1].clone()]);
    assert_eq!(operator.get("/admin/dlq?since=yesterday").await.unwrap().status, 400);
    let replay = async |body: Value| operator.post("/admin/dlq/replay", &body).await.unwrap();
    let dry = replay(json!({"tenant": "acme", "dryRun": true})).await.json();
    assert_eq!(dry, json!({"matched": 2, "replayed": 0}));
    assert_eq!(replay(json!({"dryRun": true})).await.json(), json!({"matched": 4, "replayed": 0}));
    assert_eq!(listed("").await, all, "nothing has changed");
    let misspelled = replay(json!({"tenants": "acme"})).await;
    assert_eq!(misspelled.status, 400, "it must not replay all");
    let replayed = replay(json!({"tenant": "acme", "type": "pay"})).await.json();
    assert_eq!(replayed, json!({"matched": 1, "replayed": 1}));
    assert_eq!(get(&acme, &pay).await["status"], "ACCEPTED");
    let replayed = replay(json!({"topic": "sms-outbound", "error": "malformed"})).await.json();
    assert_eq!(replayed, json!({"matched": 1, "replayed": 1}));
    let mut left = vec![refund, of_other];
    left.sort();
    assert_eq!(listed("").await, left);
}

async fn a_list_truncates_payloads_and_a_single_dead_letter_does_not(store: Store) {
    let api = Api::start_with(store, &[("WEIR_REQUEST_SENSITIVE_FIELDS", "card")]).await;
    let (caller, operator) = (api.caller("acme"), api.operator());
    let message = "00000000-0000-7000-8000-000000000001";
    let text = "ü".repeat(100_000);
    api.bury_message_with(message, &text).await;
    let large = json!({"card": "4111", "text": "x".repeat(900_000)});
    let medium = json!({"card": "4111", "text": "x".repeat(3_000)});
    let mut ids = vec![message.to_owned()];
    for payload in [&large, &medium] {
        let answer = submit(&caller, &body(&format!("k{}", ids.len()), "pay", payload.clone())).await;
        let id = answer.json()["requestId"].as_str().unwrap().to_owned();
        api.bury(&id).await;
        ids.push(id);
    }
    let list = operator.get("/admin/dlq").await.unwrap();
    assert!(list.body.len() < 10_000, "{} bytes", list.body.len());
    assert!(!String::from_utf8_lossy(&list.body).contains("4111"));
    let items = list.json()["items"].clone();
    let beginnings =
        ["ü".repeat(1_024), String::new(), format!(r#"{{"card":"[REDACTED]","text":"{}"#, "x".repeat(995))];
    for (n, beginning) in beginnings.iter().enumerate() {
        let item = items.as_array().unwrap().iter().find(|item| item["id"] == ids[n]).unwrap();
        assert_eq!((&item["truncated"], &item["payload"]), (&json!(true), &json!(beginning)), "{n}");
    }
    let redacted = |payload: &Value| format!(r#"{{"card":"[REDACTED]","text":{}}}"#, payload["text"]);
    for (id, whole) in ids.iter().zip([text, redacted(&large), redacted(&medium)]) {
        let one = operator.get(&format!("/admin/dlq/{id}")).await.unwrap().json();
        assert_eq!((&one["truncated"], &one["payload"]), (&json!(false), &json!(whole)), "{id}");
    }
    let listed: Value = serde_json::from_str(&dlq(&api, &["list", "--json"]).1).unwrap();
    assert_eq!(listed["items"], items);
    let (_, shown, _) = dlq(&api, &["show", &ids[1]]);
    assert!(shown.len() > 900_000, "{} bytes", shown.len());
}

/// Runs `weir dlq` against the server and returns what it printed.
fn dlq(api: &Api, arguments: &[&str]) -> (bool, String, String) {
    let data = api.running.weir.data_dir().to_str().unwrap().to_owned();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_weir"));
    command.arg("dlq").args(arguments).args(["--url", &api.running.weir.base_url(), "--data", &data]);
    let output = command.env_remove("WEIR_ADMIN_KEY").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_lists_replays_and_discards() {
    let api = Api::start(Store::Embedded).await;
    let caller = api.caller("acme");
    let (one, other) = (api.accepted(&caller, "k1").await, api.accepted(&caller, "k2").await);
    assert_eq!(dlq(&api, &["list"]).1, "0 dead letters\n");
    api.bury(&one).await;
    api.bury(&other).await;
    let (_, table, _) = dlq(&api, &["list"]);
    assert!(table.starts_with("ID ") && table.contains(&one) && table.contains(&other), "{table}");
    assert!(table.ends_with("2 dead letters\n"), "{table}");
    let (_, page, _) = dlq(&api, &["list", "--limit", "1"]);
    assert!(page.ends_with("1 dead letters; there are more (--limit)\n"), "{page}");
    let listed: Value = serde_json::from_str(&dlq(&api, &["list", "--json"]).1).unwrap();
    assert_eq!(listed["items"].as_array().unwrap().len(), 2);
    let (_, shown, _) = dlq(&api, &["show", &one]);
    assert!(shown.contains("DOWNSTREAM_TIMEOUT") && shown.contains("amount"), "{shown}");
    let shown: Value = serde_json::from_str(&dlq(&api, &["show", &one, "--json"]).1).unwrap();
    assert_eq!(shown["id"], json!(one));
    let (_, none, _) = dlq(&api, &["list", "--tenant", "other & co", "--type", "pay"]);
    assert_eq!(none, "0 dead letters\n");
    let (_, found, _) = dlq(&api, &["list", "--tenant", "acme", "--topic", "requests"]);
    assert!(found.ends_with("2 dead letters\n"), "{found}");
    let (_, counted, _) = dlq(&api, &["replay", "--type", "pay", "--dry-run"]);
    assert_eq!(counted, "2 match; nothing was replayed (--dry-run)\n");
    assert_eq!(dlq(&api, &["replay", "--tenant", "other"]).1, "0 replayed\n");
    assert!(!dlq(&api, &["replay", "--all", "--tenant", "acme"]).0);
    assert_eq!(dlq(&api, &["replay", &one]).1, "1 replayed\n");
    assert_eq!(dlq(&api, &["discard", &other]).1, "1 discarded\n");
    assert_eq!(dlq(&api, &["replay", "--all"]).1, "0 replayed\n");
    let (ok, _, error) = dlq(&api, &["discard", &other]);
    assert!(!ok && error.contains("No dead letter has the id"), "{error}");
    assert!(!dlq(&api, &["replay"]).0 && !dlq(&api, &["show", "../x"]).0);
    let elsewhere = std::process::Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["dlq", "list", "--data", "/nowhere"])
        .env_remove("WEIR_ADMIN_KEY")
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&elsewhere.stderr).contains("--data"), "{elsewhere:?}");
}

on_each_engine!(
    dead_requests_are_listed_shown_replayed_and_discarded,
    messages_and_requests_are_one_list,
    dead_letters_are_filtered_and_replayed_by_the_same_filter,
    a_list_truncates_payloads_and_a_single_dead_letter_does_not,
);
