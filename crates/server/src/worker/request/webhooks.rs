//! Outgoing webhooks: whoever gave a callback URL with a request is told when it is final.
//!
//! A webhook is queued in the commit that ends the request, signed as Standard Webhooks has it, and sent at least once.
//! Its id is the same each time it is sent. What the receiver refuses for good becomes a dead letter at once, anything
//! else after twelve attempts. Webhooks go out in no order, many at a time; a batch is settled when the slowest of them
//! has been answered or given up, and receivers that did not answer are left alone for a while (`slow`).

mod message;
mod slow;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::header::{CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tokio_util::sync::CancellationToken;
use weir_core::{Clock, RequestId, TenantId, webhook};
use weir_queue::{Claim, Message, Settlement, Source};
use weir_store::Result;
use weir_store::request::{Request, RequestStore, WEBHOOKS};

use self::slow::Slow;
use super::downstream::AGENT;
use crate::auth::webhook::WebhookSecret;
use crate::config::request::RequestSettings;
use crate::outbound::{Answer, Bounds, Outbound, Problem, Reach, Target};
use crate::seal::{Keyring, Part};
use crate::telemetry::metrics::{OutcomeLabels, WorkMetrics};

/// Webhooks under way at once.
const BATCH: usize = 64;
/// How often one is tried.
const ATTEMPTS_MAX: u32 = 12;
/// The wait between attempts, doubling from the first to the longest.
const WAITS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(3_600));
/// How soon webhooks that other servers queued are seen.
const POLL: Duration = Duration::from_millis(500);
/// How long a batch is this server's own beyond the time its calls may take.
const SPARE: Duration = Duration::from_secs(30);
/// The pause after the store could not be reached.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

const ID: HeaderName = HeaderName::from_static("webhook-id");
const TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");

/// Sends webhooks.
#[derive(Clone)]
pub(crate) struct Webhooks {
    parts: Parts,
    client: Outbound,
    timeout: Duration,
    slow: Arc<Slow>,
}

/// What is to be done about a webhook.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Done,
    Retry { asked: Option<Duration>, why: String },
    Dead(String),
}

/// What webhooks are sent with, besides the settings.
#[derive(Clone)]
pub(crate) struct Parts {
    /// Where they wait.
    pub source: Arc<dyn Source>,
    /// Where requests live.
    pub store: Arc<dyn RequestStore>,
    /// What results are opened with.
    pub keyring: Arc<Keyring>,
    /// What webhooks are signed with.
    pub secret: WebhookSecret,
    /// When they are signed.
    pub clock: Arc<dyn Clock>,
    /// How it goes.
    pub metrics: WorkMetrics,
}

impl Webhooks {
    /// Whoever sends from here.
    #[must_use]
    pub(crate) fn new(parts: Parts, settings: &RequestSettings) -> Self {
        let timeout = settings.webhook_timeout;
        let reach = if settings.allow_private { Reach::Anywhere } else { Reach::Public };
        let bounds = Bounds { connect_timeout: timeout, read_timeout: timeout, body_max: 0, idle_max: 0 };
        Self { parts, client: Outbound::new(reach, bounds), timeout, slow: Arc::default() }
    }

