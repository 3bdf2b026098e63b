//! Tests of the client against hand-written responses.

use std::net::Ipv4Addr;

use serde_json::json;
use tokio::net::TcpListener;

use super::*;

/// Responds to the first request with `answer`. The task returns that request.
async fn server(answer: &'static str) -> (SocketAddr, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let request = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; 4096];
        let count = stream.read(&mut request).await.unwrap();
        stream.write_all(answer.as_bytes()).await.unwrap();
        String::from_utf8(request[..count].to_vec()).unwrap()
    });
    (addr, request)
}

#[tokio::test]
async fn posts_json_with_its_headers_and_reads_json() {
    let answer = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nContent-Length: 10\r\n\r\n{\"left\":0}";
    let (addr, request) = server(answer).await;
    let client = Client::new(format!("http://{addr}/")).with_header("authorization", "Bearer t");
    let response = client.post("/api/send", &json!({"n": 1})).await.unwrap();
    assert_eq!(response.status, 429);
    assert_eq!(response.header("Retry-After"), Some("3"));
    assert_eq!(response.json(), json!({"left": 0}));

    let request = request.await.unwrap();
    assert!(request.starts_with("POST /api/send HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("content-type: application/json\r\n"), "{request}");
    assert!(request.contains("authorization: Bearer t\r\n"), "{request}");
    assert!(request.ends_with("\r\n\r\n{\"n\":1}"), "{request}");
}

#[tokio::test]
async fn without_a_listener_a_request_is_an_error() {
    let client = Client::new(format!("http://127.0.0.1:{}", crate::ports::unused()));
    assert!(matches!(client.get("/").await, Err(Error::Transport(_))));
}

#[tokio::test]
async fn a_truncated_response_is_an_error() {
    let (addr, _asked) = server("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{").await;
    assert!(matches!(Client::new(format!("http://{addr}")).get("/").await, Err(Error::Body(_))));
}

#[tokio::test]
async fn raw_returns_the_bytes_until_the_server_closes() {
    let (addr, request) = server("HTTP/1.1 400 Bad Request\r\n\r\n").await;
    assert_eq!(raw(addr, b"\x00\x01 nonsense\r\n\r\n").await, b"HTTP/1.1 400 Bad Request\r\n\r\n");
    assert_eq!(request.await.unwrap(), "\x00\x01 nonsense\r\n\r\n");
}
