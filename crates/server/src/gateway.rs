//! The gateway behind `/api/v1/ai/**`: forwards a call to the upstream unchanged and streams the response back.
//! `gateway/routes.rs` checks the caller's plan first.

mod echo;
mod events;
mod headers;
pub(crate) mod metrics;
mod path;
mod request_body;
mod reserved_headers;
pub(crate) mod routes;
pub(crate) mod settings;
mod tunnel;
mod upstream;

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::response::Response;
use http::header::{CONNECTION, CONTENT_LENGTH, TE, TRANSFER_ENCODING, UPGRADE};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_store::spans::{Span, SpanKind};

use self::events::{AiCallAnswered, AiCallFailed};
use self::headers::UpstreamHeaders;
use self::request_body::{RequestBody, UploadFault, UploadProgress};
use self::settings::GatewaySettings;
use self::tunnel::Tunnel;
use self::upstream::{Pool, ResponseBody, Upstream, UpstreamConnection};
use crate::gateway::metrics::GatewayMetrics;
use crate::peer::Peer;
use crate::settings::Settings;
use crate::shutdown::Shutdown;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::request_context::RequestContext;

/// Forwards AI calls.
#[derive(Debug)]
pub struct Gateway {
    /// `None` if the built-in echo answers.
    upstream: Option<Upstream>,
    settings: GatewaySettings,
    /// How long a caller may pause within its request body.
    read_timeout: Duration,
    /// Cancelled when a stop of the server ends the calls that are still waiting.
    ending: CancellationToken,
    tunnels: TaskTracker,
    metrics: GatewayMetrics,
}

/// Why a call got no response from the upstream.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// Some servers could read the path as one outside of the prefix.
    #[error("the path leads out of its prefix")]
    UnsafePath,
    /// The body is larger than `ai.max_body`.
    #[error("the request body is too large")]
    TooLarge,
    /// The caller paused for too long within its body.
    #[error("the request body came too slowly")]
    TooSlow,
    /// The caller's body broke off.
    #[error("the request body ended before it was complete")]
    BodyCutOff,
    /// The caller has disconnected.
    #[error("the caller has disconnected")]
    CallerGone,
    /// The connection to the upstream failed.
    #[error("cannot connect to the upstream (ai.upstream): {0}")]
    Unreachable(#[source] io::Error),
    /// The upstream took too long to accept a connection or to begin its response.
    #[error("the upstream (ai.upstream) did not answer in time")]
    TimedOut,
    /// The upstream's response is not valid HTTP.
    #[error("the upstream's response is not valid HTTP: {0}")]
    Unreadable(String),
    /// The server is shutting down.
    #[error("the server is shutting down")]
    Stopping,
}

impl GatewayError {
    /// The label of this error in metrics.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::UnsafePath => "bad_path",
            Self::TooLarge => "too_large",
            Self::TooSlow => "too_slow",
            Self::BodyCutOff => "cut_off",
            Self::CallerGone => "caller_gone",
            Self::Unreachable(_) => "unreachable",
            Self::TimedOut => "timed_out",
            Self::Unreadable(_) => "unreadable",
            Self::Stopping => "stopping",
        }
    }
}

/// Who makes a call.
#[derive(Clone, Copy, Debug)]
pub struct CallerIdentity<'a> {
    /// The caller's end of the connection.
    pub peer: Option<&'a Peer>,
    /// The `sub` of the caller's token.
    pub user: &'a str,
}

impl Gateway {
    #[must_use]
    pub fn start(settings: &Settings, metrics: &Metrics, shutdown: &Shutdown) -> Self {
        let threads = settings.http.threads();
        let url = settings.gateway.upstream.as_ref();
        let upstream = url.and_then(|url| Upstream::new(url, &settings.gateway, threads));
        if let Some(upstream) = &upstream {
            tokio::spawn(sweep(upstream.pool.clone(), shutdown.closing().clone()));
        }
        Self {
            upstream,
            settings: settings.gateway.clone(),
            read_timeout: settings.http.read_timeout,
            ending: shutdown.giving_up().clone(),
            tunnels: TaskTracker::new(),
            metrics: metrics.gateway.clone(),
        }
    }

