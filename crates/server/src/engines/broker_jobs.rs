//! A broker between those who accept requests and those who work on them: it carries the ids of requests whose jobs are
//! in the store already.
//!
//! A request is `PENDING_ENQUEUE` from its commit until the broker has confirmed its id. What a crash or an outage leaves
//! so is published again by the reconciler; an id that comes twice, or late, is claimed once. A message is done with as
//! soon as its request is claimed: from then on the lease in the store sees to it that the work is not lost.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_core::RequestId;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::RequestStatus;
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};
use weir_queue::{Message, MessageSource, Settlement};
use weir_store::request::{ClaimedJobs, RequestStore, SubmitOutcome, SubmitReceipt};
use weir_store::{Error, Result};

/// The topic: key and payload of a message are the id of a request.
pub(crate) const TOPIC: &str = "request-processing";

/// How long messages are a worker's own before it has claimed their requests.
const VISIBILITY: Duration = Duration::from_secs(30);
/// How long a request waits for the one who accepted it to publish it, before the reconciler does.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many are published again at once.
const BATCH: usize = 500;

/// Gives jobs to the broker.
#[derive(Clone)]
pub struct Broker {
    publisher: Arc<dyn Publisher>,
    store: Arc<dyn RequestStore>,
    /// How long those who submit wait for the broker.
    timeout: Duration,
}

impl Broker {
    /// A broker behind this publisher, for which those who submit wait no longer than `timeout`.
    #[must_use]
    pub fn new(publisher: Arc<dyn Publisher>, store: Arc<dyn RequestStore>, timeout: Duration) -> Self {
        Self { publisher, store, timeout }
    }

    /// Publishes what was just accepted, and brings up to date what submitters are told. What the broker does not confirm
    /// in time stays `PENDING_ENQUEUE` and is left to the reconciler.
    pub async fn publish_accepted(&self, outcomes: &mut [SubmitOutcome]) {
        let accepted: Vec<RequestId> =
            outcomes.iter().filter_map(accepted).map(|receipt| receipt.id).collect();
        if accepted.is_empty() {
            return;
        }
        let published = match tokio::time::timeout(self.timeout, self.publish(&accepted)).await {
            Ok(Ok(published)) => published,
            Ok(Err(error)) => {
                tracing::debug!(error = %error.with_causes(), "jobs that the broker has could not be noted");
                return;
            }
            Err(_elapsed) => return,
        };
        let published: HashSet<RequestId> = published.into_iter().collect();
        for outcome in outcomes {
            if let SubmitOutcome::Accepted(receipt) = outcome
                && published.contains(&receipt.id)
            {
                receipt.status = RequestStatus::Accepted;
            }
        }
    }

    /// Publishes requests that were accepted, and says which of them the broker has confirmed. The others, and all of
    /// them when the store does not take note, stay `PENDING_ENQUEUE` and are published again.
    pub async fn publish(&self, ids: &[RequestId]) -> Result<Vec<RequestId>> {
        let events =
            ids.iter().map(|id| OutgoingEvent::new(id.to_string(), id.to_string().into_bytes())).collect();
        let fates = self.publisher.publish(TOPIC, events).await;
        let confirmed: Vec<RequestId> =
            ids.iter().zip(&fates).filter(|(_, fate)| fate.is_confirmed()).map(|(id, _)| *id).collect();
        if let Some(PublishOutcome::Failed(error) | PublishOutcome::Unknown(error)) =
            fates.iter().find(|fate| !fate.is_confirmed())
        {
            let (confirmed, of) = (confirmed.len(), ids.len());
            tracing::debug!(error = %error.with_causes(), confirmed, of, "the broker has not confirmed every job");
        }
        if !confirmed.is_empty() {
            self.store.mark_enqueued(&confirmed).await?;
        }
        Ok(confirmed)
    }

    /// Publishes what has waited too long.
    /// Fails when the store cannot be asked, or the broker confirms nothing.
    pub(crate) async fn reconcile(&self) -> Result<Reconciled> {
        let pending = self.store.pending_requests(PATIENCE, BATCH).await?;
        let ids: Vec<RequestId> = pending.iter().map(|pending| pending.id).collect();
        if ids.is_empty() {
            return Ok(Reconciled::default());
        }
        let published = self.publish(&ids).await?;
        if published.len() < ids.len() {
            return Err(Error::unavailable("kafka", "some stranded requests were not confirmed"));
        }
        tracing::info!(published = published.len(), "stranded requests were given to the broker");
        Ok(Reconciled { may_be_more: ids.len() == BATCH, published })
    }
}

/// What a look for stranded requests came to.
#[derive(Debug, Default)]
pub(crate) struct Reconciled {
    /// Those that were given to the broker and are `ACCEPTED` now, unless a worker was faster.
    pub(crate) published: Vec<RequestId>,
    /// Whether there may be more of them.
    pub(crate) may_be_more: bool,
}

const fn accepted(outcome: &SubmitOutcome) -> Option<&SubmitReceipt> {
    match outcome {
        SubmitOutcome::Accepted(receipt) => Some(receipt),
        _ => None,
    }
}

/// The requests that a broker hands to a worker.
pub(crate) struct BrokerJobs {
    source: Arc<dyn MessageSource>,
    looked: Option<Instant>,
}

impl BrokerJobs {
    pub(crate) fn new(source: Arc<dyn MessageSource>) -> Self {
        Self { source, looked: None }
    }

    /// Claims the requests of up to `max` messages.
    pub(crate) async fn claim(
        &mut self,
        store: &dyn RequestStore,
        policy: &RetryPolicy,
        max: usize,
    ) -> Result<ClaimedJobs> {
        // A broker that cannot be reached keeps nobody from what the store has.
        let Ok(claim) = self.source.claim(TOPIC, max, VISIBILITY).await else {
            return Ok(ClaimedJobs::default());
        };
        if claim.messages.is_empty() {
            return Ok(ClaimedJobs::default());
        }
        let ids: Vec<RequestId> = claim.messages.iter().filter_map(id_of).collect();
        let claimed = match store.claim_named(&ids, policy).await {
            Ok(claimed) => claimed,
            Err(error) => {
                // They stay where they are, for whoever comes next.
                let _ = self.source.settle(&claim.receipt, Settlement::default()).await;
                return Err(error);
            }
        };
        // If this is not noted the ids come again, and find their requests claimed.
        let _ = self.source.settle(&claim.receipt, settlement(&claim.messages)).await;
        Ok(claimed)
    }

    /// Whether it is time to look for what the broker does not know of; if so, the time is taken anew.
    pub(crate) fn is_time_to_look(&mut self, every: Duration) -> bool {
        let is_time = self.looked.is_none_or(|looked| looked.elapsed() >= every);
        if is_time {
            self.looked = Some(Instant::now());
        }
        is_time
    }

    pub(crate) async fn wait(&self, at_most: Duration) {
        self.source.wait(TOPIC, at_most).await;
    }

    pub(crate) async fn close(self) {
        self.source.close().await;
    }
}

fn id_of(message: &Message) -> Option<RequestId> {
    RequestId::parse(std::str::from_utf8(&message.payload).ok()?)
}

fn settlement(messages: &[Message]) -> Settlement {
    let mut settlement = Settlement::default();
    for message in messages {
        match id_of(message) {
            Some(_) => settlement.done.push(message.position),
            None => settlement.dead.push((message.position, "not the id of a request".to_owned())),
        }
    }
    settlement
}
