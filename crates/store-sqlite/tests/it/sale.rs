//! The cases of sale on the embedded engine.

use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;
use weir_core::ManualClock;
use weir_store::sale::SaleStore;
use weir_store_conformance::START;
use weir_store_conformance::sale::{SaleHarness, dead};
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
impl SaleHarness for Embedded {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(ManualClock::at(START));
        let engine = open(directory.path(), &clock);
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
        let engine = open(directory.path(), &clock);
        Self { directory, clock, engine }
    }
}

weir_store_conformance::sale_suite!(Embedded);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_could_not_be_written_down_is_kept_once_and_can_be_tried_again() {
    let h = Embedded::open().await;
    dead::what_could_not_be_written_down_is_kept_once_and_can_be_tried_again(&h.engine).await;
}
