//! Delivery of messages to the operator's SMS provider: each is posted as a signed webhook, in order for each user.
//!
//! A claim is worked off within its lease: no call begins when it could end too late to be settled. Messages that were not
//! called stay in the queue. One that failed waits there for its next attempt, and later ones of its user behind it; no lease
//! is held meanwhile. A message may be posted twice, after a crash or when an answer was lost, always with the same id.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use jiff::Timestamp as Rfc3339;
use parking_lot::Mutex;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use weir_core::Clock;
use weir_core::request::breaker::{BreakerRules, CallAdmission};
use weir_core::request::retry::{CallOutcome, RetryBackoff, RetryDecision, classify};
use weir_queue::sms::SmsEvent;
use weir_queue::{Message, Position, Settlement, sms};

use super::events::{SmsGivenUp, SmsRetried};
use super::metrics::QuotaMetrics;
use super::sender::message_id;
use super::settings::SenderSettings;
use crate::auth::webhook::WebhookSecret;
use crate::outbound::breaker::SharedBreaker;
use crate::outbound::{OutboundClient, OutboundLimits, OutboundTarget, Reach, webhook_headers};

/// Posted messages that are remembered. More than a source redelivers because of one message before them.
const POSTED_MAX: usize = 16_384;

/// What posting needs besides the settings.
pub(crate) struct ProviderDependencies {
    pub(crate) secret: WebhookSecret,
    /// The clock of signatures.
    pub(crate) clock: Arc<dyn Clock>,
    /// The clock of the breaker. It must not step.
    pub(crate) steady_clock: Arc<dyn Clock>,
}

pub(super) struct Provider {
    client: OutboundClient,
    target: OutboundTarget,
    breaker: SharedBreaker,
    secret: WebhookSecret,
    clock: Arc<dyn Clock>,
    settings: SenderSettings,
    metrics: QuotaMetrics,
    posted: Mutex<PostedMessages>,
}

/// The outcome for a message.
enum PostOutcome {
    /// It was accepted now or before, or cannot be decoded: its log line is next.
    ToLog,
    /// It was accepted and logged before, and is delivered again because of another message.
    Logged,
    Retry(Duration),
    Dead(String),
}

/// The body of a call.
#[derive(Serialize)]
struct SmsWebhook<'a> {
    r#type: &'static str,
    timestamp: Rfc3339,
    data: SmsWebhookData<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SmsWebhookData<'a> {
    message_id: Uuid,
    user_id: &'a str,
    message: &'a str,
}

impl Provider {
    /// `None` without `sender.url`.
    pub(super) fn new(
        dependencies: ProviderDependencies,
        settings: &SenderSettings,
        metrics: &QuotaMetrics,
    ) -> Option<Self> {
        let target = OutboundTarget::new(settings.url.as_ref()?)?;
        let limits = OutboundLimits {
            connect_timeout: settings.connect_timeout,
            read_timeout: settings.read_timeout,
            body_max: 0,
            idle_max: settings.concurrency,
        };
        let default = BreakerRules::default();
        let longer_than_a_call = settings.longest_call() + Duration::from_secs(1);
        let rules = BreakerRules { open_for: default.open_for.max(longer_than_a_call), ..default };
        let ProviderDependencies { secret, clock, steady_clock } = dependencies;
        let gauge = metrics.provider_breaker.clone();
        Some(Self {
            client: OutboundClient::trusting(settings.sslrootcert.clone(), Reach::Anywhere, limits),
            target,
            breaker: SharedBreaker::new("sender.url", rules, steady_clock, gauge),
            secret,
            clock,
            settings: settings.clone(),
            metrics: metrics.clone(),
            posted: Mutex::default(),
        })
    }

    /// How many messages may be claimed: none while the breaker is open, so that they lose no attempts.
    pub(super) fn claim_max(&self) -> usize {
        self.breaker.available_calls().min(self.settings.batch_max)
    }

    /// Posts the messages of a claim that was asked for at `claimed_at`. Returns those whose log lines are next, in order for
    /// each user, and what is settled besides.
    pub(super) async fn post_claimed(
        &self,
        messages: Vec<Message>,
        claimed_at: Instant,
        closing: &CancellationToken,
    ) -> (Vec<Message>, Settlement) {
        let stop_at = claimed_at + self.settings.calling_time();
        let mut users: Vec<Vec<Message>> = Vec::new();
        let mut index: HashMap<String, usize> = HashMap::new();
        for message in messages {
            let user = *index.entry(message.key.clone()).or_insert(users.len());
            if user == users.len() {
                users.push(Vec::new());
            }
            users[user].push(message);
        }
        let calls = users.into_iter().map(|messages| self.post_in_order(messages, stop_at, closing));
        let mut ended = stream::iter(calls).buffer_unordered(self.settings.concurrency);
        let (mut to_log, mut settlement) = (Vec::new(), Settlement::default());
        while let Some(outcomes) = ended.next().await {
            for (message, outcome) in outcomes {
                match outcome {
                    PostOutcome::ToLog => to_log.push(message),
                    PostOutcome::Logged => settlement.done.push(message.position),
                    PostOutcome::Retry(wait) => settlement.retry.push((message.position, wait)),
                    PostOutcome::Dead(reason) => settlement.dead.push((message.position, reason)),
                }
            }
        }
        (to_log, settlement)
    }

