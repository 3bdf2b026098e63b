//! The upstream: its address, its connections, and the pool that keeps idle ones for the next call.
//!
//! hyper's client makes one call after the other over a connection. The task that waits for the response polls the
//! connection, not a task of its own: a call then costs no switch between tasks, nothing is read that the caller does not
//! take, and dropping the caller drops the call. An idle connection is polled by nobody; it is checked when it is taken from
//! the pool.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use axum::body::HttpBody;
use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::GatewayError;
use super::events::UpstreamConnectionFailed;
use super::request_body::{RequestBody, UploadProgress};
use super::settings::GatewaySettings;
use crate::outbound::connect::{Connector, OutboundStream, Reach};
use crate::outbound::{OutboundTarget, causes};
use crate::peer::Peer;

/// The largest response head.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// How much is read before the response head is complete: the head, informational responses (1xx), and the first of the body.
const BYTES_BEFORE_RESPONSE_MAX: usize = 2 * HEAD_BYTES_MAX;

/// How long a connection stays idle: shorter than most servers keep an idle connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// How often expired connections are removed from the pool.
pub(super) const SWEEP_INTERVAL: Duration = IDLE_TIMEOUT;

#[derive(Debug)]
pub(super) struct Upstream {
    target: OutboundTarget,
    /// The `Host` header of every call.
    pub(super) host: HeaderValue,
    /// Credentials sent in place of the caller's.
    pub(super) authorization: Option<HeaderValue>,
    connector: Connector,
    pub(super) pool: Pool,
}

impl Upstream {
    pub(super) fn new(url: &url::Url, settings: &GatewaySettings, threads: usize) -> Option<Self> {
        let target = OutboundTarget::new(url)?;
        let from_settings = settings.authorization.as_ref().and_then(|secret| {
            let mut value = HeaderValue::from_str(&secret.0).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Some(Self {
            host: HeaderValue::from_str(target.uri().authority()?.as_str()).ok()?,
            authorization: from_settings.or_else(|| target.authorization().cloned()),
            target,
            connector: Connector::new(Reach::Anywhere, settings.connect_timeout),
            pool: Pool::new(settings.max_idle, threads),
        })
    }

    /// Sends a request over an idle or a new connection and waits for the response head.
    pub(super) async fn exchange(
        &self,
        mut request: Request<RequestBody>,
    ) -> Result<(Response<Incoming>, Box<UpstreamConnection>), GatewayError> {
        loop {
            let mut connection = match self.pool.take() {
                Some(connection) => connection,
                None => Box::new(self.connect().await?),
            };
            let mut failure = match connection.send(request).await {
                Ok(response) => return Ok((response, connection)),
                Err(failure) => failure,
            };
            match failure.take_message() {
                // The idle connection had been closed and nothing was sent: try the next one. The pool is bounded.
                Some(unsent) if connection.is_reused => request = unsent,
                _ => return Err(GatewayError::Unreadable(causes(failure.error()))),
            }
        }
    }

    async fn connect(&self) -> Result<UpstreamConnection, GatewayError> {
        let stream = self.connector.clone().connect(self.target.uri().clone()).await.map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                GatewayError::TimedOut
            } else {
                GatewayError::Unreachable(error)
            }
        })?;
        let connection = UpstreamConnection::new(stream.into_inner()).await;
        connection.map_err(|error| GatewayError::Unreadable(causes(&error)))
    }
}

type SendResult = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>;

pub(super) struct UpstreamConnection {
    sender: SendRequest<RequestBody>,
    driver: Driver,
    stream: UpstreamStream,
    /// Whether it has carried an earlier call.
    is_reused: bool,
    /// Whether the end of its response can be read in two ways, so that the next bytes may belong to either response.
    pub(super) is_ambiguous: bool,
}

impl UpstreamConnection {
    /// Speaks HTTP/1.1 over a stream.
    async fn new(stream: OutboundStream) -> hyper::Result<Self> {
        let stream = UpstreamStream::new(stream);
        let mut builder = Builder::new();
        // Calls are small: copying head and body together costs less than a vectored write.
        builder.max_buf_size(HEAD_BYTES_MAX).writev(false);
        let (sender, connection) = builder.handshake(TokioIo::new(stream.clone())).await?;
        let driver = Driver { connection, has_ended: false };
        Ok(Self { sender, driver, stream, is_reused: false, is_ambiguous: false })
    }

