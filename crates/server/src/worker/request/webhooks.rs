//! Outgoing webhooks: whoever gave a callback URL with a request is told when it is final.
//!
//! A webhook is queued in the commit that ends the request, signed with the secret of its tenant as Standard Webhooks has it,
//! and sent at least once. Its id is the same each time it is sent. What the receiver refuses for good becomes a dead
//! letter at once, anything else after twelve attempts.
//!
//! Webhooks go out in no order, many at a time. Each is taken from the store by itself: it is put off there for as long as it
//! may wait and be called here, and settled when its call has ended, whatever the others do. Which one is called next, so
//! that nobody's receivers hold up those of others, `fair_queue` decides; receivers that did not answer are left alone for a
//! while (`slow`).

mod call;
mod fair_queue;
mod message;
mod slow;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use weir_core::{Clock, RequestId, TenantId};
use weir_queue::{Claim, Message, Position, Queue, Settlement};
use weir_store::Result;
use weir_store::request::{Request, RequestStore, WEBHOOKS};

use self::call::{Fate, receiver_of, wait};
use self::fair_queue::{FairQueue, Limits, Turn};
use self::slow::Slow;
use crate::auth::webhook::WebhookSecret;
use crate::config::request::RequestSettings;
use crate::outbound::{Bounds, Outbound, Reach};
use crate::seal::Keyring;
use crate::telemetry::metrics::{OutcomeLabels, WorkMetrics};

/// Webhooks under way, and those that were taken from the store and wait for that.
const LIMITS: Limits = Limits { places: 64, waiting: 1_024 };
/// Webhooks that are looked at together.
const CLAIM: usize = 128;
/// How often one is tried.
const ATTEMPTS_MAX: u32 = 12;
/// How soon webhooks that other servers queued are seen.
const POLL: Duration = Duration::from_millis(500);
/// How long those that find no room may be in the way of those behind them in the store.
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
    client: Outbound,
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
    /// By which receivers that do not answer are left alone. It must not step.
    pub steady_clock: Arc<dyn Clock>,
    /// How it goes.
    pub metrics: WorkMetrics,
}

/// A webhook that was taken from the store.
#[derive(Debug)]
struct Taken {
    message: Message,
    id: RequestId,
    /// Which claim brought it.
    claim: u64,
}

/// A call that has ended. An error is the store's: the webhook was not sent.
struct Ended {
    turn: Turn<Taken>,
    fate: Result<Fate>,
    took: Duration,
}

/// What is to be done about a webhook that was just claimed.
enum Plan {
    Settle(Fate),
    Call { tenant: TenantId, receiver: String, id: RequestId },
}

/// The state of whoever sends.
struct Sending {
    webhooks: Webhooks,
    waiting: FairQueue<Taken>,
    calls: JoinSet<Ended>,
    claims: u64,
    look: Look,
    /// Since when there is nothing to be seen in the store but what finds no room here.
    blocked_since: Option<Instant>,
    /// When the first of those that were put off for that is handed out again.
    put_off_until: Option<Instant>,
    is_reachable: bool,
}

/// What a look into the store came to.
enum Looked {
    /// There was nothing.
    Empty,
    /// Something was taken, settled, or put out of the way.
    Moved,
    /// Nothing of it finds room here, and there may be more behind it.
    Full,
    /// Nothing of it finds room here, and that is all there is.
    Short,
}

/// When to look into the store again.
#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    /// Or as soon as this process has queued something.
    or_woken: bool,
}

impl Webhooks {
    /// Whoever sends from here.
    #[must_use]
    pub(crate) fn new(parts: Parts, settings: &RequestSettings) -> Self {
        let timeout = settings.webhook_timeout;
        let reach = if settings.allow_private { Reach::Anywhere } else { Reach::Public };
        let bounds = Bounds { connect_timeout: timeout, read_timeout: timeout, body_max: 0, idle_max: 0 };
        Self { parts, client: Outbound::new(reach, bounds), timeout, slow: Arc::default() }
    }

