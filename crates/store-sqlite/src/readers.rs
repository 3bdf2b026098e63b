//! Connections that only read. WAL lets them go on while the writer writes.

use std::sync::{Mutex, PoisonError};

use rusqlite::Connection;
use tokio::sync::Semaphore;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::error::classify;

const COUNT: usize = 4;

#[derive(Debug)]
pub(crate) struct Readers {
    idle: Mutex<Vec<Connection>>,
    permits: Semaphore,
}

impl Readers {
    pub(crate) fn open(connect: impl Fn() -> rusqlite::Result<Connection>) -> rusqlite::Result<Self> {
        let mut idle = Vec::with_capacity(COUNT);
        for _ in 0..COUNT {
            let connection = connect()?;
            connection.pragma_update(None, "query_only", true)?;
            idle.push(connection);
        }
        Ok(Self { idle: Mutex::new(idle), permits: Semaphore::new(COUNT) })
    }

    /// Runs `read` on an idle connection. One statement sees one moment; a read of several begins a transaction.
    ///
    /// It blocks the calling thread for as long as SQLite takes; callers run it through `Sqlite::read`.
    fn run<T>(&self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        let taken = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        // A permit stands for an idle connection; only a reader that panicked leaves fewer.
        let connection = taken.ok_or_else(|| Error::failed(ENGINE, "no reader is left"))?;
        let outcome = read(&connection);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        outcome.map_err(classify)
    }
}

impl crate::Sqlite {
    /// Runs `read` on a reader, off the async threads.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let engine = self.clone();
        let _permit = self.inner.readers.permits.acquire().await.map_err(|e| Error::failed(ENGINE, e))?;
        tokio::task::spawn_blocking(move || engine.inner.readers.run(read))
            .await
            .map_err(|panic| Error::failed(ENGINE, panic))?
    }
}
