//! An upstream that is down, slow or sends invalid responses.

use http::Method;
use weir_testkit::http::Error;
use weir_testkit::raw_connection::Listener;

use super::fixtures::{TestGateway, answer, error};

const BAD_GATEWAY: (u16, &str) = (502, "BAD_GATEWAY");

#[tokio::test]
async fn an_upstream_that_is_down_is_502_until_it_is_back() {
    let port = weir_testkit::ports::unused();
    let url = format!("http://127.0.0.1:{port}");
    let gateway = TestGateway::start_with(&[("WEIR_AI_UPSTREAM", &url)]).await;
    let answered = gateway.client().get("/api/v1/ai/x").await.unwrap();
    let (status, code) = error(&answered);
    assert_eq!((status, code.as_str()), BAD_GATEWAY);
    let mut back = Listener::start_on(port).await;
    let call = gateway.call(Method::GET, "/api/v1/ai/x", "");
    let mut upstream = back.next().await;
    upstream.head().await;
    upstream.send(answer("back")).await;
    assert_eq!(&call.await.unwrap().body[..], b"back");
}

#[tokio::test]
async fn an_upstream_that_does_not_answer_is_504() {
    let mut gateway = TestGateway::start_with(&[("WEIR_AI_FIRST_BYTE_TIMEOUT", "2s")]).await;
    let call = gateway.call(Method::POST, "/api/v1/ai/x", "{}");
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.expect("{}").await;
    let (status, code) = error(&call.await.unwrap());
    assert_eq!((status, code.as_str()), (504, "GATEWAY_TIMEOUT"));
    assert_eq!(upstream.rest().await, b"", "the call to the upstream is aborted");
}

#[tokio::test]
async fn a_response_that_stalls_is_truncated() {
    let mut gateway = TestGateway::start_with(&[("WEIR_AI_IDLE_TIMEOUT", "1s")]).await;
    let mut caller = gateway.start_request("GET /api/v1/ai/x", &[]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n").await;
    caller.head().await;
    assert_eq!(caller.chunk().await, b"half");
    assert_eq!(caller.rest().await, b"", "the response must not end as if it were complete");
    assert_eq!(upstream.rest().await, b"");
}

#[tokio::test]
async fn invalid_responses_are_502() {
    let mut gateway = TestGateway::start().await;
    for invalid in [
        "\x00\x01\x02\r\n\r\n",
        "HTTP/9.9 200 OK\r\n\r\n",
        "SSH-2.0-OpenSSH_9\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-Half: ",
        "",
    ] {
        let call = gateway.call(Method::POST, "/api/v1/ai/x", "{}");
        let mut upstream = gateway.upstream.next().await;
        upstream.head().await;
        upstream.expect("{}").await;
        upstream.send(invalid).await;
        upstream.finish().await;
        let (status, code) = error(&call.await.unwrap());
        assert_eq!((status, code.as_str()), BAD_GATEWAY, "{invalid:?}");
    }
}

#[tokio::test]
async fn a_truncated_response_is_truncated_for_the_caller() {
    let mut gateway = TestGateway::start().await;
    for half in ["Content-Length: 10\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"] {
        let client = gateway.client();
        let call = tokio::spawn(async move { client.get("/api/v1/ai/x").await });
        let mut upstream = gateway.upstream.next().await;
        upstream.head().await;
        upstream.send(format!("HTTP/1.1 200 OK\r\n{half}")).await;
        drop(upstream);
        let broken = call.await.unwrap();
        assert!(matches!(broken, Err(Error::Body(_) | Error::Transport(_))), "{broken:?}");
    }
}

#[tokio::test]
async fn a_connection_that_the_upstream_has_closed_is_not_used_again() {
    let mut gateway = TestGateway::start().await;
    for _ in 0..3 {
        let call = gateway.call(Method::POST, "/api/v1/ai/x", "{}");
        let mut upstream = gateway.upstream.next().await;
        upstream.head().await;
        upstream.expect("{}").await;
        upstream.send(answer("ok")).await;
        assert_eq!(call.await.unwrap().status, 200);
        // Closed while it is idle.
        drop(upstream);
    }
    let call = gateway.call(Method::POST, "/api/v1/ai/x", "{}");
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.expect("{}").await;
    upstream.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok").await;
    assert_eq!(call.await.unwrap().status, 200);
    assert_eq!(upstream.rest().await, b"", "nothing is sent on a connection with `Connection: close`");
}

#[tokio::test]
async fn a_caller_that_stops_in_the_middle_of_its_body_is_408() {
    let mut gateway = TestGateway::start_with(&[("WEIR_HTTP_READ_TIMEOUT", "3s")]).await;
    let mut caller = gateway.start_request("POST /api/v1/ai/x", &["Content-Length: 10"]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    assert_eq!(caller.head().await.line(), "HTTP/1.1 408 Request Timeout");
    assert_eq!(upstream.rest().await, b"");
}

#[tokio::test]
async fn bytes_after_a_response_reach_no_caller() {
    let mut gateway = TestGateway::start().await;
    let call = gateway.call(Method::GET, "/api/v1/ai/1", "");
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send([answer("mine"), answer("somebody else's")].concat()).await;
    assert_eq!(&call.await.unwrap().body[..], b"mine");
    assert_eq!(upstream.rest().await, b"", "the connection is not used again");
    let call = gateway.call(Method::GET, "/api/v1/ai/2", "");
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.send(answer("mine too")).await;
    assert_eq!(&call.await.unwrap().body[..], b"mine too");
}

#[tokio::test]
async fn an_upstream_may_answer_before_it_has_read_everything() {
    let mut gateway = TestGateway::start().await;
    let mut caller = gateway.start_request("POST /api/v1/ai/x", &["Content-Length: 1000000"]).await;
    caller.send("the beginning").await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    upstream.expect("the beginning").await;
    upstream.send("HTTP/1.1 422 No\r\nConnection: close\r\nContent-Length: 6\r\n\r\nenough").await;
    drop(upstream);
    assert_eq!(caller.head().await.line(), "HTTP/1.1 422 No");
    caller.expect("enough").await;
}

#[tokio::test]
async fn a_request_with_a_length_and_chunks_reaches_the_upstream_as_one() {
    let mut gateway = TestGateway::start().await;
    let headers = ["Content-Length: 60", "Transfer-Encoding: chunked"];
    let mut caller = gateway.start_request("POST /api/v1/ai/x", &headers).await;
    caller.send("2\r\nhi\r\n0\r\n\r\nGET /api/v1/ai/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    let answered = tokio::select! {
        // Refused, or passed on with one framing: both are unambiguous.
        head = caller.head() => Some(head),
        mut upstream = gateway.upstream.next() => {
            let head = upstream.head().await;
            assert_eq!((head.get("content-length"), head.get("transfer-encoding")), (None, Some("chunked")));
            assert_eq!(upstream.chunked(2).await, b"hi");
            upstream.send(answer("ok")).await;
            None
        }
    };
    let head = match answered {
        Some(head) => head,
        None => caller.head().await,
    };
    let is_refused = head.line().starts_with("HTTP/1.1 400") || head.line().starts_with("HTTP/1.1 401");
    assert!(is_refused || head.line() == "HTTP/1.1 200 OK", "{head:?}");
    assert!(gateway.upstream.accepted() <= 1, "the smuggled request has no token and is not forwarded");
}
