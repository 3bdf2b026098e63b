//! Requests of every tenant, for the operator: `/admin/requests`.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use weir_core::{RequestId, RequestType, TenantId, Timestamp};
use weir_queue::rfc3339;
use weir_store::request::{Request, RequestFilter, RequestPage, UnfinishedRequest};

use super::{StatusResponse, SummaryResponse, describe, parse_cursor, parse_status, summarize};
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::http::pagination::{Page, parse_limit};
use crate::request::service::operators::{UnfinishedFilter, UnfinishedState};

/// What operators see of a request beside what its tenant sees.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = OperatorRequestSummary)]
pub(crate) struct OperatorSummary {
    #[serde(flatten)]
    summary: SummaryResponse,
    #[schema(examples("acme"))]
    tenant_id: String,
    #[schema(examples("payment"))]
    request_type: String,
    /// The trace that the request belongs to, 32 hexadecimal digits, as log lines name it; null if it is not known.
    #[schema(required = true)]
    trace_id: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = OperatorRequest)]
pub(crate) struct OperatorRequestResponse {
    #[serde(flatten)]
    status: StatusResponse,
    tenant_id: String,
    request_type: String,
    /// As in the list.
    #[schema(required = true)]
    trace_id: Option<String>,
    #[schema(required = true)]
    callback_url: Option<String>,
    /// The payload with sensitive fields (`request.sensitive_fields`) redacted, as text.
    payload: String,
    /// The job, while the request has not ended and its job is among the first 10,000 of its downstream; else null.
    #[schema(required = true)]
    job: Option<JobResponse>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = UnfinishedRequest)]
pub(crate) struct UnfinishedResponse {
    #[serde(flatten)]
    request: OperatorSummary,
    job: JobResponse,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = RequestJob)]
