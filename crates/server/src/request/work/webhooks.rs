//! Outgoing webhooks: the callback URL of a request is called when the request is final.
//!
//! A webhook is queued in the commit that ends the request, signed with its tenant's secret as Standard Webhooks defines it,
//! and sent at least once, always with the same id. If the receiver refuses it for good it becomes a dead letter at once,
//! otherwise after twelve attempts.
//!
//! Webhooks are sent in no order and concurrently. A claimed webhook is deferred in the store for as long as it may wait and
//! be called here, and settled when its own call ends. `fair_queue` decides which one is called next, so that no tenant's
//! receivers delay those of others. Receivers that did not answer are not called for a while (`unresponsive`).

mod call;
mod fair_queue;
mod message;
mod unresponsive;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use weir_core::{Clock, RequestId, TenantId, Timestamp, TraceId};
use weir_queue::{Message, MessageClaim, Position, Queue, Settlement};
use weir_store::Result;
use weir_store::request::{Request, RequestStore, WEBHOOKS_TOPIC};

use self::call::{WebhookOutcome, receiver_of, wait};
use self::fair_queue::{FairQueue, QueueLimits, ReadyWebhook};
use self::unresponsive::UnresponsiveReceivers;
use crate::auth::webhook::WebhookSecret;
use crate::outbound::{OutboundClient, OutboundLimits, Reach};
use crate::request::encryption::Keyring;
use crate::request::events::{
    WebhookClaimExpired, WebhookDeferred, WebhookDied, WebhookOrigin, WebhookRetried, WebhookSent,
    WebhookStoreFailed,
};
use crate::request::metrics::WorkMetrics;
use crate::request::settings::RequestSettings;
use crate::request::trace::trace_id;

/// The most concurrent calls, and the most claimed webhooks that wait for a call.
const LIMITS: QueueLimits = QueueLimits { concurrent: 64, waiting: 1_024 };
/// The most webhooks of one claim.
const CLAIM: usize = 128;
/// The most attempts of a webhook.
const ATTEMPTS_MAX: u32 = 12;
/// How often the store is polled for webhooks that other servers queued.
const POLL: Duration = Duration::from_millis(500);
/// How often the store is polled while webhooks are deferred because they blocked others.
const POLL_FOR_DEFERRED: Duration = Duration::from_millis(50);
/// How long webhooks without capacity here may block later ones in the store.
const BLOCKING_TIME: Duration = Duration::from_millis(100);
/// The lease of a claim: enough time to find out the tenants of its webhooks.
const CLAIMED_FOR: Duration = Duration::from_secs(10);
/// How long a webhook may wait here for its call, besides the call's timeout.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// How long settling a finished call may take.
const SETTLE_TIME: Duration = Duration::from_secs(10);
/// The pause after the store did not answer.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

#[derive(Clone)]
pub(crate) struct Webhooks {
    dependencies: WebhookDependencies,
    client: OutboundClient,
    timeout: Duration,
    unresponsive: Arc<UnresponsiveReceivers>,
}

/// What sending webhooks needs besides the settings.
#[derive(Clone)]
pub(crate) struct WebhookDependencies {
    pub queue: Arc<dyn Queue>,
    pub store: Arc<dyn RequestStore>,
    pub keyring: Arc<Keyring>,
    /// The secret from which those of tenants are derived.
    pub secret: WebhookSecret,
    /// The clock of signatures.
    pub clock: Arc<dyn Clock>,
    /// The clock of unresponsive receivers. It must not step.
    pub steady_clock: Arc<dyn Clock>,
    pub metrics: WorkMetrics,
}

/// A webhook that was claimed from the store.
#[derive(Debug)]
struct ClaimedWebhook {
    message: Message,
    id: RequestId,
    trace_id: TraceId,
    /// When its request ended.
    final_since: Timestamp,
    /// The number of its claim.
    claim: u64,
}

/// A call that has ended. An error comes from the store: the webhook was not sent.
struct FinishedCall {
    ready: ReadyWebhook<ClaimedWebhook>,
    outcome: Result<WebhookOutcome>,
}

/// How to proceed with a claimed webhook.
enum WebhookAction {
    Settle(WebhookOutcome),
    Call { tenant: TenantId, receiver: String, id: RequestId, trace_id: TraceId, final_since: Timestamp },
}

