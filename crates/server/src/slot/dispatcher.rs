//! The dispatcher: publishes each slot when its time comes, in order of time, at least once.
//!
//! One server at a time dispatches, so that events go out in order. A slot is forgotten as due only after its event is
//! on the topic: on the store's own queue in the same commit, on Kafka after the brokers have confirmed it. A crash in
//! between publishes it again.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;
use weir_core::EventId;
use weir_queue::due::{DispatchOutcome, DueSlots, DueStore, encode};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};
use weir_store::{Error, Result};

/// Slots published at once.
const BATCH: usize = 1_000;
/// How long they are this server's own: longer than publishing may take.
const LEASE: Duration = Duration::from_secs(10);
/// How soon slots that other servers assigned are seen.
const POLL: Duration = Duration::from_millis(500);
/// The pause after a batch that was not full, so that the next one is worth its commit.
const LINGER: Duration = Duration::from_millis(20);
/// The pause after an engine could not be reached.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

/// What the dispatcher works with.
pub(crate) struct Dispatcher {
    store: Arc<dyn DueStore>,
    publisher: Option<Arc<dyn Publisher>>,
    topic: String,
    published: Counter,
}

impl Dispatcher {
    /// A dispatcher to a topic: of the publisher if there is one, else of the store's own queue.
    #[must_use]
    pub(crate) fn new(
        store: Arc<dyn DueStore>,
        publisher: Option<Arc<dyn Publisher>>,
        topic: &str,
        published: Counter,
    ) -> Self {
        Self { store, publisher, topic: topic.to_owned(), published }
    }

    /// Dispatches until told to stop, then finishes what it holds.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut noted = Noted::default();
        let mut reachable = true;
        while !closing.is_cancelled() {
            let outcome = self.step(&mut noted).await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut reachable, false)
            {
                tracing::warn!(error = %error.with_causes(), "the dispatcher cannot go on and tries again");
            }
            reachable = outcome.is_ok();
            let pause = async {
                match outcome {
                    Ok(Next::AtOnce) => {}
                    Ok(Next::Soon) => tokio::time::sleep(LINGER).await,
                    Ok(Next::In(span)) => self.store.wait_due(span).await,
                    Err(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
                }
            };
            tokio::select! {
                () = pause => {}
                () = closing.cancelled() => {}
            }
        }
    }

    /// Dispatches a batch and, until all are noted, notes a page of slots that were assigned while nobody dispatched.
    async fn step(&self, noted: &mut Noted) -> Result<Next> {
        noted.page(self.store.as_ref()).await?;
        let due = self.store.claim_due(BATCH, LEASE).await?;
        if due.is_empty() {
            let span = due.next_due_in.map_or(POLL, |next| next.min(POLL));
            return Ok(if noted.is_done { Next::In(span) } else { Next::AtOnce });
        }
        let dispatched = match &self.publisher {
            None => DispatchOutcome::Enqueue(&self.topic),
            Some(publisher) => DispatchOutcome::Published(self.publish(publisher.as_ref(), &due).await),
        };
        if !self.store.settle_due(&due, dispatched).await? {
            tracing::warn!("some slots were dispatched too late to be settled and will be dispatched again");
            return Ok(Next::AtOnce);
        }
        let done = match dispatched {
            DispatchOutcome::Enqueue(_) => due.slots.len(),
            DispatchOutcome::Published(count) => count,
        };
        self.published.inc_by(done as u64);
        if done < due.slots.len() {
            return Err(Error::unavailable("kafka", "some due slots were not confirmed"));
        }
        Ok(if due.slots.len() + due.released.len() >= BATCH { Next::AtOnce } else { Next::Soon })
    }

    /// How many were confirmed before the first that was not: what comes after that one is published again, behind it.
    async fn publish(&self, publisher: &dyn Publisher, due: &DueSlots) -> usize {
        let events =
            due.slots.iter().map(|slot| OutgoingEvent::new(slot.config.as_str(), encode(slot))).collect();
        let fates = publisher.publish(&self.topic, events).await;
        fates.iter().take_while(|fate| PublishOutcome::is_confirmed(fate)).count()
    }
}

/// When to look again.
enum Next {
    AtOnce,
    Soon,
    In(Duration),
}

/// How far slots from before the start are noted.
#[derive(Default)]
struct Noted {
    after: Option<EventId>,
    is_done: bool,
}

impl Noted {
    async fn page(&mut self, store: &dyn DueStore) -> Result<()> {
        if !self.is_done {
            self.after = store.record_due(self.after.as_ref()).await?;
            self.is_done = self.after.is_none();
        }
        Ok(())
    }
}
