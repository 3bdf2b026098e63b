//! What becomes of an upstream's answer, good or bad: whether the caller gets it whole, gets 502, or is cut off, and whether
//! the upstream is asked again over the same connection.

use weir_testkit::raw_connection::RawConnection;

use self::Connection::{Dropped, Ended, Reused};
use self::Outcome::{BadGateway, CutOff, Whole};
use super::fixtures::Gate;

/// What a caller gets.
#[derive(Debug, PartialEq, Eq)]
enum Outcome<'a> {
    /// This status and body.
    Whole(u16, &'a str),
    /// 502, from Weir.
    BadGateway,
    /// An answer that anybody can tell is not all of it, or none.
    CutOff,
}

/// What becomes of the connection that an answer came over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connection {
    /// It carries the next call.
    Reused,
    /// It is closed: the next call goes over another one.
    Dropped,
    /// The upstream has to close it: only that ends the answer, or breaks it off.
    Ended,
}

/// What upstreams answer; what comes of it when it answers GET; the status that HEAD gets; and what becomes of the
/// connection.
const ANSWERS: &[(&str, Outcome<'static>, u16, Connection)] = &[
    // A length.
    ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Whole(200, "hello"), 200, Reused),
    (
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        Whole(200, "hello"),
        200,
        Reused,
    ),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello", Whole(200, "hello"), 200, Reused),
    ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Whole(200, ""), 200, Reused),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more", Whole(200, "hello"), 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", CutOff, 200, Ended),
    // A length that could be read in two ways, or in none.
    ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5, x\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5 5\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 5,\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: x\r\nContent-Length: 5\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551621\r\n\r\nhello", BadGateway, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\nhello", BadGateway, 200, Dropped),
    // No length.
    ("HTTP/1.1 200 OK\r\n\r\nuntil the end", Whole(200, "until the end"), 200, Ended),
    ("HTTP/1.1 200 OK\r\n\r\n", Whole(200, ""), 200, Ended),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nuntil the end",
        Whole(200, "until the end"),
        200,
        Ended,
    ),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\nhello", Whole(200, "hello"), 200, Ended),
    // Chunks.
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
        Dropped,
    ),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", CutOff, 200, Ended),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", CutOff, 200, Ended),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n", CutOff, 200, Ended),
    // Chunks and a length: whoever made it may have meant the other.
    (
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Whole(200, "hello"),
        200,
        Dropped,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        Whole(200, "hello"),
        200,
        Dropped,
    ),
    // What is no chunk.
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5 5\r\nhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\rhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\0\r\nhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n", CutOff, 200, Dropped),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\r0\r\n\r\n", CutOff, 200, Dropped),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000000\r\nhello\r\n",
        CutOff,
        200,
        Dropped,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n",
        CutOff,
        200,
        Dropped,
    ),
    ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\rx", CutOff, 200, Dropped),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nno trailer\r\n\r\n",
        CutOff,
        200,
        Dropped,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-A: 1\rX-B: 2\r\n\r\n",
        CutOff,
        200,
        Dropped,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-A: \0\r\n\r\n",
        CutOff,
        200,
        Dropped,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n folded: 1\r\n\r\n",
        CutOff,
        200,
        Dropped,
    ),
    (
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-A: 1\r\n folded\r\n\r\n",
        CutOff,
        200,
        Dropped,
    ),
    // No body, whatever the head says.
    ("HTTP/1.1 204 Nothing\r\n\r\n", Whole(204, ""), 204, Reused),
    ("HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", Whole(204, ""), 204, Reused),
    ("HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", Whole(204, ""), 204, Dropped),
    ("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", Whole(204, ""), 204, Dropped),
    ("HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 5\r\n\r\n", Whole(304, ""), 304, Dropped),
    // Announcements.
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
    ("HTTP/1.1 100 Continue\r\n\r\n", BadGateway, 502, Ended),
    (
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        BadGateway,
        502,
        Dropped,
    ),
    // Versions, and what they say of the connection.
    ("HTTP/1.0 200 OK\r\n\r\nold", Whole(200, "old"), 200, Ended),
    ("HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nold", Whole(200, "old"), 200, Dropped),
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
        Dropped,
    ),
    ("HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nold\r\n0\r\n\r\n", BadGateway, 200, Dropped),
    (
        "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        Whole(200, "ok"),
        200,
        Reused,
    ),
    ("HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\nok", Whole(200, "ok"), 200, Dropped),
    (
        "HTTP/1.1 200 OK\r\nConnection: x, close\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        Whole(200, "ok"),
        200,
        Dropped,
    ),
    ("HTTP/2 200 OK\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    // Heads that are unusual.
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
    // Heads that are none.
    ("HTTP/1.1 200 OK\r\nX-A: 1\r\n folded\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 200 OK\r\n X-A: 1\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 200 OK\r\nX-A : 1\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 200 OK\r\nX-A: \0\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 200 OK\r\nX-\0A: 1\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nno header\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n", BadGateway, 502, Dropped),
    ("SSH-2.0-OpenSSH_9\r\n", BadGateway, 502, Dropped),
    ("\0\r\n\r\n", BadGateway, 502, Dropped),
    ("nonsense\r\n\r\n", BadGateway, 502, Dropped),
    ("HTTP/1.1 200 OK\r\nX-Half: ", BadGateway, 502, Ended),
    ("HTTP/1.1", BadGateway, 502, Ended),
    ("", BadGateway, 502, Ended),
];

