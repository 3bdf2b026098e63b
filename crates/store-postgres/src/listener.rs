//! Keeps a server's [`LimitChangeFeed`] current: receives new limits from other servers through `LISTEN`, on a connection of its own.
//!
//! The connection reads the cache's epoch four times a second. Postgres delivers the notifications of transactions that were
//! committed before a query no later than its result, so a result proves that every change up to the query was received. After
//! an interruption any limit may have changed, and subscribers are notified of that.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::future::poll_fn;
use tokio_postgres::{AsyncMessage, Client};
use weir_core::UserId;
use weir_store::limit_changes::{LimitChange, LimitChangeFeed};
use weir_store::{Error, Result};

use crate::error::classify;
use crate::target::PostgresTarget;
use crate::{ENGINE, primary};

/// The channel on which the ids of users with changed limits are published.
pub(crate) const CHANNEL: &str = "weir_quota";

/// Returns no row on a server that has become a standby: it knows nothing of changes on the new primary.
const EPOCH: &str = "SELECT epoch FROM quota_cache WHERE current_setting('transaction_read_only') = 'off'";
/// Changes that the cache may not have invalidated yet: their server has died, or is still at it.
const PENDING: &str = "SELECT user_id FROM quota_cache_forget";
/// How often the epoch is read.
const POLL_EVERY: Duration = Duration::from_millis(250);
/// The server cancels a statement this long before its caller stops waiting.
const STATEMENT_MARGIN: Duration = Duration::from_millis(200);
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(250);

/// Keeps the feed current until the task is aborted.
pub(crate) fn start(
    target: PostgresTarget,
    limit_changes: &Arc<LimitChangeFeed>,
) -> tokio::task::AbortHandle {
    let limit_changes = Arc::clone(limit_changes);
    let listen = async move {
        let mut was_current = true;
        loop {
            let ended = listen_once(&target, &limit_changes).await;
            limit_changes.publish(&LimitChange::AllUsers);
            if let Err(error) = ended
                && std::mem::replace(&mut was_current, limit_changes.is_current())
            {
                tracing::warn!(error = %error.with_causes(), "cannot receive changes of limits from other servers; caches in memory are not used until Postgres is back");
            }
            tokio::time::sleep(PAUSE_AFTER_ERROR).await;
        }
    };
    tokio::spawn(listen).abort_handle()
}

/// Listens until the connection is lost.
async fn listen_once(target: &PostgresTarget, limit_changes: &LimitChangeFeed) -> Result<()> {
    let timeout = target.listen_timeout();
    let primary::Link { client, mut driving, timeline } = bounded(timeout, primary::connect(target)).await?;
    // Drives the connection and publishes its notifications; ends with the connection.
    let receive = poll_fn(|context| {
        loop {
            return match driving.poll_message(context) {
                Poll::Ready(Some(Ok(AsyncMessage::Notification(notification)))) => {
                    limit_changes.publish(&read_change(notification.payload()));
                    continue;
                }
                Poll::Ready(Some(Ok(_notice))) => continue,
                Poll::Ready(Some(Err(error))) => Poll::Ready(Err(classify(error))),
                Poll::Ready(None) => {
                    Poll::Ready(Err(Error::unavailable(ENGINE, "the connection was closed")))
                }
                Poll::Pending => Poll::Pending,
            };
        }
    });
    let mut receive = pin!(receive);
    tokio::select! {
        ended = &mut receive => ended,
        ended = poll_epoch(&client, limit_changes, target, timeline) => ended,
    }
}

async fn poll_epoch(
    client: &Client,
    limit_changes: &LimitChangeFeed,
    target: &PostgresTarget,
    timeline: u32,
) -> Result<()> {
    let timeout = target.listen_timeout();
    let statement_ms = timeout.saturating_sub(STATEMENT_MARGIN).as_millis().max(1);
    let listen = format!("SET statement_timeout = {statement_ms}; LISTEN {CHANNEL}");
    bounded(timeout, async { client.batch_execute(&listen).await.map_err(classify) }).await?;
    let epoch = bounded(timeout, async { client.prepare(EPOCH).await.map_err(classify) }).await?;
    // Changes before the connection listened were not received.
    limit_changes.publish(&LimitChange::AllUsers);
    let pending = bounded(timeout, async { client.query(PENDING, &[]).await.map_err(classify) }).await?;
    for row in pending {
        limit_changes.publish(&read_change(row.try_get(0).map_err(classify)?));
    }
    loop {
        let queried_at = Instant::now();
        let row = bounded(timeout, async { client.query_one(&epoch, &[]).await.map_err(classify) }).await?;
        if !target.known_primary.is_latest(timeline) {
            return Err(Error::unavailable(ENGINE, "another server has been promoted"));
        }
        let epoch: i64 = row.try_get(0).map_err(classify)?;
        limit_changes.mark_current(queried_at, epoch.unsigned_abs());
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// A payload that is no user id was not sent by Weir. It counts as a change of all users, which is safe.
fn read_change(payload: &str) -> LimitChange {
    UserId::parse(payload).map_or(LimitChange::AllUsers, LimitChange::User)
}

async fn bounded<T>(timeout: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(timeout, call)
        .await
        .unwrap_or_else(|elapsed| Err(Error::unavailable(ENGINE, elapsed)))
}
