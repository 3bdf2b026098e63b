//! The conformance suite on Redis in front of Postgres, each case on a Redis and in a database of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use weir_core::quota::{Limits, Quota};
use weir_core::{Clock, ManualClock, UserId};
use weir_queue::Queue;
use weir_store::feed::{Change, Feed};
use weir_store::quota::{Backing, Books, CacheMetrics, QuotaStore, SendMessage, SendOutcome};
use weir_store::{Batch, Result};
use weir_store_conformance::{Harness, PATIENCE, START};
use weir_store_postgres::Postgres;
use weir_store_redis::{Redis, RedisQuota, Target};
use weir_testkit::postgres::{self, Database};
use weir_testkit::redis::{self, Options};

/// Quota on Redis whose new limits are settled when they are answered. What the store decides meanwhile costs places that
/// cases count; as does what Redis or the feed does not answer in time, which is why both are patient here.
struct Settled {
    quota: Arc<RedisQuota>,
    feed: Arc<Feed>,
    heard: Arc<Heard>,
}

/// How often a change of each user was heard of.
#[derive(Default)]
struct Heard(Mutex<HashMap<UserId, usize>>);

impl Heard {
    fn of(&self, user: &UserId) -> usize {
        self.0.lock().get(user).copied().unwrap_or_default()
    }

    fn add(&self, change: &Change) {
        if let Change::User(user) = change {
            *self.0.lock().entry(user.clone()).or_default() += 1;
        }
    }
}

impl Settled {
    /// Waits until a change that was taken after `before` were heard is heard too, and dealt with.
    async fn after(&self, user: &UserId, before: usize) {
        let taken_at = Instant::now();
        let is_heard = || self.heard.of(user) > before || self.feed.has_heard(taken_at);
        while !is_heard() || !self.quota.is_settled() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

#[async_trait::async_trait]
impl QuotaStore for Settled {
    async fn configure(&self, user: &UserId, limits: Limits) -> Result<Quota> {
        let before = self.heard.of(user);
        let row = self.quota.configure(user, limits).await?;
        self.after(user, before).await;
        Ok(row)
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        self.quota.find(user).await
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let before = self.heard.of(user);
        let was_there = self.quota.remove(user).await?;
        if was_there {
            self.after(user, before).await;
        }
        Ok(was_there)
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        self.quota.send_batch(batch).await
    }

    async fn audit(&self) -> Result<Books> {
        self.quota.audit().await
    }

    async fn close(&self) {
        self.quota.close().await;
    }
}

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
    heard: Arc<Heard>,
}

impl OneServer {
    /// A server that has connected and hears of changes.
    async fn open(data: &Data, clock: ManualClock) -> Self {
        let clock = Some(Arc::new(clock) as Arc<dyn Clock>);
        let target: weir_store_postgres::Target = data.database.url().parse().expect("a Postgres URL");
        let store = Postgres::open_with_clock(target.with_patience(PATIENCE), 8, clock.clone())
            .await
            .expect("it opens");
        store.feed().hold_for(PATIENCE);
        let target: Target = data.redis.url().parse().expect("a Redis URL");
        let redis = Redis::start(target.with_patience(PATIENCE));
        let backing = Arc::new(store.clone().behind_cache());
        let quota = Arc::new(RedisQuota::new(redis.clone(), backing, clock, CacheMetrics::default()));
        redis.connected().await;
        let heard = Arc::<Heard>::default();
        let listener = Arc::clone(&heard);
        store.feed().listen(move |change| listener.add(change));
        let node = Self { store, quota, heard };
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
        let OneServer { store, quota, heard } = &self.node;
        Arc::new(Settled { quota: Arc::clone(quota), feed: store.feed(), heard: Arc::clone(heard) })
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.node.store.clone())
    }

    fn store_clock(&self) -> Option<Arc<dyn weir_store::StoreClock>> {
        Some(Arc::new(self.node.store.clone()))
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
