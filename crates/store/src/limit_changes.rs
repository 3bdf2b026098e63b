//! The feed of limit changes on other servers, and whether this server has received all of them.
//!
//! Code that caches something about a user (a denial, a hash in Redis) subscribes here and invalidates it when the user's
//! limits change. While the feed is not current, cached values must not be used.
//!
//! On Postgres `weir-store-postgres/src/listener.rs` publishes to it what other servers notify; on SQLite there are no other
//! servers. Subscribers: the denial cache (`denial_cache.rs`) and the invalidation of hashes (`weir-store-redis/src/quota.rs`).

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use weir_core::UserId;

/// If the store has not answered for this long, cached values are not used. So new limits apply on every server within this
/// time.
pub const CURRENT_FOR: Duration = Duration::from_millis(900);

/// Cached values that are out of date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitChange {
    /// The user's limits were changed or removed.
    User(UserId),
    /// Any user's limits may have changed: the feed was interrupted.
    AllUsers,
}

type Listener = Box<dyn Fn(&LimitChange) + Send + Sync>;

/// Distributes changes of limits to subscribers in this process and knows how current they are.
pub struct LimitChangeFeed {
    started: Instant,
    /// When the store last answered, in microseconds after `started`. Negative: the feed is always current.
    synced_us: AtomicI64,
    /// For how long an answer keeps the feed current.
    current_for_us: AtomicI64,
    /// The number under which the cache in front of the store is valid.
    epoch: AtomicU64,
    listeners: RwLock<Vec<Listener>>,
}

impl fmt::Debug for LimitChangeFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitChangeFeed").field("is_current", &self.is_current()).finish_non_exhaustive()
    }
}

impl LimitChangeFeed {
    /// Creates a feed that is kept current with [`LimitChangeFeed::mark_current`].
    #[must_use]
    pub fn new() -> Self {
        Self::with(0)
    }

    /// Creates the feed of a store that only this process writes to. It is always current.
    #[must_use]
    pub fn single_process() -> Self {
        Self::with(-1)
    }

    fn with(synced_us: i64) -> Self {
        Self {
            started: Instant::now(),
            synced_us: AtomicI64::new(synced_us),
            current_for_us: AtomicI64::new(micros(CURRENT_FOR)),
            epoch: AtomicU64::new(0),
            listeners: RwLock::default(),
        }
    }

    /// Creates a feed that has not been marked current for this long.
    #[cfg(test)]
    pub(crate) fn silent_for(silence: Duration) -> Self {
        let started = Instant::now().checked_sub(silence).expect("the machine is up for longer");
        Self { started, ..Self::new() }
    }

    /// Calls `listener` for every change from now on. It must not block.
    pub fn subscribe(&self, listener: impl Fn(&LimitChange) + Send + Sync + 'static) {
        self.listeners.write().push(Box::new(listener));
    }

    /// Whether every change up to [`CURRENT_FOR`] ago has been received.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let synced_us = self.synced_us.load(Ordering::Acquire);
        synced_us < 0 || self.now_us().saturating_sub(synced_us) < self.current_for_us.load(Ordering::Relaxed)
    }

    /// Replaces [`CURRENT_FOR`] for tests of cached values: on a busy machine the feed's updates may be late.
    pub fn set_current_for(&self, current_for: Duration) {
        self.current_for_us.store(micros(current_for), Ordering::Relaxed);
    }

    /// Whether every change up to `at` has been received.
    #[must_use]
    pub fn is_current_as_of(&self, at: Instant) -> bool {
        let synced_us = self.synced_us.load(Ordering::Acquire);
        synced_us < 0 || synced_us >= micros(at.saturating_duration_since(self.started))
    }

    /// Cache entries that were written under an earlier epoch are invalid.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    pub fn publish(&self, change: &LimitChange) {
        for listener in &*self.listeners.read() {
            listener(change);
        }
    }

    /// Records that the store answered a query sent at `asked_at`, and that every change up to then was published.
    pub fn mark_current(&self, asked_at: Instant, epoch: u64) {
        let before = self.epoch.fetch_max(epoch, Ordering::AcqRel);
        // Values that were derived from the invalidated cache are invalid, too.
        if before != 0 && before < epoch {
            self.publish(&LimitChange::AllUsers);
        }
        self.synced_us.fetch_max(micros(asked_at.saturating_duration_since(self.started)), Ordering::AcqRel);
    }

    fn now_us(&self) -> i64 {
        micros(self.started.elapsed())
    }
}

impl Default for LimitChangeFeed {
    fn default() -> Self {
        Self::new()
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_feed_is_current_after_the_store_answered() {
        let limit_changes = LimitChangeFeed::new();
        limit_changes.mark_current(limit_changes.started + Duration::from_secs(60), 3);
        assert!(limit_changes.is_current());
        assert_eq!(limit_changes.epoch(), 3);
        limit_changes.mark_current(Instant::now(), 2);
        assert_eq!(limit_changes.epoch(), 3, "a late answer does not lower the epoch");
        assert!(LimitChangeFeed::single_process().is_current());
    }

    #[test]
    fn a_feed_that_was_silent_for_too_long_is_not_current() {
        assert!(!LimitChangeFeed::silent_for(CURRENT_FOR).is_current());
    }

    #[test]
    fn every_subscriber_receives_a_change() {
        let (limit_changes, calls) = (LimitChangeFeed::new(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..2 {
            let calls = Arc::clone(&calls);
            limit_changes.subscribe(move |_| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
        }
        limit_changes.publish(&LimitChange::AllUsers);
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }
}