pub(crate) struct JobResponse {
    /// Empty for the default downstream.
    #[schema(examples("bank"))]
    downstream: String,
    /// `pendingEnqueue`, `waiting`, `running`, `workerLost`, `retrying`, `deferred` or `awaitingCallback`.
    #[schema(examples("retrying"))]
    state: &'static str,
    /// When it is due; of a job that a worker has, when its lease ends.
    due_at: jiff::Timestamp,
    /// Why it has not ended, in a sentence. The wording may change.
    why: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UnfinishedListResponse {
    items: Vec<UnfinishedResponse>,
    /// Whether there may be more than these.
    partial: bool,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct OperatorListQuery {
    /// Only requests with this status.
    #[param(value_type = schema::RequestStatus, required = false)]
    status: Option<String>,
    /// Only requests of this tenant.
    #[param(value_type = String, required = false, example = "acme")]
    tenant: Option<String>,
    /// Only requests of this type.
    #[serde(rename = "type")]
    #[param(value_type = String, required = false, example = "payment")]
    request_type: Option<String>,
    /// The most items of a page.
    #[param(value_type = u32, required = false, minimum = 1, maximum = 1000, default = 100)]
    limit: Option<String>,
    /// The `nextCursor` of the page before. Leave it out for the first page.
    #[param(value_type = uuid::Uuid, required = false)]
    cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct UnfinishedQuery {
    /// Only requests for this downstream; empty for the default one.
    #[param(value_type = String, required = false, example = "bank")]
    downstream: Option<String>,
    /// Only requests of this tenant.
    #[param(value_type = String, required = false, example = "acme")]
    tenant: Option<String>,
    /// Only requests of this type.
    #[serde(rename = "type")]
    #[param(value_type = String, required = false, example = "payment")]
    request_type: Option<String>,
    /// The most items.
    #[param(value_type = u32, required = false, minimum = 1, maximum = 1000, default = 100)]
    limit: Option<String>,
}

/// Which unfinished requests are cancelled: those that have all that is given. At least one of the three names must be given.
/// A field that does not exist is refused: a misspelled one would cancel too many.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[schema(examples(json!({"tenant": "acme", "type": "payment", "dryRun": true})))]
pub(crate) struct CancelManyRequest {
    /// Empty for the default downstream.
    downstream: Option<String>,
    tenant: Option<String>,
    #[serde(rename = "type")]
    request_type: Option<String>,
    /// Only count them.
    dry_run: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CancelManyResponse {
    /// How many match.
    #[schema(examples(12))]
    matched: u64,
    /// How many were cancelled: none of a dry run, and fewer than matched if some ended meanwhile.
    #[schema(examples(12))]
    cancelled: u64,
    /// Whether there may be more that match: at most 10,000 are looked at. Call again.
    partial: bool,
}

/// List requests of every tenant.
///
/// The newest first. A filter by status or type looks through 10,000 requests for a page, so a page may have fewer items than
/// `limit`, or none, and still a `nextCursor`.
#[utoipa::path(
    get,
    path = "/admin/requests",
    tag = "request",
    params(OperatorListQuery),
    responses((status = 200, description = "One page.", body = Page<OperatorSummary>)),
)]
pub(crate) async fn list_all_requests(
    State(app): State<Arc<App>>,
    query: Result<Query<OperatorListQuery>, QueryRejection>,
) -> Result<Json<Page<OperatorSummary>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let filter = RequestFilter {
        tenant: query.tenant.map(parse_tenant).transpose()?,
        status: query.status.as_deref().map(parse_status).transpose()?,
        request_type: query.request_type.map(parse_type).transpose()?,
    };
    let limit = parse_limit(query.limit.as_deref())?;
    let before = query.cursor.as_deref().map(parse_cursor).transpose()?;
    let RequestPage { requests, next_before } = app.requests.list(&filter, before, limit + 1).await?;
    let items = requests.into_iter().map(|request| describe_for_operator(&app, request)).collect();
    let page = Page::cut(items, limit, |item: &OperatorSummary| item.summary.request_id.to_string());
    Ok(Json(page.or_next_cursor(next_before.map(|id| id.to_string()))))
}

/// List what has not ended.
///
/// Requests of every tenant that have not ended, with the reason, those first that have been due for longest: what is stuck
/// comes first.
#[utoipa::path(
    get,
    path = "/admin/requests/unfinished",
    tag = "request",
    params(UnfinishedQuery),
    responses((status = 200, description = "The requests.", body = UnfinishedListResponse)),
)]
pub(crate) async fn list_unfinished_requests(
    State(app): State<Arc<App>>,
    query: Result<Query<UnfinishedQuery>, QueryRejection>,
) -> Result<Json<UnfinishedListResponse>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let filter = unfinished_filter(query.downstream, query.tenant, query.request_type)?;
    let list = app.requests.unfinished(&filter, limit).await?;
    let now = app.requests.now();
    let items = list.requests.into_iter().map(|(downstream, one)| UnfinishedResponse {
        job: describe_job(downstream, &one, now),
        request: describe_for_operator(&app, one.request),
    });
    Ok(Json(UnfinishedListResponse { items: items.collect(), partial: list.is_partial }))
}

/// Cancel requests.
///
/// Cancels the unfinished requests that match, of every tenant, as `POST /v1/requests/{requestId}/cancel` does. With `dryRun`
/// they are only counted. This cannot be undone.
#[utoipa::path(
    post,
    path = "/admin/requests/cancel",
    tag = "request",
    request_body = CancelManyRequest,
    responses((status = 200, description = "How many match, and how many were cancelled.", body = CancelManyResponse)),
)]
pub(crate) async fn cancel_requests(
    State(app): State<Arc<App>>,
    Json(request): Json<CancelManyRequest>,
) -> Result<Json<CancelManyResponse>, ApiError> {
    let CancelManyRequest { downstream, tenant, request_type, dry_run } = request;
    if downstream.is_none() && tenant.is_none() && request_type.is_none() {
        return Err(ApiError::invalid(
            "Name a downstream, a tenant or a type: without one all would be cancelled",
        ));
    }
    let filter = unfinished_filter(downstream, tenant, request_type)?;
    let counts = app.requests.cancel_matching(&filter, dry_run).await?;
    Ok(Json(CancelManyResponse {
        matched: counts.matched,
        cancelled: counts.cancelled,
        partial: counts.is_partial,
    }))
}

