//! The console over HTTP: the live stream, and who is near a limit. The module below has the state of one key.

pub(crate) mod keys;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use utoipa::{IntoParams, ToSchema};
use weir_queue::rfc3339;

use super::live::{LiveSubscription, STREAMS_MAX};
use super::servers::{Range, ServerRates, ServersHistory};
use crate::address_limits::LongLivedPermit;
use crate::app::App;
use crate::auth::credentials::ADMIN_READ;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::event_stream::EventStream;
use crate::http::pagination::parse_limit;
use crate::telemetry::near_limits::NearLimit;
use crate::telemetry::request_context::LogIds;

/// How long a stream may last: the caller's token is checked again when it reconnects.
const STREAM_MAX: Duration = Duration::from_secs(3_600);
/// Tells nginx not to buffer the stream.
const BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// The first event of a stream: what does not change.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HelloBody {
    version: &'static str,
    /// Whether the caller may change nothing.
    read_only: bool,
    started_at: jiff::Timestamp,
    roles: Vec<&'static str>,
    /// The engines in use: the store first.
    engines: Vec<&'static str>,
    /// Whether other servers may use the same store. What is shown is of this one.
    shared_store: bool,
    /// Whether `GET /admin/servers` knows the other ones.
    knows_servers: bool,
    address: String,
}

impl HelloBody {
    fn new(app: &App) -> Self {
        let roles = app.settings.process.roles;
        let named = [
            (roles.api, "api"),
            (roles.worker, "worker"),
            (roles.sender, "sender"),
            (roles.reconciler, "reconciler"),
        ];
        let engines = &app.engines;
        let redis = engines.redis.as_ref().map(|_| weir_store_redis::ENGINE);
        let kafka = engines.kafka.as_ref().map(|_| weir_queue::kafka::ENGINE);
        let uptime = jiff::SignedDuration::try_from(app.started.elapsed()).unwrap_or_default();
        let now = jiff::Timestamp::now();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            read_only: LogIds::current().caller_scope() == Some(ADMIN_READ),
            started_at: now.checked_sub(uptime).unwrap_or(now),
            roles: named.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect(),
            engines: [Some(engines.store.name), redis, kafka].into_iter().flatten().collect(),
            shared_store: engines.store.is_shared,
            knows_servers: app.servers.is_some(),
            address: app.settings.process.listen.to_string(),
        }
    }
}

