//! Heads in both directions: which headers are passed on, added and removed.

use http::Method;
use weir_testkit::raw_connection::{Head, Listener};

use super::fixtures::{TestGateway, answer, error};
use crate::fixtures::{Running, Store};

#[tokio::test]
async fn target_and_headers_are_passed_on_unchanged() {
    let mut gateway = TestGateway::start().await;
    let line = "PATCH /api/v1/ai/models/org%2Fname//x;v=1/%E4?a=1&&b=%20+%2e&a=..";
    let headers = ["Content-Length: 2", "Accept-Encoding: br", "X-Twice: 1", "X-Twice: 2"];
    let mut caller = gateway.start_request(line, &headers).await;
    caller.send("hi").await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!(head.line(), format!("{line} HTTP/1.1"));
    assert_eq!(head.get("accept-encoding"), Some("br"));
    assert_eq!(head.all("x-twice"), ["1", "2"]);
    assert_eq!(head.get("content-length"), Some("2"));
    upstream.expect("hi").await;
    upstream.send("HTTP/1.1 307 Elsewhere\r\nLocation: /other?x=%2F\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\r\n\x1f\x00").await;
    let head = caller.head().await;
    assert_eq!(head.line(), "HTTP/1.1 307 Elsewhere");
    assert_eq!(head.get("location"), Some("/other?x=%2F"), "redirects are left to the caller");
    assert_eq!(head.get("content-encoding"), Some("gzip"));
    assert_eq!(head.all("set-cookie"), ["a=1", "b=2"]);
    caller.expect("\x1f\x00").await;
}

#[tokio::test]
async fn the_upstream_gets_the_callers_identity_and_no_credentials_of_weir() {
    let mut gateway = TestGateway::start().await;
    let headers = [
        "X-Forwarded-For: 9.9.9.9",
        "X-Forwarded-Proto: https",
        "X-Weir-User: root",
        "X-Admin-Key: secret-key",
        "X-Request-Id: trace-1",
        "Via: 1.1 edge",
        "Cookie: c=1",
    ];
    let mut caller = gateway.start_request("GET /api/v1/ai/x", &headers).await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    let expected = [
        ("host", Some(&gateway.upstream.url()[7..])),
        ("x-forwarded-for", Some("127.0.0.1")),
        ("x-forwarded-proto", Some("http")),
        ("x-forwarded-host", Some("gate.example")),
        ("x-weir-user", Some("a@b.c")),
        ("x-request-id", Some("trace-1")),
        ("via", Some("1.1 edge, 1.1 weir")),
        ("cookie", Some("c=1")),
        ("authorization", None),
        ("x-admin-key", None),
        ("content-length", None),
        ("transfer-encoding", None),
    ];
    for (name, value) in expected {
        assert_eq!(head.get(name), value, "{name} of {head:?}");
    }
    upstream.send(answer("")).await;
    assert_eq!(caller.head().await.get("x-request-id"), Some("trace-1"));
}

#[tokio::test]
async fn headers_that_imitate_weirs_or_rewrite_the_path_are_removed() {
    for (trust, passes) in [("false", false), ("true", true)] {
        let mut gateway = TestGateway::start_with(&[("WEIR_AI_TRUST_FORWARDED", trust)]).await;
        let headers = [
            "X_Weir_User: root",
            "X_Forwarded_For: 9.9.9.9",
            "X.Admin.Key: key",
            "Content_Length: 5",
            "X-Weir-Plan: pro",
            "X-Original-URL: /admin",
            "X-Rewrite-URL: /admin",
            "Proxy: http://9.9.9.9/",
            "X-Real-IP: 9.9.9.9",
            "Forwarded: for=9.9.9.9",
            "X-Forwarded-Port: 443",
            "X_Own: kept",
        ];
        let _caller = gateway.start_request("GET /api/v1/ai/x", &headers).await;
        let head = gateway.upstream.next().await.head().await;
        for name in ["x_weir_user", "x_forwarded_for", "x.admin.key", "content_length"] {
            assert_eq!(head.get(name), None, "{head:?}");
        }
        for name in ["x-weir-plan", "x-original-url", "x-rewrite-url", "proxy"] {
            assert_eq!(head.get(name), None, "{head:?}");
        }
        for name in ["x-real-ip", "forwarded", "x-forwarded-port"] {
            assert_eq!(head.get(name).is_some(), passes, "{name} of {head:?}");
        }
        assert_eq!((head.get("x-weir-user"), head.get("x_own")), (Some("a@b.c"), Some("kept")));
    }
}

