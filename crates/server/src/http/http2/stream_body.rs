//! Responses of HTTP/2, and an end for those that their callers do not take.
//!
//! Every response has a window, within which hyper may send. While a caller opens none, hyper waits: nothing is written, so the
//! timeout of the connection (`transport.rs`) does not run, and the body is not asked for anything. The tasks in which hyper
//! sends responses are therefore spawned from here, and one whose caller takes nothing for a minute is dropped. That resets
//! its stream alone; others on the connection may belong to other users of a proxy.
//!
//! hyper buffers whatever it gets, and has sent a response once the last of it is buffered. So it gets the next piece, and the
//! end, when the piece before is written: until then the body lasts, with the permit of its request, and the stream can be
//! reset.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use axum::body::Body;
use bytes::{Buf, Bytes};
use hyper::body::{Frame, SizeHint};
use hyper::rt::Executor;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};

use crate::http::serve::RESERVE_TIMEOUT;
use crate::peer::Peer;
use crate::peer::transport::WRITE_TIMEOUT;

/// The longest last piece with which the end is sent. It may stay in memory with its connection, without a permit; most
/// responses are no longer, and sending their end by itself would cost each another write.
const LAST_PIECE_MAX: usize = 1_024;

tokio::task_local! {
    static UNREAD: Arc<UnreadResponse>;
}

/// Spawns the tasks of requests.
#[derive(Clone, Copy, Debug)]
pub(in crate::http) struct StreamExecutor;

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        tokio::spawn(async move {
            let unread = Arc::new(UnreadResponse::default());
            tokio::select! {
                biased;
                () = UNREAD.scope(Arc::clone(&unread), stream) => {}
                () = unread.overdue() => tracing::debug!("a caller does not take its response over HTTP/2; it was reset"),
            }
            // A last piece may stay with the connection, but without the permit.
            unread.0.lock().reserve = None;
        });
    }
}

/// What the caller of one request has not taken of its response.
#[derive(Default)]
pub(super) struct UnreadResponse(Mutex<UnreadState>);

#[derive(Default)]
struct UnreadState {
    /// When the caller last took something, while hyper has a piece of the response.
    since: Option<Instant>,
    /// The peer of a request with a permit of the reserve, and when its time ends.
    reserve: Option<(Peer, Instant)>,
    /// Waits until the piece is taken.
    body: Option<Waker>,
}

impl UnreadResponse {
    /// That of the request whose task this is.
    pub(super) fn current() -> Arc<Self> {
        UNREAD.try_with(Arc::clone).unwrap_or_default()
    }

    /// Limits the time of a request while it has a permit of the reserve.
    pub(super) fn limit_in_reserve(&self, peer: &Peer) {
        self.0.lock().reserve =
            peer.is_in_reserve().then(|| (peer.clone(), Instant::now() + RESERVE_TIMEOUT));
    }

    fn deadline(&self) -> Option<Instant> {
        let state = self.0.lock();
        let reserve = state.reserve.as_ref().filter(|(peer, _)| peer.is_in_reserve());
        let deadlines = [state.since.map(|since| since + WRITE_TIMEOUT), reserve.map(|(_, end)| *end)];
        deadlines.into_iter().flatten().min()
    }

    /// Returns when the caller has had its time. To be polled after the stream in the same task, which sets the deadline.
    async fn overdue(&self) {
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|context| {
            loop {
                let Some(deadline) = self.deadline() else { return Poll::Pending };
                if deadline <= Instant::now() {
                    return Poll::Ready(());
                }
                let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
                // A deadline that has moved on is looked at when the timer ends: most responses are complete by then.
                if timer.is_elapsed() || deadline < timer.deadline() {
                    timer.as_mut().reset(deadline);
                }
                ready!(timer.as_mut().poll(context));
            }
        })
        .await;
    }

    fn poll_taken(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.since.is_none() {
            return Poll::Ready(());
        }
        state.body = Some(context.waker().clone());
        Poll::Pending
    }

    fn piece(self: &Arc<Self>, bytes: Bytes) -> Piece {
        self.0.lock().since = Some(Instant::now());
        Piece { bytes, unread: Arc::clone(self) }
    }
}

/// A part of a response. It is dropped when it is written, or its stream was reset.
pub(in crate::http) struct Piece {
    bytes: Bytes,
    unread: Arc<UnreadResponse>,
}

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, written: usize) {
        self.bytes.advance(written);
        self.unread.0.lock().since = Some(Instant::now());
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.unread.0.lock();
            state.since = None;
            state.body.take()
        };
        if let Some(body) = waiting {
            body.wake();
        }
    }
}

