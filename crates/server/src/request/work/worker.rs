//! The worker: claims jobs up to the available permits, starts their calls, and claims again when there may be more.
//!
//! It is woken when this process accepts a request, when a permit is released, and when the next job is due. It also polls
//! ten times a second for requests that other servers accepted. With a broker it receives ids of new requests and polls once a
//! second for jobs that the broker does not have: retries, and jobs whose worker vanished.
//!
//! While it is busy, express jobs (see [`weir_core::request::turn`]) have claims of their own beside the large ones, so that a tenant
//! with little work need not wait until those of the others are done.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::mpsc::{self, Sender};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use weir_core::RequestId;
use weir_core::request::breaker::CallAdmission;
use weir_core::request::state::RequestStatus;
use weir_core::request::turn::Turn;
use weir_store::Result;
use weir_store::quota::random_bytes;
use weir_store::request::{ClaimOrder, ClaimedJobs, DownstreamCapacity};

use super::WorkerDependencies;
use super::call::{FinishedJob, JobRunner};
use super::concurrency::{ClaimKind, ClaimPermit, ConcurrencyPermits, DownstreamUse};
use super::downstream::Downstreams;
use super::reports::Reporter;
use crate::engines::broker_jobs::BrokerJobs;
use crate::request::events::{AttemptsExhausted, ClaimFailed, JobClaimed, JobPanicked, JobsTakenOver};

/// How often the store is polled for jobs that other servers accepted.
const POLL: Duration = Duration::from_millis(100);
/// As `POLL`, with a broker.
const POLL_BEHIND_BROKER: Duration = Duration::from_secs(1);
/// As `POLL`, for express jobs while the worker is busy.
const POLL_EXPRESS: Duration = Duration::from_millis(10);
/// The pause after a claim that left nothing behind, so that the next one is worth its commit.
const LINGER: Duration = Duration::from_millis(5);
/// As `LINGER`, after a claim of express jobs.
const LINGER_EXPRESS: Duration = Duration::from_millis(1);
/// How often the store is asked for downstreams that are no longer in the settings.
const UNCONFIGURED_REFRESH: Duration = Duration::from_secs(5);
/// The most such downstreams that are served.
const UNCONFIGURED_MAX: usize = 1_000;
/// The pause after the store did not answer.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);
/// How long a call waits whose tenant turned out to have all calls that it may have.
const TENANT_DELAY: Duration = Duration::from_millis(10);

pub(crate) struct Worker {
    dependencies: WorkerDependencies,
    downstreams: Downstreams,
    permits: Arc<ConcurrencyPermits>,
}

/// What the claims of a running worker share.
struct RunningWork {
    calls: Mutex<JoinSet<()>>,
    runner: Arc<JobRunner>,
    reports: Sender<FinishedJob>,
    unconfigured: Mutex<UnconfiguredDownstreams>,
    /// Whether a claim by turns runs, or waits for permits.
    is_busy: AtomicBool,
}

/// The state of the claims by turns.
#[derive(Default)]
struct TurnState {
    limited: LimitedDownstreams,
    turn: usize,
    order: ClaimOrder,
    /// Whether the last claim left jobs behind.
    has_more: bool,
}

/// When the limits of downstreams that were used up at the last claim may allow more calls.
#[derive(Clone, Copy, Default)]
struct LimitedDownstreams {
    /// When the first rate does.
    until: Option<Instant>,
    /// Whether the end of a call does.
    is_full: bool,
}

impl LimitedDownstreams {
    fn add(&mut self, is_full: bool, pause: Option<Duration>) {
        let until = pause.map(|pause| Instant::now() + pause);
        self.until = [self.until, until].into_iter().flatten().min();
        self.is_full |= is_full;
    }

