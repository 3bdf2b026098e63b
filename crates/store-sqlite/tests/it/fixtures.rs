//! The embedded engine for the suites: SQLite in a temporary directory, and the limiter in memory that saves to it.

use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use tempfile::TempDir;
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
    EngineFixture, HasLimits, HasQueue, HasQuota, HasRequests, HasSales, HasSlots, START,
};
use weir_store_sqlite::Sqlite;

/// With `IN_TURNS` every job of the writer takes as many turns as possible.
pub(crate) struct Embedded<const IN_TURNS: bool> {
    directory: TempDir,
    clock: ManualClock,
    pub(crate) engine: Sqlite,
    limits: LocalLimiter,
}

impl<const IN_TURNS: bool> Embedded<IN_TURNS> {
    async fn on(directory: TempDir, clock: ManualClock) -> Self {
        let engine = Sqlite::open_with_clock(directory.path(), Arc::new(clock.clone())).expect("it opens");
        let engine = if IN_TURNS { engine.with_turns_of(Duration::ZERO) } else { engine };
        let (store, time) = (Arc::new(engine.clone()), Arc::new(clock.clone()));
        let limits = LocalLimiter::open(store, time, 100_000).await.expect("it opens");
        Self { directory, clock, engine, limits }
    }
}

#[async_trait::async_trait]
impl<const IN_TURNS: bool> EngineFixture for Embedded<IN_TURNS> {
    async fn open() -> Self {
        Self::on(tempfile::tempdir().expect("a directory"), ManualClock::at(START)).await
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
        let Self { directory, clock, engine, limits } = self;
        limits.drain().await;
        drop((engine, limits));
        Self::on(directory, clock).await
    }
}

impl<const IN_TURNS: bool> HasQueue for Embedded<IN_TURNS> {
    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.engine.clone())
    }
}

#[async_trait::async_trait]
impl<const IN_TURNS: bool> HasQuota for Embedded<IN_TURNS> {
    fn quota(&self) -> Arc<dyn QuotaStore> {
        Arc::new(self.engine.clone())
    }

    async fn count_max(&self, user: &str) -> u32 {
        let sql = "SELECT max(rate_limit, kept_count) FROM rate_limit_store WHERE user_id = ?1";
        let connection = Connection::open(self.directory.path().join("weir.db")).expect("it opens");
        connection.query_row(sql, [user], |row| row.get(0)).expect("the user is configured")
    }
}

impl<const IN_TURNS: bool> HasRequests for Embedded<IN_TURNS> {
    fn requests(&self) -> Arc<dyn RequestStore> {
        Arc::new(self.engine.clone())
    }
}

impl<const IN_TURNS: bool> HasSlots for Embedded<IN_TURNS> {
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

impl<const IN_TURNS: bool> HasLimits for Embedded<IN_TURNS> {
    fn limits(&self) -> Arc<dyn LimitStore> {
        Arc::new(self.limits.clone())
    }

    fn definitions(&self) -> Option<Arc<dyn TierStore>> {
        Some(Arc::new(self.engine.clone()))
    }
}

impl<const IN_TURNS: bool> HasSales for Embedded<IN_TURNS> {
    fn sales(&self) -> Arc<dyn SaleStore> {
        Arc::new(self.engine.clone())
    }
}
