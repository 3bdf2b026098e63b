//! The connection of a request: the peer's address, whether it is still connected, and how much of the next head has arrived.
//! Each request of an HTTP/2 connection has a peer of its own, with the permit that it takes and without bytes.
//!
//! hyper does not look for the end of a connection while a response is under way (see `http/serve.rs`). Where a response may
//! take minutes and costs somebody else's work, the handler polls the socket, which it shares with hyper. The handler runs in
//! the task of its connection, so both register the same waker.
//!
//! hyper buffers heads and does not say how many bytes of one it has. Bytes are therefore counted as they are read, and large
//! heads are charged to the memory budget of unfinished requests.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(crate) mod transport;

use self::transport::Transport;
use crate::buffer_budget::{BufferBudget, BufferCharge};
use crate::telemetry::metrics::Metrics;

/// The buffer that hyper allocates for every connection. Only larger heads are charged to the budget.
pub(crate) const HEAD_FREE: usize = 8 * 1024;
/// Phase of a connection: the next bytes belong to a head.
const IN_HEAD: u8 = 0;
/// Phase of a connection: the next bytes belong to a body. Its reader charges them to a budget.
const IN_BODY: u8 = 1;
/// Phase of a connection: it no longer speaks HTTP/1.1.
const IN_TUNNEL: u8 = 2;
const DISCARD_BYTES: usize = 16 * 1024;

/// The other end of a connection. Clones share the connection.
#[derive(Clone)]
pub struct Peer(Arc<PeerConnection>);

struct PeerConnection {
    transport: Mutex<Transport>,
    address: SocketAddr,
    is_encrypted: bool,
    /// `None` for a request of an HTTP/2 connection.
    _open: Option<OpenConnection>,
    budget: BufferBudget,
    /// Kept when the connection becomes a tunnel.
    permit: Mutex<ConnectionPermit>,
    is_in_reserve: AtomicBool,
    /// `IN_HEAD`, `IN_BODY` or `IN_TUNNEL`.
    phase: AtomicU8,
    /// Bytes that were read and belong to no request yet: those of an incomplete head. In a body, also those that its reader
    /// has not taken.
    unparsed: AtomicUsize,
    /// The size of the last read. A head is completed by the last read, so at most this many bytes follow the head.
    last_read: AtomicUsize,
    /// Whether the last request was answered before its body was read.
    has_unread_body: AtomicBool,
}

/// The permit of an open connection.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    _permit: OwnedSemaphorePermit,
    /// The semaphore of ordinary permits, if this permit is one of the reserve.
    ordinary: Option<Arc<Semaphore>>,
    /// Of those that an HTTP/2 connection may have of the reserve.
    _share: Option<OwnedSemaphorePermit>,
}

/// A connection, as metrics count it until it is dropped.
pub(crate) struct OpenConnection(Arc<Metrics>);

impl OpenConnection {
    pub(crate) fn new(metrics: &Arc<Metrics>) -> Self {
        metrics.connections.inc();
        Self(Arc::clone(metrics))
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.connections.dec();
    }
}

impl ConnectionPermit {
    pub(crate) const fn ordinary(permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: permit, ordinary: None, _share: None }
    }

    pub(crate) const fn is_in_reserve(&self) -> bool {
        self.ordinary.is_some()
    }

    /// One of the few permits for operations routes, used when all ordinary ones are taken.
    pub(crate) const fn in_reserve(permit: OwnedSemaphorePermit, ordinary: Arc<Semaphore>) -> Self {
        Self { _permit: permit, ordinary: Some(ordinary), _share: None }
    }

    /// Holds the share as long as the permit.
    pub(crate) fn with_share(self, share: OwnedSemaphorePermit) -> Self {
        Self { _share: Some(share), ..self }
    }
}

impl Peer {
    pub(crate) fn new(
        transport: Transport,
        address: SocketAddr,
        permit: ConnectionPermit,
        budget: BufferBudget,
        open: Option<OpenConnection>,
    ) -> Self {
        Self(Arc::new(PeerConnection {
            is_encrypted: !transport.is_plain(),
            transport: Mutex::new(transport),
            address,
            _open: open,
            budget,
            is_in_reserve: AtomicBool::new(permit.is_in_reserve()),
            permit: Mutex::new(permit),
            phase: AtomicU8::new(IN_HEAD),
            unparsed: AtomicUsize::new(0),
            last_read: AtomicUsize::new(0),
            has_unread_body: AtomicBool::new(false),
        }))
    }

