//! What a server hears of new limits that other servers took, and how sure it is to have heard everything.
//!
//! Whoever remembers something of a user (that it is over its limit, that its hash is in a cache) listens here and
//! forgets it when the user's limits change. While the feed is not current, nothing remembered may be used.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use weir_core::UserId;

/// A feed that was silent for longer is not current. New limits hold on every server within this time.
pub const CURRENT_FOR: Duration = Duration::from_millis(900);

/// Something a server may remember is no longer so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitChange {
    /// A user has new limits, or none.
    User(UserId),
    /// Anybody may have: the feed was interrupted.
    AllUsers,
}

type Listener = Box<dyn Fn(&LimitChange) + Send + Sync>;

/// What a server hears of changes on others.
pub struct LimitChangeFeed {
    started: Instant,
    /// When the store last answered, in microseconds after `started`; always current when negative.
    heard_us: AtomicI64,
    /// How long an answer holds.
    current_for_us: AtomicI64,
    /// How often the cache in front of the store was distrusted.
    epoch: AtomicU64,
    listeners: RwLock<Vec<Listener>>,
}

impl fmt::Debug for LimitChangeFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitChangeFeed").field("is_current", &self.is_current()).finish_non_exhaustive()
    }
}

impl LimitChangeFeed {
    /// A feed that somebody keeps current with [`LimitChangeFeed::heard`].
    #[must_use]
    pub fn new() -> Self {
        Self::with(0)
    }

    /// The feed of a store that only this process writes to: there is nothing to hear.
    #[must_use]
    pub fn single_process() -> Self {
        Self::with(-1)
    }

    fn with(heard_us: i64) -> Self {
        Self {
            started: Instant::now(),
            heard_us: AtomicI64::new(heard_us),
            current_for_us: AtomicI64::new(micros(CURRENT_FOR)),
            epoch: AtomicU64::new(0),
            listeners: RwLock::default(),
        }
    }

    /// A feed that has heard nothing for so long.
    #[cfg(test)]
    pub(crate) fn silent_for(silence: Duration) -> Self {
        let started = Instant::now().checked_sub(silence).expect("the machine is up for longer");
        Self { started, ..Self::new() }
    }

    /// Calls `listener` for every change from now on. It must not block.
    pub fn subscribe(&self, listener: impl Fn(&LimitChange) + Send + Sync + 'static) {
        self.listeners.write().push(Box::new(listener));
    }

    /// Whether every change up to [`CURRENT_FOR`] ago has been heard.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let heard_us = self.heard_us.load(Ordering::Acquire);
        heard_us < 0 || self.now_us().saturating_sub(heard_us) < self.current_for_us.load(Ordering::Relaxed)
    }

    /// Lets an answer hold for so long instead of [`CURRENT_FOR`]. For tests of what is remembered while the feed is
    /// current: a busy machine may keep it waiting.
    pub fn set_current_for(&self, current_for: Duration) {
        self.current_for_us.store(micros(current_for), Ordering::Relaxed);
    }

    /// Whether every change up to `at` has been heard.
    #[must_use]
    pub fn is_current_as_of(&self, at: Instant) -> bool {
        let heard_us = self.heard_us.load(Ordering::Acquire);
        heard_us < 0 || heard_us >= micros(at.saturating_duration_since(self.started))
    }

    /// Which memory of the cache is trusted: what was written under an earlier number is not.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Tells the listeners.
    pub fn publish(&self, change: &LimitChange) {
        for listener in &*self.listeners.read() {
            listener(change);
        }
    }

    /// Takes note that the store, asked at `asked_at`, was reached and has told everything up to then.
    pub fn mark_current(&self, asked_at: Instant, epoch: u64) {
        let before = self.epoch.fetch_max(epoch, Ordering::AcqRel);
        // What was learnt from a cache that is distrusted now is not to be believed either.
        if before != 0 && before < epoch {
            self.publish(&LimitChange::AllUsers);
        }
        self.heard_us.fetch_max(micros(asked_at.saturating_duration_since(self.started)), Ordering::AcqRel);
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
    fn a_feed_is_current_for_as_long_as_its_store_was_heard() {
        let limit_changes = LimitChangeFeed::new();
        limit_changes.mark_current(limit_changes.started + Duration::from_secs(60), 3);
        assert!(limit_changes.is_current());
        assert_eq!(limit_changes.epoch(), 3);
        limit_changes.mark_current(Instant::now(), 2);
        assert_eq!(limit_changes.epoch(), 3, "an answer that comes late takes nothing back");
        assert!(LimitChangeFeed::single_process().is_current());
    }

    #[test]
    fn a_feed_that_was_silent_for_too_long_is_not_current() {
        assert!(!LimitChangeFeed::silent_for(CURRENT_FOR).is_current());
    }

    #[test]
    fn every_listener_hears_of_a_change() {
        let (limit_changes, heard) = (LimitChangeFeed::new(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..2 {
            let heard = Arc::clone(&heard);
            limit_changes.subscribe(move |_| {
                heard.fetch_add(1, Ordering::Relaxed);
            });
        }
        limit_changes.publish(&LimitChange::AllUsers);
        assert_eq!(heard.load(Ordering::Relaxed), 2);
    }
}
