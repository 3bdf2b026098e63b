//! The writer thread: group commit.
//!
//! Every write is a job. The thread takes whatever jobs are waiting, runs them in one transaction, commits with one
//! fsync, and only then answers them. A job that fails takes nobody with it: all but the first stand on savepoints of
//! their own, and when the first fails there is nothing else to lose.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError, TrySendError};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::oneshot;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::counts::Counts;
use crate::error::classify;
use crate::request::keys::{self, Keys};

/// Jobs that may wait. Hot operations come as one job a batch, so this many is a server far behind its disk.
const WAITING_MAX: usize = 512;
/// Jobs in one commit.
const GROUP_MAX: usize = 128;
/// With nothing to do for so long the writer is idle.
const IDLE_AFTER: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(crate) struct Writer {
    /// Taken away on drop, which is what tells the thread to finish.
    jobs: Option<mpsc::SyncSender<Box<dyn Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Writer {
    pub(crate) fn start(connection: Connection) -> Result<Self> {
        let (jobs, waiting) = mpsc::sync_channel(WAITING_MAX);
        let thread = std::thread::Builder::new()
            .name("weir-sqlite-writer".into())
            .spawn(move || Desk { connection, known: Known::default() }.write_until_closed(&waiting))
            .map_err(|source| Error::failed(ENGINE, source))?;
        Ok(Self { jobs: Some(jobs), thread: Mutex::new(Some(thread)) })
    }

    /// Runs `work` in the next commit; answers when it is on disk. A caller that goes away changes nothing: the
    /// work is done all the same.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.apply(move |connection: &Connection, _: &mut Known| work(connection)).await
    }

    /// The same for work on quota rows.
    pub(crate) async fn count<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &mut Counts) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.apply(move |connection: &Connection, known: &mut Known| work(connection, &mut known.counts))
            .await
    }

    /// The same for work with keys of submissions.
    pub(crate) async fn keep<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &mut Keys) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.apply(move |connection: &Connection, known: &mut Known| work(connection, &mut known.keys)).await
    }

    async fn apply<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection, &mut Known) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Write { work: Some(work), value: None, reply });
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

