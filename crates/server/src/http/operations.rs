//! What operators and machines ask: health, metrics, documentation.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use http::{HeaderName, StatusCode};
use serde::Serialize;

use super::body::Json;
use crate::app::App;
use crate::service::health::Check;

const OPENAPI: &str = include_str!("../../assets/openapi.json");
const DOCS: &str = include_str!("../../assets/docs.html");
const INDEX: &str = include_str!("../../assets/index.html");

/// Pages are one file each and talk to this server alone.
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
    connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

#[derive(Debug, Serialize)]
struct HealthResponse {
    success: bool,
    data: HealthData,
}

#[derive(Debug, Serialize)]
struct HealthData {
    status: &'static str,
    /// In seconds.
    uptime: u64,
    checks: BTreeMap<&'static str, CheckResponse>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckResponse {
    status: &'static str,
    latency_ms: u128,
}

/// `GET /health`
pub(crate) async fn get_health(State(app): State<Arc<App>>) -> Response {
    let checks = app.health.check().await;
    let (status, word) = if checks.iter().all(|check| check.up) {
        (StatusCode::OK, "healthy")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "degraded")
    };
    let describe = |check: &Check| {
        let status = if check.up { "up" } else { "down" };
        (check.engine, CheckResponse { status, latency_ms: check.latency.as_millis() })
    };
    let body = HealthResponse {
        success: true,
        data: HealthData {
            status: word,
            uptime: app.started.elapsed().as_secs(),
            checks: checks.iter().map(describe).collect(),
        },
    };
    (status, Json(body)).into_response()
}

/// `GET /livez`: the process runs.
pub(crate) async fn get_livez() -> &'static str {
    "ok"
}

/// `GET /readyz`: it can do work. No longer once it begins to stop, so that no new work is sent here.
pub(crate) async fn get_readyz(State(app): State<Arc<App>>) -> (StatusCode, &'static str) {
    if app.closing.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, "shutting down")
    } else if app.health.check().await.first().is_some_and(|store| store.up) {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer")
    }
}

/// `GET /metrics`
pub(crate) async fn get_metrics(State(app): State<Arc<App>>) -> ([(HeaderName, &'static str); 1], String) {
    for check in app.health.check().await {
        app.metrics.record_engine(check.engine, check.up);
    }
    app.requests.measure_dead_letters().await;
    app.tier.measure();
    ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], app.metrics.encode())
}

/// `GET /openapi.json`
pub(crate) async fn get_openapi() -> ([(HeaderName, &'static str); 2], &'static str) {
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-cache")], OPENAPI)
}

/// `GET /docs`
pub(crate) async fn get_docs() -> impl IntoResponse {
    page(DOCS)
}

/// `GET /`
pub(crate) async fn get_index() -> impl IntoResponse {
    page(INDEX)
}

fn page(html: &'static str) -> ([(HeaderName, &'static str); 3], &'static str) {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, html)
}
