//! Opens the engines that the settings choose and hides them behind the traits that services use.

pub(crate) mod broker_jobs;
mod kafka;
pub(crate) mod lost_database;
mod store;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use weir_core::Clock;
use weir_core::tier::TokenBucket;
use weir_limiter::{KeyThrottle, LocalLimiter};
use weir_queue::publish::Publisher;
use weir_queue::{MessageSource, Queue};
use weir_store::engine_calls::EngineCalls;
use weir_store::limit_changes::LimitChangeFeed;
use weir_store::quota::CacheMetrics;
use weir_store::request::RequestStore;
use weir_store::sale::{LedgerMetrics, SaleStore};
use weir_store::throttle::Throttle;
use weir_store::tier::LimitStore;
use weir_store::{Batch, Error, LaneMetrics, Lanes, Result};
use weir_store_redis::{Redis, RedisAttempts, RedisLimits, RedisRequests, RedisSales};

use self::broker_jobs::{RequestBroker, TOPIC as REQUEST_TOPIC};
pub(crate) use self::kafka::Kafka;
use self::store::EngineOptions;
pub(crate) use self::store::Store;
use crate::settings::Settings;
use crate::settings::store::{BrokerChoice, CacheChoice};

/// How long a start waits for a database that does not answer yet.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause between attempts to reach the store during a start.
const START_PAUSE: Duration = Duration::from_millis(500);
/// How long a start waits for Redis, without which the server can run.
const CACHE_TIMEOUT: Duration = Duration::from_secs(2);
/// Keys that a throttle counts at the same time: about 50 MB when all of them have called within a second.
const THROTTLE_KEYS_MAX: usize = 524_288;

/// The engines that the settings choose.
#[derive(Clone)]
pub struct Engines {
    pub store: Store,
    pub redis: Option<Redis>,
    /// Carries messages instead of the store's queue.
    pub kafka: Option<Kafka>,
    /// Rate limits in the memory of this process.
    local: LocalLimiter,
    /// Decides sales instead of the store.
    pub redis_sales: Option<RedisSales>,
    /// The durations of calls, for each connected engine.
    pub calls: Vec<EngineCalls>,
    pub ledger_metrics: LedgerMetrics,
    pub cache_metrics: CacheMetrics,
    /// Replaces the clocks that decide, for tests.
    test_clock: Option<Arc<dyn Clock>>,
    /// The runtimes on which lanes run. On the threads that serve HTTP, a call reaches its lane and a response its caller
    /// without a switch between threads. If empty, lanes run where they are started.
    pub lane_runtimes: Vec<Handle>,
}

impl Engines {
    /// Opens the engines. `clock` replaces the store's own, for tests.
    /// Fails when the store cannot be opened, or a database does not answer within half a minute. A Redis or Kafka that does
    /// not answer is no error: the server runs without Redis until it answers; without Kafka, callers get 503.
    pub async fn open(settings: &Settings, clock: Option<Arc<dyn Clock>>) -> Result<Self> {
        let kafka = match &settings.store.broker {
            BrokerChoice::Embedded => None,
            BrokerChoice::Kafka(brokers) => Some(Kafka::open(brokers, settings).await?),
        };
        let redis = match &settings.store.cache {
            CacheChoice::None => None,
            CacheChoice::Redis(target) => Some(Redis::start((**target).clone())),
        };
        let cache_metrics = CacheMetrics::default();
        let options = EngineOptions {
            clock: clock.clone(),
            publisher: kafka.as_ref().map(Kafka::publisher),
            redis: redis.as_ref(),
            cache_metrics: &cache_metrics,
        };
        let store = Store::open(settings, options).await?;
        if let Some(redis) = &redis {
            // If Redis answers, a server that reports ready uses it and receives changes of limits.
            let _ = tokio::time::timeout(CACHE_TIMEOUT, redis.connected()).await;
            let _ = tokio::time::timeout(CACHE_TIMEOUT, wait_for_limit_changes(&store.limit_changes)).await;
        }
        let local = retry_at_start(|| open_limits(&store, redis.is_some(), settings)).await?;
        let ledger_metrics = LedgerMetrics::default();
        let mut calls = vec![store.calls.clone()];
        calls.extend(redis.as_ref().map(Redis::calls));
        calls.extend(kafka.as_ref().map(Kafka::calls));
        let redis_sales = match &settings.store.cache {
            CacheChoice::None => None,
            CacheChoice::Redis(target) => {
                // A separate connection with a longer timeout: Redis decides sales, and nothing else can in its place.
                let redis = Redis::start((**target).clone().for_sales(settings.store.redis_sale_timeout));
                let _ = tokio::time::timeout(CACHE_TIMEOUT, redis.connected()).await;
                calls.push(redis.calls());
                Some(RedisSales::new(
                    redis,
                    Arc::clone(&store.sale_ledger),
                    clock.clone(),
                    ledger_metrics.clone(),
                ))
            }
        };
        Ok(Self {
            store,
            redis,
            kafka,
            local,
            redis_sales,
            calls,
            ledger_metrics,
            cache_metrics,
            test_clock: clock,
            lane_runtimes: Vec::new(),
        })
    }

