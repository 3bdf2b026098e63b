//! Outgoing webhooks: the callback URL of a request is called when the request is final.
//!
//! A webhook is queued in the commit that ends the request, signed with the secret of its tenant as Standard Webhooks has it,
//! and sent at least once. Its id is the same each time it is sent. What the receiver refuses for good becomes a dead
//! letter at once, anything else after twelve attempts.
//!
//! Webhooks go out in no order, many at a time. Each is taken from the store by itself: it is put off there for as long as it
//! may wait and be called here, and settled when its own call has ended. `fair_queue` decides which one is called next, so
//! that no tenant's receivers hold up those of others. Receivers that did not answer are left alone for a while (`slow`).

mod call;
mod fair_queue;
mod message;
mod slow;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use weir_core::{Clock, RequestId, TenantId, Timestamp};
use weir_queue::{Message, MessageClaim, Position, Queue, Settlement};
use weir_store::Result;
use weir_store::request::{Request, RequestStore, WEBHOOKS_TOPIC};

use self::call::{Outcome, receiver_of, wait};
use self::fair_queue::{FairQueue, Limits, Turn};
use self::slow::Slow;
use crate::auth::webhook::WebhookSecret;
use crate::outbound::{OutboundClient, OutboundLimits, Reach};
use crate::request::encryption::Keyring;
use crate::request::metrics::WorkMetrics;
use crate::request::settings::RequestSettings;
use crate::telemetry::labels::OutcomeLabels;

/// Webhooks under way, and those that were taken from the store and wait for that.
const LIMITS: Limits = Limits { places: 64, waiting: 1_024 };
/// Webhooks that are claimed together.
const CLAIM: usize = 128;
/// How often one is tried.
const ATTEMPTS_MAX: u32 = 12;
/// How soon webhooks that other servers queued are seen.
const POLL: Duration = Duration::from_millis(500);
/// How soon webhooks are seen that were put off because they were in the way, once their time has passed.
const POLL_FOR_PUT_OFF: Duration = Duration::from_millis(50);
/// How long webhooks that find no room may be in the way of those behind them in the store.
const IN_THE_WAY: Duration = Duration::from_millis(100);
/// How long a claim is this server's own: until it is known whose the webhooks are.
const CLAIMED_FOR: Duration = Duration::from_secs(10);
/// How long a webhook may wait here for its turn, besides the time that a call may take.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// How long the store may take to hear of a call's end.
const SPARE: Duration = Duration::from_secs(10);
/// The pause after the store could not be reached, and before what it could not say is asked again.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

/// Sends webhooks.
#[derive(Clone)]
pub(crate) struct Webhooks {
    parts: Parts,
    client: OutboundClient,
    timeout: Duration,
    slow: Arc<Slow>,
}

/// What webhooks are sent with, besides the settings.
#[derive(Clone)]
pub(crate) struct Parts {
    /// Where they wait.
    pub queue: Arc<dyn Queue>,
    /// Where requests live.
    pub store: Arc<dyn RequestStore>,
    /// What results are opened with.
    pub keyring: Arc<Keyring>,
    /// What tenants' secrets are derived from.
    pub secret: WebhookSecret,
    /// When they are signed.
    pub clock: Arc<dyn Clock>,
    /// For how long receivers are left alone. It must not step.
    pub steady_clock: Arc<dyn Clock>,
    /// What is counted.
    pub metrics: WorkMetrics,
}

/// A webhook that was taken from the store.
#[derive(Debug)]
struct Taken {
    message: Message,
    id: RequestId,
    /// When its request ended.
    final_since: Timestamp,
    /// The number of the claim that it came with.
    claim: u64,
}

/// A call that has ended. An error is the store's: the webhook was not sent.
struct Ended {
    turn: Turn<Taken>,
    outcome: Result<Outcome>,
}

/// What is to be done about a webhook that was just claimed.
enum Plan {
    Settle(Outcome),
    Call { tenant: TenantId, receiver: String, id: RequestId, final_since: Timestamp },
}

