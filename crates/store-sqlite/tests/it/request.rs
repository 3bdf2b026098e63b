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
impl<const IN_TURNS: bool> RequestHarness for Embedded<IN_TURNS> {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::at(START));
        let engine = open::<IN_TURNS>(directory.path(), &clock);
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
        let engine = open::<IN_TURNS>(directory.path(), &clock);
        Self { directory, clock, engine }
    }
}

weir_store_conformance::request_suite!(Embedded<false>);

mod in_turns {
    weir_store_conformance::request_suite!(super::Embedded<true>);
}
