//! The writer thread: group commit.
//!
//! Every write is a job. The thread takes whatever jobs are waiting, runs them in one transaction, commits with one
//! fsync, and only then answers them. A job that fails takes nobody with it: all but the first stand on savepoints of
//! their own, and when the first fails there is nothing else to lose.
//!
//! No job keeps the writer for long: those that may have much to do are done in turns ([`Writer::in_turns`]), with the jobs
//! of others between them.

mod job;
mod storage;
#[cfg(test)]
mod tests;
mod unflushed;

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
use weir_store::writer_metrics::WriterMetrics;
use weir_store::{Error, Result};

pub(crate) use self::job::{BatchInTurns, Order, Turn};
use self::job::{Job, Write};
use self::storage::Storage;
use self::unflushed::Mark;
pub(crate) use self::unflushed::Unflushed;
use crate::ENGINE;
use crate::error::classify;
use crate::quota_journal::QuotaJournal;

/// Jobs that may wait. Hot operations come as one job a batch, so this many is a server far behind its disk.
pub(crate) const WAITING_MAX: usize = 512;
/// Jobs in one commit.
const GROUP_MAX: usize = 128;
/// With nothing to do for so long the writer is idle.
const IDLE_AFTER: Duration = Duration::from_millis(20);
/// The turn of a job. With the step that is under way when it is over, and a slow disk, that stays below the 50 ms that
/// nobody may keep the writer for.
const TURN: Duration = Duration::from_millis(15);

#[derive(Debug)]
pub(crate) struct Writer {
    /// Taken away on drop, which is what tells the thread to finish.
    jobs: Option<mpsc::SyncSender<Box<dyn Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    shared: Arc<Shared>,
}

/// What the thread shares with those who give it jobs.
#[derive(Debug)]
struct Shared {
    turn_micros: AtomicU64,
    storage: Storage,
    metrics: WriterMetrics,
}

impl Shared {
    fn begin_turn(&self) -> Turn {
        Turn::begin(Duration::from_micros(self.turn_micros.load(Ordering::Relaxed)))
    }
}

impl Writer {
    pub(crate) fn start(connection: Connection) -> Result<Self> {
        let (jobs, waiting) = mpsc::sync_channel(WAITING_MAX);
        let shared = Arc::new(Shared {
            turn_micros: AtomicU64::new(0),
            storage: Storage::default(),
            metrics: WriterMetrics::default(),
        });
        let thread = WriterThread {
            connection,
            unflushed: Unflushed::default(),
            ordered: VecDeque::new(),
            unfinished: VecDeque::new(),
            changes_before: 0,
            shared: Arc::clone(&shared),
        };
        let thread = std::thread::Builder::new()
            .name("weir-sqlite-writer".into())
            .spawn(move || thread.write_until_closed(&waiting))
            .map_err(|source| Error::failed(ENGINE, source))?;
        let writer = Self { jobs: Some(jobs), thread: Mutex::new(Some(thread)), shared };
        writer.set_turn(TURN);
        Ok(writer)
    }

    /// How long a job may work before others have their turn. Tests make it short, so that every job has many.
    pub(crate) fn set_turn(&self, turn: Duration) {
        let micros = u64::try_from(turn.as_micros()).unwrap_or(u64::MAX);
        self.shared.turn_micros.store(micros, Ordering::Relaxed);
    }

    pub(crate) fn metrics(&self) -> &WriterMetrics {
        &self.shared.metrics
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.shared.storage
    }

    /// Runs `work` in the next commit; answers when it is on disk. A caller that goes away changes nothing: the
    /// work is done all the same. Only for work that is short whatever the tables hold.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut work = Some(work);
        self.in_turns(Order::Any, move |connection, _, _| once(&mut work, |work| work(connection))).await
    }

    /// The same for work on quota rows.
    pub(crate) async fn count<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &mut QuotaJournal) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut work = Some(work);
        let apply = move |connection: &Connection, unflushed: &mut Unflushed, _: &Turn| {
            once(&mut work, |work| work(connection, &mut unflushed.counts))
        };
        self.in_turns(Order::Any, apply).await
    }

    /// Runs `work` again and again until it breaks off with an answer, a turn each time, with the jobs of others between
    /// the turns. Each turn is committed; an error ends the job and leaves the turns before it as they are.
    pub(crate) async fn in_turns<T: Send + 'static>(
        &self,
        order: Order,
        work: impl FnMut(&Connection, &mut Unflushed, &Turn) -> rusqlite::Result<ControlFlow<T>> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Write { order, work, value: None, reply });
        match self.jobs.as_ref().map(|jobs| jobs.try_send(job)) {
            Some(Ok(())) => {}
            Some(Err(TrySendError::Full(_))) => {
                return Err(Error::Overloaded { lane: "sqlite writer" });
            }
            Some(Err(TrySendError::Disconnected(_))) | None => {
                return Err(Error::failed(ENGINE, "the writer has stopped"));
            }
        }
        answer.await.unwrap_or_else(|gone| Err(Error::failed(ENGINE, gone)))
    }
}

