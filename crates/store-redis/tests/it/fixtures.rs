//! Redis in front of Postgres as the suites open it: each case in a database and on a Redis of its own, or on a cluster
//! that all cases share.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Clock, ManualClock, UserId};
use weir_limiter::LocalLimiter;
use weir_queue::Queue;
use weir_store::limit_changes::{LimitChange, LimitChangeFeed};
use weir_store::quota::{CacheMetrics, QuotaAudit, QuotaStore, ReservableStore, SendMessage, SendOutcome};
use weir_store::request::RequestStore;
use weir_store::sale::{LedgerMetrics, SaleStore};
use weir_store::tier::LimitStore;
use weir_store::{Batch, LaneMetrics, Result, StoreClock};
use weir_store_conformance::sale::fixtures::wait_until_persisted;
use weir_store_conformance::{
    ENGINE_TIMEOUT, EngineFixture, HasLimits, HasQueue, HasQuota, HasRequests, HasSales, START,
};
use weir_store_postgres::Postgres;
use weir_store_redis::{Redis, RedisLimits, RedisQuota, RedisRequests, RedisSales, Target};
use weir_testkit::postgres::{self, Database};
use weir_testkit::redis::{Cluster, Options, Server};

/// A Redis of the test's own.
pub(crate) fn private() -> Server {
    Server::private(&Options { appendonly: false, ..Options::default() })
}

/// Quota on Redis whose new limits are settled when they are answered. What the store decides meanwhile costs places that
/// cases count; as does what Redis or the feed does not answer in time, which is why both are patient here.
struct Settled {
    quota: Arc<RedisQuota>,
    limit_changes: Arc<LimitChangeFeed>,
    heard: Arc<Heard>,
}

/// How often a change of each user was heard of.
#[derive(Default)]
struct Heard(Mutex<HashMap<UserId, usize>>);

impl Heard {
    fn of(&self, user: &UserId) -> usize {
        self.0.lock().get(user).copied().unwrap_or_default()
    }

    fn add(&self, change: &LimitChange) {
        if let LimitChange::User(user) = change {
            *self.0.lock().entry(user.clone()).or_default() += 1;
        }
    }
}