/// The state of the task that sends.
struct Sending {
    webhooks: Webhooks,
    waiting: FairQueue<Taken>,
    calls: JoinSet<Ended>,
    claims: u64,
    look: Look,
    /// Whether the last claim left webhooks in the store because there was no room for them here.
    waits_for_room: bool,
    /// Since when full claims have left some, so that there may be others behind them.
    blocked_since: Option<Instant>,
    /// When the last of those that were put off for that may be claimed again.
    put_off_until: Option<Instant>,
    is_reachable: bool,
}

/// What a claim found in the store.
enum Found {
    Nothing,
    /// Webhooks that were all taken, settled, or put out of the way.
    NoneLeft,
    /// Webhooks of which some were left in the store because there was no room for them here.
    SomeLeft,
}

/// When to look into the store again.
#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    /// Or as soon as this process has queued something.
    or_woken: bool,
}

impl Webhooks {
    /// Nothing is sent before it runs.
    #[must_use]
    pub(crate) fn new(parts: Parts, settings: &RequestSettings) -> Self {
        let timeout = settings.webhook_timeout;
        let reach = if settings.allow_private { Reach::Anywhere } else { Reach::Public };
        let bounds =
            OutboundLimits { connect_timeout: timeout, read_timeout: timeout, body_max: 0, idle_max: 0 };
        Self { parts, client: OutboundClient::new(reach, bounds), timeout, slow: Arc::default() }
    }

    /// Sends until `closing` is cancelled, then finishes the calls that are under way.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let waiting = FairQueue::new(LIMITS);
        let sending = Sending {
            webhooks: self,
            waiting,
            calls: JoinSet::new(),
            claims: 0,
            look: Look { at: Instant::now(), or_woken: true },
            waits_for_room: false,
            blocked_since: None,
            put_off_until: None,
            is_reachable: true,
        };
        sending.run(closing).await;
    }

    /// Waits until the store is to be looked into again.
    async fn wait_for(&self, look: Look) {
        let pause = look.at.saturating_duration_since(Instant::now());
        if look.or_woken {
            self.parts.queue.wait(WEBHOOKS_TOPIC, pause).await;
        } else {
            tokio::time::sleep(pause).await;
        }
    }

    /// Adds the outcome of a webhook to a settlement.
    fn settle(&self, settlement: &mut Settlement, message: &Message, outcome: Outcome) {
        let (position, id) = (message.position, &message.key);
        let label = match outcome {
            Outcome::Done => {
                settlement.done.push(position);
                "sent"
            }
            Outcome::PutOff(time) => {
                settlement.deferred.push((position, time));
                "put_off"
            }
            Outcome::Retry { retry_after, reason } if message.attempts + 1 < ATTEMPTS_MAX => {
                tracing::info!(target: "weir::request", requestId = id, why = reason, "a webhook will be sent again");
                settlement.retry.push((position, wait(message.attempts, retry_after)));
                "retried"
            }
            Outcome::Retry { reason, .. } | Outcome::Dead(reason) => {
                tracing::warn!(target: "weir::request", requestId = id, why = reason, "a webhook is a dead letter");
                settlement.dead.push((position, reason));
                "dead"
            }
        };
        self.parts.metrics.webhooks.get_or_create(&OutcomeLabels { outcome: label }).inc();
    }

    /// Finds out which tenants and receivers these webhooks belong to.
    async fn plan(&self, messages: &[Message]) -> Result<Vec<Plan>> {
        let id_of = |message: &Message| RequestId::parse(std::str::from_utf8(&message.payload).ok()?);
        let ids: Vec<Option<RequestId>> = messages.iter().map(id_of).collect();
        let known: Vec<RequestId> = ids.iter().flatten().copied().collect();
        let requests = self.parts.store.find_summaries(&known).await?;
        let request = |id| requests.iter().find(|request: &&Request| request.id == id);
        let plan = |id: &Option<RequestId>| {
            let Some(id) = *id else {
                return Plan::Settle(Outcome::Dead("not the id of a request".to_owned()));
            };
            // If it was purged there is nothing to say; if it was replayed, its next end has a webhook of its own.
            let Some(request) = request(id).filter(|request| request.status.is_final()) else {
                return Plan::Settle(Outcome::Done);
            };
            match receiver_of(request) {
                Ok((_, url)) => {
                    let (tenant, receiver) = (request.tenant.clone(), url.authority().to_owned());
                    Plan::Call { tenant, receiver, id, final_since: request.updated_at }
                }
                Err(outcome) => Plan::Settle(outcome),
            }
        };
        Ok(ids.iter().map(plan).collect())
    }
}