    /// Posts the messages of one user until one must wait, or time is up.
    async fn post_in_order(
        &self,
        messages: Vec<Message>,
        stop_at: Instant,
        closing: &CancellationToken,
    ) -> Vec<(Message, PostOutcome)> {
        let mut outcomes = Vec::with_capacity(messages.len());
        for message in messages {
            if Instant::now() >= stop_at || closing.is_cancelled() {
                break;
            }
            let Some(outcome) = self.post(&message).await else { break };
            let must_wait = matches!(outcome, PostOutcome::Retry(_));
            outcomes.push((message, outcome));
            if must_wait {
                break;
            }
        }
        outcomes
    }

    /// Posts a message, unless it was posted before. `None` if the breaker has opened: nothing was done.
    async fn post(&self, message: &Message) -> Option<PostOutcome> {
        let Ok(event) = sms::decode(&message.payload) else { return Some(PostOutcome::ToLog) };
        let id = message_id(&event, message);
        let is_logged = self.posted.lock().is_logged(message.position, id);
        match is_logged {
            Some(true) => return Some(PostOutcome::Logged),
            Some(false) => return Some(PostOutcome::ToLog),
            None => {}
        }
        let CallAdmission::Allowed(permit) = self.breaker.admit() else { return None };
        let body = self.body(&event, id);
        let (name, now) = (id.to_string(), self.clock.now());
        let headers = webhook_headers(&name, now, &self.secret.sign(&name, now, &body));
        let call = match self.client.post(&self.target, headers, body).await {
            Ok(response) => {
                CallOutcome::Answered { status: response.status.as_u16(), retry_after: response.retry_after }
            }
            Err(problem) => problem.outcome(),
        };
        let decision = classify(call);
        self.breaker.report(permit, decision.health());
        Some(self.outcome(message, id, decision))
    }

    fn outcome(&self, message: &Message, id: Uuid, decision: RetryDecision) -> PostOutcome {
        let attempts = message.attempts.saturating_add(1);
        match decision {
            RetryDecision::Complete | RetryDecision::AwaitCallback => {
                self.posted.lock().add(message.position, id);
                PostOutcome::ToLog
            }
            RetryDecision::Retry { cause, retry_after } if attempts < self.settings.attempts.get() => {
                let wait = RetryBackoff::DEFAULT.wait(attempts, retry_after, fastrand::u64(..));
                SmsRetried { user: &message.key, message_id: id, attempts, cause }.emit(&self.metrics);
                PostOutcome::Retry(wait)
            }
            RetryDecision::Retry { cause, .. } | RetryDecision::Fail(cause) => {
                SmsGivenUp { user: &message.key, message_id: id, attempts, cause }.emit(&self.metrics);
                PostOutcome::Dead(format!("{}: {cause}, after {attempts} attempts", cause.code()))
            }
        }
    }

    /// Records that the log lines of these messages are written.
    pub(super) fn mark_logged(&self, messages: &[Message]) {
        let mut posted = self.posted.lock();
        messages.iter().for_each(|message| posted.mark_logged(message.position));
    }

    fn body(&self, event: &SmsEvent<'_>, message_id: Uuid) -> Bytes {
        let now = || weir_queue::rfc3339(self.clock.now());
        let body = SmsWebhook {
            r#type: "sms.send",
            timestamp: event.accepted_at.unwrap_or_else(now),
            data: SmsWebhookData { message_id, user_id: &event.user_id, message: &event.message },
        };
        serde_json::to_vec(&body).expect("strings and numbers always become JSON").into()
    }
}

/// Messages that the provider has accepted and that may be claimed again: their settlement failed, or, with Kafka, an earlier
/// message of their partition is not settled. They are not posted again.
#[derive(Default)]
struct PostedMessages {
    /// The id of the message at each position, and whether its log line is written.
    messages: HashMap<Position, (Uuid, bool)>,
    oldest: VecDeque<Position>,
}

impl PostedMessages {
    fn is_logged(&self, position: Position, id: Uuid) -> Option<bool> {
        self.messages.get(&position).filter(|(posted, _)| *posted == id).map(|(_, is_logged)| *is_logged)
    }

    fn add(&mut self, position: Position, id: Uuid) {
        if self.messages.insert(position, (id, false)).is_none() {
            self.oldest.push_back(position);
        }
        if self.oldest.len() > POSTED_MAX
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.messages.remove(&oldest);
        }
    }

    fn mark_logged(&mut self, position: Position) {
        if let Some((_, is_logged)) = self.messages.get_mut(&position) {
            *is_logged = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(id: i64) -> Position {
        Position { shard: 1, id }
    }

    #[test]
    fn a_posted_message_is_known_by_position_and_id_until_it_is_logged_and_after() {
        let mut posted = PostedMessages::default();
        let (id, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert_eq!(posted.is_logged(position(1), id), None);
        posted.add(position(1), id);
        assert_eq!(posted.is_logged(position(1), id), Some(false));
        assert_eq!(posted.is_logged(position(1), other), None, "another message at the position");
        posted.mark_logged(position(1));
        posted.mark_logged(position(2));
        assert_eq!(posted.is_logged(position(1), id), Some(true));
    }

    #[test]
    fn posted_messages_are_bounded() {
        let mut posted = PostedMessages::default();
        for id in 0..=POSTED_MAX as i64 {
            posted.add(position(id), Uuid::nil());
        }
        assert_eq!((posted.messages.len(), posted.oldest.len()), (POSTED_MAX, POSTED_MAX));
        assert_eq!(posted.is_logged(position(0), Uuid::nil()), None, "the oldest is forgotten");
    }
}
