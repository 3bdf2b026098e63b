//! Probes of readiness: whether this process can serve, and what.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::operations::readiness::{Capability, Deployment, Unready};

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Readiness)]
pub(crate) struct ReadinessResponse {
    #[schema(value_type = schema::ReadinessStatus)]
    status: &'static str,
    /// One entry for each capability that this process answers for or works on, by its name.
    #[schema(value_type = BTreeMap<String, CapabilityResponse>, examples(json!({"quota": {"ready": true}})))]
    capabilities: BTreeMap<&'static str, CapabilityResponse>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CapabilityReadiness)]
pub(crate) struct CapabilityResponse {
    /// Whether calls for this capability can be served now.
    #[schema(examples(true))]
    ready: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false, examples("postgresql does not answer"))]
    reason: Option<String>,
}

impl From<Option<Unready>> for CapabilityResponse {
    fn from(unready: Option<Unready>) -> Self {
        Self { ready: unready.is_none(), reason: unready.map(|unready| unready.to_string()) }
    }
}

/// Probe readiness.
///
/// Whether this process should be given traffic now: it can serve at least one capability of its roles, and is not
/// shutting down. To route by capability, probe `/readyz/{capability}`.
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "operations",
    responses(
        (
            status = 200,
            description = "Ready, or `degraded`: some capabilities cannot be served.", body = ReadinessResponse,
        ),
        (
            status = 503,
            description = "Not now: no capability can be served, or the server is shutting down. Send traffic \
                elsewhere. Do not restart for this.",
            body = ReadinessResponse,
        ),
    ),
)]
pub(crate) async fn get_readyz(State(app): State<Arc<App>>) -> Response {
    let capabilities = assess(&app).await;
    let ready = capabilities.iter().filter(|(_, unready)| unready.is_none()).count();
    let (status, word) = match ready {
        0 => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
        _ if ready == capabilities.len() => (StatusCode::OK, "ready"),
        _ => (StatusCode::OK, "degraded"),
    };
    let capabilities =
        capabilities.into_iter().map(|(capability, unready)| (capability.name(), unready.into())).collect();
    (status, Json(ReadinessResponse { status: word, capabilities })).into_response()
}

/// Probe readiness for one capability.
///
/// Whether calls for this capability can be served by this process now.
#[utoipa::path(
    get,
    path = "/readyz/{capability}",
    tag = "operations",
    params(("capability" = schema::CapabilityName, Path, description = "The capability.")),
    responses(
        (status = 200, description = "Ready.", body = CapabilityResponse),
        (status = 404, description = "No capability has this name, or none of this process's roles serves it."),
        (
            status = 503,
            description = "Not now: an engine does not answer, or the server is shutting down. Send this traffic elsewhere.",
            body = CapabilityResponse,
        ),
    ),
)]
pub(crate) async fn get_capability_readyz(
    State(app): State<Arc<App>>,
    PathParam(name): PathParam,
) -> Result<Response, ApiError> {
    let capability = name.ok().and_then(|name| Capability::parse(&name)).ok_or_else(|| {
        ApiError::not_found("no such capability; there are quota, slot, request, tier and sale")
    })?;
    let assessed = assess(&app).await.into_iter().find(|(assessed, _)| *assessed == capability);
    let (_, unready) = assessed.ok_or_else(|| {
        let name = capability.name();
        ApiError::not_found(format!("the roles of this process do not serve {name}; look at WEIR_ROLES"))
    })?;
    let status = if unready.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    Ok((status, Json(CapabilityResponse::from(unready))).into_response())
}

async fn assess(app: &App) -> Vec<(Capability, Option<Unready>)> {
    let deployment = Deployment::new(&app.settings, &app.engines);
    let is_stopping = app.shutdown.closing().is_cancelled();
    deployment.assess(&app.health.check().await, is_stopping)
}
