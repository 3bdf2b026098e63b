//! The dispatcher: publishes each slot when its time comes, in order of time, at least once.
//!
//! One server at a time dispatches, so that events are published in order. A slot stays due until its event is on the
//! topic: on the store's own queue in the same commit, on Kafka after the brokers have confirmed it. A crash in between
//! publishes the event again.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weir_core::{EventId, SpanId, TraceContext, TraceId, TraceParent};
use weir_queue::due::{DispatchOutcome, DueSlots, DueStore, encode};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher, trace_headers};
use weir_store::{Error, Result, spans};

use super::events::{DispatchFailed, LeaseExpired, SlotsDispatched};
use super::metrics::SlotMetrics;

/// Slots published at once.
const BATCH: usize = 1_000;
/// How long a claim lasts: longer than publishing may take.
const LEASE: Duration = Duration::from_secs(10);
/// How often the store is polled for slots that other servers assigned.
const POLL: Duration = Duration::from_millis(500);
/// The pause after a batch that was not full, so that the next one is large enough to be worth its commit.
const LINGER: Duration = Duration::from_millis(20);
/// The pause after a failure.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

pub(crate) struct Dispatcher {
    store: Arc<dyn DueStore>,
    publisher: Option<Arc<dyn Publisher>>,
    topic: String,
    metrics: SlotMetrics,
}

impl Dispatcher {
    /// Creates a dispatcher to a topic of the publisher or, without one, of the store's own queue.
    #[must_use]
    pub(crate) fn new(
        store: Arc<dyn DueStore>,
        publisher: Option<Arc<dyn Publisher>>,
        topic: &str,
        metrics: &SlotMetrics,
    ) -> Self {
        Self { store, publisher, topic: topic.to_owned(), metrics: metrics.clone() }
    }

    /// Dispatches until `closing` is cancelled, then finishes the claimed batch.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut backfill = Backfill::default();
        let mut is_working = true;
        while !closing.is_cancelled() {
            let outcome = self.dispatch_batch(&mut backfill).await;
            if let Err(error) = &outcome
                && is_working
            {
                DispatchFailed { error }.emit();
            }
            is_working = outcome.is_ok();
            let pause = async {
                match outcome {
                    Ok(NextPoll::Now) => {}
                    Ok(NextPoll::AfterLinger) => tokio::time::sleep(LINGER).await,
                    Ok(NextPoll::After(span)) => self.store.wait_due(span).await,
                    Err(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
                }
            };
            tokio::select! {
                () = pause => {}
                () = closing.cancelled() => {}
            }
        }
    }

    /// Dispatches one batch. Until the backfill is complete, it first records one page of slots as due.
    async fn dispatch_batch(&self, backfill: &mut Backfill) -> Result<NextPoll> {
        backfill.record_page(self.store.as_ref()).await?;
        let due = self.store.claim_due(BATCH, LEASE).await?;
        if due.is_empty() {
            let span = due.next_due_in.map_or(POLL, |next| next.min(POLL));
            return Ok(if backfill.is_done { NextPoll::After(span) } else { NextPoll::Now });
        }
        let outcome = match &self.publisher {
            None => DispatchOutcome::Enqueue(&self.topic),
            Some(publisher) => DispatchOutcome::Published(self.publish(publisher.as_ref(), &due).await),
        };
        if !self.store.settle_due(&due, outcome).await? {
            LeaseExpired { slots: due.slots.len() }.emit();
            return Ok(NextPoll::Now);
        }
        let done = match outcome {
            DispatchOutcome::Enqueue(_) => due.slots.len(),
            DispatchOutcome::Published(count) => count,
        };
        SlotsDispatched { count: done }.emit(&self.metrics);
        if done < due.slots.len() {
            return Err(Error::unavailable("kafka", "the brokers did not confirm all due slots"));
        }
        Ok(if due.slots.len() + due.released.len() >= BATCH { NextPoll::Now } else { NextPoll::AfterLinger })
    }

    /// Publishes slots and returns how many were confirmed before the first that was not. That one and all after it are
    /// published again, to keep their order.
    async fn publish(&self, publisher: &dyn Publisher, due: &DueSlots) -> usize {
        let events = due.slots.iter().map(|slot| OutgoingEvent {
            headers: begin_trace(),
            ..OutgoingEvent::new(slot.config.as_str(), encode(slot))
        });
        let events = events.collect();
        let outcomes = publisher.publish(&self.topic, events).await;
        outcomes.iter().take_while(|outcome| PublishOutcome::is_confirmed(outcome)).count()
    }
}

/// A trace begins with the event: the call that assigned the slot may be long ago.
fn begin_trace() -> Vec<(&'static str, String)> {
    let (trace_id, span) = (TraceId::from_number(fastrand::u128(..)), SpanId::from_number(fastrand::u64(..)));
    let parent = TraceParent { is_sampled: spans::samples(trace_id), ..TraceParent::begin(trace_id, span) };
    trace_headers(&TraceContext { parent, state: None }, span)
}

/// When to claim the next batch.
enum NextPoll {
    Now,
    AfterLinger,
    After(Duration),
}

/// Progress of recording slots as due that were assigned while nothing was dispatched.
#[derive(Default)]
struct Backfill {
    after: Option<EventId>,
    is_done: bool,
}

impl Backfill {
    async fn record_page(&mut self, store: &dyn DueStore) -> Result<()> {
        if !self.is_done {
            self.after = store.record_due(self.after.as_ref()).await?;
            self.is_done = self.after.is_none();
        }
        Ok(())
    }
}
