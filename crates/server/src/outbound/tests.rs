use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const LIMITS: OutboundLimits = OutboundLimits {
    connect_timeout: Duration::from_secs(1),
    read_timeout: Duration::from_millis(300),
    body_max: 1_000,
    idle_max: 4,
};

/// Answers the first request of each connection with these bytes and keeps the connection open.
async fn server(bytes: &'static [u8]) -> OutboundTarget {
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
    let client = OutboundClient::new(Reach::Anywhere, LIMITS);
    let answer = client.post(target, HeaderMap::new(), Bytes::from_static(b"{}")).await?;
    Ok((answer.status.as_u16(), answer.body))
}

#[tokio::test]
async fn only_a_complete_response_is_returned() {
    let whole = server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").await;
    assert_eq!(post(&whole).await, Ok((200, Bytes::from_static(b"hi"))));
    let slow = server(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi").await;
    assert_eq!(post(&slow).await, Err(OutboundError::TimedOut));
    let silent = server(b"").await;
    assert_eq!(post(&silent).await, Err(OutboundError::TimedOut));
    let long = server(b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n").await;
    assert_eq!(post(&long).await, Err(OutboundError::TooLarge));
    let garbage = server(b"\x00\x01 no HTTP at all\r\n\r\n").await;
    assert!(matches!(post(&garbage).await, Err(OutboundError::Unreadable(_))));
}

#[tokio::test]
async fn a_redirect_is_returned_and_not_followed() {
    let elsewhere = server(b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n");
    assert_eq!(post(&elsewhere.await).await, Ok((307, Bytes::new())));
}

#[tokio::test]
async fn a_target_without_a_listener_is_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = target(&format!("http://{}", listener.local_addr().unwrap()));
    drop(listener);
    assert!(matches!(post(&closed).await, Err(OutboundError::Unreachable(_))));
    assert!(matches!(
        post(&target("http://no-such-host.invalid/")).await,
        Err(OutboundError::Unreachable(_))
    ));
}

#[tokio::test]
async fn a_public_client_does_not_connect_to_private_addresses_in_any_notation() {
    let client = OutboundClient::new(Reach::Public, LIMITS);
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
async fn a_password_in_a_url_is_sent_in_a_header_and_not_in_the_request_line() {
    let url = "http://user:pass@example.com/a?b#c".parse().unwrap();
    let OutboundTarget { uri, authorization } = OutboundTarget::new(&url).unwrap();
    assert_eq!(uri, "http://example.com/a?b");
    assert_eq!(authorization.unwrap(), "Basic dXNlcjpwYXNz");
    assert!(OutboundTarget::new(&"ftp://example.com".parse().unwrap()).is_none());
}

#[test]
fn credentials_in_a_url_are_percent_decoded() {
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
async fn retry_after_is_returned() {
    let busy = server(b"HTTP/1.1 503 X\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n").await;
    let client = OutboundClient::new(Reach::Anywhere, LIMITS);
    let answer = client.post(&busy, HeaderMap::new(), Bytes::new()).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.retry_after), (503, Some(Duration::from_secs(7))));
}

#[test]
fn retry_after_is_a_number_of_seconds_or_a_date() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_770);
    let parse = |text| parse_retry_after(text, now).map(|wait| wait.as_secs());
    assert_eq!(parse("0"), Some(0));
    assert_eq!(parse(" 120 "), Some(120));
    assert_eq!(parse("99999999999999999999999"), Some(u64::MAX));
    assert_eq!(parse("Sun, 06 Nov 1994 08:49:37 GMT"), Some(7));
    assert_eq!(parse("Sunday, 06-Nov-94 08:49:37 GMT"), Some(7), "RFC 850");
    assert_eq!(parse("Sun Nov  6 08:49:37 1994"), Some(7), "asctime");
    assert_eq!(parse("Sun, 06 Nov 1994 08:49:00 GMT"), Some(0), "past");
    for other in ["", "-1", "1.5", "+3", "soon", "Sun, 31 Feb 1994 08:49:37 GMT", "1e3"] {
        assert_eq!(parse(other), None, "{other}");
    }
}
