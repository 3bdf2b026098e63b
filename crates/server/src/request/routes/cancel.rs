//! Cancellations: `POST /v1/requests/{requestId}/cancel`.

use std::sync::Arc;

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use weir_core::RequestId;
use weir_core::request::state::RequestStatus;
use weir_store::request::CancelOutcome;

use super::{parse_id, unknown};
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::{PathParam, Tenant};
use crate::http::openapi::schema;

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CancelResponse {
    request_id: uuid::Uuid,
    #[schema(value_type = schema::RequestStatus)]
    status: &'static str,
}

/// Cancel a request.
///
/// The request is not called any more and ends as `CANCELLED`. A call that is under way is not interrupted: the downstream may do
/// the work, but what it answers, and its callback, are thrown away, and no webhook is sent.
///
/// If the answer is lost, send the call again: `ALREADY_FINAL` with the status `CANCELLED` in its message says that it is done.
///
/// Needs the scope `requests:create` and a token with `tenant_id`.
#[utoipa::path(
    post,
    path = "/v1/requests/{requestId}/cancel",
    tag = "request",
    params(("requestId" = uuid::Uuid, Path, description = "Which request: the `requestId` of its 202.")),
    responses(
        (status = 200, description = "The request is cancelled.", body = CancelResponse),
        (
            status = 404,
            description = "The tenant has no such request: the id is wrong, another tenant's, or was purged.",
        ),
        (
            status = 409,
            description = "`ALREADY_FINAL`: the request had ended before, as the message says; nothing has changed.",
        ),
    ),
)]
pub(crate) async fn cancel_request(
    Tenant(tenant): Tenant,
    State(app): State<Arc<App>>,
    id: PathParam,
) -> Result<Json<CancelResponse>, ApiError> {
    let id = parse_id(id)?;
    match app.requests.cancel(&tenant, id).await? {
        CancelOutcome::Cancelled => {
            let status = RequestStatus::Cancelled.as_str();
            Ok(Json(CancelResponse { request_id: *id.as_uuid(), status }))
        }
        CancelOutcome::AlreadyFinal(status) => Err(already_final(id, status)),
        CancelOutcome::Unknown => Err(unknown(id)),
    }
}

fn already_final(id: RequestId, status: RequestStatus) -> ApiError {
    let message = format!("The request {id} is {} already and cannot be cancelled", status.as_str());
    ApiError::conflict("ALREADY_FINAL", message)
}
