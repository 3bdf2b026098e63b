//! The engine that holds the state, behind the traits that services use. Only this file knows which engine it is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_core::Clock;
use weir_queue::Queue;
use weir_queue::due::DueStore;
use weir_queue::publish::Publisher;
use weir_store::limit_changes::LimitChangeFeed;
use weir_store::quota::{CacheMetrics, QuotaStore, ReservableStore};
use weir_store::request::RequestStore;
use weir_store::sale::{SaleLedger, SaleStore};
use weir_store::slot::SlotStore;
use weir_store::tier::TierStore;
use weir_store::writer_metrics::WriterMetrics;
use weir_store::{LaneSettings, Result, SteadyClock, StoreClock, StoreHealth, SystemClock};
use weir_store_postgres::{Postgres, PostgresTarget};
use weir_store_redis::{Redis, RedisQuota};
use weir_store_sqlite::Sqlite;

use super::START_TIMEOUT;
use crate::settings::Settings;
use crate::settings::store::EngineChoice;

/// Everything an engine does for Weir.
trait Engine:
    QuotaStore
    + SlotStore
    + DueStore
    + RequestStore
    + TierStore
    + SaleStore
    + SaleLedger
    + Queue
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
    /// Whether other processes may change what it holds.
    pub is_shared: bool,
    /// How lanes are to be laid out before it.
    pub lane_settings: LaneSettings,
    /// Quota; with Redis, the hot path is there.
    pub quota: Arc<dyn QuotaStore>,
    /// Slots.
    pub slots: Arc<dyn SlotStore>,
    /// Slots that are due.
    pub due: Arc<dyn DueStore>,
    /// Requests.
    pub requests: Arc<dyn RequestStore>,
    /// Subscriptions, tiers, policies and holds.
    pub tiers: Arc<dyn TierStore>,
    /// Sales that the engine itself decides.
    pub sales: Arc<dyn SaleStore>,
    /// Purchases that Redis has decided.
    pub sale_ledger: Arc<dyn SaleLedger>,
    /// Messages.
    pub queue: Arc<dyn Queue>,
    /// Whether it answers.
    pub health: Arc<dyn StoreHealth>,
    /// The clock that decides, and what is done when it was set back.
    pub clock: Arc<dyn StoreClock>,
    /// The same clock, where this process can read it.
    pub readable_clock: Option<Arc<dyn Clock>>,
    /// The clock that measures durations in this process. It never steps.
    pub steady_clock: Arc<dyn Clock>,
    /// The clock that tells the time of day, for ids, which need not be exact, and for signatures.
    pub wall_clock: Arc<dyn Clock>,
    /// New limits that other servers have set.
    pub limit_changes: Arc<LimitChangeFeed>,
    /// Metrics of a writer in this process.
    pub writer_metrics: WriterMetrics,
}

/// What of a store depends on which engine it is, beyond the traits.
struct Differences {
    name: &'static str,
    is_shared: bool,
    lanes: u16,
    in_flight: usize,
    clock: Option<Arc<dyn Clock>>,
    test_clock: Option<Arc<dyn Clock>>,
    limit_changes: Arc<LimitChangeFeed>,
    writer_metrics: WriterMetrics,
}

/// What stands around an engine and changes how it is set up.
pub(super) struct Surroundings<'a> {
    /// Replaces the engine's clock, for tests.
    pub(super) clock: Option<Arc<dyn Clock>>,
    /// Takes accepted messages in place of the engine's own queue.
    pub(super) publisher: Option<Arc<dyn Publisher>>,
    /// Takes the hot path of quota.
    pub(super) redis: Option<&'a Redis>,
    pub(super) cache_metrics: &'a CacheMetrics,
}

impl Store {
    /// Opens the engine the settings name.
    /// Fails when it cannot be opened, or a database does not answer within half a minute.
    pub(super) async fn open(settings: &Settings, around: Surroundings<'_>) -> Result<Self> {
        match &settings.store.engine {
            EngineChoice::Embedded => Self::open_sqlite(settings, around),
            EngineChoice::Postgres(target) => Self::open_postgres(settings, target, around).await,
        }
    }

    fn open_sqlite(settings: &Settings, around: Surroundings<'_>) -> Result<Self> {
        let data = &settings.process.data;
        let mut engine = match around.clock {
            Some(clock) => Sqlite::open_with_clock(data, clock)?,
            None => Sqlite::open(data)?,
        };
        if let Some(publisher) = around.publisher {
            engine = engine.publishing(publisher);
        }
        if settings.slot.dispatch_topic.is_some() {
            engine = engine.dispatching();
        }
        let differences = Differences {
            name: weir_store_sqlite::ENGINE,
            is_shared: false,
            // There is one writer. It takes batches in order, and finds the next one waiting when it is done with one.
            lanes: 1,
            in_flight: 2,
            clock: Some(engine.clock()),
            test_clock: engine.test_clock(),
            limit_changes: Arc::new(LimitChangeFeed::single_process()),
            writer_metrics: engine.writer_metrics(),
        };
        Ok(Self::new(Arc::new(engine), differences, settings))
    }

    async fn open_postgres(
        settings: &Settings,
        target: &PostgresTarget,
        around: Surroundings<'_>,
    ) -> Result<Self> {
        let connections = settings.store.postgres_connections;
        let mut engine = open_patiently(target, connections, around.clock.clone()).await?;
        engine = engine.with_headroom(settings.slot.headroom);
        if let Some(publisher) = around.publisher {
            engine = engine.publishing(publisher);
        }
        if settings.slot.dispatch_topic.is_some() {
            engine = engine.dispatching();
        }
        let differences = Differences {
            name: weir_store_postgres::ENGINE,
            is_shared: true,
            lanes: u16::try_from(settings.lane.postgres_lanes).unwrap_or(1),
            // Two transactions of one lane could overtake each other.
            in_flight: 1,
            clock: engine.test_clock(),
            test_clock: engine.test_clock(),
            limit_changes: ReservableStore::limit_changes(&engine),
            writer_metrics: WriterMetrics::default(),
        };
        let mut store = Self::new(Arc::new(engine.clone()), differences, settings);
        if let Some(redis) = around.redis {
            let backing = Arc::new(engine.behind_cache());
            let metrics = around.cache_metrics.clone();
            store.quota = Arc::new(RedisQuota::new(redis.clone(), backing, around.clock, metrics));
        }
        Ok(store)
    }

    fn new<E: Engine>(engine: Arc<E>, differences: Differences, settings: &Settings) -> Self {
        let Differences { name, is_shared, lanes, in_flight, clock, test_clock, .. } = differences;
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
            health: Arc::<E>::clone(&engine),
            clock: engine,
            readable_clock: clock,
            steady_clock: test_clock.unwrap_or_else(|| Arc::new(SteadyClock)),
            wall_clock: wall_clock.unwrap_or_else(|| SystemClock::shared()),
            limit_changes: differences.limit_changes,
            writer_metrics: differences.writer_metrics,
        }
    }
}

/// A database that is just starting is waited for; one that refuses our password, or has no such database, is not.
async fn open_patiently(
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
        tracing::warn!(address = %target.address(), error = %error.with_causes(), "waiting for Postgres");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}
