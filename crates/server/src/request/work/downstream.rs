//! Downstreams and the calls to them.
//!
//! A call has the request's id as its idempotency key, so that a downstream that is called twice does the work once.
//! `weir-core` decides what a response means. Without a URL the downstream is the built-in echo, which completes every request
//! with its own payload.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::header::{ACCEPT, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue};
use weir_core::request::breaker::BreakerRules;
use weir_core::request::retry::CallOutcome;
use weir_core::{Clock, RequestId, RequestType};
use weir_store::request::Job;
use weir_store::spans::Span;

use super::WorkerDependencies;
use super::limits::DownstreamLimits;
use crate::auth::webhook::WebhookSecret;
use crate::outbound::breaker::SharedBreaker;
use crate::outbound::{
    AGENT, OutboundClient, OutboundError, OutboundLimits, OutboundResponse, OutboundTarget, Reach,
    write_signature,
};
use crate::request::settings::{DownstreamSettings, RequestSettings};
use crate::request::trace;
use crate::telemetry::labels::DownstreamLabels;

/// The largest result.
const RESULT_BYTES_MAX: usize = 1024 * 1024;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The default downstream in logs and metrics.
const DEFAULT: &str = "default";

/// All downstreams of the settings.
pub(super) struct Downstreams {
    named: BTreeMap<String, Arc<Downstream>>,
    default: Arc<Downstream>,
}

impl Downstreams {
    pub(super) fn new(dependencies: &WorkerDependencies) -> Self {
        let settings = &dependencies.settings;
        let open = |name: &str, of: &DownstreamSettings| Arc::new(Downstream::new(name, of, dependencies));
        Self {
            named: settings.downstreams.iter().map(|(name, of)| (name.clone(), open(name, of))).collect(),
            default: open(DEFAULT, &settings.downstream),
        }
    }

    /// The downstream of this name, or the default if it is no longer in the settings.
    pub(super) fn get(&self, name: &str) -> &Arc<Downstream> {
        self.named.get(name).unwrap_or(&self.default)
    }

    /// The names in the settings.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.named.keys().map(String::as_str).chain([RequestSettings::DEFAULT_DOWNSTREAM])
    }
}

pub(super) struct Downstream {
    /// `None` for the built-in echo.
    client: Option<(OutboundClient, OutboundTarget)>,
    /// Headers of every call, credentials among them.
    headers: HeaderMap,
    /// Signs the calls, if the downstream wants that.
    signer: Option<CallSigner>,
    pub(super) limits: DownstreamLimits,
    pub(super) breaker: SharedBreaker,
}

/// Signs calls as Standard Webhooks defines it, with the secret that the downstream signs its callbacks with.
struct CallSigner {
    secret: WebhookSecret,
    clock: Arc<dyn Clock>,
}

impl CallSigner {
    /// `webhook-id` is the id of the request, the same with each attempt.
    fn write_headers(&self, headers: &mut HeaderMap, id: RequestId, body: &[u8]) {
        let (now, id) = (self.clock.now(), id.to_string());
        let signature = self.secret.sign(&id, now, body);
        write_signature(headers, &id, now, &signature);
    }
}

pub(super) struct DownstreamResponse {
    pub(super) outcome: CallOutcome,
    /// The body, if there is one.
    pub(super) result: Option<Bytes>,
    /// Why there was no response, for the log.
    pub(super) problem: Option<OutboundError>,
}

impl Downstream {
    fn new(name: &str, settings: &DownstreamSettings, dependencies: &WorkerDependencies) -> Self {
        let DownstreamSettings { url, headers, sign, connect_timeout, read_timeout, sslrootcert, .. } =
            settings;
        let WorkerDependencies { clock, metrics, secret, wall_clock, .. } = dependencies;
        let bounds = OutboundLimits {
            connect_timeout: *connect_timeout,
            read_timeout: *read_timeout,
            body_max: RESULT_BYTES_MAX,
            idle_max: dependencies.settings.concurrency,
        };
        let target = url.as_ref().and_then(OutboundTarget::new);
        let default = BreakerRules::default();
        let call = connect_timeout.saturating_add(*read_timeout).saturating_add(Duration::from_secs(1));
        let rules = BreakerRules { open_for: default.open_for.max(call), ..default };
        let labels = DownstreamLabels { downstream: name.to_owned() };
        let gauge = metrics.breaker_state.get_or_create_owned(&labels);
        Self {
            client: target.map(|target| {
                (OutboundClient::trusting(sslrootcert.clone(), Reach::Anywhere, bounds), target)
            }),
            headers: headers.clone(),
            signer: sign.then(|| CallSigner { secret: secret.clone(), clock: Arc::clone(wall_clock) }),
            limits: DownstreamLimits::new(settings, clock),
            breaker: SharedBreaker::new(name, rules, Arc::clone(clock), gauge),
        }
    }

