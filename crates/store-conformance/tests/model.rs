//! The suites against the naive models: shows that every case can pass, with one shard and with many.

use std::sync::Arc;

use async_trait::async_trait;
use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::quota::QuotaStore;
use weir_store::tier::LimitStore;
use weir_store_conformance::model::Model;
use weir_store_conformance::tier::model::NaiveLimits;
use weir_store_conformance::{EngineFixture, HasLimits, HasQueue, HasQuota, START};

#[derive(Clone)]
struct InMemory<const SHARDS: u16> {
    clock: ManualClock,
    model: Arc<Model>,
    limits: Arc<NaiveLimits>,
}

#[async_trait]
impl<const SHARDS: u16> EngineFixture for InMemory<SHARDS> {
    async fn open() -> Self {
        let clock = ManualClock::at(START);
        let model = Arc::new(Model::new(clock.clone(), SHARDS));
        Self { model, limits: Arc::new(NaiveLimits::new(clock.clone())), clock }
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    async fn reopen(self) -> Self {
        self
    }

    async fn second_server(&self) -> Option<Self> {
        Some(self.clone())
    }
}

impl<const SHARDS: u16> HasQueue for InMemory<SHARDS> {
    fn queue(&self) -> Arc<dyn Queue> {
        self.model.clone()
    }
}

#[async_trait]
impl<const SHARDS: u16> HasQuota for InMemory<SHARDS> {
    fn quota(&self) -> Arc<dyn QuotaStore> {
        self.model.clone()
    }

    async fn count_max(&self, user: &str) -> u32 {
        self.model.count_max(user)
    }
}

impl HasLimits for InMemory<1> {
    fn limits(&self) -> Arc<dyn LimitStore> {
        self.limits.clone()
    }
}

mod one_shard {
    weir_store_conformance::quota_suite!(crate::InMemory<1>);
}

mod many_shards {
    weir_store_conformance::quota_suite!(crate::InMemory<16>);
}

mod tier {
    weir_store_conformance::tier_suite!(crate::InMemory<1>);
}
