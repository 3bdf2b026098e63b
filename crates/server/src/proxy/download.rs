//! An answer on its way to the caller, piece by piece as it comes.
//!
//! The connection to the upstream moves on only while the caller takes what comes by it. It goes back to the pool when
//! the answer was taken whole; dropped before, it is closed, and the upstream learns that nobody listens.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::HttpBody;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hyper::body::{Frame, Incoming, SizeHint};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::direct::Broken;
use super::pool::Pool;
use super::upload::Progress;
use super::wire::Wire;
use crate::http::caller::Caller;

/// Why an answer was cut off.
#[derive(Debug, thiserror::Error)]
pub(super) enum CutOff {
    #[error("the upstream's answer broke off")]
    Upstream(#[source] hyper::Error),
    #[error("the upstream's answer broke off")]
    Broken(#[source] Broken),
    #[error("the upstream fell silent")]
    Silent,
    #[error("the caller has gone")]
    CallerGone,
    #[error("the server stops")]
    Stopping,
}

/// The body of an answer.
pub(super) struct Download {
    body: Incoming,
    wire: Option<Box<Wire>>,
    pool: Pool,
    caller: Option<Caller>,
    upload: std::sync::Arc<Progress>,
    idle_timeout: Duration,
    last: Instant,
    silence: Option<Pin<Box<Sleep>>>,
    stop: CancellationToken,
    stopping: Option<BoxFuture<'static, ()>>,
}

/// What an answer needs besides its connection.
pub(super) struct Around {
    pub(super) pool: Pool,
    pub(super) caller: Option<Caller>,
    pub(super) upload: std::sync::Arc<Progress>,
    pub(super) idle_timeout: Duration,
    pub(super) stop: CancellationToken,
}

impl Download {
    pub(super) fn new(body: Incoming, wire: Box<Wire>, around: Around) -> Self {
        let Around { pool, caller, upload, idle_timeout, stop } = around;
        let (wire, last) = (Some(wire), Instant::now());
        Self { body, wire, pool, caller, upload, idle_timeout, last, silence: None, stop, stopping: None }
    }

    fn poll_upstream(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        // What is there already may be all that was wanted.
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame);
        }
        if let Some(wire) = &mut self.wire {
            wire.drive(context);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    /// Ready when there is no point in waiting any longer.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<CutOff> {
        if self.upload.has_ended()
            && self.caller.as_ref().is_some_and(|caller| caller.poll_gone(context).is_ready())
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
        let stop = &self.stop;
        let stopping = self.stopping.get_or_insert_with(|| stop.clone().cancelled_owned().boxed());
        stopping.as_mut().poll(context).map(|()| CutOff::Stopping)
    }
}

impl HttpBody for Download {
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

impl Drop for Download {
    fn drop(&mut self) {
        if let Some(wire) = self.wire.take() {
            // There is none unless the answer was read to its end.
            if let Some(line) = wire.into_line() {
                self.pool.keep(line, Instant::now());
            }
        }
    }
}
