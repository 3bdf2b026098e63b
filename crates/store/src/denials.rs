//! Hot keys: users known to be over their limit are refused from memory, without a round trip.
//!
//! Only what the store said is remembered, and only until the window it spoke of ends. New limits end it at once on
//! the server that takes them, and on the others as soon as the [`Feed`] tells; while that is not current, nothing is
//! refused from memory. A denial that was decided before a change and arrives after it is not remembered.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weir_core::quota::Limits;
use weir_core::{Clock, Denial, Timestamp, UserId};

use crate::feed::{Change, Feed};
use crate::quota::SendOutcome;

const SHARDS: usize = 16;
/// Users remembered in one shard. When there are more, those whose windows have ended are forgotten, or else all.
const SHARD_MAX: usize = 8_192;

/// Users known to be over their limit.
#[derive(Debug)]
pub struct Denials {
    shards: [Mutex<HashMap<UserId, Known>>; SHARDS],
    hasher: RandomState,
    /// How many are remembered: nobody is looked up while this is 0.
    count: AtomicUsize,
    /// Changes so far.
    changes: AtomicU64,
    feed: Arc<Feed>,
    clock: Arc<dyn Clock>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    limits: Limits,
    denial: Denial,
    /// When the store was asked, on our clock: the window ends no earlier than `denial.retry_after` later.
    asked_at: Timestamp,
    /// The store's own time of the decision.
    at: Timestamp,
}

/// The state of the world when a question was asked.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    changes: u64,
    at: Timestamp,
}

