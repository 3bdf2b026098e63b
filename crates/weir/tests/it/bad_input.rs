//! Invalid input is answered with what is wrong, and never with 500.

use ::http::Method;
use serde_json::{Value, json};
use weir_testkit::http::{self, Client, Response};

use crate::fixtures::{Running, Store, configure, on_each_engine};

async fn post(client: &Client, path: &str, content_type: &str, body: impl Into<Vec<u8>>) -> Response {
    let headers = [("content-type", content_type)];
    client.request(Method::POST, path, &headers, body.into()).await.expect("a response")
}

fn expect_error(response: &Response, status: u16, code: &str, part: &str) {
    let body = response.json();
    assert_eq!(response.status, status, "{body}");
    assert_eq!((&body["status"], &body["code"]), (&json!(status), &json!(code)), "{body}");
    assert!(body["message"].as_str().unwrap().contains(part), "{body} does not mention {part:?}");
    for field in ["error", "timestamp"] {
        assert!(body[field].is_string(), "{body}");
    }
}

async fn a_wrong_field_is_400_and_named(store: Store) {
    let server = Running::start(store).await;
    let client = server.client();
    let config = |field: &str, value: Value| {
        let mut body = json!({"userId": "u", "rateLimit": 5, "timeWindow": 5});
        body[field] = value;
        body
    };
    let too_long = "x".repeat(256);
    let mut cases = vec![
        ("/api/config", json!({"rateLimit": 5, "timeWindow": 5}), "userId"),
        ("/api/config", json!({"userId": "u", "timeWindow": 5}), "rateLimit"),
        ("/api/config", json!({"userId": "u", "rateLimit": 5}), "timeWindow"),
        ("/api/send", json!({"message": "m"}), "userId"),
        ("/api/send", json!({"userId": "u"}), "message"),
        ("/api/send", json!({"userId": "u", "message": ""}), "message"),
        ("/api/send", json!({"userId": "u", "message": null}), "message"),
        ("/api/send", json!({"userId": "u", "message": 5}), "message"),
        ("/api/send", json!({"userId": "", "message": "m"}), "userId"),
        ("/api/send", json!({"userId": too_long, "message": "m"}), "userId"),
        ("/api/send", json!({"userId": "a\u{0}b", "message": "m"}), "userId"),
    ];
    for bad in
        [json!(null), json!(5), json!(""), json!(too_long), json!("a\nb"), json!([]), json!({}), json!(true)]
    {
        cases.push(("/api/config", config("userId", bad), "userId"));
    }
    for field in ["rateLimit", "timeWindow"] {
        for bad in [
            json!(0),
            json!(-1),
            json!(1.5),
            json!("5"),
            json!(null),
            json!(true),
            json!([5]),
            json!(2_147_483_648_u64),
            json!(i64::MIN),
            json!(u64::MAX),
            json!(1e300),
        ] {
            cases.push(("/api/config", config(field, bad), field));
        }
    }
    for (path, body, field) in cases {
        let response = client.post(path, &body).await.unwrap();
        expect_error(&response, 400, "INVALID_REQUEST", field);
    }
    let digits = "9".repeat(400);
    let body = format!(r#"{{"userId":"u","rateLimit":{digits},"timeWindow":5}}"#);
    let response = post(&client, "/api/config", "application/json", body).await;
    assert_eq!(response.status, 400, "{:?}", response.body);
    assert_eq!(client.get("/api/config/u").await.unwrap().status, 404, "nothing was saved");
}

on_each_engine!(a_wrong_field_is_400_and_named);

#[tokio::test]
async fn a_body_that_is_not_a_json_object_is_400() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    let deep = "[".repeat(100_000);
    let deep_field = format!(r#"{{"userId":{}"#, "[".repeat(100_000));
    for body in [
        "",
        " ",
        "{",
        "{]",
        "null",
        "5",
        "\"text\"",
        "[]",
        r#"["u",5,5]"#,
        "nonsense",
        "{\"userId\":\"\\ud800\"}",
        r#"{"userId":"u","rateLimit":5,"timeWindow":5} trailing"#,
        "{\"userId\":\"u\"\u{0}}",
        &deep,
        &deep_field,
    ] {
        let response = post(&client, "/api/config", "application/json", body).await;
        expect_error(&response, 400, "INVALID_REQUEST", "");
    }
    let invalid_utf8 = b"{\"userId\":\"\xff\xfe\",\"rateLimit\":5,\"timeWindow\":5}".to_vec();
    expect_error(
        &post(&client, "/api/config", "application/json", invalid_utf8).await,
        400,
        "INVALID_REQUEST",
        "",
    );
    let twice = r#"{"userId":"u","user_id":"v","rateLimit":5,"timeWindow":5}"#;
    expect_error(
        &post(&client, "/api/config", "application/json", twice).await,
        400,
        "INVALID_REQUEST",
        "userId",
    );
}

#[tokio::test]
async fn a_wrong_content_type_is_415_and_every_spelling_of_json_is_accepted() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    let body = r#"{"userId":"u","rateLimit":5,"timeWindow":5}"#;
    for wrong in
        ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", "", "multipart/form-data"]
    {
        let response = post(&client, "/api/config", wrong, body).await;
        expect_error(&response, 415, "UNSUPPORTED_MEDIA_TYPE", "application/json");
    }
    let missing = client.request(Method::POST, "/api/config", &[], body).await.unwrap();
    expect_error(&missing, 415, "UNSUPPORTED_MEDIA_TYPE", "application/json");
    for right in ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"] {
        assert_eq!(post(&client, "/api/config", right, body).await.status, 200, "{right}");
    }
}

