//! Request bodies: JSON, bounded in size, time and memory, and refused with the name of the field that is wrong.

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

/// The least that a body which comes in pieces takes of the budget.
const BUFFER_MIN: usize = 1024;

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
        let mut read = pin!(read_body(request, limits.max_body, &app.buffers));
        // A body mostly comes with its head; only one that does not is worth a timer.
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

/// Why a body could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyError {
    TooLarge,
    CutOff,
    OutOfMemory,
}

/// Reads one JSON object.
/// Names the field that is wrong.
pub(crate) fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    // serde would also fill a struct from a list, by position; no caller means that.
    match body.iter().find(|byte| !byte.is_ascii_whitespace()) {
        None => Err(ApiError::invalid("The request body is empty; it must be a JSON object")),
        Some(b'{') => serde_json::from_slice(body).or_else(|_error| explain(body)),
        Some(_) => Err(ApiError::invalid("The request body must be a JSON object")),
    }
}

async fn read_body(request: Request, limit: usize, budget: &BufferBudget) -> Result<Bytes, BodyError> {
    let announced =
        request.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limit as u64) {
        return Err(BodyError::TooLarge);
    }
    let mut body = request.into_body();
    let Some(first) = next_chunk(&mut body).await? else { return Ok(Bytes::new()) };
    if first.len() > limit {
        return Err(BodyError::TooLarge);
    }
    // Most bodies come in one piece, which is used as it is.
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

/// The next piece of a body that is not empty; none at its end.
async fn next_chunk(body: &mut Body) -> Result<Option<Bytes>, BodyError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_cut_off| BodyError::CutOff)?;
        // Trailers are of no use to anybody here.
        if let Ok(data) = frame.into_data()
            && !data.is_empty()
        {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// A body that comes in pieces. They are copied: each would keep the whole buffer it was read into, however small it is.
struct BodyBuffer {
    bytes: Vec<u8>,
    /// What it has of the budget: its capacity.
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
        // Most answers fit, so that their text is not moved while it grows.
        let mut json = Vec::with_capacity(256);
        match serde_json::to_writer(&mut json, &self.0) {
            Ok(()) => {
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
    async fn a_body_is_the_same_however_it_comes() {
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