/// The state of the sending task.
struct WebhookSender {
    webhooks: Webhooks,
    waiting: FairQueue<ClaimedWebhook>,
    calls: JoinSet<FinishedCall>,
    claims: u64,
    next_poll: NextPoll,
    /// Whether the last claim left webhooks in the store for lack of capacity here.
    waits_for_capacity: bool,
    /// Since when full claims have left webhooks that may block later ones.
    blocked_since: Option<Instant>,
    /// When the last webhook that was deferred for blocking others may be claimed again.
    deferred_until: Option<Instant>,
    is_reachable: bool,
}

/// The result of a claim.
enum ClaimResult {
    Nothing,
    /// All webhooks were queued here, settled or deferred.
    NoneLeft,
    /// Some webhooks were left in the store for lack of capacity here.
    SomeLeft,
}

/// When to poll the store again.
#[derive(Clone, Copy)]
struct NextPoll {
    at: Instant,
    /// Also as soon as this process has queued a webhook.
    or_woken: bool,
}

impl Webhooks {
    #[must_use]
    pub(crate) fn new(dependencies: WebhookDependencies, settings: &RequestSettings) -> Self {
        let timeout = settings.webhook_timeout;
        let reach = if settings.allow_private { Reach::Anywhere } else { Reach::Public };
        let bounds =
            OutboundLimits { connect_timeout: timeout, read_timeout: timeout, body_max: 0, idle_max: 0 };
        Self {
            dependencies,
            client: OutboundClient::new(reach, bounds),
            timeout,
            unresponsive: Arc::default(),
        }
    }

    /// Sends until `closing` is cancelled, then finishes running calls.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let waiting = FairQueue::new(LIMITS);
        let sending = WebhookSender {
            webhooks: self,
            waiting,
            calls: JoinSet::new(),
            claims: 0,
            next_poll: NextPoll { at: Instant::now(), or_woken: true },
            waits_for_capacity: false,
            blocked_since: None,
            deferred_until: None,
            is_reachable: true,
        };
        sending.run(closing).await;
    }

    /// Waits until the next poll of the store.
    async fn wait_for(&self, next_poll: NextPoll) {
        let pause = next_poll.at.saturating_duration_since(Instant::now());
        if next_poll.or_woken {
            self.dependencies.queue.wait(WEBHOOKS_TOPIC, pause).await;
        } else {
            tokio::time::sleep(pause).await;
        }
    }

    /// Adds the outcome of a webhook to a settlement.
    fn settle(
        &self,
        settlement: &mut Settlement,
        message: &Message,
        origin: WebhookOrigin<'_>,
        outcome: WebhookOutcome,
    ) {
        let (position, id) = (message.position, &message.key);
        let metrics = &self.dependencies.metrics;
        match outcome {
            WebhookOutcome::Done => {
                WebhookSent.emit(metrics);
                settlement.done.push(position);
            }
            WebhookOutcome::Deferred(time) => {
                WebhookDeferred.emit(metrics);
                settlement.deferred.push((position, time));
            }
            WebhookOutcome::Retry { retry_after, reason } if message.attempts + 1 < ATTEMPTS_MAX => {
                WebhookRetried { request_id: id, origin, reason: &reason }.emit(metrics);
                settlement.retry.push((position, wait(message.attempts, retry_after)));
            }
            WebhookOutcome::Retry { reason, .. } | WebhookOutcome::Dead(reason) => {
                WebhookDied { request_id: id, origin, reason: &reason }.emit(metrics);
                settlement.dead.push((position, reason));
            }
        }
    }

    /// Reads the requests of webhooks and decides how to proceed with each.
    async fn plan(&self, messages: &[Message]) -> Result<Vec<WebhookAction>> {
        let id_of = |message: &Message| RequestId::parse(std::str::from_utf8(&message.payload).ok()?);
        let ids: Vec<Option<RequestId>> = messages.iter().map(id_of).collect();
        let known: Vec<RequestId> = ids.iter().flatten().copied().collect();
        let requests = self.dependencies.store.find_summaries(&known).await?;
        let request = |id| requests.iter().find(|request: &&Request| request.id == id);
        let plan = |id: &Option<RequestId>| {
            let Some(id) = *id else {
                return WebhookAction::Settle(WebhookOutcome::Dead("not the id of a request".to_owned()));
            };
            // A purged or cancelled request needs no webhook; a replayed one gets another when it is final again.
            let Some(request) = request(id).filter(|request| request.status.has_outcome()) else {
                return WebhookAction::Settle(WebhookOutcome::Done);
            };
            match receiver_of(&self.dependencies.keyring, request) {
                Ok((_, url)) => {
                    let (tenant, receiver) = (request.tenant.clone(), url.authority().to_owned());
                    let trace_id = trace_id(id, request.trace.as_ref());
                    WebhookAction::Call { tenant, receiver, id, trace_id, final_since: request.updated_at }
                }
                Err(outcome) => WebhookAction::Settle(outcome),
            }
        };
        Ok(ids.iter().map(plan).collect())
    }
}

