//! Valid and invalid responses of an upstream: whether the caller gets the whole response, a 502 or a truncated one, and
//! whether the connection to the upstream is used again.

use weir_testkit::raw_connection::RawConnection;

use self::Connection::{Closed, ClosedByUpstream, Reused};
use self::Outcome::{BadGateway, Truncated, Whole};
use super::fixtures::TestGateway;

/// What the caller gets.
#[derive(Debug, PartialEq, Eq)]
enum Outcome<'a> {
    /// This status and body.
    Whole(u16, &'a str),
    /// A 502 of Weir's own.
    BadGateway,
    /// A response that is recognizably incomplete, or none.
    Truncated,
}

/// What happens to the upstream connection after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connection {
    /// It carries the next call.
    Reused,
    /// Weir closes it, and the next call uses another one.
    Closed,
    /// The upstream has to close it, which ends or truncates the response.
    ClosedByUpstream,
}

/// Responses of an upstream; what a GET caller gets; the status that a HEAD caller gets; what happens to the connection.
const ANSWERS: &[(&str, Outcome<'static>, u16, Connection)] = &[
    // With a Content-Length.
    ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Whole(200, "hello"), 200, Reused),
    (
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello", Whole(200, "hello"), 200, Reused),
    ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Whole(200, ""), 200, Reused),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more", Whole(200, "hello"), 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", Truncated, 200, ClosedByUpstream),
    // With an ambiguous or invalid Content-Length.
    ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5, x\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5 5\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5,\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: x\r\nContent-Length: 5\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551621\r\n\r\nhello", BadGateway, 200, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\nhello", BadGateway, 200, Closed),
    // Without a length: the body ends with the connection.
    ("HTTP/1.1 200 OK\r\n\r\nuntil the end", Whole(200, "until the end"), 200, ClosedByUpstream),
    ("HTTP/1.1 200 OK\r\n\r\n", Whole(200, ""), 200, ClosedByUpstream),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nuntil the end",
        Whole(200, "until the end"),
        200,
        ClosedByUpstream,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\nhello",
        Whole(200, "hello"),
        200,
        ClosedByUpstream,
    ),
    // Chunked.
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n003\r\nllo\r\n000\r\n\r\n",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n00 ;c\r\n\r\n",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Whole(200, ""), 200, Reused),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nand more",
        Whole(200, "hello"),
        200,
        Closed,
    ),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", Truncated, 200, ClosedByUpstream),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", Truncated, 200, ClosedByUpstream),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
        Truncated,
        200,
        ClosedByUpstream,
    ),
    // Both chunked and a Content-Length: it is unclear which one the upstream meant.
    (
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Whole(200, "hello"),
        200,
        Closed,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Whole(200, "hello"),
        200,
        Closed,
    ),
    // Invalid chunks and trailers.
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5 5\r\nhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\rhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\0\r\nhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n", Truncated, 200, Closed),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\r0\r\n\r\n", Truncated, 200, Closed),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000000\r\nhello\r\n",
        Truncated,
        200,
        Closed,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n",
        Truncated,
        200,
        Closed,
    ),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\rx", Truncated, 200, Closed),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nno trailer\r\n\r\n",
        Truncated,
        200,
        Closed,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-A: 1\rX-B: 2\r\n\r\n",
        Truncated,
        200,
        Closed,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-A: \0\r\n\r\n",
        Truncated,
        200,
        Closed,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n folded: 1\r\n\r\n",
        Truncated,
        200,
        Closed,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-A: 1\r\n folded\r\n\r\n",
        Truncated,
        200,
        Closed,
    ),
    // Statuses without a body, whatever the head says.
    ("HTTP/1.1 204 Nothing\r\n\r\n", Whole(204, ""), 204, Reused),
    ("HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", Whole(204, ""), 204, Reused),
    ("HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", Whole(204, ""), 204, Closed),
    ("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", Whole(204, ""), 204, Closed),
    ("HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 5\r\n\r\n", Whole(304, ""), 304, Closed),
    // Interim responses (1xx).
    (
        "HTTP/1.1 100 Continue\r\nX-A: 1\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        Whole(200, "ok"),
        200,
        Reused,
    ),
    (
        "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        Whole(200, "ok"),
        200,
        Reused,
    ),
    ("HTTP/1.1 100 Continue\r\n\r\n", BadGateway, 502, ClosedByUpstream),
    (
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        BadGateway,
        502,
        Closed,
    ),
    // HTTP versions and Connection headers.
    ("HTTP/1.0 200 OK\r\n\r\nold", Whole(200, "old"), 200, ClosedByUpstream),
    ("HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold", Whole(200, "old"), 200, Closed),
    (
        "HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 3\r\n\r\nold",
        Whole(200, "old"),
        200,
        Reused,
    ),
    (
        "HTTP/1.0 200 OK\r\nConnection: keep-alive, close\r\nContent-Length: 3\r\n\r\nold",
        Whole(200, "old"),
        200,
        Closed,
    ),
    ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nold\r\n0\r\n\r\n", BadGateway, 200, Closed),
    (
        "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        Whole(200, "ok"),
        200,
        Reused,
    ),
    ("HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\nok", Whole(200, "ok"), 200, Closed),
    (
        "HTTP/1.1 200 OK\r\nConnection: x, close\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        Whole(200, "ok"),
        200,
        Closed,
    ),
    ("HTTP/2 200 OK\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    // Unusual heads.
    ("HTTP/1.1 599 Own Words\r\nContent-Length: 0\r\n\r\n", Whole(599, ""), 599, Reused),
    ("HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", Whole(200, ""), 200, Reused),
    ("HTTP/1.1 200 OK\nContent-Length: 2\n\nok", Whole(200, "ok"), 200, Reused),
    (
        "HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nX-Empty:\r\nConnection: X-B, keep-alive\r\nX-B: 1\r\nContent-Length: 0\r\n\r\n",
        Whole(200, ""),
        200,
        Reused,
    ),
    (
        "HTTP/1.1 200 OK\r\nX-A: \ttab\t\r\nX-Latin: \u{e4}\r\nContent-Length: 0\r\n\r\n",
        Whole(200, ""),
        200,
        Reused,
    ),
    ("\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Whole(200, ""), 200, Reused),
    // Invalid heads.
    ("HTTP/1.1 200 OK\r\nX-A: 1\r\n folded\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 200 OK\r\n X-A: 1\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 200 OK\r\nX-A : 1\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 200 OK\r\nX-A: \0\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 200 OK\r\nX-\0A: 1\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nno header\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Closed),
    ("SSH-2.0-OpenSSH_9\r\n", BadGateway, 502, Closed),
    ("\0\r\n\r\n", BadGateway, 502, Closed),
    ("nonsense\r\n\r\n", BadGateway, 502, Closed),
    ("HTTP/1.1 200 OK\r\nX-Half: ", BadGateway, 502, ClosedByUpstream),
    ("HTTP/1.1", BadGateway, 502, ClosedByUpstream),
    ("", BadGateway, 502, ClosedByUpstream),
];

/// Makes a call that the upstream answers in pieces of `size` bytes, then closes its side. Returns all that the caller
/// gets.
async fn call(gateway: &mut TestGateway, method: &str, answer: &str, size: usize) -> String {
    let mut caller = gateway.start_request(&format!("{method} /api/v1/ai/x"), &["Connection: close"]).await;
    let mut upstream = gateway.upstream.next().await;
    upstream.head().await;
    for piece in answer.as_bytes().chunks(size) {
        upstream.send(piece).await;
        tokio::task::yield_now().await;
    }
    upstream.finish().await;
    String::from_utf8_lossy(&caller.rest().await).into_owned()
}

/// Parses a response that ended with its connection, and writes its body to `into`.
fn parse<'a>(text: &str, is_bodiless: bool, into: &'a mut String) -> Outcome<'a> {
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return Truncated };
    let status = head[9..12].parse().unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let whole = match length {
        _ if is_bodiless || status == 204 || status == 304 => {
            assert_eq!(body, "", "{head}");
            Some(String::new())
        }
        Some(length) => (length.parse() == Ok(body.len())).then(|| body.to_owned()),
        None if head.contains("transfer-encoding: chunked") => join_chunks(body),
        None => panic!("a response without framing: {text}"),
    };
    let Some(whole) = whole else { return Truncated };
    if status == 502 {
        return BadGateway;
    }
    *into = whole;
    Whole(status, into)
}

