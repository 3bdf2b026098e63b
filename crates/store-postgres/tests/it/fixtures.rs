//! The engine fixture of this crate: a database for each case, and limits in memory that are saved in it.

use std::sync::Arc;

use weir_core::ManualClock;
use weir_limiter::LocalLimiter;
use weir_queue::Queue;
use weir_queue::due::DueStore;
use weir_store::StoreClock;
use weir_store::book::BookStore;
use weir_store::quota::QuotaStore;
use weir_store::request::RequestStore;
use weir_store::sale::SaleStore;
use weir_store::slot::SlotStore;
use weir_store::tier::{LimitStore, TierStore};
use weir_store_conformance::{
    ENGINE_TIMEOUT, EngineFixture, HasLimits, HasQueue, HasQuota, HasRequests, HasSales, HasSlots, START,
};
use weir_store_postgres::{Postgres, PostgresTarget};
use weir_testkit::postgres::{Database, Server};

pub(crate) struct PostgresFixture {
    pub(crate) database: Arc<Database>,
    clock: ManualClock,
    pub(crate) engine: Postgres,
    limits: LocalLimiter,
}

impl PostgresFixture {
    async fn on(database: Arc<Database>, clock: ManualClock) -> Self {
        let url = database.url().to_owned();
        Self::via(&url, 8, database, clock).await
    }

    /// Opens an engine on this URL of the database with so many connections.
    pub(crate) async fn via(
        url: &str,
        connections: usize,
        database: Arc<Database>,
        clock: ManualClock,
    ) -> Self {
        let target: PostgresTarget = url.parse().expect("a Postgres URL");
        let time = Arc::new(clock.clone());
        let engine = Postgres::open_with_clock(
            target.with_call_timeout(ENGINE_TIMEOUT),
            connections,
            Some(time.clone()),
        )
        .await
        .expect("it opens");
        let limits = LocalLimiter::open(Arc::new(engine.clone()), time, 100_000).await.expect("it opens");
        Self { database, clock, engine, limits }
    }
}

#[async_trait::async_trait]
impl EngineFixture for PostgresFixture {
    async fn open() -> Self {
        let database = Server::shared().database("conformance").await;
        Self::on(Arc::new(database), ManualClock::at(START)).await
    }

    fn skipped() -> bool {
        weir_testkit::skip("postgres")
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn store_clock(&self) -> Option<Arc<dyn StoreClock>> {
        Some(Arc::new(self.engine.clone()))
    }

    fn books(&self) -> Option<Arc<dyn BookStore>> {
        Some(Arc::new(self.engine.clone()))
    }

    async fn reopen(self) -> Self {
        let Self { database, clock, engine, limits } = self;
        limits.drain().await;
        drop((engine, limits));
        Self::on(database, clock).await
    }

    async fn second_server(&self) -> Option<Self> {
        Some(Self::on(Arc::clone(&self.database), self.clock.clone()).await)
    }
}

impl HasQueue for PostgresFixture {
    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.engine.clone())
    }
}

#[async_trait::async_trait]
impl HasQuota for PostgresFixture {
    fn quota(&self) -> Arc<dyn QuotaStore> {
        Arc::new(self.engine.clone())
    }

    async fn count_max(&self, user: &str) -> u32 {
        self.database.quota_count_max(user).await
    }
}

impl HasRequests for PostgresFixture {
    fn requests(&self) -> Arc<dyn RequestStore> {
        Arc::new(self.engine.clone())
    }
}

impl HasSlots for PostgresFixture {
    fn slots(&self) -> Arc<dyn SlotStore> {
        Arc::new(self.engine.clone())
    }

    fn dispatching_slots(&self) -> Arc<dyn SlotStore> {
        Arc::new(self.engine.clone().dispatching())
    }

    fn due(&self) -> Arc<dyn DueStore> {
        Arc::new(self.engine.clone())
    }
}

impl HasLimits for PostgresFixture {
    fn limits(&self) -> Arc<dyn LimitStore> {
        Arc::new(self.limits.clone())
    }

    fn definitions(&self) -> Option<Arc<dyn TierStore>> {
        Some(Arc::new(self.engine.clone()))
    }

    /// Postgres stores what each server has counted; it does not add the counts up.
    fn servers_share_counts() -> bool {
        false
    }
}

impl HasSales for PostgresFixture {
    fn sales(&self) -> Arc<dyn SaleStore> {
        Arc::new(self.engine.clone())
    }
}
