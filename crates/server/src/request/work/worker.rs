//! The worker: claims as many jobs as there are slots for, starts their calls, and looks again when there may be more.
//!
//! It is woken by what this process accepts, by slots that become free, and when the next job is due; it looks by itself
//! ten times a second for what other servers have accepted. With a broker it is told what to do, and looks once a second
//! for what the broker does not know of: attempts to be made again, work whose worker vanished.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{self, Sender};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use weir_core::request::state::RequestStatus;
use weir_store::Result;
use weir_store::request::{ClaimedJobs, Job};

use super::Parts;
use super::call::{Caller, Done};
use super::concurrency::Permits;
use super::downstream::Downstreams;
use super::reports::Reporter;
use crate::engines::broker_jobs::BrokerJobs;

/// How soon jobs that other servers accepted are seen.
const POLL: Duration = Duration::from_millis(100);
/// The same where a broker says what to do.
const POLL_BEHIND_BROKER: Duration = Duration::from_secs(1);
/// The pause after a claim that took all there was, so that the next one is worth its commit.
const LINGER: Duration = Duration::from_millis(5);
/// How often the store is asked for downstreams that are not in the settings.
const LOOK_FOR_OTHERS: Duration = Duration::from_secs(5);
/// How many of those are worked for.
const OTHERS_MAX: usize = 1_000;
/// The pause after the store could not be reached.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

/// Works on requests.
pub(crate) struct Worker {
    parts: Parts,
    downstreams: Downstreams,
    slots: Arc<Permits>,
}

/// What a worker has under way.
struct Work {
    calls: JoinSet<()>,
    caller: Arc<Caller>,
    reports: Sender<Done>,
    others: Others,
    turn: usize,
    /// Whether the last claim left something behind.
    has_more: bool,
}

/// When to look again.
enum Next {
    /// There is more, as soon as there are slots worth a claim.
    AtOnce,
    /// There is no slot.
    WhenFree,
    /// There may be more, as soon as something is accepted or this time has passed.
    Within(Duration),
    /// Not before this time has passed.
    After(Duration),
}

impl Worker {
    /// A worker on these parts. Nothing is claimed before it runs.
    #[must_use]
    pub(crate) fn new(parts: Parts) -> Self {
        let downstreams = Downstreams::new(&parts.settings, &parts.clock, &parts.metrics);
        let slots = Permits::new(parts.settings.concurrency);
        Self { parts, downstreams, slots }
    }

