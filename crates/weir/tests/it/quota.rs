//! `/api/config` and `/api/send`.

use std::time::Duration;

use futures_util::future::join_all;
use http::Method;
use serde_json::json;
use weir_testkit::http::{Client, Response};

use crate::fixtures::{
    InProcess, LONG_TIMEOUTS, Running, Store, audit, configure, message, on_each_engine, send_in_parallel,
};

async fn a_configuration_is_saved_shown_replaced_and_removed(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    let body = json!({"userId": "alice", "rateLimit": 5, "timeWindow": 10});
    let saved = client.post("/api/config", &body).await.unwrap();
    assert_eq!(saved.status, 200);
    let saved = saved.json();
    assert_eq!(saved["currentCount"], 0);
    assert!(saved["lastRefreshTime"].as_str().unwrap().ends_with('Z'));
    assert_eq!(client.get("/api/config/alice").await.unwrap().json(), saved);

    client.post("/api/send", &message("alice", "hi")).await.unwrap();
    assert_eq!(client.get("/api/config/alice").await.unwrap().json()["currentCount"], 1);

    let snake = json!({"user_id": "alice", "rate_limit": 7, "time_window": 20});
    let replaced = client.post("/api/config", &snake).await.unwrap().json();
    assert_eq!((&replaced["rateLimit"], &replaced["currentCount"]), (&json!(7), &json!(0)));

    assert_eq!(client.delete("/api/config/alice").await.unwrap().status, 204);
    assert_eq!(client.delete("/api/config/alice").await.unwrap().status, 404);
    assert_eq!(client.get("/api/config/alice").await.unwrap().status, 404);
    assert_eq!(client.post("/api/send", &message("alice", "hi")).await.unwrap().status, 404);
}

async fn a_send_is_answered_as_the_contract_says(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    configure(&client, "bob", 2, 1).await;
    let sent = client.post("/api/send", &json!({"user_id": "bob", "message": "hi"})).await.unwrap();
    assert_eq!(sent.status, 200);
    let body = sent.json();
    assert_eq!(
        (&body["status"], &body["userId"], &body["remaining"]),
        (&json!("QUEUED"), &json!("bob"), &json!(1))
    );
    assert_eq!(body["messageId"].as_str().unwrap().len(), 36);
    assert!(body["resetAt"].as_str().unwrap().ends_with('Z'));
    assert_eq!(sent.header("x-ratelimit-limit"), Some("2"));
    assert_eq!(sent.header("x-ratelimit-remaining"), Some("1"));
    assert_eq!(sent.header("ratelimit-policy"), Some("\"quota\";q=2;w=60"));

    client.post("/api/send", &message("bob", "hi")).await.unwrap();
    let denied = client.post("/api/send", &message("bob", "hi")).await.unwrap();
    assert_eq!(denied.status, 429);
    let error = denied.json();
    assert_eq!((&error["status"], &error["code"]), (&json!(429), &json!("RATE_LIMITED")));
    assert_eq!(error["error"], "Too Many Requests");
    let retry_after: u64 = denied.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&retry_after), "{retry_after}");
    assert_eq!(denied.header("x-ratelimit-reset").unwrap().parse::<u64>().unwrap(), retry_after);
    assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));

    let unknown = client.post("/api/send", &message("nobody", "hi")).await.unwrap();
    assert_eq!((unknown.status, unknown.json()["code"].clone()), (404, json!("NOT_FOUND")));
}

async fn exactly_50_of_400_parallel_sends_pass_a_limit_of_50(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    configure(&client, "carol", 50, 60).await;
    let counts = send_in_parallel(&[server.client()], "carol", 400).await;
    counts.expect(200, 50);
    counts.expect(429, 350);
    assert_eq!(client.get("/api/config/carol").await.unwrap().json()["currentCount"], 50);
    assert_eq!(audit(&server.operator()).await["quota"]["accepted"], 50);
}

async fn a_window_that_has_passed_is_refreshed_by_the_next_send(store: Store) {
    let server = InProcess::start(store).await;
    let client = &server.client;
    configure(client, "dave", 2, 1).await;
    server.clock.advance(Duration::from_secs(10));
    for expected in [200, 200, 429] {
        assert_eq!(client.post("/api/send", &message("dave", "x")).await.unwrap().status, expected);
    }
    server.clock.advance(Duration::from_micros(49_999_999));
    let denied = client.post("/api/send", &message("dave", "x")).await.unwrap();
    assert_eq!((denied.status, denied.header("retry-after")), (429, Some("1")));
    server.clock.advance(Duration::from_micros(1));
    assert_eq!(client.get("/api/config/dave").await.unwrap().json()["currentCount"], 0);
    let sent = client.post("/api/send", &message("dave", "x")).await.unwrap();
    assert_eq!((sent.status, sent.json()["remaining"].clone()), (200, json!(1)));
    let row = client.get("/api/config/dave").await.unwrap().json();
    assert_eq!((&row["currentCount"], &row["lastRefreshTime"]), (&json!(1), &json!("2026-01-01T00:01:00Z")));
    server.stop().await;
}

