//! Redis and Postgres for a test, and servers on them.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::Arc;
use std::time::Duration;

use weir_core::{Clock, ManualClock};
use weir_store::quota::Backing;
use weir_store_postgres::Postgres;
use weir_store_redis::{Redis, RedisQuota};
use weir_testkit::postgres::{self, Database};
use weir_testkit::redis::{self, Options};

/// What servers share.
pub(crate) struct Data {
    pub(crate) redis: redis::Server,
    pub(crate) database: Database,
}

impl Data {
    pub(crate) async fn fresh() -> Self {
        let options = Options { appendonly: false, ..Options::default() };
        Self::with(&options).await
    }

    pub(crate) async fn with(options: &Options) -> Self {
        let redis = redis::Server::private(options);
        Self { redis, database: postgres::Server::shared().database("redis").await }
    }
}

/// What a server has of its own.
pub(crate) struct Node {
    pub(crate) store: Postgres,
    pub(crate) redis: Redis,
    pub(crate) quota: Arc<RedisQuota>,
}

impl Node {
    /// A server that has connected and hears of changes.
    pub(crate) async fn open(data: &Data, clock: Option<ManualClock>) -> Self {
        Self::open_at(&data.database, data.redis.url(), clock).await
    }

    pub(crate) async fn open_at(database: &Database, redis: &str, clock: Option<ManualClock>) -> Self {
        let clock = clock.map(|clock| Arc::new(clock) as Arc<dyn Clock>);
        let target = database.url().parse().expect("a Postgres URL");
        let store = Postgres::open_with_clock(target, 8, clock.clone()).await.expect("it opens");
        let redis = Redis::start(redis.parse().expect("a Redis URL"));
        let quota = Arc::new(RedisQuota::new(redis.clone(), Arc::new(store.clone().behind_cache()), clock));
        redis.connected().await;
        let node = Self { store, redis, quota };
        node.hears().await;
        node
    }

    /// Waits until changes on other servers are heard.
    pub(crate) async fn hears(&self) {
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
