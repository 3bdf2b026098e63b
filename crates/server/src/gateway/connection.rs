//! A connection to an upstream, over which hyper's client makes one call after the other.
//!
//! It is polled by whoever waits for its answer, in the same task, and not by a task of its own: a call then costs no switch
//! between tasks, what the caller does not take is not read, and a caller that is dropped takes the call with it.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::request_body::RequestBody;
use crate::outbound::connect::OutboundStream;

/// How long the head of an answer may be.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// What may be read before there is the head of an answer: the head, those that announce it (1xx), and what comes with it.
const BYTES_BEFORE_ANSWER_MAX: usize = 2 * HEAD_BYTES_MAX;

type SendResult = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>;

/// A connection to an upstream.
pub(super) struct UpstreamConnection {
    sender: SendRequest<RequestBody>,
    driver: Driver,
    stream: UpstreamStream,
    /// Whether it has carried a call before.
    pub(super) is_used: bool,
    /// Whether its answer could be read in another way as well, so that nobody knows what comes after it.
    pub(super) is_ambiguous: bool,
}

impl UpstreamConnection {
    /// Speaks HTTP/1.1 over a stream.
    pub(super) async fn new(stream: OutboundStream) -> hyper::Result<Self> {
        let stream = UpstreamStream::new(stream);
        let mut builder = Builder::new();
        // Calls are small: copying head and body together costs less than having the kernel gather them.
        builder.max_buf_size(HEAD_BYTES_MAX).writev(false);
        let (sender, connection) = builder.handshake(TokioIo::new(stream.clone())).await?;
        let driver = Driver { connection, has_ended: false };
        Ok(Self { sender, driver, stream, is_used: false, is_ambiguous: false })
    }

    /// Reads and writes what there is.
    pub(super) fn drive(&mut self, context: &mut Context<'_>) {
        self.driver.drive(context);
    }

    /// Sends a request and waits for the head of the answer.
    pub(super) async fn send(&mut self, request: Request<RequestBody>) -> SendResult {
        self.stream.0.lock().read_budget = Some(BYTES_BEFORE_ANSWER_MAX);
        let mut answer = pin!(self.sender.try_send_request(request));
        let sent = poll_fn(|context| {
            self.driver.drive(context);
            answer.as_mut().poll(context)
        })
        .await;
        self.stream.0.lock().read_budget = None;
        sent
    }

    /// Whether its call is over, all of the request has been written, and another call can follow. What is not written yet
    /// may be part of a request that the upstream has answered early.
    pub(super) fn is_finished(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.driver.has_ended
            && !self.is_ambiguous
            && self.sender.is_ready()
            && self.stream.0.lock().is_flushed
    }

    /// Whether a call can be made over it after it has waited: it has not ended, and the upstream has said nothing that nobody
    /// asked for. The system is asked, which knows at once; the runtime hears of it only when it next polls its sockets.
    pub(super) fn is_reusable(&mut self) -> bool {
        if !self.stream.0.lock().stream.is_plain() {
            // Encrypted, there may be something to read that is no answer. It is taken here.
            self.drive(&mut Context::from_waker(Waker::noop()));
        }
        !self.driver.has_ended && self.stream.0.lock().stream.is_quiet()
    }

    /// The stream beneath a call that became something else than HTTP, with what was read of that already.
    pub(super) async fn into_tunnel(mut self) -> (UpstreamStream, Bytes) {
        poll_fn(|context| {
            self.drive(context);
            if self.driver.has_ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        (self.stream, self.driver.connection.into_parts().read_buf)
    }
}

/// Moves hyper's connection on.
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
                tracing::debug!(%error, "a connection to the upstream failed");
            }
            self.has_ended = true;
        }
    }
}

/// The stream beneath hyper's connection. The pool looks at it, too, so it is shared; the lock is always free.
#[derive(Clone)]
pub(super) struct UpstreamStream(Arc<Mutex<StreamState>>);

struct StreamState {
    stream: OutboundStream,
    /// Whether everything that was to be written is.
    is_flushed: bool,
    /// How much more may be read before there is an answer: an upstream might only announce one, for ever.
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
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "its head is too long")));
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

    /// hyper flushes when it has written all it has.
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

#[cfg(test)]
mod tests;