impl WebhookSender {
    async fn run(mut self, closing: CancellationToken) {
        while !closing.is_cancelled() {
            self.start_calls();
            let webhooks = self.webhooks.clone();
            tokio::select! {
                () = closing.cancelled() => break,
                Some(ended) = self.calls.join_next() => self.settle_ended(unwrap_join(ended)).await,
                () = webhooks.wait_for(self.next_poll), if self.waiting.has_capacity() => self.poll_store().await,
            }
        }
        self.stop().await;
    }

    /// Starts as many calls as allowed.
    fn start_calls(&mut self) {
        while let Some(ready) = self.waiting.next(Instant::now()) {
            let webhooks = self.webhooks.clone();
            self.calls.spawn(async move {
                let outcome = webhooks.send(&ready).await;
                FinishedCall { ready, outcome }
            });
        }
    }

    /// Claims webhooks and decides when to claim again.
    async fn poll_store(&mut self) {
        let now = Instant::now();
        // The store hands out webhooks again that were not started in time.
        self.waiting.retain(|_, start_before| start_before > now);
        self.claims += 1;
        let found = self.claim_some().await;
        let now = Instant::now();
        let at = match &found {
            Ok(ClaimResult::NoneLeft) => now,
            // Or as soon as a call has ended, which frees capacity.
            Ok(ClaimResult::SomeLeft) => now + BLOCKING_TIME,
            Ok(ClaimResult::Nothing) if self.deferred_until.is_some_and(|until| until > now) => {
                now + POLL_FOR_DEFERRED
            }
            Ok(ClaimResult::Nothing) => now + POLL,
            Err(_) => now + PAUSE_AFTER_ERROR,
        };
        self.next_poll = NextPoll { at, or_woken: found.is_ok() };
        if found.is_err() {
            self.drop_claim();
            // A call that ends must not cut the pause short.
            self.waits_for_capacity = false;
        }
        self.report(found.map(drop));
    }

    /// Claims webhooks and queues those for which there is capacity.
    async fn claim_some(&mut self) -> Result<ClaimResult> {
        let queue = Arc::clone(&self.webhooks.dependencies.queue);
        let MessageClaim { messages, receipt } = queue.claim(WEBHOOKS_TOPIC, CLAIM, CLAIMED_FOR).await?;
        let is_full = messages.len() >= CLAIM;
        if messages.is_empty() {
            (self.waits_for_capacity, self.blocked_since) = (false, None);
            return Ok(ClaimResult::Nothing);
        }
        let plans = self.webhooks.plan(&messages).await?;
        let (now, timeout) = (Instant::now(), self.webhooks.timeout);
        let (mut settlement, mut without_capacity) = (Settlement::default(), Vec::new());
        for (message, plan) in messages.into_iter().zip(plans) {
            let position = message.position;
            match plan {
                WebhookAction::Settle(outcome) => {
                    let origin = WebhookOrigin::default();
                    self.webhooks.settle(&mut settlement, &message, origin, outcome);
                }
                WebhookAction::Call { tenant, receiver, id, trace_id, final_since } => {
                    let taken = ClaimedWebhook { message, id, trace_id, final_since, claim: self.claims };
                    if self.waiting.push(&tenant, &receiver, taken, now + timeout + WAIT_MAX, now) {
                        settlement.deferred.push((position, timeout * 2 + WAIT_MAX + SETTLE_TIME));
                    } else {
                        without_capacity.push((position, tenant));
                    }
                }
            }
        }
        if self.is_blocking(is_full, !without_capacity.is_empty(), now) {
            self.defer(&without_capacity, &mut settlement, now);
            without_capacity.clear();
        }
        self.waits_for_capacity = !without_capacity.is_empty();
        if !queue.settle(&receipt, settlement).await? {
            self.drop_claim();
            WebhookClaimExpired.emit();
        }
        Ok(if self.waits_for_capacity { ClaimResult::SomeLeft } else { ClaimResult::NoneLeft })
    }

