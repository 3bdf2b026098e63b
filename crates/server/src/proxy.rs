//! The reverse proxy behind `/api/v1/ai/**`: a call goes to the upstream as it came, and the answer comes back as it is
//! made, piece by piece. Who may call, and how often, is decided before (`http/ai.rs`).

mod download;
mod echo;
mod headers;
mod path;
mod tunnel;
mod upload;
mod wire;

use std::error::Error as StdError;
use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use http::header::{CONNECTION, CONTENT_LENGTH, TE, TRANSFER_ENCODING, UPGRADE};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, StatusCode, Uri, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::download::{Around, Download};
use self::headers::Addition;
use self::upload::{Fault, Progress, Upload};
use self::wire::{Pool, Wire};
use crate::config::Settings;
use crate::config::ai::AiSettings;
use crate::http::caller::Caller;
use crate::outbound::Target;
use crate::outbound::connect::{Connector, Reach};
use crate::telemetry::ai::AiMetrics;
use crate::telemetry::metrics::Metrics;

/// Passes calls on.
#[derive(Debug)]
pub struct Proxy {
    /// None where the built-in echo answers.
    upstream: Option<Upstream>,
    settings: AiSettings,
    /// How long a caller may be silent within its request.
    read_timeout: Duration,
    /// Set when what is still under way is cut off.
    stop: CancellationToken,
    tunnels: TaskTracker,
    metrics: AiMetrics,
}

#[derive(Debug)]
struct Upstream {
    target: Target,
    host: HeaderValue,
    authorization: Option<HeaderValue>,
    connector: Connector,
    pool: Pool,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
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
    /// What the upstream answered is no answer.
    #[error("the upstream's answer could not be read: {0}")]
    Unreadable(String),
    /// The server stops.
    #[error("the server stops")]
    Stopping,
}

impl Problem {
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
#[derive(Debug)]
pub struct Behalf<'a> {
    /// The connection it came by.
    pub caller: Option<Caller>,
    /// Whose token it was.
    pub user: &'a str,
}

impl Proxy {
    /// A proxy to the upstream of the settings. What is still under way some time after `closing` is cut off.
    #[must_use]
    pub fn start(settings: &Settings, metrics: &Metrics, closing: CancellationToken) -> Self {
        let ai = settings.ai.clone();
        let upstream = ai.upstream.as_ref().and_then(|url| Upstream::new(url, &ai));
        let stop = CancellationToken::new();
        let grace = settings.http.shutdown_timeout * 3 / 4;
        tokio::spawn(tend(upstream.as_ref().map(|u| u.pool.clone()), closing, grace, stop.clone()));
        let read_timeout = settings.http.read_timeout;
        let metrics = metrics.ai.clone();
        Self { upstream, settings: ai, read_timeout, stop, tunnels: TaskTracker::new(), metrics }
    }

    /// Waits until the last tunnel has ended.
    pub async fn drain(&self) {
        self.tunnels.close();
        self.tunnels.wait().await;
    }

    /// Passes a call on, and answers with what comes back.
    ///
    /// # Errors
    /// When nothing does.
    pub async fn forward(&self, behalf: Behalf<'_>, request: Request) -> Result<Response, Problem> {
        let started = Instant::now();
        let answered = self.pass_on(behalf, request).await;
        let outcome = answered.as_ref().map_or_else(Problem::as_str, |_response| "answered");
        self.metrics.record(outcome, started.elapsed());
        answered
    }

    async fn pass_on(&self, behalf: Behalf<'_>, mut request: Request) -> Result<Response, Problem> {
        if !path::stays(request.uri().path()) {
            return Err(Problem::Path);
        }
        if request.body().size_hint().lower() > self.settings.max_body as u64 {
            return Err(Problem::TooLarge);
        }
        let upgrade = headers::wants_websocket(request.headers()).then(|| hyper::upgrade::on(&mut request));
        let (upload, progress) = {
            let body = std::mem::take(request.body_mut());
            Upload::new(body, self.settings.max_body, self.read_timeout)
        };
        let Some(upstream) = &self.upstream else {
            return Ok(echo::answer(&request, upload));
        };
        let request = self.request(upstream, &behalf, request, upload, upgrade.is_some());
        let exchange = Box::pin(upstream.exchange(request));
        let answered = self.wait(exchange, behalf.caller.as_ref(), &progress).await;
        let (response, wire) = answered.map_err(|problem| blame(problem, &progress))?;
        let around = Around {
            pool: upstream.pool.clone(),
            caller: behalf.caller,
            upload: progress,
            idle_timeout: self.settings.idle_timeout,
            stop: self.stop.clone(),
        };
        self.respond(response, wire, around, upgrade)
    }