    /// Sends until told to stop, then finishes what it holds.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut reachable = true;
        let mut outcome = Ok(0);
        while !closing.is_cancelled() {
            let pause = async {
                match outcome {
                    Ok(0) => self.parts.source.wait(WEBHOOKS, POLL).await,
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
                }
            };
            tokio::select! {
                () = pause => {}
                () = closing.cancelled() => return,
            }
            outcome = self.send_some().await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut reachable, false)
            {
                tracing::warn!(error = %error.with_causes(), "webhooks cannot be sent and are tried again");
            }
            reachable = outcome.is_ok();
        }
    }

    /// Takes and sends one batch, and says how many it took.
    async fn send_some(&self) -> Result<usize> {
        let source = &self.parts.source;
        let Claim { messages, receipt } = source.claim(WEBHOOKS, BATCH, self.timeout + SPARE).await?;
        let taken = messages.len();
        if taken == 0 {
            return Ok(0);
        }
        let fates = join_all(messages.iter().map(|message| self.send(message))).await;
        let (mut settlement, mut broken) = (Settlement::default(), None);
        for (message, fate) in messages.iter().zip(fates) {
            match fate {
                Ok(fate) => self.settle(&mut settlement, message, fate),
                // It stays where it is: nothing was sent.
                Err(error) => broken = Some(error),
            }
        }
        if !source.settle(&receipt, settlement).await? {
            tracing::warn!("some webhooks were sent too late to be settled and will be sent again");
        }
        broken.map_or(Ok(taken), Err)
    }

    fn settle(&self, settlement: &mut Settlement, message: &Message, fate: Fate) {
        let (position, id) = (message.position, &message.key);
        let outcome = match fate {
            Fate::Done => {
                settlement.done.push(position);
                "sent"
            }
            Fate::Retry { asked, why } if message.attempts + 1 < ATTEMPTS_MAX => {
                tracing::info!(target: "weir::request", requestId = id, why, "a webhook will be sent again");
                settlement.retry.push((position, wait(message.attempts, asked)));
                "retried"
            }
            Fate::Retry { why, .. } | Fate::Dead(why) => {
                tracing::warn!(target: "weir::request", requestId = id, why, "a webhook is a dead letter");
                settlement.dead.push((position, why));
                "dead"
            }
        };
        self.parts.metrics.webhooks.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// Sends one. An error is the store's: the webhook was not sent.
    async fn send(&self, message: &Message) -> Result<Fate> {
        let id = std::str::from_utf8(&message.payload).ok().and_then(RequestId::parse);
        let Some(id) = id else {
            return Ok(Fate::Dead("not the id of a request".to_owned()));
        };
        // Purged since, or replayed: then it is told of its next end.
        let found = self.parts.store.find_request(id).await?.filter(|request| request.status.is_final());
        let Some(request) = found else { return Ok(Fate::Done) };
        let url: Option<url::Url> = request.callback_url.as_deref().and_then(|url| url.parse().ok());
        let Some((target, url)) = url.and_then(|url| Some((Target::new(&url)?, url))) else {
            return Ok(Fate::Dead("the callback URL is none".to_owned()));
        };
        let (tenant, receiver, now) = (&request.tenant, url.authority(), self.parts.clock.now());
        if self.slow.has(tenant, receiver, now) {
            let why = "the receiver did not answer a moment ago".to_owned();
            return Ok(Fate::Retry { asked: None, why });
        }
        let body = match self.body(&request) {
            Ok(body) => body,
            Err(error) => {
                return Ok(Fate::Retry { asked: None, why: format!("the result does not open: {error}") });
            }
        };
        let name = format!("{id}-{}", message.position.id);
        let headers = self.headers(tenant, &name, &body);
        let sent = tokio::time::timeout(self.timeout, self.client.post(&target, headers, body)).await;
        let sent = sent.unwrap_or(Err(Problem::TimedOut));
        match &sent {
            Err(Problem::TimedOut) => self.slow.add(tenant, receiver, now),
            _ => self.slow.remove(tenant, receiver),
        }
        Ok(judge(sent))
    }

    fn body(&self, request: &Request) -> std::result::Result<Bytes, crate::seal::OpenError> {
        let open = |sealed| self.parts.keyring.open(request.id, Part::Result, sealed);
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
fn judge(answer: std::result::Result<Answer, Problem>) -> Fate {
    match answer {
        Ok(Answer { status, .. }) if status.is_success() => Fate::Done,
        Ok(Answer { status, retry_after, .. }) => {
            let why = format!("the receiver answered {}", status.as_u16());
            let is_passing = matches!(
                status,
                StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
            );
            if status.is_client_error() && !is_passing {
                Fate::Dead(why)
            } else {
                Fate::Retry { asked: retry_after, why }
            }
        }
        Err(Problem::Forbidden) => Fate::Dead(Problem::Forbidden.to_string()),
        Err(problem) => Fate::Retry { asked: None, why: problem.to_string() },
    }
}

/// How long to wait after so many attempts before this one: at least as long as the receiver asks for, within the longest
/// wait, and a tenth more or less by chance.
fn wait(attempts_before: u32, asked: Option<Duration>) -> Duration {
    let (first, longest) = WAITS;
    let doubled = first.saturating_mul(1_u32.checked_shl(attempts_before).unwrap_or(u32::MAX));
    let wait = doubled.max(asked.unwrap_or_default()).min(longest);
    wait.mul_f64(0.9 + fastrand::f64() / 5.0)
}

#[cfg(test)]
mod tests;
