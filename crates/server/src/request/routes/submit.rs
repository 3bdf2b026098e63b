//! Submissions: `POST /v1/requests`.

mod callback_url;
mod idempotency_key;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use weir_core::quota::QuotaLimits;
use weir_core::request::canonical::{CanonicalJson, Fingerprint};
use weir_core::{IdempotencyKey, RequestType, TenantId};
use weir_queue::rfc3339;
use weir_store::request::{SubmitOutcome, SubmitReceipt, TenantWindow};

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::Tenant;
use crate::http::idempotency_key::{IdempotencyKeyHeader, mark_replayed};
use crate::http::openapi::schema;
use crate::http::rate_limit_headers::{RateLimitHeaders, seconds_up};
use crate::request::service::{Submission, SubmitError};
use crate::telemetry::request_context::RequestContext;

/// The name of the limit in rate-limit headers.
const POLICY: &str = "request";

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(
    json!({"idempotencyKey": "order-4711", "requestType": "payment", "payload": {"amount": 12.5, "currency": "EUR"}})
))]
pub(crate) struct CreateRequest {
    /// Your name for this submission. Required, here or in the header `Idempotency-Key`.
    #[schema(value_type = Option<schema::IdempotencyKey>)]
    idempotency_key: Option<Box<str>>,
    #[schema(value_type = schema::RequestType)]
    request_type: Box<str>,
    /// Any JSON value, `null` too, nested at most 100 levels deep. It is stored encrypted and forwarded unchanged.
    #[schema(value_type = Value)]
    payload: Box<RawValue>,
    /// Receives a signed webhook when the request is final. `http` or `https`, without credentials, and not to a private
    /// or loopback address. It is not compared when a submission is repeated.
    #[schema(value_type = Option<String>, format = "uri", max_length = 2048, pattern = "^[Hh][Tt][Tt][Pp][Ss]?:")]
    callback_url: Option<Box<str>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct CreateResponse {
    /// The id of the request.
    request_id: uuid::Uuid,
    #[schema(value_type = schema::RequestStatus)]
    status: &'static str,
    /// When the request was accepted.
    accepted_at: jiff::Timestamp,
}

/// Submit a request.
///
/// Accepts a request for work that is done later, once per key and tenant. A 202 is durable: the request will become
/// final, even if every server is killed right after.
///
/// Sent again within 24 hours with the same `idempotencyKey`, the same `requestType` and an equal `payload`, it is
/// answered with the same request and its current status, and `Idempotent-Replayed: true`. Payloads are equal when they
/// are equal JSON values: the order of fields, spacing and the spelling of numbers (1 and 1.0) do not matter. Another
/// payload or type under the same key is 409.
///
/// The key may stand in the header `Idempotency-Key` instead, bare or in double quotes; if both are there they must
/// agree. After any response that leaves doubt, send the same call again.
///
/// Needs the scope `requests:create` and a token with `tenant_id`.
#[utoipa::path(
    post,
    path = "/v1/requests",
    tag = "request",
    params(
        (
            "Idempotency-Key" = Option<String>, Header, nullable = false,
            description = "Stands in for the field `idempotencyKey`, bare or in double quotes.",
            example = "order-4711",
        ),
    ),
    request_body = CreateRequest,
    responses(
        (
            status = 202,
            description = "Accepted, now or before. Keep `requestId`.",
            body = CreateResponse,
            headers(
                ("Idempotent-Replayed" = bool, description = "`true` if it was accepted before; absent otherwise."),
            ),
        ),
        (
            status = 400,
            description = "A field is missing or wrong, the two keys differ, or the payload is nested more than 100 \
                levels deep, names a field twice or is otherwise not the same to every reader. The message \
                names the field. Nothing was accepted.",
        ),
        (
            status = 409,
            description = "`IDEMPOTENCY_PAYLOAD_CONFLICT`: the key was used for another payload or type within 24 \
                hours. Nothing was accepted; use a new key for a new request.",
        ),
        (
            status = 429,
            description = "The tenant has submitted as many new requests in this minute as it may \
                (`request.tenant_limit`). Nothing was accepted. Requests that were accepted before are still \
                answered.",
            headers(("RateLimit")),
        ),
        (
            status = 503,
            description = "The store did not answer in time, too many calls are waiting, an operator has switched \
                requests off, or the rollout has not reached this tenant; the message says which. Wait \
                `Retry-After` seconds and send the same call again: the key makes that safe.",
        ),
    ),
)]
pub(crate) async fn create_request(
    Tenant(tenant): Tenant,
    State(app): State<Arc<App>>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    Json(request): Json<CreateRequest>,
) -> Result<Response, ApiError> {
    let submission = parse(request, key, tenant, app.settings.request.allow_private)?;
    let (tenant, key) = (submission.tenant.clone(), submission.key.clone());
    match app.requests.submit(submission).await {
        Ok(SubmitOutcome::Accepted(receipt)) => Ok(accepted(receipt)),
        Ok(SubmitOutcome::Replayed(receipt)) => {
            let mut response = accepted(receipt);
            mark_replayed(response.headers_mut());
            Ok(response)
        }
        Ok(SubmitOutcome::Conflict) => Err(conflict(&key)),
        Ok(SubmitOutcome::Limited { limits, retry_after }) => Err(limited(&tenant, limits, retry_after)),
        Err(SubmitError::Disabled) => Err(ApiError::unavailable(
            "An operator has switched requests off; nothing was done, try again later",
        )),
        Err(SubmitError::NotAccepting) => Err(ApiError::unavailable(
            "An operator lets no new requests in while accepted ones are finished; nothing was done, try again later",
        )),
        Err(SubmitError::NotInRollout) => Err(ApiError::unavailable(format!(
            "Requests are switched on tenant by tenant, and not for {tenant} yet; nothing was done, try again later"
        ))),
        Err(SubmitError::Store(error)) => Err(error.into()),
    }
}

