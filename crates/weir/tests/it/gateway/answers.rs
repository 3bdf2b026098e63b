//! An answer is taken for the same whichever way its call went: by hyper's client, or directly. What a call asks of its
//! connection (`TE`) decides the way, and nothing else differs.

use super::given::Gate;

/// What upstreams answer, good and bad; the connection ends after each.
const ANSWERS: &[&str] = &[
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more",
    "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: 5 5\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\n\r\nuntil the end",
    "HTTP/1.1 200 OK\r\n\r\n",
    "HTTP/1.0 200 OK\r\n\r\nold",
    "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nold",
    "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nold\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n00 ;c\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nand more",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nno trailer\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\nhello",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "HTTP/1.1 204 Nothing\r\n\r\n",
    "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
    "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\nContent-Length: 5\r\n\r\n",
    "HTTP/1.1 100 Continue\r\nX-A: 1\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "HTTP/1.1 100 Continue\r\n\r\n",
    "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "HTTP/1.1 599 Own Words\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nX-Empty:\r\nConnection: X-B, keep-alive\r\nX-B: 1\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nX-A: \x09tab\x09\r\nX-Latin: \u{e4}\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nX-A: 1\r\n folded\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nX-A : 1\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nX-A: \0\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nno header\r\n\r\n",
    "HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "HTTP/2 200 OK\r\nContent-Length: 0\r\n\r\n",
    "\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nX-Half: ",
    "HTTP/1.1",
    "nonsense\r\n\r\n",
    "",
];

/// Goes to hyper's client, as it asks for trailers.
const BY_HYPER: &str = "Connection: close, TE\r\nTE: trailers";
const DIRECTLY: &str = "Connection: close";

/// What a caller gets.
#[derive(Debug, PartialEq, Eq)]
enum Got {
    /// A head, without what differs from call to call, and its body.
    Whole(Vec<String>, String),
    /// An answer that anybody can tell is not all of it.
    Broken,
}

async fn told(gate: &mut Gate, method: &str, connection: &str, answer: &str, size: usize) -> Got {
    let mut caller = gate.asking(&format!("{method} /api/v1/ai/x"), &[connection]).await;
    let mut upstream = gate.upstream.next().await;
    let head = upstream.head().await;
    assert_eq!(head.get("te").is_some(), connection == BY_HYPER, "the way that is meant is taken");
    for piece in answer.as_bytes().chunks(size) {
        upstream.say(piece).await;
        tokio::task::yield_now().await;
    }
    upstream.finish().await;
    let text = caller.rest().await;
    read(&String::from_utf8_lossy(&text), method == "HEAD").unwrap_or(Got::Broken)
}

/// Reads an answer that ended with its connection; none, when that was before it should.
fn read(text: &str, is_bodiless: bool) -> Option<Got> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines: Vec<String> = head.lines().map(str::to_owned).collect();
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length: "));
    let is_chunked = lines.iter().any(|line| line == "transfer-encoding: chunked");
    let body = match length {
        _ if is_bodiless || head.contains(" 204 ") || head.contains(" 304 ") => {
            assert_eq!(body, "");
            String::new()
        }
        Some(length) => body.get(..length.parse().unwrap()).filter(|whole| *whole == body)?.to_owned(),
        None if is_chunked => dechunked(body)?,
        None => panic!("nobody knows where it ends: {text}"),
    };
    for name in ["date: ", "x-request-id: ", "x-ratelimit-", "ratelimit"] {
        lines.retain(|line| !line.starts_with(name));
    }
    lines.sort();
    if head.starts_with("HTTP/1.1 502 ") {
        // Ours, and it tells the time, which is more or less long.
        return Some(Got::Whole(vec![lines.swap_remove(0)], String::new()));
    }
    Some(Got::Whole(lines, body))
}

/// What is in chunks, if the last one is there. How it is cut depends on how it came.
fn dechunked(mut text: &str) -> Option<String> {
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
async fn both_ways_take_an_answer_for_the_same() {
    let mut gate = Gate::start().await;
    for answer in ANSWERS {
        for method in ["GET", "HEAD"] {
            for size in [1, 50, usize::MAX] {
                let directly = told(&mut gate, method, DIRECTLY, answer, size).await;
                let by_hyper = told(&mut gate, method, BY_HYPER, answer, size).await;
                assert_eq!(directly, by_hyper, "{method} {answer:?} in pieces of {size}");
            }
        }
    }
}
