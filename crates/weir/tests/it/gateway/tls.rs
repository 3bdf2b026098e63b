//! An upstream behind TLS: spoken to when it can be trusted, and told nothing otherwise.

use http::Method;
use weir_testkit::raw_connection::Listener;
use weir_testkit::tls::Terminator;

use super::fixtures::{Gate, answer, error};

struct Encrypted {
    gate: Gate,
    tls: Terminator,
}

/// A gate whose upstream is reached as `host`, by those who trust its authority or by those who do not.
async fn start(host: &str, is_trusted: bool) -> Encrypted {
    let upstream = Listener::start().await;
    let tls = Terminator::start(upstream.addr()).await;
    // Somebody else's authority, so that the system's never matter.
    let other = Terminator::start(upstream.addr()).await;
    let ca = if is_trusted { tls.ca_file() } else { other.ca_file() };
    let url = format!("https://{host}:{}", tls.port());
    let gate = Gate::before(upstream, &url, &[("SSL_CERT_FILE", ca.to_str().expect("a plain path"))]).await;
    // The file is read at the first call, and `other` must be there until then.
    if !is_trusted {
        let refused = gate.call(Method::GET, "/api/v1/ai/x", "").await.unwrap();
        assert_eq!(error(&refused), (502, "BAD_GATEWAY".to_owned()));
    }
    Encrypted { gate, tls }
}

#[tokio::test]
async fn an_upstream_that_is_trusted_is_spoken_to_over_one_connection() {
    let Encrypted { mut gate, tls } = start("localhost", true).await;
    let mut upstream = None;
    for n in 0..3 {
        let call = gate.call(Method::POST, "/api/v1/ai/chat?x=1", "a question");
        let talk = match &mut upstream {
            Some(talk) => talk,
            None => upstream.insert(gate.upstream.next().await),
        };
        let head = talk.head().await;
        assert_eq!(head.line(), "POST /api/v1/ai/chat?x=1 HTTP/1.1");
        let host = format!("localhost:{}", tls.port());
        assert_eq!((head.get("host"), head.get("authorization")), (Some(host.as_str()), None));
        talk.expect("a question").await;
        talk.send(answer(&format!("answer {n}"))).await;
        let response = call.await.unwrap();
        assert_eq!((response.status, &response.body[..]), (200, format!("answer {n}").as_bytes()));
    }
    assert_eq!((tls.handshakes(), gate.upstream.accepted()), (1, 1));
}

#[tokio::test]
async fn pieces_of_an_answer_pass_at_once_through_tls() {
    let Encrypted { mut gate, tls: _tls } = start("localhost", true).await;
    let mut caller = gate.asking("GET /api/v1/ai/events", &[]).await;
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
    for piece in ["data: 1\n\n", "data: 22\n\n"] {
        // The next one is said only when this one was heard.
        upstream.send_chunk(piece).await;
        assert_eq!(caller.chunk().await, piece.as_bytes());
    }
    upstream.send("0\r\n\r\n").await;
    assert_eq!(caller.chunk().await, b"");
}

#[tokio::test]
async fn a_websocket_passes_bytes_both_ways_through_tls() {
    let Encrypted { mut gate, tls: _tls } = start("localhost", true).await;
    let upgrade = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
    ];
    let mut caller = gate.asking("GET /api/v1/ai/socket", &upgrade).await;
    let mut upstream = gate.upstream.next().await;
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
async fn an_upstream_of_an_unknown_authority_is_told_nothing() {
    let Encrypted { gate, tls } = start("localhost", false).await;
    assert_eq!((tls.handshakes(), gate.upstream.accepted()), (0, 0));
}

#[tokio::test]
async fn an_upstream_of_another_name_is_told_nothing() {
    let Encrypted { gate, tls } = start("127.0.0.1", true).await;
    let refused = gate.call(Method::GET, "/api/v1/ai/x", "").await.unwrap();
    assert_eq!(error(&refused), (502, "BAD_GATEWAY".to_owned()));
    assert_eq!((tls.handshakes(), gate.upstream.accepted()), (0, 0));
}
