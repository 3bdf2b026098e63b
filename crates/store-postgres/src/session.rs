//! One connection: its settings, its prepared statements, and the task that drives it.

use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::task::AbortHandle;
use tokio_postgres::{Client, Statement};
use weir_store::{Error, Result};

use crate::error::classify;
use crate::target::Target;
use crate::{ENGINE, queue, quota, request, requirements, sale, slot, tls};

/// How much sooner than a call ends a statement does, and the wait for a lock; and how much later a transaction that
/// nobody goes on with.
const STATEMENT_SOONER: Duration = Duration::from_millis(100);
const LOCK_SOONER: Duration = Duration::from_millis(300);
const IDLE_LATER: Duration = Duration::from_millis(500);

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

/// Ledger counts are spread over this many rows a topic.
const LEDGER_SLOTS: i16 = 64;

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) client: Client,
    pub(crate) statements: Statements,
    /// Which of the ledger's rows this connection counts on.
    pub(crate) ledger_slot: i16,
    _driver: Driver,
}

impl Connection {
    pub(crate) async fn open(target: &Target) -> Result<Self> {
        tokio::time::timeout(target.call_timeout, Self::open_unbounded(target))
            .await
            .map_err(|elapsed| Error::unavailable(ENGINE, elapsed))?
    }

    async fn open_unbounded(target: &Target) -> Result<Self> {
        let (client, driver) = connect(target).await?;
        let settings =
            format!("{}{}{SESSION_SETTINGS}", timeouts(target.call_timeout), requirements::SESSION_SETTINGS);
        client.batch_execute(&settings).await.map_err(classify)?;
        let statements = Statements::prepare(&client).await.map_err(classify)?;
        let ledger_slot = fastrand::i16(0..LEDGER_SLOTS);
        Ok(Self { client, statements, ledger_slot, _driver: driver })
    }
}

/// What the server enforces should this process stop in the middle of something. A batch locks rows between two
/// round trips; a process that is paused there loses its locks after two seconds.
fn timeouts(call: Duration) -> String {
    let [statement, lock, idle] = [
        call.saturating_sub(STATEMENT_SOONER),
        call.saturating_sub(LOCK_SOONER),
        call.saturating_add(IDLE_LATER),
    ]
    .map(|timeout| timeout.as_millis().max(1));
    format!(
        "SET statement_timeout = {statement}; SET lock_timeout = {lock};
         SET idle_in_transaction_session_timeout = {idle};"
    )
}

/// Connects and starts the task that drives the connection.
pub(crate) async fn connect(target: &Target) -> Result<(Client, Driver)> {
    let (client, connection) =
        target.config.connect(tls::connector(&target.trust)?).await.map_err(classify)?;
    let driver = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a Postgres connection ended");
        }
    });
    Ok((client, Driver(driver.abort_handle())))
}

/// The task behind a connection. It ends with it at once: dropping the client alone would let it say goodbye first,
/// which a dead peer never hears.
#[derive(Debug)]
pub(crate) struct Driver(AbortHandle);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The statements of the hot paths, parsed once a connection: those of quota and the queue when it is made, those of other
/// capabilities when it is first used for them. A connection is ready sooner, and most are used for one thing.
#[derive(Debug)]
pub(crate) struct Statements {
    pub(crate) clock: Statement,
    pub(crate) quota: quota::Statements,
    pub(crate) queue: queue::Statements,
    pub(crate) slot: Later<slot::Statements>,
    pub(crate) request: Later<request::Statements>,
    pub(crate) sale: Later<sale::Statements>,
}

impl Statements {
    async fn prepare(client: &Client) -> Result<Self, tokio_postgres::Error> {
        let texts = ["SELECT clock_timestamp()"].into_iter().chain(quota::SQL).chain(queue::sql());
        let mut prepared = prepare_all(client, texts).await?.into_iter();
        let mut next = || prepared.next().expect("as many statements come back as were sent");
        Ok(Self {
            clock: next(),
            quota: quota::Statements::from_prepared(&mut next),
            queue: queue::Statements::from_prepared(&mut next),
            slot: Later(None),
            request: Later(None),
            sale: Later(None),
        })
    }
}

/// All in one round trip.
async fn prepare_all(
    client: &Client,
    texts: impl Iterator<Item = &'static str>,
) -> Result<Vec<Statement>, tokio_postgres::Error> {
    try_join_all(texts.map(|sql| client.prepare(sql))).await
}

impl Connection {
    pub(crate) async fn prepare_slot(&mut self) -> Result<(), tokio_postgres::Error> {
        if self.statements.slot.0.is_none() {
            let mut prepared = prepare_all(&self.client, slot::sql()).await?.into_iter();
            let mut next = || prepared.next().expect("as many statements come back as were sent");
            self.statements.slot = Later(Some(slot::Statements::from_prepared(&mut next)));
        }
        Ok(())
    }

    pub(crate) async fn prepare_request(&mut self) -> Result<(), tokio_postgres::Error> {
        if self.statements.request.0.is_none() {
            let mut prepared = prepare_all(&self.client, request::sql()).await?.into_iter();
            let mut next = || prepared.next().expect("as many statements come back as were sent");
            self.statements.request = Later(Some(request::Statements::from_prepared(&mut next)));
        }
        Ok(())
    }

    pub(crate) async fn prepare_sale(&mut self) -> Result<(), tokio_postgres::Error> {
        if self.statements.sale.0.is_none() {
            let mut prepared = prepare_all(&self.client, sale::sql()).await?.into_iter();
            let mut next = || prepared.next().expect("as many statements come back as were sent");
            self.statements.sale = Later(Some(sale::Statements::from_prepared(&mut next)));
        }
        Ok(())
    }
}

/// Statements that are there once a session was taken for what they are for.
#[derive(Debug)]
pub(crate) struct Later<T>(Option<T>);

impl<T> std::ops::Deref for Later<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("a session is taken by the method of Pool that prepares these")
    }
}
