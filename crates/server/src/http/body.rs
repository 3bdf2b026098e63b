//! Request bodies: bounded in size, time and memory. A JSON body that does not parse is refused with the name of the wrong
//! field.

use std::pin::pin;
use std::sync::Arc;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::ApiError;
use crate::app::App;
use crate::buffer_budget::{BufferBudget, BufferCharge};
use crate::telemetry::metrics::Shortage;
use crate::telemetry::request_context::LogIds;

/// The smallest charge of a body that arrives in pieces.
const BUFFER_MIN: usize = 1024;

/// A JSON body of a request or response.
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

/// A request body of any content type.
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
        let mut read = pin!(read_body(request, limits.max_body, &app.buffers));
        // Most bodies arrive together with their head and need no timer.
        let body = match read.as_mut().now_or_never() {
            Some(body) => body,
            None => match tokio::time::timeout(limits.read_timeout, read).await {
                Ok(body) => body,
                Err(_elapsed) => return Err(ApiError::too_slow()),
            },
        };
        body.map(Self).map_err(|problem| match problem {
            BodyError::TooLarge => ApiError::too_large(limits.max_body),
            BodyError::CutOff => ApiError::invalid("The request body ended before it was complete"),
            BodyError::OutOfMemory => {
                app.metrics.record_shortage(Shortage::Memory);
                ApiError::out_of_memory()
            }
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyError {
    TooLarge,
    CutOff,
    OutOfMemory,
}

/// Parses one JSON object.
/// The error names the wrong field.
pub(crate) fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    // serde would also accept an array and fill the fields by position; no caller means that.
    match body.iter().find(|byte| !byte.is_ascii_whitespace()) {
        None => Err(ApiError::invalid("The request body is empty; it must be a JSON object")),
        Some(b'{') => serde_json::from_slice(body).or_else(|_error| explain(body)),
        Some(_) => Err(ApiError::invalid("The request body must be a JSON object")),
    }
}

async fn read_body(request: Request, limit: usize, budget: &BufferBudget) -> Result<Bytes, BodyError> {
    let content_length =
        request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if content_length.is_some_and(|length| length > limit as u64) {
        return Err(BodyError::TooLarge);
    }
    let mut body = request.into_body();
    let Some(first) = next_chunk(&mut body).await? else { return Ok(Bytes::new()) };
    if first.len() > limit {
        return Err(BodyError::TooLarge);
    }
    // Most bodies arrive in one piece, which is used without a copy.
    if body.is_end_stream() {
        return Ok(first);
    }
    let second = next_chunk(&mut body).now_or_never().transpose()?;
    if let Some(None) = second {
        return Ok(first);
    }
    let mut buffer = BodyBuffer { bytes: Vec::new(), charge: budget.charge(), limit };
    for chunk in [Some(first), second.flatten()].into_iter().flatten() {
        buffer.push(&chunk)?;
    }
    while let Some(chunk) = next_chunk(&mut body).await? {
        buffer.push(&chunk)?;
    }
    Ok(Bytes::from_owner(buffer))
}

/// Returns the next chunk that is not empty, or `None` at the end of the body.
async fn next_chunk(body: &mut Body) -> Result<Option<Bytes>, BodyError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_cut_off| BodyError::CutOff)?;
        // Trailers are ignored.
        if let Ok(data) = frame.into_data()
            && !data.is_empty()
        {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// A body that arrives in pieces. They are copied, because even the smallest would keep alive the whole buffer it was read
/// into.
struct BodyBuffer {
    bytes: Vec<u8>,
    /// Charges the capacity of `bytes`.
    charge: BufferCharge,
    limit: usize,
}

impl BodyBuffer {
    fn push(&mut self, chunk: &[u8]) -> Result<(), BodyError> {
        let length = self.bytes.len() + chunk.len();
        if length > self.limit {
            return Err(BodyError::TooLarge);
        }
        if length > self.charge.bytes() {
            let capacity = length.next_power_of_two().clamp(BUFFER_MIN.min(self.limit), self.limit);
            self.charge.try_resize(capacity).map_err(|_spent| BodyError::OutOfMemory)?;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }
}

impl AsRef<[u8]> for BodyBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
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

/// Parses a malformed body again, with the slower parser that knows the name of the wrong field.
fn explain<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let deserializer = &mut serde_json::Deserializer::from_slice(body);
    let Err(error) = serde_path_to_error::deserialize::<_, T>(deserializer) else {
        // This parser stops after the object, so the problem is what follows it.
        return Err(ApiError::invalid("The request body must be one JSON object with nothing after it"));
    };
    let (path, problem) = (error.path().to_string(), error.inner());
    if problem.classify() != serde_json::error::Category::Data {
        return Err(ApiError::invalid(format!("The request body is not valid JSON: {problem}")));
    }
    let text = problem.to_string();
    // Callers generate their JSON, so its line and column are of no use to them.
    let text = text.split_once(" at line ").map_or(text.as_str(), |(problem, _)| problem);
    Err(match text.split_once('`') {
        Some(("missing field ", field)) => {
            ApiError::invalid_field(field.trim_end_matches('`'), "is required")
        }
        Some(("duplicate field ", field)) => {
            ApiError::invalid_field(field.trim_end_matches('`'), "is there more than once")
        }
        Some(("unknown field ", rest)) => {
            let (field, expected) = rest.split_once("`, ").unwrap_or((rest, "expected another one"));
            ApiError::invalid_field(&join(&path, field), format!("is not a field of this object, {expected}"))
        }
        _ if text.starts_with("must ") => ApiError::invalid_field(&path, text),
        _ => match text.rsplit_once("expected ") {
            Some((_, expected)) => ApiError::invalid_field(&path, format!("must be {expected}")),
            None => ApiError::invalid_field(&path, format!("is not allowed: {text}")),
        },
    })
}

/// The path of a field of the object at `path`, which is `.` for the body itself.
fn join(path: &str, field: &str) -> String {
    match path.strip_suffix(field).map(|object| object.trim_end_matches('.')).unwrap_or(path) {
        "" | "." => field.to_owned(),
        object => format!("{object}.{field}"),
    }
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        // Large enough for most responses, so that the buffer does not grow.
        let mut json = Vec::with_capacity(256);
        match serde_json::to_writer(&mut json, &self.0) {
            Ok(()) => {
                let mut response = Response::new(Body::from(json));
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                response
            }
            Err(error) => {
                let ids = LogIds::current();
                tracing::error!(
                    httpRequestId = ids.http_request_id(),
                    traceId = ids.trace_id(),
                    %error,
                    "cannot serialize a response as JSON; answered 500"
                );
                ApiError::internal().into_response()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;

    use super::*;

    fn in_pieces(pieces: &'static [&'static str]) -> Request {
        let pieces = pieces.iter().map(|piece| Ok::<_, Infallible>(Bytes::from_static(piece.as_bytes())));
        Request::new(Body::from_stream(stream::iter(pieces)))
    }

    #[tokio::test]
    async fn a_body_is_the_same_in_one_piece_or_several() {
        let budget = BufferBudget::new(1 << 20);
        for pieces in [&["hello world"][..], &["", "hello", "", " ", "world"], &["hello wor", "ld"]] {
            let body = read_body(in_pieces(pieces), 11, &budget).await;
            assert_eq!(body.as_deref(), Ok(&b"hello world"[..]), "{pieces:?}");
            let too_large = read_body(in_pieces(pieces), 10, &budget).await;
            assert_eq!(too_large, Err(BodyError::TooLarge), "{pieces:?}");
        }
        assert_eq!(read_body(in_pieces(&[]), 10, &budget).await.as_deref(), Ok(&b""[..]));
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn bodies_in_pieces_are_charged_to_the_budget_until_they_are_dropped() {
        let budget = BufferBudget::new(3_000);
        let read = async || read_body(in_pieces(&["a", "b"]), 1 << 20, &budget).await;
        let (one, two) = (read().await.unwrap(), read().await.unwrap());
        assert_eq!(budget.used(), 2 * BUFFER_MIN);
        assert_eq!(read().await, Err(BodyError::OutOfMemory));
        assert!(read_body(in_pieces(&["ab"]), 1 << 20, &budget).await.is_ok(), "in one piece it is free");
        drop(one);
        assert!(read().await.is_ok());
        drop(two);
        assert_eq!(budget.used(), 0);
    }
}
