//! Paths: nothing leads around the limit, and nothing out of the prefix.

use super::fixtures::{Gate, answer};

#[tokio::test]
async fn no_path_leads_out_of_the_prefix_or_around_the_limit() {
    let gate = Gate::start().await;
    let refused = [
        "/api/v1/ai/../../../admin/dlq",
        "/api/v1/ai/..",
        "/api/v1/ai/./x",
        "/api/v1/ai/%2e%2e/admin",
        "/api/v1/ai/.%2E/admin",
        "/api/v1/ai/%252e%252e/admin",
        "/api/v1/ai/x%2f..%2f..%2fadmin",
        "/api/v1/ai/..%5cadmin",
        "/api/v1/ai/..;/admin",
        "/api/v1/ai/x%00",
        "/api/v1/ai/%c0%ae%c0%ae/admin",
        "/api/v1/ai/%e0%80%ae./admin",
        "/api/v1/ai/x%c0%af..%c0%afadmin",
        "/api/v1/ai/%u002e%u002e/admin",
        "/api/v1/ai/..%u005cadmin",
        "http://elsewhere.example/api/v1/ai/../x",
    ];
    for path in refused {
        let mut caller = gate.asking(&format!("GET {path}"), &["Connection: close"]).await;
        assert_eq!(caller.head().await.line(), "HTTP/1.1 400 Bad Request", "{path}");
    }
    let unknown = [
        "//api/v1/ai/x",
        "/api/v1//ai/x",
        "/api/v1%2fai/x",
        "/api/v1/ai%2fx",
        "/api/v1/%61i/x",
        "/API/v1/ai/x",
        "/api/v1/ai;a/x",
        "/api/v1/aix",
        "/x/../api/v1/ai/x",
        "/./api/v1/ai/x",
    ];
    for path in unknown {
        let mut caller = gate.asking(&format!("GET {path}"), &["Connection: close"]).await;
        assert_eq!(caller.head().await.line(), "HTTP/1.1 404 Not Found", "{path}");
    }
    assert_eq!(gate.upstream.accepted(), 0, "none of them reached the upstream");
}

#[tokio::test]
async fn what_is_under_the_prefix_is_passed_on_byte_for_byte() {
    let mut gate = Gate::start().await;
    let mut upstream = None;
    for path in [
        "/api/v1/ai",
        "/api/v1/ai?",
        "/api/v1/ai/",
        "/api/v1/ai//",
        "/api/v1/ai//x/%2F/%zz/%",
        "/api/v1/ai/a..b/...?../..=%2e%2e&x=//",
        "/api/v1/ai/~!$&'()*+,;=:@",
    ] {
        let mut caller = gate.asking(&format!("GET {path}"), &["Connection: close"]).await;
        let mut line = match upstream.take() {
            Some(line) => line,
            None => gate.upstream.next().await,
        };
        assert_eq!(line.head().await.line(), format!("GET {path} HTTP/1.1"));
        line.send(answer("ok")).await;
        assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
        upstream = Some(line);
    }
    let mut caller = gate.asking("GET http://elsewhere.example/api/v1/ai/x?y", &[]).await;
    let mut line = upstream.take().unwrap();
    let head = line.head().await;
    assert_eq!(head.line(), "GET /api/v1/ai/x?y HTTP/1.1", "wherever a caller wants to go");
    assert_eq!(head.get("x-forwarded-host"), Some("elsewhere.example"));
    line.send(answer("ok")).await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
}
