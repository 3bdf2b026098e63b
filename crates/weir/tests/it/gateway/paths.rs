//! Paths: none bypasses the limit or leaves the prefix.

use super::fixtures::{TestGateway, answer};

#[tokio::test]
async fn no_path_leaves_the_prefix_or_bypasses_the_limit() {
    let gateway = TestGateway::start().await;
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
        let mut caller = gateway.start_request(&format!("GET {path}"), &["Connection: close"]).await;
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
        let mut caller = gateway.start_request(&format!("GET {path}"), &["Connection: close"]).await;
        assert_eq!(caller.head().await.line(), "HTTP/1.1 404 Not Found", "{path}");
    }
    assert_eq!(gateway.upstream.accepted(), 0, "none of them reached the upstream");
}

#[tokio::test]
async fn paths_under_the_prefix_are_passed_on_byte_for_byte() {
    let mut gateway = TestGateway::start().await;
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
        let mut caller = gateway.start_request(&format!("GET {path}"), &["Connection: close"]).await;
        let mut connection = match upstream.take() {
            Some(connection) => connection,
            None => gateway.upstream.next().await,
        };
        assert_eq!(connection.head().await.line(), format!("GET {path} HTTP/1.1"));
        connection.send(answer("ok")).await;
        assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
        upstream = Some(connection);
    }
    let mut caller = gateway.start_request("GET http://elsewhere.example/api/v1/ai/x?y", &[]).await;
    let mut connection = upstream.take().unwrap();
    let head = connection.head().await;
    assert_eq!(head.line(), "GET /api/v1/ai/x?y HTTP/1.1", "an absolute target is reduced to its path");
    assert_eq!(head.get("x-forwarded-host"), Some("elsewhere.example"));
    connection.send(answer("ok")).await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
}