/// The body of a response. It lasts, with what it holds, until its caller has taken it.
pub(in crate::http) struct StreamBody<H> {
    body: Body,
    unread: Arc<UnreadResponse>,
    is_last_piece_small: bool,
    _held: H,
}

impl<H> StreamBody<H> {
    pub(super) fn new(body: Body, unread: Arc<UnreadResponse>, held: H) -> Self {
        Self { body, unread, is_last_piece_small: true, _held: held }
    }
}

impl<H: Unpin> hyper::body::Body for StreamBody<H> {
    type Data = Piece;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, axum::Error>>> {
        ready!(self.unread.poll_taken(context));
        let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) else {
            return Poll::Ready(None);
        };
        let frame = frame?;
        self.is_last_piece_small = frame.data_ref().is_none_or(|bytes| bytes.len() <= LAST_PIECE_MAX);
        Poll::Ready(Some(Ok(frame.map_data(|bytes| self.unread.piece(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_last_piece_small && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use http::{HeaderMap, Request, Response};
    use http_body_util::{BodyExt, Empty};
    use hyper::body::Incoming;
    use hyper::client::conn::http2::{Builder, SendRequest};
    use hyper::service::service_fn;
    use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
    use tokio::sync::Semaphore;

    use super::*;

    /// Requests to a server that answers with as many bytes as the path says, and then trailers. It holds a permit of `held`
    /// for each response. The caller may be sent `window` bytes of each before it reads them.
    async fn connect(window: u32, held: &Arc<Semaphore>) -> SendRequest<Empty<Bytes>> {
        let (near, far) = tokio::io::duplex(1 << 16);
        let held = Arc::clone(held);
        let service = service_fn(move |request: Request<Incoming>| {
            let held = Arc::clone(&held);
            async move {
                let bytes = request.uri().path()[1..].parse().unwrap();
                let trailers = HeaderMap::from_iter([(http::header::ETAG, "1".parse().unwrap())]);
                let body = http_body_util::Full::new(Bytes::from(vec![b'x'; bytes]));
                let body = body.with_trailers(async { Some(Ok(trailers)) });
                let held = held.try_acquire_owned().unwrap();
                let body = StreamBody::new(Body::new(body), UnreadResponse::current(), held);
                Ok::<_, Infallible>(Response::new(body))
            }
        });
        tokio::spawn(crate::http::http2::builder().serve_connection(TokioIo::new(far), service));
        let mut builder = Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).initial_stream_window_size(window);
        let (sender, connection) = builder.handshake(TokioIo::new(near)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    async fn get(sender: &mut SendRequest<Empty<Bytes>>, bytes: usize) -> Response<Incoming> {
        let request = Request::get(format!("http://localhost/{bytes}")).body(Empty::new()).unwrap();
        sender.send_request(request).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_that_is_not_taken_for_a_minute_is_reset_and_others_go_on() {
        for window in [0, 1, 20_000] {
            let held = Arc::new(Semaphore::new(2));
            let mut sender = connect(window, &held).await;
            let start = Instant::now();
            let unread = get(&mut sender, 100_000).await;
            tokio::time::sleep(WRITE_TIMEOUT - Duration::from_secs(1)).await;
            assert_eq!(held.available_permits(), 1, "it lasts with what it holds");
            let _permit = held.acquire_many(2).await.unwrap();
            assert!(start.elapsed() < 2 * WRITE_TIMEOUT, "window {window}");
            assert!(unread.into_body().collect().await.is_err(), "it is reset");
            drop(_permit);
            let other = get(&mut sender, 0).await.into_body().collect().await.unwrap();
            assert_eq!(other.trailers().unwrap()[http::header::ETAG], "1", "the connection goes on");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_that_is_taken_slowly_is_complete() {
        let held = Arc::new(Semaphore::new(1));
        let mut body = get(&mut connect(100, &held).await, 2_000).await.into_body();
        let (start, mut bytes) = (Instant::now(), 0);
        let trailers = loop {
            match body.frame().await.expect("the body goes on").unwrap().into_data() {
                Ok(data) => bytes += data.len(),
                Err(frame) => break frame.into_trailers().unwrap(),
            }
            assert!(bytes == 2_000 || held.available_permits() == 0, "{bytes} of 2,000 are taken");
            tokio::time::sleep(WRITE_TIMEOUT * 2 / 3).await;
        };
        assert_eq!((bytes, &trailers[http::header::ETAG]), (2_000, &"1".parse().unwrap()));
        assert!(start.elapsed() > 10 * WRITE_TIMEOUT);
        let _permit = held.acquire().await.unwrap();
    }
}
