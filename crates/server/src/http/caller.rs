//! The connection a request came by: who is at the other end, and whether it still is.
//!
//! hyper does not look for the end of a connection while an answer is under way (see `serve.rs`). Where an answer may take
//! minutes and costs somebody else's work, the handler looks for itself, through the half of the connection kept here. The
//! handler runs in the task of its connection, so the two share one place for a waker and do not take it from each other.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use crate::telemetry::metrics::Metrics;

/// The one at the other end. Clones are the same one.
#[derive(Clone)]
pub struct Caller(Arc<Connection>);

struct Connection {
    stream: Mutex<TcpStream>,
    address: SocketAddr,
    metrics: Arc<Metrics>,
    /// Its place among the connections that may be open, also when it has become a tunnel.
    _permit: OwnedSemaphorePermit,
}

impl Caller {
    pub(super) fn new(
        stream: TcpStream,
        address: SocketAddr,
        permit: OwnedSemaphorePermit,
        metrics: Arc<Metrics>,
    ) -> Self {
        metrics.connections.inc();
        Self(Arc::new(Connection { stream: Mutex::new(stream), address, metrics, _permit: permit }))
    }

    /// The bytes that go to and fro.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes { connection: Arc::clone(&self.0), before: bytes::Bytes::new(), stalled: None }
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Ready when it has closed its side or is lost. Only to be asked from the task of the connection, once the whole
    /// request has come: what comes after that is left alone, and hides the end behind it.
    pub fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut byte = [std::mem::MaybeUninit::uninit()];
        match self.0.lock().poll_peek(context, &mut ReadBuf::uninit(&mut byte)) {
            Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(()),
            Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
        }
    }
}

/// Returns when the caller has gone; never, where the handler does not know its caller. As [`Caller::poll_gone`].
pub async fn gone(caller: Option<&Caller>) {
    match caller {
        Some(caller) => std::future::poll_fn(|context| caller.poll_gone(context)).await,
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

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Caller").field(&self.0.address).finish()
    }
}

/// How long a caller may take nothing of what is written to it.
const PATIENCE: Duration = Duration::from_secs(60);
/// The most that is read at once, on the short way.
const ROOM_SIZE: usize = 16 << 10;

/// What is read and written, by one at a time, so the lock is always free.
pub struct Bytes {
    connection: Arc<Connection>,
    /// What was read already, and is to be read again.
    before: bytes::Bytes,
    /// Set while nothing is taken of what is written.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Bytes {
    /// Has `before` read again, before anything else.
    pub(super) fn unread(&mut self, before: bytes::Bytes) {
        self.before = before;
    }

    /// Adds what has come to what was read; nothing, when no more will. While it waits, a connection keeps no room for it.
    pub(super) fn poll_more(
        &self,
        context: &mut Context<'_>,
        read: &mut bytes::Bytes,
    ) -> Poll<io::Result<usize>> {
        thread_local! {
            static ROOM: RefCell<Box<[u8]>> = RefCell::new(vec![0; ROOM_SIZE].into());
        }
        ROOM.with_borrow_mut(|room| {
            let mut room = ReadBuf::new(room);
            ready!(Pin::new(&mut *self.connection.lock()).poll_read(context, &mut room))?;
            let more = room.filled();
            *read = if read.is_empty() {
                bytes::Bytes::copy_from_slice(more)
            } else {
                [&read[..], more].concat().into()
            };
            Poll::Ready(Ok(more.len()))
        })
    }
}

impl AsyncRead for Bytes {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.before.is_empty() {
            let count = self.before.len().min(buffer.remaining());
            buffer.put_slice(&self.before.split_to(count));
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut *self.connection.lock()).poll_read(context, buffer)
    }
}

impl AsyncWrite for Bytes {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if let Poll::Ready(written) = Pin::new(&mut *this.connection.lock()).poll_write(context, bytes) {
            this.stalled = None;
            return Poll::Ready(written);
        }
        let stalled = this.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(PATIENCE)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.connection.lock()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.connection.lock()).poll_shutdown(context)
    }
}
