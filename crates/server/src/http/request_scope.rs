//! What every request and answer has in common: an id, a place in the metrics, and an answer even after a panic.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{CONNECTION, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, Request};

use super::error::ApiError;
use super::router::{RouteMatch, Router};
use crate::peer::Peer;
use crate::telemetry::metrics::{Metrics, Shortage};

/// The header an id travels in, both ways.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const REQUEST_ID_MAX: usize = 128;

/// Answers one request. This stands outside of the router's handlers rather than as a layer of each, which would cost every
/// request two allocations and a copy.
pub(crate) async fn answer<B>(
    router: &Router,
    metrics: &Metrics,
    peer: &Peer,
    mut request: Request<B>,
) -> Response
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    let started = Instant::now();
    let method = request.method().clone();
    let id = request_id(request.headers().get(REQUEST_ID));
    if request.headers().get(REQUEST_ID) != Some(&id) {
        // For the logs of handlers, which tell of a call under the id that its answer carries.
        request.headers_mut().insert(REQUEST_ID, id.clone());
    }
    let (matched, route) = router.find(&method, request.uri().path());
    let errors = matched.errors();
    let admitted = admit(router, metrics, peer, &matched, &request);
    let answered = async {
        match admitted {
            Ok(()) => router.answer(matched, peer, request.map(Body::new)).await,
            Err(refusal) => errors.refuse(refusal),
        }
    };
    let mut response = match AssertUnwindSafe(answered).catch_unwind().await {
        Ok(response) => response,
        Err(_panic) => {
            tracing::error!(request_id = ?id, route, "a handler panicked");
            errors.refuse(ApiError::internal())
        }
    };
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id);
    headers.insert(http::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    metrics.record_request(&method, route, response.status(), started.elapsed());
    response
}

/// What is asked of every request, whatever its route.
fn admit<B>(
    router: &Router,
    metrics: &Metrics,
    peer: &Peer,
    matched: &RouteMatch<'_>,
    request: &Request<B>,
) -> Result<(), ApiError> {
    if !is_plainly_framed(request.headers()) {
        let refusal = ApiError::invalid("Transfer-Encoding must be chunked, once, or not be there at all");
        return Err(refusal.with_header(CONNECTION, HeaderValue::from_static("close")));
    }
    router.hosts().check(request)?;
    if peer.is_in_reserve() && !matched.is_in_reserve() && !peer.leave_reserve() {
        metrics.record_shortage(Shortage::Connections);
        return Err(ApiError::unavailable("The server has as many connections as it may; try again"));
    }
    Ok(())
}

/// Whether a body comes as it is or in chunks. hyper takes the chunks apart and leaves other codings in place, which nobody after
/// it would know of.
fn is_plainly_framed(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => true,
        (Some(coding), None) => coding.as_bytes().eq_ignore_ascii_case(b"chunked"),
        (Some(_), Some(_)) => false,
    }
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

pub(crate) fn new_request_id() -> HeaderValue {
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
