//! One connection: its settings, its prepared statements, and the task that drives it.
//!
//! A statement is prepared at its first use on a connection and cached under its text. Pipelined statements, such as those of a
//! transaction, must reach the server in the order of the calls. One that had to be prepared first would arrive after the
//! others, even after their `COMMIT`. So all of them are prepared before the first is sent: only [`Connection::prepare`] returns
//! statements that can run.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::try_join_all;
use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Statement};
use weir_store::{Error, Result};

use crate::error::classify;
use crate::primary::{self, Driving};
use crate::target::PostgresTarget;
use crate::{ENGINE, requirements};

/// The server cancels a statement this long before the call times out.
const STATEMENT_MARGIN: Duration = Duration::from_millis(100);
/// The server gives up waiting for a lock this long before the call times out.
const LOCK_MARGIN: Duration = Duration::from_millis(300);
/// The server ends an idle transaction this long after the call timeout.
const IDLE_TRANSACTION_MARGIN: Duration = Duration::from_millis(500);

const SESSION_SETTINGS: &str = "
    SET TimeZone = 'UTC';
    -- Everything here is looked up by key, by plans that a session keeps: a table that has grown since must not be read
    -- whole, whether by a scan, a bitmap, or a join of all of it.
    SET enable_seqscan = off;
    SET enable_bitmapscan = off;
    SET enable_hashjoin = off;
    SET enable_mergejoin = off;
    -- A scan that cannot be avoided then looks so dear that it would be compiled first, which takes much longer.
    SET jit = off;
    SET plan_cache_mode = force_generic_plan;";

/// Each topic's counts are spread over this many rows of `queue_ledger`.
const LEDGER_ROWS: i16 = 64;