    /// Returns the source of the sender's messages.
    /// Fails when a Kafka consumer cannot be created.
    pub fn source(&self) -> Result<Arc<dyn MessageSource>> {
        match &self.kafka {
            Some(kafka) => kafka.source(),
            None => Ok(Arc::<dyn Queue>::clone(&self.store.queue)),
        }
    }

    /// Returns the source of request ids for workers, or `None` without a broker: workers then claim from the store only.
    /// Fails when a Kafka consumer cannot be created.
    pub fn request_source(&self) -> Result<Option<Arc<dyn MessageSource>>> {
        let open = |kafka: &Kafka| kafka.source_of(REQUEST_TOPIC, &format!("{}-requests", kafka.group));
        self.kafka.as_ref().map(open).transpose()
    }

    /// Returns the broker that carries accepted requests to workers, if there is one.
    #[must_use]
    pub fn request_broker(&self) -> Option<RequestBroker> {
        let timeout = self.kafka.as_ref()?.timeout;
        Some(RequestBroker::new(self.publisher()?, self.requests(), timeout))
    }

    /// Returns the publisher of events, or `None` if they are enqueued in the store.
    #[must_use]
    pub fn publisher(&self) -> Option<Arc<dyn Publisher>> {
        self.kafka.as_ref().map(Kafka::publisher)
    }

    /// Returns the store of requests, behind Redis if there is one. A status read from Redis may be stale for a moment.
    #[must_use]
    pub fn requests(&self) -> Arc<dyn RequestStore> {
        match &self.redis {
            None => Arc::clone(&self.store.requests),
            Some(redis) => Arc::new(RedisRequests::new(redis.clone(), Arc::clone(&self.store.requests))),
        }
    }

    /// Returns the store that decides limits: Redis if there is one, otherwise this process. Call it once.
    #[must_use]
    pub fn limits(&self, settings: &Settings, metrics: LaneMetrics) -> Arc<dyn LimitStore> {
        let local = self.local.clone();
        let Some(redis) = self.redis.clone() else { return Arc::new(local) };
        let (clock, test_clock) = (Arc::clone(&self.store.steady_clock), self.test_clock.clone());
        let capacity = settings.lane.capacity;
        Arc::new(RedisLimits::start(redis, local, clock, test_clock, capacity, metrics))
    }

    /// Returns a throttle of `per_second` calls per key with bursts of `burst`, or `None` if `per_second` is 0: no limit.
    #[must_use]
    pub fn throttle(&self, per_second: u32, burst: u32) -> Option<Arc<dyn Throttle>> {
        // Fails only at 0: settings allow at most 1,000,000.
        let bucket = TokenBucket::new(burst, per_second, Duration::from_secs(1)).ok()?;
        Some(Arc::new(KeyThrottle::new(bucket, THROTTLE_KEYS_MAX, Arc::clone(&self.store.steady_clock))))
    }