/// Work that has one turn.
fn once<F, T>(
    work: &mut Option<F>,
    apply: impl FnOnce(F) -> rusqlite::Result<T>,
) -> rusqlite::Result<ControlFlow<T>> {
    work.take().map_or(Ok(ControlFlow::Continue(())), |work| apply(work).map(ControlFlow::Break))
}

impl Drop for Writer {
    /// Waits for the jobs already taken, so that a closed engine can be opened again at once.
    fn drop(&mut self) {
        self.jobs = None;
        let thread = self.thread.lock().take();
        // The last clone may be dropped by a job on the writer thread itself, which cannot wait for itself.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// The thread, and the jobs that it has begun or put off.
struct WriterThread {
    connection: Connection,
    unflushed: Unflushed,
    /// Jobs in order of arrival: the first has more turns to come, and the others wait for it.
    ordered: VecDeque<Box<dyn Job>>,
    /// Other jobs with more turns to come.
    unfinished: VecDeque<Box<dyn Job>>,
    /// Rows changed before the transaction under way.
    changes_before: u64,
    shared: Arc<Shared>,
}

/// A job that was applied and waits for its commit, and whether it has more turns to come.
struct Applied {
    job: Box<dyn Job>,
    is_unfinished: bool,
}

/// Whether an ordered job of this group has more turns to come. It has had its turn, and those behind it wait.
fn has_unfinished_ordered(applied: &[Applied]) -> bool {
    applied.iter().any(|other| other.is_unfinished && other.job.order() == Order::Arrival)
}

impl WriterThread {
    fn write_until_closed(mut self, waiting: &mpsc::Receiver<Box<dyn Job>>) {
        loop {
            if self.put_off() > 0 {
                let first = if self.put_off() < WAITING_MAX { waiting.try_recv().ok() } else { None };
                self.write(first, waiting);
                continue;
            }
            let first = match waiting.recv_timeout(IDLE_AFTER) {
                Ok(first) => Some(first),
                Err(RecvTimeoutError::Timeout) => match self.fold_until_called(waiting) {
                    Some(first) => Some(first),
                    // An engine that holds nothing back waits for as long as it takes.
                    None if !self.unflushed.is_behind() => waiting.recv().ok(),
                    None => continue,
                },
                Err(RecvTimeoutError::Disconnected) => None,
            };
            let Some(first) = first else { break };
            self.write(Some(first), waiting);
        }
        while self.unflushed.is_due() && self.fold() {}
    }

    /// Jobs that were taken and are not done.
    fn put_off(&self) -> usize {
        self.ordered.len() + self.unfinished.len()
    }

    /// Brings the tables up to date, a part at a time, until that is done, fails, or there is a job.
    fn fold_until_called(&mut self, waiting: &mpsc::Receiver<Box<dyn Job>>) -> Option<Box<dyn Job>> {
        while self.unflushed.is_due() && self.fold() {
            if let Ok(job) = waiting.try_recv() {
                return Some(job);
            }
        }
        None
    }

    /// Brings the tables up to date by a part. When that fails, the journals still have everything, and it is tried again.
    fn fold(&mut self) -> bool {
        let mut fold = Write {
            order: Order::Any,
            work: |connection: &Connection, unflushed: &mut Unflushed, turn: &Turn| {
                unflushed.fold(connection, turn).map(ControlFlow::Break)
            },
            value: None,
            reply: oneshot::channel().0,
        };
        let outcome = self.apply_first(&mut fold).and_then(|_| self.commit());
        self.undo_if_failed(&outcome);
        outcome.is_ok()
    }

    fn write(&mut self, first: Option<Box<dyn Job>>, waiting: &mpsc::Receiver<Box<dyn Job>>) {
        let mut applied = Vec::new();
        let outcome = self.write_group(first, waiting, &mut applied);
        self.undo_if_failed(&outcome);
        for Applied { job, is_unfinished } in applied {
            match job.order() {
                _ if outcome.is_err() || !is_unfinished => job.answer(outcome.clone()),
                Order::Arrival => self.ordered.push_front(job),
                Order::Any => self.unfinished.push_back(job),
                Order::Awaited => self.put_off_awaited(job),
            }
        }
    }

    /// Puts a job behind the first of the others, so that it has every other turn and they have the rest.
    fn put_off_awaited(&mut self, job: Box<dyn Job>) {
        let other = self.unfinished.iter().position(|other| other.order() != Order::Awaited);
        let place = other.map_or(self.unfinished.len(), |other| other + 1);
        self.unfinished.insert(place, job);
    }

    fn undo_if_failed(&mut self, outcome: &Result<()>) {
        if outcome.is_err() {
            self.unflushed.undo_to(Mark::default());
            if !self.connection.is_autocommit() {
                let _ = self.connection.execute_batch("ROLLBACK");
            }
        }
    }

    /// Applies `first` and whatever waits behind it, by turns with the ordered jobs that were put off, then a turn of what
    /// was begun before, and commits. Jobs that failed alone are answered here; the others are left in `applied`, to be
    /// answered with the outcome of the commit.
    fn write_group(
        &mut self,
        first: Option<Box<dyn Job>>,
        waiting: &mpsc::Receiver<Box<dyn Job>>,
        applied: &mut Vec<Applied>,
    ) -> Result<()> {
        let group = self.shared.begin_turn();
        let mut next = first;
        loop {
            let ordered = if has_unfinished_ordered(applied) { None } else { self.ordered.pop_front() };
            if next.is_none() && ordered.is_none() {
                break;
            }
            if let Some(job) = ordered
                && let Err(error) = self.apply_in_group(job, applied)
            {
                // The transaction is gone. The job just received would be dropped unanswered.
                if let Some(job) = next {
                    job.answer(Err(error.clone()));
                }
                return Err(error);
            }
            if let Some(job) = next {
                let must_wait = !self.ordered.is_empty() || has_unfinished_ordered(applied);
                if job.order() == Order::Arrival && must_wait {
                    self.ordered.push_back(job);
                } else {
                    self.apply_in_group(job, applied)?;
                }
            }
            if applied.len() >= GROUP_MAX || !group.goes_on() {
                break;
            }
            next = if self.put_off() < WAITING_MAX { waiting.try_recv().ok() } else { None };
        }
        if let Some(job) = self.unfinished.pop_front() {
            self.apply_in_group(job, applied)?;
        }
        if applied.is_empty() { Ok(()) } else { self.commit() }
    }

    /// Applies a job to the group under way. An error is one that ends the group.
    fn apply_in_group(&mut self, mut job: Box<dyn Job>, applied: &mut Vec<Applied>) -> Result<()> {
        let outcome =
            if applied.is_empty() { self.apply_first(&mut *job) } else { self.apply_alone(&mut *job) };
        match outcome {
            Ok(progress) => {
                applied.push(Applied { job, is_unfinished: progress.is_continue() });
                Ok(())
            }
            Err(error) => {
                job.answer(Err(error.clone()));
                // Some errors (a full disk) end the whole transaction: then nobody's work stands.
                if !applied.is_empty() && self.connection.is_autocommit() { Err(error) } else { Ok(()) }
            }
        }
    }

    /// Begins the transaction with one job; when it fails or panics, the transaction is gone with it.
    fn apply_first(&mut self, job: &mut dyn Job) -> Result<ControlFlow<()>> {
        self.statement("BEGIN IMMEDIATE")?;
        self.changes_before = self.connection.total_changes();
        let outcome = self.apply(job);
        if outcome.is_err() && !self.connection.is_autocommit() {
            self.statement("ROLLBACK")?;
        }
        outcome
    }

    /// Runs one job on its own savepoint; when it fails or panics, its part is undone and the group goes on.
    fn apply_alone(&mut self, job: &mut dyn Job) -> Result<ControlFlow<()>> {
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

    fn apply(&mut self, job: &mut dyn Job) -> Result<ControlFlow<()>> {
        let begun = Instant::now();
        let turn = self.shared.begin_turn();
        let Self { connection, unflushed, shared, .. } = self;
        let mark = unflushed.mark();
        let outcome = match catch_unwind(AssertUnwindSafe(|| job.apply(connection, unflushed, &turn))) {
            Ok(outcome) => outcome.map_err(classify),
            Err(_panic) => Err(Error::failed(ENGINE, "a write panicked")),
        };
        shared.metrics.record_turn(begun.elapsed());
        if let Err(error) = &outcome {
            shared.storage.failed(error);
            unflushed.undo_to(mark);
        }
        outcome
    }

    fn commit(&mut self) -> Result<()> {
        let begun = Instant::now();
        let outcome = self.statement("COMMIT");
        if outcome.is_ok() {
            self.unflushed.commit();
        }
        self.shared.metrics.commit_seconds.observe(begun.elapsed().as_secs_f64());
        match &outcome {
            // A job that only read proves nothing.
            Ok(()) if self.connection.total_changes() == self.changes_before => {}
            Ok(()) => self.shared.storage.succeeded(),
            Err(error) => self.shared.storage.failed(error),
        }
        outcome
    }

    fn statement(&self, sql: &str) -> Result<()> {
        let execute = |mut statement: rusqlite::CachedStatement<'_>| statement.execute([]);
        self.connection.prepare_cached(sql).and_then(execute).map_err(classify)?;
        Ok(())
    }
}
