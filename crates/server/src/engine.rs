//! The engines chosen by the settings, opened, behind the seams the services use.

pub(crate) mod broker_jobs;
mod kafka;
pub(crate) mod lost_database;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use weir_core::Clock;
use weir_core::tier::TokenBucket;
use weir_limiter::{KeyThrottle, LocalLimiter};
use weir_queue::due::DueStore;
use weir_queue::kafka::KafkaPublisher;
use weir_queue::publish::Publisher;
use weir_queue::{Queue, Source};
use weir_store::feed::Feed;
use weir_store::quota::{Backing, CacheMetrics, QuotaStore};
use weir_store::request::RequestStore;
use weir_store::sale::{FollowMetrics, SaleLedger, SaleStore};
use weir_store::slot::SlotStore;
use weir_store::throttle::Throttle;
use weir_store::tier::{LimitStore, TierStore};
use weir_store::writer_metrics::WriterMetrics;
use weir_store::{LaneMetrics, Result, SteadyClock, StoreClock, SystemClock};
use weir_store_postgres::{Postgres, Target};
use weir_store_redis::{Redis, RedisLimits, RedisQuota, RedisRequests, RedisSales};
use weir_store_sqlite::Sqlite;

use self::broker_jobs::{Broker as RequestBroker, TOPIC as REQUEST_TOPIC};
pub(crate) use self::kafka::Kafka;
use crate::config::Settings;
use crate::config::slot::SlotSettings;
use crate::config::store::{BrokerChoice, CacheChoice, EngineChoice};

/// How long a start waits for a database that is not there yet.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// The pause before a store that did not answer in time is asked again.
const PAUSE: Duration = Duration::from_millis(500);
/// How long a start waits for a cache, which it can do without.
const CACHE_PATIENCE: Duration = Duration::from_secs(2);
/// How long Redis may take to decide a sale: less than a call may.
const SALE_PATIENCE: Duration = Duration::from_millis(1_500);
/// Callers that a throttle counts at the same time: about 50 MB when all of them have called within a second.
const THROTTLED_MAX: usize = 524_288;

/// The engines the settings name, put together.
#[derive(Clone)]
pub struct Engines {
    /// What holds the state.
    pub store: Engine,
    /// What stands before it.
    pub redis: Option<Redis>,
    /// What carries messages instead of it.
    pub kafka: Option<Kafka>,
    quota: Arc<dyn QuotaStore>,
    /// What limits have spent, as far as this process knows.
    local: LocalLimiter,
    /// Sales on Redis, where there is one.
    pub redis_sales: Option<RedisSales>,
    /// What following Redis tells about itself.
    pub follow_metrics: FollowMetrics,
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
    ///
    /// # Errors
    /// When the store cannot be opened, or a database does not answer within half a minute. A cache or a broker that
    /// does not answer is no error: the one is gone without until it does, for the other callers get 503.
    pub async fn open(settings: &Settings, clock: Option<Arc<dyn Clock>>) -> Result<Self> {
        let kafka = match &settings.store.broker {
            BrokerChoice::Embedded => None,
            BrokerChoice::Kafka(brokers) => Some(Kafka::open(brokers, settings).await?),
        };
        let store = Engine::open(settings, clock.clone())
            .await?
            .publishing(kafka.as_ref())
            .with_slots(&settings.slot);
        let redis = match &settings.store.cache {
            CacheChoice::None => None,
            CacheChoice::Redis(target) => Some(Redis::start((**target).clone())),
        };
        if let Some(redis) = &redis {
            // A server that is ready has its cache, if there is one.
            let _ = tokio::time::timeout(CACHE_PATIENCE, redis.connected()).await;
        }
        let cache_metrics = CacheMetrics::default();
        let quota: Arc<dyn QuotaStore> = match (&store, &redis) {
            (Engine::Sqlite(engine), _) => Arc::new(engine.clone()),
            (Engine::Postgres(engine), None) => Arc::new(engine.clone()),
            (Engine::Postgres(engine), Some(redis)) => Arc::new(RedisQuota::new(
                redis.clone(),
                Arc::new(engine.clone().behind_cache()),
                clock.clone(),
                cache_metrics.clone(),
            )),
        };
        let local = patiently(|| open_limits(&store, redis.is_some(), settings)).await?;
        let follow_metrics = FollowMetrics::default();
        let redis_sales = match &settings.store.cache {
            CacheChoice::None => None,
            CacheChoice::Redis(target) => {
                // A connection of its own: nothing else can answer here, so more time is given than to a cache.
                let redis = Redis::start((**target).clone().for_sales(SALE_PATIENCE));
                let _ = tokio::time::timeout(CACHE_PATIENCE, redis.connected()).await;
                Some(RedisSales::new(redis, store.sale_ledger(), clock.clone(), follow_metrics.clone()))
            }
        };
        Ok(Self {
            store,
            redis,
            kafka,
            quota,
            local,
            redis_sales,
            follow_metrics,
            cache_metrics,
            test_clock: clock,
            lane_runtimes: Vec::new(),
        })
    }

