//! Error responses of the sale API: `{"success":false,"error":{…}}`.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};

use crate::address_limits::{AddressOverLimit, StreamRefusal};
use crate::auth::credentials::BEARER_CHALLENGE;
use crate::http::error::ApiError;
use crate::http::rate_limit_headers::seconds_up;

const VALIDATION_ERROR: &str = "VALIDATION_ERROR";

#[derive(Debug)]
pub(crate) struct SaleError(Box<SaleErrorParts>);

/// The code of an error, in the extensions of its response: for logs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SaleErrorCode(pub(crate) &'static str);

#[derive(Debug)]
struct SaleErrorParts {
    status: StatusCode,
    headers: HeaderMap,
    body: ErrorBody,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SaleErrorDetails)]
struct ErrorBody {
    /// `SOLD_OUT`, `SALE_NOT_ACTIVE`, `ALREADY_PURCHASED`, `CHALLENGE_REQUIRED` and `SALE_NOT_MODIFIABLE` come with
    /// status 200; `VALIDATION_ERROR`, `UNAUTHORIZED`, `FORBIDDEN`, `NOT_FOUND`, `RESET_DISABLED`, `RATE_LIMITED`,
    /// `SERVICE_UNAVAILABLE` with theirs.
    #[schema(pattern = "^[A-Z][A-Z_]*$", examples("SOLD_OUT"))]
    code: &'static str,
    #[schema(examples("Sorry, all items have been sold."))]
    message: String,
    /// The wrong fields and what is wrong with each; with `VALIDATION_ERROR`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fields: BTreeMap<String, String>,
    /// In seconds; with `RATE_LIMITED`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, minimum = 1)]
    retry_after: Option<u64>,
}

/// An error of the sale API.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SaleError)]
pub(crate) struct SaleErrorResponse {
    #[schema(schema_with = always_false)]
    success: bool,
    #[schema(inline)]
    error: ErrorBody,
}

fn always_false() -> Object {
    ObjectBuilder::new().schema_type(Type::Boolean).enum_values(Some([false])).build()
}

impl SaleError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        let body = ErrorBody { code, message, fields: BTreeMap::new(), retry_after: None };
        Self(Box::new(SaleErrorParts { status, headers: HeaderMap::new(), body }))
    }

    /// 200: the request is valid, but the rules of the sale deny it.
    pub(crate) fn refusal(code: &'static str, message: &str) -> Self {
        Self::new(StatusCode::OK, code, message)
    }

    /// 400.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, VALIDATION_ERROR, message)
    }

    /// 400 about one or more fields. Without a `message`, the first field becomes the message.
    pub(crate) fn invalid_fields(fields: Vec<(&str, String)>, message: Option<&str>) -> Self {
        let first = fields.first().map(|(field, problem)| format!("{field}: {problem}.")).unwrap_or_default();
        let mut error = Self::invalid(message.map_or(first, str::to_owned));
        let sentence = |text: String| {
            let mut letters = text.chars();
            letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
        };
        error.0.body.fields =
            fields.into_iter().map(|(field, problem)| (field.to_owned(), sentence(problem))).collect();
        error
    }

    /// 401.
    pub(crate) fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "UNAUTHORIZED", message)
    }

    /// 404.
    pub(crate) fn not_found(message: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NOT_FOUND", message)
    }

    /// 409.
    pub(crate) fn conflict(code: &'static str, message: &str) -> Self {
        Self::new(StatusCode::CONFLICT, code, message)
    }

    /// 429.
    pub(crate) fn rate_limited(wait: Duration) -> Self {
        let message = "Too many requests. Please try again shortly.";
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "RATE_LIMITED", message);
        let seconds = seconds_up(wait).max(1);
        error.0.body.retry_after = Some(seconds);
        error.0.headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        error
    }

    /// 405. The router adds `Allow`.
    pub(crate) fn method_not_allowed() -> Self {
        let message = "This path does not take this method; the Allow header lists those it takes.";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message)
    }

    fn unavailable() -> Self {
        let message = "Service temporarily unavailable. Please try again.";
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "SERVICE_UNAVAILABLE", message);
        error.0.headers.insert(RETRY_AFTER, HeaderValue::from(1));
        error
    }

    pub(crate) fn headers_mut(&mut self) -> &mut HeaderMap {
        &mut self.0.headers
    }
}

impl From<ApiError> for SaleError {
    fn from(error: ApiError) -> Self {
        let mut sale_error = match error.status() {
            StatusCode::SERVICE_UNAVAILABLE => Self::unavailable(),
            StatusCode::UNAUTHORIZED if is_about_token(&error) => Self::unauthorized(error.message()),
            StatusCode::UNAUTHORIZED => Self::unauthorized("Missing or invalid X-Admin-Key header."),
            StatusCode::FORBIDDEN => Self::new(StatusCode::FORBIDDEN, "FORBIDDEN", error.message()),
            StatusCode::BAD_REQUEST => match error.field() {
                Some((field, problem)) => Self::invalid_fields(vec![(field, problem.to_owned())], None),
                None => Self::invalid(error.message()),
            },
            status => Self::new(status, error.code(), error.message()),
        };
        let headers = error.headers().iter().map(|(name, value)| (name.clone(), value.clone()));
        sale_error.0.headers.extend(headers);
        sale_error
    }
}

/// Whether the route takes tokens alone.
fn is_about_token(error: &ApiError) -> bool {
    error.headers().get(WWW_AUTHENTICATE).is_some_and(|challenge| challenge == BEARER_CHALLENGE)
}

impl From<weir_store::Error> for SaleError {
    fn from(error: weir_store::Error) -> Self {
        // This conversion logs the error with its causes.
        ApiError::from(error).into()
    }
}

impl From<AddressOverLimit> for SaleError {
    fn from(AddressOverLimit(wait): AddressOverLimit) -> Self {
        Self::rate_limited(wait)
    }
}

impl From<StreamRefusal> for SaleError {
    fn from(refusal: StreamRefusal) -> Self {
        match refusal {
            StreamRefusal::Address(too_many) => too_many.into(),
            StreamRefusal::Server(too_many) => ApiError::from(too_many).into(),
        }
    }
}

impl IntoResponse for SaleError {
    fn into_response(self) -> Response {
        let SaleErrorParts { status, headers, body } = *self.0;
        let code = SaleErrorCode(body.code);
        // Strings and numbers always become JSON.
        let json = serde_json::to_vec(&SaleErrorResponse { success: false, error: body }).unwrap_or_default();
        let mut response = Response::new(Body::from(json));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response.extensions_mut().insert(code);
        response
    }
}
