//! The polling thread: reads messages ahead and repeats failed commits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::Message as _;
use rdkafka::consumer::{CommitMode, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedHeaders, BorrowedMessage, Headers as _};
use weir_core::TraceContext;
use weir_core::trace::TRACESTATE_BYTES_MAX;

use super::{Consumer, Entry, SharedSource, SourceState, list};
use crate::{Message, Position};

/// How long a poll waits for messages, and the longest time until a stop is noticed.
const POLL: Duration = Duration::from_millis(100);
/// The most messages taken from librdkafka before they are added to those in flight.
const POLL_MESSAGES_MAX: usize = 256;
/// How long to wait for capacity before fetching is paused. Polling continues, so that the group does not expel this member.
const PAUSE_AFTER: Duration = Duration::from_secs(2);
/// The interval at which unconfirmed offsets are committed again.
const COMMIT_AGAIN: Duration = Duration::from_secs(1);

impl SharedSource {
    /// Polls until the source is closed, then leaves the group.
    pub(super) fn run(&self, consumer: Arc<Consumer>) {
        let (mut paused, mut committed_at) = (false, Instant::now());
        while !self.is_ending() {
            let full = self.wait_for_capacity(if paused { POLL } else { PAUSE_AFTER });
            if full || paused {
                paused = full;
                pause(&consumer, paused);
            }
            // A paused consumer yields no messages but must still poll, or the group expels it.
            self.fetch(&consumer, if paused { Duration::ZERO } else { POLL });
            if committed_at.elapsed() > COMMIT_AGAIN {
                committed_at = Instant::now();
                self.commit_again(&consumer);
            }
        }
        self.state.lock().consumer = None;
        // A commit may still use the consumer, until librdkafka's timeout.
        let mut last = consumer;
        let consumer = loop {
            match Arc::try_unwrap(last) {
                Ok(consumer) => break consumer,
                Err(shared) => last = shared,
            }
            self.changed.wait_for(&mut self.state.lock(), POLL);
        };
        drop(consumer);
        // Stores a permit if `close` does not wait yet.
        self.closed.notify_one();
    }

    /// Waits until fewer messages are in flight. Returns whether there are still too many.
    fn wait_for_capacity(&self, at_most: Duration) -> bool {
        let full = |state: &mut SourceState| state.in_flight.is_full() && !self.is_ending();
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, full, at_most);
        state.in_flight.is_full()
    }

    /// Polls the available messages and adds them to those in flight.
    fn fetch(&self, consumer: &Consumer, at_most: Duration) {
        let mut fetched = Vec::new();
        let mut timeout = at_most;
        // A rebalance ends the loop, so messages are added under the same assignment under which they were read.
        while fetched.len() < POLL_MESSAGES_MAX
            && let Some(polled) = consumer.poll(timeout)
        {
            timeout = Duration::ZERO;
            match polled {
                Ok(message) => fetched.extend(entry(&message)),
                Err(cause) => self.log_poll_error(&cause),
            }
        }
        if fetched.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.reachable, true) {
            tracing::info!(target: "weir::kafka", topic = self.topic, "Kafka delivers messages again");
        }
        state.in_flight.put(fetched);
        drop(state);
        self.wake.notify_one();
    }

    /// Logs the first of several errors as a warning. librdkafka retries by itself.
    fn log_poll_error(&self, cause: &KafkaError) {
        // This error is about one broker of several. If it is the last one, another error follows.
        let minor = cause.rdkafka_error_code() == Some(RDKafkaErrorCode::BrokerTransportFailure);
        if !minor && std::mem::replace(&mut self.state.lock().reachable, false) {
            tracing::warn!(target: "weir::kafka", topic = self.topic, error = %cause, "no messages can be read for now");
        } else {
            tracing::debug!(target: "weir::kafka", topic = self.topic, error = %cause, "still no messages can be read");
        }
    }

    /// Commits offsets of failed commits again, without waiting.
    fn commit_again(&self, consumer: &Consumer) {
        let offsets = {
            let state = self.state.lock();
            if state.committing { Vec::new() } else { state.in_flight.uncommitted() }
        };
        if !offsets.is_empty()
            && let Err(error) =
                list(&self.topic, &offsets).and_then(|offsets| consumer.commit(&offsets, CommitMode::Async))
        {
            tracing::debug!(target: "weir::kafka", topic = self.topic, %error, "offsets are not committed yet");
        }
    }
}

/// Stops or resumes fetching.
fn pause(consumer: &Consumer, pause: bool) {
    let assigned = consumer.assignment();
    let done = assigned.and_then(|all| if pause { consumer.pause(&all) } else { consumer.resume(&all) });
    if let Err(error) = done {
        tracing::debug!(target: "weir::kafka", %error, pause, "cannot stop or resume fetching");
    }
}

fn entry(message: &BorrowedMessage<'_>) -> Option<Entry> {
    // No topic has more than 65,536 partitions.
    let shard = u16::try_from(message.partition()).ok()?;
    let key = message.key().unwrap_or_default();
    let message = Message {
        position: Position { shard, id: message.offset() },
        key: String::from_utf8_lossy(key).into_owned(),
        payload: message.payload().unwrap_or_default().to_vec(),
        attempts: 0,
        trace: message.headers().and_then(trace),
    };
    Some(Entry { message, key: key.to_vec() })
}

/// The trace in the headers of an event. As in HTTP, a header that is malformed or there twice counts as none.
fn trace(headers: &BorrowedHeaders) -> Option<TraceContext> {
    let only = |name: &str| {
        let mut values = headers.iter().filter(|header| header.key == name).map(|header| header.value);
        let first = values.next().flatten()?;
        values.next().is_none().then(|| std::str::from_utf8(first).ok()).flatten()
    };
    let state = only("tracestate").filter(|state| (1..=TRACESTATE_BYTES_MAX).contains(&state.len()));
    TraceContext::stored(Some(only("traceparent")?), state)
}