/// Watch this server.
///
/// A stream of server-sent events for the console: `hello` with what does not change, `history` with the last 15 minutes by the
/// second and the last day by the minute, then a `snapshot` each second: decisions and latency of each capability, engines, the
/// backlog, and the keys nearest to their limits. All of this process alone. What it contains may change with any version.
///
/// At most 64 streams are open at the same time. After an hour, and when the server stops, a stream ends: connect again.
#[utoipa::path(
    get,
    path = "/admin/live",
    tag = "operations",
    responses(
        (status = 200, description = "The stream.", content(("text/event-stream"))),
        (status = 503, description = "Too many streams are open. Close a console and try again."),
    ),
)]
pub(crate) async fn watch_live(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let permit = app.address_limits.acquire_long_lived()?;
    let subscription = app.live.subscribe(&HelloBody::new(&app)).ok_or_else(|| {
        ApiError::unavailable(format!("{STREAMS_MAX} consoles are open on this server; close one"))
    })?;
    let stream = LiveStream {
        subscription,
        deadline: Instant::now() + STREAM_MAX,
        closing: app.shutdown.closing().clone(),
        _permit: permit,
    };
    let events = futures_util::stream::unfold(stream, |mut stream| async move {
        let bytes = stream.next().await?;
        Some((bytes, stream))
    });
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(EventStream::new(events.boxed()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(BUFFERING, HeaderValue::from_static("no"));
    Ok(response)
}

struct LiveStream {
    subscription: LiveSubscription,
    deadline: Instant,
    closing: CancellationToken,
    _permit: LongLivedPermit,
}

impl LiveStream {
    async fn next(&mut self) -> Option<Bytes> {
        tokio::select! {
            event = self.subscription.next() => event,
            () = tokio::time::sleep_until(self.deadline) => None,
            () = self.closing.cancelled() => None,
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
pub(crate) struct NearLimitsQuery {
    /// Only of this limit: a policy's name, or `quota`, `minute` or `daily`.
    #[param(value_type = String, required = false, example = "login")]
    limit_name: Option<String>,
    /// Only of this capability.
    #[param(value_type = String, required = false, example = "quota")]
    capability: Option<String>,
    /// The most items to return.
    #[param(value_type = u32, required = false, minimum = 1, maximum = 1000, default = 100)]
    limit: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NearLimitsResponse {
    items: Vec<NearLimitResponse>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = NearLimit)]
pub(crate) struct NearLimitResponse {
    #[schema(examples("quota"))]
    capability: &'static str,
    /// The limit: a policy's name, or `quota`, `minute` or `daily`.
    #[schema(examples("quota"))]
    limit_name: Box<str>,
    #[schema(examples("alice"))]
    key: Box<str>,
    #[schema(examples(50))]
    limit: u32,
    #[schema(examples(3))]
    remaining: u32,
    /// The last decision, by the clock of the store.
    at: jiff::Timestamp,
    /// When the window ends; after a denial, when the call would fit. null if it never does.
    #[schema(required = true)]
    until: Option<jiff::Timestamp>,
    /// Denials since the server remembers the key.
    #[schema(examples(12))]
    denials: u64,
    /// The last denial; null if there was none.
    #[schema(required = true)]
    last_denial: Option<LastDenialResponse>,
}

/// How the limit stood when it last denied.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LastDenial)]
struct LastDenialResponse {
    at: jiff::Timestamp,
    #[schema(examples(50))]
    limit: u32,
    #[schema(examples(0))]
    remaining: u32,
    /// When the call would have fit; null if it never would.
    #[schema(required = true)]
    until: Option<jiff::Timestamp>,
}

impl From<NearLimit> for NearLimitResponse {
    fn from(near: NearLimit) -> Self {
        let NearLimit { capability, limit_name, key, limit, remaining, at, until, denials, last_denial } =
            near;
        let last_denial = last_denial.map(|denial| LastDenialResponse {
            at: rfc3339(denial.at),
            limit: denial.limit,
            remaining: denial.remaining,
            until: denial.until.map(rfc3339),
        });
        let (at, until) = (rfc3339(at), until.map(rfc3339));
        Self { capability, limit_name, key, limit, remaining, at, until, denials, last_denial }
    }
}

/// List who is near a limit.
///
/// The keys that have used at least half of a limit, or were denied, as far as this server has decided about them since it
/// started, those nearest to their limit first. It remembers the last 8,192 or so, in memory; other servers have their own.
#[utoipa::path(
    get,
    path = "/admin/near-limits",
    tag = "operations",
    params(NearLimitsQuery),
    responses((status = 200, description = "The keys.", body = NearLimitsResponse)),
)]
pub(crate) async fn list_near_limits(
    State(app): State<Arc<App>>,
    query: Result<Query<NearLimitsQuery>, QueryRejection>,
) -> Result<Json<NearLimitsResponse>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let now = app.engines.store.wall_clock.now();
    let near = app.metrics.near_limits.list(now, limit, |near| {
        query.limit_name.as_deref().is_none_or(|name| *near.limit_name == *name)
            && query.capability.as_deref().is_none_or(|name| near.capability == name)
    });
    Ok(Json(NearLimitsResponse { items: near.into_iter().map(NearLimitResponse::from).collect() }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ServersQuery {
    /// How far back: `15m` or `24h`.
    #[param(value_type = String, required = false, example = "15m")]
    range: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ServersResponse {
    /// Each server by the name under which Prometheus scrapes it.
    servers: Vec<ServerResponse>,
    /// Seconds since 1970.
    times: Vec<i64>,
    /// Decisions of all servers per second, by series, such as `quota.allowed`; null where Prometheus has none.
    series: BTreeMap<String, Vec<Option<f64>>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = ServerRates)]
struct ServerResponse {
    #[schema(examples("10.0.0.7:8080"))]
    instance: String,
    /// Per second, of all capabilities, as the two after it.
    #[schema(examples(120.5))]
    allowed: f64,
    #[schema(examples(3.2))]
    denied: f64,
    #[schema(examples(0.0))]
    failed: f64,
    /// Engines that do not answer this server.
    engines_down: Vec<String>,
}

/// See all servers.
///
/// What all servers decide, as the Prometheus of `console.prometheus` has it.
#[utoipa::path(
    get,
    path = "/admin/servers",
    tag = "operations",
    params(ServersQuery),
    responses(
        (status = 200, description = "All servers.", body = ServersResponse),
        (status = 404, description = "`console.prometheus` is not set: this server knows itself alone."),
        (status = 503, description = "Prometheus does not answer."),
    ),
)]
pub(crate) async fn list_servers(
    State(app): State<Arc<App>>,
    query: Result<Query<ServersQuery>, QueryRejection>,
) -> Result<Json<ServersResponse>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let range = match query.range.as_deref() {
        None | Some("15m") => Range::QuarterHour,
        Some("24h") => Range::Day,
        Some(_) => return Err(ApiError::invalid_field("range", "must be 15m or 24h")),
    };
    let servers = app.servers.as_ref().ok_or_else(|| {
        ApiError::not_found("Set console.prometheus to the URL of a Prometheus that scrapes all servers")
    })?;
    let now = jiff::Timestamp::now().as_second();
    let both = tokio::try_join!(servers.history(range, now), servers.each());
    let (ServersHistory { times, series }, each) =
        both.map_err(|error| ApiError::unavailable(error.to_string()))?;
    let describe = |(instance, rates): (String, ServerRates)| {
        let ServerRates { allowed, denied, failed, engines_down } = rates;
        ServerResponse { instance, allowed, denied, failed, engines_down }
    };
    Ok(Json(ServersResponse { servers: each.into_iter().map(describe).collect(), times, series }))
}
