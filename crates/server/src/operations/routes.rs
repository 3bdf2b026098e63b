//! Health, metrics and documentation over HTTP.

pub(crate) mod audit;
pub(crate) mod dead_letters;
pub(crate) mod queue;
pub(crate) mod readiness;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, VARY};
use http::{HeaderMap, HeaderName, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;
use weir_queue::rfc3339;

use super::clocks::ClockState;
use super::health::EngineCheck;
use crate::app::App;
use crate::http::body::Json;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::http::page_files;
use crate::telemetry::metrics::MetricsFormat;

const DOCS: &str = include_str!("../../assets/docs.html");
const INDEX: &str = include_str!("../../assets/index.html");

/// Pages are self-contained and connect only to this server.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
    connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

#[derive(Debug, Serialize, ToSchema)]
struct HealthResponse {
    /// Whether every engine answered.
    #[schema(examples(true))]
    success: bool,
    data: HealthData,
}

#[derive(Debug, Serialize, ToSchema)]
struct HealthData {
    #[schema(value_type = schema::HealthStatus)]
    status: &'static str,
    /// Seconds since this process started.
    #[schema(examples(3600))]
    uptime: u64,
    /// One entry for each engine in use, by its name, such as `sqlite` or `postgresql`.
    #[schema(value_type = BTreeMap<String, HealthCheck>, examples(json!({"sqlite": {"status": "up", "latencyMs": 1}})))]
    checks: BTreeMap<&'static str, HealthCheck>,
    /// One entry for each clock that decides: `system`, and those of the engines on other machines.
    #[schema(value_type = BTreeMap<String, ClockResponse>, examples(json!({"system": {"status": "steady"}})))]
    clocks: BTreeMap<&'static str, ClockResponse>,
}

/// The state of a clock. A step is shown for ten minutes. It locks nobody out for longer than their own window, but the time
/// synchronization of the machine should be checked.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = HealthClock)]
struct ClockResponse {
    #[schema(value_type = schema::ClockStatus)]
    status: &'static str,
    /// By how many seconds the clock last stepped; negative if it was set back.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(examples(7200.1))]
    step_seconds: Option<f64>,
    /// When the step was noticed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Time>)]
    stepped_at: Option<jiff::Timestamp>,
}

impl From<ClockState> for ClockResponse {
    fn from(state: ClockState) -> Self {
        let (status, step) = match state {
            ClockState::Unknown => ("unknown", None),
            ClockState::Steady => ("steady", None),
            ClockState::Stepped(step) => ("stepped", Some(step)),
        };
        Self {
            status,
            step_seconds: step.map(|step| step.seconds),
            stepped_at: step.map(|step| rfc3339(step.at)),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct HealthCheck {
    #[schema(value_type = schema::EngineStatus)]
    status: &'static str,
    /// How long the engine took to answer, in milliseconds.
    #[schema(value_type = u64, examples(1))]
    latency_ms: u128,
    /// Why the engine is down, where that is known, such as a full disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    reason: Option<&'static str>,
}

/// Check the engines.
///
/// Asks every engine in use and says how long each took to answer. For people and dashboards; probes should use
/// `/livez` and `/readyz`.
#[utoipa::path(
    get,
    path = "/health",
    tag = "operations",
    responses(
        (status = 200, description = "Healthy: every engine answered.", body = HealthResponse),
        (
            status = 503,
            description = "Degraded: the check that is `down` names the engine to look at. What needs that engine \
                answers 503 until it is back; nothing has to be restarted here.",
            body = HealthResponse,
        ),
    ),
)]
pub(crate) async fn get_health(State(app): State<Arc<App>>) -> Response {
    let checks = app.health.check().await;
    let healthy = checks.iter().all(|check| check.up);
    let (code, status) =
        if healthy { (StatusCode::OK, "healthy") } else { (StatusCode::SERVICE_UNAVAILABLE, "degraded") };
    let describe = |check: &EngineCheck| {
        let status = if check.up { "up" } else { "down" };
        (check.engine, HealthCheck { status, latency_ms: check.latency.as_millis(), reason: check.reason })
    };
    let body = HealthResponse {
        success: healthy,
        data: HealthData {
            status,
            uptime: app.started.elapsed().as_secs(),
            checks: checks.iter().map(describe).collect(),
            clocks: app.clocks.report().into_iter().map(|(clock, state)| (clock, state.into())).collect(),
        },
    };
    (code, Json(body)).into_response()
}

/// Probe liveness.
///
/// Whether this process runs. Asks no engine: an outage elsewhere is no reason to restart Weir.
#[utoipa::path(
    get,
    path = "/livez",
    tag = "operations",
    responses((status = 200, description = "Alive: `ok`.", body = String, content_type = "text/plain")),
)]
pub(crate) async fn get_livez() -> &'static str {
    "ok"
}

