//! An upstream behind TLS: called if its certificate is valid, and sent nothing otherwise.

use http::Method;
use weir_testkit::raw_connection::Listener;
use weir_testkit::tls::Terminator;

use super::fixtures::{TestGateway, answer, error};

struct TlsGateway {
    gateway: TestGateway,
    tls: Terminator,
}

/// Starts a gateway that reaches its upstream as `host`, and trusts its certificate authority if `is_trusted`.
async fn start(host: &str, is_trusted: bool) -> TlsGateway {
    let upstream = Listener::start().await;
    let tls = Terminator::start(upstream.addr()).await;
    // Another authority, so that those of the system never matter.
    let other = Terminator::start(upstream.addr()).await;
    let ca = if is_trusted { tls.ca_file() } else { other.ca_file() };
    let url = format!("https://{host}:{}", tls.port());
    let gateway =
        TestGateway::start_at(upstream, &url, &[("SSL_CERT_FILE", ca.to_str().expect("a plain path"))]).await;
    // The file is read at the first call, and `other` must be there until then.
    if !is_trusted {
        let refused = gateway.call(Method::GET, "/api/v1/ai/x", "").await.unwrap();
        assert_eq!(error(&refused), (502, "BAD_GATEWAY".to_owned()));
    }
    TlsGateway { gateway, tls }
}

#[tokio::test]
async fn a_trusted_upstream_is_called_over_one_connection() {
    let TlsGateway { mut gateway, tls } = start("localhost", true).await;
    let mut upstream = None;
    for n in 0..3 {
        let call = gateway.call(Method::POST, "/api/v1/ai/chat?x=1", "a question");
        let connection = match &mut upstream {
            Some(connection) => connection,
            None => upstream.insert(gateway.upstream.next().await),
        };
        let head = connection.head().await;
        assert_eq!(head.line(), "POST /api/v1/ai/chat?x=1 HTTP/1.1");
        let host = format!("localhost:{}", tls.port());
        assert_eq!((head.get("host"), head.get("authorization")), (Some(host.as_str()), None));
        connection.expect("a question").await;
        connection.send(answer(&format!("answer {n}"))).await;
        let response = call.await.unwrap();
        assert_eq!((response.status, &response.body[..]), (200, format!("answer {n}").as_bytes()));
    }
    assert_eq!((tls.handshakes(), gateway.upstream.accepted()), (1, 1));
}

#[tokio::test]
async fn pieces_of_a_response_are_passed_on_at_once_over_tls() {
    let TlsGateway { mut gateway, tls: _tls } = start("localhost", true).await;
    let mut caller = gateway.start_request("GET /api/v1/ai/events", &[]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
    for piece in ["data: 1\n\n", "data: 22\n\n"] {
        // The next piece is sent only after this one has arrived.
        upstream.send_chunk(piece).await;
        assert_eq!(caller.chunk().await, piece.as_bytes());
    }
    upstream.send("0\r\n\r\n").await;
    assert_eq!(caller.chunk().await, b"");
}

#[tokio::test]
async fn a_websocket_passes_bytes_both_ways_over_tls() {
    let TlsGateway { mut gateway, tls: _tls } = start("localhost", true).await;
    let upgrade = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
    ];
    let mut caller = gateway.start_request("GET /api/v1/ai/socket", &upgrade).await;
    let mut upstream = gateway.upstream.next().await;
    assert_eq!(upstream.head().await.get("upgrade"), Some("websocket"));
    upstream
        .send("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        .await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 101 Switching Protocols");
    for n in 0..3 {
        caller.send([0x81, n]).await;
        upstream.expect([0x81, n]).await;
        upstream.send([0x82, n]).await;
        caller.expect([0x82, n]).await;
    }
    drop(caller);
    assert_eq!(upstream.rest().await, b"");
}

#[tokio::test]
async fn an_upstream_of_an_unknown_authority_is_sent_nothing() {
    let TlsGateway { gateway, tls } = start("localhost", false).await;
    assert_eq!((tls.handshakes(), gateway.upstream.accepted()), (0, 0));
}

#[tokio::test]
async fn an_upstream_with_a_certificate_for_another_name_is_sent_nothing() {
    let TlsGateway { gateway, tls } = start("127.0.0.1", true).await;
    let refused = gateway.call(Method::GET, "/api/v1/ai/x", "").await.unwrap();
    assert_eq!(error(&refused), (502, "BAD_GATEWAY".to_owned()));
    assert_eq!((tls.handshakes(), gateway.upstream.accepted()), (0, 0));
}
