//! A request body on its way to the upstream, with bounds on its size and on pauses of the caller.

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

pub(super) struct RequestBody {
    body: Body,
    bytes_left: u64,
    /// How long the caller may pause.
    idle_timeout: Duration,
    idle_timer: Option<Pin<Box<Sleep>>>,
    progress: Arc<UploadProgress>,
}

/// The progress of a request body, shared with the task that waits for the response.
#[derive(Debug, Default)]
pub(super) struct UploadProgress {
    has_ended: AtomicBool,
    fault: AtomicU8,
    /// When the last frame came, in milliseconds since `first_frame_at`.
    last_frame_ms: AtomicU64,
    first_frame_at: OnceLock<Instant>,
}

/// What was wrong with a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub(super) enum UploadFault {
    #[error("the request body is too large")]
    TooLarge = 1,
    #[error("the request body came too slowly")]
    TooSlow = 2,
    #[error("the request body ended before it was complete")]
    CutOff = 3,
}

impl UploadProgress {
    /// Whether the whole body has been forwarded.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    pub(super) fn fault(&self) -> Option<UploadFault> {
        [UploadFault::TooLarge, UploadFault::TooSlow, UploadFault::CutOff]
            .into_iter()
            .find(|fault| *fault as u8 == self.fault.load(Ordering::Relaxed))
    }

    /// When the last frame was forwarded; before the first one, when this was first called.
    pub(super) fn last_frame_at(&self) -> Instant {
        let first = *self.first_frame_at.get_or_init(Instant::now);
        first + Duration::from_millis(self.last_frame_ms.load(Ordering::Relaxed))
    }

    fn record_frame(&self) {
        let elapsed = self.first_frame_at.get_or_init(Instant::now).elapsed();
        self.last_frame_ms.store(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl RequestBody {
    /// Bounds a body to `max` bytes and to pauses of `idle_timeout`.
    pub(super) fn new(body: Body, max: usize, idle_timeout: Duration) -> (Self, Arc<UploadProgress>) {
        let progress = Arc::new(UploadProgress::default());
        progress.has_ended.store(body.is_end_stream(), Ordering::Relaxed);
        let shared = Arc::clone(&progress);
        (Self { body, bytes_left: max as u64, idle_timeout, idle_timer: None, progress: shared }, progress)
    }

    fn accept(&mut self, mut frame: Frame<Bytes>) -> Result<Frame<Bytes>, UploadFault> {
        if let Some(trailers) = frame.trailers_mut() {
            remove_reserved_trailers(trailers);
        }
        self.idle_timer = None;
        let length = frame.data_ref().map_or(0, Bytes::len) as u64;
        self.bytes_left = self.bytes_left.checked_sub(length).ok_or(UploadFault::TooLarge)?;
        self.progress.record_frame();
        if self.body.is_end_stream() {
            self.progress.has_ended.store(true, Ordering::Relaxed);
        }
        Ok(frame)
    }

    fn poll_idle_timer(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let new_timer = || Box::pin(tokio::time::sleep(self.idle_timeout));
        self.idle_timer.get_or_insert_with(new_timer).as_mut().poll(context)
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = UploadFault;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadFault>>> {
        let this = self.get_mut();
        let frame = match Pin::new(&mut this.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => this.accept(frame),
            Poll::Ready(Some(Err(_cut_off))) => Err(UploadFault::CutOff),
            Poll::Ready(None) => {
                this.progress.has_ended.store(true, Ordering::Relaxed);
                return Poll::Ready(None);
            }
            Poll::Pending if this.poll_idle_timer(context).is_ready() => Err(UploadFault::TooSlow),
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
    async fn a_body_of_the_maximum_size_passes_and_one_byte_more_is_refused() {
        let (upload, progress) = RequestBody::new(chunks(&[3, 3, 4]), 10, Duration::MAX);
        assert!(!progress.has_ended());
        assert_eq!(upload.collect().await.unwrap().to_bytes().len(), 10);
        assert!(progress.has_ended() && progress.fault().is_none());

        let (upload, progress) = RequestBody::new(chunks(&[3, 3, 5]), 10, Duration::MAX);
        assert_eq!(upload.collect().await.unwrap_err(), UploadFault::TooLarge);
        assert_eq!(progress.fault(), Some(UploadFault::TooLarge));
    }

    #[tokio::test]
    async fn a_body_that_pauses_for_too_long_is_refused() {
        let body = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let (upload, progress) = RequestBody::new(body, 10, Duration::from_millis(1));
        assert_eq!(upload.collect().await.unwrap_err(), UploadFault::TooSlow);
        assert_eq!(progress.fault(), Some(UploadFault::TooSlow));
    }

    #[tokio::test]
    async fn an_empty_body_has_ended_before_it_is_polled() {
        assert!(RequestBody::new(Body::empty(), 10, Duration::MAX).1.has_ended());
    }
}
