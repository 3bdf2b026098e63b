//! The rollout switches: every submission reads them, and operators rarely change them.

use std::sync::Arc;
use std::time::Duration;

use weir_store::Result;
use weir_store::request::{RequestStore, Rollout, RolloutChange};

use super::cached::CachedRead;

/// The switches in the store, or those of the settings until an operator changes them.
pub struct RolloutSwitches {
    store: Arc<dyn RequestStore>,
    default: Rollout,
    cached: CachedRead<Rollout>,
}

impl RolloutSwitches {
    pub(super) fn new(store: Arc<dyn RequestStore>, default: Rollout, timeout: Duration) -> Self {
        Self { store, default, cached: CachedRead::new(timeout) }
    }

    /// The rollout, at most five seconds old.
    pub async fn get(&self) -> Result<Rollout> {
        self.cached.get(async { Ok(self.store.rollout().await?.unwrap_or(self.default)) }).await
    }

    /// Changes switches: at once on this server, within five seconds on others. Returns the rollout as it is now.
    pub async fn change(&self, change: RolloutChange) -> Result<Rollout> {
        self.cached.change(self.store.change_rollout(change, self.default)).await
    }
}
