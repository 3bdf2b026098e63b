//! The form in which requests are stored: nothing in the tables shows or confirms what a caller has sent, and a store changes to
//! that form while servers use it.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use futures_util::future::join_all;
use serde_json::{Value, json};
use weir_core::RequestType;
use weir_core::request::canonical::{CanonicalJson, Fingerprint};
use weir_server::auth::jwt::{self, Claims};
use weir_testkit::http::Client;
use weir_testkit::postgres::Database;
use weir_testkit::{redis, wait};

use super::fixtures::{Api, BOTH, KEYS, body, get, now, submit};
use crate::fixtures::{FAR_FUTURE, LONG_TIMEOUTS, Store, TEST_TIMEOUT, on_each_engine};

const SECRET: &str = "development-only-jwt-secret-32-bytes";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn the_tables_neither_show_nor_confirm_what_was_sent(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let payload = json!({"pin": "xyzzy"});
    let mut sent = body("order-2024-77", "pay", payload.clone());
    sent["callbackUrl"] = json!("https://example.com/hook-9f3a");
    let answer = submit(&caller, &sent).await;
    assert_eq!(answer.status, 202, "{:?}", answer.body);
    let id = answer.json()["requestId"].as_str().unwrap().to_owned();
    api.begin(&id).await;
    let failed =
        json!({"status": "FAILED", "failureCode": "DECLINED", "failureMessage": "card xyzzy declined"});
    assert_eq!(api.call_back(&id, &failed, now()).await.status, 200);
    let unkeyed = Fingerprint::new(
        &RequestType::parse("pay").unwrap(),
        &CanonicalJson::parse(payload.to_string().as_bytes()).unwrap(),
    );
    let rows = api.stored_rows().await;
    assert!(rows.contains(&id), "the rows are read: {rows}");
    for secret in ["order-2024-77", "xyzzy", "declined", "hook-9f3a"] {
        assert!(!rows.contains(secret) && !rows.contains(&hex(secret.as_bytes())), "{secret} is in {rows}");
    }
    assert!(!rows.contains(&hex(unkeyed.as_bytes())), "a guessed payload could be confirmed");
    let shown = get(&caller, &id).await;
    assert_eq!(
        (&shown["failureCode"], &shown["failureMessage"]),
        (&json!("DECLINED"), &json!("card xyzzy declined"))
    );
    let again = submit(&caller, &sent).await.json();
    assert_eq!(again["requestId"], json!(id), "the key is found all the same");
    sent["payload"] = json!({"pin": "other"});
    assert_eq!(submit(&caller, &sent).await.status, 409);
}

async fn texts_of_an_earlier_version_are_shown_as_they_are(store: Store) {
    let api = Api::start(store).await;
    let caller = api.caller("acme");
    let id = api.accepted(&caller, "k").await;
    api.bury(&id).await;
    assert_eq!(get(&caller, &id).await["failureMessage"], json!("no answer in time"));
    let letter = api.operator().get(&format!("/admin/dlq/{id}")).await.unwrap().json();
    assert_eq!(letter["reason"], json!("no answer in time"));
}

