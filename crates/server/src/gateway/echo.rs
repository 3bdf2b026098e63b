//! The built-in upstream, so that the route works without `ai.upstream`. Answers with the request body or, if that is
//! empty, with a description of the request.

use axum::body::{Body, HttpBody};
use axum::response::Response;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderName, HeaderValue, Request};

use super::request_body::RequestBody;

const UPSTREAM: HeaderName = HeaderName::from_static("x-weir-upstream");

pub(super) fn answer<B>(request: &Request<B>, body: RequestBody) -> Response {
    let mut response = if body.is_end_stream() { describe(request) } else { repeat(request, body) };
    response.headers_mut().insert(UPSTREAM, HeaderValue::from_static("echo"));
    response
}

fn repeat<B>(request: &Request<B>, body: RequestBody) -> Response {
    let mut response = Response::new(Body::new(body));
    for name in [CONTENT_TYPE, CONTENT_ENCODING] {
        if let Some(value) = request.headers().get(&name) {
            response.headers_mut().insert(name, value.clone());
        }
    }
    response
}

fn describe<B>(request: &Request<B>) -> Response {
    let uri = request.uri();
    let body = serde_json::json!({
        "method": request.method().as_str(),
        "path": uri.path(),
        "query": uri.query(),
    });
    let mut response = Response::new(Body::from(body.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
