//! The cases of request on Postgres, each in a database of its own.

use std::sync::Arc;

use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::request::RequestStore;
use weir_store_conformance::PATIENCE;
use weir_store_conformance::START;
use weir_store_conformance::request::RequestHarness;
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
impl RequestHarness for OnPostgres {
    async fn open() -> Self {
        let database = Arc::new(Server::shared().database("request").await);
        Self::on(database, Arc::new(ManualClock::at(START))).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn requests(&self) -> Arc<dyn RequestStore> {
        Arc::new(self.engine.clone())
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.engine.clone())
    }

    fn store_clock(&self) -> Option<Arc<dyn weir_store::StoreClock>> {
        Some(Arc::new(self.engine.clone()))
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

weir_store_conformance::request_suite!(OnPostgres);
