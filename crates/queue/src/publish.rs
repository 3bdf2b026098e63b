//! The seam of publishing: events go out in batches, and each comes back with its fate.

use async_trait::async_trait;
use weir_store::quota::{AcceptedMessage, EnqueueOutcome, TOPIC};
use weir_store::{Error, Result};

use crate::sms;

/// Something to be published.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutgoingEvent {
    /// Whose order it keeps. Empty: nobody's.
    pub key: Vec<u8>,
    /// What it says.
    pub payload: Vec<u8>,
    /// What is said about it.
    pub headers: Vec<(&'static str, String)>,
}

impl OutgoingEvent {
    /// An event without headers. A `String` as the key is taken over, not copied.
    #[must_use]
    pub fn new(key: impl Into<Vec<u8>>, payload: Vec<u8>) -> Self {
        Self { key: key.into(), payload, headers: Vec::new() }
    }
}

/// What became of an event.
#[derive(Clone, Debug)]
pub enum PublishOutcome {
    /// It is there, on as many brokers as the topic asks for.
    Confirmed,
    /// It is certainly not there and will not be.
    Failed(Error),
    /// It may or may not be there, now or in a moment.
    Unknown(Error),
}

impl PublishOutcome {
    /// Whether the event is certainly there.
    #[must_use]
    pub const fn is_confirmed(&self) -> bool {
        matches!(self, Self::Confirmed)
    }
}

/// Where events are published.
#[async_trait]
pub trait Publisher: Send + Sync + 'static {
    /// Publishes a batch together, keeps the order of each key, and answers with one fate for each event, in the
    /// order of the events and within a bounded time. Dropping the future takes nothing back.
    async fn publish(&self, topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome>;
    /// Makes sure that somebody answers, within a bounded time.
    async fn ping(&self) -> Result<()>;
}

/// Publishes accepted messages as events of their topic, and says of each whether it is on its way.
pub async fn publish_accepted(
    publisher: &dyn Publisher,
    accepted: &[AcceptedMessage<'_>],
) -> Vec<EnqueueOutcome> {
    let events = accepted
        .iter()
        .map(|message| OutgoingEvent::new(message.user.as_str(), sms::encode(message)))
        .collect();
    let fates = publisher.publish(TOPIC, events).await;
    fates
        .into_iter()
        .map(|fate| match fate {
            PublishOutcome::Confirmed => EnqueueOutcome::Enqueued,
            PublishOutcome::Failed(error) => tell(&error, EnqueueOutcome::Failed),
            PublishOutcome::Unknown(error) => tell(&error, EnqueueOutcome::Unknown),
        })
        .collect()
}

/// The caller is told what became of its message; why is for the log.
fn tell(error: &Error, queued: EnqueueOutcome) -> EnqueueOutcome {
    tracing::debug!(target: "weir::kafka", error = %error.with_causes(), ?queued, "a message was not confirmed");
    queued
}
