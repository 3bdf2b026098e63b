//! The engine that holds the state, SQLite or Postgres, behind the traits that services use. Only this file knows which one
//! it is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_core::Clock;
use weir_queue::Queue;
use weir_queue::due::DueStore;
use weir_queue::publish::Publisher;
use weir_store::book::BookStore;
use weir_store::engine_calls::EngineCalls;
use weir_store::limit_changes::LimitChangeFeed;
use weir_store::quota::{CacheMetrics, QuotaStore, ReservableStore};
use weir_store::request::RequestStore;
use weir_store::sale::{SaleLedger, SaleStore};
use weir_store::slot::SlotStore;
use weir_store::tier::TierStore;
use weir_store::writer_metrics::WriterMetrics;
use weir_store::{LaneSettings, Result, SteadyClock, StoreClock, StoreHealth, SystemClock};
use weir_store_postgres::{Postgres, PostgresTarget};
use weir_store_redis::{QuotaTimes, Redis, RedisQuota};
use weir_store_sqlite::Sqlite;

use super::START_TIMEOUT;
use crate::settings::Settings;
use crate::settings::store::{EngineChoice, Formats};

/// The traits that every engine implements.
trait Engine:
    QuotaStore
    + SlotStore
    + DueStore
    + RequestStore
    + TierStore
    + SaleStore
    + SaleLedger
    + Queue
    + BookStore
    + StoreClock
    + StoreHealth
    + 'static
{
}

impl Engine for Sqlite {}
impl Engine for Postgres {}

/// The engine that holds the state.
#[derive(Clone)]
pub struct Store {
    /// Its name in health checks.
    pub name: &'static str,
    /// Whether other processes may change its state.
    pub is_shared: bool,
    pub lane_settings: LaneSettings,
    /// With Redis, this serves the hot path from there.
    pub quota: Arc<dyn QuotaStore>,
    pub slots: Arc<dyn SlotStore>,
    /// Slots whose time has come.
    pub due: Arc<dyn DueStore>,
    pub requests: Arc<dyn RequestStore>,
    /// Subscriptions, tiers, policies and holds.
    pub tiers: Arc<dyn TierStore>,
    /// Sales that the engine itself decides.
    pub sales: Arc<dyn SaleStore>,
    /// Purchases that Redis has decided.
    pub sale_ledger: Arc<dyn SaleLedger>,
    pub queue: Arc<dyn Queue>,
    /// Its own counts of its rows.
    pub books: Arc<dyn BookStore>,
    pub health: Arc<dyn StoreHealth>,
    /// The clock that decides, and its handling of steps back.
    pub clock: Arc<dyn StoreClock>,
    /// The clock that decides, if it is in this process.
    pub readable_clock: Option<Arc<dyn Clock>>,
    /// The clock that measures durations in this process. It never steps.
    pub steady_clock: Arc<dyn Clock>,
    /// The time of day, for signatures and for ids, which need not be exact.
    pub wall_clock: Arc<dyn Clock>,
    /// Limits that other servers have changed.
    pub limit_changes: Arc<LimitChangeFeed>,
    /// The duration of its calls.
    pub calls: EngineCalls,
    /// The metrics of the SQLite writer.
    pub writer_metrics: WriterMetrics,
}

/// The properties of an engine that are not part of the traits.
struct EngineProperties {
    name: &'static str,
    is_shared: bool,
    lanes: u16,
    in_flight: usize,
    clock: Option<Arc<dyn Clock>>,
    test_clock: Option<Arc<dyn Clock>>,
    limit_changes: Arc<LimitChangeFeed>,
    calls: EngineCalls,
    writer_metrics: WriterMetrics,
}

/// How an engine is set up, besides the settings.
pub(super) struct EngineOptions<'a> {
    /// Replaces the engine's clock, for tests.
    pub(super) clock: Option<Arc<dyn Clock>>,
    /// Receives accepted messages instead of the engine's own queue.
    pub(super) publisher: Option<Arc<dyn Publisher>>,
    /// Serves the hot path of quota.
    pub(super) redis: Option<&'a Redis>,
    pub(super) cache_metrics: &'a CacheMetrics,
}

impl Store {
    /// Opens the engine that the settings choose.
    /// Fails when it cannot be opened, or a database does not answer within half a minute.
    pub(super) async fn open(settings: &Settings, options: EngineOptions<'_>) -> Result<Self> {
        match &settings.store.engine {
            EngineChoice::Embedded => Self::open_sqlite(settings, options),
            EngineChoice::Postgres(target) => Self::open_postgres(settings, target, options).await,
        }
    }