#[tokio::test]
async fn settings_select_the_credentials_and_forwarding_headers_of_the_upstream() {
    let settings = [("WEIR_AI_AUTHORIZATION", "Bearer sk-1"), ("WEIR_AI_TRUST_FORWARDED", "true")];
    let mut gateway = TestGateway::start_with(&settings).await;
    let _caller = gateway
        .start_request("GET /api/v1/ai/x", &["X-Forwarded-For: 9.9.9.9", "X-Forwarded-Proto: https"])
        .await;
    let head = gateway.upstream.next().await.head().await;
    assert_eq!(head.get("authorization"), Some("Bearer sk-1"));
    assert_eq!(head.get("x-forwarded-for"), Some("9.9.9.9, 127.0.0.1"));
    assert_eq!(head.get("x-forwarded-proto"), Some("https"));

    let mut gateway = TestGateway::start_with(&[("WEIR_AI_FORWARD_AUTHORIZATION", "true")]).await;
    let _caller = gateway.start_request("GET /api/v1/ai/x", &[]).await;
    let head = gateway.upstream.next().await.head().await;
    assert_eq!(head.get("authorization"), Some(format!("Bearer {}", gateway.token()).as_str()));
}

#[tokio::test]
async fn credentials_in_the_url_of_an_upstream_are_decoded() {
    let upstream = Listener::start().await;
    let url = upstream.url().replace("http://", "http://user:p%40ss@");
    let mut gateway = TestGateway::start_at(upstream, &url, &[]).await;
    let _caller = gateway.start_request("GET /api/v1/ai/x", &[]).await;
    let head = gateway.upstream.next().await.head().await;
    assert_eq!(head.get("authorization"), Some("Basic dXNlcjpwQHNz"), "user:p@ss");
}

#[tokio::test]
async fn hop_by_hop_headers_are_not_passed_on() {
    let mut gateway = TestGateway::start().await;
    let headers = [
        "Connection: keep-alive, X-Mine",
        "X-Mine: 1",
        "Keep-Alive: timeout=5",
        "Proxy-Authorization: Basic eA==",
        "TE: gzip",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    ];
    let mut caller = gateway.start_request("GET /api/v1/ai/x", &headers).await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    for name in ["connection", "x-mine", "keep-alive", "proxy-authorization", "te", "upgrade"] {
        assert_eq!(head.get(name), None, "{head:?}");
    }
    upstream.send("HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Theirs\r\nX-Theirs: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\nX-Ours: 1\r\nContent-Length: 0\r\n\r\n").await;
    let head = caller.head().await;
    for name in ["connection", "x-theirs", "keep-alive", "proxy-authenticate"] {
        assert_eq!(head.get(name), None, "{head:?}");
    }
    assert_eq!(head.get("x-ours"), Some("1"));
}

#[tokio::test]
async fn every_method_is_passed_on() {
    let mut gateway = TestGateway::start().await;
    let mut upstream = None;
    for method in ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "POST", "PROPFIND"] {
        let mut caller =
            gateway.start_request(&format!("{method} /api/v1/ai/x"), &["Connection: close"]).await;
        let mut connection = match upstream.take() {
            Some(connection) => connection,
            None => gateway.upstream.next().await,
        };
        let head: Head = connection.head().await;
        assert_eq!(head.line(), format!("{method} /api/v1/ai/x HTTP/1.1"));
        let body = if method == "HEAD" { "" } else { "body" };
        connection.send(format!("HTTP/1.1 200 OK\r\nContent-Length: 4\r\nAllow: X\r\n\r\n{body}")).await;
        // After a HEAD the upstream may still send a body, so that connection is not used again.
        upstream = (method != "HEAD").then_some(connection);
        let head = caller.head().await;
        assert_eq!(head.line(), "HTTP/1.1 200 OK");
        assert_eq!((head.get("content-length"), head.get("allow")), (Some("4"), Some("X")), "{method}");
        assert_eq!(caller.rest().await, body.as_bytes(), "{method}");
    }
    assert_eq!(
        gateway.upstream.accepted(),
        2,
        "one connection carries all calls up to HEAD, another the rest"
    );
}

