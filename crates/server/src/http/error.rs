//! Maps errors to responses in the common format. Causes are logged here, once, and not shown to callers.
//!
//! Only the sale API, which has an envelope of its own (`sale_error.rs`), gRPC (`grpc/decide.rs`), `/health` and `/readyz` have
//! other formats.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;

use crate::address_limits::TooManyStreams;
use crate::auth::credentials::AuthError;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::request_context::LogIds;

/// An error response in the flat format.
#[derive(Clone, Debug)]
pub(crate) struct ApiError(Box<ApiErrorParts>);

#[derive(Clone, Debug)]
struct ApiErrorParts {
    status: StatusCode,
    code: &'static str,
    message: String,
    /// The wrong field and what is wrong with it, if the error is about a field.
    field: Option<(String, String)>,
    headers: HeaderMap,
}

/// An error, in the same format on every route except those of sale.
#[derive(Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorResponse<'a> {
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599, examples(400))]
    status: u16,
    /// The HTTP status in words.
    #[schema(examples("Bad Request"))]
    error: &'static str,
    /// What to branch on, such as `INVALID_REQUEST`, `UNAUTHENTICATED`, `UNAUTHORIZED_SCOPE`, `NOT_FOUND`,
    /// `PAYLOAD_TOO_LARGE`, `RATE_LIMITED`, `DEPENDENCY_UNAVAILABLE`. More may come.
    #[schema(pattern = "^[A-Z][A-Z_]*$", examples("INVALID_REQUEST"))]
    code: &'static str,
    /// For people: what is wrong. The wording may change.
    #[schema(examples("timeWindow is required"))]
    message: &'a str,
    /// When it was answered.
    timestamp: jiff::Timestamp,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(ApiErrorParts {
            status,
            code,
            message: message.into(),
            field: None,
            headers: HeaderMap::new(),
        }))
    }

    /// 400: the request has to be changed.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "INVALID_REQUEST", message)
    }

    /// 400 about one field: "userId must not be empty".
    pub(crate) fn invalid_field(field: &str, problem: impl std::fmt::Display) -> Self {
        let problem = problem.to_string();
        let mut error = Self::invalid(format!("{field} {problem}"));
        error.0.field = Some((field.to_owned(), problem));
        error
    }

    /// 401: credentials are missing or wrong. `challenge` names the accepted ones in `WWW-Authenticate`.
    pub(crate) fn unauthenticated(message: impl Into<String>, challenge: &'static str) -> Self {
        let error = Self::new(StatusCode::UNAUTHORIZED, "UNAUTHENTICATED", message);
        error.with_header(WWW_AUTHENTICATE, HeaderValue::from_static(challenge))
    }

    /// 403: the token does not allow this.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "UNAUTHORIZED_SCOPE", message)
    }

    /// 404.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NOT_FOUND", message)
    }

    /// 408: the caller took too long to send its request.
    pub(crate) fn too_slow() -> Self {
        let message = "The request body did not arrive in time; send it again, faster or smaller";
        Self::new(StatusCode::REQUEST_TIMEOUT, "REQUEST_TIMEOUT", message)
    }

    /// 409: the resource is not in the state that the caller assumes.
    pub(crate) fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, code, message)
    }

    /// 410: the resource existed and has expired.
    pub(crate) fn gone(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::GONE, code, message)
    }

    /// 413.
    pub(crate) fn too_large(limit: usize) -> Self {
        let message = format!("The request body is larger than the {limit} bytes allowed");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "PAYLOAD_TOO_LARGE", message)
    }

    /// 415.
    pub(crate) fn unsupported_media_type(message: &str) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_MEDIA_TYPE", message)
    }

    /// 429 with `Retry-After`. The handler adds the rate limit headers (`rate_limit_headers.rs`).
    pub(crate) fn rate_limited(message: impl Into<String>, retry_after_seconds: u64) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "RATE_LIMITED", message).retry_after(retry_after_seconds)
    }

    /// 500: a bug in Weir. Nothing that a caller sends may lead here.
    pub(crate) fn internal() -> Self {
        let message =
            "An internal error occurred; the server's log says more under this response's X-Request-Id";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", message)
    }

    /// 502: the upstream gave no usable response.
    pub(crate) fn bad_gateway(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "BAD_GATEWAY", message)
    }

    /// 504: the upstream did not answer in time.
    pub(crate) fn gateway_timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "GATEWAY_TIMEOUT", message)
    }

    /// 503: a dependency of Weir does not answer, or Weir is overloaded.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", message).retry_after(1)
    }

    /// 503: every connection that the server may have is taken.
    pub(crate) fn out_of_connections() -> Self {
        Self::unavailable("The server has as many connections as it may; try again")
    }

    /// 503: the memory budget of unfinished requests is exhausted.
    pub(crate) fn out_of_memory() -> Self {
        let message =
            "Unfinished requests hold as much memory as the server allows; nothing was done, try again";
        Self::unavailable(message)
    }

    #[must_use]
    pub(crate) fn code(&self) -> &'static str {
        self.0.code
    }

    #[must_use]
    pub(crate) fn status(&self) -> StatusCode {
        self.0.status
    }

    /// The wrong field and what is wrong with it.
    #[must_use]
    pub(crate) fn field(&self) -> Option<(&str, &str)> {
        self.0.field.as_ref().map(|(field, problem)| (field.as_str(), problem.as_str()))
    }

    pub(crate) const fn headers(&self) -> &HeaderMap {
        &self.0.headers
    }

    #[must_use]
    pub(crate) fn message(&self) -> &str {
        &self.0.message
    }

    #[must_use]
    pub(crate) fn with_message(mut self, message: impl Into<String>) -> Self {
        self.0.message = message.into();
        self
    }

    #[must_use]
    pub(crate) fn with_code(mut self, code: &'static str) -> Self {
        self.0.code = code;
        self
    }

    fn retry_after(self, seconds: u64) -> Self {
        self.with_header(RETRY_AFTER, HeaderValue::from(seconds.max(1)))
    }

    #[must_use]
    pub(crate) fn with_header(mut self, name: http::HeaderName, value: HeaderValue) -> Self {
        self.0.headers.insert(name, value);
        self
    }

    #[must_use]
    pub(crate) fn with_headers(mut self, mut headers: HeaderMap) -> Self {
        // Extends the argument, which has room for all of them.
        headers.extend(std::mem::take(&mut self.0.headers));
        self.0.headers = headers;
        self
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let ApiErrorParts { status, code, message, headers, .. } = *self.0;
        let body = ErrorResponse {
            status: status.as_u16(),
            error: status.canonical_reason().unwrap_or("Error"),
            code,
            message: &message,
            timestamp: now(),
        };
        let mut json = Vec::with_capacity(128 + message.len());
        // Strings and numbers always become JSON.
        let _ = serde_json::to_writer(&mut json, &body);
        let mut response = Response::new(Body::from(json));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    }
}