    /// Where the sender takes messages from.
    ///
    /// # Errors
    /// When a consumer cannot be made.
    pub fn source(&self) -> Result<Arc<dyn Source>> {
        match &self.kafka {
            Some(kafka) => kafka.source(),
            None => Ok(self.store.queue()),
        }
    }

    /// Where workers are told which requests to do; none where the store alone hands them out.
    ///
    /// # Errors
    /// When a consumer cannot be made.
    pub fn request_source(&self) -> Result<Option<Arc<dyn Source>>> {
        let open = |kafka: &Kafka| kafka.source_of(REQUEST_TOPIC, &format!("{}-requests", kafka.group));
        self.kafka.as_ref().map(open).transpose()
    }

    /// What gives accepted requests to workers; none where the store alone does.
    #[must_use]
    pub fn request_broker(&self) -> Option<RequestBroker> {
        Some(RequestBroker::new(self.publisher()?, self.requests()))
    }

    /// Where events are published, unless they go on the store's own queue.
    #[must_use]
    pub fn publisher(&self) -> Option<Arc<dyn Publisher>> {
        let publisher = &self.kafka.as_ref()?.publisher;
        Some(Arc::<KafkaPublisher>::clone(publisher))
    }

    /// Where requests are, behind Redis if there is one: for whoever changes them, and for callers who read them. A status
    /// read there may be old for a moment.
    #[must_use]
    pub fn requests(&self) -> Arc<dyn RequestStore> {
        match &self.redis {
            None => self.store.requests(),
            Some(redis) => Arc::new(RedisRequests::new(redis.clone(), self.store.requests())),
        }
    }

    /// Where limits are decided: in Redis if there is one, else in this process. To be made once.
    #[must_use]
    pub fn limits(&self, settings: &Settings, metrics: LaneMetrics) -> Arc<dyn LimitStore> {
        let local = self.local.clone();
        let Some(redis) = self.redis.clone() else { return Arc::new(local) };
        let (clock, test_clock) = (self.store.steady_clock(), self.test_clock.clone());
        let capacity = settings.lane.capacity;
        Arc::new(RedisLimits::start(redis, local, clock, test_clock, capacity, metrics))
    }

    /// A throttle at `per_second` calls of one key, of which `at_once` may come together; `None` at 0, which is no limit.
    #[must_use]
    pub fn throttle(&self, per_second: u32, at_once: u32) -> Option<Arc<dyn Throttle>> {
        // No other number is out of range: settings end at 1,000,000.
        let bucket = TokenBucket::new(at_once, per_second, Duration::from_secs(1)).ok()?;
        Some(Arc::new(KeyThrottle::new(bucket, THROTTLED_MAX, self.store.steady_clock())))
    }

    /// Where sales are decided.
    #[must_use]
    pub fn sales(&self) -> Arc<dyn SaleStore> {
        match &self.redis_sales {
            Some(sales) => Arc::new(sales.clone()),
            None => self.store.sales(),
        }
    }

    /// Whether other processes may change what decides sales.
    #[must_use]
    pub const fn sales_are_shared(&self) -> bool {
        self.redis_sales.is_some() || self.store.is_shared()
    }

    /// The clock by which sales are decided, where this process can read it: Redis's it cannot.
    #[must_use]
    pub fn sales_clock(&self) -> Option<Arc<dyn Clock>> {
        if self.redis_sales.is_some() { None } else { self.store.readable_clock() }
    }