/// What a caller gets when the upstream answers in pieces of so many bytes, and then leaves.
async fn ask(gate: &mut Gate, method: &str, answer: &str, size: usize) -> String {
    let mut caller = gate.asking(&format!("{method} /api/v1/ai/x"), &["Connection: close"]).await;
    let mut upstream = gate.upstream.next().await;
    upstream.head().await;
    for piece in answer.as_bytes().chunks(size) {
        upstream.send(piece).await;
        tokio::task::yield_now().await;
    }
    upstream.finish().await;
    String::from_utf8_lossy(&caller.rest().await).into_owned()
}

/// Reads an answer that ended with its connection, and puts its body there.
fn read<'a>(text: &str, is_bodiless: bool, into: &'a mut String) -> Outcome<'a> {
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return CutOff };
    let status = head[9..12].parse().unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let whole = match length {
        _ if is_bodiless || status == 204 || status == 304 => {
            assert_eq!(body, "", "{head}");
            Some(String::new())
        }
        Some(length) => (length.parse() == Ok(body.len())).then(|| body.to_owned()),
        None if head.contains("transfer-encoding: chunked") => join_chunks(body),
        None => panic!("nobody knows where it ends: {text}"),
    };
    let Some(whole) = whole else { return CutOff };
    if status == 502 {
        return BadGateway;
    }
    *into = whole;
    Whole(status, into)
}

