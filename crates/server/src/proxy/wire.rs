//! A connection to the upstream that hyper speaks over, for one call.
//!
//! It is moved on by whoever waits for its answer, in the same task, and not by a task of its own: a call then costs no switch
//! between tasks, and a caller that is dropped takes the call with it.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;

use super::HEAD_BYTES_MAX;
use super::alarm::Alarm;
use super::pool::Line;
use super::upload::Upload;
use crate::outbound::connect::Stream;

type Sent = Result<Response<Incoming>, TrySendError<Request<Upload>>>;

/// A connection to the upstream.
pub(super) struct Wire {
    sender: SendRequest<Upload>,
    connection: Connection<TokioIo<Stream>, Upload>,
    has_ended: bool,
    /// Whether it has carried a call before.
    pub(super) is_used: bool,
    alarm: Alarm,
}

impl Wire {
    /// Speaks HTTP/1.1 over a connection.
    pub(super) async fn new(line: Line) -> io::Result<Box<Self>> {
        let Line { stream, is_used, alarm } = line;
        let mut builder = Builder::new();
        builder.max_buf_size(HEAD_BYTES_MAX);
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        Ok(Box::new(Self { sender, connection, has_ended: false, is_used, alarm }))
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
        poll_fn(|context| {
            if let Poll::Ready(sent) = answer.as_mut().poll(context) {
                return Poll::Ready(sent);
            }
            self.drive(context);
            answer.as_mut().poll(context)
        })
        .await
    }

    /// The connection, if its call is over and another one can be made.
    pub(super) fn into_line(mut self: Box<Self>) -> Option<Line> {
        self.drive(&mut Context::from_waker(Waker::noop()));
        if self.has_ended || !self.sender.is_ready() {
            return None;
        }
        let Self { connection, is_used, alarm, .. } = *self;
        let parts = connection.into_parts();
        parts.read_buf.is_empty().then(|| Line { stream: parts.io.into_inner(), is_used, alarm })
    }

    /// What is under a call that became something else than HTTP, with what was read of that already.
    pub(super) async fn into_tunnel(mut self: Box<Self>) -> (Stream, Bytes) {
        poll_fn(|context| {
            self.drive(context);
            if self.has_ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        let parts = self.connection.into_parts();
        (parts.io.into_inner(), parts.read_buf)
    }
}