impl Sending {
    async fn run(mut self, closing: CancellationToken) {
        while !closing.is_cancelled() {
            self.start_calls();
            let webhooks = self.webhooks.clone();
            tokio::select! {
                () = closing.cancelled() => break,
                Some(ended) = self.calls.join_next() => self.settle_ended(unwrap_join(ended)).await,
                () = webhooks.wait_for(self.look), if self.waiting.has_room() => self.look().await,
            }
        }
        self.stop().await;
    }

    /// Calls as many as there are places for.
    fn start_calls(&mut self) {
        while let Some(turn) = self.waiting.next(Instant::now()) {
            let webhooks = self.webhooks.clone();
            self.calls.spawn(async move {
                let outcome = webhooks.send(&turn).await;
                Ended { turn, outcome }
            });
        }
    }

    /// Takes webhooks from the store, and decides when to do so again.
    async fn look(&mut self) {
        let now = Instant::now();
        // What was not started in time is handed out again by the store.
        self.waiting.retain(|_, start_before| start_before > now);
        self.claims += 1;
        let found = self.take_some().await;
        let now = Instant::now();
        let at = match &found {
            Ok(Found::NoneLeft) => now,
            // Or as soon as a call has ended: until then there is no more room.
            Ok(Found::SomeLeft) => now + IN_THE_WAY,
            Ok(Found::Nothing) if self.put_off_until.is_some_and(|until| until > now) => {
                now + POLL_FOR_PUT_OFF
            }
            Ok(Found::Nothing) => now + POLL,
            Err(_) => now + PAUSE_AFTER_ERROR,
        };
        self.look = Look { at, or_woken: found.is_ok() };
        if found.is_err() {
            self.forget_claim();
            // A call that ends must not cut the pause short.
            self.waits_for_room = false;
        }
        self.report(found.map(drop));
    }

    /// Claims some webhooks, and keeps those that find room until their turns come.
    async fn take_some(&mut self) -> Result<Found> {
        let queue = Arc::clone(&self.webhooks.parts.queue);
        let MessageClaim { messages, receipt } = queue.claim(WEBHOOKS_TOPIC, CLAIM, CLAIMED_FOR).await?;
        let is_full = messages.len() >= CLAIM;
        if messages.is_empty() {
            (self.waits_for_room, self.blocked_since) = (false, None);
            return Ok(Found::Nothing);
        }
        let plans = self.webhooks.plan(&messages).await?;
        let (now, timeout) = (Instant::now(), self.webhooks.timeout);
        let (mut settlement, mut without_room) = (Settlement::default(), Vec::new());
        for (message, plan) in messages.into_iter().zip(plans) {
            let position = message.position;
            match plan {
                Plan::Settle(outcome) => self.webhooks.settle(&mut settlement, &message, outcome),
                Plan::Call { tenant, receiver, id, final_since } => {
                    let taken = Taken { message, id, final_since, claim: self.claims };
                    if self.waiting.push(&tenant, &receiver, taken, now + timeout + WAIT_MAX, now) {
                        settlement.deferred.push((position, timeout * 2 + WAIT_MAX + SPARE));
                    } else {
                        without_room.push((position, tenant));
                    }
                }
            }
        }
        if self.is_in_the_way(is_full, !without_room.is_empty(), now) {
            self.put_off(&without_room, &mut settlement, now);
            without_room.clear();
        }
        self.waits_for_room = !without_room.is_empty();
        if !queue.settle(&receipt, settlement).await? {
            self.forget_claim();
            tracing::warn!(
                "some webhooks were held for too long before they were settled; they are claimed again"
            );
        }
        Ok(if self.waits_for_room { Found::SomeLeft } else { Found::NoneLeft })
    }

