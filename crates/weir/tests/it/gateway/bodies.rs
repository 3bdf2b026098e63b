//! Bodies: streamed in both directions, and bounded.

use http::Method;

use super::fixtures::{TestGateway, answer, error};

const MIB: usize = 1 << 20;

/// A pattern of bytes, in which missing or repeated parts show.
fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|n| u8::try_from(n % 251).unwrap()).collect()
}

#[tokio::test]
async fn each_piece_of_a_response_arrives_before_the_next_is_sent() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("GET /api/v1/ai/stream", &["Accept: text/event-stream"]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream
        .send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    let head = caller.head().await;
    assert_eq!(head.get("content-type"), Some("text/event-stream"), "the head does not wait for the body");
    for n in 0..5 {
        let event = format!("data: token {n}\n\n");
        upstream.send_chunk(&event).await;
        assert_eq!(caller.chunk().await, event.as_bytes());
    }
    upstream.send("0\r\n\r\n").await;
    assert_eq!(caller.chunk().await, b"");
}

#[tokio::test]
async fn each_piece_of_a_request_arrives_before_the_next_is_sent() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("POST /api/v1/ai/talk", &["Transfer-Encoding: chunked"]).await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!((head.get("transfer-encoding"), head.get("content-length")), (Some("chunked"), None));
    caller.send_chunk("first").await;
    assert_eq!(upstream.chunk().await, b"first");
    // A response may begin before the request ends.
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    caller.head().await;
    for n in 0..3 {
        caller.send_chunk(format!("question {n}")).await;
        assert_eq!(upstream.chunk().await, format!("question {n}").as_bytes());
        upstream.send_chunk(format!("answer {n}")).await;
        assert_eq!(caller.chunk().await, format!("answer {n}").as_bytes());
    }
    caller.send("0\r\n\r\n").await;
    assert_eq!(upstream.chunk().await, b"");
    upstream.send("0\r\n\r\n").await;
    assert_eq!(caller.chunk().await, b"");
}