/// The values of a statement's parameters.
pub(crate) type Values<'a> = &'a [&'a (dyn ToSql + Sync)];

#[derive(Debug)]
pub(crate) struct Connection {
    client: Client,
    /// Keyed by their texts, which are constants of this crate. Never locked across an `await`: two tasks that need the same
    /// new statement both prepare it, and the second replaces the first.
    statements: Mutex<HashMap<&'static str, Statement>>,
    /// The row of each topic's ledger that this connection adds to: the column `slot` of `queue_ledger`.
    pub(crate) ledger_row: i16,
    /// The server's timeline: see [`crate::primary`].
    pub(crate) timeline: u32,
    _driver: Driver,
}

impl Connection {
    pub(crate) async fn open(target: &PostgresTarget) -> Result<Self> {
        tokio::time::timeout(target.call_timeout, Self::open_unbounded(target))
            .await
            .map_err(|elapsed| Error::unavailable(ENGINE, elapsed))?
    }

    async fn open_unbounded(target: &PostgresTarget) -> Result<Self> {
        let primary::Link { client, driving, timeline } = primary::connect(target).await?;
        let driver = Driver::start(driving);
        let settings =
            format!("{}{}{SESSION_SETTINGS}", timeouts(target.call_timeout), requirements::SESSION_SETTINGS);
        client.batch_execute(&settings).await.map_err(classify)?;
        let ledger_row = fastrand::i16(0..LEDGER_ROWS);
        Ok(Self { client, statements: Mutex::default(), ledger_row, timeline, _driver: driver })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Returns statements that are ready to be sent. Those that are new on this connection cost one round trip together.
    pub(crate) async fn prepare<const N: usize>(
        &self,
        texts: [&'static str; N],
    ) -> Result<[Prepared<'_>; N], tokio_postgres::Error> {
        let mut prepared = try_join_all(texts.map(|sql| self.prepare_one(sql))).await?.into_iter();
        Ok(texts.map(|_| prepared.next().expect("one statement was prepared for each text")))
    }

    async fn prepare_one(&self, sql: &'static str) -> Result<Prepared<'_>, tokio_postgres::Error> {
        let cached = self.statements.lock().get(sql).cloned();
        let statement = match cached {
            Some(statement) => statement,
            None => {
                let statement = self.client.prepare(sql).await?;
                let mut statements = self.statements.lock();
                statements.insert(sql, statement.clone());
                statement
            }
        };
        Ok(Prepared { client: &self.client, statement })
    }

    /// Runs a statement without values and rows, such as `BEGIN`, without preparing it.
    pub(crate) async fn batch_execute(&self, sql: &str) -> Result<(), tokio_postgres::Error> {
        self.client.batch_execute(sql).await
    }

    #[cfg(test)]
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }
}

/// A prepared statement. Each call sends it at its first poll.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    client: &'a Client,
    statement: Statement,
}

impl Prepared<'_> {
    pub(crate) async fn query(&self, values: Values<'_>) -> Result<Vec<Row>, tokio_postgres::Error> {
        self.client.query(&self.statement, values).await
    }

    pub(crate) async fn query_one(&self, values: Values<'_>) -> Result<Row, tokio_postgres::Error> {
        self.client.query_one(&self.statement, values).await
    }

    pub(crate) async fn query_opt(&self, values: Values<'_>) -> Result<Option<Row>, tokio_postgres::Error> {
        self.client.query_opt(&self.statement, values).await
    }

    pub(crate) async fn execute(&self, values: Values<'_>) -> Result<u64, tokio_postgres::Error> {
        self.client.execute(&self.statement, values).await
    }
}

/// Returns the settings by which the server releases the locks of a process that stops between two round trips. With the
/// default call timeout that takes two seconds.
fn timeouts(call: Duration) -> String {
    let [statement, lock, idle] = [
        call.saturating_sub(STATEMENT_MARGIN),
        call.saturating_sub(LOCK_MARGIN),
        call.saturating_add(IDLE_TRANSACTION_MARGIN),
    ]
    .map(|timeout| timeout.as_millis().max(1));
    format!(
        "SET statement_timeout = {statement}; SET lock_timeout = {lock};
         SET idle_in_transaction_session_timeout = {idle};"
    )
}

/// Connects and starts the task that drives the connection.
pub(crate) async fn connect(target: &PostgresTarget) -> Result<(Client, Driver)> {
    let link = primary::connect(target).await?;
    Ok((link.client, Driver::start(link.driving)))
}

/// The task that drives a connection. Aborted on drop: after dropping the client alone it would still try to send a
/// termination message, which a dead peer never receives.
#[derive(Debug)]
pub(crate) struct Driver(AbortHandle);

impl Driver {
    fn start(driving: Driving) -> Self {
        let driver = tokio::spawn(async move {
            if let Err(error) = driving.await {
                tracing::debug!(%error, "a Postgres connection was lost");
            }
        });
        Self(driver.abort_handle())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::try_join;
    use weir_testkit::postgres::Server;

    use super::*;

    const ONE: &str = "SELECT 1";
    const TWO: &str = "SELECT 2";
    const PREPARED: &str = "SELECT count(*) FROM pg_prepared_statements WHERE statement = ANY($1)";

    async fn connection() -> Connection {
        let database = Server::shared().database("session").await;
        Connection::open(&database.url().parse().expect("a Postgres URL")).await.expect("a connection")
    }

    async fn count_prepared(connection: &Connection) -> i64 {
        let texts = [ONE, TWO].as_slice();
        connection.client.query_one(PREPARED, &[&texts]).await.expect("a count").get(0)
    }

    #[tokio::test]
    async fn a_statement_is_prepared_once_on_a_connection() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let connection = connection().await;
        for _ in 0..3 {
            let [one, two] = connection.prepare([ONE, TWO]).await.expect("statements");
            let (one, two) = try_join(one.query_one(&[]), two.query_one(&[])).await.expect("rows");
            assert_eq!((one.get::<_, i32>(0), two.get::<_, i32>(0)), (1, 2));
        }
        assert_eq!(count_prepared(&connection).await, 2);
    }

    #[tokio::test]
    async fn two_tasks_that_prepare_the_same_statement_at_once_leave_one() {
        if weir_testkit::skip("postgres") {
            return;
        }
        let connection = connection().await;
        let ([first], [second]) =
            try_join(connection.prepare([ONE]), connection.prepare([ONE])).await.expect("statements");
        for statement in [first, second] {
            assert_eq!(statement.query_one(&[]).await.expect("a row").get::<_, i32>(0), 1);
        }
        assert_eq!(count_prepared(&connection).await, 1);
    }
}
