//! The cases of sale on the embedded engine.

use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use weir_core::ManualClock;
use weir_store::sale::SaleStore;
use weir_store_conformance::START;
use weir_store_conformance::sale::{SaleHarness, dead};
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
impl<const IN_TURNS: bool> SaleHarness for Embedded<IN_TURNS> {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::at(START));
        let engine = open::<IN_TURNS>(directory.path(), &clock);
        Self { directory, clock, engine }
    }

    fn clock(&self) -> &ManualClock {
        &self.clock
    }

    fn sales(&self) -> Arc<dyn SaleStore> {
        Arc::new(self.engine.clone())
    }

    async fn reopen(self) -> Self {
        let Self { directory, clock, engine } = self;
        drop(engine);
        let engine = open::<IN_TURNS>(directory.path(), &clock);
        Self { directory, clock, engine }
    }
}

weir_store_conformance::sale_suite!(Embedded<false>);

mod in_turns {
    weir_store_conformance::sale_suite!(super::Embedded<true>);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_could_not_be_written_down_is_kept_once_and_can_be_tried_again() {
    let h = Embedded::<false>::open().await;
    dead::what_could_not_be_written_down_is_kept_once_and_can_be_tried_again(&h.engine).await;
}
