//! A connection to the upstream that hyper speaks over, for one call.
//!
//! It is moved on by whoever waits for its answer, in the same task, and not by a task of its own: a call then costs no switch
//! between tasks, and a caller that is dropped takes the call with it.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::HEAD_BYTES_MAX;
use super::alarm::Alarm;
use super::pool::Line;
use super::upload::Upload;
use crate::outbound::connect::Stream;

/// The head, those that announce it, and what may come with it.
const UNTIL_HEAD_MAX: usize = 2 * HEAD_BYTES_MAX;

type Sent = Result<Response<Incoming>, TrySendError<Request<Upload>>>;

/// A connection to the upstream.
pub(super) struct Wire {
    sender: SendRequest<Upload>,
    connection: Connection<TokioIo<Watched>, Upload>,
    /// How much may be read before there is the head of an answer.
    room: Arc<AtomicUsize>,
    has_ended: bool,
    /// Whether it has carried a call before.
    pub(super) is_used: bool,
    /// Whether its answer could be read in another way as well, so that nobody knows what comes after it.
    pub(super) is_doubtful: bool,
    alarm: Alarm,
}

impl Wire {
    /// Speaks HTTP/1.1 over a connection.
    pub(super) async fn new(line: Line) -> io::Result<Box<Self>> {
        let Line { stream, is_used, alarm } = line;
        let mut builder = Builder::new();
        builder.max_buf_size(HEAD_BYTES_MAX);
        let room = Arc::new(AtomicUsize::new(UNTIL_HEAD_MAX));
        let watched = Watched { stream, is_flushed: true, room: Arc::clone(&room) };
        let (sender, connection) =
            builder.handshake(TokioIo::new(watched)).await.map_err(io::Error::other)?;
        let (has_ended, is_doubtful) = (false, false);
        Ok(Box::new(Self { sender, connection, room, has_ended, is_used, is_doubtful, alarm }))
    }

    /// Reads and writes what there is.
    pub(super) fn drive(&mut self, context: &mut Context<'_>) {
        if !self.has_ended
            && let Poll::Ready(ended) = self.connection.poll_without_shutdown(context)
        {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to the upstream ended badly");
            }
            self.has_ended = true;
        }
    }

    /// Sends a request and waits for the head of the answer.
    pub(super) async fn send(&mut self, request: Request<Upload>) -> Sent {
        let mut answer = pin!(self.sender.try_send_request(request));
        let sent = poll_fn(|context| {
            if let Poll::Ready(sent) = answer.as_mut().poll(context) {
                return Poll::Ready(sent);
            }
            self.drive(context);
            answer.as_mut().poll(context)
        })
        .await;
        self.room.store(usize::MAX, Ordering::Relaxed);
        sent
    }

    /// The connection, if its call is over and another one can be made.
    pub(super) fn into_line(mut self: Box<Self>) -> Option<Line> {
        self.drive(&mut Context::from_waker(Waker::noop()));
        if self.has_ended || self.is_doubtful || !self.sender.is_ready() {
            return None;
        }
        let Self { connection, is_used, alarm, .. } = *self;
        let parts = connection.into_parts();
        let Watched { stream, is_flushed, .. } = parts.io.into_inner();
        // What hyper has not written yet goes with hyper, and the upstream still waits for it.
        (is_flushed && parts.read_buf.is_empty()).then(|| Line { stream, is_used, alarm })
    }

    /// What is under a call that became something else than HTTP, with what was read of that already.
    pub(super) async fn into_tunnel(mut self: Box<Self>) -> (Stream, Bytes) {
        poll_fn(|context| {
            self.drive(context);
            if self.has_ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let parts = self.connection.into_parts();
        (parts.io.into_inner().stream, parts.read_buf)
    }
}

/// A stream that tells what became of what was written, and that does not listen for ever to an upstream that only announces
/// its answer.
struct Watched {
    stream: Stream,
    /// Whether everything that was to be written is.
    is_flushed: bool,
    room: Arc<AtomicUsize>,
}

impl AsyncRead for Watched {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        let room = this.room.load(Ordering::Relaxed);
        if room < usize::MAX {
            let left = room.saturating_sub(buffer.filled().len() - before);
            this.room.store(left, Ordering::Relaxed);
            if left == 0 {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "its head is too long")));
            }
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.is_flushed = false;
        Pin::new(&mut this.stream).poll_write(context, bytes)
    }

    /// hyper flushes when it has written all it has.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(context);
        this.is_flushed = matches!(flushed, Poll::Ready(Ok(())));
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests;
