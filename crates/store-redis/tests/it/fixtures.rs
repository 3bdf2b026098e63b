//! The engine fixture of this crate: Redis in front of Postgres. Each case has a database and a Redis of its own, or the
//! cluster that all cases share.

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
use weir_store_postgres::{Postgres, PostgresTarget};
use weir_store_redis::{QuotaTimes, Redis, RedisLimits, RedisQuota, RedisRequests, RedisSales, RedisTarget};
use weir_testkit::postgres::{self, Database};
use weir_testkit::redis::{Cluster, Options, Server};

/// Starts a Redis for one test.
pub(crate) fn private_redis() -> Server {
    Server::private(&Options { appendonly: false, ..Options::default() })
}

/// Quota on Redis whose changes of limits return only once their hashes are deleted. Until then the store decides, which
/// costs units that the cases count. So does a timeout of Redis or of `LimitChangeFeed`, which is why both are long here.
struct SettledQuota {
    quota: Arc<RedisQuota>,
    limit_changes: Arc<LimitChangeFeed>,
    received: Arc<ReceivedChanges>,
}

/// Counts the changes received for each user.
#[derive(Default)]
struct ReceivedChanges(Mutex<HashMap<UserId, usize>>);

impl ReceivedChanges {
    fn count(&self, user: &UserId) -> usize {
        self.0.lock().get(user).copied().unwrap_or_default()
    }

    fn add(&self, change: &LimitChange) {
        if let LimitChange::User(user) = change {
            *self.0.lock().entry(user.clone()).or_default() += 1;
        }
    }
}

impl SettledQuota {
    /// Waits until the change after the first `before` ones is received and its hash deleted.
    async fn wait_for_change(&self, user: &UserId, before: usize) {
        let changed_at = Instant::now();
        let is_received =
            || self.received.count(user) > before || self.limit_changes.is_current_as_of(changed_at);
        while !is_received() || self.quota.has_pending_invalidations() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Leaves out what Redis holds in advance, which the cases know nothing of.
fn without_reserved(row: Quota) -> Quota {
    Quota { reserved_count: 0, ..row }
}

#[async_trait::async_trait]
impl QuotaStore for SettledQuota {
    async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let before = self.received.count(user);
        let row = self.quota.configure(user, limits).await?;
        self.wait_for_change(user, before).await;
        Ok(row)
    }

    async fn change_limits(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let before = self.received.count(user);
        let row = self.quota.change_limits(user, limits).await?;
        self.wait_for_change(user, before).await;
        Ok(without_reserved(row))
    }

    async fn list(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<(UserId, Quota)>> {
        let listed = self.quota.list(after, limit).await?;
        Ok(listed.into_iter().map(|(user, row)| (user, without_reserved(row))).collect())
    }

    async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        Ok(self.quota.find(user).await?.map(without_reserved))
    }

    async fn remove(&self, user: &UserId) -> Result<bool> {
        let before = self.received.count(user);
        let was_there = self.quota.remove(user).await?;
        if was_there {
            self.wait_for_change(user, before).await;
        }
        Ok(was_there)
    }

    async fn send_batch(&self, batch: Batch<SendMessage>) -> Result<Vec<SendOutcome>> {
        let mut outcomes = self.quota.send_batch(batch).await?;
        for outcome in &mut outcomes {
            if let SendOutcome::Replayed { row: Some(row), .. } = outcome {
                *row = without_reserved(*row);
            }
        }
        Ok(outcomes)
    }

    async fn purge_keys(&self, limit: usize) -> Result<usize> {
        self.quota.purge_keys(limit).await
    }

    async fn audit(&self) -> Result<QuotaAudit> {
        self.quota.audit().await
    }

    async fn close(&self) {
        self.quota.close().await;
    }
}

/// A Weir server with Redis in front of Postgres. Redis is a cluster if `CLUSTER`, otherwise one server.
pub(crate) struct RedisFixture<const CLUSTER: bool> {
    url: String,
    /// `None` where the test owns the Redis, to disturb it.
    server: Option<Arc<Server>>,
    pub(crate) database: Arc<Database>,
    clock: ManualClock,
    pub(crate) store: Postgres,
    pub(crate) redis: Redis,
    quota: Arc<RedisQuota>,
    received: Arc<ReceivedChanges>,
    pub(crate) limits: RedisLimits,
    pub(crate) sales: RedisSales,
    pub(crate) sale_metrics: LedgerMetrics,
    /// Stops the worker that moves purchases to the store.
    pub(crate) sale_worker: DropGuard,
}

impl<const CLUSTER: bool> RedisFixture<CLUSTER> {
    /// Opens a server on an empty Redis that the test owns.
    pub(crate) async fn at(url: &str) -> Self {
        let database = Arc::new(postgres::Server::shared().database("redis").await);
        Self::start(url, ENGINE_TIMEOUT, None, database, ManualClock::at(START)).await
    }

    /// Opens another server on the same Redis, with this URL and call timeout.
    pub(crate) async fn via(&self, url: &str, call_timeout: Duration) -> Self {
        let (server, database) = (self.server.clone(), Arc::clone(&self.database));
        Self::start(url, call_timeout, server, database, self.clock.clone()).await
    }

