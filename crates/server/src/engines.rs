//! The engines chosen by the settings, opened, behind the seams the services use.

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
use weir_store::limit_changes::LimitChangeFeed;
use weir_store::quota::CacheMetrics;
use weir_store::request::RequestStore;
use weir_store::sale::{LedgerMetrics, SaleStore};
use weir_store::throttle::Throttle;
use weir_store::tier::LimitStore;
use weir_store::{Batch, Error, LaneMetrics, Lanes, Result};
use weir_store_redis::{Redis, RedisLimits, RedisRequests, RedisSales};

use self::broker_jobs::{Broker as RequestBroker, TOPIC as REQUEST_TOPIC};
pub(crate) use self::kafka::Kafka;
pub(crate) use self::store::Store;
use self::store::Surroundings;
use crate::settings::Settings;
use crate::settings::store::{BrokerChoice, CacheChoice};

/// How long a start waits for a database that is not there yet.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause before a store that did not answer in time is asked again.
const START_PAUSE: Duration = Duration::from_millis(500);
/// How long a start waits for a cache, which it can do without.
const CACHE_TIMEOUT: Duration = Duration::from_secs(2);
/// Callers that a throttle counts at the same time: about 50 MB when all of them have called within a second.
const THROTTLED_MAX: usize = 524_288;

/// The engines the settings name, put together.
#[derive(Clone)]
pub struct Engines {
    /// What holds the state.
    pub store: Store,
    /// What stands before it.
    pub redis: Option<Redis>,
    /// What carries messages instead of it.
    pub kafka: Option<Kafka>,
    /// What limits have spent, as far as this process knows.
    local: LocalLimiter,
    /// Sales on Redis, where there is one.
    pub redis_sales: Option<RedisSales>,
    /// What following Redis tells about itself.
    pub follow_metrics: LedgerMetrics,
    /// How the cache of quota tells about itself.
    pub cache_metrics: CacheMetrics,
    /// Replaces the clocks that decide, for tests.
    test_clock: Option<Arc<dyn Clock>>,
    /// Where lanes run. The threads that serve HTTP let a call reach its lane, and an answer its caller, without a switch between
    /// threads. None means where they are started.
    pub lane_runtimes: Vec<Handle>,
}

