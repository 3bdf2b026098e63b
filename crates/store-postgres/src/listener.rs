//! Keeps a server's [`LimitChangeFeed`] current: hears of new limits on other servers through `LISTEN`, on a connection of its own.
//!
//! The connection asks for the cache's epoch four times a second. Postgres delivers notifications of transactions that
//! were committed before a question no later than with its answer, so an answer proves that everything up to the
//! question has been heard. After an interruption anything may have changed, and listeners are told so.

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
use crate::{ENGINE, tls};

/// The channel on which users are named whose limits have changed.
pub(crate) const CHANNEL: &str = "weir_quota";

const EPOCH: &str = "SELECT epoch FROM quota_cache";
/// Changes that the cache may not have forgotten: whoever took them did not live to see it, or is about to.
const PENDING: &str = "SELECT user_id FROM quota_cache_forget";
/// How often the connection is asked.
const BEAT: Duration = Duration::from_millis(250);
/// The server gives a question up before it is not waited for any more.
const STATEMENT_SOONER: Duration = Duration::from_millis(200);
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(250);

/// Keeps the feed current until the engine is gone.
pub(crate) fn start(
    target: PostgresTarget,
    limit_changes: &Arc<LimitChangeFeed>,
) -> tokio::task::AbortHandle {
    let limit_changes = Arc::clone(limit_changes);
    let watch = async move {
        let mut was_heard = true;
        loop {
            let ended = watch(&target, &limit_changes).await;
            limit_changes.publish(&LimitChange::AllUsers);
            if let Err(error) = ended
                && std::mem::replace(&mut was_heard, limit_changes.is_current())
            {
                tracing::warn!(error = %error.with_causes(), "changes on other servers go unheard; nothing is answered from memory");
            }
            tokio::time::sleep(PAUSE_AFTER_ERROR).await;
        }
    };
    tokio::spawn(watch).abort_handle()
}

/// Listens until the connection breaks.
async fn watch(target: &PostgresTarget, limit_changes: &LimitChangeFeed) -> Result<()> {
    let connect = async { target.config.connect(tls::connector(&target.trust)?).await.map_err(classify) };
    let patience = target.listen_timeout();
    let (client, mut connection) = bounded(patience, connect).await?;
    // Drives the connection and hands on what it hears; it ends when the connection does.
    let hear = poll_fn(|context| {
        loop {
            return match connection.poll_message(context) {
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
    let mut hear = pin!(hear);
    tokio::select! {
        ended = &mut hear => ended,
        ended = ask(&client, limit_changes, patience) => ended,
    }
}

async fn ask(client: &Client, limit_changes: &LimitChangeFeed, patience: Duration) -> Result<()> {
    let statement_ms = patience.saturating_sub(STATEMENT_SOONER).as_millis().max(1);
    let listen = format!("SET statement_timeout = {statement_ms}; LISTEN {CHANNEL}");
    bounded(patience, async { client.batch_execute(&listen).await.map_err(classify) }).await?;
    let epoch = bounded(patience, async { client.prepare(EPOCH).await.map_err(classify) }).await?;
    // What changed before the connection listened was not heard.
    limit_changes.publish(&LimitChange::AllUsers);
    let pending = bounded(patience, async { client.query(PENDING, &[]).await.map_err(classify) }).await?;
    for row in pending {
        limit_changes.publish(&read_change(row.try_get(0).map_err(classify)?));
    }
    loop {
        let asked_at = Instant::now();
        let row = bounded(patience, async { client.query_one(&epoch, &[]).await.map_err(classify) }).await?;
        let epoch: i64 = row.try_get(0).map_err(classify)?;
        limit_changes.mark_current(asked_at, epoch.unsigned_abs());
        tokio::time::sleep(BEAT).await;
    }
}

/// Somebody's own notification on the channel may name nobody Weir knows; then it is safest to forget everything.
fn read_change(payload: &str) -> LimitChange {
    UserId::parse(payload).map_or(LimitChange::AllUsers, LimitChange::User)
}

async fn bounded<T>(patience: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(patience, call)
        .await
        .unwrap_or_else(|elapsed| Err(Error::unavailable(ENGINE, elapsed)))
}