    /// Whether a rate allows more by now.
    fn is_over(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    async fn wait(&self, permits: &ConcurrencyPermits) {
        let rate = async {
            match self.until {
                Some(until) => tokio::time::sleep_until(until.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = rate => {}
            () = permits.wait_for_release(), if self.is_full => {}
        }
    }
}

/// When to claim again.
enum NextClaim {
    /// There are more jobs: claim when enough permits are available.
    AtOnce,
    /// No permit is available: claim when one is released.
    WhenFree,
    /// All due jobs are of tenants that have as many calls as they may have: claim when one ends, or a request is accepted.
    WhenTenantFree,
    /// Claim when a request is accepted or this time has passed.
    Within(Duration),
    /// Claim after this time.
    After(Duration),
}

impl Worker {
    /// Creates a worker. It claims nothing until it runs.
    #[must_use]
    pub(crate) fn new(dependencies: WorkerDependencies) -> Self {
        let downstreams = Downstreams::new(&dependencies);
        let rules = Arc::clone(&dependencies.settings.tenants);
        let permits = ConcurrencyPermits::new(dependencies.settings.concurrency, rules);
        Self { dependencies, downstreams, permits }
    }

    /// Runs until `closing` is cancelled, then finishes running calls or puts their jobs back.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let (reports, inbox) = mpsc::channel(self.dependencies.settings.concurrency);
        let reporter = Reporter::new(&self.dependencies);
        let runner = Arc::new(JobRunner {
            keyring: Arc::clone(&self.dependencies.keyring),
            form: Arc::clone(&self.dependencies.form),
            clock: Arc::clone(&self.dependencies.clock),
            closing: closing.clone(),
            abort: CancellationToken::new(),
        });
        let work = RunningWork {
            calls: Mutex::new(JoinSet::new()),
            runner,
            reports,
            unconfigured: Mutex::default(),
            is_busy: AtomicBool::new(true),
        };
        let work = async {
            tokio::join!(self.serve_turns(&work, &closing), self.serve_express(&work, &closing));
            self.finish(work).await;
        };
        tokio::join!(work, reporter.run(inbox));
    }

    async fn serve_turns(&self, work: &RunningWork, closing: &CancellationToken) {
        let mut broker_jobs = self.dependencies.source.clone().map(BrokerJobs::new);
        let (mut state, mut reachable) = (TurnState::default(), true);
        while !closing.is_cancelled() {
            let outcome = self.step(work, &mut state, broker_jobs.as_mut()).await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut reachable, false)
            {
                ClaimFailed { error }.emit();
            }
            reachable = outcome.is_ok();
            while let Some(ended) = work.calls.lock().try_join_next() {
                log_panic(ended);
            }
            // Nothing is claimed sooner after an error.
            let (next, limited) = match outcome {
                Ok(next) => (next, state.limited),
                Err(_) => (NextClaim::After(PAUSE_AFTER_ERROR), LimitedDownstreams::default()),
            };
            work.is_busy.store(!matches!(next, NextClaim::Within(_)), Ordering::Relaxed);
            tokio::select! {
                () = self.pause(next, &limited, broker_jobs.as_ref()) => {}
                () = closing.cancelled() => {}
            }
            work.is_busy.store(true, Ordering::Relaxed);
        }
        if let Some(broker_jobs) = broker_jobs {
            broker_jobs.close().await;
        }
    }

    /// Claims express jobs while claims by turns are busy; otherwise those take them, too.
    async fn serve_express(&self, work: &RunningWork, closing: &CancellationToken) {
        loop {
            let is_busy = work.is_busy.load(Ordering::Relaxed);
            let poll = if is_busy { POLL_EXPRESS } else { POLL };
            tokio::select! {
                () = self.dependencies.store.wait_for_express_jobs(poll) => {}
                () = closing.cancelled() => return,
            }
            if !work.is_busy.load(Ordering::Relaxed) || !(self.dependencies.is_enabled)().await {
                continue;
            }
            // The claims by turns log that the store cannot be reached.
            let pause = match self.claim_express(work).await {
                Ok(()) => LINGER_EXPRESS,
                Err(_unreachable) => PAUSE_AFTER_ERROR,
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = closing.cancelled() => return,
            }
        }
    }

    /// Claims express jobs once. As every claim, it is never cancelled.
    async fn claim_express(&self, work: &RunningWork) -> Result<()> {
        let claim = self.capacity(work, ClaimKind::Express, 0, &mut LimitedDownstreams::default());
        if claim.room.is_empty() {
            return Ok(());
        }
        let Self { dependencies, permits, .. } = self;
        let policy = &dependencies.settings.policy;
        let claimed = dependencies.store.claim_express(&claim.room, &permits.tenants(), policy).await?;
        self.start(work, claimed).await;
        Ok(())
    }

    /// Claims once. A claim is never cancelled: its jobs would wait until their leases end.
    async fn step(
        &self,
        work: &RunningWork,
        state: &mut TurnState,
        broker_jobs: Option<&mut BrokerJobs>,
    ) -> Result<NextClaim> {
        let limited = std::mem::take(&mut state.limited);
        if !(self.dependencies.is_enabled)().await {
            return Ok(NextClaim::After(POLL));
        }
        if self.permits.available(ClaimKind::Turns) == 0 {
            return Ok(NextClaim::WhenFree);
        }
        if let Some(broker_jobs) = broker_jobs
            && let Some(next) = self.claim_named(work, state, broker_jobs, limited).await?
        {
            return Ok(next);
        }
        self.refresh_unconfigured(work).await?;
        state.turn = state.turn.wrapping_add(1);
        let claim = self.capacity(work, ClaimKind::Turns, state.turn, &mut state.limited);
        if claim.room.is_empty() {
            // Every downstream has an open breaker, all of its permits, or as many calls as its limits allow.
            return Ok(NextClaim::After(POLL / 4));
        }
        let Self { dependencies, permits, .. } = self;
        state.order.tenants = permits.tenants();
        state.begin_turns(&claim.room);
        let policy = &dependencies.settings.policy;
        let mut claimed = dependencies.store.claim_jobs(&claim.room, &state.order, policy).await?;
        state.order.turns.append(&mut claimed.turns);
        let next = next(&claimed, claim.room.iter().map(|room| room.jobs).min().unwrap_or_default());
        state.has_more = matches!(next, NextClaim::AtOnce | NextClaim::WhenTenantFree);
        self.start(work, claimed).await;
        Ok(next)
    }

    /// Claims jobs that a broker names. Returns when to claim again unless the store is to be scanned as well: now and then, and when
    /// the limits of a downstream, which were used up, may allow more. While more is waiting than can be started, a half of the
    /// permits is left to the scan, in which tenants take turns.
    async fn claim_named(
        &self,
        work: &RunningWork,
        state: &mut TurnState,
        broker_jobs: &mut BrokerJobs,
        limited: LimitedDownstreams,
    ) -> Result<Option<NextClaim>> {
        let (store, policy) = (&self.dependencies.store, &self.dependencies.settings.policy);
        let available = self.permits.available(ClaimKind::Turns);
        let most = if state.has_more { available.div_ceil(2) } else { available };
        let claimed = broker_jobs.claim(store.as_ref(), &self.permits.tenants(), policy, most).await?;
        let (is_idle, is_full) = (claimed.jobs.is_empty(), claimed.jobs.len() >= most);
        state.has_more |= is_full || claimed.is_held_back;
        self.start(work, claimed).await;
        if state.has_more || limited.is_over() || broker_jobs.is_scan_due(POLL_BEHIND_BROKER) {
            return Ok(None);
        }
        state.limited = limited;
        Ok(Some(if is_idle { NextClaim::Within(POLL_BEHIND_BROKER) } else { NextClaim::AtOnce }))
    }

    async fn refresh_unconfigured(&self, work: &RunningWork) -> Result<()> {
        let is_due = work.unconfigured.lock().is_due();
        if is_due {
            let names = self.dependencies.store.job_downstreams().await?;
            work.unconfigured.lock().set(names);
        }
        Ok(())
    }

    /// The capacity of a claim: for all downstreams in the settings and those of stored jobs. Both claims run on one task, so
    /// neither counts between what the other counts and what it takes.
    fn capacity(
        &self,
        work: &RunningWork,
        kind: ClaimKind,
        turn: usize,
        limited: &mut LimitedDownstreams,
    ) -> ClaimPermit<'_> {
        let unconfigured = work.unconfigured.lock();
        let names: BTreeSet<&str> =
            self.downstreams.names().chain(unconfigured.names.iter().map(String::as_str)).collect();
        let admitted: Vec<(&str, usize)> =
            names.into_iter().map(|name| (name, self.admitted(name, limited))).collect();
        self.permits.capacity(&admitted, kind, turn)
    }