/// Look at a request of any tenant.
///
/// The same as its tenant sees, with the tenant, the payload, and while it has not ended its job.
#[utoipa::path(
    get,
    path = "/admin/requests/{requestId}",
    tag = "request",
    params(("requestId" = uuid::Uuid, Path, description = "Which request: the `requestId` of its 202.")),
    responses(
        (status = 200, description = "The request.", body = OperatorRequestResponse),
        (status = 404, description = "There is no such request: the id is wrong, or the request was purged."),
    ),
)]
pub(crate) async fn get_any_request(
    State(app): State<Arc<App>>,
    id: PathParam,
) -> Result<Json<OperatorRequestResponse>, ApiError> {
    let unknown = || ApiError::not_found("No request has such an id; GET /admin/requests lists all");
    let id = id.0.ok().and_then(|text| RequestId::parse(&text)).ok_or_else(unknown)?;
    let request = app.requests.find_any(id).await?.ok_or_else(unknown)?;
    let job = if request.status.is_final() { None } else { find_job(&app, &request).await? };
    let payload = app.requests.redacted_payload(&request).unwrap_or_default();
    let OperatorSummary { tenant_id, request_type, trace_id, .. } =
        describe_for_operator(&app, request.clone());
    let callback_url = app.requests.open_texts(request.clone()).callback_url;
    let status = describe(&app.requests, request)?;
    Ok(Json(OperatorRequestResponse {
        status,
        tenant_id,
        request_type,
        trace_id,
        callback_url,
        payload,
        job,
    }))
}

async fn find_job(app: &App, request: &Request) -> Result<Option<JobResponse>, ApiError> {
    let filter = UnfinishedFilter { tenant: Some(request.tenant.clone()), ..UnfinishedFilter::default() };
    let list = app.requests.unfinished(&filter, usize::MAX).await?;
    let found = list.requests.into_iter().find(|(_, one)| one.request.id == request.id);
    Ok(found.map(|(downstream, one)| describe_job(downstream, &one, app.requests.now())))
}

fn unfinished_filter(
    downstream: Option<String>,
    tenant: Option<String>,
    request_type: Option<String>,
) -> Result<UnfinishedFilter, ApiError> {
    Ok(UnfinishedFilter {
        downstream,
        tenant: tenant.map(parse_tenant).transpose()?,
        request_type: request_type.map(parse_type).transpose()?,
    })
}

fn parse_tenant(text: String) -> Result<TenantId, ApiError> {
    TenantId::parse(text).map_err(|problem| ApiError::invalid_field("tenant", problem))
}

fn parse_type(text: String) -> Result<RequestType, ApiError> {
    RequestType::parse(text).map_err(|problem| ApiError::invalid_field("type", problem))
}

fn describe_for_operator(app: &App, request: Request) -> OperatorSummary {
    OperatorSummary {
        tenant_id: request.tenant.to_string(),
        request_type: request.request_type.to_string(),
        trace_id: request.trace.as_ref().map(|trace| trace.parent.trace_id.to_string()),
        summary: summarize(app.requests.open_texts(request)),
    }
}

fn describe_job(downstream: String, one: &UnfinishedRequest, now: Timestamp) -> JobResponse {
    let state = UnfinishedState::of(one, now);
    let due_at = rfc3339(one.claimable_at);
    let name = if downstream.is_empty() {
        "the default downstream".to_owned()
    } else {
        format!("downstream {downstream}")
    };
    let attempts = one.request.attempts;
    let why = match state {
        UnfinishedState::PendingEnqueue => {
            "Kafka has not confirmed it yet; the reconciler publishes it again.".to_owned()
        }
        UnfinishedState::Waiting => format!("Due since {due_at}, and no worker has taken it for {name}."),
        UnfinishedState::Running => {
            format!("A worker calls {name}, attempt {attempts}; its lease ends {due_at}.")
        }
        UnfinishedState::WorkerLost => {
            format!(
                "The worker of attempt {attempts} has not reported since its lease ended {due_at}; another one takes over."
            )
        }
        UnfinishedState::Retrying => {
            let code = one.request.failure.as_ref().map_or("", |failure| failure.code.as_str());
            format!("Attempt {attempts} at {name} failed with {code}; the next one is due {due_at}.")
        }
        UnfinishedState::Deferred => {
            format!("Not called yet: the breaker of {name} is open, or its limits are reached. Due {due_at}.")
        }
        UnfinishedState::AwaitingCallback => {
            format!("{name} answered 202 to attempt {attempts}; its callback is awaited until {due_at}.")
        }
    };
    JobResponse { downstream, state: state.name(), due_at, why: capitalized(why) }
}

fn capitalized(text: String) -> String {
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| first.to_uppercase().chain(characters).collect())
}