    /// Where quota is decided.
    #[must_use]
    pub fn quota(&self) -> Arc<dyn QuotaStore> {
        Arc::clone(&self.quota)
    }
}

/// Limits that Redis has are kept there. Processes that answer no calls decide nothing, and keep nothing.
async fn open_limits(store: &Engine, is_in_redis: bool, settings: &Settings) -> Result<LocalLimiter> {
    let (clock, keys_max) = (store.steady_clock(), settings.tier.keys_max);
    if settings.process.roles.api && !is_in_redis {
        LocalLimiter::open(store.tiers(), clock, keys_max).await
    } else {
        Ok(LocalLimiter::ephemeral(clock, keys_max))
    }
}

/// The engine that holds the state.
#[derive(Clone, Debug)]
pub enum Engine {
    /// In this process.
    Sqlite(Sqlite),
    /// On a Postgres server.
    Postgres(Postgres),
}

impl Engine {
    /// Opens the engine the settings name; `clock` replaces the engine's own, for tests.
    ///
    /// # Errors
    /// When it cannot be opened, or a database does not answer within half a minute.
    pub async fn open(settings: &Settings, clock: Option<Arc<dyn Clock>>) -> Result<Self> {
        match &settings.store.engine {
            EngineChoice::Embedded => {
                let data = &settings.process.data;
                Ok(Self::Sqlite(match clock {
                    Some(clock) => Sqlite::open_with_clock(data, clock)?,
                    None => Sqlite::open(data)?,
                }))
            }
            EngineChoice::Postgres(target) => {
                let connections = settings.store.postgres_connections;
                open_patiently(target, connections, clock).await.map(Self::Postgres)
            }
        }
    }

    fn publishing(self, kafka: Option<&Kafka>) -> Self {
        let Some(kafka) = kafka else { return self };
        let publisher = Arc::<KafkaPublisher>::clone(&kafka.publisher);
        match self {
            Self::Sqlite(engine) => Self::Sqlite(engine.publishing(publisher)),
            Self::Postgres(engine) => Self::Postgres(engine.publishing(publisher)),
        }
    }

    fn with_slots(self, settings: &SlotSettings) -> Self {
        let is_dispatching = settings.dispatch_topic.is_some();
        match self {
            Self::Sqlite(engine) if is_dispatching => Self::Sqlite(engine.dispatching()),
            Self::Sqlite(engine) => Self::Sqlite(engine),
            Self::Postgres(engine) => {
                let engine = engine.with_headroom(settings.headroom);
                Self::Postgres(if is_dispatching { engine.dispatching() } else { engine })
            }
        }
    }

