//! Callers that go away, and a server that stops.

use std::time::Duration;

use super::fixtures::{Gate, answer};
use crate::fixtures::PATIENCE;

#[tokio::test]
async fn a_caller_that_leaves_before_the_answer_cancels_the_call() {
    let mut gate = Gate::start().await;
    let mut caller = gate.asking("POST /api/v1/ai/slow", &["Content-Length: 2"]).await;
    caller.send("hi").await;
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    upstream.expect("hi").await;
    drop(caller);
    assert_eq!(upstream.rest().await, b"", "the upstream learns that nobody waits");
}

#[tokio::test]
async fn a_caller_that_leaves_within_the_answer_cancels_the_call() {
    let mut gate = Gate::start().await;
    let mut caller = gate.asking("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    caller.head().await;
    assert_eq!(caller.chunk().await, b"first");
    drop(caller);
    // Nothing more is written to the caller, so only looking for it can tell.
    assert_eq!(upstream.rest().await, b"");
}

#[tokio::test]
async fn a_caller_that_leaves_within_its_request_cancels_the_call() {
    let mut gate = Gate::start().await;
    let mut caller = gate.asking("POST /api/v1/ai/slow", &["Transfer-Encoding: chunked"]).await;
    caller.send_chunk("half").await;
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    assert_eq!(upstream.chunk().await, b"half");
    drop(caller);
    assert_eq!(upstream.rest().await, b"", "it does not end as if it were whole");
}

#[tokio::test]
async fn a_stop_lets_an_answer_end() {
    let mut gate = Gate::start().await;
    let mut caller = gate.asking("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    caller.head().await;
    assert_eq!(caller.chunk().await, b"first");
    gate.running.weir.terminate();
    gate.running.weir.wait_for_log(|line| line.contains("stopping"), PATIENCE).await;
    upstream.send("4\r\nlast\r\n0\r\n\r\n").await;
    assert_eq!(caller.chunk().await, b"last");
    assert_eq!(caller.chunk().await, b"");
    assert!(gate.running.weir.wait(PATIENCE).await.success());
}

#[tokio::test]
async fn a_stop_does_not_wait_for_ever_for_what_does_not_end() {
    let mut gate = Gate::start_with(&[("WEIR_HTTP_SHUTDOWN_TIMEOUT", "20s")]).await;
    let mut caller = gate.asking("GET /api/v1/ai/stream", &[]).await;
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    caller.head().await;
    assert_eq!(caller.chunk().await, b"first");
    gate.running.weir.terminate();
    let status = gate.running.weir.wait(Duration::from_secs(60)).await;
    assert!(status.success(), "cut off in time: {status}");
    assert_eq!(caller.rest().await, b"", "and not as if it were whole");
}

#[tokio::test]
async fn a_caller_that_pipelines_is_answered_in_order() {
    let mut gate = Gate::start().await;
    let mut caller = gate.caller().await;
    let two = [gate.head("GET /api/v1/ai/1", &[]), gate.head("GET /api/v1/ai/2", &[])].concat();
    caller.send(two).await;
    let mut upstream = gate.upstream.next().await;
    for n in ["1", "2"] {
        assert_eq!(upstream.head().await.line(), format!("GET /api/v1/ai/{n} HTTP/1.1"));
        upstream.send(answer(n)).await;
        caller.head().await;
        caller.expect(n).await;
    }
}
