//! One webhook: what is sent, to which receiver, and what its answer means.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use weir_core::{TenantId, webhook};
use weir_store::Result;
use weir_store::request::Request;

use super::fair_queue::Turn;
use super::{Taken, Webhooks, message};
use crate::outbound::{OutboundError, OutboundResponse, OutboundTarget};
use crate::request::encryption::{OpenError, SealedField};
use crate::request::work::downstream::AGENT;

/// The wait between attempts, doubling from the first to the longest.
const WAITS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(3_600));

/// A webhook to a receiver that is left alone costs no attempt until its request has been final for so long. After that it
/// does, so that no webhook is put off for ever.
const FREE_WAITS_FOR: Duration = Duration::from_secs(24 * 3_600);

const ID: HeaderName = HeaderName::from_static("webhook-id");
const TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// What is to be done about a webhook.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// To be sent again, which costs an attempt.
    Retry {
        retry_after: Option<Duration>,
        reason: String,
    },
    /// Not to be called before this time has passed, which costs no attempt.
    PutOff(Duration),
    Dead(String),
}

/// Where the webhook of a request goes.
pub(super) fn receiver_of(request: &Request) -> std::result::Result<(OutboundTarget, url::Url), Outcome> {
    let url: Option<url::Url> = request.callback_url.as_deref().and_then(|url| url.parse().ok());
    let target = url.and_then(|url| Some((OutboundTarget::new(&url)?, url)));
    target.ok_or_else(|| Outcome::Dead("the callback URL is missing or cannot be called".to_owned()))
}

impl Webhooks {
    /// Sends one. An error is the store's: the webhook was not sent.
    pub(super) async fn send(&self, turn: &Turn<Taken>) -> Result<Outcome> {
        let Turn { tenant, receiver, item } = turn;
        let now = self.parts.steady_clock.now();
        if let Some(time_left) = self.slow.time_left(tenant, receiver, now) {
            return Ok(self.leave_alone(item, time_left));
        }
        // If it was purged there is nothing to say; if it was replayed, its next end has a webhook of its own.
        let found = self.parts.store.find_request(item.id).await?.filter(|request| request.status.is_final());
        let Some(request) = found else { return Ok(Outcome::Done) };
        let target = match receiver_of(&request) {
            Ok((target, _)) => target,
            Err(outcome) => return Ok(outcome),
        };
        let body = match self.body(&request) {
            Ok(body) => body,
            Err(error) => {
                let reason = format!("the result does not open: {error}");
                return Ok(Outcome::Retry { retry_after: None, reason });
            }
        };
        let name = format!("{}-{}", item.id, item.message.position.id);
        let headers = self.headers(tenant, &name, &body);
        let sent = tokio::time::timeout(self.timeout, self.client.post(&target, headers, body)).await;
        let sent = sent.unwrap_or(Err(OutboundError::TimedOut));
        match &sent {
            Err(OutboundError::TimedOut) => self.slow.add(tenant, receiver, now),
            _ => self.slow.remove(tenant, receiver),
        }
        Ok(judge(sent))
    }

    /// Puts a webhook off whose receiver is left alone for so much longer.
    fn leave_alone(&self, webhook: &Taken, time_left: Duration) -> Outcome {
        if self.parts.clock.now().since(webhook.final_since) < FREE_WAITS_FOR {
            return Outcome::PutOff(time_left);
        }
        Outcome::Retry { retry_after: None, reason: "the receiver did not answer a moment ago".to_owned() }
    }

    fn body(&self, request: &Request) -> std::result::Result<Bytes, OpenError> {
        let open = |sealed| self.parts.keyring.open(request.id, SealedField::Result, sealed);
        let result = request.result.as_ref().map(open).transpose()?;
        Ok(message::encode(request, result.as_deref()))
    }

    fn headers(&self, tenant: &TenantId, name: &str, body: &Bytes) -> HeaderMap {
        let now = self.parts.clock.now();
        let signature = self.parts.secret.sign_for(tenant, name, now, body);
        let mut headers = HeaderMap::with_capacity(5);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, AGENT);
        for (header, value) in [(ID, name), (TIMESTAMP, &webhook::timestamp(now)), (SIGNATURE, &signature)] {
            // Digits, hyphens and base64 are always a header's value.
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(header, value);
            }
        }
        headers
    }
}

/// What an answer means: taken, refused for good, or worth another attempt.
pub(super) fn judge(answer: std::result::Result<OutboundResponse, OutboundError>) -> Outcome {
    match answer {
        Ok(OutboundResponse { status, .. }) if status.is_success() => Outcome::Done,
        Ok(OutboundResponse { status, retry_after, .. }) => {
            let reason = format!("the receiver answered {}", status.as_u16());
            let is_passing = matches!(
                status,
                StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
            );
            if status.is_client_error() && !is_passing {
                Outcome::Dead(reason)
            } else {
                Outcome::Retry { retry_after, reason }
            }
        }
        Err(OutboundError::ForbiddenAddress) => Outcome::Dead(OutboundError::ForbiddenAddress.to_string()),
        Err(problem) => Outcome::Retry { retry_after: None, reason: problem.to_string() },
    }
}

/// How long to wait after so many attempts before this one: at least as long as the receiver asks for, within the longest
/// wait, and a tenth more or less by chance.
pub(super) fn wait(attempts_before: u32, retry_after: Option<Duration>) -> Duration {
    let (first, longest) = WAITS;
    let doubled = first.saturating_mul(1_u32.checked_shl(attempts_before).unwrap_or(u32::MAX));
    let wait = doubled.max(retry_after.unwrap_or_default()).min(longest);
    wait.mul_f64(0.9 + fastrand::f64() / 5.0)
}
