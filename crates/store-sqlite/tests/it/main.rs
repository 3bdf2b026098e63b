//! The conformance suites on SQLite, and what a crash leaves.

mod conformance;
mod crash;
mod request;
mod sale;
mod slot;
mod tier;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use weir_core::Clock;
use weir_store_sqlite::Sqlite;

/// Opens an engine; with `IN_TURNS`, one whose writer lets others have their turn after every step of a job.
fn open<const IN_TURNS: bool>(directory: &Path, clock: Arc<dyn Clock>) -> Sqlite {
    let engine = Sqlite::open_with_clock(directory, clock).expect("it opens");
    if IN_TURNS { engine.with_turns_of(Duration::ZERO) } else { engine }
}