#[tokio::test]
async fn a_body_over_1_mib_is_413_with_or_without_a_content_length() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    configure(&client, "u", 5, 5).await;
    let body = |length: usize| json!({"userId": "u", "message": "x".repeat(length)}).to_string();
    assert_eq!(post(&client, "/api/send", "application/json", body(1_000_000)).await.status, 200);
    let response = post(&client, "/api/send", "application/json", body(1 << 20)).await;
    expect_error(&response, 413, "PAYLOAD_TOO_LARGE", "1048576");

    let chunk = format!("100000\r\n{}\r\n", "x".repeat(0x10_0000));
    let head = "POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    let response = http::raw(server.weir.addr(), format!("{head}{chunk}{chunk}0\r\n\r\n").as_bytes()).await;
    assert!(response.starts_with(b"HTTP/1.1 413"), "{}", String::from_utf8_lossy(&response));
}

#[tokio::test]
async fn unknown_paths_and_methods_are_flat_errors() {
    let server = Running::start(Store::Embedded).await;
    let client = server.client();
    expect_error(&client.get("/nowhere").await.unwrap(), 404, "NOT_FOUND", "/docs");
    let wrong_method = client.get("/api/send").await.unwrap();
    expect_error(&wrong_method, 405, "METHOD_NOT_ALLOWED", "Allow");
    assert_eq!(wrong_method.header("allow"), Some("POST"));
    expect_error(&client.get("/api/config/%ff").await.unwrap(), 400, "INVALID_REQUEST", "userId");
    expect_error(&client.get("/api/config/a%0ab").await.unwrap(), 400, "INVALID_REQUEST", "userId");
    expect_error(
        &client.get(&format!("/api/config/{}", "x".repeat(256))).await.unwrap(),
        400,
        "INVALID_REQUEST",
        "userId",
    );
}

#[tokio::test]
async fn malformed_http_neither_hangs_nor_stops_the_server() {
    let server = Running::start(Store::Embedded).await;
    for garbage in [
        &b"\x00\x01\x02\x03\r\n\r\n"[..],
        b"GET\r\n\r\n",
        b"POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Length: nonsense\r\n\r\n",
        b"POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /livez HTTP/9.9\r\n\r\n",
    ] {
        let response = http::raw(server.weir.addr(), garbage).await;
        assert!(
            response.is_empty() || response.starts_with(b"HTTP/1.1 4"),
            "{}",
            String::from_utf8_lossy(&response)
        );
    }
    assert_eq!(server.client().get("/livez").await.unwrap().status, 200);
}

#[tokio::test]
async fn a_caller_that_stops_sending_is_disconnected() {
    let weir = crate::fixtures::weir().env("WEIR_HTTP_READ_TIMEOUT", "300ms").spawn().await;
    for start in [
        &b""[..],
        b"GET /li",
        b"POST /api/send HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ] {
        // Returns when the server closes the connection, or after five seconds of silence.
        let started = std::time::Instant::now();
        http::raw(weir.addr(), start).await;
        assert!(
            started.elapsed() < std::time::Duration::from_secs(4),
            "{:?} was left open",
            String::from_utf8_lossy(start)
        );
    }
    let head =
        b"POST /api/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{";
    let response = http::raw(weir.addr(), head).await;
    assert!(response.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&response));
}
