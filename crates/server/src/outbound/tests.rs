use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const BOUNDS: OutboundLimits = OutboundLimits {
    connect_timeout: Duration::from_secs(1),
    read_timeout: Duration::from_millis(300),
    body_max: 1_000,
    idle_max: 4,
};

/// Answers the first request of each connection with these bytes, and leaves the connection open.
async fn answering(bytes: &'static [u8]) -> OutboundTarget {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = target(&format!("http://{}", listener.local_addr().unwrap()));
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 4_096];
            let _ = stream.read(&mut head).await;
            let _ = stream.write_all(bytes).await;
            open.push(stream);
        }
    });
    target
}

fn target(url: &str) -> OutboundTarget {
    OutboundTarget::new(&url.parse().unwrap()).unwrap()
}

async fn post(target: &OutboundTarget) -> Result<(u16, Bytes), OutboundError> {
    let client = OutboundClient::new(Reach::Anywhere, BOUNDS);
    let answer = client.post(target, HeaderMap::new(), Bytes::from_static(b"{}")).await?;
    Ok((answer.status.as_u16(), answer.body))
}

#[tokio::test]
async fn an_answer_is_taken_whole_or_not_at_all() {
    let whole = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").await;
    assert_eq!(post(&whole).await, Ok((200, Bytes::from_static(b"hi"))));
    let slow = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi").await;
    assert_eq!(post(&slow).await, Err(OutboundError::TimedOut));
    let silent = answering(b"").await;
    assert_eq!(post(&silent).await, Err(OutboundError::TimedOut));
    let long = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n").await;
    assert_eq!(post(&long).await, Err(OutboundError::TooLarge));
    let garbage = answering(b"\x00\x01 no HTTP at all\r\n\r\n").await;
    assert!(matches!(post(&garbage).await, Err(OutboundError::Unreadable(_))));
}

#[tokio::test]
async fn a_redirect_is_an_answer_and_is_not_followed() {
    let elsewhere =
        answering(b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n");
    assert_eq!(post(&elsewhere.await).await, Ok((307, Bytes::new())));
}

#[tokio::test]
async fn nobody_there_is_told_from_nobody_answering() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gone = target(&format!("http://{}", listener.local_addr().unwrap()));
    drop(listener);
    assert!(matches!(post(&gone).await, Err(OutboundError::Unreachable(_))));
    assert!(matches!(
        post(&target("http://no-such-host.invalid/")).await,
        Err(OutboundError::Unreachable(_))
    ));
}

#[tokio::test]
async fn a_public_client_does_not_connect_to_private_addresses_however_they_are_written() {
    let client = OutboundClient::new(Reach::Public, BOUNDS);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let hosts =
        ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "127.1", "0"];
    for host in hosts {
        let target = target(&format!("http://{host}:{port}/"));
        let problem = client.post(&target, HeaderMap::new(), Bytes::new()).await.unwrap_err();
        assert_eq!(problem, OutboundError::ForbiddenAddress, "{host}");
    }
    let accepted = tokio::time::timeout(Duration::ZERO, listener.accept()).await;
    assert!(accepted.is_err(), "nobody has connected");
}

#[tokio::test]
async fn a_password_in_a_url_goes_into_a_header_and_not_into_the_request_line() {
    let url = "http://user:pass@example.com/a?b#c".parse().unwrap();
    let OutboundTarget { uri, authorization } = OutboundTarget::new(&url).unwrap();
    assert_eq!(uri, "http://example.com/a?b");
    assert_eq!(authorization.unwrap(), "Basic dXNlcjpwYXNz");
    assert!(OutboundTarget::new(&"ftp://example.com".parse().unwrap()).is_none());
}

#[test]
fn credentials_in_a_url_are_shown_as_they_are_meant() {
    for (url, expected) in [
        ("http://user:p%40ss@h/", "user:p@ss"),
        ("http://a%2Fb:%25%3a%20@h/", "a/b:%: "),
        ("http://user:p@ss@h/", "user:p@ss"),
        ("http://%C3%BC:x@h/", "ü:x"),
        ("http://key@h/", "key:"),
    ] {
        let expected = format!("Basic {}", STANDARD.encode(expected));
        assert_eq!(target(url).authorization().unwrap(), expected.as_str(), "{url}");
    }
    assert!(target("http://h/").authorization().is_none());
}

#[tokio::test]
async fn a_retry_after_is_told() {
    let busy = answering(b"HTTP/1.1 503 X\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n").await;
    let client = OutboundClient::new(Reach::Anywhere, BOUNDS);
    let answer = client.post(&busy, HeaderMap::new(), Bytes::new()).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.retry_after), (503, Some(Duration::from_secs(7))));
}
