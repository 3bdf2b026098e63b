//! `/v1/requests/{requestId}/callback`.

use futures_util::future::join_all;
use serde_json::json;
use weir_core::Timestamp;
use weir_core::webhook::{SigningSecret, sign};
use weir_testkit::http::Client;

use super::fixtures::{Api, KEYS, get, now, post_callback};
use crate::fixtures::{Store, audit, on_each_engine};

async fn a_signed_callback_ends_a_request_once(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    let done = json!({"status": "COMPLETED", "result": {"n": 1, "text": "ü\n"}});
    let early = api.call_back(&id, &done, now()).await;
    assert_eq!((early.status, &early.json()["code"]), (409, &json!("REQUEST_NOT_STARTED")));
    api.begin(&id).await;
    let taken = api.call_back(&id, &done, now()).await;
    assert_eq!((taken.status, taken.json()), (200, json!({"requestId": id, "status": "COMPLETED"})));
    let request = get(&caller, &id).await;
    assert_eq!((&request["status"], &request["result"]), (&json!("COMPLETED"), &done["result"]));
    assert_eq!((&request["failureCode"], &request["failureMessage"]), (&json!(null), &json!(null)));
    for late in [done.clone(), json!({"status": "FAILED", "failureCode": "X"})] {
        let again = api.call_back(&id, &late, now()).await;
        assert_eq!((again.status, &again.json()["status"]), (200, &json!("COMPLETED")));
    }
    assert_eq!(get(&caller, &id).await, request, "nothing has changed");
    let books = audit(&api.operator()).await;
    assert_eq!((&books["ok"], &books["request"]["completed"]), (&json!(true), &json!(1)), "{books}");
}

async fn a_failed_callback_stores_its_reason(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    api.begin(&id).await;
    let why = json!({"status": "FAILED", "failureCode": "NO_FUNDS", "failureMessage": "empty\u{0}account"});
    assert_eq!(api.call_back(&id, &why, now()).await.json()["status"], "FAILED_PERMANENT");
    let request = get(&caller, &id).await;
    assert_eq!(request["failureCode"], "NO_FUNDS");
    assert_eq!((&request["failureMessage"], &request["result"]), (&json!("empty account"), &json!(null)));
    let id = api.accepted(&caller, "k2").await;
    api.begin(&id).await;
    api.call_back(&id, &json!({"status": "FAILED"}), now()).await;
    assert_eq!(get(&caller, &id).await["failureCode"], "DOWNSTREAM_FAILED");
}

async fn an_unsigned_or_outdated_callback_is_401(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    api.begin(&id).await;
    let body = json!({"status": "COMPLETED"}).to_string();
    let own = SigningSecret::parse(api.secret("webhook.secret").trim()).ok().unwrap();
    let other = SigningSecret::parse("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD").ok().unwrap();
    let at = |offset: i64| Timestamp::from_micros(now().as_micros() + offset * 1_000_000);
    let good = |sent, body: &str| sign(&own, &id, sent, body.as_bytes());
    for (sent, signature) in [
        (now(), String::new()),
        (now(), "v1,AAAA".to_owned()),
        (now(), sign(&other, &id, now(), body.as_bytes())),
        (now(), sign(&own, "msg_2", now(), body.as_bytes())),
        (now(), good(now(), "{\"status\":\"FAILED\"}")),
        (at(-310), good(at(-310), &body)),
        (at(310), good(at(310), &body)),
        (now(), good(at(-20), &body)),
    ] {
        let refused = api.call_back_signed(&id, &body, sent, &signature).await;
        assert_eq!(
            (refused.status, &refused.json()["code"]),
            (401, &json!("UNAUTHENTICATED")),
            "{signature}"
        );
    }
    let unsigned = caller.post(&format!("/v1/requests/{id}/callback"), &json!({})).await.unwrap();
    assert_eq!(unsigned.status, 401, "a token is no signature");
    let nobody = "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10";
    assert_eq!(api.call_back_signed(nobody, &body, now(), "v1,AAAA").await.status, 401);
    for unknown in [nobody, "x"] {
        let answer = api.call_back(unknown, &json!({"status": "COMPLETED"}), now()).await;
        assert_eq!(answer.status, 404, "known only to whoever can sign");
    }
    assert_eq!(get(&caller, &id).await["status"], "IN_PROGRESS");
    let sent = now();
    let both = format!("v1,AAAA {}", good(sent, &body));
    assert_eq!(api.call_back_signed(&id, &body, sent, &both).await.status, 200);
}

async fn an_invalid_signed_callback_is_400(store: Store) {
    let api = Api::start(store).await;
    let id = api.accepted(&api.caller("acme"), "k").await;
    api.begin(&id).await;
    for (body, part) in [
        (json!({}), "status"),
        (json!({"status": "DONE"}), "status"),
        (json!({"status": 5}), "status"),
        (json!({"status": "FAILED", "failureCode": 5}), "failureCode"),
        (json!([]), "object"),
    ] {
        let answer = api.call_back(&id, &body, now()).await;
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.json()["message"].as_str().unwrap().contains(part), "{body}");
    }
}

async fn a_configured_secret_is_used_and_none_is_generated(store: Store) {
    let secret = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    let api = Api::start_with(store, &[("WEIR_WEBHOOK_SECRET", secret)]).await;
    assert!(!api.running.weir.data_dir().join("webhook.secret").exists());
    let id = api.accepted(&api.caller("acme"), "k").await;
    api.begin(&id).await;
    let (body, sent) = (json!({"status": "COMPLETED"}).to_string(), now());
    let signature = sign(&SigningSecret::parse(secret).ok().unwrap(), &id, sent, body.as_bytes());
    assert_eq!(api.call_back_signed(&id, &body, sent, &signature).await.status, 200);
}

