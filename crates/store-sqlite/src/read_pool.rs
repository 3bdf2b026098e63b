//! A pool of read-only connections. WAL lets them read while the writer writes.

use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::error::classify;

const CONNECTIONS: usize = 4;

#[derive(Debug)]
pub(crate) struct ReadPool {
    idle: Mutex<Vec<Connection>>,
    permits: Arc<Semaphore>,
}

impl ReadPool {
    pub(crate) fn open(connect: impl Fn() -> rusqlite::Result<Connection>) -> rusqlite::Result<Self> {
        let mut idle = Vec::with_capacity(CONNECTIONS);
        for _ in 0..CONNECTIONS {
            let connection = connect()?;
            connection.pragma_update(None, "query_only", true)?;
            idle.push(connection);
        }
        Ok(Self { idle: Mutex::new(idle), permits: Arc::new(Semaphore::new(CONNECTIONS)) })
    }

    /// Runs `read` on an idle connection, and blocks the calling thread for as long as SQLite takes. One statement sees
    /// one state of the database; a read of several begins a transaction.
    ///
    /// The permit is released after the connection is back in the pool, even if the caller has been dropped meanwhile.
    fn run<T>(
        &self,
        _permit: OwnedSemaphorePermit,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T> {
        let lent = PooledConnection { pool: self, connection: self.idle.lock().pop() };
        let no_connection = || Error::failed(ENGINE, "bug in Weir: a permit without an idle read connection");
        read(lent.connection.as_ref().ok_or_else(no_connection)?).map_err(classify)
    }
}

/// Returns its connection to the pool on drop, even if the read panics.
struct PooledConnection<'a> {
    pool: &'a ReadPool,
    connection: Option<Connection>,
}

impl Drop for PooledConnection<'_> {
    fn drop(&mut self) {
        let mut idle = self.pool.idle.lock();
        idle.extend(self.connection.take());
    }
}

impl crate::Sqlite {
    /// Runs `read` on a read-only connection, off the async threads.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let _timer = self.inner.calls.start("read");
        let engine = self.clone();
        let permits = Arc::clone(&self.inner.read_pool.permits);
        let permit = permits.acquire_owned().await.map_err(|e| Error::failed(ENGINE, e))?;
        tokio::task::spawn_blocking(move || engine.inner.read_pool.run(permit, read))
            .await
            .map_err(|panic| Error::failed(ENGINE, panic))?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::CONNECTIONS;
    use crate::Sqlite;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn reads_of_dropped_callers_return_their_connections_to_the_pool() {
        let directory = tempfile::tempdir().unwrap();
        let engine = Sqlite::open(directory.path()).unwrap();
        let (started, starts) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..CONNECTIONS {
            let (engine, started) = (engine.clone(), started.clone());
            let (end, ended) = mpsc::channel::<()>();
            ends.push(end);
            let slow = engine.read(move |_connection| {
                let _ = started.send(());
                let _ = ended.recv();
                Ok(())
            });
            // The caller gives up long before its read ends.
            tokio::time::timeout(Duration::from_millis(50), slow).await.unwrap_err();
        }
        (0..CONNECTIONS).for_each(|_| starts.recv().unwrap());
        let waiting = tokio::spawn(async move { engine.read(|_connection| Ok(7)).await });
        drop(ends);
        assert_eq!(waiting.await.unwrap().unwrap(), 7);
    }
}