    /// Reads and writes as much as the stream allows.
    fn drive(&mut self, context: &mut Context<'_>) {
        self.driver.drive(context);
    }

    /// Sends a request and waits for the response head.
    async fn send(&mut self, request: Request<RequestBody>) -> SendResult {
        self.stream.0.lock().read_budget = Some(BYTES_BEFORE_RESPONSE_MAX);
        let mut response = pin!(self.sender.try_send_request(request));
        let sent = poll_fn(|context| {
            self.driver.drive(context);
            response.as_mut().poll(context)
        })
        .await;
        self.stream.0.lock().read_budget = None;
        sent
    }

    /// Whether its call is complete and another one can follow. Unwritten bytes may belong to a request that the upstream
    /// answered before it had read all of it.
    fn is_finished(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.driver.has_ended
            && !self.is_ambiguous
            && self.sender.is_ready()
            && self.stream.0.lock().is_flushed
    }

    /// Whether an idle connection can carry a call: it is open, and the upstream has sent nothing unasked. This asks the
    /// operating system, which knows at once; the runtime learns of it only when it next polls its sockets.
    fn is_reusable(&mut self) -> bool {
        if !self.stream.0.lock().stream.is_plain() {
            // TLS may have records to read that are not a response.
            self.drive(&mut Context::from_waker(Waker::noop()));
        }
        !self.driver.has_ended && self.stream.0.lock().stream.is_quiet()
    }

    /// Returns the stream after a protocol switch, with the bytes that were already read from it.
    pub(super) async fn into_tunnel(mut self) -> (UpstreamStream, Bytes) {
        poll_fn(|context| {
            self.drive(context);
            if self.driver.has_ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        (self.stream, self.driver.connection.into_parts().read_buf)
    }
}

/// Polls hyper's connection until it ends.
struct Driver {
    connection: Connection<TokioIo<UpstreamStream>, RequestBody>,
    has_ended: bool,
}

impl Driver {
    fn drive(&mut self, context: &mut Context<'_>) {
        if !self.has_ended
            && let Poll::Ready(ended) = self.connection.poll_without_shutdown(context)
        {
            if let Err(error) = ended {
                UpstreamConnectionFailed { error: &error }.emit();
            }
            self.has_ended = true;
        }
    }
}

/// The stream below hyper's connection, shared because the pool checks it, too. The lock is never contended.
#[derive(Clone)]
pub(super) struct UpstreamStream(Arc<Mutex<StreamState>>);

struct StreamState {
    stream: OutboundStream,
    /// Whether all written bytes have been flushed.
    is_flushed: bool,
    /// How much more may be read before the response head is complete: an upstream could send 1xx responses for ever.
    read_budget: Option<usize>,
}

impl UpstreamStream {
    fn new(stream: OutboundStream) -> Self {
        Self(Arc::new(Mutex::new(StreamState { stream, is_flushed: true, read_budget: None })))
    }
}

impl AsyncRead for UpstreamStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        let before = buffer.filled().len();
        let read = Pin::new(&mut state.stream).poll_read(context, buffer);
        if let Some(budget) = &mut state.read_budget {
            *budget = budget.saturating_sub(buffer.filled().len() - before);
            if *budget == 0 {
                let message = "the response head is too long";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, message)));
            }
        }
        read
    }
}

impl AsyncWrite for UpstreamStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.0.lock();
        state.is_flushed = false;
        Pin::new(&mut state.stream).poll_write(context, bytes)
    }

    /// hyper flushes after it has written everything.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        let flushed = Pin::new(&mut state.stream).poll_flush(context);
        state.is_flushed = matches!(flushed, Poll::Ready(Ok(())));
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0.lock().stream).poll_shutdown(context)
    }
}

/// Idle connections of one thread with the time each became idle, oldest first.
type Idle = VecDeque<(Instant, Box<UpstreamConnection>)>;

/// Idle connections. Each HTTP thread has its own, because a connection belongs to the runtime that opened it.
#[derive(Clone)]
pub(super) struct Pool {
    threads: Arc<[Mutex<Idle>]>,
    max_per_thread: usize,
}

impl Pool {
    fn new(max: usize, threads: usize) -> Self {
        let max_per_thread = max.div_ceil(threads);
        Self { threads: (0..threads).map(|_| Mutex::default()).collect(), max_per_thread }
    }