    /// Starts a server and waits until it is connected and receives changes.
    pub(crate) async fn start(
        url: &str,
        call_timeout: Duration,
        server: Option<Arc<Server>>,
        database: Arc<Database>,
        clock: ManualClock,
    ) -> Self {
        let time: Arc<dyn Clock> = Arc::new(clock.clone());
        let target: PostgresTarget = database.url().parse().expect("a Postgres URL");
        let store =
            Postgres::open_with_clock(target.with_call_timeout(ENGINE_TIMEOUT), 8, Some(time.clone()))
                .await
                .expect("it opens");
        store.limit_changes().set_current_for(ENGINE_TIMEOUT);
        let target: RedisTarget = url.parse().expect("a Redis URL");
        // A call that times out is decided without Redis, which the cases do not expect: a busy machine needs a long timeout.
        let redis = Redis::start(target.with_call_timeout(call_timeout));
        let quota = redis_quota(&redis, &store, time.clone(), QuotaTimes::default().keep, false).await;
        let local = LocalLimiter::ephemeral(time.clone(), 100_000);
        let (own, metrics) = (time.clone(), LaneMetrics::default());
        let limits = RedisLimits::start(redis.clone(), local, own, Some(time.clone()), 10_000, metrics);
        let sale_metrics = LedgerMetrics::default();
        let sales = RedisSales::new(redis.clone(), Arc::new(store.clone()), Some(time), sale_metrics.clone());
        redis.connected().await;
        let closing = CancellationToken::new();
        tokio::spawn(sales.clone().persist_purchases(closing.clone()));
        let received = Arc::<ReceivedChanges>::default();
        let listener = Arc::clone(&received);
        store.limit_changes().subscribe(move |change| listener.add(change));
        wait_for_limit_changes(&store.limit_changes()).await;
        Self {
            url: url.to_owned(),
            server,
            database,
            clock,
            store,
            redis,
            quota: Arc::new(quota),
            received,
            limits,
            sales,
            sale_metrics,
            sale_worker: closing.drop_guard(),
        }
    }
}

/// Puts Redis in front of a store. A send whose window is full waits as long for others as a busy machine needs.
pub(crate) async fn redis_quota(
    redis: &Redis,
    store: &Postgres,
    clock: Arc<dyn Clock>,
    keep: Duration,
    has_only_new_servers: bool,
) -> RedisQuota {
    let store = store.clone().behind_cache(has_only_new_servers).await.expect("it knows its schema");
    let times = QuotaTimes { keep, install_wait: ENGINE_TIMEOUT };
    RedisQuota::new(redis.clone(), Arc::new(store), Some(clock), CacheMetrics::default(), times)
}

/// Waits until changes on other servers are received.
async fn wait_for_limit_changes(limit_changes: &LimitChangeFeed) {
    // Not `wait::until`: its future cannot be sent between threads, which a fixture's must be.
    let since = Instant::now();
    let received = async {
        while !limit_changes.is_current_as_of(since) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(ENGINE_TIMEOUT, received).await.expect("changes of limits are received");
}

#[async_trait::async_trait]
impl<const CLUSTER: bool> EngineFixture for RedisFixture<CLUSTER> {
    async fn open() -> Self {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        if CLUSTER {
            return Self::at(&SHARED.get_or_init(Cluster::private).url()).await;
        }
        let server = Arc::new(private_redis());
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
        Self::start(&url, ENGINE_TIMEOUT, server, database, clock).await
    }

    async fn second_server(&self) -> Option<Self> {
        Some(self.via(&self.url, ENGINE_TIMEOUT).await)
    }
}

impl<const CLUSTER: bool> HasQueue for RedisFixture<CLUSTER> {
    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.store.clone())
    }
}

#[async_trait::async_trait]
impl<const CLUSTER: bool> HasQuota for RedisFixture<CLUSTER> {
    fn quota(&self) -> Arc<dyn QuotaStore> {
        let (quota, received) = (Arc::clone(&self.quota), Arc::clone(&self.received));
        Arc::new(SettledQuota { quota, limit_changes: self.store.limit_changes(), received })
    }

    async fn count_max(&self, user: &str) -> u32 {
        self.database.quota_count_max(user).await
    }

    /// Redis counts, then Postgres enqueues. A server's lanes keep each user's order.
    fn counts_and_queues_atomically() -> bool {
        false
    }
}

impl<const CLUSTER: bool> HasRequests for RedisFixture<CLUSTER> {
    fn requests(&self) -> Arc<dyn RequestStore> {
        Arc::new(RedisRequests::new(self.redis.clone(), Arc::new(self.store.clone())))
    }
}

impl<const CLUSTER: bool> HasLimits for RedisFixture<CLUSTER> {
    fn limits(&self) -> Arc<dyn LimitStore> {
        Arc::new(self.limits.clone())
    }
}

#[async_trait::async_trait]
impl<const CLUSTER: bool> HasSales for RedisFixture<CLUSTER> {
    fn sales(&self) -> Arc<dyn SaleStore> {
        Arc::new(self.sales.clone())
    }

    async fn wait_until_persisted(&self) {
        wait_until_persisted(&self.sales, ENGINE_TIMEOUT).await;
    }
}
