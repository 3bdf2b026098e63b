//! HTTP routes of quota: `/api/config` and `/api/send`.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use weir_core::quota::{Grant, Quota, QuotaLimits, QuotaLimitsError};
use weir_core::{IdempotencyKey, MessageId, Timestamp, UserId};
use weir_queue::rfc3339;
use weir_store::Error;
use weir_store::quota::{EnqueueOutcome, SendMessage, SendOutcome};

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::idempotency_key::{IdempotencyKeyHeader, mark_replayed};
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};
use crate::http::rate_limit_headers::{RateLimitHeaders, seconds_up};
use crate::quota::events::{QuotaConfigured, QuotaDeleted};
use crate::telemetry::request_context::RequestContext;

/// The limit's name in rate limit headers.
const POLICY: &str = "quota";

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = ConfigureQuotaRequest, examples(json!({"userId": "alice", "rateLimit": 50, "timeWindow": 60})))]
pub(crate) struct ConfigureRequest {
    #[serde(alias = "user_id")]
    #[schema(value_type = schema::UserId)]
    user_id: Box<str>,
    /// Messages allowed in a window.
    #[serde(alias = "rate_limit")]
    #[schema(value_type = u32, minimum = 1, maximum = 2_147_483_647)]
    rate_limit: Positive,
    /// Length of the window in minutes.
    #[serde(alias = "time_window")]
    #[schema(value_type = u32, minimum = 1, maximum = 2_147_483_647)]
    time_window: Positive,
    /// Whether the present window and its count stay. A count above the new limit stays, too, and sends wait for the
    /// window's end.
    #[serde(default, alias = "keep_count")]
    keep_count: bool,
}

/// A number within the range of limits. The error for anything else names the range.
#[derive(Clone, Copy, Debug)]
struct Positive(u32);

impl<'de> Deserialize<'de> for Positive {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Accepts any JSON value first, so that a string or a fraction gets the same error as a number out of range.
        let value = serde_json::Value::deserialize(deserializer)?;
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        let in_range = number.filter(|number| (1..=QuotaLimits::MAX).contains(number));
        in_range.map(Self).ok_or_else(|| serde::de::Error::custom(QuotaLimitsError))
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct QuotaResponse {
    #[schema(value_type = schema::UserId)]
    user_id: Box<str>,
    /// Messages allowed in a window.
    #[schema(minimum = 1, maximum = 2_147_483_647, examples(50))]
    rate_limit: u32,
    /// Length of the window in minutes.
    #[schema(minimum = 1, maximum = 2_147_483_647, examples(60))]
    time_window: u32,
    /// Messages counted in the present window; 0 once it has passed.
    #[schema(maximum = 2_147_483_647, examples(17))]
    current_count: u32,
    /// When the last window began.
    last_refresh_time: jiff::Timestamp,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SendMessageRequest, examples(json!({"userId": "alice", "message": "Your code is 4711"})))]
pub(crate) struct SendRequest {
    #[serde(alias = "user_id")]
    #[schema(value_type = schema::UserId)]
    user_id: Box<str>,
    /// The text to deliver. Limited only by the size of the body, 1 MiB.
    #[schema(value_type = String, min_length = 1)]
    message: Box<str>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SendMessageResponse)]
struct SendResponse<'a> {
    #[schema(value_type = schema::SendStatus)]
    status: &'static str,
    /// A version 7 UUID, so ids sort by time of acceptance. The delivery log and dead letters name it.
    message_id: uuid::Uuid,
    #[schema(value_type = schema::UserId)]
    user_id: &'a str,
    /// Messages left in this window.
    #[schema(maximum = 2_147_483_646, examples(49))]
    remaining: u32,
    /// When the window ends.
    reset_at: jiff::Timestamp,
}

