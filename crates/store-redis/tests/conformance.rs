//! The conformance suite on Redis in front of Postgres, each case on a Redis and in a database of its own.

use std::sync::Arc;
use std::time::Duration;

use weir_core::{Clock, ManualClock};
use weir_queue::Queue;
use weir_store::quota::{Backing, QuotaStore};
use weir_store_conformance::{Harness, START};
use weir_store_postgres::Postgres;
use weir_store_redis::{Redis, RedisQuota};
use weir_testkit::postgres::{self, Database};
use weir_testkit::redis::{self, Options};

/// What servers share.
struct Data {
    redis: redis::Server,
    database: Database,
}

impl Data {
    async fn fresh() -> Self {
        let options = Options { appendonly: false, ..Options::default() };
        let redis = redis::Server::private(&options);
        Self { redis, database: postgres::Server::shared().database("redis").await }
    }
}

/// What a server has of its own.
struct OneServer {
    store: Postgres,
    quota: Arc<RedisQuota>,
}

impl OneServer {
    /// A server that has connected and hears of changes.
    async fn open(data: &Data, clock: ManualClock) -> Self {
        let clock = Some(Arc::new(clock) as Arc<dyn Clock>);
        let target = data.database.url().parse().expect("a Postgres URL");
        let store = Postgres::open_with_clock(target, 8, clock.clone()).await.expect("it opens");
        let redis = Redis::start(data.redis.url().parse().expect("a Redis URL"));
        let quota = Arc::new(RedisQuota::new(redis.clone(), Arc::new(store.clone().behind_cache()), clock));
        redis.connected().await;
        let node = Self { store, quota };
        node.hears().await;
        node
    }

    /// Waits until changes on other servers are heard.
    async fn hears(&self) {
        let feed = self.store.feed();
        // Not `wait::until`: its future cannot be sent between threads, which a harness's must be.
        let heard = async {
            while !feed.is_current() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), heard).await.expect("the feed is current");
    }
}

struct OnRedis {
    data: Arc<Data>,
    clock: ManualClock,
    node: OneServer,
}

impl OnRedis {
    async fn on(data: Arc<Data>, clock: ManualClock) -> Self {
        let node = OneServer::open(&data, clock.clone()).await;
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