    pub(crate) fn stream(&self) -> PeerStream {
        PeerStream {
            connection: Arc::clone(&self.0),
            is_write_pending: false,
            is_read_deferred: false,
            head_charge: None,
        }
    }

    pub(crate) fn is_in_reserve(&self) -> bool {
        self.0.is_in_reserve.load(Ordering::Relaxed)
    }

    /// Exchanges a permit of the reserve for an ordinary one. Returns false if none is free.
    pub(crate) fn leave_reserve(&self) -> bool {
        let mut current = self.0.permit.lock();
        let Some(ordinary) = &current.ordinary else { return true };
        let Ok(permit) = Arc::clone(ordinary).try_acquire_owned() else { return false };
        *current = ConnectionPermit::ordinary(permit);
        self.0.is_in_reserve.store(false, Ordering::Relaxed);
        true
    }

    /// Must be called when the head of a request is complete. `head_length` is called only for large heads, to find how many
    /// of the bytes read belong to the body or to the next head.
    pub(crate) fn begin_request(&self, has_body: bool, head_length: impl FnOnce() -> usize) {
        self.0.has_unread_body.store(false, Ordering::Relaxed);
        let rest = match self.0.unparsed.load(Ordering::Relaxed) {
            0..=HEAD_FREE => 0,
            // The length is approximate: white space around values is not counted. Without the second bound such errors
            // would add up.
            read => read.saturating_sub(head_length()).min(self.0.last_read.load(Ordering::Relaxed)),
        };
        self.0.unparsed.store(rest, Ordering::Relaxed);
        self.0.phase.store(if has_body { IN_BODY } else { IN_HEAD }, Ordering::Relaxed);
    }

    /// Must be called with the size on the wire of every frame of a body that its reader has taken.
    pub(crate) fn record_body_read(&self, bytes: usize) {
        let rest = self.0.unparsed.load(Ordering::Relaxed).saturating_sub(bytes);
        self.0.unparsed.store(rest, Ordering::Relaxed);
    }

    /// Must be called when the body of a request is complete, or its reader has dropped it. Bytes read beyond it belong to
    /// the next head.
    pub(crate) fn end_body(&self, is_unread: bool) {
        if self.0.phase.load(Ordering::Relaxed) == IN_BODY {
            self.0.phase.store(IN_HEAD, Ordering::Relaxed);
            self.0.has_unread_body.store(is_unread, Ordering::Relaxed);
        }
    }

    /// Must be called when the connection no longer speaks HTTP/1.1: it has become a tunnel, or speaks HTTP/2, whose parser
    /// bounds what it buffers.
    pub(crate) fn leave_http1(&self) {
        self.0.phase.store(IN_TUNNEL, Ordering::Relaxed);
        self.0.has_unread_body.store(false, Ordering::Relaxed);
    }

    pub(crate) fn has_unread_body(&self) -> bool {
        self.0.has_unread_body.load(Ordering::Relaxed)
    }