    /// The call as the upstream gets it.
    fn request(
        &self,
        upstream: &Upstream,
        behalf: &Behalf<'_>,
        request: Request,
        upload: Upload,
        is_upgrade: bool,
    ) -> http::Request<Upload> {
        let (mut parts, _taken) = request.into_parts();
        let takes_trailers = headers::takes_trailers(&parts.headers);
        let had_length = parts.headers.contains_key(CONTENT_LENGTH);
        headers::strip(&mut parts.headers);
        let addition = Addition {
            caller: behalf.caller.as_ref(),
            user: behalf.user,
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
        frame(&mut parts.headers, &upload, had_length);
        let path = parts.uri.path_and_query().cloned();
        parts.uri = Uri::from(path.unwrap_or(PathAndQuery::from_static("/")));
        parts.version = Version::HTTP_11;
        parts.extensions.clear();
        http::Request::from_parts(parts, upload)
    }

    /// Waits for the head of the answer, as long as there is a point in it.
    async fn wait<T>(
        &self,
        mut exchange: impl Future<Output = Result<T, Problem>> + Unpin,
        caller: Option<&Caller>,
        upload: &Progress,
    ) -> Result<T, Problem> {
        let mut gone = poll_fn(|context| match caller {
            Some(caller) if upload.has_ended() => caller.poll_gone(context),
            _ => Poll::Pending,
        });
        let mut until = upload.last() + self.settings.first_byte_timeout;
        loop {
            tokio::select! {
                biased;
                answered = &mut exchange => return answered,
                () = &mut gone => return Err(Problem::CallerGone),
                () = self.stop.cancelled() => return Err(Problem::Stopping),
                () = sleep_until(Instant::from_std(until)) => {
                    // Time in which the body still went on was not the upstream's to answer.
                    let since = upload.last() + self.settings.first_byte_timeout;
                    if since <= until {
                        return Err(Problem::TimedOut);
                    }
                    until = since;
                }
            }
        }
    }

    /// The answer as the caller gets it.
    fn respond(
        &self,
        response: http::Response<Incoming>,
        wire: Box<Wire>,
        around: Around,
        upgrade: Option<OnUpgrade>,
    ) -> Result<Response, Problem> {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let Some(inbound) = upgrade else {
                return Err(Problem::Unreadable("it switched to another protocol unasked".to_owned()));
            };
            let open = self.metrics.tunnels.clone();
            let tunnel =
                tunnel::Tunnel { wire, inbound, open, idle_timeout: around.idle_timeout, stop: around.stop };
            return tunnel.open(response, &self.tunnels);
        }
        let (mut parts, body) = response.into_parts();
        if parts.headers.contains_key(TRANSFER_ENCODING) {
            parts.headers.remove(CONTENT_LENGTH);
        }
        headers::strip(&mut parts.headers);
        parts.version = Version::HTTP_11;
        Ok(Response::from_parts(parts, Body::new(Download::new(body, wire, around))))
    }
}

/// Says how long the body is, or that nobody knows.
fn frame(headers: &mut HeaderMap, upload: &Upload, had_length: bool) {
    match upload.size_hint().exact() {
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
fn blame(problem: Problem, upload: &Progress) -> Problem {
    match upload.fault() {
        Some(Fault::TooLarge) => Problem::TooLarge,
        Some(Fault::TooSlow) => Problem::TooSlow,
        Some(Fault::CutOff) => Problem::BodyCutOff,
        None => problem,
    }
}

impl Upstream {
    fn new(url: &url::Url, settings: &AiSettings) -> Option<Self> {
        let target = Target::new(url)?;
        let own = settings.authorization.as_ref().and_then(|secret| {
            let mut value = HeaderValue::from_str(&secret.0).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Some(Self {
            host: HeaderValue::from_str(target.uri().authority()?.as_str()).ok()?,
            authorization: own.or_else(|| target.authorization().cloned()),
            target,
            connector: Connector::new(Reach::Anywhere, settings.connect_timeout),
            pool: Pool::new(settings.max_idle),
        })
    }

    /// Sends a request, over a connection that has waited for one or a new one.
    async fn exchange(
        &self,
        mut request: http::Request<Upload>,
    ) -> Result<(http::Response<Incoming>, Box<Wire>), Problem> {
        loop {
            let mut wire = match self.pool.take() {
                Some(wire) => wire,
                None => self.connect().await?,
            };
            let mut failure = match wire.send(request).await {
                Ok(response) => return Ok((response, wire)),
                Err(failure) => failure,
            };
            match failure.take_message() {
                // It ended while it waited, and nothing was sent: another one will do. There are only so many.
                Some(unsent) if wire.is_used => request = unsent,
                _ => return Err(Problem::Unreadable(causes(failure.error()))),
            }
        }
    }

    async fn connect(&self) -> Result<Box<Wire>, Problem> {
        let stream = self.connector.clone().connect(self.target.uri().clone()).await.map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                Problem::TimedOut
            } else {
                Problem::Unreachable(error)
            }
        })?;
        Wire::new(stream).await.map_err(|error| Problem::Unreadable(causes(&error)))
    }
}

fn causes(error: &(dyn StdError + 'static)) -> String {
    let chain = std::iter::successors(Some(error), |&cause| cause.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Closes connections that nobody uses, and cuts off what is under way when a stop takes too long.
async fn tend(pool: Option<Pool>, closing: CancellationToken, grace: Duration, stop: CancellationToken) {
    let mut sweeps = tokio::time::interval(wire::SWEPT_EVERY);
    loop {
        tokio::select! {
            () = closing.cancelled() => break,
            _ = sweeps.tick() => if let Some(pool) = &pool { pool.sweep() },
        }
    }
    tokio::time::sleep(grace).await;
    stop.cancel();
}
