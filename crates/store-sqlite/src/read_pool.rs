//! Connections that only read. WAL lets them go on while the writer writes.

use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::error::classify;

const COUNT: usize = 4;

#[derive(Debug)]
pub(crate) struct ReadPool {
    idle: Mutex<Vec<Connection>>,
    permits: Arc<Semaphore>,
}

impl ReadPool {
    pub(crate) fn open(connect: impl Fn() -> rusqlite::Result<Connection>) -> rusqlite::Result<Self> {
        let mut idle = Vec::with_capacity(COUNT);
        for _ in 0..COUNT {
            let connection = connect()?;
            connection.pragma_update(None, "query_only", true)?;
            idle.push(connection);
        }
        Ok(Self { idle: Mutex::new(idle), permits: Arc::new(Semaphore::new(COUNT)) })
    }

    /// Runs `read` on an idle connection. One statement sees one moment; a read of several begins a transaction.
    ///
    /// It blocks the calling thread for as long as SQLite takes; callers run it through `Sqlite::read`.
    ///
    /// The permit is held until the connection is back, also when whoever asked has gone meanwhile.
    fn run<T>(
        &self,
        _permit: OwnedSemaphorePermit,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T> {
        let taken = self.idle.lock().pop();
        let lent = Lent { readers: self, connection: taken };
        let connection =
            lent.connection.as_ref().ok_or_else(|| Error::failed(ENGINE, "no reader is left"))?;
        read(connection).map_err(classify)
    }
}

/// A connection that goes back, also when the read it was for panics.
struct Lent<'a> {
    readers: &'a ReadPool,
    connection: Option<Connection>,
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let mut idle = self.readers.idle.lock();
        idle.extend(self.connection.take());
    }
}

impl crate::Sqlite {
    /// Runs `read` on a reader, off the async threads.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let engine = self.clone();
        let permits = Arc::clone(&self.inner.readers.permits);
        let permit = permits.acquire_owned().await.map_err(|e| Error::failed(ENGINE, e))?;
        tokio::task::spawn_blocking(move || engine.inner.readers.run(permit, read))
            .await
            .map_err(|panic| Error::failed(ENGINE, panic))?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::COUNT;
    use crate::Sqlite;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn callers_that_go_away_leave_the_readers_they_had_to_those_who_wait() {
        let directory = tempfile::tempdir().unwrap();
        let engine = Sqlite::open(directory.path()).unwrap();
        let (begun, begins) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..COUNT {
            let (engine, begun) = (engine.clone(), begun.clone());
            let (end, ended) = mpsc::channel::<()>();
            ends.push(end);
            let slow = engine.read(move |_connection| {
                let _ = begun.send(());
                let _ = ended.recv();
                Ok(())
            });
            // The caller is gone long before its read ends.
            tokio::time::timeout(Duration::from_millis(50), slow).await.unwrap_err();
        }
        (0..COUNT).for_each(|_| begins.recv().unwrap());
        let waiting = tokio::spawn(async move { engine.read(|_connection| Ok(7)).await });
        drop(ends);
        assert_eq!(waiting.await.unwrap().unwrap(), 7);
    }
}
