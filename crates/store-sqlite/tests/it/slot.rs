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

/// With `IN_TURNS` every job of the writer is done in as many turns as it can be.
struct Embedded<const IN_TURNS: bool> {
    directory: TempDir,
    clock: Arc<ManualClock>,
    engine: Sqlite,
}

fn open<const IN_TURNS: bool>(directory: &Path, clock: &Arc<ManualClock>) -> Sqlite {
    crate::open::<IN_TURNS>(directory, Arc::<ManualClock>::clone(clock))
}

#[async_trait::async_trait]
impl<const IN_TURNS: bool> SlotHarness for Embedded<IN_TURNS> {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::at(START));
        let engine = open::<IN_TURNS>(directory.path(), &clock);
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
        let engine = open::<IN_TURNS>(directory.path(), &clock);
        Self { directory, clock, engine }
    }
}

weir_store_conformance::slot_suite!(Embedded<false>);

mod in_turns {
    weir_store_conformance::slot_suite!(super::Embedded<true>);
}
