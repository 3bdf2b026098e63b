//! Event streams, which stay open for hours and send little. They are detached from hyper before their first byte: each of
//! 10,000 connections costs 20 kB with hyper, most of it two buffers of 8 KiB, and 2 kB when written from here.
//!
//! The handler puts an [`EventStream`] into its response. Once the response has its headers, `serve.rs` spawns a task that
//! writes the headers and the events, and ends hyper's connection. hyper has written nothing by then and does not close the
//! socket. The response has no length and no chunks: it ends with its connection.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
use std::time::SystemTime;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::poll_fn;
use futures_util::stream::BoxStream;
use http::Method;
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio_util::task::TaskTracker;

use crate::peer::Peer;
use crate::shutdown::Shutdown;

/// The events of a response, as an extension of it.
#[derive(Clone)]
pub(crate) struct EventStream(Arc<Mutex<Option<BoxStream<'static, Bytes>>>>);

impl EventStream {
    pub(crate) fn new(events: BoxStream<'static, Bytes>) -> Self {
        Self(Arc::new(Mutex::new(Some(events))))
    }
}

/// Tells hyper to write no response.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the response is written by a task of its own")]
pub(crate) struct Detached;

/// Returns a response for hyper to write, or spawns a task that writes it if it is an event stream.
pub(crate) fn detach(
    mut response: Response,
    method: &Method,
    peer: &Peer,
    connections: &TaskTracker,
    shutdown: &Shutdown,
) -> Result<Response, Detached> {
    let Some(EventStream(events)) = response.extensions_mut().remove() else { return Ok(response) };
    let events = events.lock().take();
    match events {
        // hyper answers HEAD, which needs no events.
        Some(events) if method != Method::HEAD => {
            connections.spawn(write_stream(write_head(&response), events, peer.clone(), shutdown.clone()));
            Err(Detached)
        }
        _ => Ok(response),
    }
}

/// Returns a response for hyper to write on HTTP/2, which has one connection for many streams: hyper writes the events as well.
pub(crate) fn with_events(mut response: Response) -> Response {
    if let Some(EventStream(events)) = response.extensions_mut().remove()
        && let Some(events) = events.lock().take()
    {
        *response.body_mut() = Body::from_stream(events.map(Ok::<_, Infallible>));
    }
    response
}

/// Formats the head of a response that ends with its connection.
pub(crate) fn write_head(response: &Response) -> Bytes {
    let status = response.status();
    let mut head =
        format!("HTTP/1.1 {} {}\r\n", status.as_str(), status.canonical_reason().unwrap_or_default());
    for (name, value) in response.headers() {
        // Every header of these responses is set by Weir, or is a request id that was checked to be plain text.
        if let Ok(value) = value.to_str() {
            // Writing to memory cannot fail.
            let _ = write!(head, "{name}: {value}\r\n");
        }
    }
    let date = httpdate::fmt_http_date(SystemTime::now());
    let _ = write!(head, "connection: close\r\ndate: {date}\r\n\r\n");
    head.into()
}

/// Writes the head and then events, until there are no more, or the peer disconnects or reads nothing for a minute.
async fn write_stream(
    mut next: Bytes,
    mut events: BoxStream<'static, Bytes>,
    peer: Peer,
    shutdown: Shutdown,
) {
    let mut socket = peer.stream();
    loop {
        let written = tokio::select! {
            biased;
            // The write is tried first; a stop does not wait for a peer that does not read.
            // TLS holds back what it has encrypted until it is flushed.
            written = async { socket.write_all(&next).await?; socket.flush().await } => written,
            () = shutdown.closing().cancelled() => return,
        };
        if written.is_err() {
            return;
        }
        let more = tokio::select! {
            more = events.next() => more,
            () = poll_fn(|context| peer.poll_closed(context)) => return,
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
    use tokio::net::TcpStream;
    use tokio::time::Instant;

    use super::*;
    use crate::buffer_budget::BufferBudget;
    use crate::peer::fixtures;

    async fn connect() -> (TcpStream, Peer) {
        fixtures::connect(fixtures::ordinary_permit(), BufferBudget::new(0)).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_for_a_minute_is_dropped() {
        let (client, peer) = connect().await;
        // Larger than all buffers on the way.
        let events = stream::repeat(Bytes::from(vec![b'x'; 1 << 20])).boxed();
        let start = Instant::now();
        let writing = write_stream(Bytes::from_static(b"head"), events, peer, Shutdown::default());
        tokio::time::timeout(Duration::from_secs(3_600), writing).await.expect("it ends");
        assert!(start.elapsed() >= Duration::from_secs(60));
        drop(client);
    }

    #[tokio::test]
    async fn a_peer_that_disconnects_ends_the_stream() {
        let (mut client, peer) = connect().await;
        let events = stream::once(async { Bytes::from_static(b" and more") }).chain(stream::pending());
        let writing = write_stream(Bytes::from_static(b"head"), events.boxed(), peer, Shutdown::default());
        let writing = tokio::spawn(writing);
        let mut received = [0; 13];
        client.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"head and more");
        drop(client);
        tokio::time::timeout(Duration::from_secs(60), writing).await.expect("it ends").unwrap();
    }

    #[tokio::test]
    async fn a_peer_that_sends_something_and_disconnects_ends_the_stream() {
        let (mut client, peer) = connect().await;
        let writing = tokio::spawn(write_stream(
            Bytes::from_static(b"head"),
            stream::pending().boxed(),
            peer,
            Shutdown::default(),
        ));
        client.read_exact(&mut [0; 4]).await.unwrap();
        client.write_all(b"GET /next HTTP/1.1\r\n\r\n").await.unwrap();
        drop(client);
        // Less than the half minute after which a heartbeat is written.
        tokio::time::timeout(Duration::from_secs(20), writing).await.expect("it ends").unwrap();
    }

    #[tokio::test]
    async fn a_stop_does_not_wait_for_a_peer_that_reads_nothing() {
        let (client, peer) = connect().await;
        let shutdown = Shutdown::default();
        let events = stream::repeat(Bytes::from(vec![b'x'; 1 << 20])).boxed();
        let writing = tokio::spawn(write_stream(Bytes::from_static(b"head"), events, peer, shutdown.clone()));
        shutdown.closing().cancel();
        // Less than the minute after which it would be dropped anyway.
        tokio::time::timeout(Duration::from_secs(50), writing).await.expect("it ends").unwrap();
        drop(client);
    }

    #[tokio::test]
    async fn only_event_streams_are_detached_and_their_heads_are_complete() {
        let (mut client, peer) = connect().await;
        let (connections, shutdown) = (TaskTracker::new(), Shutdown::default());
        let detach = |response, method| detach(response, &method, &peer, &connections, &shutdown);
        let event_stream = || {
            let mut response = Response::new(axum::body::Body::empty());
            response.headers_mut().insert(header::CONTENT_TYPE, "text/event-stream".parse().unwrap());
            let events = stream::once(async { Bytes::from_static(b"event") }).boxed();
            response.extensions_mut().insert(EventStream::new(events));
            response
        };
        let plain = Response::new(axum::body::Body::empty());
        assert!(detach(plain, Method::GET).is_ok());
        assert!(detach(event_stream(), Method::HEAD).is_ok());
        assert!(detach(event_stream(), Method::GET).is_err());
        drop(peer);
        let mut received = String::new();
        client.read_to_string(&mut received).await.unwrap();
        let (head, events) = received.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"), "{head}");
        assert!(head.contains("\r\nconnection: close\r\ndate: ") && head.ends_with(" GMT"), "{head}");
        assert_eq!(events, "event");
    }
}
