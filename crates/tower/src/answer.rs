//! The rate limit headers of every response, and the responses to refused requests.

use std::time::Duration;

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use weir_core::tier::LimitState;

use crate::policy::Policy;

/// A caller's state after a decision, for the headers.
#[derive(Clone, Debug)]
pub(crate) struct RateLimitHeaders {
    quota: u32,
    window: Duration,
    remaining: u32,
    /// Time until the next unit is available or, after a denial, until the same request would be allowed.
    reset_s: u64,
}

impl RateLimitHeaders {
    pub(crate) fn new(policy: &Policy, limit_state: &LimitState, retry_after: Option<Duration>) -> Self {
        let (quota, window) = policy.quota();
        let reset = retry_after.unwrap_or(limit_state.next_after);
        Self { quota, window, remaining: limit_state.remaining, reset_s: whole_seconds(reset) }
    }

    /// Writes the headers, replacing any that an inner service has written.
    pub(crate) fn write(&self, name: &str, headers: &mut HeaderMap) {
        let Self { quota, window, remaining, reset_s } = self;
        headers.insert("x-ratelimit-limit", HeaderValue::from(*quota));
        headers.insert("x-ratelimit-remaining", HeaderValue::from(*remaining));
        headers.insert("x-ratelimit-reset", HeaderValue::from(*reset_s));
        let mut insert = |header: &'static str, text: String| {
            // The name was checked when the policy was created; the rest are digits.
            if let Ok(value) = HeaderValue::from_str(&text) {
                headers.insert(header, value);
            }
        };
        insert("ratelimit-policy", format!("\"{name}\";q={quota};w={}", window.as_secs()));
        insert("ratelimit", format!("\"{name}\";r={remaining};t={reset_s}"));
    }

    /// The response to a denied request.
    pub(crate) fn deny<B: From<String>>(&self, name: &str) -> Response<B> {
        let wait = self.reset_s.max(1);
        let message = format!("The limit {name} is reached; try again in {wait} s");
        let mut response = error(StatusCode::TOO_MANY_REQUESTS, "RATE_LIMITED", &message, wait);
        self.write(name, response.headers_mut());
        response
    }
}

/// The response to a new caller while the memory is full.
pub(crate) fn full<B: From<String>>() -> Response<B> {
    let message = "More callers are being limited than there is room for; try again";
    error(StatusCode::SERVICE_UNAVAILABLE, "DEPENDENCY_UNAVAILABLE", message, 1)
}

fn error<B: From<String>>(status: StatusCode, code: &str, message: &str, retry_after: u64) -> Response<B> {
    let body = serde_json::json!({
        "status": status.as_u16(),
        "error": status.canonical_reason(),
        "code": code,
        "message": message,
        "timestamp": jiff::Timestamp::now().to_string(),
    });
    let mut response = Response::new(B::from(body.to_string()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(RETRY_AFTER, HeaderValue::from(retry_after));
    response
}

/// Whole seconds, rounded up, so that a caller who waits for them has waited long enough.
fn whole_seconds(span: Duration) -> u64 {
    span.as_secs().saturating_add(u64::from(span.subsec_nanos() > 0))
}
