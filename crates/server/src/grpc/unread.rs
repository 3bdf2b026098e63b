//! Finds callers of gRPC that do not take their responses. HTTP/2 opens a window for each, and hyper waits for it without end,
//! however many responses wait. A connection with a message that was not taken for a minute is ended. Messages are small, so a
//! caller that reads takes them at once.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;

use crate::peer::transport::WRITE_TIMEOUT;

/// The messages of one connection that its caller has not taken. Clones share them.
#[derive(Clone, Default)]
pub(super) struct UnreadMessages(Arc<Mutex<Messages>>);

#[derive(Default)]
struct Messages {
    /// When each was sent, with its number.
    unread: BTreeSet<(Instant, u64)>,
    /// How many there have been.
    count: u64,
}

impl UnreadMessages {
    /// Whether a message was not taken for a minute. Connections are pinged more often than that, so whoever asks when the
    /// connection is read is told in time.
    pub(super) fn is_overdue(&self) -> bool {
        self.0.lock().unread.first().is_some_and(|(sent, _)| sent.elapsed() >= WRITE_TIMEOUT)
    }

    /// Counts a message as unread until the bytes are dropped: when they are written, or with their stream.
    pub(super) fn track(&self, bytes: Bytes) -> Bytes {
        let mut messages = self.0.lock();
        messages.count += 1;
        let key = (Instant::now(), messages.count);
        messages.unread.insert(key);
        drop(messages);
        Bytes::from_owner(UnreadMessage { bytes, key, unread: self.clone() })
    }
}

struct UnreadMessage {
    bytes: Bytes,
    key: (Instant, u64),
    unread: UnreadMessages,
}

impl AsRef<[u8]> for UnreadMessage {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for UnreadMessage {
    fn drop(&mut self) {
        self.unread.0.lock().unread.remove(&self.key);
    }
}

/// A service whose responses are tracked with their connections.
#[derive(Clone)]
pub(super) struct TrackResponses<S>(pub(super) S);

impl<S> Service<Request<Body>> for TrackResponses<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Send,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let unread = request.extensions().get::<UnreadMessages>().cloned().unwrap_or_default();
        let answering = self.0.call(request);
        Box::pin(async move {
            let track = move |body: Body| {
                Body::new(body.map_frame(move |frame| frame.map_data(|bytes| unread.track(bytes))))
            };
            answering.await.map(|response| response.map(track))
        })
    }
}

impl<S: NamedService> NamedService for TrackResponses<S> {
    const NAME: &'static str = S::NAME;
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use http_body_util::Full;
    use tower::service_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_message_is_overdue_after_a_minute_unless_it_was_taken() {
        let unread = UnreadMessages::default();
        let answer = service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::new(Full::new(Bytes::from_static(b"message")))))
        });
        let mut service = TrackResponses(answer);
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(unread.clone());
        let mut body = service.call(request).await.unwrap().into_body();
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(first, "message");
        tokio::time::advance(WRITE_TIMEOUT - Duration::from_secs(1)).await;
        let second = unread.track(Bytes::from_static(b"another"));
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
