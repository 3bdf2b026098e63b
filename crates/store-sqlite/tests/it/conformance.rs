//! The conformance suite on the embedded engine.

use std::sync::Arc;

use tempfile::TempDir;
use weir_core::ManualClock;
use weir_queue::Queue;
use weir_store::quota::QuotaStore;
use weir_store_conformance::{Harness, START};
use weir_store_sqlite::Sqlite;

/// With `IN_TURNS` every job of the writer is done in as many turns as it can be.
struct Embedded<const IN_TURNS: bool> {
    directory: TempDir,
    clock: ManualClock,
    engine: Sqlite,
}

impl<const IN_TURNS: bool> Embedded<IN_TURNS> {
    fn on(directory: TempDir, clock: ManualClock) -> Self {
        let engine = crate::open::<IN_TURNS>(directory.path(), Arc::new(clock.clone()));
        Self { directory, clock, engine }
    }
}

#[async_trait::async_trait]
impl<const IN_TURNS: bool> Harness for Embedded<IN_TURNS> {
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

weir_store_conformance::suite!(Embedded<false>);

mod in_turns {
    weir_store_conformance::suite!(super::Embedded<true>);
}
