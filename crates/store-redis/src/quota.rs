//! Quota on Redis, in front of a store that other servers share.
//!
//! Places of a window are taken in the store in small reservations and handed out by Redis. The store's count is thus
//! never below what was allowed: when Redis is lost, or a server can reach only one of the two, the store goes on from
//! its own count and nobody gets past the limit; what was reserved and not used is lost until the window ends (a tenth
//! of the limit, a thousand at most, for each server). What nobody has used for a while is given back.

mod invalidation;
mod reply;
mod spend;
mod write_behind;

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Clock, UserId};
use weir_store::limit_changes::{LimitChange, LimitChangeFeed};
use weir_store::quota::{
    CacheMetrics, QuotaAudit, QuotaStore, ReservableStore, SendMessage, SendOutcome, UnusedReservation,
};
use weir_store::{Batch, Error, Result};

use crate::client::{Item, Redis, Unanswered};
use crate::quota::invalidation::Invalidations;
use crate::quota::reply::Held;
use crate::quota::write_behind::WriteBehind;
use crate::script::Script;

/// How often a row and its hash are read again when they do not fit together.
const READS: usize = 3;
/// The pause before hashes that could not be deleted are tried again.
const DOUBTS_PAUSE: Duration = Duration::from_millis(200);

/// Quota on Redis.
#[derive(Debug)]
pub struct RedisQuota {
    parts: Arc<Parts>,
    behind: WriteBehind,
    _clearing: DropGuard,
}

/// What every call needs.
pub(crate) struct Parts {
    redis: Redis,
    store: Arc<dyn ReservableStore>,
    limit_changes: Arc<LimitChangeFeed>,
    /// A clock other than Redis's, for tests.
    clock: Option<Arc<dyn Clock>>,
    invalidations: Invalidations,
    metrics: CacheMetrics,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts")
            .field("redis", &self.redis)
            .field("feed", &self.limit_changes)
            .finish_non_exhaustive()
    }
}

impl RedisQuota {
    /// Puts Redis in front of `store`; `clock` replaces Redis's own, for tests.
    #[must_use]
    pub fn new(
        redis: Redis,
        store: Arc<dyn ReservableStore>,
        clock: Option<Arc<dyn Clock>>,
        metrics: CacheMetrics,
    ) -> Self {
        let limit_changes = store.limit_changes();
        let parts = Arc::new(Parts {
            redis,
            store,
            limit_changes,
            clock,
            invalidations: Invalidations::default(),
            metrics,
        });
        let listener = Arc::downgrade(&parts);
        parts.limit_changes.subscribe(move |change| {
            if let (LimitChange::User(user), Some(parts)) = (change, listener.upgrade()) {
                parts.invalidations.add(user);
            }
        });
        let closing = CancellationToken::new();
        let clear = clear_doubts(Arc::downgrade(&parts));
        tokio::spawn(closing.clone().run_until_cancelled_owned(clear));
        let behind = WriteBehind::start(Arc::clone(&parts));
        Self { parts, behind, _clearing: closing.drop_guard() }
    }
}

impl RedisQuota {
    /// Whether every change heard of has been dealt with: no hash of old limits is left. Until then the store decides
    /// for the users concerned, and may find places reserved that nobody will use.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.parts.invalidations.is_empty()
    }
}

