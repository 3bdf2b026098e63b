//! The gateway behind `/api/v1/ai/**`: a call goes to the upstream as it came, and the answer comes back as it is
//! made, piece by piece. Who may call, and how often, is decided before (`gateway/routes.rs`).

mod connection;
mod echo;
mod headers;
pub(crate) mod metrics;
mod path;
mod pool;
mod request_body;
mod reserved_headers;
mod response_body;
pub(crate) mod routes;
pub(crate) mod settings;
mod tunnel;
mod upstream;

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
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

use self::connection::UpstreamConnection;
use self::headers::Addition;
use self::pool::Pool;
use self::request_body::{Fault, Progress, RequestBody};
use self::response_body::ResponseBody;
use self::settings::GatewaySettings;
use self::tunnel::Tunnel;
use self::upstream::Upstream;
use crate::gateway::metrics::GatewayMetrics;
use crate::peer::Peer;
use crate::settings::Settings;
use crate::shutdown::Shutdown;
use crate::telemetry::metrics::Metrics;

/// Passes calls on.
#[derive(Debug)]
pub struct Gateway {
    /// None where the built-in echo answers.
    upstream: Option<Upstream>,
    settings: GatewaySettings,
    /// How long a caller may be silent within its request.
    read_timeout: Duration,
    /// Set when those who still wait are told that the server stops.
    ending: CancellationToken,
    tunnels: TaskTracker,
    metrics: GatewayMetrics,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The path could be read as one outside of the prefix.
    #[error("the path leads out of its prefix")]
    Path,
    /// The body is larger than allowed.
    #[error("the body is too large")]
    TooLarge,
    /// The caller was silent for too long within its body.
    #[error("the body came too slowly")]
    TooSlow,
    /// The caller's body broke off.
    #[error("the body ended before it was complete")]
    BodyCutOff,
    /// The caller has gone.
    #[error("the caller has gone")]
    CallerGone,
    /// No connection to the upstream.
    #[error("no connection to the upstream: {0}")]
    Unreachable(#[source] io::Error),
    /// The upstream took too long to accept a connection or to begin its answer.
    #[error("the upstream did not answer in time")]
    TimedOut,
    /// The upstream's response is not valid HTTP.
    #[error("the upstream's answer could not be read: {0}")]
    Unreadable(String),
    /// The server stops.
    #[error("the server stops")]
    Stopping,
}

impl GatewayError {
    /// A word for it.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Path => "bad_path",
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
    /// The other end of the connection it came by.
    pub peer: Option<&'a Peer>,
    /// Whose token it was.
    pub user: &'a str,
}

impl Gateway {
    /// A gateway to the upstream of the settings.
    #[must_use]
    pub fn start(settings: &Settings, metrics: &Metrics, shutdown: &Shutdown) -> Self {
        let own = settings.gateway.clone();
        let upstream =
            own.upstream.as_ref().and_then(|url| Upstream::new(url, &own, settings.http.threads()));
        if let Some(upstream) = &upstream {
            tokio::spawn(sweep(upstream.pool.clone(), shutdown.closing().clone()));
        }
        Self {
            upstream,
            settings: own,
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

    /// Passes a call on, and answers with what comes back.
    /// Fails when there is no response; the error says why.
    pub async fn forward(
        &self,
        identity: CallerIdentity<'_>,
        request: Request<Body>,
    ) -> Result<Response, GatewayError> {
        let started = Instant::now();
        let answered = self.pass_on(identity, request).await;
        let outcome = answered.as_ref().map_or_else(GatewayError::as_str, |_response| "answered");
        self.metrics.record(outcome, started.elapsed());
        answered
    }

    async fn pass_on(
        &self,
        identity: CallerIdentity<'_>,
        mut request: Request<Body>,
    ) -> Result<Response, GatewayError> {
        if !path::stays(request.uri().path()) {
            return Err(GatewayError::Path);
        }
        if request.body().size_hint().lower() > self.settings.max_body as u64 {
            return Err(GatewayError::TooLarge);
        }
        let Some(upstream) = &self.upstream else {
            let body = std::mem::take(request.body_mut());
            let (body, _progress) = RequestBody::new(body, self.settings.max_body, self.read_timeout);
            return Ok(echo::answer(&request, body));
        };
        // A WebSocket begins without a body: one would still be on its way when the protocol changes.
        let is_upgrade = headers::wants_websocket(request.headers()) && request.body().is_end_stream();
        let upgrade = is_upgrade.then(|| hyper::upgrade::on(&mut request));
        let is_head = request.method() == Method::HEAD;
        let (parts, body) = request.into_parts();
        let (body, progress) = RequestBody::new(body, self.settings.max_body, self.read_timeout);
        let request = self.upstream_request(upstream, identity, parts, body, upgrade.is_some());
        let answered = self.wait(upstream.exchange(request), identity.peer, &progress).await;
        let (response, connection) = answered.map_err(|error| blame(error, &progress))?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return self.open_tunnel(response, connection, upgrade);
        }
        let peer = identity.peer.cloned();
        let body = |body, connection| {
            let pool = upstream.pool.clone();
            ResponseBody::new(body, connection, pool, peer, progress, self.settings.idle_timeout)
        };
        Ok(respond(is_head, response, connection, body))
    }

    /// The call as the upstream gets it.
    fn upstream_request(
        &self,
        upstream: &Upstream,
        identity: CallerIdentity<'_>,
        mut parts: Parts,
        body: RequestBody,
        is_upgrade: bool,
    ) -> Request<RequestBody> {
        let takes_trailers = headers::takes_trailers(&parts.headers);
        let had_length = parts.headers.contains_key(CONTENT_LENGTH);
        headers::strip(&mut parts.headers);
        let addition = Addition {
            peer: identity.peer,
            user: identity.user,
            host: &upstream.host,
            authorization: upstream.authorization.as_ref(),
            forward_authorization: self.settings.forward_authorization,
            trust_forwarded: self.settings.trust_forwarded,
        };
        addition.apply(&mut parts.headers, &parts.uri);
        if is_upgrade {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        } else if takes_trailers {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("te"));
            parts.headers.insert(TE, HeaderValue::from_static("trailers"));
        }
        frame(&mut parts.headers, &body, had_length);
        let path = parts.uri.path_and_query().cloned();
        parts.uri = Uri::from(path.unwrap_or(PathAndQuery::from_static("/")));
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        Request::from_parts(parts, body)
    }

