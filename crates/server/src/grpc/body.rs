//! Limits the time and memory of incomplete gRPC request bodies.
//!
//! tonic buffers a message until it is complete, without a limit on the time. A body that is complete when it is first polled,
//! as nearly all are, costs nothing here.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::HttpBody;
use bytes::Bytes;
use http::Request;
use hyper::body::{Frame, SizeHint};
use tokio::time::Sleep;
use tonic::Status;
use tonic::body::Body;

use crate::buffer_budget::{BufferBudget, BufferCharge};

/// The buffer that tonic allocates before a message arrives.
const BUFFER_MIN: usize = 8 * 1024;
/// The overhead of a header besides its name and value, as HTTP/2 counts it.
const HEADER_BYTES: usize = 32;

/// The limits of incomplete requests. Clones share the budget.
#[derive(Clone)]
pub(super) struct BodyLimits {
    pub(super) budget: BufferBudget,
    /// How long a body may take to arrive.
    pub(super) timeout: Duration,
}

impl BodyLimits {
    pub(super) fn apply(&self, request: Request<Body>) -> Request<LimitedBody> {
        let headers = request.headers().iter();
        let head = headers.map(|(name, value)| name.as_str().len() + value.len() + HEADER_BYTES).sum();
        request.map(|body| LimitedBody {
            body,
            head,
            message: 0,
            charge: self.budget.charge(),
            timeout: self.timeout,
            timer: None,
        })
    }
}

/// The body of a request. While it is incomplete, the memory of body and head is charged to the budget.
pub(super) struct LimitedBody {
    body: Body,
    /// The size of the head in bytes.
    head: usize,
    /// The bytes of the body that have arrived.
    message: usize,
    charge: BufferCharge,
    timeout: Duration,
    /// Set while waiting for the body.
    timer: Option<Pin<Box<Sleep>>>,
}

impl LimitedBody {
    fn charge(&mut self) -> Result<(), Status> {
        // tonic's buffer doubles as it grows.
        let bytes = self.head + BUFFER_MIN.max(2 * self.message);
        let spent = |_spent| {
            Status::unavailable(
                "unfinished gRPC requests hold as much memory as the server allows; try again",
            )
        };
        self.charge.try_resize(bytes).map_err(spent)
    }
}

impl HttpBody for LimitedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(context) {
            if let Some(Ok(frame)) = &frame {
                this.message += frame.data_ref().map_or(0, Bytes::len);
                if !this.body.is_end_stream() {
                    this.charge()?;
                }
            }
            return Poll::Ready(frame);
        }
        this.charge()?;
        let timeout = this.timeout;
        let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        timer.as_mut().poll(context).map(|()| {
            Some(Err(Status::deadline_exceeded("the message did not come within http.read_timeout")))
        })
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
    use std::convert::Infallible;

    use futures_util::{FutureExt, StreamExt, stream};
    use http_body_util::{BodyExt, Full, StreamBody};
    use tonic::Code;

    use super::*;

    fn limits(bytes: usize) -> BodyLimits {
        BodyLimits { budget: BufferBudget::new(bytes), timeout: Duration::from_secs(10) }
    }

    /// A request whose body starts with these bytes and does not end.
    fn unfinished(start: &'static [u8]) -> Request<Body> {
        let start = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from_static(start)))]);
        Request::new(Body::new(StreamBody::new(start.chain(stream::pending()))))
    }

    #[tokio::test]
    async fn only_incomplete_requests_are_charged_to_the_shared_budget() {
        let limits = limits(2 * BUFFER_MIN + 10_000);
        let mut waiting: Vec<_> = (0..2).map(|_| limits.apply(unfinished(b"a")).into_body()).collect();
        for body in &mut waiting {
            assert!(body.frame().await.unwrap().is_ok());
            assert!(body.frame().now_or_never().is_none());
        }
        assert_eq!(limits.budget.used(), 2 * BUFFER_MIN);
        let large = [b'x'; 10_000];
        let mut request = unfinished(b"a");
        request.headers_mut().insert("x", str::from_utf8(&large).unwrap().parse().unwrap());
        let refused = limits.apply(request).into_body().frame().await.unwrap().unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        assert_eq!(limits.budget.used(), 2 * BUFFER_MIN, "a refused request takes nothing");
        let whole = Request::new(Body::new(Full::new(Bytes::from(vec![0; 100_000]))));
        assert_eq!(limits.apply(whole).into_body().collect().await.unwrap().to_bytes().len(), 100_000);
        drop(waiting);
        assert_eq!(limits.budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_does_not_arrive_times_out() {
        let mut body = limits(1 << 20).apply(unfinished(b"a")).into_body();
        assert!(body.frame().await.unwrap().is_ok());
        let refused = tokio::time::timeout(Duration::from_secs(3_600), body.frame()).await.expect("it ends");
        assert_eq!(refused.unwrap().unwrap_err().code(), Code::DeadlineExceeded);
    }
}
