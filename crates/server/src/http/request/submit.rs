//! Submissions: `POST /v1/requests`.

mod callback_url;
mod key;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use weir_core::quota::Limits;
use weir_core::request::canonical::{Canonical, Fingerprint};
use weir_core::{IdempotencyKey, RequestType, TenantId};
use weir_queue::sms::rfc3339;
use weir_store::request::{Receipt, SubmitOutcome};

use super::super::body::Json;
use super::super::error::ApiError;
use super::super::identity::Tenant;
use super::super::rate_limit_headers::{RateLimitHeaders, seconds_up};
use super::super::request_scope::REQUEST_ID;
use crate::app::App;
use crate::service::request::{Submission, SubmitError};

/// Tells that an answer is of a request that was accepted before.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The name of the limit in rate-limit headers.
const POLICY: &str = "request";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CreateRequest {
    idempotency_key: Option<Box<str>>,
    request_type: Box<str>,
    /// Any JSON value, `null` too, as it was spelled.
    payload: Box<RawValue>,
    callback_url: Option<Box<str>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct CreateResponse {
    request_id: uuid::Uuid,
    status: &'static str,
    accepted_at: jiff::Timestamp,
}

/// What the headers of a submission say.
#[derive(Debug)]
pub(crate) struct Headers {
    key: Option<String>,
    trace: Option<HeaderValue>,
}

impl FromRequestParts<Arc<App>> for Headers {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _app: &Arc<App>) -> Result<Self, ApiError> {
        Ok(Self { key: key::of_header(&parts.headers)?, trace: parts.headers.get(REQUEST_ID).cloned() })
    }
}

/// `POST /v1/requests`
pub(crate) async fn create_request(
    Tenant(tenant): Tenant,
    State(app): State<Arc<App>>,
    Headers { key, trace }: Headers,
    Json(request): Json<CreateRequest>,
) -> Result<Response, ApiError> {
    let submission = parse(request, key, tenant, app.settings.request.allow_private)?;
    let (tenant, key) = (submission.tenant.clone(), submission.key.clone());
    match app.requests.submit(submission).await {
        Ok(SubmitOutcome::Accepted(receipt)) => {
            tell_of_accepted(&receipt, &tenant, &key, trace.as_ref());
            Ok(accepted(receipt))
        }
        Ok(SubmitOutcome::Replayed(receipt)) => {
            let mut response = accepted(receipt);
            response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
            Ok(response)
        }
        Ok(SubmitOutcome::Conflict) => Err(conflict(&key)),
        Ok(SubmitOutcome::Limited { limits, retry_after }) => Err(limited(&tenant, limits, retry_after)),
        Err(SubmitError::SwitchedOff) => Err(ApiError::unavailable(
            "An operator has switched requests off; nothing was done, try again later",
        )),
        Err(SubmitError::NotReached) => Err(ApiError::unavailable(format!(
            "Requests are switched on tenant by tenant, and not for {tenant} yet; nothing was done, try again later"
        ))),
        Err(SubmitError::Broken(error)) => Err(error.into()),
    }
}

fn parse(
    request: CreateRequest,
    header_key: Option<String>,
    tenant: TenantId,
    allow_private: bool,
) -> Result<Submission, ApiError> {
    let CreateRequest { idempotency_key, request_type, payload, callback_url } = request;
    let key = key::agreed(idempotency_key.as_deref(), header_key.as_deref())?;
    let request_type = RequestType::parse(request_type)
        .map_err(|problem| ApiError::invalid_field("requestType", problem))?;
    let callback_url = callback_url.map(|url| callback_url::parse(&url, allow_private)).transpose()?;
    let canonical = Canonical::of(payload.get().as_bytes())
        .map_err(|problem| ApiError::invalid_field("payload", problem))?;
    let fingerprint = Fingerprint::of(&request_type, &canonical);
    let payload = Bytes::from(Box::<str>::from(payload).into_boxed_bytes());
    Ok(Submission { tenant, key, request_type, payload, fingerprint, callback_url })
}

fn accepted(receipt: Receipt) -> Response {
    let body = CreateResponse {
        request_id: *receipt.id.as_uuid(),
        status: receipt.status.as_str(),
        accepted_at: rfc3339(receipt.accepted_at),
    };
    (StatusCode::ACCEPTED, Json(body)).into_response()
}

/// The line by which a request is found in the logs. What it asks for is not in it.
fn tell_of_accepted(receipt: &Receipt, tenant: &TenantId, key: &IdempotencyKey, trace: Option<&HeaderValue>) {
    let Receipt { id, status, .. } = receipt;
    tracing::info!(
        target: "weir::request",
        traceId = trace.and_then(|id| id.to_str().ok()),
        requestId = %id,
        idempotencyKey = key.as_str(),
        tenantId = tenant.as_str(),
        statusTransition = %format_args!("NEW->{}", status.as_str()),
        "request accepted"
    );
}

fn conflict(key: &IdempotencyKey) -> ApiError {
    let message = format!(
        "The idempotencyKey {key} was used for another payload or requestType within the last 24 h; \
         use a new key for a new request"
    );
    ApiError::conflict("IDEMPOTENCY_PAYLOAD_CONFLICT", message)
}

fn limited(tenant: &TenantId, limits: Limits, retry_after: Duration) -> ApiError {
    let (limit, window) = (limits.rate_limit(), limits.window());
    let standing = RateLimitHeaders { policy: POLICY, limit, window, remaining: 0, reset_after: retry_after };
    // Room for these and for what the envelope and the server add.
    let mut headers = HeaderMap::with_capacity(12);
    standing.write(&mut headers);
    let (wait, minutes) = (seconds_up(retry_after).max(1), limits.time_window_minutes());
    let message = format!(
        "Rate limit exceeded: {tenant} may submit {limit} new requests per {minutes} min; try again in {wait} s"
    );
    ApiError::rate_limited(message, wait).with_headers(headers)
}