/// Configure a user's quota.
///
/// Creates or replaces a user's quota. Either way the count starts again at 0 and a new window begins, so
/// **configuring again gives the user a full quota**. With `"keepCount": true` window and count stay as they are and only
/// the limits change.
///
/// The `snake_case` spellings `user_id`, `rate_limit`, `time_window` and `keep_count` are accepted as well. Responses are always
/// camelCase.
///
/// The new limits apply at once on the server that received them and within 1 s on the others.
#[utoipa::path(
    post,
    path = "/api/config",
    tag = "quota",
    request_body = ConfigureRequest,
    responses(
        (
            status = 200,
            description = "The quota as saved. It is durable: a restart keeps it.",
            body = QuotaResponse,
        ),
    ),
)]
pub(crate) async fn configure_quota(
    State(app): State<Arc<App>>,
    Json(request): Json<ConfigureRequest>,
) -> Result<Response, ApiError> {
    let user = parse_user(request.user_id)?;
    let limits = QuotaLimits::new(request.rate_limit.0, request.time_window.0)
        .map_err(|problem| ApiError::invalid_field("rateLimit and timeWindow", problem))?;
    let before = app.quota.find(&user).await?.map(|quota| quota.limits);
    let quota = app.quota.configure(&user, limits, request.keep_count).await?;
    QuotaConfigured { user: &user, limits, before }.emit();
    Ok(Json(describe(&user, &quota)).into_response())
}

/// List quotas.
///
/// In the order of the user ids, each in its present window as `GET /api/config/{userId}` shows it. Users who are
/// configured or deleted meanwhile may or may not be listed.
#[utoipa::path(
    get,
    path = "/api/config",
    tag = "quota",
    params(PageQuery),
    responses(
        (status = 200, description = "A page of quotas.", body = Page<QuotaResponse>),
        (status = 400, description = "`limit` or `cursor` is not valid."),
    ),
)]
pub(crate) async fn list_quotas(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<Page<QuotaResponse>>, ApiError> {
    let Query(PageQuery { limit, cursor }) =
        query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(limit.as_deref())?;
    let after = cursor
        .map(|cursor| UserId::parse(cursor).map_err(|problem| ApiError::invalid_field("cursor", problem)))
        .transpose()?;
    // One more than asked for says whether there is a next page.
    let listed = app.quota.list(after.as_ref(), limit + 1).await?;
    let items = listed.iter().map(|(user, quota)| describe(user, quota)).collect();
    Ok(Json(Page::cut(items, limit, |last| last.user_id.to_string())))
}

/// Read a user's quota.
///
/// Returns the quota in its present window. Reading spends nothing.
///
/// After the window has passed, `currentCount` is 0 while `lastRefreshTime` still shows when the old window began. The
/// next send starts the new one.
#[utoipa::path(
    get,
    path = "/api/config/{userId}",
    tag = "quota",
    params(
        (
            "userId" = schema::UserId, Path,
            description = "The user. Percent-encode the id: it may contain `/`, spaces and any other character that \
                is not a control character.",
        ),
    ),
    responses((status = 200, description = "The quota in its present window.", body = QuotaResponse),
        (
            status = 400,
            description = "The userId in the path is too long or contains a control character. Nothing was changed.",
        ),
        (
            status = 404,
            description = "The user has no quota. Configure it first (`POST /api/config`), or check the spelling of \
                the userId.",
        ),
    ),
)]
pub(crate) async fn get_quota(State(app): State<Arc<App>>, user: PathParam) -> Result<Response, ApiError> {
    let user = parse_path(user)?;
    let quota = app.quota.find(&user).await?.ok_or_else(|| not_configured(&user))?;
    Ok(Json(describe(&user, &quota)).into_response())
}

