//! The cases of tier with definitions in Postgres, and limits in memory that it keeps.

use std::sync::Arc;

use weir_core::ManualClock;
use weir_limiter::LocalLimiter;
use weir_store::tier::{LimitStore, TierStore};
use weir_store_conformance::START;
use weir_store_conformance::tier::TierHarness;
use weir_store_postgres::Postgres;
use weir_testkit::postgres::{self, Database};

struct OnPostgres {
    database: Arc<Database>,
    clock: Arc<ManualClock>,
    engine: Postgres,
    limits: LocalLimiter,
}

impl OnPostgres {
    async fn on(database: Arc<Database>, clock: Arc<ManualClock>) -> Self {
        let target = database.url().parse().expect("a Postgres URL");
        let time = Arc::<ManualClock>::clone(&clock);
        let engine = Postgres::open_with_clock(target, 8, Some(time)).await.expect("it opens");
        let (store, time) = (Arc::new(engine.clone()), Arc::<ManualClock>::clone(&clock));
        let limits = LocalLimiter::open(store, time, 100_000).await.expect("it opens");
        Self { database, clock, engine, limits }
    }
}

#[async_trait::async_trait]
impl TierHarness for OnPostgres {
    async fn open() -> Self {
        let database = Arc::new(postgres::Server::shared().database("tier").await);
        Self::on(database, Arc::new(ManualClock::at(START))).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn limits(&self) -> Arc<dyn LimitStore> {
        Arc::new(self.limits.clone())
    }

    fn definitions(&self) -> Option<Arc<dyn TierStore>> {
        Some(Arc::new(self.engine.clone()))
    }

    async fn reopen(self) -> Self {
        let Self { database, clock, engine, limits } = self;
        limits.drain().await;
        drop((engine, limits));
        Self::on(database, clock).await
    }
}

weir_store_conformance::tier_suite!(OnPostgres);