impl Engines {
    /// Opens them; `clock` replaces the store's own, for tests.
    /// Fails when the store cannot be opened, or a database does not answer within half a minute. A cache or a broker
    /// that does not answer is no error: the one is gone without until it does, for the other callers get 503.
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
        let around = Surroundings {
            clock: clock.clone(),
            publisher: kafka.as_ref().map(Kafka::publisher),
            redis: redis.as_ref(),
            cache_metrics: &cache_metrics,
        };
        let store = Store::open(settings, around).await?;
        if let Some(redis) = &redis {
            // A server that is ready has its cache, if there is one, and hears of limits that change.
            let _ = tokio::time::timeout(CACHE_TIMEOUT, redis.connected()).await;
            let _ = tokio::time::timeout(CACHE_TIMEOUT, hears_of_changes(&store.limit_changes)).await;
        }
        let local = patiently(|| open_limits(&store, redis.is_some(), settings)).await?;
        let follow_metrics = LedgerMetrics::default();
        let redis_sales = match &settings.store.cache {
            CacheChoice::None => None,
            CacheChoice::Redis(target) => {
                // A connection of its own: nothing else can answer here, so more time is given than to a cache.
                let redis = Redis::start((**target).clone().for_sales(settings.store.redis_sale_timeout));
                let _ = tokio::time::timeout(CACHE_TIMEOUT, redis.connected()).await;
                Some(RedisSales::new(
                    redis,
                    Arc::clone(&store.sale_ledger),
                    clock.clone(),
                    follow_metrics.clone(),
                ))
            }
        };
        Ok(Self {
            store,
            redis,
            kafka,
            local,
            redis_sales,
            follow_metrics,
            cache_metrics,
            test_clock: clock,
            lane_runtimes: Vec::new(),
        })
    }

    /// Where the sender takes messages from.
    /// Fails when a consumer cannot be made.
    pub fn source(&self) -> Result<Arc<dyn MessageSource>> {
        match &self.kafka {
            Some(kafka) => kafka.source(),
            None => Ok(Arc::<dyn Queue>::clone(&self.store.queue)),
        }
    }

    /// Where workers are told which requests to do; none where the store alone hands them out.
    /// Fails when a consumer cannot be made.
    pub fn request_source(&self) -> Result<Option<Arc<dyn MessageSource>>> {
        let open = |kafka: &Kafka| kafka.source_of(REQUEST_TOPIC, &format!("{}-requests", kafka.group));
        self.kafka.as_ref().map(open).transpose()
    }

    /// What gives accepted requests to workers; none where the store alone does.
    #[must_use]
    pub fn request_broker(&self) -> Option<RequestBroker> {
        let timeout = self.kafka.as_ref()?.timeout;
        Some(RequestBroker::new(self.publisher()?, self.requests(), timeout))
    }

    /// Where events are published, unless they go on the store's own queue.
    #[must_use]
    pub fn publisher(&self) -> Option<Arc<dyn Publisher>> {
        self.kafka.as_ref().map(Kafka::publisher)
    }

    /// Where requests are, behind Redis if there is one: for whoever changes them, and for callers who read them. A status
    /// read there may be old for a moment.
    #[must_use]
    pub fn requests(&self) -> Arc<dyn RequestStore> {
        match &self.redis {
            None => Arc::clone(&self.store.requests),
            Some(redis) => Arc::new(RedisRequests::new(redis.clone(), Arc::clone(&self.store.requests))),
        }
    }

    /// Where limits are decided: in Redis if there is one, else in this process. To be made once.
    #[must_use]
    pub fn limits(&self, settings: &Settings, metrics: LaneMetrics) -> Arc<dyn LimitStore> {
        let local = self.local.clone();
        let Some(redis) = self.redis.clone() else { return Arc::new(local) };
        let (clock, test_clock) = (Arc::clone(&self.store.steady_clock), self.test_clock.clone());
        let capacity = settings.lane.capacity;
        Arc::new(RedisLimits::start(redis, local, clock, test_clock, capacity, metrics))
    }

    /// A throttle at `per_second` calls of one key, of which `at_once` may come together; `None` at 0, which is no limit.
    #[must_use]
    pub fn throttle(&self, per_second: u32, at_once: u32) -> Option<Arc<dyn Throttle>> {
        // No other number is out of range: settings end at 1,000,000.
        let bucket = TokenBucket::new(at_once, per_second, Duration::from_secs(1)).ok()?;
        Some(Arc::new(KeyThrottle::new(bucket, THROTTLED_MAX, Arc::clone(&self.store.steady_clock))))
    }

    /// Where sales are decided.
    #[must_use]
    pub fn sales(&self) -> Arc<dyn SaleStore> {
        match &self.redis_sales {
            Some(sales) => Arc::new(sales.clone()),
            None => Arc::clone(&self.store.sales),
        }
    }

    /// Whether other processes may change what decides sales.
    #[must_use]
    pub const fn sales_are_shared(&self) -> bool {
        self.redis_sales.is_some() || self.store.is_shared
    }

    /// The clock by which sales are decided, where this process can read it: Redis's it cannot.
    #[must_use]
    pub fn sales_clock(&self) -> Option<Arc<dyn Clock>> {
        if self.redis_sales.is_some() { None } else { self.store.readable_clock.clone() }
    }

    /// Starts the lanes of a capability. `run` carries out one batch and answers with one outcome for each command, in order.
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

/// Limits that Redis has are kept there. Processes that answer no calls decide nothing, and keep nothing.
async fn open_limits(store: &Store, is_in_redis: bool, settings: &Settings) -> Result<LocalLimiter> {
    let (clock, keys_max) = (Arc::clone(&store.steady_clock), settings.tier.keys_max);
    if settings.process.roles.api && !is_in_redis {
        LocalLimiter::open(Arc::clone(&store.tiers), clock, keys_max).await
    } else {
        Ok(LocalLimiter::ephemeral(clock, keys_max))
    }
}

/// Waits until a server hears of limits that others change.
async fn hears_of_changes(limit_changes: &LimitChangeFeed) {
    let since = Instant::now();
    while !limit_changes.is_current_as_of(since) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Asks again for as long as a start waits for a database: one that is busy may take longer than a call may.
/// Fails when it did not answer in that time, or answered with something that asking again does not mend.
pub(crate) async fn patiently<T, F: Future<Output = Result<T>>>(ask: impl Fn() -> F) -> Result<T> {
    let give_up_at = Instant::now() + START_TIMEOUT;
    loop {
        match ask().await {
            Err(error) if error.is_transient() && Instant::now() < give_up_at => {
                tracing::warn!(error = %error.with_causes(), "waiting for the store");
                tokio::time::sleep(START_PAUSE).await;
            }
            outcome => return outcome,
        }
    }
}

/// Waits for a call to the store no longer than the API's timeout; after that the caller gets an answer and the call goes on.
pub(crate) async fn within<T>(timeout: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(timeout, call).await {
        Ok(outcome) => outcome,
        Err(elapsed) => Err(Error::unavailable("store", elapsed)),
    }
}
