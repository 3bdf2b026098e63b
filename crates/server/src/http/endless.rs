//! Answers that go on for hours and say little. They leave hyper with their first byte: its two buffers, of 8 KiB each, would be
//! most of what such a connection costs, and ten thousand of them are to be cheap.
//!
//! The handler puts an [`Endless`] into its response. Once the response has its headers, `serve.rs` starts a task that writes them
//! and what follows, and ends hyper's connection, which has written nothing and leaves the socket alone. What is said has no
//! length and no chunks: the end of the connection is its end.

use std::sync::{Arc, Mutex, PoisonError};

use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::poll_fn;
use futures_util::stream::BoxStream;
use http::{Method, header};
use jiff::fmt::rfc2822::DateTimePrinter;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

use super::caller::Caller;

/// What an answer says, for as long as it goes on.
#[derive(Clone)]
pub(crate) struct Endless(Arc<Mutex<Option<BoxStream<'static, Bytes>>>>);

impl Endless {
    pub(crate) fn new(said: BoxStream<'static, Bytes>) -> Self {
        Self(Arc::new(Mutex::new(Some(said))))
    }
}

/// Why hyper has nothing to answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the answer goes on by itself")]
pub(super) struct Left;

/// Hands a response back to hyper, or has it go on by itself if it is endless. `stop` is held until it is over.
pub(super) fn leave(
    mut response: Response,
    method: &Method,
    caller: &Caller,
    stop: &watch::Receiver<()>,
) -> Result<Response, Left> {
    let Some(Endless(said)) = response.extensions_mut().remove() else { return Ok(response) };
    let said = said.lock().unwrap_or_else(PoisonError::into_inner).take();
    match said {
        // Whoever asks for the head alone gets it as always.
        Some(said) if method != Method::HEAD => {
            tokio::spawn(go_on(head(&response), said, caller.clone(), stop.clone()));
            Err(Left)
        }
        _ => Ok(response),
    }
}

/// Writes what is said, until nothing more is, or the caller goes or takes nothing for a minute.
async fn go_on(
    mut next: Bytes,
    mut said: BoxStream<'static, Bytes>,
    caller: Caller,
    mut stop: watch::Receiver<()>,
) {
    let mut socket = caller.bytes();
    loop {
        let written = tokio::select! {
            written = socket.write_all(&next) => written,
            // What is not taken now will not be: the server waits for nobody who listens.
            _ = stop.changed() => return,
        };
        if written.is_err() {
            return;
        }
        let more = tokio::select! {
            more = said.next() => more,
            () = poll_fn(|context| caller.poll_gone(context)) => return,
        };
        let Some(more) = more else { break };
        next = more;
    }
    let _ = socket.shutdown().await;
}

fn head(response: &Response) -> Bytes {
    let mut head = format!("HTTP/1.1 {}\r\n", response.status()).into_bytes();
    for (name, value) in response.headers() {
        if *name != header::CONTENT_LENGTH {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                head.extend_from_slice(part);
            }
        }
    }
    // Every time has such a text.
    let date =
        DateTimePrinter::new().timestamp_to_rfc9110_string(&jiff::Timestamp::now()).unwrap_or_default();
    head.extend_from_slice(format!("connection: close\r\ndate: {date}\r\n\r\n").as_bytes());
    head.into()
}
