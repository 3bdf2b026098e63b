//! What is passed on of heads, both ways.

use http::Method;
use weir_testkit::raw_connection::{Head, Listener};

use super::fixtures::{Gate, answer, error};
use crate::fixtures::{Running, Store};

#[tokio::test]
async fn a_call_reaches_the_upstream_as_it_was_made() {
    let mut gate = Gate::start().await;
    let line = "PATCH /api/v1/ai/models/org%2Fname//x;v=1/%E4?a=1&&b=%20+%2e&a=..";
    let headers = ["Content-Length: 2", "Accept-Encoding: br", "X-Twice: 1", "X-Twice: 2"];
    let mut caller = gate.asking(line, &headers).await;
    caller.send("hi").await;
    let mut upstream = gate.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!(head.line(), format!("{line} HTTP/1.1"));
    assert_eq!(head.get("accept-encoding"), Some("br"));
    assert_eq!(head.all("x-twice"), ["1", "2"]);
    assert_eq!(head.get("content-length"), Some("2"));
    upstream.expect("hi").await;
    upstream.send("HTTP/1.1 307 Elsewhere\r\nLocation: /other?x=%2F\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n\r\n\x1f\x00").await;
    let head = caller.head().await;
    assert_eq!(head.line(), "HTTP/1.1 307 Elsewhere");
    assert_eq!(head.get("location"), Some("/other?x=%2F"), "redirects are the caller's to follow");
    assert_eq!(head.get("content-encoding"), Some("gzip"));
    assert_eq!(head.all("set-cookie"), ["a=1", "b=2"]);
    caller.expect("\x1f\x00").await;
}

