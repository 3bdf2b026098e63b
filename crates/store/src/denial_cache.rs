//! Denials in memory: users known to be over their limit are refused without a round trip to the store.
//!
//! Only denials by the store are cached, and only until their window ends. New limits invalidate them at once on the
//! server that receives the change, and on others when the [`LimitChangeFeed`] publishes it. While the feed is not
//! current, nothing is refused from memory. A denial that was decided before a change is not cached after it.

use std::sync::Arc;

use weir_core::quota::QuotaLimits;
use weir_core::{Clock, Denial, Timestamp, UserId};

use crate::bounded_cache::{BoundedCache, Version};
use crate::limit_changes::{LimitChange, LimitChangeFeed};
use crate::quota::SendOutcome;

const SHARDS: usize = 16;
/// Users in one shard.
const SHARD_MAX: usize = 8_192;

#[derive(Debug)]
pub struct DenialCache {
    cache: BoundedCache<UserId, CachedDenial>,
    limit_changes: Arc<LimitChangeFeed>,
    clock: Arc<dyn Clock>,
}

#[derive(Clone, Copy, Debug)]
struct CachedDenial {
    limits: QuotaLimits,
    denial: Denial,
    /// When the query was sent, by the local clock: the window ends no earlier than `denial.retry_after` later.
    queried_at: Timestamp,
    /// The store's own time of the decision.
    at: Timestamp,
}

/// The moment before a query to the store: a denial is cached only if nothing was invalidated since.
#[derive(Clone, Copy, Debug)]
pub struct QueryStart {
    version: Version,
    at: Timestamp,
}

impl DenialCache {
    /// `clock` need not agree with the store's clock.
    #[must_use]
    pub fn new(limit_changes: Arc<LimitChangeFeed>, clock: Arc<dyn Clock>) -> Arc<Self> {
        let denials = Arc::new(Self {
            cache: BoundedCache::new(SHARDS, SHARD_MAX),
            limit_changes: Arc::clone(&limit_changes),
            clock,
        });
        let listener = Arc::downgrade(&denials);
        limit_changes.subscribe(move |change| {
            if let Some(denials) = listener.upgrade() {
                denials.invalidate(change);
            }
        });
        denials
    }

    /// Returns the cached denial if the user is certainly over the limit.
    pub fn get(&self, user: &UserId) -> Option<SendOutcome> {
        if self.cache.is_empty() || !self.limit_changes.is_current() {
            return None;
        }
        let now = self.clock.now();
        let CachedDenial { limits, denial, queried_at, at } =
            self.cache.get(user, |cached| cached.is_current(now))?;
        let passed = now.since(queried_at);
        let denial = Denial { retry_after: denial.retry_after.saturating_sub(passed), ..denial };
        Some(SendOutcome::Denied { limits, denial, at: at.plus(passed) })
    }

    /// Call this before querying the store.
    pub fn begin_query(&self) -> QueryStart {
        QueryStart { version: self.cache.version(), at: self.clock.now() }
    }

    /// Caches the store's outcome if it is a denial.
    pub fn record(&self, query: QueryStart, user: &UserId, outcome: &SendOutcome) {
        let SendOutcome::Denied { limits, denial, at } = *outcome else { return };
        let (cached, now) = (CachedDenial { limits, denial, queried_at: query.at, at }, self.clock.now());
        self.cache.insert(user.clone(), cached, query.version, |cached| cached.is_current(now));
    }

    pub fn invalidate(&self, change: &LimitChange) {
        match change {
            LimitChange::User(user) => self.cache.invalidate(user),
            LimitChange::AllUsers => self.cache.invalidate_all(),
        }
    }
}

impl CachedDenial {
    fn is_current(&self, now: Timestamp) -> bool {
        now.since(self.queried_at) < self.denial.retry_after
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use weir_core::ManualClock;
    use weir_core::verdict::DenialReason;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn user(name: &str) -> UserId {
        UserId::parse(name).unwrap()
    }

    fn denied(retry_after: Duration) -> SendOutcome {
        SendOutcome::Denied {
            limits: QuotaLimits::new(1, 1).unwrap(),
            denial: Denial { reason: DenialReason::QuotaExceeded, retry_after },
            at: Timestamp::from_seconds(7_000),
        }
    }

    fn denials() -> (Arc<DenialCache>, Arc<LimitChangeFeed>, ManualClock) {
        let clock = ManualClock::at(Timestamp::from_seconds(100));
        let limit_changes = Arc::new(LimitChangeFeed::single_process());
        (DenialCache::new(Arc::clone(&limit_changes), Arc::new(clock.clone())), limit_changes, clock)
    }

    #[test]
    fn a_cached_denial_counts_down_until_its_window_ends() {
        let (denials, _limit_changes, clock) = denials();
        let query = denials.begin_query();
        clock.advance(Duration::from_secs(1));
        denials.record(query, &user("a"), &denied(MINUTE));
        clock.advance(Duration::from_secs(9));
        let Some(SendOutcome::Denied { denial, at, .. }) = denials.get(&user("a")) else { panic!("denied") };
        assert_eq!(
            denial.retry_after,
            Duration::from_secs(50),
            "counted from the query, not from the answer"
        );
        assert_eq!(at, Timestamp::from_seconds(7_010));
        assert!(denials.get(&user("b")).is_none());
        clock.advance(Duration::from_secs(50));
        assert!(denials.get(&user("a")).is_none(), "the window has ended");
        assert!(denials.cache.is_empty());
    }

    #[test]
    fn new_limits_invalidate_a_denial_and_one_decided_before_them_is_not_cached() {
        let (denials, limit_changes, _clock) = denials();
        denials.record(denials.begin_query(), &user("a"), &denied(MINUTE));
        let late = denials.begin_query();
        limit_changes.publish(&LimitChange::User(user("a")));
        assert!(denials.get(&user("a")).is_none());
        denials.record(late, &user("a"), &denied(MINUTE));
        assert!(denials.get(&user("a")).is_none());
        denials.record(denials.begin_query(), &user("a"), &denied(MINUTE));
        assert!(denials.get(&user("a")).is_some());
        limit_changes.publish(&LimitChange::AllUsers);
        assert!(denials.get(&user("a")).is_none());
    }

    #[test]
    fn nothing_is_refused_from_memory_while_the_feed_is_not_current() {
        let limit_changes = Arc::new(LimitChangeFeed::new());
        let denials =
            DenialCache::new(Arc::clone(&limit_changes), Arc::new(ManualClock::at(Timestamp::EPOCH)));
        denials.record(denials.begin_query(), &user("a"), &denied(MINUTE));
        limit_changes.mark_current(std::time::Instant::now() + MINUTE, 0);
        assert!(denials.get(&user("a")).is_some());
        let silent = Arc::new(LimitChangeFeed::silent_for(crate::limit_changes::CURRENT_FOR));
        let silent = DenialCache::new(silent, Arc::new(ManualClock::at(Timestamp::EPOCH)));
        silent.record(silent.begin_query(), &user("a"), &denied(MINUTE));
        assert!(silent.get(&user("a")).is_none());
    }

    #[test]
    fn the_cache_is_bounded() {
        let (denials, _limit_changes, _clock) = denials();
        for n in 0..SHARDS * SHARD_MAX * 2 {
            denials.record(denials.begin_query(), &user(&n.to_string()), &denied(MINUTE));
        }
        assert!(denials.cache.len() <= SHARDS * SHARD_MAX);
    }
}
