//! The cases of slot on Postgres, each in a database of its own.

mod held;

use std::sync::Arc;

use weir_core::ManualClock;
use weir_queue::Queue;
use weir_queue::due::DueStore;
use weir_store::slot::SlotStore;
use weir_store_conformance::PATIENCE;
use weir_store_conformance::START;
use weir_store_conformance::slot::SlotHarness;
use weir_store_postgres::Postgres;
use weir_testkit::postgres::{Database, Server};

struct OnPostgres {
    database: Arc<Database>,
    clock: Arc<ManualClock>,
    engine: Postgres,
}

impl OnPostgres {
    async fn on(database: Arc<Database>, clock: Arc<ManualClock>) -> Self {
        let target: weir_store_postgres::Target = database.url().parse().expect("a Postgres URL");
        let time = Arc::<ManualClock>::clone(&clock);
        let engine =
            Postgres::open_with_clock(target.with_patience(PATIENCE), 8, Some(time)).await.expect("it opens");
        Self { database, clock, engine }
    }
}

#[async_trait::async_trait]
impl SlotHarness for OnPostgres {
    async fn open() -> Self {
        let database = Arc::new(Server::shared().database("slot").await);
        Self::on(database, Arc::new(ManualClock::at(START))).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn slots(&self) -> Arc<dyn SlotStore> {
        Arc::new(self.engine.clone())
    }

    fn dispatching(&self) -> Arc<dyn SlotStore> {
        Arc::new(self.engine.clone().dispatching())
    }

    fn due(&self) -> Arc<dyn DueStore> {
        Arc::new(self.engine.clone())
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.engine.clone())
    }

    async fn reopen(self) -> Self {
        let Self { database, clock, engine } = self;
        drop(engine);
        Self::on(database, clock).await
    }

    async fn another(&self) -> Option<Self> {
        Some(Self::on(Arc::clone(&self.database), Arc::clone(&self.clock)).await)
    }
}

weir_store_conformance::slot_suite!(OnPostgres);
