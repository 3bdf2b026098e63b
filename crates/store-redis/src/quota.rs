//! Quota on Redis, in front of a store that other servers share.
//!
//! A window's units are reserved in the store in small reservations, which Redis hands out. What the store counts, sent and
//! reserved together, is thus never below what was allowed: when Redis is lost, or a server can reach only one of the two, the
//! store continues from its own count and nobody exceeds the limit. Units that were reserved and not used are lost until the
//! window ends (one, or a tenth of the limit, a thousand at most, for each server). A reservation that is not used for a
//! minute is given back.

mod give_back;
mod invalidation;
mod keyed;
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
    CacheMetrics, EnqueueOutcome, QuotaAudit, QuotaStore, ReservableStore, ReservedUnits, SendMessage,
    SendOutcome,
};
use weir_store::{Batch, Error, Result};

use crate::client::{KeyCall, NoReply, Redis};
use crate::quota::invalidation::Invalidations;
use crate::quota::reply::PeekedHash;
use crate::quota::write_behind::{Unrecorded, WriteBehind};
use crate::script::Script;

/// How often a row and its hash are read before an inconsistent pair is given up.
const READS_MAX: usize = 3;
/// The pause before hashes that could not be deleted are tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// How long things take that tests wait for, or that a busy machine must not hurry.
#[derive(Clone, Copy, Debug)]
pub struct QuotaTimes {
    /// How long a user's reservation is kept without sends.
    pub keep: Duration,
    /// How long a send whose window is full waits for units that others have reserved and not installed yet. A server that
    /// died in between installs none; then the send is denied after this time.
    pub install_wait: Duration,
}

impl Default for QuotaTimes {
    fn default() -> Self {
        Self { keep: Duration::from_secs(60), install_wait: Duration::from_millis(250) }
    }
}

/// Quota on Redis.
#[derive(Debug)]
pub struct RedisQuota {
    shared: Arc<SharedQuota>,
    write_behind: WriteBehind,
    _invalidating: DropGuard,
}

/// The state that calls share with the background tasks.
pub(crate) struct SharedQuota {
    redis: Redis,
    store: Arc<dyn ReservableStore>,
    limit_changes: Arc<LimitChangeFeed>,
    /// Replaces Redis's clock in tests.
    clock: Option<Arc<dyn Clock>>,
    invalidations: Invalidations,
    /// Held while this server's own task deletes hashes and gives back what they held.
    invalidating: tokio::sync::Mutex<()>,
    metrics: CacheMetrics,
    install_wait: Duration,
}

impl std::fmt::Debug for SharedQuota {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedQuota")
            .field("redis", &self.redis)
            .field("limit_changes", &self.limit_changes)
            .finish_non_exhaustive()
    }
}

impl RedisQuota {
    /// Puts Redis in front of `store`. `clock` replaces Redis's own in tests.
    #[must_use]
    pub fn new(
        redis: Redis,
        store: Arc<dyn ReservableStore>,
        clock: Option<Arc<dyn Clock>>,
        metrics: CacheMetrics,
        times: QuotaTimes,
    ) -> Self {
        let limit_changes = store.limit_changes();
        let shared = Arc::new(SharedQuota {
            redis,
            store,
            limit_changes,
            clock,
            invalidations: Invalidations::default(),
            invalidating: tokio::sync::Mutex::default(),
            metrics,
            install_wait: times.install_wait,
        });
        let listener = Arc::downgrade(&shared);
        shared.limit_changes.subscribe(move |change| {
            if let (LimitChange::User(user), Some(shared)) = (change, listener.upgrade()) {
                shared.invalidations.add(user);
            }
        });
        let closing = CancellationToken::new();
        let invalidate = process_invalidations(Arc::downgrade(&shared));
        tokio::spawn(closing.clone().run_until_cancelled_owned(invalidate));
        let write_behind = WriteBehind::start(Arc::clone(&shared), times.keep);
        Self { shared, write_behind, _invalidating: closing.drop_guard() }
    }

    /// Returns whether a hash of old limits may be left after a change that this server has received. Until it is deleted
    /// the store decides for its user, and may count reserved units that nobody will use.
    #[must_use]
    pub fn has_pending_invalidations(&self) -> bool {
        !self.shared.invalidations.is_empty()
    }
}

