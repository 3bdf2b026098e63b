//! The body of an answer on its way to the caller, piece by piece as it comes.
//!
//! The connection to the upstream is read only while the caller takes what comes by it. It goes back to the pool when the
//! answer was taken whole; dropped before, it is closed, and the upstream learns that nobody listens. A stop of the server
//! drops it with the caller's connection.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::HttpBody;
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use tokio::time::Sleep;

use super::connection::UpstreamConnection;
use super::pool::Pool;
use super::request_body::Progress;
use crate::peer::Peer;

/// Why an answer was cut off.
#[derive(Debug, thiserror::Error)]
pub(super) enum CutOff {
    #[error("the upstream's answer broke off")]
    Upstream(#[source] hyper::Error),
    #[error("the upstream fell silent")]
    Silent,
    #[error("the caller has gone")]
    CallerGone,
}

/// The body of an answer.
pub(super) struct ResponseBody {
    body: Incoming,
    /// None once it was given back.
    connection: Option<Box<UpstreamConnection>>,
    pool: Pool,
    peer: Option<Peer>,
    upload: Arc<Progress>,
    idle_timeout: Duration,
    last: Instant,
    silence: Option<Pin<Box<Sleep>>>,
}

impl ResponseBody {
    pub(super) fn new(
        body: Incoming,
        connection: Box<UpstreamConnection>,
        pool: Pool,
        peer: Option<Peer>,
        upload: Arc<Progress>,
        idle_timeout: Duration,
    ) -> Self {
        let (connection, last) = (Some(connection), Instant::now());
        Self { body, connection, pool, peer, upload, idle_timeout, last, silence: None }
    }

    fn poll_upstream(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        // What is there already may be all that is wanted.
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        if let Some(connection) = &mut self.connection {
            connection.drive(context);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    /// Ready when there is no point in waiting any longer.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<CutOff> {
        if self.upload.has_ended()
            && self.peer.as_ref().is_some_and(|peer| peer.poll_disconnected(context).is_ready())
        {
            return Poll::Ready(CutOff::CallerGone);
        }
        let until = self.last + self.idle_timeout;
        let silence = self.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until.into())));
        while silence.as_mut().poll(context).is_ready() {
            if Instant::now() >= until {
                return Poll::Ready(CutOff::Silent);
            }
            silence.as_mut().reset(until.into());
        }
        Poll::Pending
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        let this = self.get_mut();
        match this.poll_upstream(context) {
            Poll::Ready(frame) => {
                this.last = Instant::now();
                Poll::Ready(frame.map(|frame| frame.map_err(CutOff::Upstream)))
            }
            Poll::Pending => this.poll_end(context).map(|end| Some(Err(end))),
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
            // The pool takes it only if the answer was read to its end.
            self.pool.put(connection);
        }
    }
}
