//! Bounds the requests of all gRPC connections together: each holds a permit until its caller has taken the response. A few
//! permits belong to each connection, so that callers of other connections cannot take all of them; the rest is shared.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, ready};
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;

use super::unread::UnreadMessages;

/// The permits that all connections share. Decisions take less than a millisecond, so few are in use at a time.
pub(super) const SHARED_REQUESTS: usize = 8_192;
/// The permits that each connection has besides.
const OWN_REQUESTS: usize = 2;
/// The most streams of one connection that watch health: one for each service.
const OWN_WATCHES: usize = 2;

/// The one method whose responses last. They have permits of their own (`health.rs`).
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// Held by a request until its response is taken.
pub(super) type RequestPermit = Arc<OwnedSemaphorePermit>;

/// The permits that all connections share. Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct RequestPermits(Arc<Semaphore>);

/// What the requests of one connection share. Clones are the same connection.
#[derive(Clone)]
pub(super) struct GrpcCaller {
    pub(super) unread: UnreadMessages,
    requests: Arc<Semaphore>,
    watches: Arc<Semaphore>,
}

impl Default for GrpcCaller {
    fn default() -> Self {
        Self {
            unread: UnreadMessages::default(),
            requests: Arc::new(Semaphore::new(OWN_REQUESTS)),
            watches: Arc::new(Semaphore::new(OWN_WATCHES)),
        }
    }
}

impl GrpcCaller {
    /// The permit of a stream that watches health; `None` if the connection has as many as it may have.
    pub(super) fn begin_watch(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.watches).try_acquire_owned().ok()
    }
}

impl RequestPermits {
    pub(super) fn new(shared: usize) -> Self {
        Self(Arc::new(Semaphore::new(shared)))
    }

    fn take(&self, caller: &GrpcCaller) -> Option<RequestPermit> {
        let own = Arc::clone(&caller.requests).try_acquire_owned();
        own.or_else(|_all_in_use| Arc::clone(&self.0).try_acquire_owned()).ok().map(Arc::new)
    }
}

/// A service whose requests hold permits, and whose responses are tracked with their connections.
#[derive(Clone)]
pub(super) struct TrackRequests<S> {
    pub(super) service: S,
    pub(super) permits: RequestPermits,
}

impl<S> Service<Request<Body>> for TrackRequests<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let caller = request.extensions().get::<GrpcCaller>().cloned().unwrap_or_default();
        let Some(permit) = self.permits.take(&caller) else {
            let status = Status::unavailable(
                "too many gRPC requests are under way or their answers not taken; try again",
            );
            return Box::pin(ready(Ok(status.into_http())));
        };
        let is_watch = request.uri().path() == WATCH;
        let answering = self.service.call(request);
        Box::pin(async move {
            let response = answering.await?;
            let permit = (!is_watch).then_some(permit);
            let track = move |bytes| caller.unread.track(bytes, permit.clone());
            let tracked = |body: Body| Body::new(body.map_frame(move |frame| frame.map_data(&track)));
            Ok(response.map(tracked))
        })
    }
}

impl<S: NamedService> NamedService for TrackRequests<S> {
    const NAME: &'static str = S::NAME;
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use bytes::Bytes;
    use http_body_util::Full;
    use tower::service_fn;

    use super::*;
    use crate::peer::transport::WRITE_TIMEOUT;

    /// Calls a service that answers with one message.
    async fn call(permits: &RequestPermits, caller: &GrpcCaller, path: &str) -> Response<Body> {
        let service = service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::new(Full::new(Bytes::from_static(b"message")))))
        });
        let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
        request.extensions_mut().insert(caller.clone());
        TrackRequests { service, permits: permits.clone() }.call(request).await.unwrap()
    }

    fn is_refused(response: &Response<Body>) -> bool {
        response.headers().get("grpc-status").is_some_and(|status| status == "14")
    }

    async fn message(response: Response<Body>) -> Bytes {
        assert!(!is_refused(&response));
        response.into_body().frame().await.unwrap().unwrap().into_data().unwrap()
    }

    #[tokio::test]
    async fn requests_of_all_connections_are_bounded_and_each_connection_has_some_of_its_own() {
        let permits = RequestPermits::new(1);
        let [first, second] = [GrpcCaller::default(), GrpcCaller::default()];
        let mut not_taken = Vec::new();
        for _ in 0..=OWN_REQUESTS {
            not_taken.push(message(call(&permits, &first, "/a/b").await).await);
        }
        assert!(is_refused(&call(&permits, &first, "/a/b").await), "nothing is left for it");
        for _ in 0..OWN_REQUESTS {
            not_taken.push(message(call(&permits, &second, "/a/b").await).await);
        }
        assert!(is_refused(&call(&permits, &second, "/a/b").await));
        not_taken.remove(OWN_REQUESTS);
        let response = call(&permits, &second, "/a/b").await;
        assert!(!is_refused(&response), "the first has taken a message");
        assert!(is_refused(&call(&permits, &second, "/a/b").await), "its response is not taken");
        drop(response);
        assert!(!is_refused(&call(&permits, &second, "/a/b").await));
    }

    #[tokio::test]
    async fn a_response_that_watches_health_holds_no_permit_of_a_request() {
        let (permits, caller) = (RequestPermits::new(0), GrpcCaller::default());
        let mut watches = Vec::new();
        for _ in 0..=OWN_REQUESTS {
            watches.push(message(call(&permits, &caller, WATCH).await).await);
        }
        assert!(!is_refused(&call(&permits, &caller, "/a/b").await));
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_is_overdue_after_a_minute_unless_it_was_taken() {
        let (permits, caller) = (RequestPermits::new(1), GrpcCaller::default());
        let unread = caller.unread.clone();
        let first = message(call(&permits, &caller, "/a/b").await).await;
        assert_eq!(first, "message");
        tokio::time::advance(WRITE_TIMEOUT - Duration::from_secs(1)).await;
        let second = unread.track(Bytes::from_static(b"another"), None);
        assert!(!unread.is_overdue());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(unread.is_overdue());
        drop(first);
        assert!(!unread.is_overdue(), "the other one has time");
        tokio::time::advance(WRITE_TIMEOUT).await;
        assert!(unread.is_overdue());
        drop(second);
        assert!(!unread.is_overdue());
    }
}
