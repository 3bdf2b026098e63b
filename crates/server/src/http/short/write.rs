//! Answers as bytes: the head and what there is of the body together, for one system call, and the rest as it comes.

use std::cell::RefCell;
use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use futures_util::FutureExt;
use http::StatusCode;
use http::header::{CONNECTION, CONTENT_LENGTH, DATE, TRANSFER_ENCODING};
use http::response::Parts;
use http_body_util::BodyExt;
use hyper::ext::ReasonPhrase;
use tokio::io::{AsyncWrite, AsyncWriteExt};

/// Room for most answers.
const ROOM: usize = 1_024;
/// So much is written at once, and no more is kept meanwhile.
const HELD_MAX: usize = 64 << 10;

/// How a caller learns where the body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// There can be none.
    Bodiless,
    /// By its length.
    Length(u64),
    /// By its last piece.
    Chunked,
    /// By the end of the connection.
    Closing,
}

/// Writes an answer, with what HTTP wants to be told beside it.
///
/// # Errors
/// When its body breaks off, or the caller has gone. The connection is then of no more use.
pub(super) async fn answer(
    response: Response,
    is_last: bool,
    connection: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    let (head, mut body) = response.into_parts();
    let framing = Framing::of(head.status, &body);
    let mut text = Vec::with_capacity(ROOM);
    write_head(&mut text, &head, framing, is_last);
    if framing == Framing::Bodiless {
        return connection.write_all(&text).await;
    }
    loop {
        let frame = match body.frame().now_or_never() {
            Some(frame) if text.len() < HELD_MAX => frame,
            Some(frame) => {
                send(&mut text, connection).await?;
                frame
            }
            None => {
                // What is there does not wait for what is not.
                send(&mut text, connection).await?;
                body.frame().await
            }
        };
        let Some(frame) = frame else { break };
        if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
            framing.write(&mut text, &data)?;
        }
    }
    if framing == Framing::Chunked {
        text.extend_from_slice(b"0\r\n\r\n");
    }
    connection.write_all(&text).await
}

/// The head of an answer that ends with its connection.
pub(in crate::http) fn endless_head(response: Response) -> Bytes {
    let (head, _body) = response.into_parts();
    let mut text = Vec::with_capacity(ROOM);
    write_head(&mut text, &head, Framing::Closing, true);
    text.into()
}

async fn send(text: &mut Vec<u8>, connection: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    connection.write_all(text).await?;
    text.clear();
    Ok(())
}

impl Framing {
    fn of(status: StatusCode, body: &Body) -> Self {
        if status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED {
            return Self::Bodiless;
        }
        body.size_hint().exact().map_or(Self::Chunked, Self::Length)
    }

    fn write(self, text: &mut Vec<u8>, data: &[u8]) -> io::Result<()> {
        match self {
            // A chunk of no length would be the last one.
            Self::Chunked if data.is_empty() => {}
            Self::Chunked => {
                write!(text, "{:x}\r\n", data.len())?;
                text.extend_from_slice(data);
                text.extend_from_slice(b"\r\n");
            }
            Self::Bodiless | Self::Length(_) | Self::Closing => text.extend_from_slice(data),
        }
        Ok(())
    }
}

fn write_head(text: &mut Vec<u8>, head: &Parts, framing: Framing, is_last: bool) {
    text.extend_from_slice(b"HTTP/1.1 ");
    text.extend_from_slice(head.status.as_str().as_bytes());
    text.push(b' ');
    // An upstream may have its own words for it.
    let reason = head.extensions.get::<ReasonPhrase>().map(ReasonPhrase::as_bytes);
    text.extend_from_slice(reason.unwrap_or(head.status.canonical_reason().unwrap_or_default().as_bytes()));
    text.extend_from_slice(b"\r\n");
    for (name, value) in &head.headers {
        let is_ours = name == CONTENT_LENGTH || name == TRANSFER_ENCODING || name == CONNECTION;
        if !is_ours {
            write_line(text, name.as_str(), value.as_bytes());
        }
    }
    match framing {
        Framing::Bodiless | Framing::Closing => {}
        Framing::Length(length) => {
            // Writing to memory cannot fail.
            let _ = write!(text, "content-length: {length}\r\n");
        }
        Framing::Chunked => write_line(text, TRANSFER_ENCODING.as_str(), b"chunked"),
    }
    if is_last {
        write_line(text, CONNECTION.as_str(), b"close");
    }
    if !head.headers.contains_key(DATE) {
        with_date(|date| write_line(text, DATE.as_str(), date));
    }
    text.extend_from_slice(b"\r\n");
}

