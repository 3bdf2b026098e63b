//! Request over HTTP: reads and lists `/v1/requests`. The modules below have submissions, cancellations, the event stream,
//! downstreams' callbacks, the rollout, and the secret of a tenant's webhooks.

pub(crate) mod callback;
pub(crate) mod cancel;
pub(crate) mod events;
pub(crate) mod operators;
pub(crate) mod rollout;
pub(crate) mod submit;
pub(crate) mod tenants;
pub(crate) mod webhook_secret;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use utoipa::{IntoParams, ToSchema};
use weir_core::request::state::RequestStatus;
use weir_core::{RequestId, TenantId};
use weir_queue::rfc3339;
use weir_store::request::{Request, RequestFilter, RequestPage};

use super::events::{ResultEncodingFailed, ResultUnreadable};
use super::service::RequestService;
use super::service::hub::StatusSubscription;
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::{PathParam, Tenant};
use crate::http::openapi::schema;
use crate::http::pagination::{Page, parse_limit};
use crate::peer::{Peer, disconnected};
use crate::settings::parse::duration;

/// Shown to callers in place of a result that cannot be decrypted.
const RESULT_ERROR: &str =
    "The result is encrypted with a key that this server does not have; its operator can add the key again";

/// How long a call may wait for a change.
const WAIT_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusResponse {
    #[serde(flatten)]
    summary: SummaryResponse,
    /// What the downstream answered: its JSON, or its text as a JSON string. null until the status is `COMPLETED`.
    #[schema(required = true, value_type = Value)]
    result: Option<Box<RawValue>>,
    /// Only if the server cannot decrypt the result: why `result` is null all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    result_error: Option<&'static str>,
}

/// An item of a list: everything but the result, which may be large.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = RequestSummary)]
pub(crate) struct SummaryResponse {
    request_id: uuid::Uuid,
    #[schema(value_type = schema::RequestStatus)]
    status: &'static str,
    /// Why it failed, or why its last attempt did, for programs: such as `DOWNSTREAM_REJECTED` or `DOWNSTREAM_TIMEOUT`.
    #[schema(required = true)]
    failure_code: Option<String>,
    /// The same as text for people.
    #[schema(required = true)]
    failure_message: Option<String>,
    /// How many calls to the downstream were started.
    #[schema(examples(1))]
    attempts: u32,
    accepted_at: jiff::Timestamp,
    /// When the request last changed.
    updated_at: jiff::Timestamp,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct GetQuery {
    /// How long to wait for a change, such as `500ms` or `10s`. At most 30 seconds are waited.
    #[param(value_type = String, required = false, example = "10s")]
    wait: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Only requests with this status.
    #[param(value_type = schema::RequestStatus, required = false)]
    status: Option<String>,
    /// The most items of a page.
    #[param(value_type = u32, required = false, minimum = 1, maximum = 1000, default = 100)]
    limit: Option<String>,
    /// The `nextCursor` of the page before. Leave it out for the first page.
    #[param(value_type = uuid::Uuid, required = false)]
    cursor: Option<String>,
}

/// Read a request.
///
/// The status of a request. With `wait` the response comes when its status changes, at once when it is final, and at
/// the latest after that time. So a caller can follow a request without polling in vain: ask with `wait`, again and
/// again, until `status` is final.
///
/// Needs the scope `requests:read` and a token with `tenant_id`.
#[utoipa::path(
    get,
    path = "/v1/requests/{requestId}",
    tag = "request",
    params(("requestId" = uuid::Uuid, Path, description = "Which request: the `requestId` of its 202."), GetQuery),
    responses(
        (status = 200, description = "The request.", body = StatusResponse),
        (
            status = 404,
            description = "The tenant has no such request: the id is wrong, another tenant's, or was purged.",
        ),
    ),
)]
pub(crate) async fn get_request(
    Tenant(tenant): Tenant,
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    id: PathParam,
    query: Result<Query<GetQuery>, QueryRejection>,
) -> Result<Json<StatusResponse>, ApiError> {
    let id = parse_id(id)?;
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let wait = query.wait.as_deref().map_or(Ok(Duration::ZERO), parse_wait)?;
    let request = if wait.is_zero() {
        app.requests.find_now(&tenant, id).await?.ok_or_else(|| unknown(id))?
    } else {
        find_changed(&app, &tenant, id, wait, peer.as_deref()).await?
    };
    Ok(Json(describe(&app.requests, request)?))
}