    /// Sends a request. `payload` is the JSON that the caller sent.
    pub(super) async fn call(&self, job: &Job, payload: Vec<u8>) -> DownstreamResponse {
        let Some((client, target)) = &self.client else {
            let outcome = CallOutcome::Answered { status: 200, retry_after: None };
            return DownstreamResponse { outcome, result: Some(payload.into()), problem: None };
        };
        let mut span = trace::begin_call(job.trace.as_ref(), "downstream", job.id);
        let body = body(job.id, &job.request_type, &payload);
        let mut headers = headers(job, span.as_ref());
        headers.extend(self.headers.iter().map(|(name, value)| (name.clone(), value.clone())));
        if let Some(signer) = &self.signer {
            signer.write_headers(&mut headers, job.id, &body);
        }
        let answer = client.post(target, headers, body).await;
        if let Some(span) = &mut span {
            describe(span, job, &answer);
        }
        match answer {
            Ok(OutboundResponse { status, retry_after, body }) => DownstreamResponse {
                outcome: CallOutcome::Answered { status: status.as_u16(), retry_after },
                result: Some(body).filter(|body| !body.is_empty()),
                problem: None,
            },
            Err(problem) => {
                DownstreamResponse { outcome: problem.outcome(), result: None, problem: Some(problem) }
            }
        }
    }
}

fn describe(span: &mut Span, job: &Job, answer: &Result<OutboundResponse, OutboundError>) {
    let name = if job.downstream.is_empty() { DEFAULT } else { &*job.downstream };
    span.describe("weir.downstream", name.to_owned());
    span.describe("weir.attempt", job.attempt.to_string());
    match answer {
        Ok(response) => {
            span.describe("http.response.status_code", response.status.as_str().to_owned());
            if !response.status.is_success() {
                span.fail();
            }
        }
        Err(error) => {
            span.describe("error.type", error.to_string());
            span.fail();
        }
    }
}

fn headers(job: &Job, span: Option<&Span>) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(CONTENT_TYPE, JSON);
    headers.insert(ACCEPT, JSON);
    headers.insert(USER_AGENT, AGENT);
    // A UUID is always a header's value.
    if let Ok(id) = HeaderValue::try_from(job.id.to_string()) {
        headers.insert(IDEMPOTENCY_KEY, id.clone());
        headers.insert(REQUEST_ID, id);
    }
    trace::write_headers(&mut headers, job.id, job.trace.as_ref(), span);
    headers
}

/// The body of a call. The payload's bytes stay as they are, so numbers of any length survive.
fn body(id: RequestId, request_type: &RequestType, payload: &[u8]) -> Bytes {
    let mut body = BytesMut::with_capacity(payload.len() + 128 + request_type.as_str().len());
    let quoted = serde_json::Value::from(request_type.as_str());
    body.put_slice(format!(r#"{{"requestId":"{id}","requestType":{quoted},"payload":"#).as_bytes());
    body.put_slice(payload);
    body.put_u8(b'}');
    body.freeze()
}

#[cfg(test)]
mod tests {
    use weir_core::Timestamp;

    use super::*;

    #[test]
    fn a_payload_is_forwarded_byte_by_byte() {
        let id = RequestId::new(Timestamp::EPOCH, [1; 10]);
        let request_type = RequestType::parse("pay \"now\"").unwrap();
        let body = body(id, &request_type, b"[1.0, 1e400 ,{}]");
        let expected =
            format!(r#"{{"requestId":"{id}","requestType":"pay \"now\"","payload":[1.0, 1e400 ,{{}}]}}"#);
        assert_eq!(body, expected.as_bytes());
    }
}
