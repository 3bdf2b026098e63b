//! A request body on its way to the upstream: bounded in size, and in how slowly it may come.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::time::Sleep;

use super::reserved_headers::remove_reserved_trailers;

/// A request body.
pub(super) struct RequestBody {
    body: Body,
    /// How much more it may be.
    left: u64,
    /// How long the caller may be silent.
    patience: Duration,
    silence: Option<Pin<Box<Sleep>>>,
    progress: Arc<Progress>,
}

/// How an upload goes, for whoever waits for the answer to it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    has_ended: AtomicBool,
    fault: AtomicU8,
    /// When something last came, in milliseconds since `first`.
    last_ms: AtomicU64,
    first: OnceLock<Instant>,
}

/// What was wrong with an upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub(super) enum Fault {
    /// It is larger than allowed.
    #[error("the body is too large")]
    TooLarge = 1,
    /// The caller was silent for too long.
    #[error("the body came too slowly")]
    TooSlow = 2,
    /// It broke off.
    #[error("the body ended before it was complete")]
    CutOff = 3,
}

impl Progress {
    /// Whether all of it has been passed on.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// What was wrong with it.
    pub(super) fn fault(&self) -> Option<Fault> {
        [Fault::TooLarge, Fault::TooSlow, Fault::CutOff]
            .into_iter()
            .find(|fault| *fault as u8 == self.fault.load(Ordering::Relaxed))
    }

    /// When the last of it was passed on, or it began.
    pub(super) fn last(&self) -> Instant {
        let first = *self.first.get_or_init(Instant::now);
        first + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }

    fn note(&self) {
        let elapsed = self.first.get_or_init(Instant::now).elapsed();
        self.last_ms.store(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl RequestBody {
    /// Bounds a body.
    pub(super) fn new(body: Body, max: usize, patience: Duration) -> (Self, Arc<Progress>) {
        let progress = Arc::new(Progress::default());
        progress.has_ended.store(body.is_end_stream(), Ordering::Relaxed);
        let upload =
            Self { body, left: max as u64, patience, silence: None, progress: Arc::clone(&progress) };
        (upload, progress)
    }

    fn take(&mut self, mut frame: Frame<Bytes>) -> Result<Frame<Bytes>, Fault> {
        if let Some(trailers) = frame.trailers_mut() {
            remove_reserved_trailers(trailers);
        }
        self.silence = None;
        let length = frame.data_ref().map_or(0, Bytes::len) as u64;
        self.left = self.left.checked_sub(length).ok_or(Fault::TooLarge)?;
        self.progress.note();
        if self.body.is_end_stream() {
            self.progress.has_ended.store(true, Ordering::Relaxed);
        }
        Ok(frame)
    }

    fn poll_silence(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let patience = self.patience;
        self.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience))).as_mut().poll(context)
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        let this = self.get_mut();
        let frame = match Pin::new(&mut this.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => this.take(frame),
            Poll::Ready(Some(Err(_cut_off))) => Err(Fault::CutOff),
            Poll::Ready(None) => {
                this.progress.has_ended.store(true, Ordering::Relaxed);
                return Poll::Ready(None);
            }
            Poll::Pending if this.poll_silence(context).is_ready() => Err(Fault::TooSlow),
            Poll::Pending => return Poll::Pending,
        };
        if let Err(fault) = frame {
            this.progress.fault.store(fault as u8, Ordering::Relaxed);
        }
        Poll::Ready(Some(frame))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use http_body_util::BodyExt;

    use super::*;

    fn chunks(sizes: &[usize]) -> Body {
        let chunks: Vec<_> =
            sizes.iter().map(|size| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; *size]))).collect();
        Body::from_stream(stream::iter(chunks))
    }

    #[tokio::test]
    async fn a_body_may_be_as_large_as_is_allowed_and_not_a_byte_more() {
        let (upload, progress) = RequestBody::new(chunks(&[3, 3, 4]), 10, Duration::MAX);
        assert!(!progress.has_ended());
        assert_eq!(upload.collect().await.unwrap().to_bytes().len(), 10);
        assert!(progress.has_ended() && progress.fault().is_none());

        let (upload, progress) = RequestBody::new(chunks(&[3, 3, 5]), 10, Duration::MAX);
        assert_eq!(upload.collect().await.unwrap_err(), Fault::TooLarge);
        assert_eq!(progress.fault(), Some(Fault::TooLarge));
    }

    #[tokio::test]
    async fn a_caller_that_falls_silent_is_not_waited_for() {
        let body = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let (upload, progress) = RequestBody::new(body, 10, Duration::from_millis(1));
        assert_eq!(upload.collect().await.unwrap_err(), Fault::TooSlow);
        assert_eq!(progress.fault(), Some(Fault::TooSlow));
    }

    #[tokio::test]
    async fn no_body_has_ended_before_it_begins() {
        assert!(RequestBody::new(Body::empty(), 10, Duration::MAX).1.has_ended());
    }
}
