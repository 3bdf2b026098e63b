//! The cases of slot on the embedded engine.

use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use weir_core::ManualClock;
use weir_queue::Queue;
use weir_queue::due::DueStore;
use weir_store::slot::SlotStore;
use weir_store_conformance::START;
use weir_store_conformance::slot::SlotHarness;
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
impl SlotHarness for Embedded {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::at(START));
        let engine = open(directory.path(), &clock);
        Self { directory, clock, engine }
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
        let Self { directory, clock, engine } = self;
        drop(engine);
        let engine = open(directory.path(), &clock);
        Self { directory, clock, engine }
    }
}

weir_store_conformance::slot_suite!(Embedded);
