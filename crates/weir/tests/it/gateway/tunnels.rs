//! Calls that become WebSocket tunnels.

use std::time::Duration;

use weir_testkit::raw_connection::RawConnection;
use weir_testkit::wait;

use super::fixtures::{TestGateway, answer};
use crate::fixtures::TEST_TIMEOUT;

const UPGRADE: [&str; 4] = [
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
];

async fn tunnel(gateway: &mut TestGateway) -> (RawConnection, RawConnection) {
    let mut caller = gateway.start_request("GET /api/v1/ai/socket?x=1", &UPGRADE).await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!(head.line(), "GET /api/v1/ai/socket?x=1 HTTP/1.1");
    assert_eq!((head.get("connection"), head.get("upgrade")), (Some("upgrade"), Some("websocket")));
    assert_eq!(head.get("sec-websocket-key"), Some("dGhlIHNhbXBsZSBub25jZQ=="));
    upstream.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nhello").await;
    let head = caller.head().await;
    assert_eq!(head.line(), "HTTP/1.1 101 Switching Protocols");
    assert_eq!((head.get("connection"), head.get("upgrade")), (Some("upgrade"), Some("websocket")));
    assert_eq!(head.get("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    caller.expect("hello").await;
    (caller, upstream)
}

#[tokio::test]
async fn a_websocket_passes_bytes_both_ways_until_one_side_closes() {
    let mut gateway = TestGateway::start().await;
    let (mut caller, mut upstream) = tunnel(&mut gateway).await;
    for n in 0..3 {
        caller.send([0x81, 0x85, n, 0xff]).await;
        upstream.expect([0x81, 0x85, n, 0xff]).await;
        upstream.send([0x00, n]).await;
        caller.expect([0x00, n]).await;
    }
    let large = vec![7; 1 << 20];
    let (sent, mut far) = (large.clone(), upstream);
    let reading = tokio::spawn(async move { (far.bytes(1 << 20).await, far) });
    caller.send(&sent).await;
    let (got, mut upstream) = reading.await.unwrap();
    assert!(got == large);
    drop(caller);
    assert_eq!(upstream.rest().await, b"");

    let (mut caller, upstream) = tunnel(&mut gateway).await;
    drop(upstream);
    assert_eq!(caller.rest().await, b"");
}

#[tokio::test]
async fn an_upstream_may_refuse_a_websocket() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("GET /api/v1/ai/socket", &UPGRADE).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream
        .send("HTTP/1.1 426 Upgrade Required\r\nSec-WebSocket-Version: 8\r\nContent-Length: 2\r\n\r\nno")
        .await;
    let head = caller.head().await;
    assert_eq!(
        (head.line(), head.get("sec-websocket-version")),
        ("HTTP/1.1 426 Upgrade Required", Some("8"))
    );
    caller.expect("no").await;
    // The connection still carries HTTP, so the caller can make another call.
    caller.send(gateway.head("GET /api/v1/ai/x", &[])).await;
    assert_eq!(upstream.head().await.line(), "GET /api/v1/ai/x HTTP/1.1");
    upstream.send(answer("ok")).await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn upgrades_to_other_protocols_are_refused() {
    let mut gateway = TestGateway::start().await;
    let headers = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"];
    let mut caller = gateway.start_request("GET /api/v1/ai/x", &headers).await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!((head.get("connection"), head.get("upgrade"), head.get("http2-settings")), (None, None, None));
    upstream.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n").await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 502 Bad Gateway");
    assert_eq!(upstream.rest().await, b"");

    let mut caller = gateway.start_request("GET /api/v1/ai/x", &UPGRADE).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n").await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 502 Bad Gateway");
}

#[tokio::test]
async fn an_idle_tunnel_is_closed_and_its_connection_no_longer_counted() {
    let mut gateway = TestGateway::start_with(&[("WEIR_AI_IDLE_TIMEOUT", "1s")]).await;
    let (mut caller, mut upstream) = tunnel(&mut gateway).await;
    assert_eq!(caller.rest().await, b"");
    assert_eq!(upstream.rest().await, b"");
    let client = gateway.running.client();
    wait::until("the closed tunnel is no longer counted", TEST_TIMEOUT, async || {
        let text = client.get("/metrics").await.unwrap().body;
        String::from_utf8_lossy(&text).contains("weir_http_connections 1\n")
    })
    .await;
}

#[tokio::test]
async fn a_stop_closes_tunnels_in_time() {
    let mut gateway = TestGateway::start_with(&[("WEIR_HTTP_SHUTDOWN_TIMEOUT", "20s")]).await;
    let (mut caller, mut upstream) = tunnel(&mut gateway).await;
    gateway.running.weir.terminate();
    gateway.running.weir.wait_for_log(|line| line.contains("stopping"), TEST_TIMEOUT).await;
    caller.send("still").await;
    upstream.expect("still").await;
    let status = gateway.running.weir.wait(Duration::from_secs(60)).await;
    assert!(status.success(), "{status}");
    assert_eq!(caller.rest().await, b"");
}