    /// How many jobs of a downstream its breaker and its limits allow beside what the other claim may bring. Records when its limits
    /// may allow more.
    fn admitted(&self, name: &str, limited: &mut LimitedDownstreams) -> usize {
        let (downstream, used) = (self.downstreams.get(name), self.used_by(name));
        limited.add(downstream.limits.is_full(used.calls), downstream.limits.pause());
        let by_breaker = downstream.breaker.available_calls().saturating_sub(used.claimed);
        by_breaker.min(downstream.limits.available_calls(used))
    }

    /// What the downstream that is called for this name uses: the default is also called for names that are no longer in the
    /// settings.
    fn used_by(&self, name: &str) -> DownstreamUse {
        let downstream = self.downstreams.get(name);
        self.permits.used_by(|other| Arc::ptr_eq(self.downstreams.get(other), downstream))
    }

    async fn start(&self, work: &RunningWork, claimed: ClaimedJobs) {
        let now = Instant::now();
        JobsTakenOver { count: claimed.taken_over }.emit(&self.dependencies.metrics);
        for job in claimed.jobs {
            JobClaimed { job: &job }.emit();
            (self.dependencies.on_change)(job.id, RequestStatus::InProgress);
            let running = self.used_by(&job.downstream).calls;
            let (permit, is_within) = self.permits.take(&job.downstream, &job.tenant);
            let downstream = Arc::clone(self.downstreams.get(&job.downstream));
            let (runner, reports) = (Arc::clone(&work.runner), work.reports.clone());
            let admission = if is_within {
                runner.admit(&downstream, running)
            } else {
                CallAdmission::Denied { until: runner.clock.now().plus(TENANT_DELAY) }
            };
            work.calls.lock().spawn(async move {
                let done = runner.attempt(job, &downstream, admission, now).await;
                // The permit is held until the report is queued, so that reports do not pile up behind a slow store.
                let _ = reports.send(done).await;
                drop(permit);
            });
        }
        self.publish_exhausted(&claimed.exhausted).await;
    }