async fn any_user_id_of_the_contract_works_in_body_and_path(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    for (user, path) in [
        ("a/b c", "a%2Fb%20c"),
        ("ü☃", "%C3%BC%E2%98%83"),
        ("50%", "50%25"),
        ("o'\"neil\\", "o%27%22neil%5C"),
        (" padded ", "%20padded%20"),
    ] {
        configure(&client, user, 3, 1).await;
        let row = client.get(&format!("/api/config/{path}")).await.unwrap();
        assert_eq!((row.status, row.json()["userId"].clone()), (200, json!(user)));
    }
    let longest = "😀".repeat(255);
    configure(&client, &longest, 3, 1).await;
    assert_eq!(client.post("/api/send", &message(&longest, "x")).await.unwrap().status, 200);
}

async fn send_with_key(client: &Client, key: &str, user: &str, text: &str) -> Response {
    let headers = [("content-type", "application/json"), ("idempotency-key", key)];
    let body = message(user, text).to_string();
    client.request(Method::POST, "/api/send", &headers, body).await.expect("an answer")
}

async fn a_repeated_key_gets_the_same_answer_for_a_day(store: Store) {
    let server = InProcess::start(store).await;
    let client = &server.client;
    configure(client, "kim", 2, 1).await;
    let first = send_with_key(client, "order-1", "kim", "hello").await;
    assert_eq!((first.status, first.header("idempotent-replayed")), (200, None));
    server.clock.advance(Duration::from_secs(5));
    for key in ["order-1", "\"order-1\""] {
        let again = send_with_key(client, key, "kim", "hello").await;
        assert_eq!((again.status, &again.body), (200, &first.body), "the same answer");
        assert_eq!(again.header("idempotent-replayed"), Some("true"));
        assert_eq!(
            (again.header("x-ratelimit-remaining"), again.header("x-ratelimit-reset")),
            (Some("1"), Some("55"))
        );
    }
    let other = send_with_key(client, "order-1", "kim", "bye").await;
    assert_eq!((other.status, &other.json()["code"]), (409, &json!("IDEMPOTENCY_PAYLOAD_CONFLICT")));
    for bad in ["", "\"open", &"x".repeat(256)] {
        let refused = send_with_key(client, bad, "kim", "hello").await;
        assert_eq!(refused.status, 400, "{bad:?}");
        assert!(
            refused.json()["message"].as_str().unwrap().contains("Idempotency-Key"),
            "{:?}",
            refused.body
        );
    }
    assert_eq!(client.post("/api/send", &message("kim", "more")).await.unwrap().status, 200);
    // The second denial comes from memory. Neither hides the key, and a denial is not remembered.
    for _ in 0..2 {
        assert_eq!(client.post("/api/send", &message("kim", "more")).await.unwrap().status, 429);
    }
    assert_eq!(send_with_key(client, "order-2", "kim", "hello").await.status, 429);
    assert_eq!(send_with_key(client, "order-1", "kim", "hello").await.body, first.body);
    server.clock.advance(Duration::from_secs(60));
    assert_eq!(send_with_key(client, "order-2", "kim", "hello").await.status, 200);
    server.clock.advance(Duration::from_secs(86_400));
    let next_day = send_with_key(client, "order-1", "kim", "bye").await;
    assert_eq!((next_day.status, next_day.header("idempotent-replayed")), (200, None));
    assert_eq!(audit(&server.operator()).await["quota"]["accepted"], 4);
    server.stop().await;
}

async fn a_key_is_one_message_however_many_send_it_and_is_not_stored_as_it_is(store: Store) {
    let server = Running::start_with(store, &LONG_TIMEOUTS).await;
    let client = server.client();
    configure(&client, "lee", 100, 60).await;
    let answers = join_all((0..50).map(|_| send_with_key(&client, "secret-key", "lee", "hello"))).await;
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.body == answers[0].body));
    let replayed = answers.iter().filter(|answer| answer.header("idempotent-replayed").is_some()).count();
    assert_eq!(replayed, 49);
    assert_eq!(client.get("/api/config/lee").await.unwrap().json()["currentCount"], 1);
    assert_eq!(audit(&server.operator()).await["quota"]["accepted"], 1);
    let stored = match &server.database {
        Some(database) => {
            let select =
                "SELECT encode(key_hash, 'escape') || encode(message_hash, 'escape') FROM quota_idempotency";
            database
                .query_strings(select)
                .await
                .into_iter()
                .flatten()
                .flatten()
                .collect::<String>()
                .into_bytes()
        }
        None => {
            let file = rusqlite::Connection::open(server.weir.data_dir().join("weir.db")).unwrap();
            let select = "SELECT key_hash, message_hash FROM quota_idempotency";
            let read = |row: &rusqlite::Row<'_>| Ok([row.get::<_, Vec<u8>>(0)?, row.get(1)?].concat());
            file.query_row(select, [], read).unwrap()
        }
    };
    assert!(!stored.is_empty());
    for text in ["secret-key", "hello", "lee"] {
        assert!(!stored.windows(text.len()).any(|window| window == text.as_bytes()), "{text} is stored");
    }
}