    /// Sends until told to stop, then finishes what it holds.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let waiting = FairQueue::new(LIMITS);
        let sending = Sending {
            webhooks: self,
            waiting,
            calls: JoinSet::new(),
            claims: 0,
            look: Look { at: Instant::now(), or_woken: true },
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
            self.parts.queue.wait(WEBHOOKS, pause).await;
        } else {
            tokio::time::sleep(pause).await;
        }
    }

    /// Adds what became of a webhook to a settlement.
    fn settle(&self, settlement: &mut Settlement, message: &Message, fate: Fate) {
        let (position, id) = (message.position, &message.key);
        let outcome = match fate {
            Fate::Done => {
                settlement.done.push(position);
                "sent"
            }
            Fate::Retry { asked, why } if message.attempts + 1 < ATTEMPTS_MAX => {
                tracing::info!(target: "weir::request", requestId = id, why, "a webhook will be sent again");
                settlement.retry.push((position, wait(message.attempts, asked)));
                "retried"
            }
            Fate::Retry { why, .. } | Fate::Dead(why) => {
                tracing::warn!(target: "weir::request", requestId = id, why, "a webhook is a dead letter");
                settlement.dead.push((position, why));
                "dead"
            }
        };
        self.parts.metrics.webhooks.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// Finds out whose webhooks these are.
    async fn plan(&self, messages: &[Message]) -> Result<Vec<Plan>> {
        let id_of = |message: &Message| RequestId::parse(std::str::from_utf8(&message.payload).ok()?);
        let ids: Vec<Option<RequestId>> = messages.iter().map(id_of).collect();
        let known: Vec<RequestId> = ids.iter().flatten().copied().collect();
        let requests = self.parts.store.find_summaries(&known).await?;
        let request = |id| requests.iter().find(|request: &&Request| request.id == id);
        let plan = |id: &Option<RequestId>| {
            let Some(id) = *id else { return Plan::Settle(Fate::Dead("not the id of a request".to_owned())) };
            // Purged since, or replayed: then it is told of its next end.
            let Some(request) = request(id).filter(|request| request.status.is_final()) else {
                return Plan::Settle(Fate::Done);
            };
            match receiver_of(request) {
                Ok((_, url)) => {
                    let (tenant, receiver) = (request.tenant.clone(), url.authority().to_owned());
                    Plan::Call { tenant, receiver, id }
                }
                Err(fate) => Plan::Settle(fate),
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
                Some(ended) = self.calls.join_next() => self.settle_ended(returned(ended)).await,
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
                let started = Instant::now();
                let fate = webhooks.send(&turn).await;
                Ended { turn, fate, took: started.elapsed() }
            });
        }
    }

    /// Takes webhooks from the store, and decides when to do so again.
    async fn look(&mut self) {
        let now = Instant::now();
        // What was not started in time is handed out again by the store.
        self.waiting.retain(|_, start_before| start_before > now);
        self.claims += 1;
        let looked = self.take_some().await;
        let now = Instant::now();
        let at = match &looked {
            Ok(Looked::Empty) => self.put_off_until.take().map_or(now + POLL, |until| until.min(now + POLL)),
            Ok(Looked::Moved) => now,
            Ok(Looked::Full) => now + IN_THE_WAY,
            Ok(Looked::Short) => now + POLL,
            Err(_) => now + PAUSE_AFTER_ERROR,
        };
        self.look = Look { at, or_woken: looked.is_ok() };
        if looked.is_err() {
            self.forget_claim();
        }
        self.tell_of(looked.map(drop));
    }

    /// Claims some webhooks, and keeps those that find room until their turns come.
    async fn take_some(&mut self) -> Result<Looked> {
        let queue = Arc::clone(&self.webhooks.parts.queue);
        let Claim { messages, receipt } = queue.claim(WEBHOOKS, CLAIM, CLAIMED_FOR).await?;
        let is_full = messages.len() >= CLAIM;
        if messages.is_empty() {
            self.blocked_since = None;
            return Ok(Looked::Empty);
        }
        let plans = self.webhooks.plan(&messages).await?;
        let (now, timeout) = (Instant::now(), self.webhooks.timeout);
        let (mut settlement, mut without_room) = (Settlement::default(), Vec::new());
        let mut has_moved = false;
        for (message, plan) in messages.into_iter().zip(plans) {
            let position = message.position;
            match plan {
                Plan::Settle(fate) => {
                    self.webhooks.settle(&mut settlement, &message, fate);
                    has_moved = true;
                }
                Plan::Call { tenant, receiver, id } => {
                    let taken = Taken { message, id, claim: self.claims };
                    if self.waiting.push(&tenant, &receiver, taken, now + timeout + WAIT_MAX) {
                        settlement.put_off.push((position, timeout * 2 + WAIT_MAX + SPARE));
                        has_moved = true;
                    } else {
                        without_room.push((position, tenant));
                    }
                }
            }
        }
        let looked = self.judge_look(has_moved, is_full, &without_room, &mut settlement, now);
        if !queue.settle(&receipt, settlement).await? {
            self.forget_claim();
            tracing::warn!("some webhooks were looked at for too long and are looked at again");
        }
        Ok(looked)
    }

    /// Puts what finds no room out of the way of others, if it has been there for a while. Whoever is quick makes room before that.
    fn judge_look(
        &mut self,
        has_moved: bool,
        is_full: bool,
        without_room: &[(Position, TenantId)],
        settlement: &mut Settlement,
        now: Instant,
    ) -> Looked {
        if has_moved {
            self.blocked_since = None;
            return Looked::Moved;
        }
        let since = *self.blocked_since.get_or_insert(now);
        if !is_full {
            return Looked::Short;
        }
        if now.duration_since(since) < IN_THE_WAY {
            return Looked::Full;
        }
        for (position, tenant) in without_room {
            let put_off = self.waiting.put_off(tenant, now);
            settlement.put_off.push((*position, put_off));
            let until = now + put_off;
            self.put_off_until = Some(self.put_off_until.map_or(until, |first| first.min(until)));
        }
        Looked::Moved
    }

    /// Lets go of what the last claim brought: it is not ours.
    fn forget_claim(&mut self) {
        let claim = self.claims;
        self.waiting.retain(|taken, _| taken.claim != claim);
    }

    /// Gives places back and settles what has ended: this one, and others that have meanwhile.
    async fn settle_ended(&mut self, first: Ended) {
        let mut settlement = Settlement::default();
        let mut next = Some(first);
        let mut problem = Ok(());
        while let Some(Ended { turn, fate, took }) = next {
            self.waiting.ended(&turn.tenant, &turn.receiver, took);
            match fate {
                Ok(fate) => self.webhooks.settle(&mut settlement, &turn.item.message, fate),
                Err(error) => {
                    settlement.put_off.push((turn.item.message.position, PAUSE_AFTER_ERROR));
                    problem = Err(error);
                }
            }
            next = self.calls.try_join_next().map(returned);
        }
        // What the store does not hear of is sent again when it is not put off any more.
        let settled = self.webhooks.parts.queue.settle_put_off(WEBHOOKS, settlement).await;
        self.tell_of(problem.and(settled));
        if self.blocked_since.is_some() {
            self.look.at = Instant::now();
        }
    }

    /// Says once that the store is away.
    fn tell_of(&mut self, outcome: Result<()>) {
        let was_reachable = std::mem::replace(&mut self.is_reachable, outcome.is_ok());
        if let Err(error) = outcome
            && was_reachable
        {
            tracing::warn!(error = %error.with_causes(), "webhooks cannot be sent and are tried again");
        }
    }

    /// Lets others have what waits, and finishes what is under way.
    async fn stop(mut self) {
        let waiting = self.waiting.drain();
        if !waiting.is_empty() {
            let put_off = waiting.iter().map(|taken| (taken.message.position, Duration::ZERO)).collect();
            let settlement = Settlement { put_off, ..Settlement::default() };
            let put_back = self.webhooks.parts.queue.settle_put_off(WEBHOOKS, settlement).await;
            self.tell_of(put_back);
        }
        while let Some(ended) = self.calls.join_next().await {
            self.settle_ended(returned(ended)).await;
        }
    }
}

/// What a call has come to. Nobody cancels one, so all that is left is a panic, which is passed on.
fn returned(ended: std::result::Result<Ended, tokio::task::JoinError>) -> Ended {
    ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

#[cfg(test)]
mod tests;
