//! AI calls: `ANY /api/v1/ai/**`, limited by the user's plan and forwarded by `gateway.rs`.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse, Response};
use http::header::ALLOW;
use http::{HeaderValue, Method, StatusCode};
use weir_store::Error;

use super::{CallerIdentity, GatewayError};
use crate::app::App;
use crate::auth::credentials::BEARER_CHALLENGE;
use crate::http::error::{ApiError, method_not_allowed};
use crate::http::extract::User;
use crate::http::rate_limit_headers::write_tier;
use crate::peer::Peer;
use crate::tier::service::{Admission, TierCaller};

/// The `Allow` header: every method but CONNECT, which asks for a tunnel to any host.
const METHODS: &str = "GET,HEAD,POST,PUT,PATCH,DELETE,OPTIONS";

/// The status that nginx logs when the caller has disconnected. Only metrics show it.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Call the AI service.
///
/// Any method, any path under `/api/v1/ai`. The call is authenticated, costs one of the user's plan, and is forwarded
/// to the upstream with path, query and body as they are; the response is streamed back as it comes. A WebSocket costs
/// one as well, when it is opened.
///
/// The upstream does not see the token. It learns who calls from `X-Weir-User`.
#[utoipa::path(
    method(get, post, put, patch, delete),
    path = "/api/v1/ai/{path}",
    tag = "tier",
    params(
        (
            "path" = String, Path,
            description = "What is asked of the AI service, slashes included. It may be empty.",
            example = "extract",
        ),
    ),
    request_body(content(("*/*"))),
    responses(
        (
            status = 200,
            description = "The upstream's response, whatever its status.",
            content(("*/*")), headers(("RateLimit")),
        ),
        (
            status = 400,
            description = "The path could be read as one outside of `/api/v1/ai`, or the body broke off. Nothing was \
                forwarded.",
            headers(("RateLimit")),
        ),
        (status = 408, description = "The body stopped coming.", headers(("RateLimit"))),
        (status = 413, description = "The body is larger than `ai.max_body`.", headers(("RateLimit"))),
        (
            status = 429,
            description = "The minute or the day is used up; the message says which. Nothing was spent and nothing was \
                forwarded.",
            headers(("RateLimit")),
        ),
        (
            status = 502,
            description = "The upstream cannot be reached, or its response is not HTTP.",
            headers(("RateLimit")),
        ),
        (
            status = 503,
            description = "The limits cannot be decided: the user is new and there are as many as `rate_limit.keys_max` \
                allows (with the rate limit headers, which say that nothing was spent), too many calls are waiting, or \
                the server is shutting down. Nothing was forwarded.",
        ),
        (
            status = 504,
            description = "The upstream accepted no connection, or did not begin its response, in time.",
            headers(("RateLimit")),
        ),
    ),
)]
pub(crate) async fn forward_call(
    State(app): State<Arc<App>>,
    User(claims): User,
    peer: Option<Extension<Peer>>,
    request: Request,
) -> Result<Response, ApiError> {
    if request.method() == Method::CONNECT {
        return Err(method_not_allowed().with_header(ALLOW, HeaderValue::from_static(METHODS)));
    }
    if claims.sub.is_empty() {
        let message = "The token names nobody; get one whose sub is a user";
        return Err(ApiError::unauthenticated(message, BEARER_CHALLENGE));
    }
    let caller = TierCaller { user: &claims.sub, plan_claim: claims.plan.as_deref() };
    let admission = app.tier.admit(caller).await?;
    let mut response = match &admission {
        Admission::Denied { headers, message } => {
            ApiError::rate_limited(message, headers.retry_after_s.unwrap_or(1)).into_response()
        }
        Admission::NoRoom { keys_max, .. } => {
            ApiError::from(Error::KeysExhausted { max: *keys_max }).into_response()
        }
        Admission::Allowed(_) | Admission::Disabled(_) => {
            let identity = CallerIdentity { peer: peer.as_deref(), user: &claims.sub };
            let response = app.gateway.forward(identity, request).await;
            response.unwrap_or_else(|error| error_response(&app, &error))
        }
    };
    write_tier(admission.headers(), response.headers_mut());
    Ok(response)
}

fn error_response(app: &App, error: &GatewayError) -> Response {
    match error {
        GatewayError::UnsafePath => ApiError::invalid(
            "The path must not contain . or .. as a segment, nor control characters, however they are encoded",
        ),
        GatewayError::TooLarge => ApiError::too_large(app.settings.gateway.max_body),
        GatewayError::TooSlow => ApiError::too_slow(),
        GatewayError::BodyCutOff => ApiError::invalid("The request body ended before it was complete"),
        GatewayError::Unreachable(_) => {
            ApiError::bad_gateway("The AI service cannot be reached; nothing was done, try again")
        }
        GatewayError::Unreadable(_) => {
            ApiError::bad_gateway("The AI service gave no answer that could be read; the outcome is unknown")
        }
        GatewayError::TimedOut => {
            ApiError::gateway_timeout("The AI service did not answer in time; the outcome is unknown")
        }
        GatewayError::Stopping => {
            ApiError::unavailable("The server is shutting down; the outcome is unknown, try again")
        }
        GatewayError::CallerGone => {
            return StatusCode::from_u16(CLIENT_CLOSED_REQUEST)
                .unwrap_or(StatusCode::BAD_REQUEST)
                .into_response();
        }
    }
    .into_response()
}