    /// Publishes and logs requests that became dead letters in a claim. Their records are read for the log lines alone.
    async fn publish_exhausted(&self, ids: &[RequestId]) {
        if ids.is_empty() {
            return;
        }
        ids.iter().for_each(|id| (self.dependencies.on_change)(*id, RequestStatus::FailedRetryExhausted));
        let found = self.dependencies.store.find_summaries(ids).await.unwrap_or_default();
        for id in ids {
            let request = found.iter().find(|request| request.id == *id);
            AttemptsExhausted { id: *id, request }.emit(&self.dependencies.metrics.finished);
        }
    }

    /// Waits until the next claim, or until the limits of a downstream may allow more.
    async fn pause(&self, next: NextClaim, limited: &LimitedDownstreams, broker_jobs: Option<&BrokerJobs>) {
        tokio::select! {
            () = self.pause_for(next, broker_jobs) => {}
            () = limited.wait(&self.permits) => {}
        }
    }

    async fn pause_for(&self, next: NextClaim, broker_jobs: Option<&BrokerJobs>) {
        match (next, broker_jobs) {
            (NextClaim::AtOnce, _) => self.permits.wait_for_several(LINGER).await,
            (NextClaim::WhenFree, _) => {
                self.permits.wait_for_release().await;
                self.permits.wait_for_several(LINGER).await;
            }
            (NextClaim::WhenTenantFree, _) => {
                tokio::select! {
                    () = self.permits.wait_for_release() => {}
                    () = self.dependencies.store.wait_for_jobs(POLL) => {}
                }
                tokio::time::sleep(LINGER).await;
            }
            (NextClaim::Within(span), None) => self.dependencies.store.wait_for_jobs(span).await,
            (NextClaim::Within(span), Some(broker_jobs)) => broker_jobs.wait(span).await,
            (NextClaim::After(span), _) => tokio::time::sleep(span).await,
        }
    }

    /// Waits for running calls; jobs whose calls take too long are put back.
    async fn finish(&self, work: RunningWork) {
        let RunningWork { calls, runner, .. } = work;
        let mut calls = calls.into_inner();
        if tokio::time::timeout(self.dependencies.grace, all(&mut calls)).await.is_err() {
            runner.abort.cancel();
            all(&mut calls).await;
        }
    }
}

impl TurnState {
    /// Begins the turns of downstreams that are new anywhere, so that servers that begin at once do not meet, and one that begins
    /// again and again does not always serve the same tenants. Forgets those of others.
    fn begin_turns(&mut self, room: &[DownstreamCapacity]) {
        if self.order.turns.len() > UNCONFIGURED_MAX {
            self.order.turns.clear();
        }
        for DownstreamCapacity { downstream, .. } in room {
            if !self.order.turns.contains_key(downstream) {
                let [first, second, ..]: [u8; 10] = random_bytes();
                let after = [first, second].map(|byte| char::from(b' ' + byte % 95)).iter().collect();
                self.order.turns.insert(downstream.clone(), Turn { after, had: 0 });
            }
        }
    }
}

async fn all(calls: &mut JoinSet<()>) {
    while let Some(ended) = calls.join_next().await {
        log_panic(ended);
    }
}

fn log_panic(ended: std::result::Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        JobPanicked { error: &error }.emit();
    }
}

/// When to claim after a claim: if it filled a downstream's capacity, there may be more jobs.
fn next(claimed: &ClaimedJobs, smallest_room: usize) -> NextClaim {
    let count = claimed.jobs.len() + claimed.exhausted.len();
    match claimed.next_due_in {
        _ if count >= smallest_room.max(1) || claimed.is_partial => NextClaim::AtOnce,
        _ if count == 0 && claimed.is_held_back => NextClaim::WhenTenantFree,
        Some(next) => NextClaim::Within(next.min(POLL)),
        None if count == 0 => NextClaim::Within(POLL),
        None => NextClaim::Within(LINGER),
    }
}

/// Downstreams of stored jobs that are no longer in the settings.
#[derive(Default)]
struct UnconfiguredDownstreams {
    names: Vec<String>,
    refreshed_at: Option<Instant>,
}

impl UnconfiguredDownstreams {
    fn is_due(&self) -> bool {
        self.refreshed_at.is_none_or(|refreshed_at| refreshed_at.elapsed() >= UNCONFIGURED_REFRESH)
    }

    fn set(&mut self, mut names: Vec<String>) {
        names.truncate(UNCONFIGURED_MAX);
        self.names = names;
        self.refreshed_at = Some(Instant::now());
    }
}