    /// Whether what a claim leaves in the store has been in the way of others there for long enough to be put off. Whether
    /// some of it found room does not matter: a tenant whose calls end all the time takes a few with every claim, and
    /// others would wait until its last one.
    fn is_in_the_way(&mut self, is_full: bool, leaves_some: bool, now: Instant) -> bool {
        if !leaves_some {
            self.blocked_since = None;
        }
        if !(is_full && leaves_some) {
            return false;
        }
        // It stays set when they are put off, so that those behind them are put off at once if they find no room either.
        let since = *self.blocked_since.get_or_insert(now);
        now.duration_since(since) >= IN_THE_WAY
    }

    /// Puts webhooks off that found no room, each until its tenant may have got to it.
    fn put_off(&mut self, without_room: &[(Position, TenantId)], settlement: &mut Settlement, now: Instant) {
        for (position, tenant) in without_room {
            let time = self.waiting.put_off(tenant, now);
            settlement.deferred.push((*position, time));
            self.put_off_until = self.put_off_until.max(Some(now + time));
        }
    }

    /// Drops what came with the last claim: it is not ours.
    fn forget_claim(&mut self) {
        let claim = self.claims;
        self.waiting.retain(|taken, _| taken.claim != claim);
    }

    /// Gives places back and settles the calls that have ended: this one, and others that have meanwhile.
    async fn settle_ended(&mut self, first: Ended) {
        let now = Instant::now();
        let mut settlement = Settlement::default();
        let mut next = Some(first);
        let mut problem = Ok(());
        while let Some(Ended { turn, outcome }) = next {
            self.waiting.ended(&turn.tenant, &turn.receiver, now);
            match outcome {
                Ok(outcome) => self.webhooks.settle(&mut settlement, &turn.item.message, outcome),
                Err(error) => {
                    settlement.deferred.push((turn.item.message.position, PAUSE_AFTER_ERROR));
                    problem = Err(error);
                }
            }
            next = self.calls.try_join_next().map(unwrap_join);
        }
        // What cannot be settled is sent again when its time in the store has run out.
        let settled = self.webhooks.parts.queue.settle_deferred(WEBHOOKS_TOPIC, settlement).await;
        self.report(problem.and(settled));
        if self.waits_for_room {
            self.look.at = Instant::now();
        }
    }

    /// Logs once that the store cannot be reached.
    fn report(&mut self, outcome: Result<()>) {
        let was_reachable = std::mem::replace(&mut self.is_reachable, outcome.is_ok());
        if let Err(error) = outcome
            && was_reachable
        {
            tracing::warn!(error = %error.with_causes(), "webhooks cannot be sent and are tried again");
        }
    }

    /// Gives back to the store what waits, and finishes what is under way.
    async fn stop(mut self) {
        let waiting = self.waiting.drain(Instant::now());
        if !waiting.is_empty() {
            let deferred = waiting.iter().map(|taken| (taken.message.position, Duration::ZERO)).collect();
            let settlement = Settlement { deferred, ..Settlement::default() };
            let put_back = self.webhooks.parts.queue.settle_deferred(WEBHOOKS_TOPIC, settlement).await;
            self.report(put_back);
        }
        while let Some(ended) = self.calls.join_next().await {
            self.settle_ended(unwrap_join(ended)).await;
        }
    }
}

/// The call behind a task that has ended. No task is cancelled, so an error is a panic, which is passed on.
fn unwrap_join(ended: std::result::Result<Ended, tokio::task::JoinError>) -> Ended {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

#[cfg(test)]
mod tests;