impl Settled {
    /// Waits until a change that was taken after `before` were heard is heard too, and dealt with.
    async fn after(&self, user: &UserId, before: usize) {
        let taken_at = Instant::now();
        let is_heard = || self.heard.of(user) > before || self.limit_changes.is_current_as_of(taken_at);
        while !is_heard() || !self.quota.is_settled() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

#[async_trait::async_trait]
impl QuotaStore for Settled {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
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

    async fn audit(&self) -> Result<QuotaAudit> {
        self.quota.audit().await
    }

    async fn close(&self) {
        self.quota.close().await;
    }
}

/// A server with Redis in front of Postgres. The Redis is one server, or with `CLUSTER` a cluster.
pub(crate) struct OnRedis<const CLUSTER: bool> {
    url: String,
    /// None where the test keeps its Redis itself, to disturb it.
    server: Option<Arc<Server>>,
    pub(crate) database: Arc<Database>,
    clock: ManualClock,
    store: Postgres,
    pub(crate) redis: Redis,
    quota: Arc<RedisQuota>,
    heard: Arc<Heard>,
    pub(crate) limits: RedisLimits,
    pub(crate) sales: RedisSales,
    pub(crate) sale_metrics: LedgerMetrics,
    /// Ends the worker that writes down what was sold.
    pub(crate) sale_worker: DropGuard,
}

impl<const CLUSTER: bool> OnRedis<CLUSTER> {
    /// An engine on a Redis that the test keeps, which is fresh.
    pub(crate) async fn at(url: &str) -> Self {
        let database = Arc::new(postgres::Server::shared().database("redis").await);
        Self::on(url, ENGINE_TIMEOUT, None, database, ManualClock::at(START)).await
    }

    /// Another server, which reaches the same Redis at this URL and waits for so long for its answers.
    pub(crate) async fn via(&self, url: &str, patience: Duration) -> Self {
        let (server, database) = (self.server.clone(), Arc::clone(&self.database));
        Self::on(url, patience, server, database, self.clock.clone()).await
    }

    /// A server that has connected and hears of changes.
    async fn on(
        url: &str,
        patience: Duration,
        server: Option<Arc<Server>>,
        database: Arc<Database>,
        clock: ManualClock,
    ) -> Self {
        let time: Arc<dyn Clock> = Arc::new(clock.clone());
        let target: weir_store_postgres::Target = database.url().parse().expect("a Postgres URL");
        let store = Postgres::open_with_clock(target.with_patience(ENGINE_TIMEOUT), 8, Some(time.clone()))
            .await
            .expect("it opens");
        store.limit_changes().set_current_for(ENGINE_TIMEOUT);
        let target: Target = url.parse().expect("a Redis URL");
        // What Redis does not answer in time is decided without it, which on a busy machine is not what cases are about.
        let redis = Redis::start(target.with_patience(patience));
        let backing = Arc::new(store.clone().behind_cache());
        let quota = RedisQuota::new(redis.clone(), backing, Some(time.clone()), CacheMetrics::default());
        let local = LocalLimiter::ephemeral(time.clone(), 100_000);
        let (own, metrics) = (time.clone(), LaneMetrics::default());
        let limits = RedisLimits::start(redis.clone(), local, own, Some(time.clone()), 10_000, metrics);
        let sale_metrics = LedgerMetrics::default();
        let sales = RedisSales::new(redis.clone(), Arc::new(store.clone()), Some(time), sale_metrics.clone());
        redis.connected().await;
        let closing = CancellationToken::new();
        tokio::spawn(sales.clone().follow(closing.clone()));
        let heard = Arc::<Heard>::default();
        let listener = Arc::clone(&heard);
        store.limit_changes().subscribe(move |change| listener.add(change));
        hears(&store.limit_changes()).await;
        Self {
            url: url.to_owned(),
            server,
            database,
            clock,
            store,
            redis,
            quota: Arc::new(quota),
            heard,
            limits,
            sales,
            sale_metrics,
            sale_worker: closing.drop_guard(),
        }
    }
}

/// Waits until changes on other servers are heard.
async fn hears(limit_changes: &LimitChangeFeed) {
    // Not `wait::until`: its future cannot be sent between threads, which a fixture's must be.
    let since = Instant::now();
    let heard = async {
        while !limit_changes.is_current_as_of(since) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(ENGINE_TIMEOUT, heard).await.expect("the limit_changes hears");
}

#[async_trait::async_trait]
impl<const CLUSTER: bool> EngineFixture for OnRedis<CLUSTER> {
    async fn open() -> Self {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        if CLUSTER {
            return Self::at(&SHARED.get_or_init(Cluster::private).url()).await;
        }
        let server = Arc::new(private());
        Self { server: Some(Arc::clone(&server)), ..Self::at(server.url()).await }
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres") || weir_testkit::skip("redis")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn store_clock(&self) -> Option<Arc<dyn StoreClock>> {
        Some(Arc::new(self.store.clone()))
    }

    async fn reopen(self) -> Self {
        self.quota.close().await;
        let Self { url, server, database, clock, .. } = self;
        Self::on(&url, ENGINE_TIMEOUT, server, database, clock).await
    }

    async fn second_server(&self) -> Option<Self> {
        Some(self.via(&self.url, ENGINE_TIMEOUT).await)
    }
}

impl<const CLUSTER: bool> HasQueue for OnRedis<CLUSTER> {
    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.store.clone())
    }
}

impl<const CLUSTER: bool> HasQuota for OnRedis<CLUSTER> {
    fn quota(&self) -> Arc<dyn QuotaStore> {
        let (quota, heard) = (Arc::clone(&self.quota), Arc::clone(&self.heard));
        Arc::new(Settled { quota, limit_changes: self.store.limit_changes(), heard })
    }

    /// Redis counts, then Postgres queues. A server's lanes keep each user's order.
    fn counts_and_queues_atomically() -> bool {
        false
    }
}

impl<const CLUSTER: bool> HasRequests for OnRedis<CLUSTER> {
    fn requests(&self) -> Arc<dyn RequestStore> {
        Arc::new(RedisRequests::new(self.redis.clone(), Arc::new(self.store.clone())))
    }
}

impl<const CLUSTER: bool> HasLimits for OnRedis<CLUSTER> {
    fn limits(&self) -> Arc<dyn LimitStore> {
        Arc::new(self.limits.clone())
    }
}

#[async_trait::async_trait]
impl<const CLUSTER: bool> HasSales for OnRedis<CLUSTER> {
    fn sales(&self) -> Arc<dyn SaleStore> {
        Arc::new(self.sales.clone())
    }

    async fn wait_until_persisted(&self) {
        wait_until_persisted(&self.sales, ENGINE_TIMEOUT).await;
    }
}
