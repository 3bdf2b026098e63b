//! The worker: claims jobs up to the available permits, starts their calls, and claims again when there may be more.
//!
//! It is woken when this process accepts a request, when a permit is released, and when the next job is due. It also polls
//! ten times a second for requests that other servers accepted. With a broker it receives ids of new requests and polls once a
//! second for jobs that the broker does not have: retries, and jobs whose worker vanished.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{self, Sender};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use weir_core::RequestId;
use weir_core::request::state::RequestStatus;
use weir_store::Result;
use weir_store::request::ClaimedJobs;

use super::WorkerDependencies;
use super::call::{FinishedJob, JobRunner};
use super::concurrency::ConcurrencyPermits;
use super::downstream::Downstreams;
use super::reports::Reporter;
use crate::engines::broker_jobs::BrokerJobs;
use crate::request::events::{AttemptsExhausted, ClaimFailed, JobClaimed, JobPanicked};

/// How often the store is polled for jobs that other servers accepted.
const POLL: Duration = Duration::from_millis(100);
/// As `POLL`, with a broker.
const POLL_BEHIND_BROKER: Duration = Duration::from_secs(1);
/// The pause after a claim that left nothing behind, so that the next one is worth its commit.
const LINGER: Duration = Duration::from_millis(5);
/// How often the store is asked for downstreams that are no longer in the settings.
const UNCONFIGURED_REFRESH: Duration = Duration::from_secs(5);
/// The most such downstreams that are served.
const UNCONFIGURED_MAX: usize = 1_000;
/// The pause after the store did not answer.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);

pub(crate) struct Worker {
    dependencies: WorkerDependencies,
    downstreams: Downstreams,
    permits: Arc<ConcurrencyPermits>,
}