fn parse(
    request: CreateRequest,
    header_key: Option<String>,
    tenant: TenantId,
    allow_private: bool,
) -> Result<Submission, ApiError> {
    let CreateRequest { idempotency_key, request_type, payload, callback_url } = request;
    let key = idempotency_key::resolve(idempotency_key.as_deref(), header_key.as_deref())?;
    let request_type = RequestType::parse(request_type)
        .map_err(|problem| ApiError::invalid_field("requestType", problem))?;
    let callback_url = callback_url.map(|url| callback_url::parse(&url, allow_private)).transpose()?;
    let canonical = CanonicalJson::parse(payload.get().as_bytes())
        .map_err(|problem| ApiError::invalid_field("payload", problem))?;
    let fingerprint = Fingerprint::new(&request_type, &canonical);
    let payload = Bytes::from(Box::<str>::from(payload).into_boxed_bytes());
    let trace = RequestContext::current_trace();
    Ok(Submission { tenant, key, request_type, payload, fingerprint, callback_url, trace })
}

fn accepted(receipt: SubmitReceipt) -> Response {
    let body = CreateResponse {
        request_id: *receipt.id.as_uuid(),
        status: receipt.status.as_str(),
        accepted_at: rfc3339(receipt.accepted_at),
    };
    let mut response = (StatusCode::ACCEPTED, Json(body)).into_response();
    if let Some(TenantWindow { limits, remaining, reset_after }) = receipt.window {
        rate_limit(limits, remaining, reset_after).write(response.headers_mut());
    }
    response
}

fn rate_limit(limits: QuotaLimits, remaining: u32, reset_after: Duration) -> RateLimitHeaders {
    let (limit, window) = (limits.rate_limit(), limits.window());
    RateLimitHeaders { policy: POLICY, limit, window, remaining, reset_after }
}

fn conflict(key: &IdempotencyKey) -> ApiError {
    let message = format!(
        "The idempotencyKey {key} was used for another payload or requestType within the last 24 h; \
         use a new key for a new request"
    );
    ApiError::conflict("IDEMPOTENCY_PAYLOAD_CONFLICT", message)
}

fn limited(tenant: &TenantId, limits: QuotaLimits, retry_after: Duration) -> ApiError {
    let limit = limits.rate_limit();
    let limit_state = rate_limit(limits, 0, retry_after);
    // Capacity for these headers and those that are added later.
    let mut headers = HeaderMap::with_capacity(12);
    limit_state.write(&mut headers);
    let (wait, minutes) = (seconds_up(retry_after).max(1), limits.time_window_minutes());
    let message = format!(
        "Rate limit exceeded: {tenant} may submit {limit} new requests per {minutes} min; try again in {wait} s"
    );
    ApiError::rate_limited(message, wait).with_headers(headers)
}
