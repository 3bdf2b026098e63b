//! Publishing: events are sent in batches, and each gets an outcome.

use async_trait::async_trait;
use weir_store::quota::{AcceptedMessage, EnqueueOutcome, TOPIC};
use weir_store::{Error, Result};

use crate::sms;

/// An event to publish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutgoingEvent {
    /// Events with the same key are kept in order. Empty: no order.
    pub key: Vec<u8>,
    pub payload: Vec<u8>,
    pub headers: Vec<(&'static str, String)>,
}

impl OutgoingEvent {
    /// An event without headers. A `String` as the key is moved, not copied.
    #[must_use]
    pub fn new(key: impl Into<Vec<u8>>, payload: Vec<u8>) -> Self {
        Self { key: key.into(), payload, headers: Vec::new() }
    }
}

#[derive(Clone, Debug)]
pub enum PublishOutcome {
    /// The event is in the topic, on as many brokers as the topic requires.
    Confirmed,
    /// The event is not in the topic and will not be.
    Failed(Error),
    /// The event may or may not be in the topic, now or later.
    Unknown(Error),
}

impl PublishOutcome {
    #[must_use]
    pub const fn is_confirmed(&self) -> bool {
        matches!(self, Self::Confirmed)
    }
}

#[async_trait]
pub trait Publisher: Send + Sync + 'static {
    /// Publishes a batch, keeping the order of each key, and returns one outcome per event, in order and within a bounded
    /// time. Dropping the future does not stop the publishing.
    async fn publish(&self, topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome>;
    /// Fails if no broker answers within a bounded time.
    async fn ping(&self) -> Result<()>;
}

/// Publishes accepted messages on their topic and returns one outcome per message.
pub async fn publish_accepted(
    publisher: &dyn Publisher,
    accepted: &[AcceptedMessage<'_>],
) -> Vec<EnqueueOutcome> {
    let events = accepted
        .iter()
        .map(|message| OutgoingEvent::new(message.user.as_str(), sms::encode(message)))
        .collect();
    let outcomes = publisher.publish(TOPIC, events).await;
    outcomes
        .into_iter()
        .map(|outcome| match outcome {
            PublishOutcome::Confirmed => EnqueueOutcome::Enqueued,
            PublishOutcome::Failed(error) => log_unconfirmed(&error, EnqueueOutcome::Failed),
            PublishOutcome::Unknown(error) => log_unconfirmed(&error, EnqueueOutcome::Unknown),
        })
        .collect()
}

/// Logs why a message was not confirmed; the caller gets only the outcome.
fn log_unconfirmed(error: &Error, outcome: EnqueueOutcome) -> EnqueueOutcome {
    tracing::debug!(target: "weir::kafka", error = %error.with_causes(), ?outcome, "a message was not confirmed");
    outcome
}