/// Delete a user's quota.
///
/// From then on sends of this user are refused with 404: without a quota a user may not send at all. Messages
/// that were already accepted are still delivered.
#[utoipa::path(
    delete,
    path = "/api/config/{userId}",
    tag = "quota",
    params(
        (
            "userId" = schema::UserId, Path,
            description = "The user. Percent-encode the id: it may contain `/`, spaces and any other character that \
                is not a control character.",
        ),
    ),
    responses((status = 204, description = "Deleted."),
        (
            status = 400,
            description = "The userId in the path is too long or contains a control character. Nothing was changed.",
        ),
        (
            status = 404,
            description = "The user has no quota. Configure it first (`POST /api/config`), or check the spelling of \
                the userId.",
        ),
    ),
)]
pub(crate) async fn delete_quota(
    State(app): State<Arc<App>>,
    user: PathParam,
) -> Result<StatusCode, ApiError> {
    let user = parse_path(user)?;
    let before = app.quota.find(&user).await?.map(|quota| quota.limits);
    if !app.quota.remove(&user).await? {
        return Err(not_configured(&user));
    }
    QuotaDeleted { user: &user, before }.emit();
    Ok(StatusCode::NO_CONTENT)
}

/// Send a message.
///
/// Counts one message against the user's quota and enqueues it, both in one commit: a 200 is counted and will be
/// delivered, even if the server is killed right after. A refused send counts nothing.
///
/// Messages of one user are delivered in the order in which they were accepted.
///
/// With the header `Idempotency-Key` a call can be repeated safely: within 24 hours the same key of the same user gets the
/// same answer, with `Idempotent-Replayed: true`, and no second message, also after a 503. Only accepted sends are
/// remembered: after a 429 or 503 the same key may be accepted. Without the header a call that is repeated counts and
/// delivers twice.
///
/// The `snake_case` spelling `user_id` is accepted as well.
#[utoipa::path(
    post,
    path = "/api/send",
    tag = "quota",
    params(
        (
            "Idempotency-Key" = Option<schema::IdempotencyKey>, Header, nullable = false,
            description = "Your name for this message, bare or in double quotes.",
        ),
    ),
    request_body = SendRequest,
    responses(
        (
            status = 200,
            description = "Accepted, now or before with the same key: counted, durable and enqueued. Note `messageId`. The \
                rate limit headers show how the quota stands now.",
            body = SendResponse,
            headers(
                ("RateLimit"),
                ("Idempotent-Replayed" = bool, description = "`true` if it was accepted before; absent otherwise."),
            ),
        ),
        (
            status = 409,
            description = "`IDEMPOTENCY_PAYLOAD_CONFLICT`: the key was used for another message within 24 hours. Nothing \
                was counted or enqueued; use a new key for a new message.",
        ),
        (
            status = 404,
            description = "The user has no quota. Configure it first (`POST /api/config`), or check the spelling of \
                the userId.",
        ),
        (
            status = 429,
            description = "The window's limit is reached. Nothing was counted or enqueued. Send again \
                after `Retry-After` seconds, or configure a higher limit.",
            headers(("RateLimit")),
        ),
        (
            status = 503,
            description = "The store did not answer in time, or too many calls are waiting. Wait \
                `Retry-After` seconds and send again. The message says whether nothing was sent, or the outcome is \
                unknown: then a retry may deliver the message twice, unless both calls have the same \
                `Idempotency-Key`. `/health` says which engine is down.",
        ),
    ),
)]
pub(crate) async fn send_message(
    State(app): State<Arc<App>>,
    IdempotencyKeyHeader(key): IdempotencyKeyHeader,
    Json(request): Json<SendRequest>,
) -> Result<Response, ApiError> {
    let user = parse_user(request.user_id)?;
    if request.message.is_empty() {
        return Err(ApiError::invalid_field("message", "must not be empty"));
    }
    let key = key
        .map(|key| {
            IdempotencyKey::parse(key).map_err(|problem| ApiError::invalid_field("Idempotency-Key", problem))
        })
        .transpose()?;
    let trace = RequestContext::current_trace();
    let send = SendMessage { user: user.clone(), message: request.message, key: None, trace };
    let outcome = match &key {
        Some(key) => app.quota.send_once(send, key).await,
        None => app.quota.send(send).await,
    };
    let outcome = outcome.map_err(|error| {
        let is_not_sent = matches!(error, Error::NotDone { .. });
        let error = ApiError::from(error);
        if is_not_sent {
            error.with_message("The store is temporarily unavailable; nothing was sent, try again")
        } else {
            error
        }
    })?;
    respond(&user, outcome)
}

