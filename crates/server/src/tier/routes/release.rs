//! Permits over HTTP: `/v1/release`. Checks give them, in `routes/check.rs`.

use std::sync::Arc;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use weir_core::PermitId;

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::openapi::schema;
use crate::tier::service::ReleaseOutcome;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({"permitId": "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10"})))]
pub(crate) struct ReleaseRequest {
    #[schema(value_type = uuid::Uuid)]
    permit_id: Box<str>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ReleaseResponse {
    #[schema(format = "uuid")]
    permit_id: String,
    #[schema(value_type = schema::PolicyName)]
    policy: String,
    #[schema(value_type = schema::LimitKey)]
    key: String,
    /// What is no longer in use.
    #[schema(minimum = 1, examples(1))]
    cost: u32,
}

/// Give a permit back.
///
/// What the permit stands for is no longer in use. Given back again, it answers the same.
#[utoipa::path(
    post,
    path = "/v1/release",
    tag = "limits",
    request_body = ReleaseRequest,
    responses(
        (status = 200, description = "Given back, now or before.", body = ReleaseResponse),
        (status = 404, description = "There is no such permit, or its time was over more than an hour ago."),
        (status = 410, description = "`PERMIT_EXPIRED`: its time was over before it was given back."),
    ),
)]
pub(crate) async fn release_permit(
    State(app): State<Arc<App>>,
    Json(ReleaseRequest { permit_id }): Json<ReleaseRequest>,
) -> Result<Json<ReleaseResponse>, ApiError> {
    let unknown = || {
        ApiError::not_found("There is no such permit; permits are forgotten an hour after their time is over")
    };
    let id = PermitId::parse(&permit_id).ok_or_else(unknown)?;
    match app.tier.release(id).await? {
        ReleaseOutcome::Unknown => Err(unknown()),
        ReleaseOutcome::Expired => {
            let message =
                "The time of the permit was over before it was given back; others may have got its place";
            Err(ApiError::gone("PERMIT_EXPIRED", message))
        }
        ReleaseOutcome::Released { policy, key, cost } => {
            Ok(Json(ReleaseResponse { permit_id: id.to_string(), policy, key, cost }))
        }
    }
}