impl SharedQuota {
    /// Deletes a user's hash, which may hold old limits that no server must use. If that fails, invalidates every hash.
    /// Units that a send has reserved under the new limits meanwhile are given back.
    async fn invalidate(&self, user: &UserId, row: Option<&Quota>) -> Result<()> {
        let call = KeyCall { key: key(user), arguments: Vec::new() };
        let mut replies = self.redis.call_each(Script::QuotaForget, &[], &[call]).await;
        let Some(Ok(reply)) = replies.pop() else { return self.store.raise_cache_epoch().await };
        match (reply::parse_forget(&reply), row) {
            (Some((window, units)), Some(row)) if window == row.last_refresh && units > 0 => {
                self.store.return_unused(vec![ReservedUnits { user: user.clone(), window, units }]).await
            }
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl QuotaStore for RedisQuota {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let (shared, user) = (Arc::clone(&self.shared), user.clone());
        // In a task of its own: a caller that times out must not leave the old hash behind.
        join(tokio::spawn(async move {
            let row = shared.store.configure(&user, limits).await?;
            shared.invalidate(&user, Some(&row)).await?;
            shared.store.confirm_invalidated(std::slice::from_ref(&user)).await?;
            Ok(row)
        }))
        .await
    }

    async fn change_limits(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let (shared, task_user) = (Arc::clone(&self.shared), user.clone());
        let changed: Quota = join(tokio::spawn(async move {
            let user = task_user;
            let row = shared.store.change_limits(&user, limits).await?;
            // Units that the hash held in this window are given back, so that its count is exact. This server's own task may
            // have heard of the change, and be at it first.
            shared.invalidate(&user, Some(&row)).await?;
            drop(shared.invalidating.lock().await);
            shared.store.confirm_invalidated(std::slice::from_ref(&user)).await?;
            Ok(row)
        }))
        .await?;
        Ok(self.find(user).await?.unwrap_or(changed))
    }

    async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>> {
        let mut listed = self.shared.store.list(after, limit).await?;
        let calls: Vec<_> =
            listed.iter().map(|(user, _)| KeyCall { key: key(user), arguments: Vec::new() }).collect();
        let replies = self.shared.redis.call_each(Script::QuotaPeek, &[&self.shared.epoch()], &calls).await;
        for ((user, row), reply) in listed.iter_mut().zip(replies) {
            let hash = reply.ok().as_ref().and_then(reply::parse_peek);
            match live_row(*row, hash, self.write_behind.unrecorded(user)) {
                Some(live) => *row = live,
                None => *row = self.find(user).await?.unwrap_or(*row),
            }
        }
        Ok(listed)
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        for _read in 0..READS_MAX {
            let unrecorded = self.write_behind.unrecorded(user);
            let Some(row) = self.shared.store.find(user).await? else { return Ok(None) };
            let hash = self.shared.peek(user).await.unwrap_or_default();
            // Units may be reserved between the two reads: then both are read again.
            if let Some(live) = live_row(row, hash, unrecorded) {
                return Ok(Some(live));
            }
        }
        self.shared.store.find(user).await
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let (shared, user) = (Arc::clone(&self.shared), user.clone());
        join(tokio::spawn(async move {
            let removed = shared.store.remove(&user).await?;
            shared.invalidate(&user, None).await?;
            shared.store.confirm_invalidated(std::slice::from_ref(&user)).await?;
            Ok(removed)
        }))
        .await
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        // This server may have missed new limits and would use a hash of the old ones. The store always knows them.
        if !self.shared.limit_changes.is_current() {
            return self.shared.store.send_batch(batch).await;
        }
        let batch = batch.take();
        if batch.iter().all(|send| send.key.is_none()) {
            return spend::send_batch(&self.shared, &self.write_behind, batch).await;
        }
        self.send_mixed_batch(batch).await
    }

    async fn purge_keys(&self, limit: usize) -> Result<usize> {
        self.shared.store.purge_keys(limit).await
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        self.shared.store.audit().await
    }

    async fn close(&self) {
        self.write_behind.close().await;
        self.shared.store.close().await;
    }
}

impl RedisQuota {
    /// Decides sends with keys and those without beside each other.
    async fn send_mixed_batch(&self, batch: Vec<SendMessage>) -> Result<Vec<SendOutcome>> {
        let has_key: Vec<bool> = batch.iter().map(|send| send.key.is_some()).collect();
        let (with, without): (Vec<_>, Vec<_>) = batch.into_iter().partition(|send| send.key.is_some());
        let (with_count, without_count) = (with.len(), without.len());
        let (with, without) = tokio::join!(keyed::send_batch(&self.shared, with), async {
            if without.is_empty() {
                return Ok(Vec::new());
            }
            spend::send_batch(&self.shared, &self.write_behind, without).await
        });
        if without_count == 0 {
            return with;
        }
        // An error of one part must not fail the other.
        let or_unknown = |outcomes: Result<Vec<SendOutcome>>, count: usize| {
            outcomes.unwrap_or_else(|error| {
                tracing::warn!(error = %error.with_causes(), "a part of a batch of sends failed");
                vec![SendOutcome::NotQueued(EnqueueOutcome::of_error(&error)); count]
            })
        };
        if let (Err(error), Err(_)) = (&with, &without) {
            return Err(error.clone());
        }
        let mut with = or_unknown(with, with_count).into_iter();
        let mut without = or_unknown(without, without_count).into_iter();
        let next = |has_key| if has_key { with.next() } else { without.next() };
        Ok(has_key.into_iter().filter_map(next).collect())
    }
}

impl SharedQuota {
    fn epoch(&self) -> String {
        self.limit_changes.epoch().to_string()
    }

    /// The test clock's time in microseconds, or an empty string for Redis's own clock.
    fn now(&self) -> String {
        self.clock.as_ref().map(|clock| clock.now().as_micros().to_string()).unwrap_or_default()
    }

    async fn peek(&self, user: &UserId) -> Result<Option<PeekedHash>, NoReply> {
        let call = KeyCall { key: key(user), arguments: Vec::new() };
        let mut replies = self.redis.call_each(Script::QuotaPeek, &[&self.epoch()], &[call]).await;
        Ok(reply::parse_peek(&replies.pop().ok_or(NoReply)??))
    }
}

/// A row as it counts now, by its user's hash or, without one of its window, by what this server has granted. `None` if the row
/// is older than the hash.
fn live_row(mut row: Quota, hash: Option<PeekedHash>, unrecorded: Unrecorded) -> Option<Quota> {
    if let Some(hash) = hash.filter(|hash| hash.window == row.last_refresh) {
        return hash.live_row(&row);
    }
    row.record_sent(unrecorded.window, unrecorded.units);
    Some(row)
}

async fn join<T>(task: tokio::task::JoinHandle<Result<T>>) -> Result<T> {
    task.await.unwrap_or_else(|panic| Err(Error::failed(crate::ENGINE, panic)))
}

/// Deletes the hashes of users whose limits have changed, on any server. Calls that Redis does not answer are repeated.
async fn process_invalidations(shared: Weak<SharedQuota>) {
    while let Some(shared) = shared.upgrade() {
        // The timeout lets the task notice that the store was dropped.
        let Ok(users) = tokio::time::timeout(RETRY_PAUSE * 5, shared.invalidations.next()).await else {
            continue;
        };
        let calls: Vec<_> =
            users.iter().map(|(user, _)| KeyCall { key: key(user), arguments: Vec::new() }).collect();
        let invalidating = shared.invalidating.lock().await;
        let replies = shared.redis.call_each(Script::QuotaForget, &[], &calls).await;
        let (mut deleted, mut unused) = (Vec::new(), Vec::new());
        for ((user, change), reply) in users.into_iter().zip(replies) {
            let Ok(reply) = reply else { continue };
            // The hash may be one that a send has just created under the new limits: its units are given back.
            if let Some((window, units)) = reply::parse_forget(&reply).filter(|(_, units)| *units > 0) {
                unused.push(ReservedUnits { user: user.clone(), window, units });
            }
            shared.invalidations.remove(&user, change);
            deleted.push(user);
        }
        if !unused.is_empty()
            && let Err(error) = shared.store.return_unused(unused).await
        {
            tracing::warn!(error = %error.with_causes(), "cannot give back unused quota; it stays counted until its windows end");
        }
        drop(invalidating);
        // Counted last: whoever waits for the count finds the unused units given back.
        shared.metrics.forgotten.inc_by(deleted.len() as u64);
        let is_recorded = deleted.is_empty() || shared.store.confirm_invalidated(&deleted).await.is_ok();
        if shared.invalidations.has_overflowed() && shared.store.raise_cache_epoch().await.is_ok() {
            shared.invalidations.clear_overflow();
        }
        if deleted.is_empty() || !is_recorded {
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

fn key(user: &UserId) -> String {
    format!("RateLimiterCache:{user}")
}
