//! HTTP/2, on connections under TLS that have chosen it. Each request has the permits, the budget and the routes of a request on
//! a connection of its own; hyper multiplexes them.
//!
//! Handlers run in tasks of their own, because hyper drops the future of a request that the caller cancels, and a handler that
//! has begun must end as it would on HTTP/1.1. It notices through its peer that the caller has left.

mod stream_body;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody;
use axum::response::Response;
use http::header::{CONTENT_LENGTH, COOKIE, HOST};
use http::uri::{Parts as UriParts, PathAndQuery};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http2::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::Instant;

pub(super) use self::stream_body::StreamExecutor;
use self::stream_body::{StreamBody, UnreadResponse};
use super::error::ApiError;
use super::event_stream::with_events;
use super::serve::{Acceptor, BUFFER_MAX, HEAD_MAX, head_length};
use crate::peer::transport::Transport;
use crate::peer::{ConnectionPermit, HEAD_FREE, Peer};
use crate::telemetry::metrics::Shortage;

/// The most connections on HTTP/2, if `http.max_connections` does not allow fewer. Further ones get HTTP/1.1.
pub(super) const CONNECTIONS_MAX: usize = 4_096;
/// The most concurrent requests of one connection, with those that it has cancelled and that are still at work.
const STREAMS_MAX: u32 = 100;
/// The most permits of the reserve that requests of one connection hold. Otherwise one connection could take all of them.
const RESERVE_STREAMS: usize = 4;
/// The bytes that a request may send before they are read: HTTP/2's own default.
const STREAM_WINDOW_BYTES: u32 = 65_535;
/// The bytes that a connection may send before they are read.
const CONNECTION_WINDOW_BYTES: u32 = 4 * STREAM_WINDOW_BYTES;
/// How often a connection is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long the peer may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a connection without requests may take to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn builder() -> Builder<StreamExecutor> {
    let mut builder = Builder::new(StreamExecutor);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(u32::try_from(HEAD_MAX).unwrap_or(u32::MAX))
        .max_send_buf_size(BUFFER_MAX)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// The requests of one connection.
struct Streams {
    activity: Mutex<Activity>,
    /// Handlers at work, for callers that have cancelled their requests as well.
    handlers: Arc<Semaphore>,
    /// Its share of the permits of the reserve.
    reserve: Arc<Semaphore>,
}

struct Activity {
    /// Requests whose responses are not complete.
    active: usize,
    /// When the last of them ended.
    since: Instant,
}

/// A request whose response is not complete.
struct ActiveStream(Arc<Streams>);

impl Streams {
    fn new() -> Arc<Self> {
        let activity = Mutex::new(Activity { active: 0, since: Instant::now() });
        let [handlers, reserve] =
            [STREAMS_MAX as usize, RESERVE_STREAMS].map(|permits| Arc::new(Semaphore::new(permits)));
        Arc::new(Self { activity, handlers, reserve })
    }

    fn begin(self: &Arc<Self>) -> ActiveStream {
        self.activity.lock().active += 1;
        ActiveStream(Arc::clone(self))
    }

    /// Returns when there have been no requests for `limit`, counted from `start` at the earliest.
    async fn idle(&self, start: Instant, limit: Duration) {
        loop {
            let deadline = {
                let activity = self.activity.lock();
                let since = if activity.active > 0 { Instant::now() } else { activity.since };
                since.max(start) + limit
            };
            if deadline <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(deadline).await;
        }
    }
}

impl Drop for ActiveStream {
    fn drop(&mut self) {
        let mut activity = self.0.activity.lock();
        activity.active -= 1;
        activity.since = Instant::now();
    }
}

/// Why a request gets no response: the server has stopped waiting for it.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the server disconnects its callers")]
struct Disconnected;

impl Acceptor {
    /// Has hyper serve a connection to its end, until it has been idle for as long as a head may take, or until a stop closes it.
    pub(super) async fn serve_http2(self: Arc<Self>, peer: Peer) {
        peer.leave_http1();
        let streams = Streams::new();
        let io = TokioIo::new(peer.stream());
        let service = {
            let (this, peer, streams) = (Arc::clone(&self), peer.clone(), Arc::clone(&streams));
            service_fn(move |request| {
                Arc::clone(&this).serve_stream(peer.clone(), Arc::clone(&streams), request)
            })
        };
        let mut connection = pin!(self.http2_builder.serve_connection(io, service));
        let ended = tokio::select! {
            biased;
            ended = connection.as_mut() => ended,
            () = async {
                tokio::select! {
                    () = self.shutdown.closing().cancelled() => {}
                    () = streams.idle(Instant::now(), self.read_timeout) => {}
                }
            } => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    biased;
                    ended = connection.as_mut() => ended,
                    // The peer is asked whether it has begun another request, and may not answer.
                    () = streams.idle(Instant::now(), CLOSE_TIMEOUT) => Ok(()),
                    () = self.shutdown.disconnecting().cancelled() => Ok(()),
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(peer = %peer.address(), %error, "the HTTP/2 connection of a caller failed");
        }
    }

