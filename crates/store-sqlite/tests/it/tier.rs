//! The cases of tier on the embedded engine: limits in memory, kept by SQLite.

use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use weir_core::ManualClock;
use weir_limiter::LocalLimiter;
use weir_store::tier::{LimitStore, TierStore};
use weir_store_conformance::START;
use weir_store_conformance::tier::TierHarness;
use weir_store_sqlite::Sqlite;

/// With `IN_TURNS` every job of the writer is done in as many turns as it can be.
struct Embedded<const IN_TURNS: bool> {
    directory: TempDir,
    clock: Arc<ManualClock>,
    engine: Sqlite,
    limits: LocalLimiter,
}

async fn open<const IN_TURNS: bool>(directory: &Path, clock: &Arc<ManualClock>) -> (Sqlite, LocalLimiter) {
    let engine = crate::open::<IN_TURNS>(directory, Arc::<ManualClock>::clone(clock));
    let store = Arc::new(engine.clone());
    let limits =
        LocalLimiter::open(store, Arc::<ManualClock>::clone(clock), 100_000).await.expect("it opens");
    (engine, limits)
}

#[async_trait::async_trait]
impl<const IN_TURNS: bool> TierHarness for Embedded<IN_TURNS> {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::at(START));
        let (engine, limits) = open::<IN_TURNS>(directory.path(), &clock).await;
        Self { directory, clock, engine, limits }
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn limits(&self) -> Arc<dyn LimitStore> {
        Arc::new(self.limits.clone())
    }

    fn definitions(&self) -> Option<Arc<dyn TierStore>> {
        Some(Arc::new(self.engine.clone()))
    }

    async fn reopen(self) -> Self {
        let Self { directory, clock, engine, limits } = self;
        limits.drain().await;
        drop((engine, limits));
        let (engine, limits) = open::<IN_TURNS>(directory.path(), &clock).await;
        Self { directory, clock, engine, limits }
    }
}

weir_store_conformance::tier_suite!(Embedded<false>);

mod in_turns {
    weir_store_conformance::tier_suite!(super::Embedded<true>);
}