    /// Whether webhooks that a claim leaves in the store have blocked later ones for so long that they must be deferred, even if
    /// some of them found capacity: a busy tenant gets a few in with every claim, and others would wait until its last one.
    fn is_blocking(&mut self, is_full: bool, leaves_some: bool, now: Instant) -> bool {
        if !leaves_some {
            self.blocked_since = None;
        }
        if !(is_full && leaves_some) {
            return false;
        }
        // Stays set when they are deferred, so that later ones without capacity are deferred at once.
        let since = *self.blocked_since.get_or_insert(now);
        now.duration_since(since) >= BLOCKING_TIME
    }

    /// Defers webhooks without capacity, each until its tenant may have got to it.
    fn defer(
        &mut self,
        without_capacity: &[(Position, TenantId)],
        settlement: &mut Settlement,
        now: Instant,
    ) {
        for (position, tenant) in without_capacity {
            let time = self.waiting.defer(tenant, now);
            settlement.deferred.push((*position, time));
            self.deferred_until = self.deferred_until.max(Some(now + time));
        }
    }

    /// Drops webhooks of the last claim, whose lease was lost.
    fn drop_claim(&mut self) {
        let claim = self.claims;
        self.waiting.retain(|taken, _| taken.claim != claim);
    }

    /// Settles this finished call and others that have finished meanwhile.
    async fn settle_ended(&mut self, first: FinishedCall) {
        let now = Instant::now();
        let mut settlement = Settlement::default();
        let mut next = Some(first);
        let mut problem = Ok(());
        while let Some(FinishedCall { ready, outcome }) = next {
            self.waiting.ended(&ready.tenant, &ready.receiver, now);
            match outcome {
                Ok(outcome) => {
                    let ClaimedWebhook { message, trace_id, .. } = &ready.item;
                    let origin = WebhookOrigin { tenant: Some(&ready.tenant), trace_id: Some(*trace_id) };
                    self.webhooks.settle(&mut settlement, message, origin, outcome);
                }
                Err(error) => {
                    settlement.deferred.push((ready.item.message.position, PAUSE_AFTER_ERROR));
                    problem = Err(error);
                }
            }
            next = self.calls.try_join_next().map(unwrap_join);
        }
        // A webhook that cannot be settled is sent again when its deferral in the store ends.
        let settled = self.webhooks.dependencies.queue.settle_deferred(WEBHOOKS_TOPIC, settlement).await;
        self.report(problem.and(settled));
        if self.waits_for_capacity {
            self.next_poll.at = Instant::now();
        }
    }

    /// Logs the first of several failures of the store in a row.
    fn report(&mut self, outcome: Result<()>) {
        let was_reachable = std::mem::replace(&mut self.is_reachable, outcome.is_ok());
        if let Err(error) = outcome
            && was_reachable
        {
            WebhookStoreFailed { error: &error }.emit();
        }
    }

    /// Returns waiting webhooks to the store and finishes running calls.
    async fn stop(mut self) {
        let waiting = self.waiting.drain(Instant::now());
        if !waiting.is_empty() {
            let deferred = waiting.iter().map(|taken| (taken.message.position, Duration::ZERO)).collect();
            let settlement = Settlement { deferred, ..Settlement::default() };
            let put_back = self.webhooks.dependencies.queue.settle_deferred(WEBHOOKS_TOPIC, settlement).await;
            self.report(put_back);
        }
        while let Some(ended) = self.calls.join_next().await {
            self.settle_ended(unwrap_join(ended)).await;
        }
    }
}

/// Returns the call of a task that has ended. No task is cancelled, so an error is a panic, which is resumed.
fn unwrap_join(ended: std::result::Result<FinishedCall, tokio::task::JoinError>) -> FinishedCall {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

#[cfg(test)]
mod tests;