    /// Waits until the last tunnel has ended.
    pub async fn drain(&self) {
        self.tunnels.close();
        self.tunnels.wait().await;
    }

    /// Forwards a call and returns the upstream's response.
    pub async fn forward(
        &self,
        identity: CallerIdentity<'_>,
        request: Request<Body>,
    ) -> Result<Response, GatewayError> {
        let started = Instant::now();
        let response = self.call_upstream(identity, request).await;
        match &response {
            Ok(_) => AiCallAnswered { latency: started.elapsed() }.emit(&self.metrics),
            Err(error) => AiCallFailed { error }.emit(&self.metrics),
        }
        response
    }

    async fn call_upstream(
        &self,
        identity: CallerIdentity<'_>,
        mut request: Request<Body>,
    ) -> Result<Response, GatewayError> {
        if !path::is_confined(request.uri().path()) {
            return Err(GatewayError::UnsafePath);
        }
        if request.body().size_hint().lower() > self.settings.max_body as u64 {
            return Err(GatewayError::TooLarge);
        }
        let Some(upstream) = &self.upstream else {
            let body = std::mem::take(request.body_mut());
            let (body, _progress) = RequestBody::new(body, self.settings.max_body, self.read_timeout);
            return Ok(echo::answer(&request, body));
        };
        // Only without a body: the rest of one could still be on its way when the protocol changes.
        let is_upgrade = headers::is_websocket_upgrade(request.headers()) && request.body().is_end_stream();
        let upgrade = is_upgrade.then(|| hyper::upgrade::on(&mut request));
        let is_head = request.method() == Method::HEAD;
        let (parts, body) = request.into_parts();
        let (body, progress) = RequestBody::new(body, self.settings.max_body, self.read_timeout);
        let span = Span::begin_current("upstream", SpanKind::Client);
        let request =
            self.upstream_request(upstream, identity, parts, body, upgrade.is_some(), span.as_ref());
        let exchange = self.wait_for_response(upstream.exchange(request), identity.peer, &progress);
        let answer = exchange.await;
        // The span ends with the head of the response: the body may take as long as its reader.
        if let (Some(mut span), Err(_)) = (span, &answer) {
            span.fail();
        }
        let (response, connection) = answer.map_err(|error| prefer_upload_fault(error, &progress))?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return self.open_tunnel(response, connection, upgrade);
        }
        let peer = identity.peer.cloned();
        let body = |body, connection| {
            let pool = upstream.pool.clone();
            ResponseBody::new(body, connection, pool, peer, progress, self.settings.idle_timeout)
        };
        Ok(caller_response(is_head, response, connection, body))
    }

    /// The request as it is sent to the upstream.
    fn upstream_request(
        &self,
        upstream: &Upstream,
        identity: CallerIdentity<'_>,
        mut parts: Parts,
        body: RequestBody,
        is_upgrade: bool,
        span: Option<&Span>,
    ) -> Request<RequestBody> {
        let accepts_trailers = headers::accepts_trailers(&parts.headers);
        let had_length = parts.headers.contains_key(CONTENT_LENGTH);
        headers::remove_hop_by_hop(&mut parts.headers);
        let upstream_headers = UpstreamHeaders {
            peer: identity.peer,
            user: identity.user,
            host: &upstream.host,
            authorization: upstream.authorization.as_ref(),
            forward_authorization: self.settings.forward_authorization,
            trust_forwarded: self.settings.trust_forwarded,
        };
        upstream_headers.apply(&mut parts.headers, &parts.uri);
        if let Some(context) = RequestContext::current() {
            context.write_headers(&mut parts.headers, span);
        }
        if is_upgrade {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        } else if accepts_trailers {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("te"));
            parts.headers.insert(TE, HeaderValue::from_static("trailers"));
        }
        set_body_length(&mut parts.headers, &body, had_length);
        let path = parts.uri.path_and_query().cloned();
        parts.uri = Uri::from(path.unwrap_or(PathAndQuery::from_static("/")));
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        Request::from_parts(parts, body)
    }

    /// Answers the caller that the upstream has accepted the WebSocket, and starts the tunnel.
    fn open_tunnel(
        &self,
        response: http::Response<Incoming>,
        connection: Box<UpstreamConnection>,
        upgrade: Option<OnUpgrade>,
    ) -> Result<Response, GatewayError> {
        let Some(inbound) = upgrade else {
            return Err(GatewayError::Unreadable("it switched protocols without being asked to".to_owned()));
        };
        let (open_tunnels, stop) = (self.metrics.tunnels.clone(), self.ending.clone());
        let idle_timeout = self.settings.idle_timeout;
        let tunnel = Tunnel { connection, inbound, open_tunnels, idle_timeout, stop };
        tunnel.open(response, &self.tunnels)
    }

    /// Waits for the response head until the caller disconnects, the server stops or the upstream is too slow.
    async fn wait_for_response<T>(
        &self,
        exchange: impl Future<Output = Result<T, GatewayError>>,
        peer: Option<&Peer>,
        upload: &UploadProgress,
    ) -> Result<T, GatewayError> {
        let mut exchange = pin!(exchange);
        let mut disconnected = poll_fn(|context| match peer {
            Some(peer) if upload.has_ended() => peer.poll_disconnected(context),
            _ => Poll::Pending,
        });
        let mut deadline = upload.last_frame_at() + self.settings.first_byte_timeout;
        loop {
            tokio::select! {
                biased;
                response = &mut exchange => return response,
                () = &mut disconnected => return Err(GatewayError::CallerGone),
                () = self.ending.cancelled() => return Err(GatewayError::Stopping),
                () = sleep_until(deadline.into()) => {
                    // The upstream's time begins when the request body is complete.
                    let new_deadline = upload.last_frame_at() + self.settings.first_byte_timeout;
                    if new_deadline <= deadline {
                        return Err(GatewayError::TimedOut);
                    }
                    deadline = new_deadline;
                }
            }
        }
    }
}

