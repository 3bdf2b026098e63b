//! The writer thread: group commit.
//!
//! Every write is a job. The thread runs all waiting jobs in one transaction, commits with one fsync, and only then
//! answers them. A job that fails does not affect the others: every job but the first runs on its own savepoint, and
//! when the first fails, the transaction contains nothing else yet.
//!
//! No job keeps the writer for long: a job that may have much to do works in turns ([`Writer::run_in_turns`]), and other
//! jobs run between them.

mod job;
mod state;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, TrySendError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::oneshot;
use weir_store::engine_calls::EngineCalls;
use weir_store::writer_metrics::WriterMetrics;
use weir_store::{Error, Result};

pub(crate) use self::job::{BatchInTurns, Scheduling, WriterTurn};
use self::job::{ClosureJob, WriterJob};
use self::state::Savepoint;
pub(crate) use self::state::WriterState;
use crate::ENGINE;
use crate::error::{DiskHealth, classify};
use crate::quota::QuotaRows;

/// Jobs that may wait for the writer. Hot operations arrive as one job per batch, so this many mean that the disk is far
/// too slow for the load.
pub(crate) const QUEUED_JOBS_MAX: usize = 512;
/// Jobs in one commit.
const GROUP_MAX: usize = 128;
/// The writer counts as idle after this long without a job.
const IDLE_AFTER: Duration = Duration::from_millis(20);
/// Length of a turn. Together with the step that is running when it ends, and on a slow disk, a job stays below the
/// 50 ms that none may keep the writer for.
const TURN: Duration = Duration::from_millis(15);

#[derive(Debug)]
pub(crate) struct Writer {
    /// `None` while dropping: closing the channel stops the thread.
    jobs: Option<mpsc::SyncSender<Box<dyn WriterJob>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    shared: Arc<WriterShared>,
}

/// Shared by the thread and its callers.
#[derive(Debug)]
struct WriterShared {
    turn_micros: AtomicU64,
    disk: DiskHealth,
    metrics: WriterMetrics,
    calls: EngineCalls,
}

impl WriterShared {
    fn begin_turn(&self) -> WriterTurn {
        WriterTurn::begin(Duration::from_micros(self.turn_micros.load(Ordering::Relaxed)))
    }
}

impl Writer {
    pub(crate) fn start(connection: Connection, calls: EngineCalls) -> Result<Self> {
        let (jobs, waiting) = mpsc::sync_channel(QUEUED_JOBS_MAX);
        let shared = Arc::new(WriterShared {
            turn_micros: AtomicU64::new(0),
            disk: DiskHealth::default(),
            metrics: WriterMetrics::default(),
            calls,
        });
        let thread = WriterThread {
            connection,
            state: WriterState::default(),
            fifo: VecDeque::new(),
            unfinished: VecDeque::new(),
            changes_before: 0,
            shared: Arc::clone(&shared),
        };
        let thread = std::thread::Builder::new()
            .name("weir-sqlite-writer".into())
            .spawn(move || thread.run_until_closed(&waiting))
            .map_err(|source| Error::failed(ENGINE, source))?;
        let writer = Self { jobs: Some(jobs), thread: Mutex::new(Some(thread)), shared };
        writer.set_turn(TURN);
        Ok(writer)
    }

    /// Sets how long a job may work before others run. Tests make turns short, so that every job takes many.
    pub(crate) fn set_turn(&self, turn: Duration) {
        let micros = u64::try_from(turn.as_micros()).unwrap_or(u64::MAX);
        self.shared.turn_micros.store(micros, Ordering::Relaxed);
    }

    pub(crate) fn metrics(&self) -> &WriterMetrics {
        &self.shared.metrics
    }

    pub(crate) fn disk(&self) -> &DiskHealth {
        &self.shared.disk
    }

