//! The writer thread: group commit.
//!
//! Every write is a job. The thread takes whatever jobs are waiting, runs them in one transaction, commits with one
//! fsync, and only then answers them. A job that fails takes nobody with it: all but the first stand on savepoints of
//! their own, and when the first fails there is nothing else to lose.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::error::classify;

/// Jobs that may wait. Hot operations come as one job a batch, so this many is a server far behind its disk.
const WAITING_MAX: usize = 512;
/// Jobs in one commit.
const GROUP_MAX: usize = 128;

#[derive(Debug)]
pub(crate) struct Writer {
    /// Taken away on drop, which is what tells the thread to finish.
    jobs: Option<mpsc::Sender<Box<dyn Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Writer {
    pub(crate) fn start(connection: Connection) -> Result<Self> {
        let (jobs, waiting) = mpsc::channel(WAITING_MAX);
        let thread = std::thread::Builder::new()
            .name("weir-sqlite-writer".into())
            .spawn(move || write_until_closed(&connection, waiting))
            .map_err(|source| Error::failed(ENGINE, source))?;
        Ok(Self { jobs: Some(jobs), thread: Mutex::new(Some(thread)) })
    }

    /// Runs `work` in the next commit; answers when it is on disk. A caller that goes away changes nothing: the
    /// work is done all the same.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Write { work: Some(work), value: None, reply });
        match self.jobs.as_ref().map(|jobs| jobs.try_send(job)) {
            Some(Ok(())) => {}
            Some(Err(TrySendError::Full(_))) => {
                return Err(Error::Overloaded { lane: "sqlite writer" });
            }
            Some(Err(TrySendError::Closed(_))) | None => {
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
    fn apply(&mut self, connection: &Connection) -> rusqlite::Result<()>;
    fn answer(self: Box<Self>, committed: Result<()>);
}

struct Write<F, T> {
    work: Option<F>,
    value: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<F, T> Job for Write<F, T>
where
    F: FnOnce(&Connection) -> rusqlite::Result<T> + Send,
    T: Send,
{
    fn apply(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if let Some(work) = self.work.take() {
            self.value = Some(work(connection)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, committed: Result<()>) {
        let Self { value, reply, .. } = *self;
        let unfinished = || Error::failed(ENGINE, "a job was answered before it was applied");
        let _ = reply.send(committed.and_then(|()| value.ok_or_else(unfinished)));
    }
}

fn write_until_closed(connection: &Connection, mut waiting: mpsc::Receiver<Box<dyn Job>>) {
    while let Some(first) = waiting.blocking_recv() {
        let mut applied = Vec::new();
        let outcome = write_group(connection, first, &mut waiting, &mut applied);
        if outcome.is_err() && !connection.is_autocommit() {
            let _ = connection.execute_batch("ROLLBACK");
        }
        for job in applied {
            job.answer(outcome.clone());
        }
    }
}

/// Applies `first` and whatever waits behind it, and commits. Jobs that failed alone are answered here; the others
/// are left in `applied`, to be answered with what the commit came to.
fn write_group(
    connection: &Connection,
    first: Box<dyn Job>,
    waiting: &mut mpsc::Receiver<Box<dyn Job>>,
    applied: &mut Vec<Box<dyn Job>>,
) -> Result<()> {
    let mut next = Some(first);
    while let Some(mut job) = next {
        let outcome = if applied.is_empty() {
            apply_first(connection, &mut *job)
        } else {
            apply_alone(connection, &mut *job)
        };
        match outcome {
            Ok(()) => applied.push(job),
            Err(error) => {
                job.answer(Err(error.clone()));
                // Some errors (a full disk) end the whole transaction: then nobody's work stands.
                if !applied.is_empty() && connection.is_autocommit() {
                    return Err(error);
                }
            }
        }
        next = if applied.len() < GROUP_MAX { waiting.try_recv().ok() } else { None };
    }
    if applied.is_empty() { Ok(()) } else { statement(connection, "COMMIT") }
}

/// Begins the transaction with one job; when it fails or panics, the transaction is gone with it.
fn apply_first(connection: &Connection, job: &mut dyn Job) -> Result<()> {
    statement(connection, "BEGIN IMMEDIATE")?;
    let outcome = apply(connection, job);
    if outcome.is_err() && !connection.is_autocommit() {
        statement(connection, "ROLLBACK")?;
    }
    outcome
}

/// Runs one job on its own savepoint; when it fails or panics, its part is undone and the group goes on.
fn apply_alone(connection: &Connection, job: &mut dyn Job) -> Result<()> {
    statement(connection, "SAVEPOINT job")?;
    let outcome = apply(connection, job);
    if outcome.is_err() && !connection.is_autocommit() {
        statement(connection, "ROLLBACK TO job")?;
    }
    if !connection.is_autocommit() {
        statement(connection, "RELEASE job")?;
    }
    outcome
}

fn apply(connection: &Connection, job: &mut dyn Job) -> Result<()> {
    match catch_unwind(AssertUnwindSafe(|| job.apply(connection))) {
        Ok(outcome) => outcome.map_err(classify),
        Err(_panic) => Err(Error::failed(ENGINE, "a write panicked")),
    }
}

fn statement(connection: &Connection, sql: &str) -> Result<()> {
    connection.prepare_cached(sql).and_then(|mut statement| statement.execute([])).map_err(classify)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writer() -> Writer {
        let connection = Connection::open_in_memory().unwrap();
        connection.execute_batch("CREATE TABLE t (n INTEGER PRIMARY KEY)").unwrap();
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
