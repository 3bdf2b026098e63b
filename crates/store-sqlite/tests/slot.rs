//! The cases of slot on the embedded engine.

use std::sync::Arc;

use tempfile::TempDir;
use weir_store::slot::SlotStore;
use weir_store_conformance::slot::SlotHarness;
use weir_store_sqlite::Sqlite;

struct Embedded {
    directory: TempDir,
    engine: Sqlite,
}

#[async_trait::async_trait]
impl SlotHarness for Embedded {
    async fn open() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let engine = Sqlite::open(directory.path()).expect("it opens");
        Self { directory, engine }
    }

    fn slots(&self) -> Arc<dyn SlotStore> {
        Arc::new(self.engine.clone())
    }

    async fn reopen(self) -> Self {
        let Self { directory, engine } = self;
        drop(engine);
        let engine = Sqlite::open(directory.path()).expect("it opens");
        Self { directory, engine }
    }
}

weir_store_conformance::slot_suite!(Embedded);