    /// Its name in health checks.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Sqlite(_) => weir_store_sqlite::ENGINE,
            Self::Postgres(_) => weir_store_postgres::ENGINE,
        }
    }

    /// How many batches of one kind it takes at once: one writer on SQLite, a few connections on Postgres.
    #[must_use]
    pub fn lanes(&self, settings: &Settings) -> u16 {
        match self {
            Self::Sqlite(_) => 1,
            Self::Postgres(_) => u16::try_from(settings.lane.postgres_lanes).unwrap_or(1),
        }
    }

    /// How many batches of one lane it takes at once and still in order: the SQLite writer finds the next one waiting
    /// when it is done with one; two transactions on Postgres could overtake each other.
    #[must_use]
    pub const fn in_flight(&self) -> usize {
        match self {
            Self::Sqlite(_) => 2,
            Self::Postgres(_) => 1,
        }
    }

    /// Where slots are.
    #[must_use]
    pub fn slots(&self) -> Arc<dyn SlotStore> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// Where requests are.
    #[must_use]
    pub fn requests(&self) -> Arc<dyn RequestStore> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// Where subscriptions, tiers, policies and holds are.
    #[must_use]
    pub fn tiers(&self) -> Arc<dyn TierStore> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// Where sales are.
    #[must_use]
    pub fn sales(&self) -> Arc<dyn SaleStore> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// Whether other processes may change what it holds.
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        match self {
            Self::Sqlite(_) => false,
            Self::Postgres(_) => true,
        }
    }

    /// Where purchases are written down that Redis has decided.
    #[must_use]
    pub fn sale_ledger(&self) -> Arc<dyn SaleLedger> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// The clock by which it decides, where this process can read it.
    #[must_use]
    pub fn readable_clock(&self) -> Option<Arc<dyn Clock>> {
        match self {
            Self::Sqlite(engine) => Some(engine.clock()),
            Self::Postgres(engine) => engine.test_clock(),
        }
    }

    /// Where slots that are due are taken.
    #[must_use]
    pub fn due(&self) -> Arc<dyn DueStore> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// What is heard of new limits on other servers.
    #[must_use]
    pub fn feed(&self) -> Arc<Feed> {
        match self {
            Self::Sqlite(_) => Arc::new(Feed::alone()),
            Self::Postgres(engine) => engine.feed(),
        }
    }

    /// The clock by which this process tells how long something takes. It never steps.
    #[must_use]
    pub fn steady_clock(&self) -> Arc<dyn Clock> {
        let test_clock = match self {
            Self::Sqlite(engine) => engine.test_clock(),
            Self::Postgres(engine) => engine.test_clock(),
        };
        test_clock.unwrap_or_else(|| Arc::new(SteadyClock))
    }

    /// The clock that decides, and what is done when it was set back.
    #[must_use]
    pub fn store_clock(&self) -> Arc<dyn StoreClock> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// The clock by which this process tells what time it is: for ids, which need not be exact, and for signatures.
    #[must_use]
    pub fn wall_clock(&self) -> Arc<dyn Clock> {
        match self {
            Self::Sqlite(engine) => engine.clock(),
            Self::Postgres(engine) => engine.test_clock().unwrap_or_else(|| SystemClock::shared()),
        }
    }

    /// Where messages wait.
    #[must_use]
    pub fn queue(&self) -> Arc<dyn Queue> {
        match self {
            Self::Sqlite(engine) => Arc::new(engine.clone()),
            Self::Postgres(engine) => Arc::new(engine.clone()),
        }
    }

    /// Why it takes no writes, where this process knows without asking; `None` while it does.
    #[must_use]
    pub fn storage_problem(&self) -> Option<&'static str> {
        match self {
            Self::Sqlite(engine) => engine.storage_problem(),
            Self::Postgres(_) => None,
        }
    }

    /// How the writer of an engine in this process tells about itself.
    #[must_use]
    pub fn writer_metrics(&self) -> WriterMetrics {
        match self {
            Self::Sqlite(engine) => engine.writer_metrics(),
            Self::Postgres(_) => WriterMetrics::default(),
        }
    }

    /// Makes sure that it answers.
    ///
    /// # Errors
    /// When it does not.
    pub async fn ping(&self) -> Result<()> {
        match self {
            Self::Sqlite(engine) => engine.ping().await,
            Self::Postgres(engine) => engine.ping().await,
        }
    }
}

/// Asks again for as long as a start waits for a database: one that is busy may take longer than a call may.
///
/// # Errors
/// When it did not answer in that time, or answered with something that asking again does not mend.
pub(crate) async fn patiently<T, F: Future<Output = Result<T>>>(ask: impl Fn() -> F) -> Result<T> {
    let give_up_at = Instant::now() + START_PATIENCE;
    loop {
        match ask().await {
            Err(error) if error.is_transient() && Instant::now() < give_up_at => {
                tracing::warn!(error = %error.with_causes(), "waiting for the store");
                tokio::time::sleep(PAUSE).await;
            }
            outcome => return outcome,
        }
    }
}

/// A database that is just starting is waited for; one that refuses our password, or has no such database, is not.
async fn open_patiently(
    target: &Target,
    connections: usize,
    clock: Option<Arc<dyn Clock>>,
) -> Result<Postgres> {
    let give_up_at = Instant::now() + START_PATIENCE;
    let mut pause = Duration::from_millis(100);
    loop {
        let error = match Postgres::open_with_clock(target.clone(), connections, clock.clone()).await {
            Ok(engine) => return Ok(engine),
            Err(error) => error,
        };
        if !error.is_transient()
            || weir_store_postgres::is_refusal(&error)
            || Instant::now() + pause > give_up_at
        {
            return Err(error);
        }
        tracing::warn!(address = %target.address(), error = %error.with_causes(), "waiting for Postgres");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}