/// Writes a line of a head.
pub(crate) fn write_line(text: &mut Vec<u8>, name: &str, value: &[u8]) {
    text.extend_from_slice(name.as_bytes());
    text.extend_from_slice(b": ");
    text.extend_from_slice(value);
    text.extend_from_slice(b"\r\n");
}

/// The date, written anew once a second.
fn with_date<R>(use_it: impl FnOnce(&[u8]) -> R) -> R {
    thread_local! {
        static WRITTEN: RefCell<(u64, String)> = const { RefCell::new((0, String::new())) };
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    WRITTEN.with_borrow_mut(|(at, text)| {
        if *at != now || text.is_empty() {
            *text = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(now));
            *at = now;
        }
        use_it(text.as_bytes())
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{StreamExt, stream};
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use tokio::io::AsyncReadExt;

    use super::*;

    async fn written(response: Response, is_last: bool) -> String {
        let mut text = Vec::new();
        answer(response, is_last, &mut text).await.unwrap();
        String::from_utf8(text).unwrap()
    }

    fn pieces(pieces: &[&'static str]) -> Body {
        let frames: Vec<_> =
            pieces.iter().map(|piece| Ok::<_, Infallible>(Frame::data(bytes::Bytes::from(*piece)))).collect();
        Body::new(StreamBody::new(stream::iter(frames)))
    }

    #[tokio::test]
    async fn a_body_of_known_length_is_announced_and_follows() {
        let mut response = Response::new(Body::from("hello"));
        *response.status_mut() = StatusCode::NOT_FOUND;
        response.headers_mut().insert("x-a", "b".parse().unwrap());
        response.headers_mut().insert(CONTENT_LENGTH, "7".parse().unwrap());
        response.headers_mut().insert(DATE, "today".parse().unwrap());
        let text = written(response, true).await;
        assert_eq!(
            text,
            "HTTP/1.1 404 Not Found\r\nx-a: b\r\ndate: today\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
        );
    }

    #[tokio::test]
    async fn a_body_of_unknown_length_goes_out_in_chunks() {
        let text = written(Response::new(pieces(&["hello", "", "0123456789abcdef"])), false).await;
        assert!(text.starts_with("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ndate: "), "{text}");
        assert!(text.ends_with(" GMT\r\n\r\n5\r\nhello\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"), "{text}");
    }

    #[tokio::test]
    async fn some_answers_have_no_body_whatever_is_in_it() {
        let mut response = Response::new(pieces(&["hello"]));
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        let text = written(response, false).await;
        assert!(text.ends_with("GMT\r\n\r\n") && !text.contains("encoding"), "{text}");
    }

    #[tokio::test]
    async fn what_is_there_does_not_wait_for_what_is_not() {
        let (sender, receiver) = tokio::sync::oneshot::channel::<&str>();
        let first = Ok::<_, io::Error>(Frame::data(bytes::Bytes::from("hel")));
        let later = receiver.map(|piece| Ok(Frame::data(bytes::Bytes::from(piece.unwrap()))));
        let frames = stream::once(async { first }).chain(stream::once(later));
        let body = Body::new(StreamBody::new(frames.boxed()));
        let (mut near, mut far) = tokio::io::duplex(1 << 16);
        let writing = tokio::spawn(async move { answer(Response::new(body), false, &mut near).await });
        let mut text = String::new();
        while !text.ends_with("3\r\nhel\r\n") {
            text.push(char::from(far.read_u8().await.unwrap()));
        }
        sender.send("lo").unwrap();
        writing.await.unwrap().unwrap();
        far.read_to_string(&mut text).await.unwrap();
        assert!(text.ends_with("3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"), "{text}");
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_not_ended() {
        let frames =
            vec![Ok(Frame::data(bytes::Bytes::from("hel"))), Err(io::Error::other("the upstream is gone"))];
        let body = Body::new(StreamBody::new(stream::iter(frames)));
        let mut text = Vec::new();
        answer(Response::new(body), false, &mut text).await.unwrap_err();
        assert!(!String::from_utf8(text).unwrap().contains("0\r\n\r\n"));
    }
}