async fn keep_count_changes_limits_without_a_new_window(store: Store) {
    let server = InProcess::start(store).await;
    let client = &server.client;
    configure(client, "mia", 5, 1).await;
    for _ in 0..3 {
        client.post("/api/send", &message("mia", "x")).await.unwrap();
    }
    let before = client.get("/api/config/mia").await.unwrap().json();
    server.clock.advance(Duration::from_secs(30));
    let body = json!({"userId": "mia", "rateLimit": 2, "timeWindow": 1, "keepCount": true});
    let kept = client.post("/api/config", &body).await.unwrap().json();
    assert_eq!(
        (&kept["rateLimit"], &kept["currentCount"]),
        (&json!(2), &json!(3)),
        "the count stays above the limit"
    );
    assert_eq!(kept["lastRefreshTime"], before["lastRefreshTime"]);
    let denied = client.post("/api/send", &message("mia", "x")).await.unwrap();
    assert_eq!((denied.status, denied.header("retry-after")), (429, Some("30")));
    assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));
    assert_eq!(audit(&server.operator()).await["ok"], true);
    let raised = json!({"user_id": "mia", "rate_limit": 4, "time_window": 1, "keep_count": true});
    client.post("/api/config", &raised).await.unwrap();
    for expected in [200, 429] {
        assert_eq!(client.post("/api/send", &message("mia", "x")).await.unwrap().status, expected);
    }
    server.stop().await;
}

async fn quotas_are_listed_page_by_page(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    assert_eq!(client.get("/api/config").await.unwrap().json(), json!({"items": [], "nextCursor": null}));
    for user in ["b/2", "a 1", "ü3", "d4", "c&5"] {
        configure(&client, user, 9, 1).await;
        client.post("/api/send", &message(user, "x")).await.unwrap();
    }
    let (mut users, mut path) = (Vec::new(), "/api/config?limit=2".to_owned());
    loop {
        let page = client.get(&path).await.unwrap();
        assert_eq!(page.status, 200);
        let page = page.json();
        for item in page["items"].as_array().unwrap() {
            assert_eq!(item["currentCount"], 1, "{item}");
            users.push(item["userId"].as_str().unwrap().to_owned());
        }
        let Some(cursor) = page["nextCursor"].as_str() else { break };
        let cursor: String = url::form_urlencoded::byte_serialize(cursor.as_bytes()).collect();
        path = format!("/api/config?limit=2&cursor={cursor}");
    }
    assert_eq!(users, ["a 1", "b/2", "c&5", "d4", "ü3"]);
    for bad in ["limit=0", "limit=1001", "cursor=", "cursor=%0A"] {
        assert_eq!(client.get(&format!("/api/config?{bad}")).await.unwrap().status, 400, "{bad}");
    }
}

on_each_engine!(
    a_repeated_key_gets_the_same_answer_for_a_day,
    a_key_is_one_message_however_many_send_it_and_is_not_stored_as_it_is,
    keep_count_changes_limits_without_a_new_window,
    quotas_are_listed_page_by_page,
    a_configuration_is_saved_shown_replaced_and_removed,
    a_send_is_answered_as_the_contract_says,
    exactly_50_of_400_parallel_sends_pass_a_limit_of_50,
    a_window_that_has_passed_is_refreshed_by_the_next_send,
    any_user_id_of_the_contract_works_in_body_and_path,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_on_one_postgres_share_one_limit() {
    if weir_testkit::skip("postgres") {
        return;
    }
    let first = Running::start(Store::Postgres).await;
    let second = first.second().await;
    let clients = [first.client(), Client::new(second.base_url())];
    configure(&clients[0], "erin", 50, 60).await;
    let counts = send_in_parallel(&clients, "erin", 400).await;
    counts.expect(200, 50);
    counts.expect(429, 350);
    assert_eq!(clients[1].get("/api/config/erin").await.unwrap().json()["currentCount"], 50);
}

#[tokio::test]
async fn every_response_has_a_request_id() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    for (method, path) in [(Method::GET, "/nowhere"), (Method::PUT, "/api/send"), (Method::GET, "/livez")] {
        let accepted = client.request(method.clone(), path, &[("x-request-id", "abc-1")], "").await.unwrap();
        assert_eq!(accepted.header("x-request-id"), Some("abc-1"));
        let replaced = client.request(method, path, &[("x-request-id", "a b<script>")], "").await.unwrap();
        assert_eq!(replaced.header("x-request-id").unwrap().len(), 36);
    }
}
