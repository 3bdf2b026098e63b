//! The reverse proxy behind `/api/v1/ai/**`: a call goes to the upstream as it came, and the answer comes back as it is
//! made, piece by piece. Who may call, and how often, is decided before (`http/ai.rs`).

mod alarm;
mod by_hyper;
mod direct;
mod download;
mod echo;
mod headers;
mod path;
mod pool;
mod tunnel;
mod upload;
mod upstream;
mod wire;

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::direct::{Failure, Flow, Head, Talk};
use self::headers::Addition;
use self::pool::{Line, Pool};
use self::upload::{Progress, Upload};
use self::upstream::Upstream;
use crate::config::Settings;
use crate::config::ai::AiSettings;
use crate::http::caller::Caller;
use crate::telemetry::ai::AiMetrics;
use crate::telemetry::metrics::Metrics;

/// How long the head of an answer may be.
const HEAD_BYTES_MAX: usize = 64 * 1024;

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
#[derive(Clone, Copy, Debug)]
pub struct Behalf<'a> {
    /// The connection it came by.
    pub caller: Option<&'a Caller>,
    /// Whose token it was.
    pub user: &'a str,
}

/// What a call brings.
#[derive(Debug)]
pub enum Payload {
    /// All of it.
    Whole(Bytes),
    /// What is still coming, or asks something of its connection.
    Coming(Body),
}

impl Default for Payload {
    fn default() -> Self {
        Self::Whole(Bytes::new())
    }
}

impl Payload {
    /// How long it is at least.
    fn length(&self) -> u64 {
        match self {
            Self::Whole(bytes) => bytes.len() as u64,
            Self::Coming(body) => body.size_hint().lower(),
        }
    }

    fn into_body(self) -> Body {
        match self {
            Self::Whole(bytes) if bytes.is_empty() => Body::empty(),
            Self::Whole(bytes) => Body::from(bytes),
            Self::Coming(body) => body,
        }
    }
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
    pub async fn forward(
        &self,
        behalf: Behalf<'_>,
        request: &mut Request<Payload>,
    ) -> Result<Response, Problem> {
        let started = Instant::now();
        let answered = self.pass_on(behalf, request, started).await;
        let outcome = answered.as_ref().map_or_else(Problem::as_str, |_response| "answered");
        self.metrics.record(outcome, started.elapsed());
        answered
    }

    async fn pass_on(
        &self,
        behalf: Behalf<'_>,
        request: &mut Request<Payload>,
        started: Instant,
    ) -> Result<Response, Problem> {
        if !path::stays(request.uri().path()) {
            return Err(Problem::Path);
        }
        if request.body().length() > self.settings.max_body as u64 {
            return Err(Problem::TooLarge);
        }
        let Some(upstream) = &self.upstream else {
            let body = std::mem::take(request.body_mut()).into_body();
            let (upload, _progress) = Upload::new(body, self.settings.max_body, self.read_timeout);
            return Ok(echo::answer(request, upload));
        };
        if let Payload::Whole(body) = request.body()
            && direct::takes(request.method(), request.headers())
        {
            let addition = self.addition(upstream, behalf);
            let ask = direct::write_ask(request.method(), request.uri(), request.headers(), body, &addition);
            return self.ask(upstream, behalf.caller, request.method(), ask, started).await;
        }
        // In memory of its own, and only for those who need it.
        Box::pin(self.pass_on_by_hyper(upstream, behalf, std::mem::take(request))).await
    }

    /// Passes on a call that is there as it is to be written.
    async fn ask(
        &self,
        upstream: &Upstream,
        caller: Option<&Caller>,
        method: &Method,
        mut ask: Vec<u8>,
        started: Instant,
    ) -> Result<Response, Problem> {
        let mut since = started;
        loop {
            let mut line = match upstream.pool.take(since) {
                Some(line) => line,
                None => {
                    let line = self.connect(upstream, caller).await?;
                    since = Instant::now();
                    line
                }
            };
            line.alarm.begin(since, self.settings.first_byte_timeout);
            let mut talk = Talk::new(line, ask);
            let over = |line: &mut Line, context: &mut Context<'_>| {
                if caller.is_some_and(|caller| caller.poll_gone(context).is_ready()) {
                    return Poll::Ready(Problem::CallerGone);
                }
                line.alarm.poll(context, &self.stop).map(direct::late)
            };
            match talk.head(method == Method::HEAD, over).await {
                Ok(head) => return self.answer(upstream, caller, head, talk),
                Err(Failure::Final(problem)) => return Err(problem),
                // It ended while it waited, and nothing was sent: another one will do. There are only so many.
                Err(Failure::Unsent(unsent)) => ask = unsent,
            }
        }
    }

    /// A new connection, as long as there is a point in it.
    async fn connect(&self, upstream: &Upstream, caller: Option<&Caller>) -> Result<Line, Problem> {
        let (_nothing, progress) = Upload::new(Body::empty(), 0, self.read_timeout);
        Box::pin(self.wait(Box::pin(upstream.connect()), caller, &progress)).await
    }

    /// The answer to a call that went the direct way, as the caller gets it.
    fn answer(
        &self,
        upstream: &Upstream,
        caller: Option<&Caller>,
        head: Head,
        mut talk: Talk,
    ) -> Result<Response, Problem> {
        let Head { status, reason, headers, mut body, is_kept } = head;
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(unasked());
        }
        let body = match talk.take_whole(&mut body) {
            Some(whole) => {
                if let Some(line) = talk.into_line().filter(|_| is_kept) {
                    upstream.pool.keep(line, Instant::now());
                }
                if whole.is_empty() { Body::empty() } else { Body::from(whole) }
            }
            None => Body::new(Flow::new(
                talk,
                body,
                is_kept,
                direct::Around {
                    pool: upstream.pool.clone(),
                    caller: caller.cloned(),
                    idle_timeout: self.settings.idle_timeout,
                    stop: self.stop.clone(),
                },
            )),
        };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        if let Some(reason) = reason {
            response.extensions_mut().insert(reason);
        }
        Ok(response)
    }

    /// What the upstream is told besides what the caller says.
    fn addition<'a>(&self, upstream: &'a Upstream, behalf: Behalf<'a>) -> Addition<'a> {
        Addition {
            caller: behalf.caller,
            user: behalf.user,
            host: &upstream.host,
            authorization: upstream.authorization.as_ref(),
            forward_authorization: self.settings.forward_authorization,
            trust_forwarded: self.settings.trust_forwarded,
        }
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
                () = sleep_until(until.into()) => {
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
}

/// An upstream that speaks another protocol, of which there was no talk.
fn unasked() -> Problem {
    Problem::Unreadable("it switched to another protocol unasked".to_owned())
}

/// Closes connections that nobody uses, and cuts off what is under way when a stop takes too long.
async fn tend(pool: Option<Pool>, closing: CancellationToken, grace: Duration, stop: CancellationToken) {
    let mut sweeps = tokio::time::interval(pool::SWEPT_EVERY);
    loop {
        tokio::select! {
            () = closing.cancelled() => break,
            _ = sweeps.tick() => if let Some(pool) = &pool { pool.sweep() },
        }
    }
    tokio::time::sleep(grace).await;
    stop.cancel();
}
