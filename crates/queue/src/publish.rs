//! Publishing: events are sent in batches, and each gets an outcome.

use async_trait::async_trait;
use weir_core::{SpanId, TraceContext};
use weir_store::quota::{AcceptedMessage, EnqueueOutcome, TOPIC};
use weir_store::spans::{Span, SpanKind};
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
        .map(|message| OutgoingEvent {
            headers: message
                .trace
                .as_ref()
                .map_or_else(Vec::new, |trace| trace_headers(trace, event_span(message))),
            ..OutgoingEvent::new(message.user.as_str(), sms::encode(message))
        })
        .collect();
    let spans: Vec<Span> = accepted.iter().filter_map(publish_span).collect();
    let outcomes = publisher.publish(TOPIC, events).await;
    drop(spans);
    outcomes
        .into_iter()
        .map(|outcome| match outcome {
            PublishOutcome::Confirmed => EnqueueOutcome::Enqueued,
            PublishOutcome::Failed(error) => log_unconfirmed(&error, EnqueueOutcome::Failed),
            PublishOutcome::Unknown(error) => log_unconfirmed(&error, EnqueueOutcome::Unknown),
        })
        .collect()
}

/// The headers of an event that goes on with a trace, in a span of its own.
#[must_use]
pub fn trace_headers(trace: &TraceContext, span: SpanId) -> Vec<(&'static str, String)> {
    let mut headers = vec![("traceparent", trace.parent.in_span(span).to_string())];
    headers.extend(trace.state.as_ref().map(|state| ("tracestate", state.to_string())));
    headers
}

/// The event's span is named by the random part of the message's id.
fn event_span(message: &AcceptedMessage<'_>) -> SpanId {
    let (_, random) = message.message_id.as_uuid().as_u64_pair();
    SpanId::from_number(random)
}

/// The span that the event's headers name, below the call that sent the message.
fn publish_span(message: &AcceptedMessage<'_>) -> Option<Span> {
    let parent = message.trace.as_ref()?.parent;
    Span::begin_as(event_span(message), parent, "publish sms-outbound", SpanKind::Producer)
}

/// Logs why a message was not confirmed; the caller gets only the outcome.
fn log_unconfirmed(error: &Error, outcome: EnqueueOutcome) -> EnqueueOutcome {
    tracing::debug!(target: "weir::kafka", error = %error.with_causes(), ?outcome, "a message was not confirmed");
    outcome
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use weir_core::{MessageId, Timestamp, TraceParent, UserId};

    use super::*;

    /// Confirms and keeps every event.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<OutgoingEvent>>);

    #[async_trait]
    impl Publisher for Recorder {
        async fn publish(&self, _topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome> {
            let outcomes = events.iter().map(|_| PublishOutcome::Confirmed).collect();
            self.0.lock().extend(events);
            outcomes
        }

        async fn ping(&self) -> Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn events_carry_the_trace_of_their_calls_each_in_its_own_span() {
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
        let trace = TraceContext::stored(Some(parent), Some("a=1")).unwrap();
        let user = UserId::parse("alice").unwrap();
        let message = |random: u8, trace| {
            let message_id = MessageId::new(Timestamp::EPOCH, [random; 10]);
            AcceptedMessage { message_id, user: &user, message: "hi", trace, at: Timestamp::EPOCH }
        };
        let recorder = Recorder::default();
        let accepted = [message(1, Some(&trace)), message(2, Some(&trace)), message(3, None)];
        publish_accepted(&recorder, &accepted).await;
        let events = recorder.0.into_inner();
        let mut spans = vec![trace.parent.span_id];
        for event in &events[..2] {
            let [("traceparent", parent), ("tracestate", state)] = &event.headers[..] else {
                panic!("{:?}", event.headers)
            };
            let parent = TraceParent::parse(parent.as_bytes()).unwrap();
            assert_eq!((parent.trace_id, parent.is_sampled), (trace.parent.trace_id, false));
            assert!(!spans.contains(&parent.span_id), "{parent}");
            assert_eq!(state, "a=1");
            spans.push(parent.span_id);
        }
        assert!(events[2].headers.is_empty());
    }
}
