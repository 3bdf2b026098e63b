//! The connection pool. A session is returned to the pool only after success: after an error, or when its caller was cancelled,
//! its state is unknown and the connection is closed, which rolls back its transaction.
//!
//! Not `deadpool-postgres`: it returns every connection on drop, also in the middle of a transaction whose caller was cancelled,
//! and checks only whether the connection is open. Here only [`Session::keep`] returns a connection, and a drop closes it. Nor
//! does deadpool back off while the server is unavailable, or close the idle connections when one times out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use weir_store::engine_calls::EngineCalls;
use weir_store::{Error, Result};

use crate::ENGINE;
use crate::connection::{Connection, Prepared, Values};
use crate::target::PostgresTarget;

const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(crate) struct Pool {
    shared: Arc<SharedPool>,
}

#[derive(Debug)]
struct SharedPool {
    target: PostgresTarget,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
    backoff: Mutex<ConnectBackoff>,
    calls: EngineCalls,
}

/// The pause between attempts to connect to a server that cannot be reached. Calls during the pause fail at once.
#[derive(Debug, Default)]
struct ConnectBackoff {
    failures: u32,
    retry_at: Option<Instant>,
}

impl Pool {
    pub(crate) fn new(target: PostgresTarget, connections: usize) -> Self {
        let permits = Arc::new(Semaphore::new(connections.max(1)));
        let (idle, backoff, calls) = (Mutex::default(), Mutex::default(), EngineCalls::new(ENGINE));
        let shared = SharedPool { target, permits, idle, backoff, calls };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn call_timeout(&self) -> Duration {
        self.shared.target.call_timeout
    }

    pub(crate) fn target(&self) -> &PostgresTarget {
        &self.shared.target
    }

    pub(crate) fn calls(&self) -> &EngineCalls {
        &self.shared.calls
    }

    /// Takes an idle connection or opens a new one.
    pub(crate) async fn session(&self) -> Result<Session> {
        let acquire = Arc::clone(&self.shared.permits).acquire_owned();
        let permit = tokio::time::timeout(self.shared.target.call_timeout, acquire)
            .await
            .map_err(|elapsed| Error::unavailable(ENGINE, elapsed))?
            .map_err(|closed| Error::failed(ENGINE, closed))?;
        let connection = match self.shared.take_idle() {
            Some(connection) => connection,
            None => self.shared.connect().await?,
        };
        Ok(Session { connection, pool: Arc::clone(&self.shared), _permit: permit })
    }

    /// Runs one statement on a connection of its own.
    pub(crate) async fn query(&self, sql: &'static str, values: Values<'_>) -> Result<Vec<Row>> {
        let session = self.session().await?;
        let rows = session.query(sql, values).await?;
        session.keep();
        Ok(rows)
    }

    /// Runs one statement that returns exactly one row.
    pub(crate) async fn query_one(&self, sql: &'static str, values: Values<'_>) -> Result<Row> {
        let session = self.session().await?;
        let row = session.query_one(sql, values).await?;
        session.keep();
        Ok(row)
    }

    /// Runs one statement that returns at most one row.
    pub(crate) async fn query_opt(&self, sql: &'static str, values: Values<'_>) -> Result<Option<Row>> {
        let session = self.session().await?;
        let row = session.query_opt(sql, values).await?;
        session.keep();
        Ok(row)
    }

    /// Runs one statement and returns the number of rows that it changed.
    pub(crate) async fn execute(&self, sql: &'static str, values: Values<'_>) -> Result<u64> {
        let session = self.session().await?;
        let changed = session.execute(sql, values).await?;
        session.keep();
        Ok(changed)
    }
}

impl SharedPool {
    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.lock();
        let known_primary = &self.target.known_primary;
        idle.retain(|connection| !connection.is_closed() && known_primary.is_latest(connection.timeline));
        idle.pop()
    }

    async fn connect(&self) -> Result<Connection> {
        if self.is_backing_off() {
            return Err(Error::unavailable(
                ENGINE,
                "Postgres cannot be reached; the next attempt is due within a second",
            ));
        }
        let timer = self.calls.start("connect");
        let outcome = Connection::open(&self.target).await;
        drop(timer);
        let mut backoff = self.backoff.lock();
        match &outcome {
            Ok(_) => {
                if backoff.failures > 0 {
                    tracing::info!(address = %self.target.address(), "Postgres is back");
                }
                *backoff = ConnectBackoff::default();
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

    fn is_backing_off(&self) -> bool {
        let backoff = self.backoff.lock();
        backoff.retry_at.is_some_and(|retry_at| Instant::now() < retry_at)
    }

    /// Closes the idle connections. After a timeout on one the others are likely to be broken, too.
    fn close_idle(&self) {
        self.idle.lock().clear();
    }
}

impl ConnectBackoff {
    /// Doubles the pause, with a jitter of up to half of it, so that servers do not reconnect in step.
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
    pool: Arc<SharedPool>,
    _permit: OwnedSemaphorePermit,
}

impl Session {
    /// Waits for calls to the database, up to the call timeout.
    pub(crate) async fn bounded<T>(
        &self,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        let _timer = self.pool.calls.start("round_trip");
        match tokio::time::timeout(self.pool.target.call_timeout, call).await {
            Ok(outcome) => outcome.map_err(|error| {
                // The server has become a standby: the other connections are of no use either.
                if error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION) {
                    self.pool.close_idle();
                }
                crate::error::classify(error)
            }),
            Err(elapsed) => {
                self.pool.close_idle();
                Err(Error::unavailable(ENGINE, elapsed))
            }
        }
    }

    /// Prepares statements for a pipeline before the first of them is sent (see [`crate::connection`]).
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

    /// Runs a statement without preparing it, such as `COMMIT`.
    pub(crate) async fn run(&self, sql: &str) -> Result<()> {
        self.bounded(self.connection.batch_execute(sql)).await
    }

    /// Returns the connection to the pool. Only after success, with no open transaction.
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
    fn pauses_grow_up_to_a_second() {
        let mut backoff = ConnectBackoff::default();
        for _ in 0..40 {
            backoff.fail();
            let pause = backoff.retry_at.unwrap().saturating_duration_since(Instant::now());
            assert!(pause <= BACKOFF_MAX);
        }
        let last = backoff.retry_at.unwrap().saturating_duration_since(Instant::now());
        assert!(last > BACKOFF_MIN);
    }

    #[tokio::test]
    async fn calls_during_a_backoff_fail_at_once_and_transiently() {
        // Port 1 on loopback refuses.
        let pool = Pool::new("postgres://u@127.0.0.1:1/d".parse().unwrap(), 1);
        assert!(pool.session().await.unwrap_err().is_transient());
        let second = pool.session().await.unwrap_err();
        assert!(second.is_transient());
        assert!(format!("{second:?}").contains("next attempt"), "{second:?}");
    }

    #[tokio::test]
    async fn connections_to_a_server_that_has_become_a_standby_are_closed() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let database = weir_testkit::postgres::Server::shared().database("read_only").await;
        let pool = Pool::new(database.url().parse().unwrap(), 2);
        let (first, second) = (pool.session().await.unwrap(), pool.session().await.unwrap());
        first.run("SET default_transaction_read_only = on").await.unwrap();
        second.keep();
        first.keep();
        let error = pool.execute("CREATE TABLE t ()", &[]).await.unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        assert!(pool.shared.idle.lock().is_empty());
        pool.execute("CREATE TABLE t ()", &[]).await.unwrap();
    }
}