    /// Works until told to stop, then finishes what is under way, or puts it back.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let (reports, inbox) = mpsc::channel(self.parts.settings.concurrency);
        let reporter = Reporter::new(&self.parts);
        let caller = Arc::new(Caller {
            keyring: Arc::clone(&self.parts.keyring),
            clock: Arc::clone(&self.parts.clock),
            closing: closing.clone(),
            cut: CancellationToken::new(),
        });
        let work = Work {
            calls: JoinSet::new(),
            caller,
            reports,
            others: Others::default(),
            turn: 0,
            has_more: false,
        };
        tokio::join!(self.work(work, closing), reporter.run(inbox));
    }

    async fn work(&self, mut work: Work, closing: CancellationToken) {
        let mut told = self.parts.source.clone().map(BrokerJobs::new);
        let mut reachable = true;
        while !closing.is_cancelled() {
            let outcome = self.step(&mut work, told.as_mut()).await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut reachable, false)
            {
                tracing::warn!(error = %error.with_causes(), "requests cannot be claimed; the worker tries again");
            }
            reachable = outcome.is_ok();
            while let Some(ended) = work.calls.try_join_next() {
                tell_of_panic(ended);
            }
            tokio::select! {
                () = self.pause(outcome.unwrap_or(Next::After(PAUSE_AFTER_ERROR)), told.as_ref()) => {}
                () = closing.cancelled() => {}
            }
        }
        if let Some(told) = told {
            told.close().await;
        }
        self.finish(work).await;
    }

    /// Claims once. The claim is never given up half-way: what was claimed would wait for its lease to end.
    async fn step(&self, work: &mut Work, told: Option<&mut BrokerJobs>) -> Result<Next> {
        if !(self.parts.is_enabled)().await {
            return Ok(Next::After(POLL));
        }
        if self.slots.free() == 0 {
            return Ok(Next::WhenFree);
        }
        let (store, policy) = (&self.parts.store, &self.parts.settings.policy);
        if let Some(told) = told {
            let claimed = told.claim(store.as_ref(), policy, self.slots.free()).await?;
            let is_idle = claimed.jobs.is_empty();
            self.start(work, claimed);
            if !work.has_more && !told.is_time_to_look(POLL_BEHIND_BROKER) {
                return Ok(if is_idle { Next::Within(POLL_BEHIND_BROKER) } else { Next::AtOnce });
            }
        }
        work.others.refresh(store.as_ref()).await?;
        let names: BTreeSet<&str> =
            self.downstreams.names().chain(work.others.names.iter().map(String::as_str)).collect();
        let admitted: Vec<(&str, usize)> =
            names.into_iter().map(|name| (name, self.downstreams.get(name).breaker.room())).collect();
        work.turn = work.turn.wrapping_add(1);
        let room = self.slots.room(&admitted, work.turn);
        if room.is_empty() {
            // Every breaker is open, or those that are not have their most.
            return Ok(Next::After(POLL / 4));
        }
        let claimed = store.claim_jobs(&room, policy).await?;
        let next = next(&claimed, room.iter().map(|room| room.jobs).min().unwrap_or_default());
        work.has_more = matches!(next, Next::AtOnce);
        self.start(work, claimed);
        Ok(next)
    }

    fn start(&self, work: &mut Work, claimed: ClaimedJobs) {
        for id in claimed.exhausted {
            let transition = "IN_PROGRESS -> FAILED_RETRY_EXHAUSTED";
            tracing::info!(target: "weir::request", requestId = %id, statusTransition = transition, "request");
            (self.parts.on_change)(id, RequestStatus::FailedRetryExhausted);
        }
        let now = Instant::now();
        for job in claimed.jobs {
            self.tell_of_claim(&job);
            let slot = self.slots.take(&job.downstream);
            let downstream = Arc::clone(self.downstreams.get(&job.downstream));
            let (caller, reports) = (Arc::clone(&work.caller), work.reports.clone());
            let admission = caller.admit(&downstream);
            work.calls.spawn(async move {
                let done = caller.attempt(job, &downstream, admission, now).await;
                // Its slot is free when the report is on its way: reports do not pile up behind a slow store.
                let _ = reports.send(done).await;
                drop(slot);
            });
        }
    }

    fn tell_of_claim(&self, job: &Job) {
        if job.attempt == 1 {
            tracing::info!(
                target: "weir::request",
                requestId = %job.id,
                tenantId = job.tenant.as_str(),
                statusTransition = "ACCEPTED -> IN_PROGRESS",
                attempt = job.attempt,
                "request"
            );
        }
        (self.parts.on_change)(job.id, RequestStatus::InProgress);
    }

    async fn pause(&self, next: Next, told: Option<&BrokerJobs>) {
        match (next, told) {
            (Next::AtOnce, _) => self.slots.gather(LINGER).await,
            (Next::WhenFree, _) => {
                self.slots.freed().await;
                self.slots.gather(LINGER).await;
            }
            (Next::Within(span), None) => self.parts.store.wait_for_jobs(span).await,
            (Next::Within(span), Some(told)) => told.wait(span).await,
            (Next::After(span), _) => tokio::time::sleep(span).await,
        }
    }

    /// Waits for calls that are under way; those that take too long are cut off and put back.
    async fn finish(&self, work: Work) {
        let Work { mut calls, caller, .. } = work;
        if tokio::time::timeout(self.parts.grace, all(&mut calls)).await.is_err() {
            caller.cut.cancel();
            all(&mut calls).await;
        }
    }
}

async fn all(calls: &mut JoinSet<()>) {
    while let Some(ended) = calls.join_next().await {
        tell_of_panic(ended);
    }
}

/// The request of a call that panicked is claimed again when its lease ends.
fn tell_of_panic(ended: std::result::Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(target: "weir::request", %error, "a call has panicked");
    }
}

/// What to do after a claim: a room that was filled has more behind it.
fn next(claimed: &ClaimedJobs, smallest_room: usize) -> Next {
    match claimed.next_due_in {
        _ if claimed.jobs.len() + claimed.exhausted.len() >= smallest_room.max(1) => Next::AtOnce,
        Some(next) => Next::Within(next.min(POLL)),
        None if claimed.jobs.is_empty() => Next::Within(POLL),
        None => Next::Within(LINGER),
    }
}

/// Downstreams that jobs name and the settings do not: they were there when the requests were accepted.
#[derive(Default)]
struct Others {
    names: Vec<String>,
    asked: Option<Instant>,
}

impl Others {
    async fn refresh(&mut self, store: &dyn weir_store::request::RequestStore) -> Result<()> {
        if self.asked.is_some_and(|asked| asked.elapsed() < LOOK_FOR_OTHERS) {
            return Ok(());
        }
        self.names = store.job_downstreams().await?;
        self.names.truncate(OTHERS_MAX);
        self.asked = Some(Instant::now());
        Ok(())
    }
}
