//! The connection a request came by: who is at the other end, and whether it still is.
//!
//! hyper does not look for the end of a connection while an answer is under way (see `http/serve.rs`). Where an answer may take
//! minutes and costs somebody else's work, the handler looks for itself, at the socket that it shares with hyper. It runs in the
//! task of its connection, so the two share one waker and do not take it from each other.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use crate::telemetry::metrics::Metrics;

/// The other end of a connection. Clones are the same one.
#[derive(Clone)]
pub struct Peer(Arc<Connection>);

struct Connection {
    stream: Mutex<TcpStream>,
    address: SocketAddr,
    metrics: Arc<Metrics>,
    /// Its place among the connections that may be open, also when it has become a tunnel.
    _permit: OwnedSemaphorePermit,
}

impl Peer {
    pub(crate) fn new(
        stream: TcpStream,
        address: SocketAddr,
        permit: OwnedSemaphorePermit,
        metrics: Arc<Metrics>,
    ) -> Self {
        metrics.connections.inc();
        Self(Arc::new(Connection { stream: Mutex::new(stream), address, metrics, _permit: permit }))
    }

    /// What is read from and written to the connection.
    pub(crate) fn stream(&self) -> PeerStream {
        PeerStream { connection: Arc::clone(&self.0), stalled: None }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Ready when it has closed its side or is lost. Only to be polled from the task of the connection, once the whole
    /// request has come: what comes after that is left unread, and hides the end behind it.
    pub fn poll_disconnected(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut byte = [std::mem::MaybeUninit::uninit()];
        match self.0.lock().poll_peek(context, &mut ReadBuf::uninit(&mut byte)) {
            Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(()),
            Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Peer {
    /// Ready when it has closed its side or is lost. What it still sends is thrown away: nobody will read it.
    pub(crate) fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut ignored = [0; 512];
        loop {
            let mut buffer = ReadBuf::new(&mut ignored);
            match Pin::new(&mut *self.0.lock()).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

/// Returns when the peer has gone; never, where the handler does not know its peer. As [`Peer::poll_disconnected`].
pub(crate) async fn disconnected(peer: Option<&Peer>) {
    match peer {
        Some(peer) => std::future::poll_fn(|context| peer.poll_disconnected(context)).await,
        None => std::future::pending().await,
    }
}

impl Connection {
    /// A thread that panicked while it had the lock was between two system calls.
    fn lock(&self) -> MutexGuard<'_, TcpStream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.metrics.connections.dec();
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Peer").field(&self.0.address).finish()
    }
}

/// How long a peer may take nothing of what is written to it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// The bytes of a connection. One task at a time reads and writes them, all on one thread, so the lock is always free.
pub(crate) struct PeerStream {
    connection: Arc<Connection>,
    /// Set while the peer takes nothing of what is written.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl AsyncRead for PeerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.connection.lock()).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Poll::Ready(written) = Pin::new(&mut *this.connection.lock()).poll_write(context, bytes) {
            this.stalled = None;
            return Poll::Ready(written);
        }
        let stalled = this.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(WRITE_TIMEOUT)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.connection.lock()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.connection.lock()).poll_shutdown(context)
    }
}
