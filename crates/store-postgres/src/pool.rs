//! A bounded set of connections. A session is taken, used, and given back only when all went well: after any error
//! or a caller that went away, its state is unknown and it is closed, which rolls back whatever it had begun.
//!
//! Not `deadpool-postgres`: it gives every connection back when it is dropped, also from the middle of a transaction that a
//! caller left, and checks only whether the connection is open. Here the way back is [`Session::keep`], and every other way
//! out closes the connection. Nor does it back off while the server is away, or drop the idle connections when one falls
//! silent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_postgres::Row;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::session::{Connection, Prepared, Values};
use crate::target::PostgresTarget;

const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(crate) struct Pool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    target: PostgresTarget,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
    backoff: Mutex<Backoff>,
}

/// While the server cannot be reached: when to try again, so that calls in between fail at once.
#[derive(Debug, Default)]
struct Backoff {
    failures: u32,
    retry_at: Option<Instant>,
}

impl Pool {
    pub(crate) fn new(target: PostgresTarget, connections: usize) -> Self {
        let permits = Arc::new(Semaphore::new(connections.max(1)));
        let inner = Inner { target, permits, idle: Mutex::default(), backoff: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// How long a call may take.
    pub(crate) fn call_timeout(&self) -> Duration {
        self.inner.target.call_timeout
    }

    /// A connection of one's own, an idle one or a new one.
    pub(crate) async fn session(&self) -> Result<Session> {
        let acquire = Arc::clone(&self.inner.permits).acquire_owned();
        let permit = tokio::time::timeout(self.inner.target.call_timeout, acquire)
            .await
            .map_err(|elapsed| Error::unavailable(ENGINE, elapsed))?
            .map_err(|closed| Error::failed(ENGINE, closed))?;
        let connection = match self.inner.take_idle() {
            Some(connection) => connection,
            None => self.inner.connect().await?,
        };
        Ok(Session { connection, pool: Arc::clone(&self.inner), _permit: permit })
    }

    /// Runs one statement on a connection of its own.
    pub(crate) async fn query(&self, sql: &'static str, values: Values<'_>) -> Result<Vec<Row>> {
        let session = self.session().await?;
        let rows = session.query(sql, values).await?;
        session.keep();
        Ok(rows)
    }

    /// The same for a statement that returns exactly one row.
    pub(crate) async fn query_one(&self, sql: &'static str, values: Values<'_>) -> Result<Row> {
        let session = self.session().await?;
        let row = session.query_one(sql, values).await?;
        session.keep();
        Ok(row)
    }

    /// The same for a statement that returns one row at most.
    pub(crate) async fn query_opt(&self, sql: &'static str, values: Values<'_>) -> Result<Option<Row>> {
        let session = self.session().await?;
        let row = session.query_opt(sql, values).await?;
        session.keep();
        Ok(row)
    }

    /// The same for a statement of which only the number of rows that it changed is of interest.
    pub(crate) async fn execute(&self, sql: &'static str, values: Values<'_>) -> Result<u64> {
        let session = self.session().await?;
        let changed = session.execute(sql, values).await?;
        session.keep();
        Ok(changed)
    }
}

impl Inner {
    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        idle.retain(|connection| !connection.is_closed());
        idle.pop()
    }

    async fn connect(&self) -> Result<Connection> {
        if self.backing_off() {
            return Err(Error::unavailable(
                ENGINE,
                "cannot be reached; the next attempt is due within a second",
            ));
        }
        let outcome = Connection::open(&self.target).await;
        let mut backoff = self.backoff.lock();
        match &outcome {
            Ok(_) => {
                if backoff.failures > 0 {
                    tracing::info!(address = %self.target.address(), "Postgres is back");
                }
                *backoff = Backoff::default();
            }
            Err(error) => {
                if backoff.failures == 0 {
                    tracing::warn!(address = %self.target.address(), error = %error.with_causes(), "Postgres cannot be reached");
                }
                backoff.fail();
            }
        }
        outcome
    }

    fn backing_off(&self) -> bool {
        let backoff = self.backoff.lock();
        backoff.retry_at.is_some_and(|retry_at| Instant::now() < retry_at)
    }

    /// A connection that went silent says the others have gone silent too: the next calls make new ones.
    fn forget_idle(&self) {
        self.idle.lock().clear();
    }
}

impl Backoff {
    /// Doubles the pause, less up to half of it, so that servers do not come back in step.
    fn fail(&mut self) {
        let pause = BACKOFF_MIN.saturating_mul(1 << self.failures.min(10)).min(BACKOFF_MAX);
        let pause = pause.mul_f64(1.0 - fastrand::f64() / 2.0);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = Some(Instant::now() + pause);
    }
}

/// A connection taken from the pool.
#[derive(Debug)]
pub(crate) struct Session {
    connection: Connection,
    pool: Arc<Inner>,
    _permit: OwnedSemaphorePermit,
}

impl Session {
    /// Waits for a call to the database, no longer than a call may take.
    pub(crate) async fn bounded<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        match tokio::time::timeout(self.pool.target.call_timeout, call).await {
            Ok(outcome) => outcome.map_err(crate::error::classify),
            Err(elapsed) => {
                self.pool.forget_idle();
                Err(Error::unavailable(ENGINE, elapsed))
            }
        }
    }