    fn open_sqlite(settings: &Settings, options: EngineOptions<'_>) -> Result<Self> {
        let data = &settings.process.data;
        let mut engine = match options.clock {
            Some(clock) => Sqlite::open_with_clock(data, clock)?,
            None => Sqlite::open(data)?,
        };
        if let Some(publisher) = options.publisher {
            engine = engine.publishing(publisher);
        }
        if settings.slot.dispatch_topic.is_some() {
            engine = engine.dispatching();
        }
        let properties = EngineProperties {
            name: weir_store_sqlite::ENGINE,
            is_shared: false,
            // SQLite has one writer, which takes batches in order. The second batch in flight waits for it.
            lanes: 1,
            in_flight: 2,
            clock: Some(engine.clock()),
            test_clock: engine.test_clock(),
            limit_changes: Arc::new(LimitChangeFeed::single_process()),
            calls: engine.calls(),
            writer_metrics: engine.writer_metrics(),
        };
        Ok(Self::new(Arc::new(engine), properties, settings))
    }

    async fn open_postgres(
        settings: &Settings,
        target: &PostgresTarget,
        options: EngineOptions<'_>,
    ) -> Result<Self> {
        let connections = settings.store.postgres_connections;
        let mut engine = open_postgres_at_start(target, connections, options.clock.clone()).await?;
        engine = engine.with_headroom(settings.slot.headroom);
        if let Some(publisher) = options.publisher {
            engine = engine.publishing(publisher);
        }
        if settings.slot.dispatch_topic.is_some() {
            engine = engine.dispatching();
        }
        let properties = EngineProperties {
            name: weir_store_postgres::ENGINE,
            is_shared: true,
            lanes: u16::try_from(settings.lane.postgres_lanes).unwrap_or(1),
            // Two transactions of one lane could overtake each other.
            in_flight: 1,
            clock: engine.test_clock(),
            test_clock: engine.test_clock(),
            limit_changes: ReservableStore::limit_changes(&engine),
            calls: engine.calls(),
            writer_metrics: WriterMetrics::default(),
        };
        let mut store = Self::new(Arc::new(engine.clone()), properties, settings);
        if let Some(redis) = options.redis {
            let has_only_new_servers = settings.store.formats == Formats::Newest;
            let backing = Arc::new(engine.behind_cache(has_only_new_servers).await?);
            let metrics = options.cache_metrics.clone();
            let (redis, clock) = (redis.clone(), options.clock);
            let times = QuotaTimes::default();
            store.quota = Arc::new(RedisQuota::new(redis, backing, clock, metrics, times));
        }
        Ok(store)
    }

    fn new<E: Engine>(engine: Arc<E>, properties: EngineProperties, settings: &Settings) -> Self {
        let EngineProperties { name, is_shared, lanes, in_flight, clock, test_clock, .. } = properties;
        let lane_settings = LaneSettings {
            lanes,
            in_flight,
            capacity: settings.lane.capacity,
            batch_max: settings.lane.batch_max,
            timeout: settings.http.timeout,
        };
        let wall_clock = clock.clone().or_else(|| test_clock.clone());
        Self {
            name,
            is_shared,
            lane_settings,
            quota: Arc::<E>::clone(&engine),
            slots: Arc::<E>::clone(&engine),
            due: Arc::<E>::clone(&engine),
            requests: Arc::<E>::clone(&engine),
            tiers: Arc::<E>::clone(&engine),
            sales: Arc::<E>::clone(&engine),
            sale_ledger: Arc::<E>::clone(&engine),
            queue: Arc::<E>::clone(&engine),
            books: Arc::<E>::clone(&engine),
            health: Arc::<E>::clone(&engine),
            clock: engine,
            readable_clock: clock,
            steady_clock: test_clock.unwrap_or_else(|| Arc::new(SteadyClock)),
            wall_clock: wall_clock.unwrap_or_else(|| SystemClock::shared()),
            limit_changes: properties.limit_changes,
            calls: properties.calls,
            writer_metrics: properties.writer_metrics,
        }
    }
}

/// Waits for a database server that is just starting, but not for one that refuses our password or lacks our database.
async fn open_postgres_at_start(
    target: &PostgresTarget,
    connections: usize,
    clock: Option<Arc<dyn Clock>>,
) -> Result<Postgres> {
    let give_up_at = Instant::now() + START_TIMEOUT;
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
        tracing::warn!(address = %target.address(), error = %error.with_causes(), "waiting for Postgres, which does not answer yet");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}