async fn a_replaced_secret_is_valid_until_it_is_removed(store: Store) {
    let (new, old) = ("whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    let api = Api::start_with(store, &[("WEIR_WEBHOOK_SECRET", &format!("{new} {old}"))]).await;
    for (key, secret) in [("k1", new), ("k2", old)] {
        let id = api.accepted(&api.caller("acme"), key).await;
        api.begin(&id).await;
        let (body, sent) = (json!({"status": "COMPLETED"}).to_string(), now());
        let signature = sign(&SigningSecret::parse(secret).ok().unwrap(), &id, sent, body.as_bytes());
        assert_eq!(api.call_back_signed(&id, &body, sent, &signature).await.status, 200);
    }
}

async fn a_callback_is_valid_only_for_the_request_that_it_names(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let mut ids = Vec::new();
    for key in ["k1", "k2", "k3"] {
        let id = api.accepted(&caller, key).await;
        api.begin(&id).await;
        ids.push(id);
    }
    let [one, other, third] = &ids[..] else { panic!("{ids:?}") };
    let (named, bare) = (json!({"requestId": one, "status": "COMPLETED"}), json!({"status": "COMPLETED"}));
    for (webhook_id, body) in
        [("msg_1", &bare), (one.as_str(), &bare), ("msg_1", &named), (one.as_str(), &named), (other, &named)]
    {
        let refused = api.call_back_as(other, webhook_id, body, now()).await;
        let (status, code) = (refused.status, refused.json()["code"].clone());
        assert_eq!((status, code), (401, json!("UNAUTHENTICATED")), "{webhook_id}: {body}");
    }
    assert_eq!(get(&caller, other).await["status"], "IN_PROGRESS", "it is still open");
    assert_eq!(api.call_back_as(one, "msg_1", &named, now()).await.json()["status"], "COMPLETED");
    assert_eq!(api.call_back_as(other, other, &bare, now()).await.json()["status"], "COMPLETED");
    let upper = json!({"requestId": third.to_uppercase(), "status": "FAILED"});
    assert_eq!(api.call_back_as(third, "msg_1", &upper, now()).await.json()["status"], "FAILED_PERMANENT");
}

async fn a_tenants_webhook_secret_signs_no_callback(store: Store) {
    let api = Api::start(store).await;
    let secret = async |tenant: &str| {
        let answer = api.caller(tenant).get("/v1/webhook-secret").await.unwrap();
        assert_eq!((answer.status, answer.header("cache-control")), (200, Some("no-store")));
        answer.json()["secret"].as_str().unwrap().to_owned()
    };
    let (own, rivals) = (secret("acme").await, secret("rival").await);
    assert_ne!(own, rivals);
    assert_ne!(own, api.secret("webhook.secret").trim(), "the master is shown to nobody");
    assert_eq!(own, secret("acme").await);
    let id = api.accepted(&api.caller("acme"), "k").await;
    api.begin(&id).await;
    let (body, sent) = (json!({"status": "COMPLETED"}).to_string(), now());
    let forged = sign(&SigningSecret::parse(&own).ok().unwrap(), &id, sent, body.as_bytes());
    assert_eq!(api.call_back_signed(&id, &body, sent, &forged).await.status, 401);
}

/// The state of the request makes callbacks idempotent on every server, so that no server stores the ids of callbacks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_callback_repeated_at_two_servers_applies_once() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let secret = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    let settings = [("WEIR_WEBHOOK_SECRET", secret), ("WEIR_ROLES", "api"), KEYS];
    let api = Api::start_with(Store::Postgres, &settings).await;
    let second = api.running.second_with(&settings).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    api.begin(&id).await;
    let (secret, sent) = (SigningSecret::parse(secret).ok().unwrap(), now());
    let signed = |body: &str| (body.to_owned(), sign(&secret, &id, sent, body.as_bytes()));
    let messages = [signed(r#"{"status":"COMPLETED","result":1}"#), signed(r#"{"status":"FAILED"}"#)];
    let clients = [api.running.client(), Client::new(second.base_url())];
    let calls = clients.iter().flat_map(|client| messages.iter().map(move |message| (client, message)));
    let calls = calls
        .cycle()
        .take(40)
        .map(|(client, (body, signature))| post_callback(client, &id, &id, body, sent, signature));
    let answers = join_all(calls).await;
    let first = get(&caller, &id).await;
    assert!(["COMPLETED", "FAILED_PERMANENT"].contains(&first["status"].as_str().unwrap()), "{first}");
    for answer in &answers {
        assert_eq!(
            (answer.status, &answer.json()["status"]),
            (200, &first["status"]),
            "one of them was taken"
        );
    }
    let books = audit(&api.operator()).await;
    assert_eq!(books["ok"], true, "{books}");
}

on_each_engine!(
    a_signed_callback_ends_a_request_once,
    a_failed_callback_stores_its_reason,
    an_unsigned_or_outdated_callback_is_401,
    an_invalid_signed_callback_is_400,
    a_configured_secret_is_used_and_none_is_generated,
    a_replaced_secret_is_valid_until_it_is_removed,
    a_callback_is_valid_only_for_the_request_that_it_names,
    a_tenants_webhook_secret_signs_no_callback,
);
