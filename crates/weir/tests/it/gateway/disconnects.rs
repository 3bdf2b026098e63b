//! Callers that disconnect, and a server that stops.

use std::time::Duration;

use super::fixtures::{TestGateway, answer};
use crate::fixtures::TEST_TIMEOUT;

#[tokio::test]
async fn a_disconnect_before_the_response_cancels_the_call() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("POST /api/v1/ai/slow", &["Content-Length: 2"]).await;
    caller.send("hi").await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.expect("hi").await;
    drop(caller);
    assert_eq!(upstream.rest().await, b"", "the call to the upstream is aborted");
}

#[tokio::test]
async fn a_disconnect_during_the_response_cancels_the_call() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    caller.head().await;
    assert_eq!(caller.chunk().await, b"first");
    drop(caller);
    // Nothing more is written to the caller, so a failed write cannot reveal the disconnect.
    assert_eq!(upstream.rest().await, b"");
}

#[tokio::test]
async fn a_disconnect_during_the_request_cancels_the_call() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("POST /api/v1/ai/slow", &["Transfer-Encoding: chunked"]).await;
    caller.send_chunk("half").await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    assert_eq!(upstream.chunk().await, b"half");
    drop(caller);
    assert_eq!(upstream.rest().await, b"", "the request must not end as if it were complete");
}

#[tokio::test]
async fn a_stop_waits_for_a_response_to_end() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    caller.head().await;
    assert_eq!(caller.chunk().await, b"first");
    gateway.running.weir.terminate();
    gateway.running.weir.wait_for_log(|line| line.contains("stopping"), TEST_TIMEOUT).await;
    upstream.send("4\r\nlast\r\n0\r\n\r\n").await;
    assert_eq!(caller.chunk().await, b"last");
    assert_eq!(caller.chunk().await, b"");
    assert!(gateway.running.weir.wait(TEST_TIMEOUT).await.success());
}

#[tokio::test]
async fn a_stop_cuts_off_a_response_that_does_not_end() {
    let mut gateway = TestGateway::start_with(&[("WEIR_HTTP_SHUTDOWN_TIMEOUT", "20s")]).await;
    let mut caller = gateway.start_request("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    caller.head().await;
    assert_eq!(caller.chunk().await, b"first");
    gateway.running.weir.terminate();
    let status = gateway.running.weir.wait(Duration::from_secs(60)).await;
    assert!(status.success(), "the server stops in time: {status}");
    assert_eq!(caller.rest().await, b"", "the response must not end as if it were complete");
}

#[tokio::test]
async fn a_caller_that_pipelines_is_answered_in_order() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.caller().await;
    let two = [gateway.head("GET /api/v1/ai/1", &[]), gateway.head("GET /api/v1/ai/2", &[])].concat();
    caller.send(two).await;
    let mut upstream = gateway.upstream.next().await;
    for n in ["1", "2"] {
        assert_eq!(upstream.head().await.line(), format!("GET /api/v1/ai/{n} HTTP/1.1"));
        upstream.send(answer(n)).await;
        caller.head().await;
        caller.expect(n).await;
    }
}