on_each_engine!(
    the_tables_neither_show_nor_confirm_what_was_sent,
    texts_of_an_earlier_version_are_shown_as_they_are,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_caches_what_the_store_has_and_no_more() {
    if weir_testkit::skip("postgres") || weir_testkit::skip("redis") {
        return;
    }
    let redis = redis::Server::private(&redis::Options::default());
    let api = Api::start_with(Store::Postgres, &[("WEIR_CACHE", redis.url())]).await;
    let caller = api.caller("acme");
    let mut sent = body("order-2024-77", "pay", json!({"pin": "4711"}));
    sent["callbackUrl"] = json!("https://example.com/hook-9f3a");
    let id = submit(&caller, &sent).await.json()["requestId"].as_str().unwrap().to_owned();
    api.begin(&id).await;
    let failed = json!({"status": "FAILED", "failureMessage": "card 4711 declined"});
    assert_eq!(api.call_back(&id, &failed, now()).await.status, 200);
    let mut cached = String::new();
    wait::until("the request is cached with its end", TEST_TIMEOUT, async || {
        assert_eq!(get(&caller, &id).await["failureMessage"], json!("card 4711 declined"));
        let keys = redis.command(&["KEYS", &format!("*{id}*")]).await.texts();
        cached.clear();
        for key in keys {
            if let Ok(value) = redis.try_command(&["GET", &key]).await {
                cached += &value.text();
            }
        }
        cached.contains("FAILED_PERMANENT")
    })
    .await;
    for secret in ["order-2024-77", "4711", "declined", "hook-9f3a"] {
        assert!(!cached.contains(secret), "{secret} is in {cached}");
    }
}

/// The settings of two servers that take the same tokens and do not fail when the machine is busy.
pub(super) fn settings() -> Vec<(&'static str, &'static str)> {
    LONG_TIMEOUTS.into_iter().chain([KEYS, ("WEIR_JWT_SECRET", SECRET)]).collect()
}

pub(super) fn caller_of(base_url: &str) -> Client {
    let claims = Claims {
        sub: "a@b.c".into(),
        exp: FAR_FUTURE,
        tenant_id: Some("acme".into()),
        scope: Some(BOTH.into()),
    };
    let token = jwt::sign(SECRET, &claims).unwrap();
    Client::new(base_url).with_header("authorization", &format!("Bearer {token}"))
}

/// A server on a database that looks like one of the version before.
async fn upgraded() -> Api {
    let api = Api::start_with(Store::Postgres, &settings()).await;
    let database = api.running.database.as_ref().unwrap();
    database.execute("UPDATE weir_schema_state SET created_version = 13, oldest_version = 9").await;
    database.execute("DELETE FROM weir_schema WHERE version > 13").await;
    api
}

async fn stored_keys(api: &Api) -> Vec<String> {
    let database = api.running.database.as_ref().unwrap();
    let keys = database.query_strings("SELECT idempotency_key FROM idempotency_record").await;
    keys.into_iter().flatten().flatten().collect()
}

/// Submits a number under a key of its own; returns the id and whether it was submitted before.
pub(super) async fn submit_number(caller: &Client, n: usize) -> (Value, bool) {
    let answer = submit(caller, &body(&format!("key-{n}"), "pay", json!(n))).await;
    assert_eq!(answer.status, 202, "{:?}", answer.body);
    let is_replayed = answer.header("idempotent-replayed").is_some();
    (answer.json()["requestId"].clone(), is_replayed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgraded_store_changes_its_form_under_load_and_accepts_each_key_once() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let api = upgraded().await;
    let old = caller_of(&api.running.weir.base_url());
    let (before, _) = submit_number(&old, 0).await;
    assert_eq!(stored_keys(&api).await, ["key-0"], "servers of the version before must find it");
    let mut newest = settings();
    newest.extend([("WEIR_POSTGRES_FORMATS", "newest"), ("WEIR_ROLES", "api")]);
    let second = api.running.second_with(&newest).await;
    let new = caller_of(&second.base_url());
    // The first of these submissions changes the form; the first server does not know that yet.
    let both = (1..=60).map(|n| {
        let (old, new) = (&old, &new);
        async move { tokio::join!(submit_number(old, n), submit_number(new, n)) }
    });
    let mut accepted = 0;
    for ((id, replayed), (other_id, other_replayed)) in join_all(both).await {
        assert_eq!(id, other_id);
        accepted += usize::from(!replayed) + usize::from(!other_replayed);
    }
    assert_eq!(accepted, 60, "each key is accepted once");
    for caller in [&old, &new] {
        assert_eq!(submit_number(caller, 0).await, (before.clone(), true), "a key of before is found");
    }
    let database = api.running.database.as_ref().unwrap();
    let records = database.query_strings("SELECT count(*)::text FROM request_record").await;
    assert_eq!(records, [[Some("61".to_owned())]]);
    let insert_plain = "
        DO $$ BEGIN
            INSERT INTO idempotency_record VALUES ('acme', 'plain', '', gen_random_uuid(), now());
            RAISE EXCEPTION 'a key was stored as it is';
        EXCEPTION WHEN check_violation THEN NULL; END $$";
    database.execute(insert_plain).await;
    let versions = database.query_strings("SELECT max(version)::text FROM weir_schema").await;
    assert_eq!(versions, [[Some("14".to_owned())]], "servers of the version before do not start any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_delays_the_new_form_and_no_submission() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let api = upgraded().await;
    let mut newest = settings();
    newest.extend([("WEIR_POSTGRES_FORMATS", "newest"), ("WEIR_ROLES", "api")]);
    let server = api.running.second_with(&newest).await;
    let caller = caller_of(&server.base_url());
    let database = api.running.database.as_ref().unwrap();
    // Ends with an error when the test ends the session.
    let submit = async {
        submit_number(&caller, 0).await;
        assert_eq!(stored_keys(&api).await, ["key-0"], "it is accepted in the form of before");
        let delayed = |line: &str| line.contains("cannot be stored as keyed hashes yet");
        server.wait_for_log(delayed, TEST_TIMEOUT).await;
    };
    Box::pin(during_a_long_transaction(database, submit)).await;
    begins_at_last(&api, &caller).await;
    assert!(submit_number(&caller, 0).await.1, "the first is found all the same");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_refuses_no_submission_of_a_new_database() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let api = Api::start_with(Store::Postgres, &settings()).await;
    let caller = caller_of(&api.running.weir.base_url());
    let database = api.running.database.as_ref().unwrap();
    let submit = async {
        join_all((0..20).map(|n| submit_number(&caller, n))).await;
    };
    Box::pin(during_a_long_transaction(database, submit)).await;
    begins_at_last(&api, &caller).await;
    for n in 0..20 {
        assert!(submit_number(&caller, n).await.1, "key-{n} is found all the same");
    }
}

/// Waits for `work` while another session reads the keys in a transaction that does not end.
async fn during_a_long_transaction(database: &Database, work: impl Future<Output = ()>) {
    // Ends with an error when the test ends the session.
    let long = "BEGIN; LOCK TABLE idempotency_record IN ACCESS SHARE MODE; SELECT pg_sleep(600)";
    let hold = AssertUnwindSafe(database.execute(long)).catch_unwind();
    let work = async {
        wait::until("the lock is held", TEST_TIMEOUT, async || {
            let held = "SELECT 1 FROM pg_locks WHERE relation = 'idempotency_record'::regclass AND granted";
            !database.query_strings(held).await.is_empty()
        })
        .await;
        work.await;
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE query LIKE 'BEGIN; LOCK TABLE idempotency_record%' AND datname = current_database()";
        database.query_strings(end).await;
    };
    let (ended, ()) = tokio::join!(hold, work);
    assert!(ended.is_err());
}

/// Submits new keys until one is stored as a hash.
async fn begins_at_last(api: &Api, caller: &Client) {
    let mut next = 1_000;
    wait::until("the new form has begun", TEST_TIMEOUT, async || {
        submit_number(caller, next).await;
        next += 1;
        stored_keys(api).await.iter().any(|key| key.starts_with('\u{1}'))
    })
    .await;
}