impl Denials {
    /// Remembers nothing yet. Time is told by `clock`, which need not agree with the store's.
    #[must_use]
    pub fn new(feed: Arc<Feed>, clock: Arc<dyn Clock>) -> Arc<Self> {
        let denials = Arc::new(Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::new(),
            count: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
            feed: Arc::clone(&feed),
            clock,
        });
        let listener = Arc::downgrade(&denials);
        feed.listen(move |change| {
            if let Some(denials) = listener.upgrade() {
                denials.forget(change);
            }
        });
        denials
    }

    /// The answer to a send of a user who is over the limit for certain.
    pub fn of(&self, user: &UserId) -> Option<SendOutcome> {
        if self.count.load(Ordering::Relaxed) == 0 || !self.feed.is_current() {
            return None;
        }
        let mut shard = self.shard(user);
        let Known { limits, denial, asked_at, at } = *shard.get(user)?;
        let passed = self.clock.now().since(asked_at);
        match denial.retry_after.checked_sub(passed).filter(|left| !left.is_zero()) {
            Some(left) => {
                let denial = Denial { retry_after: left, ..denial };
                Some(SendOutcome::Denied { limits, denial, at: at.plus(passed) })
            }
            None => {
                shard.remove(user);
                self.count.fetch_sub(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// To be called before the store is asked.
    pub fn asking(&self) -> Asked {
        Asked { changes: self.changes.load(Ordering::Acquire), at: self.clock.now() }
    }

    /// Remembers what the store said, when it was a denial.
    pub fn learn(&self, asked: Asked, user: &UserId, outcome: &SendOutcome) {
        let SendOutcome::Denied { limits, denial, at } = *outcome else { return };
        let mut shard = self.shard(user);
        // Under the shard's lock: a change after this look waits for the lock, and then forgets what is put in here.
        if self.changes.load(Ordering::Acquire) != asked.changes {
            return;
        }
        if shard.len() >= SHARD_MAX {
            self.make_room(&mut shard);
        }
        if shard.insert(user.clone(), Known { limits, denial, asked_at: asked.at, at }).is_none() {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Forgets what a change makes doubtful.
    pub fn forget(&self, change: &Change) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        match change {
            Change::User(user) => {
                if self.shard(user).remove(user).is_some() {
                    self.count.fetch_sub(1, Ordering::Relaxed);
                }
            }
            Change::Anybody => {
                for shard in &self.shards {
                    let mut shard = lock(shard);
                    self.count.fetch_sub(shard.len(), Ordering::Relaxed);
                    shard.clear();
                }
            }
        }
    }

    fn make_room(&self, shard: &mut HashMap<UserId, Known>) {
        let (before, now) = (shard.len(), self.clock.now());
        shard.retain(|_, known| now.since(known.asked_at) < known.denial.retry_after);
        if shard.len() >= SHARD_MAX {
            shard.clear();
        }
        self.count.fetch_sub(before - shard.len(), Ordering::Relaxed);
    }

    fn shard(&self, user: &UserId) -> MutexGuard<'_, HashMap<UserId, Known>> {
        // The top bits: the map inside uses the low ones.
        let hash = self.hasher.hash_one(user) >> 48;
        lock(&self.shards[usize::try_from(hash).unwrap_or(0) % SHARDS])
    }
}

fn lock(shard: &Mutex<HashMap<UserId, Known>>) -> MutexGuard<'_, HashMap<UserId, Known>> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use weir_core::ManualClock;
    use weir_core::verdict::Reason;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn user(name: &str) -> UserId {
        UserId::parse(name).unwrap()
    }

    fn denied(retry_after: Duration) -> SendOutcome {
        SendOutcome::Denied {
            limits: Limits::new(1, 1).unwrap(),
            denial: Denial { reason: Reason::QuotaExceeded, retry_after },
            at: Timestamp::from_seconds(7_000),
        }
    }

    fn denials() -> (Arc<Denials>, Arc<Feed>, ManualClock) {
        let clock = ManualClock::at(Timestamp::from_seconds(100));
        let feed = Arc::new(Feed::alone());
        (Denials::new(Arc::clone(&feed), Arc::new(clock.clone())), feed, clock)
    }

    #[test]
    fn a_denial_is_given_again_with_less_to_wait_until_its_window_ends() {
        let (denials, _feed, clock) = denials();
        let asked = denials.asking();
        clock.advance(Duration::from_secs(1));
        denials.learn(asked, &user("a"), &denied(MINUTE));
        clock.advance(Duration::from_secs(9));
        let Some(SendOutcome::Denied { denial, at, .. }) = denials.of(&user("a")) else { panic!("denied") };
        assert_eq!(denial.retry_after, Duration::from_secs(50), "since it was asked, not since it was told");
        assert_eq!(at, Timestamp::from_seconds(7_010));
        assert!(denials.of(&user("b")).is_none());
        clock.advance(Duration::from_secs(50));
        assert!(denials.of(&user("a")).is_none(), "the window has ended");
        assert_eq!(denials.count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn new_limits_end_a_denial_and_one_that_arrives_after_them_is_not_believed() {
        let (denials, feed, _clock) = denials();
        denials.learn(denials.asking(), &user("a"), &denied(MINUTE));
        let late = denials.asking();
        feed.tell(&Change::User(user("a")));
        assert!(denials.of(&user("a")).is_none());
        denials.learn(late, &user("a"), &denied(MINUTE));
        assert!(denials.of(&user("a")).is_none());
        denials.learn(denials.asking(), &user("a"), &denied(MINUTE));
        assert!(denials.of(&user("a")).is_some());
        feed.tell(&Change::Anybody);
        assert!(denials.of(&user("a")).is_none());
    }

    #[test]
    fn nothing_is_refused_from_memory_while_changes_may_go_unheard() {
        let feed = Arc::new(Feed::new());
        let denials = Denials::new(Arc::clone(&feed), Arc::new(ManualClock::at(Timestamp::EPOCH)));
        denials.learn(denials.asking(), &user("a"), &denied(MINUTE));
        feed.heard(std::time::Instant::now() + MINUTE, 0);
        assert!(denials.of(&user("a")).is_some());
        let silent = Arc::new(Feed::silent_for(crate::feed::CURRENT_FOR));
        let silent = Denials::new(silent, Arc::new(ManualClock::at(Timestamp::EPOCH)));
        silent.learn(silent.asking(), &user("a"), &denied(MINUTE));
        assert!(silent.of(&user("a")).is_none());
    }

    #[test]
    fn memory_is_bounded() {
        let (denials, _feed, _clock) = denials();
        for n in 0..SHARDS * SHARD_MAX * 2 {
            denials.learn(denials.asking(), &user(&n.to_string()), &denied(MINUTE));
        }
        assert!(denials.count.load(Ordering::Relaxed) <= SHARDS * SHARD_MAX);
        let held: usize = denials.shards.iter().map(|shard| lock(shard).len()).sum();
        assert_eq!(held, denials.count.load(Ordering::Relaxed));
    }
}
