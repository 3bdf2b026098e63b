//! An answer that did not come at once, on its way to the caller, piece by piece as it comes.
//!
//! The upstream is read only while the caller takes what comes. The connection goes back to the pool when the answer has come
//! whole; dropped before, it is closed, and the upstream learns that nobody listens.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::HttpBody;
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio_util::sync::CancellationToken;

use super::super::alarm::Over;
use super::super::download::CutOff;
use super::super::pool::Pool;
use super::{Body, Broken, Talk};
use crate::http::caller::Caller;

/// The body of an answer.
pub(in crate::proxy) struct Flow {
    /// None once it has ended.
    talk: Option<Talk>,
    body: Body,
    /// Whether the connection is of use after it.
    is_kept: bool,
    around: Around,
}

/// What an answer needs besides its connection.
pub(in crate::proxy) struct Around {
    pub(in crate::proxy) pool: Pool,
    pub(in crate::proxy) caller: Option<Caller>,
    pub(in crate::proxy) idle_timeout: Duration,
    pub(in crate::proxy) stop: CancellationToken,
}

impl Flow {
    pub(in crate::proxy) fn new(mut talk: Talk, body: Body, is_kept: bool, around: Around) -> Self {
        talk.line.alarm.prolong(Instant::now(), around.idle_timeout);
        talk.forget_ask();
        Self { talk: Some(talk), body, is_kept, around }
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Frame<Bytes>>, CutOff>> {
        let Some(talk) = &mut self.talk else { return Poll::Ready(Ok(None)) };
        loop {
            let piece = self.body.next(&mut talk.read).map_err(CutOff::Broken)?;
            if piece.is_some() || self.body == Body::Ended {
                return Poll::Ready(Ok(piece));
            }
            talk.write(context);
            match talk.line.poll_read(context, &mut talk.read) {
                Poll::Ready(Ok(0)) => {
                    self.is_kept = false;
                    self.body.close().map_err(CutOff::Broken)?;
                }
                Poll::Ready(Ok(_more)) => talk.line.alarm.prolong(Instant::now(), self.around.idle_timeout),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(CutOff::Broken(Broken::Lost(error)))),
                Poll::Pending => return self.poll_end(context).map(Err),
            }
        }
    }

    /// Ready when there is no point in waiting any longer.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<CutOff> {
        if self.around.caller.as_ref().is_some_and(|caller| caller.poll_gone(context).is_ready()) {
            return Poll::Ready(CutOff::CallerGone);
        }
        let Some(talk) = &mut self.talk else { return Poll::Pending };
        talk.line.alarm.poll(context, &self.around.stop).map(|over| match over {
            Over::Late => CutOff::Silent,
            Over::Stopping => CutOff::Stopping,
        })
    }

    /// Gives the connection back, if it is of use.
    fn end(&mut self) {
        if let Some(line) = self.talk.take().filter(|_| self.is_kept).and_then(Talk::into_line) {
            self.around.pool.keep(line, Instant::now());
        }
    }
}

impl HttpBody for Flow {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        let this = self.get_mut();
        let polled = this.poll_piece(context);
        match &polled {
            Poll::Ready(Err(_)) => this.talk = None,
            Poll::Ready(Ok(_)) if this.body == Body::Ended => this.end(),
            Poll::Ready(Ok(_)) | Poll::Pending => {}
        }
        polled.map(Result::transpose)
    }

    fn is_end_stream(&self) -> bool {
        self.talk.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.body {
            Body::Length(left) => SizeHint::with_exact(left),
            Body::Ended => SizeHint::with_exact(0),
            Body::Chunked(_) | Body::UntilClosed => SizeHint::default(),
        }
    }
}
