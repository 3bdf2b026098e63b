use bytes::BytesMut;

use super::*;

/// What a body was, and what was left of what came.
#[derive(Debug, PartialEq, Eq)]
struct Got {
    data: Vec<u8>,
    trailers: Vec<(String, String)>,
    has_ended: bool,
    surplus: Vec<u8>,
}

/// Reads a body that comes in pieces of so many bytes.
fn read(mut body: Body, text: &[u8], size: usize) -> Result<Got, Broken> {
    let mut got = Got { data: Vec::new(), trailers: Vec::new(), has_ended: false, surplus: Vec::new() };
    for piece in text.chunks(size) {
        let mut piece = Bytes::copy_from_slice(piece);
        while let Some(frame) = body.next(&mut piece)? {
            match frame.into_data() {
                Ok(data) => {
                    assert!(!data.is_empty(), "an empty piece is none");
                    got.data.extend_from_slice(&data);
                }
                Err(frame) => {
                    for (name, value) in frame.trailers_ref().unwrap() {
                        got.trailers.push((name.to_string(), value.to_str().unwrap().to_owned()));
                    }
                }
            }
        }
        assert!(piece.is_empty() || body == Body::Ended, "all is taken while there is more to come");
        got.surplus.extend_from_slice(&piece);
    }
    got.has_ended = body == Body::Ended;
    Ok(got)
}

/// The same, however it comes.
fn read_in_all_pieces(make: impl Fn() -> Body, text: &[u8]) -> Result<Got, Broken> {
    let whole = read(make(), text, text.len().max(1));
    for size in 1..=text.len() {
        let pieces = read(make(), text, size);
        match (&whole, &pieces) {
            (Ok(whole), Ok(pieces)) => assert_eq!(whole, pieces, "in pieces of {size}"),
            (Err(_), Err(_)) => {}
            _ => panic!("{whole:?} and in pieces of {size} {pieces:?}"),
        }
    }
    whole
}

fn chunked(text: &str) -> Result<Got, Broken> {
    read_in_all_pieces(Body::chunked, text.as_bytes())
}

#[test]
fn a_body_of_some_length_ends_there() {
    let got = read_in_all_pieces(|| Body::Length(5), b"hello and more").unwrap();
    assert_eq!((&got.data[..], &got.surplus[..], got.has_ended), (&b"hello"[..], &b" and more"[..], true));
    let got = read_in_all_pieces(|| Body::Length(5), b"hell").unwrap();
    assert!(!got.has_ended);
}

#[test]
fn chunks_are_put_together() {
    let got = chunked("5\r\nhello\r\n00A; x=\"y;z\"\r\n0123456789\r\n1 \t;a\r\n!\r\n0\r\n\r\n").unwrap();
    assert_eq!(String::from_utf8(got.data).unwrap(), "hello0123456789!");
    assert!(got.has_ended && got.surplus.is_empty() && got.trailers.is_empty());
    let got = chunked("3\r\na\r\n\r\n0;last\r\n\r\nHTTP/1.1 200 OK\r\n").unwrap();
    assert_eq!((&got.data[..], &got.surplus[..]), (&b"a\r\n"[..], &b"HTTP/1.1 200 OK\r\n"[..]));
}

#[test]
fn trailers_come_last() {
    let got = chunked("1\r\nx\r\n0\r\nX-Sum: 1\r\nx-cost:7 \r\n\r\nmore").unwrap();
    let expected = [("x-sum", "1"), ("x-cost", "7")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(got.trailers, expected);
    assert!(got.has_ended);
    assert_eq!(got.surplus, b"more");
}

#[test]
fn what_is_no_chunk_breaks_the_answer_off() {
    for text in [
        "\r\n",
        "x\r\n",
        "-1\r\n",
        "+1\r\nx\r\n",
        "0x1\r\nx\r\n",
        "1\nx\r\n",
        "1\r\rx\r\n",
        "1 1\r\nx\r\n",
        " 1\r\nx\r\n",
        "1\r\nxy\r\n",
        "1\r\nx\n",
        "1\r\nx\r\r",
        "1;a\nb\r\nx\r\n",
        "1\0\r\nx\r\n",
        "10000000000000000\r\n",
        "fffffffffffffffff\r\n",
        "0\r\n\rx",
        "0\r\nno trailer\r\n\r\n",
        "0\r\nx: 1\rx: 2\r\n\r\n",
        "0\r\nx: \0\r\n\r\n",
        "0\r\n folded: 1\r\n\r\n",
        "0\r\nx: 1\r\n folded\r\n\r\n",
    ] {
        let got = chunked(text);
        assert!(got.is_err(), "{text:?}: {got:?}");
    }
}

#[test]
fn what_surrounds_chunks_is_bounded() {
    let long = |count: usize| format!("1;{}\r\nx\r\n0\r\n\r\n", "e".repeat(count));
    assert!(read(Body::chunked(), long(16_000).as_bytes(), 1_000).is_ok());
    assert!(read(Body::chunked(), long(17_000).as_bytes(), 1_000).is_err());
    let many = "1;1234567\r\nx\r\n".repeat(3_000);
    assert!(read(Body::chunked(), many.as_bytes(), 1_000).is_err(), "all of them together");
    let long = |count: usize| format!("0\r\nx: {}\r\n\r\n", "t".repeat(count));
    assert!(read(Body::chunked(), long(16_000).as_bytes(), 1_000).is_ok());
    assert!(read(Body::chunked(), long(17_000).as_bytes(), 1_000).is_err());
    let many = |count: usize| format!("0\r\n{}\r\n", "x: 1\r\n".repeat(count));
    assert!(read(Body::chunked(), many(100).as_bytes(), 1_000).is_ok());
    assert!(read(Body::chunked(), many(101).as_bytes(), 1_000).is_err());
}

#[test]
fn only_what_ends_with_its_connection_may_end_so() {
    let mut body = Body::UntilClosed;
    let mut text = Bytes::from_static(b"all");
    assert_eq!(body.next(&mut text).unwrap().unwrap().into_data().unwrap(), "all");
    assert!(body.next(&mut text).unwrap().is_none());
    body.close().unwrap();
    assert_eq!(body, Body::Ended);
    assert!(matches!(Body::Length(1).close(), Err(Broken::Closed)));
    let text = "5\r\nhello\r\n0\r\nx: 1\r\n\r\n";
    for length in 0..text.len() {
        let mut body = Body::chunked();
        let mut part = Bytes::copy_from_slice(&text.as_bytes()[..length]);
        while body.next(&mut part).unwrap().is_some() {}
        assert!(matches!(body.close(), Err(Broken::Closed)), "after {length} bytes");
    }
}

#[test]
fn a_large_body_is_not_copied() {
    let text = BytesMut::zeroed(1 << 20).freeze();
    let mut read = text.clone();
    let piece = Body::Length(1 << 19).next(&mut read).unwrap().unwrap().into_data().unwrap();
    assert_eq!((piece.as_ptr(), piece.len(), read.len()), (text.as_ptr(), 1 << 19, 1 << 19));
}