/// Joins the chunks of a body, or returns `None` if the last one is missing. Their sizes depend on timing.
fn join_chunks(mut text: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (size, rest) = text.split_once("\r\n")?;
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return (rest == "\r\n").then_some(body);
        }
        body.push_str(rest.get(..size)?);
        text = rest.get(size..)?.strip_prefix("\r\n")?;
    }
}

#[tokio::test]
async fn a_response_is_passed_on_whole_or_becomes_502_or_is_truncated() {
    let mut gateway = TestGateway::start().await;
    let mut wrong = Vec::new();
    for (answer, expected, status, _) in ANSWERS {
        for size in [1, 50, usize::MAX] {
            let text = call(&mut gateway, "GET", answer, size).await;
            let mut body = String::new();
            let outcome = parse(&text, false, &mut body);
            if outcome != *expected {
                wrong.push(format!("GET {answer:?} in pieces of {size}: {outcome:?}, not {expected:?}"));
            }
            let text = call(&mut gateway, "HEAD", answer, size).await;
            let mut body = String::new();
            let outcome = parse(&text, true, &mut body);
            let expected = if *status == 502 { BadGateway } else { Whole(*status, "") };
            if outcome != expected {
                wrong.push(format!("HEAD {answer:?} in pieces of {size}: {outcome:?}, not {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// How many callers follow when the first one's connection is closed. The server may keep idle connections per thread, and
/// with this many callers one is served on the thread of the first.
const FOLLOWERS: usize = 8;

/// Makes another call, and returns whether it reuses the upstream connection `used`.
async fn call_again(
    gateway: &mut TestGateway,
    caller: &mut RawConnection,
    used: &mut RawConnection,
) -> Connection {
    const LAST: &str = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nmine";
    caller.send(gateway.head("GET /api/v1/ai/again", &["Connection: close"])).await;
    let found = tokio::select! {
        Some(_head) = used.next_head() => {
            used.send(LAST).await;
            Reused
        }
        mut other = gateway.upstream.next() => {
            other.head().await;
            other.send(LAST).await;
            Closed
        }
    };
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
    caller.expect("mine").await;
    found
}

/// Reads a response with this body. Returns whether the caller's connection stays open.
async fn read_whole(caller: &mut RawConnection, outcome: &Outcome<'_>) -> bool {
    if *outcome == Truncated {
        caller.rest().await;
        return false;
    }
    let head = caller.head().await;
    match (head.get("content-length"), head.get("transfer-encoding"), outcome) {
        (_, _, Whole(204 | 304, _)) => {}
        (Some(length), _, _) => drop(caller.bytes(length.parse().unwrap()).await),
        (None, Some(_), Whole(_, body)) => drop(caller.chunked(body.len()).await),
        framing => panic!("a response without framing: {framing:?}"),
    }
    true
}

#[tokio::test]
async fn a_connection_is_used_again_only_if_its_response_has_ended_unambiguously() {
    let mut gateway = TestGateway::start().await;
    let mut wrong = Vec::new();
    for (answer, outcome, _, expected) in
        ANSWERS.iter().filter(|(_, _, _, expected)| *expected != ClosedByUpstream)
    {
        let mut caller = gateway.start_request("GET /api/v1/ai/x", &[]).await;
        let mut upstream = gateway.upstream.next().await;
        upstream.head().await;
        upstream.send(answer).await;
        let mut found = Vec::new();
        if read_whole(&mut caller, outcome).await {
            found.push(call_again(&mut gateway, &mut caller, &mut upstream).await);
        } else {
            for _ in 0..FOLLOWERS {
                let mut follower = gateway.caller().await;
                found.push(call_again(&mut gateway, &mut follower, &mut upstream).await);
            }
        }
        if found.iter().any(|found| found != expected) {
            wrong.push(format!("{answer:?}: {found:?}, not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The status that the caller gets for a response in pieces of 1,000 bytes, or `None` if it is truncated.
async fn status(gateway: &mut TestGateway, answer: &str) -> Option<u16> {
    let text = call(gateway, "GET", answer, 1_000).await;
    match parse(&text, false, &mut String::new()) {
        Whole(status, _) => Some(status),
        BadGateway => Some(502),
        Truncated => None,
    }
}

#[tokio::test]
async fn heads_chunk_extensions_and_trailers_are_bounded() {
    let mut gateway = TestGateway::start().await;
    let head = |lines: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{lines}\r\n");
    let line = |length: usize| head(&format!("X-A: {}\r\n", "x".repeat(length)));
    assert_eq!(status(&mut gateway, &line(60_000)).await, Some(200));
    assert_eq!(status(&mut gateway, &line(200_000)).await, Some(502));
    assert_eq!(status(&mut gateway, &head(&"X-A: 1\r\n".repeat(90))).await, Some(200));
    assert_eq!(status(&mut gateway, &head(&"X-A: 1\r\n".repeat(1_000))).await, Some(502));
    let chunks = |text: &str| format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{text}");
    let extension = |length: usize| chunks(&format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(length)));
    assert_eq!(status(&mut gateway, &extension(10_000)).await, Some(200));
    assert_eq!(status(&mut gateway, &extension(100_000)).await, None);
    let extensions = chunks(&"1;1234567\r\nx\r\n".repeat(3_000));
    assert_eq!(status(&mut gateway, &extensions).await, None, "the sum of all extensions is bounded");
    let trailer = |length: usize| chunks(&format!("0\r\nX-A: {}\r\n\r\n", "t".repeat(length)));
    assert_eq!(status(&mut gateway, &trailer(10_000)).await, Some(200));
    assert_eq!(status(&mut gateway, &trailer(100_000)).await, None);
    let trailers = |count: usize| chunks(&format!("0\r\n{}\r\n", "X-A: 1\r\n".repeat(count)));
    assert_eq!(status(&mut gateway, &trailers(90)).await, Some(200));
    assert_eq!(status(&mut gateway, &trailers(1_500)).await, None);
}
