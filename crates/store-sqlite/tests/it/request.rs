//! The cases of request on the embedded engine.

use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::request::RequestStore;
use weir_store_conformance::START;
use weir_store_conformance::request::RequestHarness;
use weir_store_sqlite::Sqlite;

struct Embedded {
    directory: TempDir,
    clock: Arc<ManualClock>,
    engine: Sqlite,
}

fn open(directory: &Path, clock: &Arc<ManualClock>) -> Sqlite {
    Sqlite::open_with_clock(directory, Arc::<ManualClock>::clone(clock)).expect("it opens")
}

#[async_trait::async_trait]
impl RequestHarness for Embedded {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::at(START));
        let engine = open(directory.path(), &clock);
        Self { directory, clock, engine }
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
        let Self { directory, clock, engine } = self;
        drop(engine);
        let engine = open(directory.path(), &clock);
        Self { directory, clock, engine }
    }
}

weir_store_conformance::request_suite!(Embedded);