    /// Whether the peer uses TLS.
    #[must_use]
    pub(crate) fn is_encrypted(&self) -> bool {
        self.0.is_encrypted
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// Ready when the peer has closed its side or the connection is lost. To be polled only from the task of the connection,
    /// once the whole request has arrived. Later bytes are left unread; while there are any, the end is not noticed.
    pub fn poll_disconnected(&self, context: &mut Context<'_>) -> Poll<()> {
        self.0.transport.lock().poll_end(context)
    }

    /// Ready when the peer has closed its side or the connection is lost. Incoming bytes are discarded.
    pub(crate) fn poll_closed(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut ignored = [0; 512];
        loop {
            let mut buffer = ReadBuf::new(&mut ignored);
            match Pin::new(&mut *self.0.transport.lock()).poll_read(context, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Discards some of what the peer sends. Returns the number of bytes; 0 at the end.
    pub(crate) fn poll_discard(&self, context: &mut Context<'_>) -> Poll<usize> {
        let mut ignored = [std::mem::MaybeUninit::uninit(); DISCARD_BYTES];
        let mut buffer = ReadBuf::uninit(&mut ignored);
        let read = Pin::new(&mut *self.0.transport.lock()).poll_read(context, &mut buffer);
        read.map(|read| if read.is_ok() { buffer.filled().len() } else { 0 })
    }
}

/// Waits until the peer has disconnected, with the conditions of [`Peer::poll_disconnected`]. Never returns without a peer.
pub(crate) async fn disconnected(peer: Option<&Peer>) {
    match peer {
        Some(peer) => std::future::poll_fn(|context| peer.poll_disconnected(context)).await,
        None => std::future::pending().await,
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Peer").field(&self.0.address).finish()
    }
}

/// Reads from and writes to the connection. One task at a time does so, all on one thread, so the lock is always free.
pub(crate) struct PeerStream {
    connection: Arc<PeerConnection>,
    /// Whether the socket did not accept all of the last write.
    is_write_pending: bool,
    /// Whether a read waits for that write to finish.
    is_read_deferred: bool,
    /// The charge of a large head. It lasts until the next head begins, as long as hyper's buffer does.
    head_charge: Option<BufferCharge>,
}

impl PeerStream {
    fn phase(&self) -> u8 {
        self.connection.phase.load(Ordering::Relaxed)
    }

    /// Charges the bytes of an incomplete head to the budget, if there are many.
    fn charge_head(&mut self) -> io::Result<()> {
        let head = self.connection.unparsed.load(Ordering::Relaxed);
        if head <= HEAD_FREE {
            self.head_charge = None;
            return Ok(());
        }
        let charge = self.head_charge.get_or_insert_with(|| self.connection.budget.charge());
        charge.try_resize(head - HEAD_FREE).map_err(io::Error::other)
    }

    fn count_read(&mut self, read: usize) -> io::Result<()> {
        let phase = self.phase();
        if phase == IN_TUNNEL {
            self.head_charge = None;
            return Ok(());
        }
        let unparsed = self.connection.unparsed.load(Ordering::Relaxed);
        self.connection.unparsed.store(unparsed + read, Ordering::Relaxed);
        self.connection.last_read.store(read, Ordering::Relaxed);
        if phase == IN_HEAD { self.charge_head() } else { Ok(()) }
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.phase() == IN_HEAD {
            // A head may be refused for lack of memory, and the refusal must not be written into the middle of a response.
            // So a head is not read before the previous response is written.
            if this.is_write_pending {
                this.is_read_deferred = true;
                return Poll::Pending;
            }
            // The head may have begun in the last read of a body, which was not charged.
            if this.connection.unparsed.load(Ordering::Relaxed) > HEAD_FREE {
                this.charge_head()?;
            }
        }
        let filled = buffer.filled().len();
        let read = Pin::new(&mut *this.connection.transport.lock()).poll_read(context, buffer);
        if let Poll::Ready(Ok(())) = read {
            this.count_read(buffer.filled().len() - filled)?;
        }
        read
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut *this.connection.transport.lock()).poll_write(context, bytes);
        this.is_write_pending = match &written {
            Poll::Ready(written) => matches!(written, Ok(written) if *written < bytes.len()),
            Poll::Pending => true,
        };
        if !this.is_write_pending && std::mem::take(&mut this.is_read_deferred) {
            // Nothing else wakes the task for bytes that have arrived in the meantime.
            context.waker().wake_by_ref();
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.connection.transport.lock()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.connection.transport.lock()).poll_shutdown(context)
    }
}

#[cfg(test)]
pub(crate) mod fixtures {
    use tokio::net::{TcpListener, TcpStream};

    use super::transport::Tcp;
    use super::*;

    /// Returns both ends of a connection.
    pub(crate) async fn connect(permit: ConnectionPermit, budget: BufferBudget) -> (TcpStream, Peer) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, address) = listener.accept().await.unwrap();
        (client, Peer::new(Transport::Plain(Tcp::new(stream)), address, permit, budget, None))
    }

    pub(crate) fn ordinary_permit() -> ConnectionPermit {
        ConnectionPermit::ordinary(Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap())
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::fixtures::{connect, ordinary_permit};
    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);
    /// The size of a head that is charged to the budget.
    const LARGE_HEAD: usize = 20_000;

    async fn read_exactly(stream: &mut PeerStream, bytes: usize) {
        stream.read_exact(&mut vec![0; bytes]).await.unwrap();
    }

    /// Writes until the socket accepts no more. Returns the number of bytes written.
    fn fill(stream: &mut PeerStream, context: &mut Context<'_>) -> usize {
        let (block, mut total) = (vec![b'r'; 1 << 20], 0);
        while let Poll::Ready(written) = Pin::new(&mut *stream).poll_write(context, &block) {
            total += written.unwrap();
        }
        total
    }

    #[tokio::test]
    async fn a_head_is_not_read_or_refused_before_the_previous_response_is_written() {
        let (client, peer) = connect(ordinary_permit(), BufferBudget::new(0)).await;
        let (mut response, mut request) = client.into_split();
        let mut stream = peer.stream();
        let written = poll_fn(|context| Poll::Ready(fill(&mut stream, context))).await;
        request.write_all(&[b'h'; LARGE_HEAD]).await.unwrap();
        poll_fn(|context| peer.0.transport.lock().tcp().unwrap().poll_read_ready(context)).await.unwrap();
        assert!(stream.read(&mut [0; LARGE_HEAD]).now_or_never().is_none(), "the response is under way");
        let reading = tokio::spawn(async move {
            response.read_exact(&mut vec![0; written + 3]).await.unwrap();
            response
        });
        // Like hyper: first reads what it can, then writes what it can, and does nothing else until it is woken.
        let mut rest = &b"end"[..];
        let serving = poll_fn(|context| {
            let mut head = [0; LARGE_HEAD];
            if let Poll::Ready(read) = Pin::new(&mut stream).poll_read(context, &mut ReadBuf::new(&mut head))
            {
                return Poll::Ready(read);
            }
            while !rest.is_empty()
                && let Poll::Ready(written) = Pin::new(&mut stream).poll_write(context, rest)
            {
                rest = &rest[written.unwrap()..];
            }
            Poll::Pending
        });
        let refused = tokio::time::timeout(TEST_TIMEOUT, serving).await.expect("it is woken").unwrap_err();
        assert!(refused.get_ref().is_some_and(|cause| cause.is::<crate::buffer_budget::BudgetExhausted>()));
        tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("the response is complete").unwrap();
    }

    #[tokio::test]
    async fn a_head_that_begins_in_the_last_read_of_a_body_is_charged() {
        let budget = BufferBudget::new(LARGE_HEAD);
        let (mut client, peer) = connect(ordinary_permit(), budget.clone()).await;
        let mut stream = peer.stream();
        client.write_all(&[b'h'; 100]).await.unwrap();
        read_exactly(&mut stream, 100).await;
        peer.begin_request(true, || 100);
        client.write_all(&[b'b'; 50]).await.unwrap();
        client.write_all(&[b'h'; LARGE_HEAD]).await.unwrap();
        read_exactly(&mut stream, 50 + LARGE_HEAD).await;
        peer.record_body_read(50);
        peer.end_body(false);
        assert!(stream.read(&mut [0; 100]).now_or_never().is_none(), "nothing more has arrived");
        assert_eq!(budget.used(), LARGE_HEAD - HEAD_FREE);
        let mut others = budget.charge();
        others.try_resize(budget.total() - budget.used()).unwrap();
        client.write_all(b"h").await.unwrap();
        let more = tokio::time::timeout(TEST_TIMEOUT, stream.read(&mut [0; 100])).await.expect("it is read");
        assert!(more.is_err(), "the budget is exhausted");
        drop(stream);
        assert_eq!(budget.used(), others.bytes());
    }

    #[tokio::test]
    async fn a_tunnel_is_read_while_a_write_is_pending() {
        let (mut client, peer) = connect(ordinary_permit(), BufferBudget::new(0)).await;
        let mut stream = peer.stream();
        peer.leave_http1();
        poll_fn(|context| Poll::Ready(fill(&mut stream, context))).await;
        client.write_all(&[b't'; LARGE_HEAD]).await.unwrap();
        let reading = read_exactly(&mut stream, LARGE_HEAD);
        tokio::time::timeout(TEST_TIMEOUT, reading).await.expect("it is read");
    }
}
