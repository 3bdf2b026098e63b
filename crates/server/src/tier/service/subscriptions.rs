//! Subscriptions, cached: every AI call needs one, and they rarely change.
//!
//! An entry is valid until the subscription changes: on this server, which invalidates it at once, or on another one, which
//! `tier/service/definition_sync.rs` notices. A plan that was read before a change is not cached after it.

use std::sync::Arc;
use std::time::Duration;

use weir_core::UserId;
use weir_core::tier::Plan;
use weir_store::Result;
use weir_store::bounded_cache::{BoundedCache, Version};
use weir_store::tier::{Subscription, TierStore};

use crate::engines::within;
use crate::tier::events::PlanUnavailable;

const SHARDS: usize = 64;
/// Cached users per shard.
const SHARD_MAX: usize = 16_384;
/// How long a call waits for a store that does not answer.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

pub(super) struct Subscriptions {
    store: Arc<dyn TierStore>,
    plans: BoundedCache<Box<str>, Plan>,
}

impl Subscriptions {
    pub(super) fn new(store: Arc<dyn TierStore>) -> Self {
        Self { store, plans: BoundedCache::new(SHARDS, SHARD_MAX) }
    }

    /// The plan of a user: the free plan without a subscription, or while the store does not answer and the user is not
    /// cached.
    pub(super) async fn plan(&self, user: &str) -> Plan {
        if let Some(plan) = self.plans.get(user, |_| true) {
            return plan;
        }
        // Boxed to keep this future small: most users are cached.
        Box::pin(self.read_plan(user, self.plans.version())).await
    }

    /// Reads the plan of a user who is not cached.
    async fn read_plan(&self, user: &str, version: Version) -> Plan {
        // No subscription can have an invalid name.
        let Ok(id) = UserId::parse(user) else { return Plan::Free };
        match within(READ_TIMEOUT, self.store.subscription(&id)).await {
            Ok(found) => {
                let plan = found.map_or(Plan::Free, |subscription| subscription.plan);
                self.plans.insert(user.into(), plan, version, |_| true);
                plan
            }
            Err(error) => {
                PlanUnavailable { error: &error }.emit();
                Plan::Free
            }
        }
    }

    /// Reads the store, not the cache.
    pub(super) async fn read(&self, user: &UserId, timeout: Duration) -> Result<Option<Subscription>> {
        within(timeout, self.store.subscription(user)).await
    }

    pub(super) async fn put(&self, user: &UserId, plan: Plan, timeout: Duration) -> Result<Subscription> {
        let put = within(timeout, self.store.put_subscription(user, plan)).await;
        // Also after a failure: the store may have made the change all the same.
        self.plans.invalidate(user.as_str());
        put
    }

    pub(super) async fn delete(&self, user: &UserId, timeout: Duration) -> Result<bool> {
        let deleted = within(timeout, self.store.delete_subscription(user)).await;
        self.plans.invalidate(user.as_str());
        deleted
    }

    pub(super) fn invalidate(&self, user: &str) {
        self.plans.invalidate(user);
    }

    pub(super) fn invalidate_all(&self) {
        self.plans.invalidate_all();
    }
}
