//! Who has subscribed to what, remembered: every AI call asks, and plans rarely change.
//!
//! What is remembered holds until it is changed: by this server, which forgets it at once, or by another, of which
//! `tier/service/definition_sync.rs` hears. What was read before a change and comes after it is not remembered.

use std::sync::Arc;
use std::time::Duration;

use weir_core::UserId;
use weir_core::tier::Plan;
use weir_store::Result;
use weir_store::bounded_cache::{BoundedCache, Version};
use weir_store::tier::{Subscription, TierStore};

use crate::engines::within;
use crate::telemetry::log_throttle::LogThrottle;

const SHARDS: usize = 64;
/// Users in one shard.
const SHARD_MAX: usize = 16_384;
/// How long a call is held up by a store that does not answer.
const PATIENCE: Duration = Duration::from_millis(500);

pub(super) struct Subscriptions {
    store: Arc<dyn TierStore>,
    plans: BoundedCache<Box<str>, Plan>,
}

impl Subscriptions {
    pub(super) fn new(store: Arc<dyn TierStore>) -> Self {
        Self { store, plans: BoundedCache::new(SHARDS, SHARD_MAX) }
    }

    /// The plan of a user. Whoever has none is on the free plan, and so is, for the moment, whoever is not remembered
    /// while the store cannot say.
    pub(super) async fn plan(&self, user: &str) -> Plan {
        if let Some(plan) = self.plans.get(user, |_| true) {
            return plan;
        }
        // In memory of its own: most are remembered.
        Box::pin(self.ask(user, self.plans.version())).await
    }

    /// The plan of a user who is not remembered.
    async fn ask(&self, user: &str, version: Version) -> Plan {
        // A name that no subscription can have.
        let Ok(id) = UserId::parse(user) else { return Plan::Free };
        match within(PATIENCE, self.store.subscription(&id)).await {
            Ok(found) => {
                let plan = found.map_or(Plan::Free, |subscription| subscription.plan);
                self.plans.insert(user.into(), plan, version, |_| true);
                plan
            }
            Err(error) => {
                static OUTAGE: LogThrottle = LogThrottle::new();
                if let Some(also) = OUTAGE.permit() {
                    tracing::warn!(error = %error.with_causes(), also, "a plan could not be read; FREE for now");
                }
                Plan::Free
            }
        }
    }

    /// As the store has it.
    pub(super) async fn read(&self, user: &UserId, timeout: Duration) -> Result<Option<Subscription>> {
        within(timeout, self.store.subscription(user)).await
    }

    pub(super) async fn put(&self, user: &UserId, plan: Plan, timeout: Duration) -> Result<Subscription> {
        let put = within(timeout, self.store.put_subscription(user, plan)).await;
        // Also when it failed: it may have been done all the same.
        self.plans.invalidate(user.as_str());
        put
    }

    pub(super) async fn delete(&self, user: &UserId, timeout: Duration) -> Result<bool> {
        let gone = within(timeout, self.store.delete_subscription(user)).await;
        self.plans.invalidate(user.as_str());
        gone
    }

    pub(super) fn forget(&self, user: &str) {
        self.plans.invalidate(user);
    }

    pub(super) fn forget_all(&self) {
        self.plans.invalidate_all();
    }
}