impl Drop for Writer {
    /// Waits for the jobs already taken, so that a closed engine can be opened again at once.
    fn drop(&mut self) {
        self.jobs = None;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The last clone may be dropped by a job on the writer thread itself, which cannot wait for itself.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// A unit of work that is applied, and answered once its group is committed.
trait Job: Send {
    fn apply(&mut self, connection: &Connection, known: &mut Known) -> rusqlite::Result<()>;
    fn answer(self: Box<Self>, committed: Result<()>);
}

struct Write<F, T> {
    work: Option<F>,
    value: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<F, T> Job for Write<F, T>
where
    F: FnOnce(&Connection, &mut Known) -> rusqlite::Result<T> + Send,
    T: Send,
{
    fn apply(&mut self, connection: &Connection, known: &mut Known) -> rusqlite::Result<()> {
        if let Some(work) = self.work.take() {
            self.value = Some(work(connection, known)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let Self { value, reply, .. } = *self;
        let unfinished = || Error::failed(ENGINE, "a job was answered before it was applied");
        let _ = reply.send(committed.and_then(|()| value.ok_or_else(unfinished)));
    }
}

/// What the thread works with.
struct Desk {
    connection: Connection,
    known: Known,
}

/// What the thread knows that the tables do not say yet.
#[derive(Debug, Default)]
struct Known {
    counts: Counts,
    keys: Keys,
}

impl Known {
    fn is_behind(&self) -> bool {
        self.counts.is_behind() || self.keys.is_behind()
    }

    /// A transaction was undone, and with it what it told of.
    fn forget(&mut self) {
        self.counts.forget();
        self.keys.forget();
    }
}

impl Desk {
    fn write_until_closed(mut self, waiting: &mpsc::Receiver<Box<dyn Job>>) {
        loop {
            let first = match waiting.recv_timeout(IDLE_AFTER) {
                Ok(first) => Some(first),
                Err(RecvTimeoutError::Timeout) => match self.fold_until_called(waiting) {
                    Some(first) => Some(first),
                    // An engine that holds nothing back waits for as long as it takes.
                    None if !self.known.is_behind() => waiting.recv().ok(),
                    None => continue,
                },
                Err(RecvTimeoutError::Disconnected) => None,
            };
            let Some(first) = first else { break };
            self.write(first, waiting);
        }
        while self.known.is_behind() && self.fold() {}
    }

    /// Brings the tables up to date, a part at a time, until that is done, fails, or there is a job.
    fn fold_until_called(&mut self, waiting: &mpsc::Receiver<Box<dyn Job>>) -> Option<Box<dyn Job>> {
        while self.known.is_behind() && self.fold() {
            if let Ok(job) = waiting.try_recv() {
                return Some(job);
            }
        }
        None
    }

    /// Brings the tables up to date by a part. When that fails, the journals still have everything, and it is tried again.
    fn fold(&mut self) -> bool {
        let mut fold = Write {
            work: Some(|connection: &Connection, known: &mut Known| {
                known.counts.refresh(connection)?;
                known.counts.fold(connection)?;
                known.keys.fold(connection, keys::IDLE_SLICE)
            }),
            value: None,
            reply: oneshot::channel().0,
        };
        let outcome = self.apply_first(&mut fold).and_then(|()| self.statement("COMMIT"));
        self.undo_if_failed(&outcome);
        outcome.is_ok()
    }

    fn write(&mut self, first: Box<dyn Job>, waiting: &mpsc::Receiver<Box<dyn Job>>) {
        let mut applied = Vec::new();
        let outcome = self.write_group(first, waiting, &mut applied);
        self.undo_if_failed(&outcome);
        for job in applied {
            job.answer(outcome.clone());
        }
    }

    fn undo_if_failed(&mut self, outcome: &Result<()>) {
        if outcome.is_err() {
            self.known.forget();
            if !self.connection.is_autocommit() {
                let _ = self.connection.execute_batch("ROLLBACK");
            }
        }
    }

    /// Applies `first` and whatever waits behind it, and commits. Jobs that failed alone are answered here; the
    /// others are left in `applied`, to be answered with what the commit came to.
    fn write_group(
        &mut self,
        first: Box<dyn Job>,
        waiting: &mpsc::Receiver<Box<dyn Job>>,
        applied: &mut Vec<Box<dyn Job>>,
    ) -> Result<()> {
        let mut next = Some(first);
        while let Some(mut job) = next {
            let outcome =
                if applied.is_empty() { self.apply_first(&mut *job) } else { self.apply_alone(&mut *job) };
            match outcome {
                Ok(()) => applied.push(job),
                Err(error) => {
                    job.answer(Err(error.clone()));
                    // Some errors (a full disk) end the whole transaction: then nobody's work stands.
                    if !applied.is_empty() && self.connection.is_autocommit() {
                        return Err(error);
                    }
                }
            }
            next = if applied.len() < GROUP_MAX { waiting.try_recv().ok() } else { None };
        }
        if applied.is_empty() { Ok(()) } else { self.statement("COMMIT") }
    }

    /// Begins the transaction with one job; when it fails or panics, the transaction is gone with it.
    fn apply_first(&mut self, job: &mut dyn Job) -> Result<()> {
        self.statement("BEGIN IMMEDIATE")?;
        let outcome = self.apply(job);
        if outcome.is_err() && !self.connection.is_autocommit() {
            self.statement("ROLLBACK")?;
        }
        outcome
    }

    /// Runs one job on its own savepoint; when it fails or panics, its part is undone and the group goes on.
    fn apply_alone(&mut self, job: &mut dyn Job) -> Result<()> {
        self.statement("SAVEPOINT job")?;
        let outcome = self.apply(job);
        if outcome.is_err() && !self.connection.is_autocommit() {
            self.statement("ROLLBACK TO job")?;
        }
        if !self.connection.is_autocommit() {
            self.statement("RELEASE job")?;
        }
        outcome
    }

    fn apply(&mut self, job: &mut dyn Job) -> Result<()> {
        let Self { connection, known } = self;
        let outcome = match catch_unwind(AssertUnwindSafe(|| job.apply(connection, known))) {
            Ok(outcome) => outcome.map_err(classify),
            Err(_panic) => Err(Error::failed(ENGINE, "a write panicked")),
        };
        if outcome.is_err() {
            known.forget();
        }
        outcome
    }

    fn statement(&self, sql: &str) -> Result<()> {
        let execute = |mut statement: rusqlite::CachedStatement<'_>| statement.execute([]);
        self.connection.prepare_cached(sql).and_then(execute).map_err(classify)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer() -> Writer {
        let mut connection = Connection::open_in_memory().unwrap();
        connection.execute_batch("CREATE TABLE t (n INTEGER PRIMARY KEY)").unwrap();
        crate::migrate::run(&mut connection).unwrap();
        Writer::start(connection).unwrap()
    }

    async fn insert(writer: &Writer, n: i64) -> Result<usize> {
        writer.run(move |connection| connection.execute("INSERT INTO t VALUES (?1)", [n])).await
    }

    async fn rows(writer: &Writer) -> i64 {
        writer.run(|c| c.query_row("SELECT count(*) FROM t", [], |row| row.get(0))).await.unwrap()
    }

    #[tokio::test]
    async fn a_job_that_fails_takes_nobody_with_it() {
        let writer = writer();
        let (a, twice, b) = tokio::join!(
            insert(&writer, 1),
            writer.run(|c| {
                c.execute("INSERT INTO t VALUES (2)", [])?;
                c.execute("INSERT INTO t VALUES (2)", [])
            }),
            insert(&writer, 3),
        );
        assert!(a.is_ok() && b.is_ok());
        assert!(!twice.unwrap_err().is_transient());
        assert_eq!(rows(&writer).await, 2, "the failed job left nothing behind");
    }

    #[tokio::test]
    async fn a_first_job_that_fails_takes_nobody_with_it_either() {
        let writer = writer();
        assert!(insert(&writer, 1).await.is_ok());
        let (again, other) = tokio::join!(insert(&writer, 1), insert(&writer, 2));
        assert!(again.is_err() && other.is_ok());
        assert_eq!(rows(&writer).await, 2);
    }

    #[tokio::test]
    async fn a_job_that_panics_leaves_the_writer_standing() {
        let writer = writer();
        let panicked: Result<()> = writer
            .run(|c| {
                c.execute("INSERT INTO t VALUES (1)", [])?;
                panic!("a fault in a job")
            })
            .await;
        assert!(panicked.is_err());
        assert_eq!(rows(&writer).await, 0);
        assert!(insert(&writer, 1).await.is_ok());
    }

    #[tokio::test]
    async fn a_caller_that_goes_away_still_gets_its_work_done() {
        let writer = writer();
        {
            let call = insert(&writer, 1);
            tokio::pin!(call);
            // Polled once, the job is with the writer; then the caller is gone.
            let _ = futures_poll_once(call.as_mut()).await;
        }
        assert_eq!(rows(&writer).await, 1);
    }

    async fn futures_poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        let mut future = Some(future);
        std::future::poll_fn(move |context| {
            let polled = future.take().map(|f| f.poll(context));
            std::task::Poll::Ready(match polled {
                Some(std::task::Poll::Ready(value)) => Some(value),
                _ => None,
            })
        })
        .await
    }
}
