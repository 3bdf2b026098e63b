//! The cases of slot on Postgres, each in a database of its own.

use std::sync::Arc;

use weir_store::slot::SlotStore;
use weir_store_conformance::slot::SlotHarness;
use weir_store_postgres::Postgres;
use weir_testkit::postgres::{Database, Server};

struct OnPostgres {
    database: Arc<Database>,
    engine: Postgres,
}

impl OnPostgres {
    async fn on(database: Arc<Database>) -> Self {
        let target = database.url().parse().expect("a Postgres URL");
        let engine = Postgres::open(target, 8).await.expect("it opens");
        Self { database, engine }
    }
}

#[async_trait::async_trait]
impl SlotHarness for OnPostgres {
    async fn open() -> Self {
        Self::on(Arc::new(Server::shared().database("slot").await)).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres")
    }

    fn slots(&self) -> Arc<dyn SlotStore> {
        Arc::new(self.engine.clone())
    }

    async fn reopen(self) -> Self {
        let Self { database, engine } = self;
        drop(engine);
        Self::on(database).await
    }

    async fn another(&self) -> Option<Self> {
        Some(Self::on(Arc::clone(&self.database)).await)
    }
}

weir_store_conformance::slot_suite!(OnPostgres);