#[tokio::test]
async fn an_upstream_is_told_who_calls_and_is_shown_no_token_of_ours() {
    let mut gate = Gate::start().await;
    let headers = [
        "X-Forwarded-For: 9.9.9.9",
        "X-Forwarded-Proto: https",
        "X-Weir-User: root",
        "X-Admin-Key: secret-key",
        "X-Request-Id: trace-1",
        "Via: 1.1 edge",
        "Cookie: c=1",
    ];
    let mut caller = gate.asking("GET /api/v1/ai/x", &headers).await;
    let mut upstream = gate.upstream.next().await;
    let head = upstream.head().await;
    let expected = [
        ("host", Some(&gate.upstream.url()[7..])),
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
async fn an_upstream_sees_no_header_that_it_could_take_for_our_word_or_for_another_path() {
    for (trust, passes) in [("false", false), ("true", true)] {
        let mut gate = Gate::start_with(&[("WEIR_AI_TRUST_FORWARDED", trust)]).await;
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
        let _caller = gate.asking("GET /api/v1/ai/x", &headers).await;
        let head = gate.upstream.next().await.head().await;
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
async fn settings_say_what_an_upstream_is_shown_instead() {
    let settings = [("WEIR_AI_AUTHORIZATION", "Bearer sk-1"), ("WEIR_AI_TRUST_FORWARDED", "true")];
    let mut gate = Gate::start_with(&settings).await;
    let _caller =
        gate.asking("GET /api/v1/ai/x", &["X-Forwarded-For: 9.9.9.9", "X-Forwarded-Proto: https"]).await;
    let head = gate.upstream.next().await.head().await;
    assert_eq!(head.get("authorization"), Some("Bearer sk-1"));
    assert_eq!(head.get("x-forwarded-for"), Some("9.9.9.9, 127.0.0.1"));
    assert_eq!(head.get("x-forwarded-proto"), Some("https"));

    let mut gate = Gate::start_with(&[("WEIR_AI_FORWARD_AUTHORIZATION", "true")]).await;
    let _caller = gate.asking("GET /api/v1/ai/x", &[]).await;
    let head = gate.upstream.next().await.head().await;
    assert_eq!(head.get("authorization"), Some(format!("Bearer {}", gate.token()).as_str()));
}

#[tokio::test]
async fn credentials_in_the_url_of_an_upstream_are_decoded() {
    let upstream = Listener::start().await;
    let url = upstream.url().replace("http://", "http://user:p%40ss@");
    let mut gate = Gate::before(upstream, &url, &[]).await;
    let _caller = gate.asking("GET /api/v1/ai/x", &[]).await;
    let head = gate.upstream.next().await.head().await;
    assert_eq!(head.get("authorization"), Some("Basic dXNlcjpwQHNz"), "user:p@ss");
}

#[tokio::test]
async fn what_belongs_to_one_connection_is_not_passed_on_to_the_other() {
    let mut gate = Gate::start().await;
    let headers = [
        "Connection: keep-alive, X-Mine",
        "X-Mine: 1",
        "Keep-Alive: timeout=5",
        "Proxy-Authorization: Basic eA==",
        "TE: gzip",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    ];
    let mut caller = gate.asking("GET /api/v1/ai/x", &headers).await;
    let mut upstream = gate.upstream.next().await;
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
    let mut gate = Gate::start().await;
    let mut upstream = None;
    for method in ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "POST", "PROPFIND"] {
        let mut caller = gate.asking(&format!("{method} /api/v1/ai/x"), &["Connection: close"]).await;
        let mut line = match upstream.take() {
            Some(line) => line,
            None => gate.upstream.next().await,
        };
        let head: Head = line.head().await;
        assert_eq!(head.line(), format!("{method} /api/v1/ai/x HTTP/1.1"));
        let body = if method == "HEAD" { "" } else { "body" };
        line.send(format!("HTTP/1.1 200 OK\r\nContent-Length: 4\r\nAllow: X\r\n\r\n{body}")).await;
        // An upstream that sends the body of a HEAD all the same is found out too late, so that connection is not used again.
        upstream = (method != "HEAD").then_some(line);
        let head = caller.head().await;
        assert_eq!(head.line(), "HTTP/1.1 200 OK");
        assert_eq!((head.get("content-length"), head.get("allow")), (Some("4"), Some("X")), "{method}");
        assert_eq!(caller.rest().await, body.as_bytes(), "{method}");
    }
    assert_eq!(gate.upstream.accepted(), 2, "one connection carries call after call, but for HEAD");
}

#[tokio::test]
async fn large_heads_pass_and_one_that_never_ends_is_given_up() {
    let mut gate = Gate::start().await;
    let large = "x".repeat(30_000);
    let mut caller = gate.asking("GET /api/v1/ai/x", &[&format!("Cookie: {large}")]).await;
    let mut upstream = gate.upstream.next().await;
    assert_eq!(upstream.head().await.get("cookie"), Some(large.as_str()));
    upstream.send(format!("HTTP/1.1 200 OK\r\nSet-Cookie: {large}\r\nContent-Length: 0\r\n\r\n")).await;
    assert_eq!(caller.head().await.get("set-cookie"), Some(large.as_str()));

    let call = gate.call(Method::GET, "/api/v1/ai/x", "");
    upstream.head().await;
    upstream.send(format!("HTTP/1.1 200 OK\r\nX-Endless: {}", "x".repeat(200_000))).await;
    assert_eq!(error(&call.await.unwrap()), (502, "BAD_GATEWAY".to_owned()));
}

#[tokio::test]
async fn nobody_is_let_through_without_a_token() {
    let gate = Gate::start().await;
    for header in [None, Some("Bearer nonsense"), Some("Basic eDp5")] {
        let headers: Vec<_> = header.iter().map(|value| ("authorization", *value)).collect();
        for path in ["/api/v1/ai", "/api/v1/ai/", "/api/v1/ai/chat"] {
            let answer = gate.running.client().request(Method::POST, path, &headers, "{}").await.unwrap();
            assert_eq!(error(&answer), (401, "UNAUTHENTICATED".to_owned()), "{header:?} {path}");
        }
    }
    assert_eq!(gate.upstream.accepted(), 0);
}

#[tokio::test]
async fn limits_of_the_upstream_are_not_taken_for_ours() {
    let mut gate = Gate::start().await;
    let call = gate.call(Method::GET, "/api/v1/ai/x", "");
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 429 Slow Down\r\nX-RateLimit-Limit: 7\r\nX-RateLimit-Remaining: 0\r\nRateLimit: \"theirs\";r=0;t=9\r\nRetry-After: 9\r\nContent-Length: 0\r\n\r\n").await;
    let answer = call.await.unwrap();
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("9")), "their answer is passed on");
    assert_ne!(answer.header("x-ratelimit-limit"), Some("7"));
    assert!(!format!("{:?}", answer.headers).contains("theirs"));
}

#[tokio::test]
async fn an_echo_answers_where_there_is_no_upstream() {
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
