//! One webhook: its receiver, its body and headers, and what the response means.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use weir_core::TenantId;
use weir_store::Result;
use weir_store::request::Request;

use super::fair_queue::ReadyWebhook;
use super::{ClaimedWebhook, Webhooks, message};
use crate::outbound::{OutboundError, OutboundResponse, OutboundTarget, webhook_headers};
use crate::request::encryption::{Keyring, OpenError, SealedField};
use crate::request::trace;

/// The wait between attempts, doubling from the first to the longest.
const WAITS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(3_600));

/// Deferring a webhook to an unresponsive receiver costs no attempt until its request has been final for this long. After that
/// it does, so that no webhook is deferred for ever.
const FREE_DEFERRALS_FOR: Duration = Duration::from_secs(24 * 3_600);

/// The outcome of sending a webhook.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WebhookOutcome {
    Done,
    /// Send again, which costs an attempt.
    Retry {
        retry_after: Option<Duration>,
        reason: String,
    },
    /// Send again after this time, which costs no attempt.
    Deferred(Duration),
    Dead(String),
}

/// The receiver of a request's webhook.
pub(super) fn receiver_of(
    keyring: &Keyring,
    request: &Request,
) -> std::result::Result<(OutboundTarget, url::Url), WebhookOutcome> {
    let url = request.callback_url.as_deref();
    let url = url.map(|url| keyring.open_text(request.id, SealedField::CallbackUrl, url)).transpose();
    let url = url.map_err(|error| {
        let reason = format!("cannot decrypt the callback URL: {error}");
        WebhookOutcome::Retry { retry_after: None, reason }
    })?;
    let url: Option<url::Url> = url.and_then(|url| url.parse().ok());
    let target = url.and_then(|url| Some((OutboundTarget::new(&url)?, url)));
    target.ok_or_else(|| WebhookOutcome::Dead("the callback URL is missing or cannot be called".to_owned()))
}

impl Webhooks {
    /// Sends a webhook. An error comes from the store: the webhook was not sent.
    pub(super) async fn send(&self, ready: &ReadyWebhook<ClaimedWebhook>) -> Result<WebhookOutcome> {
        let ReadyWebhook { tenant, receiver, item } = ready;
        let now = self.dependencies.steady_clock.now();
        if let Some(time_left) = self.unresponsive.time_left(tenant, receiver, now) {
            return Ok(self.defer_or_retry(item, time_left));
        }
        // A purged or cancelled request needs no webhook; a replayed one gets another when it is final again.
        let found = self.dependencies.store.find_request(item.id).await?;
        let Some(request) = found.filter(|request| request.status.has_outcome()) else {
            return Ok(WebhookOutcome::Done);
        };
        let target = match receiver_of(&self.dependencies.keyring, &request) {
            Ok((target, _)) => target,
            Err(outcome) => return Ok(outcome),
        };
        let body = match self.body(&request) {
            Ok(body) => body,
            Err(error) => {
                let reason = format!("cannot decrypt the result or the failure message: {error}");
                return Ok(WebhookOutcome::Retry { retry_after: None, reason });
            }
        };
        let name = format!("{}-{}", item.id, item.message.position.id);
        let mut headers = self.headers(tenant, &name, &body);
        let mut span = trace::begin_call(request.trace.as_ref(), "webhook", request.id);
        trace::write_headers(&mut headers, request.id, request.trace.as_ref(), span.as_ref());
        let sent = tokio::time::timeout(self.timeout, self.client.post(&target, headers, body)).await;
        let sent = sent.unwrap_or(Err(OutboundError::TimedOut));
        if let Some(span) =
            span.as_mut().filter(|_| !sent.as_ref().is_ok_and(|sent| sent.status.is_success()))
        {
            span.fail();
        }
        drop(span);
        match &sent {
            Err(OutboundError::TimedOut) => self.unresponsive.add(tenant, receiver, now),
            _ => self.unresponsive.remove(tenant, receiver),
        }
        Ok(classify(sent))
    }

    /// Defers a webhook whose receiver is not called for `time_left`.
    fn defer_or_retry(&self, webhook: &ClaimedWebhook, time_left: Duration) -> WebhookOutcome {
        if self.dependencies.clock.now().since(webhook.final_since) < FREE_DEFERRALS_FOR {
            return WebhookOutcome::Deferred(time_left);
        }
        WebhookOutcome::Retry {
            retry_after: None,
            reason: "the receiver did not answer a moment ago".to_owned(),
        }
    }

    fn body(&self, request: &Request) -> std::result::Result<Bytes, OpenError> {
        let open = |sealed| self.dependencies.keyring.open(request.id, SealedField::Result, sealed);
        let result = request.result.as_ref().map(open).transpose()?;
        let message = request.failure.as_ref().map(|failure| {
            self.dependencies.keyring.open_text(request.id, SealedField::FailureMessage, &failure.message)
        });
        Ok(message::encode(request, message.transpose()?.as_deref(), result.as_deref()))
    }

    fn headers(&self, tenant: &TenantId, name: &str, body: &Bytes) -> HeaderMap {
        let now = self.dependencies.clock.now();
        let signature = self.dependencies.secret.sign_for(tenant, name, now, body);
        webhook_headers(name, now, &signature)
    }
}

/// What a response means: accepted, refused for good, or worth another attempt.
pub(super) fn classify(answer: std::result::Result<OutboundResponse, OutboundError>) -> WebhookOutcome {
    match answer {
        Ok(OutboundResponse { status, .. }) if status.is_success() => WebhookOutcome::Done,
        Ok(OutboundResponse { status, retry_after, .. }) => {
            let reason = format!("the receiver answered {}", status.as_u16());
            let is_passing = matches!(
                status,
                StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
            );
            if status.is_client_error() && !is_passing {
                WebhookOutcome::Dead(reason)
            } else {
                WebhookOutcome::Retry { retry_after, reason }
            }
        }
        Err(OutboundError::ForbiddenAddress) => {
            WebhookOutcome::Dead(OutboundError::ForbiddenAddress.to_string())
        }
        Err(problem) => WebhookOutcome::Retry { retry_after: None, reason: problem.to_string() },
    }
}

/// How long to wait before the next attempt: at least as long as the receiver asks for, at most the longest wait, and up to a
/// tenth more or less at random.
pub(super) fn wait(attempts_before: u32, retry_after: Option<Duration>) -> Duration {
    let (first, longest) = WAITS;
    let doubled = first.saturating_mul(1_u32.checked_shl(attempts_before).unwrap_or(u32::MAX));
    let wait = doubled.max(retry_after.unwrap_or_default()).min(longest);
    wait.mul_f64(0.9 + fastrand::f64() / 5.0)
}