fn respond(user: &UserId, outcome: SendOutcome) -> Result<Response, ApiError> {
    match outcome {
        SendOutcome::Accepted { message_id, limits, grant, at } => {
            let mut response = accepted(user, message_id, grant);
            rate_limit_headers(limits, grant.remaining, grant.reset_at, at).write(response.headers_mut());
            Ok(response)
        }
        SendOutcome::Replayed { message_id, grant, row, at } => {
            let mut response = accepted(user, message_id, grant);
            mark_replayed(response.headers_mut());
            if let Some(row) = row {
                let reset_at = row.reset_at().max(at);
                rate_limit_headers(row.limits, row.remaining(), reset_at, at).write(response.headers_mut());
            }
            Ok(response)
        }
        SendOutcome::KeyConflict => Err(ApiError::conflict(
            "IDEMPOTENCY_PAYLOAD_CONFLICT",
            format!(
                "The Idempotency-Key was used for another message to {user} within the last 24 h; use a new key for a new \
                 message"
            ),
        )),
        SendOutcome::Denied { limits, denial, at } => {
            // Room for these headers and those that the HTTP layer adds.
            let mut headers = HeaderMap::with_capacity(12);
            rate_limit_headers(limits, 0, at.plus(denial.retry_after), at).write(&mut headers);
            let wait = seconds_up(denial.retry_after).max(1);
            let message = format!(
                "Rate limit exceeded: {user} may send {} per {} min; try again in {wait} s",
                limits.rate_limit(),
                limits.time_window_minutes()
            );
            Err(ApiError::rate_limited(message, wait).with_headers(headers))
        }
        SendOutcome::NotConfigured => Err(not_configured(user)),
        SendOutcome::NotQueued(EnqueueOutcome::Unknown) => Err(ApiError::unavailable(
            "It is not known whether the message was queued; it may still be delivered. Try again, with the same \
             Idempotency-Key if there was one",
        )),
        SendOutcome::NotQueued(_) => {
            Err(ApiError::unavailable("The message could not be queued; nothing was sent, try again"))
        }
    }
}

fn accepted(user: &UserId, message_id: MessageId, grant: Grant) -> Response {
    let body = SendResponse {
        status: "QUEUED",
        message_id: *message_id.as_uuid(),
        user_id: user.as_str(),
        remaining: grant.remaining,
        reset_at: rfc3339(grant.reset_at),
    };
    let mut response = Json(body).into_response();
    // Room for the headers of limits and those that the HTTP layer adds.
    response.headers_mut().reserve(11);
    response
}

fn rate_limit_headers(
    limits: QuotaLimits,
    remaining: u32,
    reset_at: Timestamp,
    at: Timestamp,
) -> RateLimitHeaders {
    RateLimitHeaders {
        policy: POLICY,
        limit: limits.rate_limit(),
        window: limits.window(),
        remaining,
        reset_after: reset_at.since(at),
    }
}

fn describe(user: &UserId, quota: &Quota) -> QuotaResponse {
    QuotaResponse {
        user_id: user.as_str().into(),
        rate_limit: quota.limits.rate_limit(),
        time_window: quota.limits.time_window_minutes(),
        current_count: quota.current_count,
        last_refresh_time: rfc3339(quota.last_refresh),
    }
}

fn parse_user(text: Box<str>) -> Result<UserId, ApiError> {
    UserId::parse(text).map_err(|problem| ApiError::invalid_field("userId", problem))
}

fn parse_path(path: PathParam) -> Result<UserId, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("userId", "must be valid UTF-8"))?;
    parse_user(text)
}

fn not_configured(user: &UserId) -> ApiError {
    ApiError::not_found(format!("No configuration exists for user {user}; create one with POST /api/config"))
}
