//! Quota over HTTP: `/api/config` and `/api/send`.

use std::sync::Arc;

use super::path_params::PathParam;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Deserializer, Serialize};
use weir_core::quota::{Limits, OutOfRange, Quota};
use weir_core::{Timestamp, UserId};
use weir_queue::sms::rfc3339;
use weir_store::quota::{Queued, SendMessage, SendOutcome};

use super::body::Json;
use super::error::ApiError;
use super::rate_limit_headers::{RateLimitHeaders, seconds_up};
use crate::app::App;

/// The name of the limit in rate-limit headers.
const POLICY: &str = "quota";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ConfigureRequest {
    #[serde(alias = "user_id")]
    user_id: Box<str>,
    #[serde(alias = "rate_limit")]
    rate_limit: Positive,
    #[serde(alias = "time_window")]
    time_window: Positive,
}

/// A number that limits take; anything else is refused with what is allowed rather than with serde's words.
#[derive(Clone, Copy, Debug)]
struct Positive(u32);

impl<'de> Deserialize<'de> for Positive {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Any JSON value is taken up first, so that a string or a fraction gets the same advice as a number too large.
        let value = serde_json::Value::deserialize(deserializer)?;
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        let in_range = number.filter(|number| (1..=Limits::MAX).contains(number));
        in_range.map(Self).ok_or_else(|| serde::de::Error::custom(OutOfRange))
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ConfigResponse<'a> {
    user_id: &'a str,
    rate_limit: u32,
    time_window: u32,
    current_count: u32,
    last_refresh_time: jiff::Timestamp,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SendRequest {
    #[serde(alias = "user_id")]
    user_id: Box<str>,
    message: Box<str>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SendResponse<'a> {
    status: &'static str,
    message_id: uuid::Uuid,
    user_id: &'a str,
    remaining: u32,
    reset_at: jiff::Timestamp,
}

/// `POST /api/config`
pub(crate) async fn configure_quota(
    State(app): State<Arc<App>>,
    Json(request): Json<ConfigureRequest>,
) -> Result<Response, ApiError> {
    let user = parse_user(request.user_id)?;
    let limits = Limits::new(request.rate_limit.0, request.time_window.0)
        .map_err(|problem| ApiError::invalid_field("rateLimit and timeWindow", problem))?;
    let quota = app.quota.configure(&user, limits).await?;
    Ok(describe(&user, &quota).into_response())
}

/// `GET /api/config/{userId}`
pub(crate) async fn get_quota(State(app): State<Arc<App>>, user: PathParam) -> Result<Response, ApiError> {
    let user = parse_path(user)?;
    let quota = app.quota.find(&user).await?.ok_or_else(|| not_configured(&user))?;
    Ok(describe(&user, &quota).into_response())
}

/// `DELETE /api/config/{userId}`
pub(crate) async fn delete_quota(
    State(app): State<Arc<App>>,
    user: PathParam,
) -> Result<StatusCode, ApiError> {
    let user = parse_path(user)?;
    if app.quota.remove(&user).await? { Ok(StatusCode::NO_CONTENT) } else { Err(not_configured(&user)) }
}

/// `POST /api/send`
pub(crate) async fn send_message(
    State(app): State<Arc<App>>,
    Json(request): Json<SendRequest>,
) -> Result<Response, ApiError> {
    let user = parse_user(request.user_id)?;
    if request.message.is_empty() {
        return Err(ApiError::invalid_field("message", "must not be empty"));
    }
    let send = SendMessage { user: user.clone(), message: request.message };
    match app.quota.send(send).await? {
        SendOutcome::Accepted { message_id, limits, grant, at } => {
            let body = SendResponse {
                status: "QUEUED",
                message_id: *message_id.as_uuid(),
                user_id: user.as_str(),
                remaining: grant.remaining,
                reset_at: rfc3339(grant.reset_at),
            };
            let mut response = Json(body).into_response();
            // Room for these and for what the envelope and the server add.
            response.headers_mut().reserve(10);
            standing(limits, grant.remaining, grant.reset_at, at).write(response.headers_mut());
            Ok(response)
        }
        SendOutcome::Denied { limits, denial, at } => {
            // Room for these and for what the envelope and the server add.
            let mut headers = HeaderMap::with_capacity(12);
            standing(limits, 0, at.plus(denial.retry_after), at).write(&mut headers);
            let wait = seconds_up(denial.retry_after).max(1);
            let message = format!(
                "Rate limit exceeded: {user} may send {} per {} min; try again in {wait} s",
                limits.rate_limit(),
                limits.time_window_minutes()
            );
            Err(ApiError::rate_limited(message, wait).with_headers(headers))
        }
        SendOutcome::NotConfigured => Err(not_configured(&user)),
        SendOutcome::NotQueued(Queued::Unknown) => Err(ApiError::unavailable(
            "The broker did not confirm the message in time; it may be sent all the same, try again",
        )),
        SendOutcome::NotQueued(_) => {
            Err(ApiError::unavailable("The broker cannot be reached; the message was not sent, try again"))
        }
    }
}

fn standing(limits: Limits, remaining: u32, reset_at: Timestamp, at: Timestamp) -> RateLimitHeaders {
    RateLimitHeaders {
        policy: POLICY,
        limit: limits.rate_limit(),
        window: limits.window(),
        remaining,
        reset_after: reset_at.since(at),
    }
}

fn describe<'a>(user: &'a UserId, quota: &Quota) -> Json<ConfigResponse<'a>> {
    Json(ConfigResponse {
        user_id: user.as_str(),
        rate_limit: quota.limits.rate_limit(),
        time_window: quota.limits.time_window_minutes(),
        current_count: quota.current_count,
        last_refresh_time: rfc3339(quota.last_refresh),
    })
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
