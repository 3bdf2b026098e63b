//! AI calls: `ANY /api/v1/ai/**`, authenticated, limited by the user's plan, and passed on (`proxy.rs`).

use std::sync::Arc;

use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{Method, StatusCode};

use super::caller::Caller;
use super::error::{ApiError, method_not_allowed};
use super::limits::write_tier;
use crate::app::App;
use crate::auth::jwt::authenticate;
use crate::proxy::{Behalf, Payload, Problem};
use crate::service::tier::Admission;
use crate::telemetry::quiet::Quiet;

/// Everything under this is passed on, and nothing else.
pub const PREFIX: &str = "/api/v1/ai";

/// What nginx answers those with who have gone; nobody reads it but the metrics.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// `ANY /api/v1/ai/**`
pub(crate) async fn pass_on(State(app): State<Arc<App>>, mut request: Request) -> Response {
    let caller = request.extensions_mut().remove::<Caller>();
    let request = request
        .map(|body| if body.is_end_stream() { Payload::Whole(Bytes::new()) } else { Payload::Coming(body) });
    answer(&app, caller.as_ref(), request).await
}

/// The same, of whatever way it came.
pub(super) async fn answer(
    app: &App,
    caller: Option<&Caller>,
    mut request: http::Request<Payload>,
) -> Response {
    admit(app, caller, &mut request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn admit(
    app: &App,
    caller: Option<&Caller>,
    request: &mut http::Request<Payload>,
) -> Result<Response, ApiError> {
    if request.method() == Method::CONNECT {
        return Err(method_not_allowed().await);
    }
    let claims = authenticate(request.headers(), app)?;
    if claims.sub.is_empty() {
        return Err(ApiError::unauthenticated("The token names nobody; get one whose sub is a user"));
    }
    let admission = app.tier.admit(&claims.sub).await?;
    let mut response = match &admission {
        Admission::Denied { headers, message } => {
            ApiError::rate_limited(message, headers.retry_after_s.unwrap_or(1)).into_response()
        }
        Admission::Allowed(_) | Admission::Disabled(_) => {
            let behalf = Behalf { caller, user: &claims.sub };
            let answered = app.ai.forward(behalf, request).await;
            answered.unwrap_or_else(|problem| explain(app, &problem))
        }
    };
    write_tier(admission.headers(), response.headers_mut());
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