    /// Tells the caller that the upstream has agreed to a WebSocket.
    fn open_tunnel(
        &self,
        response: http::Response<Incoming>,
        connection: Box<UpstreamConnection>,
        upgrade: Option<OnUpgrade>,
    ) -> Result<Response, GatewayError> {
        let Some(inbound) = upgrade else {
            return Err(GatewayError::Unreadable("it switched to another protocol unasked".to_owned()));
        };
        let (open, stop) = (self.metrics.tunnels.clone(), self.ending.clone());
        let tunnel = Tunnel { connection, inbound, open, idle_timeout: self.settings.idle_timeout, stop };
        tunnel.open(response, &self.tunnels)
    }

    /// Waits for the head of the answer, as long as there is a point in it.
    async fn wait<T>(
        &self,
        exchange: impl Future<Output = Result<T, GatewayError>>,
        peer: Option<&Peer>,
        upload: &Progress,
    ) -> Result<T, GatewayError> {
        let mut exchange = pin!(exchange);
        let mut disconnected = poll_fn(|context| match peer {
            Some(peer) if upload.has_ended() => peer.poll_disconnected(context),
            _ => Poll::Pending,
        });
        let mut until = upload.last() + self.settings.first_byte_timeout;
        loop {
            tokio::select! {
                biased;
                answered = &mut exchange => return answered,
                () = &mut disconnected => return Err(GatewayError::CallerGone),
                () = self.ending.cancelled() => return Err(GatewayError::Stopping),
                () = sleep_until(until.into()) => {
                    // Time in which the body still went on was not the upstream's to answer.
                    let since = upload.last() + self.settings.first_byte_timeout;
                    if since <= until {
                        return Err(GatewayError::TimedOut);
                    }
                    until = since;
                }
            }
        }
    }
}

/// The answer as the caller gets it.
fn respond(
    is_head: bool,
    response: http::Response<Incoming>,
    mut connection: Box<UpstreamConnection>,
    into_body: impl FnOnce(Incoming, Box<UpstreamConnection>) -> ResponseBody,
) -> Response {
    let (mut parts, body) = response.into_parts();
    let is_encoded = parts.headers.contains_key(TRANSFER_ENCODING);
    let lengths = parts.headers.get_all(CONTENT_LENGTH).iter().map(|length| length != "0");
    connection.is_ambiguous =
        headers::is_ambiguous(is_head, parts.status, is_encoded, lengths.reduce(|a, b| a || b));
    if is_encoded {
        parts.headers.remove(CONTENT_LENGTH);
    }
    headers::settle_length(&mut parts.headers);
    headers::strip(&mut parts.headers);
    parts.version = Version::HTTP_11;
    Response::from_parts(parts, Body::new(into_body(body, connection)))
}

/// Says how long the body is, or that nobody knows.
fn frame(headers: &mut HeaderMap, body: &RequestBody, had_length: bool) {
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

/// What the caller did wrong comes before what became of it.
fn blame(error: GatewayError, upload: &Arc<Progress>) -> GatewayError {
    match upload.fault() {
        Some(Fault::TooLarge) => GatewayError::TooLarge,
        Some(Fault::TooSlow) => GatewayError::TooSlow,
        Some(Fault::CutOff) => GatewayError::BodyCutOff,
        None => error,
    }
}

/// Closes connections that nobody uses.
async fn sweep(pool: Pool, closing: CancellationToken) {
    let mut sweeps = tokio::time::interval(pool::SWEEP_EVERY);
    while closing.run_until_cancelled(sweeps.tick()).await.is_some() {
        pool.sweep();
    }
}
