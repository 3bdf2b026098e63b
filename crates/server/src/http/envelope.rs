//! What every request and answer has in common: an id, a place in the metrics, and an answer even after a panic.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use axum::body::{Body, HttpBody};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderName, HeaderValue, Request};
use tower::Service;

use super::error::ApiError;
use super::router::Routes;
use crate::telemetry::metrics::Metrics;

/// The header an id travels in, both ways.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const REQUEST_ID_MAX: usize = 128;

/// Answers one request by the router.
pub async fn answer<B>(mut routes: Routes, metrics: &Metrics, request: Request<B>) -> Response
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    let route = routes.label(request.uri().path());
    let call = |request: Request<Body>| routes.router.call(request).map(|Ok(response)| response);
    wrap(route, metrics, request.map(Body::new), call).await
}

/// Answers one request by `call`. It stands outside the router rather than as one of its layers, which would cost every
/// request two allocations and a copy.
pub async fn wrap<B, F>(
    route: &'static str,
    metrics: &Metrics,
    mut request: Request<B>,
    call: impl FnOnce(Request<B>) -> F,
) -> Response
where
    F: Future<Output = Response>,
{
    let started = Instant::now();
    let method = request.method().clone();
    let id = request_id(request.headers().get(REQUEST_ID));
    if request.headers().get(REQUEST_ID) != Some(&id) {
        // For the logs of handlers, which tell of a call under the id that its answer carries.
        request.headers_mut().insert(REQUEST_ID, id.clone());
    }
    let mut response = match AssertUnwindSafe(call(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_panic) => {
            tracing::error!(request_id = ?id, route, "a handler panicked");
            ApiError::internal().into_response()
        }
    };
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id);
    headers.insert(http::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    metrics.record_request(&method, route, response.status(), started.elapsed());
    response
}

/// The caller's id, if it is short and plain enough to be put into logs and headers as it is; otherwise a new one.
fn request_id(given: Option<&HeaderValue>) -> HeaderValue {
    let is_sane = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        (1..=REQUEST_ID_MAX).contains(&bytes.len())
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.:/+=".contains(b))
    };
    given.filter(is_sane).cloned().unwrap_or_else(new_request_id)
}

fn new_request_id() -> HeaderValue {
    let id = uuid::Builder::from_random_bytes(fastrand::u128(..).to_ne_bytes()).into_uuid();
    let mut text = uuid::Uuid::encode_buffer();
    HeaderValue::from_str(id.hyphenated().encode_lower(&mut text)).unwrap_or(HeaderValue::from_static("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sane_id_is_kept_and_any_other_replaced() {
        let keep = HeaderValue::from_static("trace-1:2/3_4.5");
        assert_eq!(request_id(Some(&keep)), keep);
        let long = HeaderValue::from_str(&"x".repeat(129)).unwrap();
        for bad in [
            HeaderValue::from_static(""),
            HeaderValue::from_static("a b"),
            HeaderValue::from_static("a\"b"),
            long,
        ] {
            let id = request_id(Some(&bad));
            assert_ne!(id, bad);
            assert_eq!(id.len(), 36);
        }
        assert_ne!(request_id(None), request_id(None));
    }
}
