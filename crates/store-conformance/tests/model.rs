//! The suite against the naive model: proves that every case can be passed, with one shard and with many.

use std::sync::Arc;

use async_trait::async_trait;
use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::quota::QuotaStore;
use weir_store_conformance::model::Model;
use weir_store_conformance::{Harness, START};

struct InMemory<const SHARDS: u16> {
    clock: ManualClock,
    model: Arc<Model>,
}

#[async_trait]
impl<const SHARDS: u16> Harness for InMemory<SHARDS> {
    async fn open() -> Self {
        let clock = ManualClock::at(START);
        Self { clock: clock.clone(), model: Arc::new(Model::new(clock, SHARDS)) }
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn quota(&self) -> Arc<dyn QuotaStore> {
        self.model.clone()
    }

    fn queue(&self) -> Arc<dyn Queue> {
        self.model.clone()
    }

    async fn reopen(self) -> Self {
        self
    }

    async fn another(&self) -> Option<Self> {
        Some(Self { clock: self.clock.clone(), model: Arc::clone(&self.model) })
    }
}

mod one_shard {
    weir_store_conformance::suite!(super::InMemory<1>);
}

mod many_shards {
    weir_store_conformance::suite!(super::InMemory<16>);
}
