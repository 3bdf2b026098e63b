//! AI calls: `ANY /api/v1/ai/**`, authenticated, limited by the user's plan, and passed on (`proxy.rs`).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderName, StatusCode};

use super::caller::Caller;
use super::error::ApiError;
use crate::app::App;
use crate::auth::jwt::Claims;
use crate::proxy::{Behalf, Problem};
use crate::telemetry::quiet::Quiet;

/// Everything under this is passed on, and nothing else.
pub const PREFIX: &str = "/api/v1/ai";

/// What tells of limits: an upstream may have its own, which callers must not take for ours.
const LIMIT_HEADERS: [HeaderName; 5] = [
    HeaderName::from_static("x-ratelimit-limit"),
    HeaderName::from_static("x-ratelimit-remaining"),
    HeaderName::from_static("x-ratelimit-reset"),
    HeaderName::from_static("ratelimit-policy"),
    HeaderName::from_static("ratelimit"),
];

/// What nginx answers those with who have gone; nobody reads it but the metrics.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// `ANY /api/v1/ai/**`
pub(crate) async fn pass_on(
    claims: Claims,
    State(app): State<Arc<App>>,
    mut request: Request,
) -> Result<Response, ApiError> {
    let limits = HeaderMap::new();
    let caller = request.extensions_mut().remove::<Caller>();
    let behalf = Behalf { caller, user: &claims.sub };
    let mut response = match app.ai.forward(behalf, request).await {
        Ok(response) => response,
        Err(problem) => explain(&app, &problem),
    };
    let headers = response.headers_mut();
    for name in LIMIT_HEADERS {
        headers.remove(name);
    }
    headers.extend(limits);
    Ok(response)
}

/// What a caller is told when its call came to nothing. During an outage every call fails alike, so it is logged once a
/// second.
fn explain(app: &App, problem: &Problem) -> Response {
    static OUTAGE: Quiet = Quiet::new();
    let is_ours = matches!(problem, Problem::Unreachable(_) | Problem::TimedOut | Problem::Unreadable(_));
    if is_ours && let Some(held_back) = OUTAGE.speak() {
        tracing::warn!(%problem, also = held_back, "an AI call came to nothing");
    }
    match problem {
        Problem::Path => ApiError::invalid(
            "The path must not contain . or .. as a segment, nor control characters, however they are encoded",
        ),
        Problem::TooLarge => ApiError::too_large(app.settings.ai.max_body),
        Problem::TooSlow => ApiError::too_slow(),
        Problem::BodyCutOff => ApiError::invalid("The request body ended before it was complete"),
        Problem::Unreachable(_) => {
            ApiError::bad_gateway("The AI service cannot be reached; nothing was done, try again")
        }
        Problem::Unreadable(_) => {
            ApiError::bad_gateway("The AI service gave no answer that could be read; the outcome is unknown")
        }
        Problem::TimedOut => {
            ApiError::gateway_timeout("The AI service did not answer in time; the outcome is unknown")
        }
        Problem::Stopping => {
            ApiError::unavailable("The server is shutting down; the outcome is unknown, try again")
        }
        Problem::CallerGone => {
            return StatusCode::from_u16(CLIENT_CLOSED_REQUEST)
                .unwrap_or(StatusCode::BAD_REQUEST)
                .into_response();
        }
    }
    .into_response()
}