    /// Runs `work` in the next commit; returns when it is on disk. The work is done even if the caller drops this future.
    /// Only for work that is short whatever the tables contain.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut work = Some(work);
        self.run_in_turns(Scheduling::Interleaved, move |connection, _, _| {
            once(&mut work, |work| work(connection))
        })
        .await
    }

    /// As [`Writer::run`], for work on quota rows.
    pub(crate) async fn run_with_quota<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &mut QuotaRows) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut work = Some(work);
        let apply = move |connection: &Connection, state: &mut WriterState, _: &WriterTurn| {
            once(&mut work, |work| work(connection, &mut state.quota))
        };
        self.run_in_turns(Scheduling::Interleaved, apply).await
    }

    /// Calls `work` once per turn until it breaks with its result; other jobs run between the turns. Each turn is
    /// committed. An error ends the job, and earlier turns stay committed.
    pub(crate) async fn run_in_turns<T: Send + 'static>(
        &self,
        scheduling: Scheduling,
        work: impl FnMut(&Connection, &mut WriterState, &WriterTurn) -> rusqlite::Result<ControlFlow<T>>
        + Send
        + 'static,
    ) -> Result<T> {
        let _timer = self.shared.calls.start("write");
        let (caller, answer) = oneshot::channel();
        let job = Box::new(ClosureJob { scheduling, work, value: None, caller });
        match self.jobs.as_ref().map(|jobs| jobs.try_send(job)) {
            Some(Ok(())) => {}
            Some(Err(TrySendError::Full(_))) => {
                return Err(Error::Overloaded { lane: "sqlite writer" });
            }
            Some(Err(TrySendError::Disconnected(_))) | None => {
                return Err(Error::failed(ENGINE, "the writer thread has stopped; restart weir"));
            }
        }
        answer.await.unwrap_or_else(|_closed| {
            Err(Error::failed(ENGINE, "the writer thread ended before it answered; restart weir"))
        })
    }
}

/// Calls `apply` in the first turn, and breaks with its result.
fn once<F, T>(
    work: &mut Option<F>,
    apply: impl FnOnce(F) -> rusqlite::Result<T>,
) -> rusqlite::Result<ControlFlow<T>> {
    work.take().map_or(Ok(ControlFlow::Continue(())), |work| apply(work).map(ControlFlow::Break))
}