    /// Serves one request.
    async fn serve_stream(
        self: Arc<Self>,
        connection: Peer,
        streams: Arc<Streams>,
        request: Request<Incoming>,
    ) -> Result<Response<StreamBody<WaitingCaller>>, Disconnected> {
        let active = streams.begin();
        let is_head = request.method() == Method::HEAD;
        // The semaphore is never closed.
        let handler = Arc::clone(&streams.handlers).acquire_owned().await.map_err(|_closed| Disconnected)?;
        // A connection of the reserve that serves an ordinary request is an ordinary one.
        connection.leave_reserve();
        let unread = UnreadResponse::current();
        let (alive, cancelled) = oneshot::channel();
        let (response, peer) = match self.request_permit(&streams, &request) {
            None => {
                self.metrics.record_shortage(Shortage::Connections);
                (self.router.refuse(&request, ApiError::out_of_connections()), None)
            }
            Some(permit) => {
                let transport = Transport::Http2(Some(cancelled));
                let peer = Peer::new(transport, connection.address(), permit, self.budget.clone(), None);
                unread.limit_in_reserve(&peer);
                (self.spawn_answer(peer.clone(), handler, request).await.ok_or(Disconnected)?, Some(peer))
            }
        };
        let response = if is_head { without_body(response) } else { with_events(response) };
        let caller = WaitingCaller { _alive: alive, _peer: peer, _active: active };
        Ok(response.map(|body| StreamBody::new(body, unread, caller)))
    }

    /// Answers a request in a task of its own. Returns `None` if the server has disconnected its callers.
    async fn spawn_answer(
        self: Arc<Self>,
        peer: Peer,
        handler: OwnedSemaphorePermit,
        request: Request<Incoming>,
    ) -> Option<Response> {
        let connections = self.connections.clone();
        let answering = async move {
            let disconnecting = self.shutdown.disconnecting().clone();
            let response = disconnecting.run_until_cancelled(self.answer_stream(&peer, request)).await;
            drop(handler);
            response
        };
        connections.spawn(answering).await.ok().flatten()
    }

    /// A permit for one request: an ordinary one, or else one of the reserve if its route may have that.
    fn request_permit<B>(&self, streams: &Streams, request: &Request<B>) -> Option<ConnectionPermit> {
        if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
            return Some(ConnectionPermit::ordinary(permit));
        }
        self.metrics.connections_held.inc();
        if !self.router.is_in_reserve(request) {
            return None;
        }
        let share = Arc::clone(&streams.reserve).try_acquire_owned().ok()?;
        let permit = Arc::clone(&self.reserve).try_acquire_owned().ok()?;
        Some(ConnectionPermit::in_reserve(permit, Arc::clone(&self.permits)).with_share(share))
    }

    async fn answer_stream(&self, peer: &Peer, request: Request<Incoming>) -> Response {
        let mut charge = self.budget.charge();
        if charge.try_resize(head_length(&request).saturating_sub(HEAD_FREE)).is_err() {
            self.metrics.record_shortage(Shortage::Memory);
            return self.router.refuse(&request, ApiError::out_of_memory());
        }
        self.router.answer(peer, as_http1(request)).await
    }
}

/// The response to HEAD. hyper leaves out the body on HTTP/1.1 alone.
fn without_body(mut response: Response) -> Response {
    let length = std::mem::take(response.body_mut()).size_hint().exact();
    if let Some(length) = length.filter(|length| *length > 0) {
        // The gateway passes on a length that the upstream has stated.
        response.headers_mut().entry(CONTENT_LENGTH).or_insert_with(|| length.into());
    }
    response
}

/// Gives a request the form that it has on HTTP/1.1: the host in a header, a path as its URI, and one `Cookie`.
fn as_http1<B>(request: Request<B>) -> Request<B> {
    let (mut parts, body) = request.into_parts();
    let UriParts { authority, path_and_query, .. } = std::mem::take(&mut parts.uri).into_parts();
    if let Some(host) = authority.and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
        parts.headers.insert(HOST, host);
    }
    // CONNECT has no path, and no route.
    let path = path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
    parts.uri = Uri::from(path);
    join_cookies(&mut parts.headers);
    Request::from_parts(parts, body)
}

/// HTTP/2 may split the header; on HTTP/1.1 there is one.
fn join_cookies(headers: &mut HeaderMap) {
    let values: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if values.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&values.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// The caller of a request, while it has not taken its response.
struct WaitingCaller {
    _alive: oneshot::Sender<Infallible>,
    /// With the permit of the request.
    _peer: Option<Peer>,
    _active: ActiveStream,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_gets_the_form_of_http_1() {
        let request = Request::builder()
            .uri("https://shop.example:8443/a?b=c")
            .header(HOST, "other.example")
            .header(COOKIE, "a=1")
            .header(COOKIE, "b=2")
            .body(())
            .unwrap();
        let request = as_http1(request);
        assert_eq!(request.uri(), "/a?b=c");
        assert_eq!(request.headers()[HOST], "shop.example:8443");
        assert_eq!(request.headers().get_all(HOST).iter().count(), 1);
        let cookies: Vec<_> = request.headers().get_all(COOKIE).iter().collect();
        assert_eq!(cookies, ["a=1; b=2"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_once_its_last_response_is_complete() {
        let (streams, limit) = (Streams::new(), Duration::from_secs(10));
        let start = Instant::now();
        streams.idle(start, limit).await;
        assert_eq!(start.elapsed(), limit);
        let active = streams.begin();
        let an_hour = Duration::from_secs(3_600);
        assert!(tokio::time::timeout(an_hour, streams.idle(start, limit)).await.is_err());
        drop(active);
        let ended = Instant::now();
        streams.idle(start, limit).await;
        assert_eq!(ended.elapsed(), limit);
    }
}