    /// Takes the connection that this thread used last and that can carry another call.
    fn take(&self) -> Option<Box<UpstreamConnection>> {
        let now = Instant::now();
        loop {
            let (since, mut connection) = self.of_this_thread().pop_back()?;
            if now.saturating_duration_since(since) < IDLE_TIMEOUT && connection.is_reusable() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for another call, if its own call is complete.
    fn put(&self, mut connection: Box<UpstreamConnection>) {
        if !connection.is_finished() {
            return;
        }
        connection.is_reused = true;
        let mut idle = self.of_this_thread();
        if idle.len() < self.max_per_thread {
            idle.push_back((Instant::now(), connection));
        }
    }

    /// Closes connections that have been idle for too long.
    pub(super) fn sweep(&self) {
        for thread in &*self.threads {
            let mut expired = Vec::new();
            let mut idle = thread.lock();
            while idle.front().is_some_and(|(since, _)| since.elapsed() >= IDLE_TIMEOUT) {
                expired.extend(idle.pop_front());
            }
            // Connections are closed after the lock is released.
            drop(idle);
        }
    }

    fn of_this_thread(&self) -> MutexGuard<'_, Idle> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
        }
        let number = NUMBER.with(|number| *number);
        self.threads[number % self.threads.len()].lock()
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("max_per_thread", &self.max_per_thread).finish_non_exhaustive()
    }
}

/// Why a response body was cut off.
#[derive(Debug, thiserror::Error)]
pub(super) enum ResponseBodyError {
    #[error("the upstream's response broke off")]
    Upstream(#[source] hyper::Error),
    #[error("the upstream stopped sending its response")]
    Stalled,
    #[error("the caller has disconnected")]
    CallerGone,
}

/// A response body on its way to the caller, frame by frame.
///
/// The connection is read only while the caller takes frames. It returns to the pool when the body was read to its end;
/// dropped before that, it is closed, which tells the upstream that the caller has gone. A stop of the server drops it with the
/// caller's connection.
pub(super) struct ResponseBody {
    body: Incoming,
    /// `None` once it was returned to the pool.
    connection: Option<Box<UpstreamConnection>>,
    pool: Pool,
    peer: Option<Peer>,
    upload: Arc<UploadProgress>,
    idle_timeout: Duration,
    last_frame_at: Instant,
    idle_timer: Option<Pin<Box<Sleep>>>,
}

impl ResponseBody {
    pub(super) fn new(
        body: Incoming,
        connection: Box<UpstreamConnection>,
        pool: Pool,
        peer: Option<Peer>,
        upload: Arc<UploadProgress>,
        idle_timeout: Duration,
    ) -> Self {
        let (connection, last_frame_at) = (Some(connection), Instant::now());
        Self { body, connection, pool, peer, upload, idle_timeout, last_frame_at, idle_timer: None }
    }

    fn poll_upstream(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        // Frames that are already buffered need no read.
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        if let Some(connection) = &mut self.connection {
            connection.drive(context);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    /// Ready when the caller has disconnected or the upstream has been silent for too long.
    fn poll_cut_off(&mut self, context: &mut Context<'_>) -> Poll<ResponseBodyError> {
        if self.upload.has_ended()
            && self.peer.as_ref().is_some_and(|peer| peer.poll_disconnected(context).is_ready())
        {
            return Poll::Ready(ResponseBodyError::CallerGone);
        }
        let deadline = self.last_frame_at + self.idle_timeout;
        let new_timer = || Box::pin(tokio::time::sleep_until(deadline.into()));
        let timer = self.idle_timer.get_or_insert_with(new_timer);
        while timer.as_mut().poll(context).is_ready() {
            if Instant::now() >= deadline {
                return Poll::Ready(ResponseBodyError::Stalled);
            }
            timer.as_mut().reset(deadline.into());
        }
        Poll::Pending
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = ResponseBodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ResponseBodyError>>> {
        let this = self.get_mut();
        match this.poll_upstream(context) {
            Poll::Ready(frame) => {
                this.last_frame_at = Instant::now();
                Poll::Ready(frame.map(|frame| frame.map_err(ResponseBodyError::Upstream)))
            }
            Poll::Pending => this.poll_cut_off(context).map(|error| Some(Err(error))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            // The pool refuses it unless the response was read to its end.
            self.pool.put(connection);
        }
    }
}

#[cfg(test)]
mod tests;
