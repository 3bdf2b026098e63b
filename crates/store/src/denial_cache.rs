//! Hot keys: users known to be over their limit are refused from memory, without a round trip.
//!
//! Only what the store said is remembered, and only until the window it spoke of ends. New limits end it at once on
//! the server that takes them, and on the others as soon as the [`LimitChangeFeed`] tells; while that is not current, nothing is
//! refused from memory. A denial that was decided before a change and arrives after it is not remembered.

use std::sync::Arc;

use weir_core::quota::QuotaLimits;
use weir_core::{Clock, Denial, Timestamp, UserId};

use crate::bounded_cache::{BoundedCache, Version};
use crate::limit_changes::{LimitChange, LimitChangeFeed};
use crate::quota::SendOutcome;

const SHARDS: usize = 16;
/// Users in one shard.
const SHARD_MAX: usize = 8_192;

/// Users known to be over their limit.
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
    /// When the store was asked, on our clock: the window ends no earlier than `denial.retry_after` later.
    asked_at: Timestamp,
    /// The store's own time of the decision.
    at: Timestamp,
}

/// The state of the world when a question was asked.
#[derive(Clone, Copy, Debug)]
pub struct QueryStart {
    version: Version,
    at: Timestamp,
}

impl DenialCache {
    /// Remembers nothing yet. Time is told by `clock`, which need not agree with the store's.
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

    /// The answer to a send of a user who is over the limit for certain.
    pub fn get(&self, user: &UserId) -> Option<SendOutcome> {
        if self.cache.is_empty() || !self.limit_changes.is_current() {
            return None;
        }
        let now = self.clock.now();
        let CachedDenial { limits, denial, asked_at, at } =
            self.cache.get(user, |known| known.is_current(now))?;
        let passed = now.since(asked_at);
        let denial = Denial { retry_after: denial.retry_after.saturating_sub(passed), ..denial };
        Some(SendOutcome::Denied { limits, denial, at: at.plus(passed) })
    }

    /// To be called before the store is asked.
    pub fn begin_query(&self) -> QueryStart {
        QueryStart { version: self.cache.version(), at: self.clock.now() }
    }

    /// Remembers what the store said, when it was a denial.
    pub fn record(&self, asked: QueryStart, user: &UserId, outcome: &SendOutcome) {
        let SendOutcome::Denied { limits, denial, at } = *outcome else { return };
        let (known, now) = (CachedDenial { limits, denial, asked_at: asked.at, at }, self.clock.now());
        self.cache.insert(user.clone(), known, asked.version, |known| known.is_current(now));
    }

    /// Forgets what a change makes doubtful.
    pub fn invalidate(&self, change: &LimitChange) {
        match change {
            LimitChange::User(user) => self.cache.invalidate(user),
            LimitChange::AllUsers => self.cache.invalidate_all(),
        }
    }
}

impl CachedDenial {
    fn is_current(&self, now: Timestamp) -> bool {
        now.since(self.asked_at) < self.denial.retry_after
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
    fn a_denial_is_given_again_with_less_to_wait_until_its_window_ends() {
        let (denials, _feed, clock) = denials();
        let asked = denials.begin_query();
        clock.advance(Duration::from_secs(1));
        denials.record(asked, &user("a"), &denied(MINUTE));
        clock.advance(Duration::from_secs(9));
        let Some(SendOutcome::Denied { denial, at, .. }) = denials.get(&user("a")) else { panic!("denied") };
        assert_eq!(denial.retry_after, Duration::from_secs(50), "since it was asked, not since it was told");
        assert_eq!(at, Timestamp::from_seconds(7_010));
        assert!(denials.get(&user("b")).is_none());
        clock.advance(Duration::from_secs(50));
        assert!(denials.get(&user("a")).is_none(), "the window has ended");
        assert!(denials.cache.is_empty());
    }

    #[test]
    fn new_limits_end_a_denial_and_one_that_arrives_after_them_is_not_believed() {
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
    fn nothing_is_refused_from_memory_while_changes_may_go_unheard() {
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
    fn memory_is_bounded() {
        let (denials, _feed, _clock) = denials();
        for n in 0..SHARDS * SHARD_MAX * 2 {
            denials.record(denials.begin_query(), &user(&n.to_string()), &denied(MINUTE));
        }
        assert!(denials.cache.len() <= SHARDS * SHARD_MAX);
    }
}
