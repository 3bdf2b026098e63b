//! The switches of request, for the operator: `/admin/request/rollout`.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use weir_core::request::canary::{OutOfRange, Percent};
use weir_store::request::{Rollout, RolloutChange};

use super::super::body::Json;
use super::super::error::ApiError;
use crate::app::App;

/// What is left out stays as it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RolloutRequest {
    processing_enabled: Option<bool>,
    reconciler_enabled: Option<bool>,
    canary_percent: Option<serde_json::Value>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RolloutResponse {
    processing_enabled: bool,
    reconciler_enabled: bool,
    canary_percent: u8,
}

/// `GET /admin/request/rollout`
pub(crate) async fn get_rollout(State(app): State<Arc<App>>) -> Result<Json<RolloutResponse>, ApiError> {
    Ok(Json(describe(app.requests.switches().get().await?)))
}

/// `PUT /admin/request/rollout`
pub(crate) async fn put_rollout(
    State(app): State<Arc<App>>,
    Json(request): Json<RolloutRequest>,
) -> Result<Json<RolloutResponse>, ApiError> {
    let canary = request.canary_percent.map(parse_percent).transpose()?;
    let RolloutRequest { processing_enabled, reconciler_enabled, .. } = request;
    let change = RolloutChange { processing_enabled, reconciler_enabled, canary };
    let rollout = app.requests.switches().change(change).await?;
    let RolloutResponse { processing_enabled, reconciler_enabled, canary_percent } = describe(rollout);
    tracing::info!(
        processing_enabled,
        reconciler_enabled,
        canary_percent,
        "the rollout of request was changed"
    );
    Ok(Json(describe(rollout)))
}

fn parse_percent(value: serde_json::Value) -> Result<Percent, ApiError> {
    let percent = value.as_u64().and_then(|percent| u8::try_from(percent).ok());
    let percent = percent.ok_or(OutOfRange).and_then(Percent::new);
    percent.map_err(|problem| ApiError::invalid_field("canaryPercent", problem))
}

const fn describe(rollout: Rollout) -> RolloutResponse {
    RolloutResponse {
        processing_enabled: rollout.processing_enabled,
        reconciler_enabled: rollout.reconciler_enabled,
        canary_percent: rollout.canary.get(),
    }
}
