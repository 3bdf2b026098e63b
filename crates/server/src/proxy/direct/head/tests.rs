use super::*;

#[test]
fn an_answer_without_a_body_that_speaks_of_one_is_the_last_of_its_connection() {
    for (lines, is_kept) in [
        ("", true),
        ("Content-Length: 0\r\n", true),
        ("Content-Length: 5\r\n", false),
        ("Transfer-Encoding: chunked\r\n", false),
    ] {
        let mut read = Bytes::from(format!("HTTP/1.1 204 No Content\r\n{lines}\r\n"));
        let head = take(&mut read, false).unwrap().unwrap();
        assert_eq!((head.is_kept, head.body), (is_kept, Body::Ended), "{lines}");
    }
}

fn read(text: &str) -> Result<Option<(Head, Bytes)>, Malformed> {
    let mut read = Bytes::copy_from_slice(text.as_bytes());
    Ok(take(&mut read, false)?.map(|head| (head, read)))
}

fn head(text: &str) -> Head {
    read(text).unwrap().unwrap().0
}

#[test]
fn a_head_is_taken_and_the_rest_left() {
    let text = "HTTP/1.1 307 Elsewhere\r\nSet-Cookie: a\r\nX-A:  b \r\nset-cookie: \r\nContent-Length: 3\r\n\r\nabcd";
    let (head, rest) = read(text).unwrap().unwrap();
    assert_eq!((head.status.as_u16(), &rest[..]), (307, &b"abcd"[..]));
    assert_eq!(head.reason.unwrap().as_bytes(), b"Elsewhere");
    let lines: Vec<_> = head.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let expected: [(&str, &[u8]); 4] =
        [("set-cookie", b"a"), ("set-cookie", b""), ("x-a", b"b"), ("content-length", b"3")];
    assert_eq!(lines, expected);
    assert_eq!((head.body, head.is_kept), (Body::Length(3), true));
    assert!(self::head("HTTP/1.1 200 OK\r\n\r\n").reason.is_none());
    assert_eq!(self::head("HTTP/1.1 200\r\n\r\n").reason.unwrap().as_bytes(), b"");
}

#[test]
fn half_a_head_is_none_and_is_left_as_it_is() {
    let text = "HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nX-A: b\r\nContent-Length: 1\r\n\r\n";
    for length in 0..text.len() {
        assert!(read(&text[..length]).unwrap().is_none(), "{length}");
    }
    let mut read = Bytes::from_static(b"HTTP/1.1 200 OK\r\nX-");
    assert!(take(&mut read, false).unwrap().is_none());
    assert_eq!(read, "HTTP/1.1 200 OK\r\nX-");
}

#[test]
fn announcements_are_passed_over() {
    let text = "HTTP/1.1 100 Continue\r\nX-A: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nX-B: 2\r\nContent-Length: 0\r\n\r\n";
    let head = head(text);
    assert_eq!(head.status, 200);
    assert!(!head.headers.contains_key("x-a") && head.headers.contains_key("x-b"));
}

#[test]
fn a_body_ends_as_its_head_says() {
    for (lines, body) in [
        ("", Body::UntilClosed),
        ("Content-Length: 0\r\n", Body::Ended),
        ("Content-Length: 7\r\n", Body::Length(7)),
        ("Content-Length: 7\r\ncontent-length: 7\r\n", Body::Length(7)),
        ("Content-Length: 7, 7\r\n", Body::Length(7)),
        ("Transfer-Encoding: chunked\r\n", Body::chunked()),
        ("Transfer-Encoding: gzip, Chunked\r\n", Body::chunked()),
        ("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", Body::chunked()),
        ("Transfer-Encoding: chunked, gzip\r\n", Body::UntilClosed),
        ("Transfer-Encoding: identity\r\n", Body::UntilClosed),
        ("Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", Body::chunked()),
        ("Transfer-Encoding: chunked\r\nContent-Length: x\r\n", Body::chunked()),
    ] {
        let head = head(&format!("HTTP/1.1 200 OK\r\n{lines}\r\n"));
        assert_eq!(head.body, body, "{lines}");
        let is_told_once = !lines.contains("Length") || !lines.contains("Transfer");
        assert_eq!(head.is_kept, is_told_once, "{lines}");
        assert!(!head.headers.contains_key("transfer-encoding"));
        assert!(head.headers.contains_key("content-length") == (lines.contains("Length") && is_told_once));
    }
}

#[test]
fn some_answers_have_no_body_whatever_they_say() {
    for (code, is_kept) in [("204 No Content", false), ("304 Not Modified", true)] {
        let head = head(&format!("HTTP/1.1 {code}\r\nContent-Length: 5\r\n\r\n"));
        assert_eq!((head.body, head.is_kept), (Body::Ended, is_kept), "{code}");
    }
    let mut read = Bytes::from_static(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n");
    let head = take(&mut read, true).unwrap().unwrap();
    assert_eq!((head.body, &head.headers["content-length"]), (Body::Ended, &HeaderValue::from_static("5")));
}

#[test]
fn a_connection_is_kept_unless_somebody_says_otherwise() {
    for (version, lines, is_kept) in [
        ("1.1", "", true),
        ("1.1", "Connection: keep-alive\r\n", true),
        ("1.1", "Connection: Close\r\n", false),
        ("1.1", "Connection: x, close\r\nConnection: keep-alive\r\n", false),
        ("1.0", "", false),
        ("1.0", "Connection: Keep-Alive\r\n", true),
        ("1.0", "Connection: keep-alive, close\r\n", false),
    ] {
        let head = head(&format!("HTTP/{version} 200 OK\r\n{lines}Content-Length: 0\r\n\r\n"));
        assert_eq!(head.is_kept, is_kept, "{version} {lines}");
    }
    assert!(!head("HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n").is_kept);
}

#[test]
fn what_belongs_to_the_connection_is_taken_out() {
    let head = head(
        "HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Theirs\r\nConnection: not a name\r\nX-Theirs: 1\r\nX-Theirs: 2\r\nKeep-Alive: 5\r\nProxy-Authenticate: x\r\nProxy-Connection: x\r\nUpgrade: h2c\r\nTE: x\r\nTrailer: X-Sum\r\nX-Ours: 1\r\n\r\n",
    );
    let mut names: Vec<_> = head.headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["trailer", "x-ours"]);
}

#[test]
fn what_has_two_readings_has_none() {
    for text in [
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0x1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1,\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: x\r\nContent-Length: 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551617\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-A: 1\r\n folded\r\n\r\n",
        "HTTP/1.1 200 OK\r\n X-A: 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-A : 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-A: \0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-\0A: 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        "HTTP/1.1 099 Low\r\n\r\n",
        "HTTP/1.1 2000 Many\r\n\r\n",
        "HTTP/2 200 OK\r\n\r\n",
        "SSH-2.0-OpenSSH_9\r\n",
        "\0\r\n\r\n",
    ] {
        assert!(read(text).is_err(), "{text:?}");
    }
    let many = |count: usize| format!("HTTP/1.1 200 OK\r\n{}\r\n", "x: 1\r\n".repeat(count));
    assert!(read(&many(HEADERS_MAX)).is_ok());
    assert!(read(&many(HEADERS_MAX + 1)).is_err());
}