/// The current time in microseconds, like the other times in responses.
fn now() -> jiff::Timestamp {
    let now = jiff::Timestamp::now();
    jiff::Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now)
}

impl From<AuthError> for ApiError {
    fn from(error: AuthError) -> Self {
        let message = error.to_string();
        match error.challenge() {
            Some(challenge) => Self::unauthenticated(message, challenge),
            None => Self::forbidden(message),
        }
    }
}

impl From<TooManyStreams> for ApiError {
    fn from(_: TooManyStreams) -> Self {
        let message = "The server has as many event streams and waiting calls as it may; ask without waiting, or try again";
        Self::unavailable(message)
    }
}

impl From<weir_store::Error> for ApiError {
    /// Transient errors are answered 503, all others 500. During an outage every call fails in the same way, so it is logged
    /// once a second. The line names the response and the trace of the call that the current task answers.
    fn from(error: weir_store::Error) -> Self {
        static OUTAGE: LogThrottle = LogThrottle::new();
        if !error.is_transient() {
            let ids = LogIds::current();
            tracing::error!(
                httpRequestId = ids.http_request_id(),
                traceId = ids.trace_id(),
                error = %error.with_causes(),
                "a store operation failed; answered 500"
            );
            return Self::internal();
        }
        if let Some(suppressed) = OUTAGE.permit() {
            let ids = LogIds::current();
            tracing::warn!(
                httpRequestId = ids.http_request_id(),
                traceId = ids.trace_id(),
                error = %error.with_causes(),
                suppressed,
                "the store is unavailable; answered 503"
            );
        }
        use weir_store::Error;
        if let Error::KeysExhausted { max } = error {
            return Self::unavailable(format!(
                "The server tracks {max} keys, its maximum, and this one is new; nothing was done. Try again when others \
                 have their limit back, or have the operator raise rate_limit.keys_max"
            ));
        }
        Self::unavailable(match error {
            Error::Overloaded { .. } => {
                "More calls are waiting than the server allows; nothing was done, try again"
            }
            Error::NotDone { .. } => "The store is temporarily unavailable; nothing was done, try again",
            Error::ShuttingDown => "The server is shutting down; nothing was done, try again",
            _ => "The store is temporarily unavailable; the outcome is unknown, try again",
        })
    }
}

/// 404: no route has this path.
pub(crate) fn not_found() -> ApiError {
    ApiError::not_found("There is nothing at this path; GET /docs lists what there is")
}

/// 405: the path does not take this method. The router adds `Allow`.
pub(crate) fn method_not_allowed() -> ApiError {
    let message = "This path does not take this method; the Allow header lists those it takes";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message)
}
