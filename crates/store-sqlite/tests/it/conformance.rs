//! The conformance suite on the embedded engine.

use std::sync::Arc;

use tempfile::TempDir;
use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::quota::QuotaStore;
use weir_store_conformance::{Harness, START};
use weir_store_sqlite::Sqlite;

struct Embedded {
    directory: TempDir,
    clock: ManualClock,
    engine: Sqlite,
}

impl Embedded {
    fn on(directory: TempDir, clock: ManualClock) -> Self {
        let engine = Sqlite::open_with_clock(directory.path(), Arc::new(clock.clone())).expect("it opens");
        Self { directory, clock, engine }
    }
}

#[async_trait::async_trait]
impl Harness for Embedded {
    async fn open() -> Self {
        Self::on(tempfile::tempdir().expect("a directory"), ManualClock::at(START))
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn quota(&self) -> Arc<dyn QuotaStore> {
        Arc::new(self.engine.clone())
    }

    fn queue(&self) -> Arc<dyn Queue> {
        Arc::new(self.engine.clone())
    }

    fn store_clock(&self) -> Option<Arc<dyn weir_store::StoreClock>> {
        Some(Arc::new(self.engine.clone()))
    }

    async fn reopen(self) -> Self {
        let Self { directory, clock, engine } = self;
        drop(engine);
        Self::on(directory, clock)
    }
}

weir_store_conformance::suite!(Embedded);
