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
use http::Method;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

use super::caller::Caller;
use super::short::write::endless_head;

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
            tokio::spawn(go_on(endless_head(response), said, caller.clone(), stop.clone()));
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::stream;
    use http::header;
    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::Semaphore;
    use tokio::time::Instant;

    use super::*;
    use crate::telemetry::metrics::Metrics;

    /// Both ends of a connection.
    async fn connect() -> (TcpStream, Caller) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, address) = listener.accept().await.unwrap();
        let permit = Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap();
        (client, Caller::new(stream, address, permit, Arc::new(Metrics::default())))
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_takes_nothing_for_a_minute_is_dropped() {
        let (client, caller) = connect().await;
        let (_stopping, stop) = watch::channel(());
        // More than any buffer on the way holds.
        let said = stream::repeat(Bytes::from(vec![b'x'; 1 << 20])).boxed();
        let start = Instant::now();
        let going = go_on(Bytes::from_static(b"head"), said, caller, stop);
        tokio::time::timeout(Duration::from_secs(3_600), going).await.expect("it ends");
        assert!(start.elapsed() >= Duration::from_secs(60));
        drop(client);
    }

    #[tokio::test]
    async fn whoever_goes_ends_the_stream() {
        let (mut client, caller) = connect().await;
        let (stopping, stop) = watch::channel(());
        let said = stream::once(async { Bytes::from_static(b" and more") }).chain(stream::pending());
        let going = tokio::spawn(go_on(Bytes::from_static(b"head"), said.boxed(), caller, stop));
        let mut heard = [0; 13];
        client.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"head and more");
        drop(client);
        tokio::time::timeout(Duration::from_secs(60), going).await.expect("it ends").unwrap();
        assert_eq!(stopping.receiver_count(), 0);
    }

    #[tokio::test]
    async fn a_stop_waits_for_nobody_who_takes_nothing() {
        let (client, caller) = connect().await;
        let (stopping, stop) = watch::channel(());
        let said = stream::repeat(Bytes::from(vec![b'x'; 1 << 20])).boxed();
        let going = tokio::spawn(go_on(Bytes::from_static(b"head"), said, caller, stop));
        stopping.send(()).unwrap();
        // Less than the minute after which it would be dropped anyway.
        tokio::time::timeout(Duration::from_secs(50), going).await.expect("it ends").unwrap();
        drop(client);
    }

    #[tokio::test]
    async fn only_endless_answers_leave_and_their_heads_are_whole() {
        let (mut client, caller) = connect().await;
        let (_stopping, stop) = watch::channel(());
        let endless = || {
            let mut response = Response::new(axum::body::Body::empty());
            response.headers_mut().insert(header::CONTENT_TYPE, "text/event-stream".parse().unwrap());
            let said = stream::once(async { Bytes::from_static(b"said") }).boxed();
            response.extensions_mut().insert(Endless::new(said));
            response
        };
        let plain = Response::new(axum::body::Body::empty());
        assert!(leave(plain, &Method::GET, &caller, &stop).is_ok());
        assert!(leave(endless(), &Method::HEAD, &caller, &stop).is_ok());
        assert!(leave(endless(), &Method::GET, &caller, &stop).is_err());
        drop(caller);
        let mut heard = String::new();
        client.read_to_string(&mut heard).await.unwrap();
        let (head, said) = heard.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"), "{head}");
        assert!(head.contains("\r\nconnection: close\r\ndate: ") && head.ends_with(" GMT"), "{head}");
        assert_eq!(said, "said");
    }
}
