//! The rollout of request over HTTP, for the operator: `/admin/request/rollout`.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use weir_core::request::canary::{Percent, PercentError};
use weir_store::request::{Rollout, RolloutChange};

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::request::events::RolloutChanged;

/// A field that is left out stays as it is.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({"canaryPercent": 50})))]
pub(crate) struct RolloutRequest {
    processing_enabled: Option<bool>,
    accepting_enabled: Option<bool>,
    reconciler_enabled: Option<bool>,
    #[schema(value_type = Option<u8>, maximum = 100)]
    canary_percent: Option<serde_json::Value>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Rollout)]
pub(crate) struct RolloutResponse {
    /// Whether requests are accepted and processed.
    #[schema(examples(true))]
    processing_enabled: bool,
    /// Whether new submissions are accepted. While it is off workers go on with what was accepted, and reads, cancellations and
    /// callbacks are answered.
    #[schema(examples(true))]
    accepting_enabled: bool,
    /// Whether stranded requests are published to the broker again.
    #[schema(examples(true))]
    reconciler_enabled: bool,
    /// How many tenants out of a hundred may submit.
    #[schema(maximum = 100, examples(50))]
    canary_percent: u8,
}

/// Read the rollout.
///
/// The switches as an operator has set them, else those of the settings. At most 5 seconds old.
#[utoipa::path(
    get,
    path = "/admin/request/rollout",
    tag = "request",
    responses((status = 200, description = "The switches.", body = RolloutResponse)),
)]
pub(crate) async fn get_rollout(State(app): State<Arc<App>>) -> Result<Json<RolloutResponse>, ApiError> {
    Ok(Json(describe(app.requests.rollout().get().await?)))
}

/// Change the rollout.
///
/// Applies at once on this server, within 5 seconds on the others. A field that is left out stays as it is. Accepted requests
/// stay accepted.
///
/// A fixed hash of their names selects the tenants of a canary: a selected tenant stays selected while the percentage grows.
#[utoipa::path(
    put,
    path = "/admin/request/rollout",
    tag = "request",
    request_body = RolloutRequest,
    responses((status = 200, description = "The switches as they are now.", body = RolloutResponse)),
)]
pub(crate) async fn put_rollout(
    State(app): State<Arc<App>>,
    Json(request): Json<RolloutRequest>,
) -> Result<Json<RolloutResponse>, ApiError> {
    let canary = request.canary_percent.map(parse_percent).transpose()?;
    let RolloutRequest { processing_enabled, accepting_enabled, reconciler_enabled, .. } = request;
    let change = RolloutChange { processing_enabled, accepting_enabled, reconciler_enabled, canary };
    let before = app.requests.rollout().get().await?;
    let rollout = app.requests.rollout().change(change).await?;
    RolloutChanged { rollout, before }.emit();
    Ok(Json(describe(rollout)))
}

fn parse_percent(value: serde_json::Value) -> Result<Percent, ApiError> {
    let percent = value.as_u64().and_then(|percent| u8::try_from(percent).ok());
    let percent = percent.ok_or(PercentError).and_then(Percent::new);
    percent.map_err(|problem| ApiError::invalid_field("canaryPercent", problem))
}

const fn describe(rollout: Rollout) -> RolloutResponse {
    RolloutResponse {
        processing_enabled: rollout.processing_enabled,
        accepting_enabled: rollout.accepting_enabled,
        reconciler_enabled: rollout.reconciler_enabled,
        canary_percent: rollout.canary.get(),
    }
}