#[tokio::test]
async fn five_mebibytes_pass_both_ways_whole() {
    let mut gateway = TestGateway::start().await;
    let large = bytes(5 * MIB);
    let lengths = [format!("Content-Length: {}", large.len()), "Transfer-Encoding: chunked".to_owned()];
    let mut upstream = None;
    for framing in &lengths {
        let mut caller = gateway.start_request("POST /api/v1/ai/large", &[framing]).await;
        let is_chunked = framing.starts_with("Transfer");
        let sent = large.clone();
        let sending = tokio::spawn(async move {
            if is_chunked {
                for chunk in sent.chunks(100_000) {
                    caller.send_chunk(chunk).await;
                }
                caller.send("0\r\n\r\n").await;
            } else {
                caller.send(&sent).await;
            }
            caller
        });
        let mut connection = match upstream.take() {
            Some(connection) => connection,
            None => gateway.upstream.next().await,
        };
        connection.head().await;
        let got = if is_chunked {
            connection.chunked(large.len()).await
        } else {
            connection.bytes(large.len()).await
        };
        assert!(got == large, "the upstream gets the whole request");
        let mut caller = sending.await.unwrap();
        let back = large.clone();
        let framing = framing.clone();
        let answering = tokio::spawn(async move {
            connection.send(format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n")).await;
            if is_chunked {
                for chunk in back.chunks(70_000) {
                    connection.send_chunk(chunk).await;
                }
                connection.send("0\r\n\r\n").await;
            } else {
                connection.send(&back).await;
            }
            connection
        });
        caller.head().await;
        let got =
            if is_chunked { caller.chunked(large.len()).await } else { caller.bytes(large.len()).await };
        assert!(got == large, "the caller gets the whole response");
        upstream = Some(answering.await.unwrap());
    }
    assert_eq!(gateway.upstream.accepted(), 1, "large bodies leave their connection usable");
}

#[tokio::test]
async fn bodies_above_the_limit_are_413() {
    let mut gateway = TestGateway::start_with(&[("WEIR_AI_MAX_BODY", "1KiB")]).await;
    let announced =
        gateway.client().request(Method::POST, "/api/v1/ai/x", &[], vec![b'x'; 1_025]).await.unwrap();
    assert_eq!(error(&announced), (413, "PAYLOAD_TOO_LARGE".to_owned()));
    assert_eq!(gateway.upstream.accepted(), 0, "a request that announces too much is not forwarded");

    let mut caller = gateway.start_request("POST /api/v1/ai/x", &["Transfer-Encoding: chunked"]).await;
    caller.send_chunk([b'x'; 1_024]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    assert_eq!(upstream.chunk().await.len(), 1_024);
    caller.send_chunk("y").await;
    let head = caller.head().await;
    assert_eq!(head.line(), "HTTP/1.1 413 Payload Too Large");
    assert_eq!(upstream.rest().await, b"", "the upstream's request must not end normally");

    let call = gateway.client();
    let call =
        tokio::spawn(async move { call.request(Method::POST, "/api/v1/ai/x", &[], vec![b'x'; 1_024]).await });
    let mut upstream = gateway.upstream.next().await;
    assert_eq!(upstream.head().await.get("content-length"), Some("1024"));
    upstream.bytes(1_024).await;
    upstream.send(answer("ok")).await;
    assert_eq!(call.await.unwrap().unwrap().status, 200);
}

#[tokio::test]
async fn the_default_limit_of_a_body_is_32_mebibytes() {
    let mut gateway = TestGateway::start().await;
    let length = 32 * MIB + 1;
    let mut caller =
        gateway.start_request("POST /api/v1/ai/x", &[&format!("Content-Length: {length}")]).await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 413 Payload Too Large");
    let length = 32 * MIB;
    let mut caller =
        gateway.start_request("POST /api/v1/ai/x", &[&format!("Content-Length: {length}")]).await;
    let sending = tokio::spawn(async move {
        for _ in 0..32 {
            caller.send(vec![b'x'; MIB]).await;
        }
        caller
    });
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    for _ in 0..32 {
        upstream.bytes(MIB).await;
    }
    upstream.send(answer("whole")).await;
    let mut caller = sending.await.unwrap();
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn a_caller_that_expects_100_continue_gets_it() {
    let mut gateway = TestGateway::start().await;
    let mut caller =
        gateway.start_request("POST /api/v1/ai/x", &["Expect: 100-continue", "Content-Length: 2"]).await;
    let mut upstream = gateway.upstream.next().await;
    assert_eq!(upstream.head().await.get("expect"), None);
    assert_eq!(caller.head().await.line(), "HTTP/1.1 100 Continue");
    caller.send("hi").await;
    upstream.expect("hi").await;
    upstream.send(answer("ok")).await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn an_empty_body_stays_empty() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("POST /api/v1/ai/x", &["Content-Length: 0"]).await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!((head.get("content-length"), head.get("transfer-encoding")), (Some("0"), None));
    upstream.send("HTTP/1.1 204 Nothing\r\n\r\n").await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 204 Nothing");
    caller.send(gateway.head("GET /api/v1/ai/y", &["Transfer-Encoding: chunked"])).await;
    caller.send("3\r\nget\r\n0\r\n\r\n").await;
    let head = upstream.head().await;
    assert_eq!(head.get("transfer-encoding"), Some("chunked"), "a body is passed on with any method");
    assert_eq!(upstream.chunked(3).await, b"get");
    upstream.send("HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n").await;
    assert_eq!(caller.head().await.get("etag"), Some("\"x\""));
}

#[tokio::test]
async fn trailers_are_passed_on() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway
        .start_request(
            "POST /api/v1/ai/x",
            &["Transfer-Encoding: chunked", "Trailer: X-Sum", "Connection: TE", "TE: trailers"],
        )
        .await;
    caller.send("2\r\nhi\r\n0\r\nX-Sum: 1\r\n\r\n").await;
    let mut upstream = gateway.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!((head.get("te"), head.get("trailer")), (Some("trailers"), Some("X-Sum")));
    assert_eq!(upstream.chunk().await, b"hi");
    assert_eq!(upstream.chunk().await, b"");
    assert_eq!(upstream.head().await.0.to_lowercase(), "x-sum: 1");
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Cost\r\n\r\n2\r\nok\r\n0\r\nX-Cost: 7\r\n\r\n").await;
    assert_eq!(caller.head().await.get("trailer"), Some("X-Cost"));
    assert_eq!(caller.chunk().await, b"ok");
    assert_eq!(caller.chunk().await, b"");
    assert_eq!(caller.head().await.0.to_lowercase(), "x-cost: 7");
}

#[tokio::test]
async fn a_response_that_ends_with_its_connection_is_passed_on() {
    let mut gateway = TestGateway::start().await;
    let call = gateway.call(Method::GET, "/api/v1/ai/old", "");
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.0 200 OK\r\n\r\nold style").await;
    drop(upstream);
    let answer = call.await.unwrap();
    assert_eq!((answer.status, &answer.body[..]), (200, &b"old style"[..]));
}
