//! A broker between the servers that accept requests and the workers. It carries the ids of requests; their jobs are in the
//! store already.
//!
//! A request is `PENDING_ENQUEUE` from its commit until the broker has confirmed its id. If a crash or an outage leaves it in
//! that state, the reconciler publishes it again; a request is claimed only once even if its id arrives twice or late. A
//! message is settled as soon as its request is claimed: from then on the lease in the store protects the work.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::RequestStatus;
use weir_core::{RequestId, SpanId, TraceContext};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher, trace_headers};
use weir_queue::{Message, MessageSource, Settlement};
use weir_store::request::{ClaimedJobs, RequestStore, SubmitOutcome, SubmitReceipt, TenantCapacity};
use weir_store::{Error, Result};

/// The topic: key and payload of a message are the id of a request.
pub(crate) const TOPIC: &str = "request-processing";

/// How long a worker may take to claim the requests of the messages that it has received.
const VISIBILITY: Duration = Duration::from_secs(30);
/// The age at which the reconciler publishes a request that its server has not.
const PUBLISH_GRACE: Duration = Duration::from_secs(5);
/// The most requests that the reconciler publishes at once.
const RECONCILE_MAX: usize = 500;

/// Publishes the ids of requests.
#[derive(Clone)]
pub struct RequestBroker {
    publisher: Arc<dyn Publisher>,
    store: Arc<dyn RequestStore>,
    /// How long a submission waits for the broker.
    timeout: Duration,
}

impl RequestBroker {
    #[must_use]
    pub fn new(publisher: Arc<dyn Publisher>, store: Arc<dyn RequestStore>, timeout: Duration) -> Self {
        Self { publisher, store, timeout }
    }

    /// Publishes the requests that were just accepted and updates their status in `outcomes`. Requests that the broker does not
    /// confirm in time stay `PENDING_ENQUEUE` and are left to the reconciler.
    pub async fn publish_accepted(&self, outcomes: &mut [SubmitOutcome]) {
        let accepted: Vec<RequestId> =
            outcomes.iter().filter_map(accepted).map(|receipt| receipt.id).collect();
        if accepted.is_empty() {
            return;
        }
        let published = match tokio::time::timeout(self.timeout, self.publish(&accepted)).await {
            Ok(Ok(published)) => published,
            Ok(Err(error)) => {
                tracing::debug!(error = %error.with_causes(), "cannot mark published requests as enqueued; the reconciler will");
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

    /// Publishes accepted requests and returns those that the broker has confirmed. The others stay `PENDING_ENQUEUE` and are
    /// published again; so do all of them if the store cannot mark them.
    pub async fn publish(&self, ids: &[RequestId]) -> Result<Vec<RequestId>> {
        // Read for the headers alone: without them the events are as good.
        let found = self.store.find_summaries(ids).await.unwrap_or_default();
        let traces: HashMap<RequestId, TraceContext> =
            found.into_iter().filter_map(|request| Some((request.id, request.trace?))).collect();
        let events = ids.iter().map(|id| event(*id, traces.get(id))).collect();
        let outcomes = self.publisher.publish(TOPIC, events).await;
        let confirmed: Vec<RequestId> = ids
            .iter()
            .zip(&outcomes)
            .filter(|(_, outcome)| outcome.is_confirmed())
            .map(|(id, _)| *id)
            .collect();
        if let Some(PublishOutcome::Failed(error) | PublishOutcome::Unknown(error)) =
            outcomes.iter().find(|outcome| !outcome.is_confirmed())
        {
            let (confirmed, total) = (confirmed.len(), ids.len());
            tracing::debug!(error = %error.with_causes(), confirmed, total, "the broker has not confirmed every request");
        }
        if !confirmed.is_empty() {
            self.store.mark_enqueued(&confirmed).await?;
        }
        Ok(confirmed)
    }

    /// Publishes stranded requests: those that are `PENDING_ENQUEUE` for longer than [`PUBLISH_GRACE`].
    /// Fails when the store does not answer, or the broker does not confirm all of them.
    pub(crate) async fn reconcile(&self) -> Result<Reconciliation> {
        let pending = self.store.pending_requests(PUBLISH_GRACE, RECONCILE_MAX).await?;
        let ids: Vec<RequestId> = pending.iter().map(|pending| pending.id).collect();
        if ids.is_empty() {
            return Ok(Reconciliation::default());
        }
        let published = self.publish(&ids).await?;
        if published.len() < ids.len() {
            return Err(Error::unavailable("kafka", "some stranded requests were not confirmed"));
        }
        tracing::info!(published = published.len(), "stranded requests were published to the broker");
        Ok(Reconciliation { has_more: ids.len() == RECONCILE_MAX, published })
    }
}

/// The result of a scan for stranded requests.
#[derive(Debug, Default)]
pub(crate) struct Reconciliation {
    /// Requests that were published and are `ACCEPTED` now, unless a worker was faster.
    pub(crate) published: Vec<RequestId>,
    /// Whether there may be more stranded requests.
    pub(crate) has_more: bool,
}

/// The event's span is named by the random part of the request's id.
fn event(id: RequestId, trace: Option<&TraceContext>) -> OutgoingEvent {
    let (_, random) = id.as_uuid().as_u64_pair();
    OutgoingEvent {
        headers: trace.map_or_else(Vec::new, |trace| trace_headers(trace, SpanId::from_number(random))),
        ..OutgoingEvent::new(id.to_string(), id.to_string().into_bytes())
    }
}

const fn accepted(outcome: &SubmitOutcome) -> Option<&SubmitReceipt> {
    match outcome {
        SubmitOutcome::Accepted(receipt) => Some(receipt),
        _ => None,
    }
}

/// Claims the requests whose ids arrive from the broker.
pub(crate) struct BrokerJobs {
    source: Arc<dyn MessageSource>,
    last_scan: Option<Instant>,
}

impl BrokerJobs {
    pub(crate) fn new(source: Arc<dyn MessageSource>) -> Self {
        Self { source, last_scan: None }
    }

    /// Claims the requests of up to `max` messages.
    pub(crate) async fn claim(
        &mut self,
        store: &dyn RequestStore,
        tenants: &TenantCapacity,
        policy: &RetryPolicy,
        max: usize,
    ) -> Result<ClaimedJobs> {
        // An unreachable broker must not keep the worker from claiming jobs in the store.
        let Ok(claim) = self.source.claim(TOPIC, max, VISIBILITY).await else {
            return Ok(ClaimedJobs::default());
        };
        if claim.messages.is_empty() {
            return Ok(ClaimedJobs::default());
        }
        let ids: Vec<RequestId> = claim.messages.iter().filter_map(id_of).collect();
        let claimed = match store.claim_named(&ids, tenants, policy).await {
            Ok(claimed) => claimed,
            Err(error) => {
                // Settling nothing leaves the messages for another claim.
                let _ = self.source.settle(&claim.receipt, Settlement::default()).await;
                return Err(error);
            }
        };
        // If this fails, the ids are delivered again and find their requests claimed.
        let _ = self.source.settle(&claim.receipt, settlement(&claim.messages)).await;
        Ok(claimed)
    }

    /// Whether it is time to scan the store for jobs that are not in the broker. If so, restarts the interval.
    pub(crate) fn is_scan_due(&mut self, interval: Duration) -> bool {
        let is_due = self.last_scan.is_none_or(|last_scan| last_scan.elapsed() >= interval);
        if is_due {
            self.last_scan = Some(Instant::now());
        }
        is_due
    }

    pub(crate) async fn wait(&self, timeout: Duration) {
        self.source.wait(TOPIC, timeout).await;
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
