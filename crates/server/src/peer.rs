//! The connection a request came by: who is at the other end, and whether it still is.
//!
//! hyper does not look for the end of a connection while an answer is under way (see `http/serve.rs`). Where an answer may take
//! minutes and costs somebody else's work, the handler looks for itself, at the socket that it shares with hyper. It runs in the
//! task of its connection, so the two share one waker and do not take it from each other.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use crate::buffer_budget::{BufferBudget, BufferCharge};
use crate::telemetry::metrics::Metrics;

/// What hyper takes for every connection anyway; only heads that are larger are charged to the budget.
const HEAD_FREE: usize = 8 * 1024;
/// In the place of a number of bytes: a body is being read, and whoever reads it accounts for it.
const IN_BODY: usize = usize::MAX;
/// In the place of a number of bytes: the connection no longer speaks HTTP.
const IN_TUNNEL: usize = usize::MAX - 1;
/// How much is thrown away at a time.
const DISCARD: usize = 16 * 1024;

/// The other end of a connection. Clones are the same one.
#[derive(Clone)]
pub struct Peer(Arc<Connection>);

struct Connection {
    stream: Mutex<TcpStream>,
    address: SocketAddr,
    metrics: Arc<Metrics>,
    budget: BufferBudget,
    /// Its place among the connections that may be open, also when it has become a tunnel.
    place: Mutex<Place>,
    is_in_reserve: AtomicBool,
    /// The bytes read since the last head was complete: those of a head that has only begun.
    head_bytes: AtomicUsize,
    /// How much came with the last read. A head was not complete before it, so no more than this is of the next one.
    last_read: AtomicUsize,
    /// Whether the last request was answered before its body was read.
    has_unread_body: AtomicBool,
}

/// A place among the connections that may be open.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: OwnedSemaphorePermit,
    /// The ordinary places, if this is one of the reserve.
    ordinary: Option<Arc<Semaphore>>,
}

impl Place {
    pub(crate) const fn ordinary(permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: permit, ordinary: None }
    }

    /// One of the few places for operations that are left when all ordinary ones are taken.
    pub(crate) const fn in_reserve(permit: OwnedSemaphorePermit, ordinary: Arc<Semaphore>) -> Self {
        Self { _permit: permit, ordinary: Some(ordinary) }
    }
}

impl Peer {
    pub(crate) fn new(
        stream: TcpStream,
        address: SocketAddr,
        place: Place,
        budget: BufferBudget,
        metrics: Arc<Metrics>,
    ) -> Self {
        metrics.connections.inc();
        Self(Arc::new(Connection {
            stream: Mutex::new(stream),
            address,
            metrics,
            budget,
            is_in_reserve: AtomicBool::new(place.ordinary.is_some()),
            place: Mutex::new(place),
            head_bytes: AtomicUsize::new(0),
            last_read: AtomicUsize::new(0),
            has_unread_body: AtomicBool::new(false),
        }))
    }

    /// What is read from and written to the connection.
    pub(crate) fn stream(&self) -> PeerStream {
        PeerStream { connection: Arc::clone(&self.0), stalled: None, head_charge: None }
    }

    /// Whether it has one of the places that are left for operations.
    pub(crate) fn is_in_reserve(&self) -> bool {
        self.0.is_in_reserve.load(Ordering::Relaxed)
    }

    /// Gives it an ordinary place, if it has none and one has become free.
    pub(crate) fn leave_reserve(&self) -> bool {
        let mut place = self.0.place.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(ordinary) = &place.ordinary else { return true };
        let Ok(permit) = Arc::clone(ordinary).try_acquire_owned() else { return false };
        *place = Place::ordinary(permit);
        self.0.is_in_reserve.store(false, Ordering::Relaxed);
        true
    }

    /// Takes note of a request whose head is complete. `head_length` is asked only of large ones: what was read and is
    /// not of this head is of the next one.
    pub(crate) fn begin_request(&self, has_body: bool, head_length: impl FnOnce() -> usize) {
        self.0.has_unread_body.store(false, Ordering::Relaxed);
        let read = self.0.head_bytes.load(Ordering::Relaxed);
        let of_the_next = match read {
            _ if has_body => IN_BODY,
            0..=HEAD_FREE | IN_BODY => 0,
            // The length is about right: white space around values is not counted, so that it alone would add up.
            _ => read.saturating_sub(head_length()).min(self.0.last_read.load(Ordering::Relaxed)),
        };
        self.0.head_bytes.store(of_the_next, Ordering::Relaxed);
    }

    /// Takes note that nobody reads on in the body of the request.
    pub(crate) fn end_body(&self, is_unread: bool) {
        if self.0.head_bytes.load(Ordering::Relaxed) == IN_BODY {
            self.0.head_bytes.store(0, Ordering::Relaxed);
            self.0.has_unread_body.store(is_unread, Ordering::Relaxed);
        }
    }

    /// Takes note that what follows is not HTTP.
    pub(crate) fn become_tunnel(&self) {
        self.0.head_bytes.store(IN_TUNNEL, Ordering::Relaxed);
        self.0.has_unread_body.store(false, Ordering::Relaxed);
    }

    /// Whether the last request was answered before its body was read.
    pub(crate) fn has_unread_body(&self) -> bool {
        self.0.has_unread_body.load(Ordering::Relaxed)
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

impl Peer {
    /// Reads some of what the peer sends and throws it away. Says how much it was; nothing at the end.
    pub(crate) fn poll_discard(&self, context: &mut Context<'_>) -> Poll<usize> {
        let mut ignored = [std::mem::MaybeUninit::uninit(); DISCARD];
        let mut buffer = ReadBuf::uninit(&mut ignored);
        let read = Pin::new(&mut *self.0.lock()).poll_read(context, &mut buffer);
        read.map(|read| if read.is_ok() { buffer.filled().len() } else { 0 })
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
    /// What a large head has of the budget. It is kept until the next head begins: hyper keeps the buffer as long.
    head_charge: Option<BufferCharge>,
}

impl PeerStream {
    /// Counts what came of a head, and charges a large one to the budget.
    fn count_head(&mut self, read: usize) -> io::Result<()> {
        let connection = &self.connection;
        let before = connection.head_bytes.load(Ordering::Relaxed);
        match before {
            IN_BODY => return Ok(()),
            IN_TUNNEL => {
                self.head_charge = None;
                return Ok(());
            }
            _ => {}
        }
        let head = before + read;
        connection.last_read.store(read, Ordering::Relaxed);
        connection.head_bytes.store(head, Ordering::Relaxed);
        if head <= HEAD_FREE {
            self.head_charge = None;
            return Ok(());
        }
        let charge = self.head_charge.get_or_insert_with(|| connection.budget.charge());
        charge.try_resize(head - HEAD_FREE).map_err(io::Error::other)
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let filled = buffer.filled().len();
        let read = Pin::new(&mut *this.connection.lock()).poll_read(context, buffer);
        if let Poll::Ready(Ok(())) = read {
            this.count_head(buffer.filled().len() - filled)?;
        }
        read
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