impl Drop for Writer {
    /// Waits for the jobs already accepted, so that a closed engine can be opened again at once.
    fn drop(&mut self) {
        self.jobs = None;
        let thread = self.thread.lock().take();
        // A job may drop the last clone of the engine on the writer thread, which cannot wait for itself.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

struct WriterThread {
    connection: Connection,
    state: WriterState,
    /// [`Scheduling::Fifo`] jobs that were deferred: the first is unfinished, and the others wait for it.
    fifo: VecDeque<Box<dyn WriterJob>>,
    /// Other unfinished jobs.
    unfinished: VecDeque<Box<dyn WriterJob>>,
    /// Rows that this connection had changed before the current transaction.
    changes_before: u64,
    shared: Arc<WriterShared>,
}

/// A job that was applied and waits for its commit.
struct AppliedJob {
    job: Box<dyn WriterJob>,
    is_unfinished: bool,
}

/// Whether a FIFO job of this group is unfinished. It has had its turn, and the FIFO jobs behind it must wait.
fn has_unfinished_fifo(applied: &[AppliedJob]) -> bool {
    applied.iter().any(|other| other.is_unfinished && other.job.scheduling() == Scheduling::Fifo)
}

impl WriterThread {
    fn run_until_closed(mut self, waiting: &mpsc::Receiver<Box<dyn WriterJob>>) {
        loop {
            if self.deferred_jobs() > 0 {
                let first =
                    if self.deferred_jobs() < QUEUED_JOBS_MAX { waiting.try_recv().ok() } else { None };
                self.write(first, waiting);
                continue;
            }
            let first = match waiting.recv_timeout(IDLE_AFTER) {
                Ok(first) => Some(first),
                Err(RecvTimeoutError::Timeout) => match self.fold_until_next_job(waiting) {
                    Some(first) => Some(first),
                    // With all journals folded there is nothing to do before the next job.
                    None if !self.state.has_unfolded_rows() => waiting.recv().ok(),
                    None => continue,
                },
                Err(RecvTimeoutError::Disconnected) => None,
            };
            let Some(first) = first else { break };
            self.write(Some(first), waiting);
        }
        while self.state.is_fold_due() && self.fold() {}
    }

    /// The number of received jobs that are unfinished or wait behind an unfinished one.
    fn deferred_jobs(&self) -> usize {
        self.fifo.len() + self.unfinished.len()
    }

    /// Folds journals, a turn at a time, until nothing is due, an attempt fails, or a job arrives.
    fn fold_until_next_job(
        &mut self,
        waiting: &mpsc::Receiver<Box<dyn WriterJob>>,
    ) -> Option<Box<dyn WriterJob>> {
        while self.state.is_fold_due() && self.fold() {
            if let Ok(job) = waiting.try_recv() {
                return Some(job);
            }
        }
        None
    }

    /// Folds journals for one turn. Returns false if that failed; the journals then still have everything, and a later
    /// attempt repeats it.
    fn fold(&mut self) -> bool {
        let mut fold = ClosureJob {
            scheduling: Scheduling::Interleaved,
            work: |connection: &Connection, state: &mut WriterState, turn: &WriterTurn| {
                state.fold(connection, turn).map(ControlFlow::Break)
            },
            value: None,
            caller: oneshot::channel().0,
        };
        let outcome = self.apply_first(&mut fold).and_then(|_| self.commit());
        self.roll_back_if_failed(&outcome);
        outcome.is_ok()
    }

    fn write(&mut self, first: Option<Box<dyn WriterJob>>, waiting: &mpsc::Receiver<Box<dyn WriterJob>>) {
        let mut applied = Vec::new();
        let outcome = self.write_group(first, waiting, &mut applied);
        self.roll_back_if_failed(&outcome);
        for AppliedJob { job, is_unfinished } in applied {
            match job.scheduling() {
                _ if outcome.is_err() || !is_unfinished => job.answer(outcome.clone()),
                Scheduling::Fifo => self.fifo.push_front(job),
                Scheduling::Interleaved => self.unfinished.push_back(job),
                Scheduling::Prioritized => self.defer_prioritized(job),
            }
        }
    }

    /// Queues a prioritized job behind the first job that is not prioritized, so that the two kinds alternate.
    fn defer_prioritized(&mut self, job: Box<dyn WriterJob>) {
        let other = self.unfinished.iter().position(|other| other.scheduling() != Scheduling::Prioritized);
        let index = other.map_or(self.unfinished.len(), |other| other + 1);
        self.unfinished.insert(index, job);
    }

    fn roll_back_if_failed(&mut self, outcome: &Result<()>) {
        if outcome.is_err() {
            self.state.roll_back_to(Savepoint::default());
            if !self.connection.is_autocommit() {
                let _ = self.connection.execute_batch("ROLLBACK");
            }
        }
    }

    /// Applies `first` and the jobs waiting behind it, alternating with deferred FIFO jobs, then one turn of an unfinished
    /// job, and commits. Jobs that fail by themselves are answered here; the others are left in `applied`, to be answered
    /// with the outcome of the commit.
    fn write_group(
        &mut self,
        first: Option<Box<dyn WriterJob>>,
        waiting: &mpsc::Receiver<Box<dyn WriterJob>>,
        applied: &mut Vec<AppliedJob>,
    ) -> Result<()> {
        let group_turn = self.shared.begin_turn();
        let mut next = first;
        loop {
            let deferred = if has_unfinished_fifo(applied) { None } else { self.fifo.pop_front() };
            if next.is_none() && deferred.is_none() {
                break;
            }
            if let Some(job) = deferred
                && let Err(error) = self.apply_in_group(job, applied)
            {
                // The transaction is rolled back. Without this answer the job just received would be dropped unanswered.
                if let Some(job) = next {
                    job.answer(Err(error.clone()));
                }
                return Err(error);
            }
            if let Some(job) = next {
                let must_wait = !self.fifo.is_empty() || has_unfinished_fifo(applied);
                if job.scheduling() == Scheduling::Fifo && must_wait {
                    self.fifo.push_back(job);
                } else {
                    self.apply_in_group(job, applied)?;
                }
            }
            if applied.len() >= GROUP_MAX || !group_turn.has_time() {
                break;
            }
            next = if self.deferred_jobs() < QUEUED_JOBS_MAX { waiting.try_recv().ok() } else { None };
        }
        if let Some(job) = self.unfinished.pop_front() {
            self.apply_in_group(job, applied)?;
        }
        if applied.is_empty() { Ok(()) } else { self.commit() }
    }

    /// Applies a job within the current group. An error ends the whole group.
    fn apply_in_group(&mut self, mut job: Box<dyn WriterJob>, applied: &mut Vec<AppliedJob>) -> Result<()> {
        let outcome =
            if applied.is_empty() { self.apply_first(&mut *job) } else { self.apply_on_savepoint(&mut *job) };
        match outcome {
            Ok(progress) => {
                applied.push(AppliedJob { job, is_unfinished: progress.is_continue() });
                Ok(())
            }
            Err(error) => {
                job.answer(Err(error.clone()));
                // Some errors (a full disk) roll the whole transaction back, with the work of every job in it.
                if !applied.is_empty() && self.connection.is_autocommit() { Err(error) } else { Ok(()) }
            }
        }
    }

    /// Begins the transaction with one job. If the job fails or panics, the transaction is rolled back.
    fn apply_first(&mut self, job: &mut dyn WriterJob) -> Result<ControlFlow<()>> {
        self.statement("BEGIN IMMEDIATE")?;
        self.changes_before = self.connection.total_changes();
        let outcome = self.apply(job);
        if outcome.is_err() && !self.connection.is_autocommit() {
            self.statement("ROLLBACK")?;
        }
        outcome
    }

    /// Applies one job on its own savepoint. If it fails or panics, only its own changes are rolled back.
    fn apply_on_savepoint(&mut self, job: &mut dyn WriterJob) -> Result<ControlFlow<()>> {
        self.statement("SAVEPOINT job")?;
        let outcome = self.apply(job);
        if outcome.is_err() && !self.connection.is_autocommit() {
            self.statement("ROLLBACK TO job").or_else(|_| self.statement("ROLLBACK"))?;
        }
        if !self.connection.is_autocommit() {
            self.statement("RELEASE job")?;
        }
        outcome
    }

    fn apply(&mut self, job: &mut dyn WriterJob) -> Result<ControlFlow<()>> {
        let started = Instant::now();
        let turn = self.shared.begin_turn();
        let Self { connection, state, shared, .. } = self;
        let savepoint = state.savepoint();
        let outcome = match catch_unwind(AssertUnwindSafe(|| job.apply(connection, state, &turn))) {
            Ok(outcome) => outcome.map_err(classify),
            Err(_panic) => Err(Error::failed(ENGINE, "a write panicked and was rolled back")),
        };
        shared.metrics.record_turn(started.elapsed());
        if let Err(error) = &outcome {
            shared.disk.record_failure(error);
            state.roll_back_to(savepoint);
        }
        outcome
    }

    fn commit(&mut self) -> Result<()> {
        let started = Instant::now();
        let outcome = self.statement("COMMIT");
        if outcome.is_ok() {
            self.state.commit();
        }
        self.shared.metrics.commit_seconds.observe(started.elapsed().as_secs_f64());
        match &outcome {
            // A transaction that only read says nothing about writes.
            Ok(()) if self.connection.total_changes() == self.changes_before => {}
            Ok(()) => self.shared.disk.record_success(),
            Err(error) => self.shared.disk.record_failure(error),
        }
        outcome
    }

    fn statement(&self, sql: &str) -> Result<()> {
        let execute = |mut statement: rusqlite::CachedStatement<'_>| statement.execute([]);
        self.connection.prepare_cached(sql).and_then(execute).map_err(classify)?;
        Ok(())
    }
}