/// The response as the caller gets it.
fn caller_response(
    is_head: bool,
    response: http::Response<Incoming>,
    mut connection: Box<UpstreamConnection>,
    into_body: impl FnOnce(Incoming, Box<UpstreamConnection>) -> ResponseBody,
) -> Response {
    let (mut parts, body) = response.into_parts();
    let is_encoded = parts.headers.contains_key(TRANSFER_ENCODING);
    let lengths = parts.headers.get_all(CONTENT_LENGTH).iter().map(|length| length != "0");
    connection.is_ambiguous =
        headers::is_length_ambiguous(is_head, parts.status, is_encoded, lengths.reduce(|a, b| a || b));
    if is_encoded {
        parts.headers.remove(CONTENT_LENGTH);
    }
    headers::normalize_content_length(&mut parts.headers);
    headers::remove_hop_by_hop(&mut parts.headers);
    parts.version = Version::HTTP_11;
    Response::from_parts(parts, Body::new(into_body(body, connection)))
}

/// Sets `Content-Length`, or chunked encoding if the length is unknown.
fn set_body_length(headers: &mut HeaderMap, body: &RequestBody, had_length: bool) {
    match body.size_hint().exact() {
        Some(0) if !had_length => {}
        Some(length) => {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        None => {
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
}

/// If the caller's body was at fault, that is the error, not what followed from it.
fn prefer_upload_fault(error: GatewayError, upload: &UploadProgress) -> GatewayError {
    match upload.fault() {
        Some(UploadFault::TooLarge) => GatewayError::TooLarge,
        Some(UploadFault::TooSlow) => GatewayError::TooSlow,
        Some(UploadFault::CutOff) => GatewayError::BodyCutOff,
        None => error,
    }
}

/// Closes expired idle connections until the server stops.
async fn sweep(pool: Pool, closing: CancellationToken) {
    let mut sweeps = tokio::time::interval(upstream::SWEEP_INTERVAL);
    while closing.run_until_cancelled(sweeps.tick()).await.is_some() {
        pool.sweep();
    }
}