impl Parts {
    /// A hash that may be of old limits must not be used by any server: it is deleted, or else every hash is
    /// distrusted. What a send has reserved under the new limits meanwhile is given back.
    async fn forget_changed(&self, user: &UserId, row: Option<&Quota>) -> Result<()> {
        let item = Item { key: key(user), arguments: Vec::new() };
        let mut answers = self.redis.call(Script::Forget, &[], &[item]).await;
        let Some(Ok(answer)) = answers.pop() else { return self.store.raise_cache_epoch().await };
        match (reply::released(&answer), row) {
            (Some((window, units)), Some(row)) if window == row.last_refresh && units > 0 => {
                self.store.return_unused(vec![UnusedReservation { user: user.clone(), window, units }]).await
            }
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl QuotaStore for RedisQuota {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let (parts, user) = (Arc::clone(&self.parts), user.clone());
        // On its own, so that a caller who has waited for too long does not leave the old hash behind.
        finished(tokio::spawn(async move {
            let row = parts.store.configure(&user, limits).await?;
            parts.forget_changed(&user, Some(&row)).await?;
            parts.store.confirm_invalidated(std::slice::from_ref(&user)).await?;
            Ok(row)
        }))
        .await
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        for _read in 0..READS {
            let Some(row) = self.parts.store.find(user).await? else { return Ok(None) };
            match self.parts.held(user).await {
                Ok(Some(held)) if held.window == row.last_refresh => {
                    // A reservation may come between the two readings: then the row was read too early.
                    let unused = held.reserved.saturating_sub(held.count);
                    if held.reserved <= row.current_count {
                        let current_count = row.current_count.saturating_sub(unused);
                        return Ok(Some(Quota { current_count, ..row }));
                    }
                }
                _ => return Ok(Some(row)),
            }
        }
        self.parts.store.find(user).await
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let (parts, user) = (Arc::clone(&self.parts), user.clone());
        finished(tokio::spawn(async move {
            let removed = parts.store.remove(&user).await?;
            parts.forget_changed(&user, None).await?;
            parts.store.confirm_invalidated(std::slice::from_ref(&user)).await?;
            Ok(removed)
        }))
        .await
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        // New limits that went unheard may have left a hash behind; the store always knows them.
        if !self.parts.limit_changes.is_current() {
            return self.parts.store.send_batch(batch).await;
        }
        spend::send_batch(&self.parts, &self.behind, batch.take()).await
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        self.parts.store.audit().await
    }

    async fn close(&self) {
        self.behind.close().await;
        self.parts.store.close().await;
    }
}

impl Parts {
    /// The arguments every script takes after the run's id.
    fn epoch(&self) -> String {
        self.limit_changes.epoch().to_string()
    }

    fn now(&self) -> String {
        self.clock.as_ref().map(|clock| clock.now().as_micros().to_string()).unwrap_or_default()
    }

    async fn held(&self, user: &UserId) -> Result<Option<Held>, Unanswered> {
        let item = Item { key: key(user), arguments: Vec::new() };
        let mut answers = self.redis.call(Script::Peek, &[&self.epoch()], &[item]).await;
        Ok(reply::held(&answers.pop().ok_or(Unanswered)??))
    }
}

async fn finished<T>(task: tokio::task::JoinHandle<Result<T>>) -> Result<T> {
    task.await.unwrap_or_else(|panic| Err(Error::failed(crate::ENGINE, panic)))
}

/// Deletes the hashes of users whose limits have changed, on any server; what Redis does not answer is tried again.
async fn clear_doubts(parts: Weak<Parts>) {
    while let Some(parts) = parts.upgrade() {
        // Looked at again now and then, so that it ends with the store.
        let Ok(users) = tokio::time::timeout(DOUBTS_PAUSE * 5, parts.invalidations.next()).await else {
            continue;
        };
        let items: Vec<_> =
            users.iter().map(|(user, _)| Item { key: key(user), arguments: Vec::new() }).collect();
        let answers = parts.redis.call(Script::Forget, &[], &items).await;
        let (mut settled, mut unused) = (Vec::new(), Vec::new());
        for ((user, number), answer) in users.into_iter().zip(answers) {
            let Ok(answer) = answer else { continue };
            // A send under the new limits may have been faster: what it reserved is theirs again.
            if let Some((window, units)) = reply::released(&answer).filter(|(_, units)| *units > 0) {
                unused.push(UnusedReservation { user: user.clone(), window, units });
            }
            parts.invalidations.settle(&user, number);
            settled.push(user);
        }
        parts.metrics.forgotten.inc_by(settled.len() as u64);
        if !unused.is_empty()
            && let Err(error) = parts.store.return_unused(unused).await
        {
            tracing::warn!(error = %error.with_causes(), "unused places stay counted until their windows end");
        }
        let is_noted = settled.is_empty() || parts.store.confirm_invalidated(&settled).await.is_ok();
        if parts.invalidations.is_everybody() && parts.store.raise_cache_epoch().await.is_ok() {
            parts.invalidations.settle_everybody();
        }
        if settled.is_empty() || !is_noted {
            tokio::time::sleep(DOUBTS_PAUSE).await;
        }
    }
}

fn key(user: &UserId) -> String {
    format!("RateLimiterCache:{user}")
}