    /// Returns what counts attempts over all servers, if there is a Redis.
    #[must_use]
    pub fn attempts(&self) -> Option<RedisAttempts> {
        // Not the client of sales: here this process decides when Redis is late.
        self.redis.clone().map(|redis| RedisAttempts::new(redis, self.test_clock.clone()))
    }

    /// Returns the store that decides sales.
    #[must_use]
    pub fn sales(&self) -> Arc<dyn SaleStore> {
        match &self.redis_sales {
            Some(sales) => Arc::new(sales.clone()),
            None => Arc::clone(&self.store.sales),
        }
    }

    /// Whether other processes may change the sales.
    #[must_use]
    pub const fn sales_are_shared(&self) -> bool {
        self.redis_sales.is_some() || self.store.is_shared
    }

    /// Returns the clock that decides sales. `None` if it is that of another server, such as Redis.
    #[must_use]
    pub fn sales_clock(&self) -> Option<Arc<dyn Clock>> {
        if self.redis_sales.is_some() { None } else { self.store.readable_clock.clone() }
    }

    /// Starts the lanes of a capability. `run` executes one batch and returns one outcome per command, in order.
    pub fn start_lanes<C, R, F, Fut>(&self, name: &'static str, metrics: LaneMetrics, run: F) -> Lanes<C, R>
    where
        C: Send + 'static,
        R: Send + 'static,
        F: Fn(Batch<C>) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Result<Vec<R>>> + Send + 'static,
    {
        Lanes::start(name, self.store.lane_settings, metrics, &self.lane_runtimes, run)
    }
}

/// The limiter saves its counts only in processes that decide limits: those with the role `api` and without Redis.
async fn open_limits(store: &Store, is_in_redis: bool, settings: &Settings) -> Result<LocalLimiter> {
    let (clock, keys_max) = (Arc::clone(&store.steady_clock), settings.tier.keys_max);
    if settings.process.roles.api && !is_in_redis {
        LocalLimiter::open(Arc::clone(&store.tiers), clock, keys_max).await
    } else {
        Ok(LocalLimiter::ephemeral(clock, keys_max))
    }
}

/// Waits until this server receives the changes of limits that others make.
async fn wait_for_limit_changes(limit_changes: &LimitChangeFeed) {
    let since = Instant::now();
    while !limit_changes.is_current_as_of(since) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Repeats a call to the store during a start while it fails transiently: a busy database may take longer than the timeout
/// of a call.
/// Fails with the first permanent error, or with the last one after [`START_TIMEOUT`].
pub(crate) async fn retry_at_start<T, F: Future<Output = Result<T>>>(call: impl Fn() -> F) -> Result<T> {
    let give_up_at = Instant::now() + START_TIMEOUT;
    loop {
        match call().await {
            Err(error) if error.is_transient() && Instant::now() < give_up_at => {
                tracing::warn!(error = %error.with_causes(), "waiting for the store, which does not answer yet");
                tokio::time::sleep(START_PAUSE).await;
            }
            outcome => return outcome,
        }
    }
}

/// Opens the store alone, without cache and broker.
/// Fails like [`Engines::open`].
pub(crate) async fn open_store(settings: &Settings) -> Result<Store> {
    let cache_metrics = CacheMetrics::default();
    let options = EngineOptions { clock: None, publisher: None, redis: None, cache_metrics: &cache_metrics };
    Store::open(settings, options).await
}

/// Limits how long a caller waits for a call to the store.
pub(crate) async fn within<T>(timeout: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(timeout, call).await {
        Ok(outcome) => outcome,
        Err(elapsed) => Err(Error::unavailable("store", elapsed)),
    }
}