/// What is in chunks, if the last one is there. How it is cut depends on how it came.
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
async fn an_answer_is_passed_on_whole_or_is_502_or_breaks_off() {
    let mut gate = Gate::start().await;
    let mut wrong = Vec::new();
    for (answer, expected, status, _) in ANSWERS {
        for size in [1, 50, usize::MAX] {
            let text = ask(&mut gate, "GET", answer, size).await;
            let mut body = String::new();
            let outcome = read(&text, false, &mut body);
            if outcome != *expected {
                wrong.push(format!("GET {answer:?} in pieces of {size}: {outcome:?}, not {expected:?}"));
            }
            let text = ask(&mut gate, "HEAD", answer, size).await;
            let mut body = String::new();
            let outcome = read(&text, true, &mut body);
            let expected = if *status == 502 { BadGateway } else { Whole(*status, "") };
            if outcome != expected {
                wrong.push(format!("HEAD {answer:?} in pieces of {size}: {outcome:?}, not {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// How many callers follow where the first one's connection is gone: connections to the upstream may be kept for each
/// thread of the server, and one of these callers meets the thread of the first.
const FOLLOWERS: usize = 8;

/// Which connection a call goes over after this one carried another.
async fn ask_again(gate: &mut Gate, caller: &mut RawConnection, used: &mut RawConnection) -> Connection {
    const LAST: &str = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nmine";
    caller.send(gate.head("GET /api/v1/ai/again", &["Connection: close"])).await;
    let found = tokio::select! {
        Some(_head) = used.next_head() => {
            used.send(LAST).await;
            Reused
        }
        mut other = gate.upstream.next() => {
            other.head().await;
            other.send(LAST).await;
            Dropped
        }
    };
    assert_eq!(caller.head().await.line(), "HTTP/1.1 200 OK");
    caller.expect("mine").await;
    found
}

/// Reads an answer with this body; returns whether the connection stays open.
async fn read_whole(caller: &mut RawConnection, outcome: &Outcome<'_>) -> bool {
    if *outcome == CutOff {
        caller.rest().await;
        return false;
    }
    let head = caller.head().await;
    match (head.get("content-length"), head.get("transfer-encoding"), outcome) {
        (_, _, Whole(204 | 304, _)) => {}
        (Some(length), _, _) => drop(caller.bytes(length.parse().unwrap()).await),
        (None, Some(_), Whole(_, body)) => drop(caller.chunked(body.len()).await),
        framing => panic!("nobody knows where it ends: {framing:?}"),
    }
    true
}

#[tokio::test]
async fn a_connection_is_used_again_only_if_its_answer_has_ended_for_both_sides() {
    let mut gate = Gate::start().await;
    let mut wrong = Vec::new();
    for (answer, outcome, _, expected) in ANSWERS.iter().filter(|(_, _, _, expected)| *expected != Ended) {
        let mut caller = gate.asking("GET /api/v1/ai/x", &[]).await;
        let mut upstream = gate.upstream.next().await;
        upstream.head().await;
        upstream.send(answer).await;
        let mut found = Vec::new();
        if read_whole(&mut caller, outcome).await {
            found.push(ask_again(&mut gate, &mut caller, &mut upstream).await);
        } else {
            for _ in 0..FOLLOWERS {
                let mut follower = gate.caller().await;
                found.push(ask_again(&mut gate, &mut follower, &mut upstream).await);
            }
        }
        if found.iter().any(|found| found != expected) {
            wrong.push(format!("{answer:?}: {found:?}, not {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The status of an answer that comes in pieces of 1,000 bytes; nothing, if it does not come whole.
async fn status(gate: &mut Gate, answer: &str) -> Option<u16> {
    let text = ask(gate, "GET", answer, 1_000).await;
    match read(&text, false, &mut String::new()) {
        Whole(status, _) => Some(status),
        BadGateway => Some(502),
        CutOff => None,
    }
}

#[tokio::test]
async fn what_surrounds_a_body_is_bounded() {
    let mut gate = Gate::start().await;
    let head = |lines: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{lines}\r\n");
    let line = |length: usize| head(&format!("X-A: {}\r\n", "x".repeat(length)));
    assert_eq!(status(&mut gate, &line(60_000)).await, Some(200));
    assert_eq!(status(&mut gate, &line(200_000)).await, Some(502));
    assert_eq!(status(&mut gate, &head(&"X-A: 1\r\n".repeat(90))).await, Some(200));
    assert_eq!(status(&mut gate, &head(&"X-A: 1\r\n".repeat(1_000))).await, Some(502));
    let chunks = |text: &str| format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{text}");
    let extension = |length: usize| chunks(&format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(length)));
    assert_eq!(status(&mut gate, &extension(10_000)).await, Some(200));
    assert_eq!(status(&mut gate, &extension(100_000)).await, None);
    let extensions = chunks(&"1;1234567\r\nx\r\n".repeat(3_000));
    assert_eq!(status(&mut gate, &extensions).await, None, "all of them together");
    let trailer = |length: usize| chunks(&format!("0\r\nX-A: {}\r\n\r\n", "t".repeat(length)));
    assert_eq!(status(&mut gate, &trailer(10_000)).await, Some(200));
    assert_eq!(status(&mut gate, &trailer(100_000)).await, None);
    let trailers = |count: usize| chunks(&format!("0\r\n{}\r\n", "X-A: 1\r\n".repeat(count)));
    assert_eq!(status(&mut gate, &trailers(90)).await, Some(200));
    assert_eq!(status(&mut gate, &trailers(1_500)).await, None);
}