    /// Statements for a pipeline, prepared before the first of them is sent (see [`crate::session`]).
    pub(crate) async fn prepare<const N: usize>(
        &self,
        texts: [&'static str; N],
    ) -> Result<[Prepared<'_>; N]> {
        self.bounded(self.connection.prepare(texts)).await
    }

    pub(crate) async fn query(&self, sql: &'static str, values: Values<'_>) -> Result<Vec<Row>> {
        let [statement] = self.prepare([sql]).await?;
        self.bounded(statement.query(values)).await
    }

    pub(crate) async fn query_one(&self, sql: &'static str, values: Values<'_>) -> Result<Row> {
        let [statement] = self.prepare([sql]).await?;
        self.bounded(statement.query_one(values)).await
    }

    pub(crate) async fn query_opt(&self, sql: &'static str, values: Values<'_>) -> Result<Option<Row>> {
        let [statement] = self.prepare([sql]).await?;
        self.bounded(statement.query_opt(values)).await
    }

    pub(crate) async fn execute(&self, sql: &'static str, values: Values<'_>) -> Result<u64> {
        let [statement] = self.prepare([sql]).await?;
        self.bounded(statement.execute(values)).await
    }

    /// Runs what is not prepared, such as `COMMIT`, and waits for it.
    pub(crate) async fn run(&self, sql: &str) -> Result<()> {
        self.bounded(self.connection.batch_execute(sql)).await
    }

    /// Gives the connection back: all went well and no transaction is open.
    pub(crate) fn keep(self) {
        self.pool.idle.lock().push(self.connection);
    }
}

impl std::ops::Deref for Session {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_second_and_no_further() {
        let mut backoff = Backoff::default();
        for _ in 0..40 {
            backoff.fail();
            let pause = backoff.retry_at.unwrap().saturating_duration_since(Instant::now());
            assert!(pause <= BACKOFF_MAX);
        }
        let last = backoff.retry_at.unwrap().saturating_duration_since(Instant::now());
        assert!(last > BACKOFF_MIN);
    }

    #[tokio::test]
    async fn while_backing_off_calls_fail_at_once_and_transiently() {
        // Port 1 on loopback refuses.
        let pool = Pool::new("postgres://u@127.0.0.1:1/d".parse().unwrap(), 1);
        assert!(pool.session().await.unwrap_err().is_transient());
        let second = pool.session().await.unwrap_err();
        assert!(second.is_transient());
        assert!(format!("{second:?}").contains("next attempt"), "{second:?}");
    }
}