/// The state of a running worker.
struct WorkerState {
    calls: JoinSet<()>,
    runner: Arc<JobRunner>,
    reports: Sender<FinishedJob>,
    unconfigured: UnconfiguredDownstreams,
    limited: LimitedDownstreams,
    turn: usize,
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
        let permits = ConcurrencyPermits::new(dependencies.settings.concurrency);
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
        let work = WorkerState {
            calls: JoinSet::new(),
            runner,
            reports,
            unconfigured: UnconfiguredDownstreams::default(),
            limited: LimitedDownstreams::default(),
            turn: 0,
            has_more: false,
        };
        tokio::join!(self.work(work, closing), reporter.run(inbox));
    }

    async fn work(&self, mut work: WorkerState, closing: CancellationToken) {
        let mut broker_jobs = self.dependencies.source.clone().map(BrokerJobs::new);
        let mut reachable = true;
        while !closing.is_cancelled() {
            let outcome = self.step(&mut work, broker_jobs.as_mut()).await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut reachable, false)
            {
                ClaimFailed { error }.emit();
            }
            reachable = outcome.is_ok();
            while let Some(ended) = work.calls.try_join_next() {
                log_panic(ended);
            }
            // Nothing is claimed sooner after an error.
            let (next, limited) = match outcome {
                Ok(next) => (next, work.limited),
                Err(_) => (NextClaim::After(PAUSE_AFTER_ERROR), LimitedDownstreams::default()),
            };
            tokio::select! {
                () = self.pause(next, &limited, broker_jobs.as_ref()) => {}
                () = closing.cancelled() => {}
            }
        }
        if let Some(broker_jobs) = broker_jobs {
            broker_jobs.close().await;
        }
        self.finish(work).await;
    }

    /// Claims once. A claim is never cancelled: its jobs would wait until their leases end.
    async fn step(&self, work: &mut WorkerState, broker_jobs: Option<&mut BrokerJobs>) -> Result<NextClaim> {
        if !(self.dependencies.is_enabled)().await {
            return Ok(NextClaim::After(POLL));
        }
        if self.permits.available() == 0 {
            return Ok(NextClaim::WhenFree);
        }
        let (store, policy) = (&self.dependencies.store, &self.dependencies.settings.policy);
        if let Some(broker_jobs) = broker_jobs {
            let claimed = broker_jobs.claim(store.as_ref(), policy, self.permits.available()).await?;
            let is_idle = claimed.jobs.is_empty();
            self.start(work, claimed).await;
            let is_scan_due = work.limited.is_over() || broker_jobs.is_scan_due(POLL_BEHIND_BROKER);
            if !work.has_more && !is_scan_due {
                return Ok(if is_idle { NextClaim::Within(POLL_BEHIND_BROKER) } else { NextClaim::AtOnce });
            }
        }
        work.unconfigured.refresh(store.as_ref()).await?;
        let names: BTreeSet<&str> =
            self.downstreams.names().chain(work.unconfigured.names.iter().map(String::as_str)).collect();
        work.limited = LimitedDownstreams::default();
        let admitted: Vec<(&str, usize)> =
            names.into_iter().map(|name| (name, self.admitted(name, &mut work.limited))).collect();
        work.turn = work.turn.wrapping_add(1);
        let room = self.permits.capacity(&admitted, work.turn);
        if room.is_empty() {
            // Every downstream has an open breaker or all of its permits.
            return Ok(NextClaim::After(POLL / 4));
        }
        let claimed = store.claim_jobs(&room, policy).await?;
        let next = next(&claimed, room.iter().map(|room| room.jobs).min().unwrap_or_default());
        work.has_more = matches!(next, NextClaim::AtOnce);
        self.start(work, claimed).await;
        Ok(next)
    }

    /// How many jobs of a downstream its breaker and its limits allow. Records when its limits may allow more.
    fn admitted(&self, name: &str, limited: &mut LimitedDownstreams) -> usize {
        let (downstream, running) = (self.downstreams.get(name), self.permits.used_by(name));
        limited.add(downstream.limits.is_full(running), downstream.limits.pause());
        downstream.breaker.available_calls().min(downstream.limits.available_calls(running))
    }

    async fn start(&self, work: &mut WorkerState, claimed: ClaimedJobs) {
        let now = Instant::now();
        self.dependencies.metrics.duplicate_calls.inc_by(claimed.taken_over as u64);
        for job in claimed.jobs {
            JobClaimed { job: &job }.emit();
            (self.dependencies.on_change)(job.id, RequestStatus::InProgress);
            let running = self.permits.used_by(&job.downstream);
            let permit = self.permits.take(&job.downstream);
            let downstream = Arc::clone(self.downstreams.get(&job.downstream));
            let (runner, reports) = (Arc::clone(&work.runner), work.reports.clone());
            let admission = runner.admit(&downstream, running);
            work.calls.spawn(async move {
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
            (NextClaim::Within(span), None) => self.dependencies.store.wait_for_jobs(span).await,
            (NextClaim::Within(span), Some(broker_jobs)) => broker_jobs.wait(span).await,
            (NextClaim::After(span), _) => tokio::time::sleep(span).await,
        }
    }

    /// Waits for running calls; jobs whose calls take too long are put back.
    async fn finish(&self, work: WorkerState) {
        let WorkerState { mut calls, runner, .. } = work;
        if tokio::time::timeout(self.dependencies.grace, all(&mut calls)).await.is_err() {
            runner.abort.cancel();
            all(&mut calls).await;
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
    match claimed.next_due_in {
        _ if claimed.jobs.len() + claimed.exhausted.len() >= smallest_room.max(1) => NextClaim::AtOnce,
        Some(next) => NextClaim::Within(next.min(POLL)),
        None if claimed.jobs.is_empty() => NextClaim::Within(POLL),
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
    async fn refresh(&mut self, store: &dyn weir_store::request::RequestStore) -> Result<()> {
        if self.refreshed_at.is_some_and(|refreshed_at| refreshed_at.elapsed() < UNCONFIGURED_REFRESH) {
            return Ok(());
        }
        self.names = store.job_downstreams().await?;
        self.names.truncate(UNCONFIGURED_MAX);
        self.refreshed_at = Some(Instant::now());
        Ok(())
    }
}
