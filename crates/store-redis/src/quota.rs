//! Quota on Redis, in front of a store that other servers share.
//!
//! Places of a window are taken in the store in small reservations and handed out by Redis. The store's count is thus
//! never below what was allowed: when Redis is lost, or a server can reach only one of the two, the store goes on from
//! its own count and nobody gets past the limit; what was reserved and not used is lost until the window ends (a tenth
//! of the limit, a thousand at most, for each server). What nobody has used for a while is given back.

mod behind;
mod reply;
mod spend;

use std::sync::Arc;

use async_trait::async_trait;
use weir_core::quota::{Limits, Quota};
use weir_core::{Clock, UserId};
use weir_store::Result;
use weir_store::feed::Feed;
use weir_store::quota::{Backing, Books, QuotaStore, SendMessage, SendOutcome, Unused};

use crate::client::{Item, Redis, Unanswered};
use crate::quota::behind::Behind;
use crate::quota::reply::Held;
use crate::script::Script;

/// How often a row and its hash are read again when they do not fit together.
const READS: usize = 3;

/// Quota on Redis.
#[derive(Debug)]
pub struct RedisQuota {
    parts: Arc<Parts>,
    behind: Behind,
}

/// What every call needs.
pub(crate) struct Parts {
    redis: Redis,
    store: Arc<dyn Backing>,
    feed: Arc<Feed>,
    /// A clock other than Redis's, for tests.
    clock: Option<Arc<dyn Clock>>,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("redis", &self.redis).field("feed", &self.feed).finish_non_exhaustive()
    }
}

impl RedisQuota {
    /// Puts Redis in front of `store`; `clock` replaces Redis's own, for tests.
    #[must_use]
    pub fn new(redis: Redis, store: Arc<dyn Backing>, clock: Option<Arc<dyn Clock>>) -> Self {
        let feed = store.feed();
        let parts = Arc::new(Parts { redis, store, feed, clock });
        let behind = Behind::start(Arc::clone(&parts));
        Self { parts, behind }
    }

    /// A hash that may be of old limits must not be used by any server: it is deleted, or else every hash is
    /// distrusted. What a send has reserved under the new limits meanwhile is given back.
    async fn forget(&self, user: &UserId, row: Option<&Quota>) -> Result<()> {
        let item = Item { key: key(user), arguments: Vec::new() };
        let mut answers = self.parts.redis.call(Script::Forget, &[], &[item]).await;
        let Some(Ok(answer)) = answers.pop() else { return self.parts.store.distrust_cache().await };
        match (reply::released(&answer), row) {
            (Some((window, units)), Some(row)) if window == row.last_refresh && units > 0 => {
                self.parts.store.give_back(vec![Unused { user: user.clone(), window, units }]).await
            }
            _ => Ok(()),
        }
    }
}

#[async_trait]
impl QuotaStore for RedisQuota {
    async fn configure(&self, user: &UserId, limits: Limits) -> Result<Quota> {
        let row = self.parts.store.configure(user, limits).await?;
        self.forget(user, Some(&row)).await?;
        Ok(row)
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
        let removed = self.parts.store.remove(user).await?;
        self.forget(user, None).await?;
        Ok(removed)
    }

    async fn send_batch(&self, batch: Vec<SendMessage>) -> Result<Vec<SendOutcome>> {
        // New limits that went unheard may have left a hash behind; the store always knows them.
        if !self.parts.feed.is_current() {
            return self.parts.store.send_batch(batch).await;
        }
        spend::send_batch(&self.parts, &self.behind, batch).await
    }

    async fn audit(&self) -> Result<Books> {
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
        self.feed.epoch().to_string()
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

fn key(user: &UserId) -> String {
    format!("RateLimiterCache:{user}")
}
