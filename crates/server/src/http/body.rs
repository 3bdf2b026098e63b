//! Request bodies: JSON, bounded in size and time, and refused with the name of the field that is wrong.

use std::pin::pin;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::ApiError;
use crate::app::App;

/// A JSON body, in and out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        if !is_json(request.headers()) {
            return Err(ApiError::unsupported_media_type("Content-Type must be application/json"));
        }
        let Raw(body) = Raw::from_request(request, app).await?;
        parse_json(&body).map(Self)
    }
}

/// A body as it came, whatever it is.
#[derive(Clone, Debug)]
pub(crate) struct Raw(pub Bytes);

impl FromRequest<Arc<App>> for Raw {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        if request.headers().get(CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
            return Err(ApiError::unsupported_media_type(
                "Content-Encoding is not supported: send the body as it is",
            ));
        }
        let limits = app.settings.http;
        let mut read = pin!(read_body(request, limits.max_body));
        // A body mostly comes with its head; only one that does not is worth a timer.
        match read.as_mut().now_or_never() {
            Some(body) => body.map(Self),
            None => tokio::time::timeout(limits.read_timeout, read)
                .await
                .map_err(|_elapsed| ApiError::too_slow())?
                .map(Self),
        }
    }
}

/// Reads one JSON object.
///
/// # Errors
/// Names the field that is wrong.
pub(crate) fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    // serde would also fill a struct from a list, by position; no caller means that.
    match body.iter().find(|byte| !byte.is_ascii_whitespace()) {
        None => Err(ApiError::invalid("The request body is empty; it must be a JSON object")),
        Some(b'{') => serde_json::from_slice(body).or_else(|_error| explain(body)),
        Some(_) => Err(ApiError::invalid("The request body must be a JSON object")),
    }
}

async fn read_body(request: Request, limit: usize) -> Result<Bytes, ApiError> {
    let announced =
        request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(ApiError::too_large(limit));
    }
    match Limited::new(request.into_body(), limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::too_large(limit)),
        Err(_cut_off) => Err(ApiError::invalid("The request body ended before it was complete")),
    }
}

/// `application/json` or any `+json`, with or without parameters.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(Ok(value)) = headers.get(CONTENT_TYPE).map(HeaderValue::to_str) else {
        return false;
    };
    if value == "application/json" {
        return true;
    }
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

/// Reads a refused body again, slowly, to name the field that is wrong.
fn explain<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let deserializer = &mut serde_json::Deserializer::from_slice(body);
    let Err(error) = serde_path_to_error::deserialize::<_, T>(deserializer) else {
        // Well-formed up to here: what follows it must be the problem.
        return Err(ApiError::invalid("The request body must be one JSON object with nothing after it"));
    };
    let (path, problem) = (error.path().to_string(), error.inner());
    if problem.classify() != serde_json::error::Category::Data {
        return Err(ApiError::invalid(format!("The request body is not valid JSON: {problem}")));
    }
    let text = problem.to_string();
    // The position is useless to a caller whose JSON was generated.
    let text = text.split_once(" at line ").map_or(text.as_str(), |(problem, _)| problem);
    Err(match text.split_once('`') {
        Some(("missing field ", field)) => {
            ApiError::invalid_field(field.trim_end_matches('`'), "is required")
        }
        Some(("duplicate field ", field)) => {
            ApiError::invalid_field(field.trim_end_matches('`'), "is there more than once")
        }
        _ if text.starts_with("must ") => ApiError::invalid_field(&path, text),
        _ => match text.rsplit_once("expected ") {
            Some((_, expected)) => ApiError::invalid_field(&path, format!("must be {expected}")),
            None => ApiError::invalid_field(&path, format!("is not allowed: {text}")),
        },
    })
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(json) => {
                let mut response = Response::new(Body::from(json));
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                response
            }
            Err(error) => {
                tracing::error!(%error, "an answer could not be written as JSON");
                ApiError::internal().into_response()
            }
        }
    }
}