/// Read the metrics.
///
/// Counters, gauges and histograms of this process, for Prometheus to scrape. Several servers are scraped one by one.
///
/// In the `OpenMetrics` text format where `Accept` asks for it, as Prometheus does; otherwise in Prometheus's text format 0.0.4.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "operations",
    responses(
        (
            status = 200,
            description = "The metrics.",
            content(
                (String = "text/plain"),
                (String = "application/openmetrics-text"),
            ),
        ),
    ),
)]
pub(crate) async fn get_metrics(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
) -> ([(HeaderName, &'static str); 2], String) {
    let accept = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let format = MetricsFormat::from_accept(&accept.collect::<Vec<_>>().join(","));
    for check in app.health.check().await {
        app.metrics.operations.show_engine(check.engine, check.up);
    }
    app.backlog.update().await;
    app.tier.update_metrics();
    let buffered = app.buffers.used() + app.upload_buffers.used();
    app.metrics.buffered_bytes.set(i64::try_from(buffered).unwrap_or(i64::MAX));
    app.metrics.long_lived.set(i64::try_from(app.address_limits.long_lived_count()).unwrap_or(i64::MAX));
    ([(CONTENT_TYPE, format.content_type()), (VARY, "accept")], app.metrics.encode(format))
}

/// Open the API reference.
///
/// This description as a page, with a form to try each call. It loads nothing from elsewhere, so it works without
/// internet access.
#[utoipa::path(
    get,
    path = "/docs",
    tag = "operations",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html")),
)]
pub(crate) async fn get_docs() -> impl IntoResponse {
    page(DOCS)
}

/// Open the console.
///
/// The operators' console: what this server decides now, why somebody was denied, and what is stuck. It asks for the admin key or
/// a token with the scope `admin` or `admin:read`, and loads nothing from elsewhere. A binary that was built without it shows a
/// page with a first call to copy.
#[utoipa::path(
    get,
    path = "/",
    tag = "operations",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html")),
)]
pub(crate) async fn get_index() -> Response {
    page_files::find("console.html").unwrap_or_else(|| page(INDEX).into_response())
}

/// Get an asset of the console.
///
/// Scripts, styles and pictures. Their names change with their contents, so they may be cached for ever.
#[utoipa::path(
    get,
    path = "/assets/{file}",
    tag = "operations",
    params(("file" = String, Path, description = "A file's name.", example = "console.js")),
    responses(
        (
            status = 200,
            description = "The file.",
            content((String = "text/javascript"), (String = "text/css"), (String = "image/svg+xml")),
        ),
        (status = 404, description = "There is no such file."),
    ),
)]
pub(crate) async fn get_index_asset(PathParam(name): PathParam) -> Response {
    name.ok()
        .and_then(|name| page_files::find(&format!("assets/{name}")))
        .unwrap_or_else(|| StatusCode::NOT_FOUND.into_response())
}

fn page(html: &'static str) -> ([(HeaderName, &'static str); 3], &'static str) {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, html)
}
