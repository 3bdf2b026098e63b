//! Who has subscribed to what, remembered: every AI call asks, and plans rarely change.
//!
//! What is remembered holds until it is changed: by this server, which forgets it at once, or by another, of which
//! `service/tier/news.rs` hears. What was read before a change and comes after it is not remembered.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weir_core::UserId;
use weir_core::tier::Plan;
use weir_store::Result;
use weir_store::tier::{Subscription, TierStore};

use super::super::within;
use crate::telemetry::quiet::Quiet;

const SHARDS: usize = 64;
/// Users remembered in a shard; when there are more, all of them are forgotten.
const SHARD_MAX: usize = 16_384;
/// How long a call is held up by a store that does not answer.
const PATIENCE: Duration = Duration::from_millis(500);

pub(super) struct Subscriptions {
    store: Arc<dyn TierStore>,
    hasher: RandomState,
    shards: Box<[Mutex<Shard>]>,
}

#[derive(Default)]
struct Shard {
    plans: HashMap<Box<str>, Plan>,
    /// How often something of it was forgotten.
    forgotten: u64,
}

impl Subscriptions {
    pub(super) fn new(store: Arc<dyn TierStore>) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { store, hasher: RandomState::new(), shards }
    }

    /// The plan of a user. Whoever has none is on the free plan, and so is, for the moment, whoever is not remembered
    /// while the store cannot say.
    pub(super) async fn plan(&self, user: &str) -> Plan {
        let forgotten = {
            let shard = self.shard(user);
            if let Some(plan) = shard.plans.get(user) {
                return *plan;
            }
            shard.forgotten
        };
        // In memory of its own: most are remembered.
        Box::pin(self.ask(user, forgotten)).await
    }

    /// The plan of a user who is not remembered.
    async fn ask(&self, user: &str, forgotten: u64) -> Plan {
        // A name that no subscription can have.
        let Ok(id) = UserId::parse(user) else { return Plan::Free };
        match within(PATIENCE, self.store.subscription(&id)).await {
            Ok(found) => {
                let plan = found.map_or(Plan::Free, |subscription| subscription.plan);
                self.remember(user, plan, forgotten);
                plan
            }
            Err(error) => {
                static OUTAGE: Quiet = Quiet::new();
                if let Some(also) = OUTAGE.speak() {
                    tracing::warn!(error = %error.with_causes(), also, "a plan could not be read; FREE for now");
                }
                Plan::Free
            }
        }
    }

    fn remember(&self, user: &str, plan: Plan, forgotten: u64) {
        let mut shard = self.shard(user);
        if shard.forgotten != forgotten {
            return;
        }
        if shard.plans.len() >= SHARD_MAX {
            shard.plans = HashMap::new();
        }
        shard.plans.insert(user.into(), plan);
    }

    /// As the store has it.
    pub(super) async fn read(&self, user: &UserId, timeout: Duration) -> Result<Option<Subscription>> {
        within(timeout, self.store.subscription(user)).await
    }

    pub(super) async fn put(&self, user: &UserId, plan: Plan, timeout: Duration) -> Result<Subscription> {
        let put = within(timeout, self.store.put_subscription(user, plan)).await;
        // Also when it failed: it may have been done all the same.
        self.forget(user.as_str());
        put
    }

    pub(super) async fn delete(&self, user: &UserId, timeout: Duration) -> Result<bool> {
        let gone = within(timeout, self.store.delete_subscription(user)).await;
        self.forget(user.as_str());
        gone
    }

    pub(super) fn forget(&self, user: &str) {
        let mut shard = self.shard(user);
        shard.forgotten += 1;
        shard.plans.remove(user);
    }

    pub(super) fn forget_all(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.forgotten += 1;
            shard.plans = HashMap::new();
        }
    }

    fn shard(&self, user: &str) -> MutexGuard<'_, Shard> {
        let at = usize::try_from(self.hasher.hash_one(user) % SHARDS as u64).unwrap_or(0);
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_more_plans_are_remembered_than_the_bound() {
        let data = tempfile::tempdir().unwrap();
        let store = weir_store_sqlite::Sqlite::open(data.path()).unwrap();
        let subscriptions = Subscriptions::new(Arc::new(store));
        for n in 0..SHARDS * SHARD_MAX + SHARD_MAX {
            subscriptions.remember(&n.to_string(), Plan::Free, 0);
        }
        for shard in &subscriptions.shards {
            assert!(shard.lock().unwrap().plans.len() <= SHARD_MAX);
        }
    }
}
