//! The cases of sale on Postgres, each in a database of its own.

use std::sync::Arc;

use weir_core::ManualClock;
use weir_store::sale::SaleStore;
use weir_store_conformance::PATIENCE;
use weir_store_conformance::START;
use weir_store_conformance::sale::{SaleHarness, dead};
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
impl SaleHarness for OnPostgres {
    async fn open() -> Self {
        let database = Arc::new(Server::shared().database("sale").await);
        Self::on(database, Arc::new(ManualClock::at(START))).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn sales(&self) -> Arc<dyn SaleStore> {
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

weir_store_conformance::sale_suite!(OnPostgres);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_could_not_be_written_down_is_kept_once_and_can_be_tried_again() {
    if OnPostgres::skipped() {
        return;
    }
    let h = OnPostgres::open().await;
    dead::what_could_not_be_written_down_is_kept_once_and_can_be_tried_again(&h.engine).await;
}