#[tokio::test]
async fn large_heads_are_passed_on_and_an_endless_one_is_502() {
    let mut gateway = TestGateway::start().await;
    let large = "x".repeat(30_000);
    let mut caller = gateway.start_request("GET /api/v1/ai/x", &[&format!("Cookie: {large}")]).await;
    let mut upstream = gateway.upstream.next().await;
    assert_eq!(upstream.head().await.get("cookie"), Some(large.as_str()));
    upstream.send(format!("HTTP/1.1 200 OK\r\nSet-Cookie: {large}\r\nContent-Length: 0\r\n\r\n")).await;
    assert_eq!(caller.head().await.get("set-cookie"), Some(large.as_str()));

    let call = gateway.call(Method::GET, "/api/v1/ai/x", "");
    upstream.head().await;
    upstream.send(format!("HTTP/1.1 200 OK\r\nX-Endless: {}", "x".repeat(200_000))).await;
    assert_eq!(error(&call.await.unwrap()), (502, "BAD_GATEWAY".to_owned()));
}

#[tokio::test]
async fn a_call_without_a_valid_token_is_401() {
    let gateway = TestGateway::start().await;
    for header in [None, Some("Bearer nonsense"), Some("Basic eDp5")] {
        let headers: Vec<_> = header.iter().map(|value| ("authorization", *value)).collect();
        for path in ["/api/v1/ai", "/api/v1/ai/", "/api/v1/ai/chat"] {
            let answer = gateway.running.client().request(Method::POST, path, &headers, "{}").await.unwrap();
            assert_eq!(error(&answer), (401, "UNAUTHENTICATED".to_owned()), "{header:?} {path}");
        }
    }
    assert_eq!(gateway.upstream.accepted(), 0);
}

#[tokio::test]
async fn rate_limit_headers_of_the_upstream_are_replaced() {
    let mut gateway = TestGateway::start().await;
    let call = gateway.call(Method::GET, "/api/v1/ai/x", "");
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 429 Slow Down\r\nX-RateLimit-Limit: 7\r\nX-RateLimit-Remaining: 0\r\nRateLimit: \"theirs\";r=0;t=9\r\nRetry-After: 9\r\nContent-Length: 0\r\n\r\n").await;
    let answer = call.await.unwrap();
    assert_eq!(
        (answer.status, answer.header("retry-after")),
        (429, Some("9")),
        "the upstream's response is passed on"
    );
    assert_ne!(answer.header("x-ratelimit-limit"), Some("7"));
    assert!(!format!("{:?}", answer.headers).contains("theirs"));
}

#[tokio::test]
async fn without_an_upstream_calls_are_echoed() {
    let running = Running::start(Store::Embedded).await;
    let token = super::fixtures::token(&running, "a@b.c");
    let client = running.client().with_header("authorization", &format!("Bearer {token}"));
    let answer = client.get("/api/v1/ai/extract?x=1").await.unwrap();
    assert_eq!((answer.status, answer.header("x-weir-upstream")), (200, Some("echo")));
    let expected = serde_json::json!({"method": "GET", "path": "/api/v1/ai/extract", "query": "x=1"});
    assert_eq!(answer.json(), expected);
    let answer = client.post("/api/v1/ai/extract", &serde_json::json!({"text": "hello"})).await.unwrap();
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.json(), serde_json::json!({"text": "hello"}));
}
