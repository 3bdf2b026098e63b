//! The conformance suite on Redis in front of Postgres, each case on a Redis and in a database of its own.

mod given;

use std::sync::Arc;

use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::quota::QuotaStore;
use weir_store_conformance::{Harness, START};

use crate::given::{Data, Node};

struct OnRedis {
    data: Arc<Data>,
    clock: ManualClock,
    node: Node,
}

impl OnRedis {
    async fn on(data: Arc<Data>, clock: ManualClock) -> Self {
        let node = Node::open(&data, Some(clock.clone())).await;
        Self { data, clock, node }
    }
}

#[async_trait::async_trait]
impl Harness for OnRedis {
    async fn open() -> Self {
        Self::on(Arc::new(Data::fresh().await), ManualClock::at(START)).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres") || weir_testkit::skip("redis")
    }

    /// Redis counts, then Postgres queues. A server's lanes keep each user's order.
    fn counts_and_queues_at_once() -> bool {
        false
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn quota(&self) -> Arc<dyn QuotaStore> {
        Arc::clone(&self.node.quota) as Arc<dyn QuotaStore>
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.node.store.clone())
    }

    async fn reopen(self) -> Self {
        let Self { data, clock, node } = self;
        node.quota.close().await;
        drop(node);
        Self::on(data, clock).await
    }

    async fn another(&self) -> Option<Self> {
        Some(Self::on(Arc::clone(&self.data), self.clock.clone()).await)
    }
}

weir_store_conformance::suite!(OnRedis);