/// List the tenant's requests.
///
/// The requests of the token's tenant, the newest first, without their results. Pass `nextCursor` as `cursor` until it
/// is null.
///
/// Needs the scope `requests:read` and a token with `tenant_id`.
#[utoipa::path(
    get,
    path = "/v1/requests",
    tag = "request",
    params(ListQuery),
    responses((status = 200, description = "One page.", body = Page<SummaryResponse>)),
)]
pub(crate) async fn list_requests(
    Tenant(tenant): Tenant,
    State(app): State<Arc<App>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Page<SummaryResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let status = query.status.as_deref().map(parse_status).transpose()?;
    let limit = parse_limit(query.limit.as_deref())?;
    let before = query.cursor.as_deref().map(parse_cursor).transpose()?;
    // One more than requested shows whether there is a next page.
    let filter = RequestFilter::of_tenant(&tenant, status);
    let RequestPage { requests, next_before } = app.requests.list(&filter, before, limit + 1).await?;
    let items = requests.into_iter().map(|request| summarize(app.requests.open_texts(request))).collect();
    let page = Page::cut(items, limit, |item: &SummaryResponse| item.request_id.to_string());
    Ok(Json(page.or_next_cursor(next_before.map(|id| id.to_string()))))
}

async fn find(app: &App, tenant: &TenantId, id: RequestId) -> Result<Request, ApiError> {
    app.requests.find(tenant, id).await?.ok_or_else(|| unknown(id))
}

/// The request after its next change, or unchanged if none comes in time.
async fn find_changed(
    app: &App,
    tenant: &TenantId,
    id: RequestId,
    wait: Duration,
    peer: Option<&Peer>,
) -> Result<Request, ApiError> {
    let deadline = tokio::time::Instant::now() + wait;
    let mut subscription = subscribe(app, tenant, id)?;
    let request = find(app, tenant, id).await?;
    if request.status.is_final() {
        return Ok(request);
    }
    let _permit = app.address_limits.acquire_long_lived()?;
    let changed = tokio::select! {
        changed = app.requests.next_change(&mut subscription, request.status, deadline, app.shutdown.closing()) => changed?,
        () = disconnected(peer) => None,
    };
    Ok(changed.unwrap_or(request))
}

/// Subscribes to a request. Must come before the request is read, so that no change in between is missed.
fn subscribe(app: &App, tenant: &TenantId, id: RequestId) -> Result<StatusSubscription, ApiError> {
    let subscription = app.requests.hub().subscribe(id, tenant);
    subscription.map_err(|error| ApiError::unavailable(error.to_string()))
}

/// A result that cannot be decrypted does not hide the rest of the request.
fn describe(service: &RequestService, request: Request) -> Result<StatusResponse, ApiError> {
    let (result, result_error) = match service.result(&request) {
        Ok(result) => (result.map(as_json).transpose()?, None),
        Err(error) => {
            ResultUnreadable { id: request.id, error: &error }.emit();
            (None, Some(RESULT_ERROR))
        }
    };
    Ok(StatusResponse { summary: summarize(service.open_texts(request)), result, result_error })
}

/// JSON is returned unchanged; anything else becomes a JSON string.
fn as_json(result: Vec<u8>) -> Result<Box<RawValue>, ApiError> {
    if let Ok(json) = serde_json::from_slice::<&RawValue>(&result) {
        return Ok(json.to_owned());
    }
    to_raw_value(&String::from_utf8_lossy(&result)).map_err(|error| {
        ResultEncodingFailed { error: &error }.emit();
        ApiError::internal()
    })
}

fn summarize(request: Request) -> SummaryResponse {
    let (failure_code, failure_message) =
        request.failure.map(|failure| (failure.code, failure.message)).unzip();
    SummaryResponse {
        request_id: *request.id.as_uuid(),
        status: request.status.as_str(),
        failure_code,
        failure_message,
        attempts: request.attempts,
        accepted_at: rfc3339(request.accepted_at),
        updated_at: rfc3339(request.updated_at),
    }
}

fn parse_wait(text: &str) -> Result<Duration, ApiError> {
    let wait = if matches!(text, "0" | "0s") { Some(Duration::ZERO) } else { duration(text) };
    wait.map(|wait| wait.min(WAIT_MAX)).ok_or_else(|| {
        ApiError::invalid_field("wait", "must be a duration such as 500ms or 10s; at most 30s are waited")
    })
}

fn parse_status(text: &str) -> Result<RequestStatus, ApiError> {
    RequestStatus::parse(text).ok_or_else(|| {
        let names = RequestStatus::ALL.map(RequestStatus::as_str).join(", ");
        ApiError::invalid_field("status", format!("must be one of {names}"))
    })
}

fn parse_cursor(text: &str) -> Result<RequestId, ApiError> {
    RequestId::parse(text).ok_or_else(|| {
        ApiError::invalid_field("cursor", "must be the nextCursor of a page; leave it out for the first")
    })
}

/// An invalid id is answered like one of no request.
fn parse_id(path: PathParam) -> Result<RequestId, ApiError> {
    let id = path.0.ok().and_then(|text| RequestId::parse(&text));
    id.ok_or_else(|| ApiError::not_found("No request has such an id; GET /v1/requests lists yours"))
}

fn unknown(id: RequestId) -> ApiError {
    ApiError::not_found(format!("You have no request with the id {id}; GET /v1/requests lists yours"))
}
