//! The embedded engine: one SQLite file, one writer thread, one fsync for all writes that wait together.
//!
//! One process owns the data directory, so queue leases live in memory: after a restart every claimed message can be
//! claimed again.

mod book;
mod clock;
mod error;
mod journal;
mod migrate;
mod multi_insert;
#[cfg(test)]
mod query_plan_tests;
mod queue;
mod quota;
mod read_pool;
mod request;
mod sale;
mod slot;
mod tier;
mod writer;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rusqlite::Connection;
use weir_core::Clock;
use weir_queue::notify::TopicNotify;
use weir_queue::publish::Publisher;
use weir_store::engine_calls::EngineCalls;
use weir_store::writer_metrics::WriterMetrics;
use weir_store::{Error, Result, StoreHealth, SystemClock};

use crate::error::classify;
use crate::queue::Leases;
use crate::read_pool::ReadPool;
use crate::writer::Writer;

/// The engine's name in errors, health checks and metrics.
pub const ENGINE: &str = "sqlite";

const DATABASE_FILE: &str = "weir.db";
/// The database's write-ahead log, in the same directory.
pub const WAL_FILE: &str = "weir.db-wal";
/// Locked by the process that owns the directory. The file stays when the process ends.
pub const LOCK_FILE: &str = "weir.lock";

const HEARTBEAT: &str = "INSERT OR REPLACE INTO heartbeat (id, at) VALUES (1, ?1)";

/// Temporarily replaces the heartbeat with a large value; the next heartbeat frees the space.
const PROBE: &str = "INSERT OR REPLACE INTO heartbeat (id, at) VALUES (1, zeroblob(?1))";
/// More than the largest request body.
const PROBE_BYTES: usize = 2 << 20;

/// Page cache per connection. A negative value is in KiB.
const CACHE_KIB: i64 = -8_192;

/// The embedded engine. Clones share the file and the writer thread.
#[derive(Clone)]
pub struct Sqlite {
    inner: Arc<Inner>,
    /// Publishes accepted messages instead of the table queue.
    publisher: Option<Arc<dyn Publisher>>,
    /// Whether assigned slots are recorded as due, to be dispatched at their time.
    is_dispatching: bool,
}

impl std::fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sqlite").field("writer", &self.inner.writer).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Inner {
    writer: Writer,
    read_pool: ReadPool,
    calls: EngineCalls,
    clock: Arc<dyn Clock>,
    /// Replaces the system clock in tests.
    test_clock: Option<Arc<dyn Clock>>,
    topic_notify: TopicNotify,
    leases: Mutex<Leases>,
    recounts: Arc<slot::Recounts>,
    /// Whether the last published batch failed to commit, so that its messages are not counted.
    has_uncounted_messages: AtomicBool,
    /// Locked as long as the engine lives, so that a second process on the same directory is refused.
    _lock: File,
}

impl Sqlite {
    /// Opens the engine in `directory` with the system clock, and creates and migrates its file as needed.
    /// Fails if another process uses the directory, or if the file cannot be opened or migrated.
    pub fn open(directory: &Path) -> Result<Self> {
        Self::open_on(directory, None)
    }

    /// As [`Sqlite::open`], with a clock of a test.
    pub fn open_with_clock(directory: &Path, clock: Arc<dyn Clock>) -> Result<Self> {
        Self::open_on(directory, Some(clock))
    }

    fn open_on(directory: &Path, test_clock: Option<Arc<dyn Clock>>) -> Result<Self> {
        let lock = lock_directory(directory)?;
        let file = directory.join(DATABASE_FILE);
        drop(open_private(&file)?);
        let mut connection = connect(&file).map_err(classify)?;
        // FULL: a commit is on disk before it is answered. The WAL is copied back every 16,000 pages (32 MB).
        connection
            .execute_batch("PRAGMA synchronous = FULL; PRAGMA wal_autocheckpoint = 16000;")
            .map_err(classify)?;
        migrate::run(&mut connection)?;
        slot::remove_unused(&mut connection).map_err(classify)?;
        book::ensure_counts(&mut connection).map_err(classify)?;
        let read_pool = ReadPool::open(|| connect(&file)).map_err(classify)?;
        let calls = EngineCalls::new(ENGINE);
        let writer = Writer::start(connection, calls.clone())?;
        Ok(Self {
            inner: Arc::new(Inner {
                writer,
                read_pool,
                calls,
                clock: test_clock.clone().unwrap_or_else(|| SystemClock::shared()),
                test_clock,
                topic_notify: TopicNotify::default(),
                leases: Mutex::default(),
                recounts: Arc::default(),
                has_uncounted_messages: AtomicBool::new(false),
                _lock: lock,
            }),
            publisher: None,
            is_dispatching: false,
        })
    }

    /// Publishes messages through a broker, and counts only those that it has confirmed. The writer waits for the broker
    /// meanwhile.
    #[must_use]
    pub fn publishing(mut self, publisher: Arc<dyn Publisher>) -> Self {
        self.publisher = Some(publisher);
        self
    }

    /// Records every assigned slot as due, to be dispatched at its time.
    #[must_use]
    pub fn dispatching(mut self) -> Self {
        self.is_dispatching = true;
        self
    }

    /// Sets the length of the writer's turns, for tests: with a short one every job takes many turns.
    #[must_use]
    pub fn with_turns_of(self, turn: Duration) -> Self {
        self.inner.writer.set_turn(turn);
        self
    }

    /// The duration of reads and writes, each from its submission to its answer.
    #[must_use]
    pub fn calls(&self) -> EngineCalls {
        self.inner.calls.clone()
    }

    #[must_use]
    pub fn writer_metrics(&self) -> WriterMetrics {
        self.inner.writer.metrics().clone()
    }

    #[must_use]
    pub fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.inner.clock)
    }

    /// The clock of a test, or `None` if the engine uses the system clock.
    #[must_use]
    pub fn test_clock(&self) -> Option<Arc<dyn Clock>> {
        self.inner.test_clock.clone()
    }
}

#[async_trait]
impl StoreHealth for Sqlite {
    /// Checks that the writer thread answers and the disk accepts its writes.
    async fn ping(&self) -> Result<()> {
        let now = self.inner.clock.now().as_micros();
        let write_heartbeat =
            move |connection: &Connection| connection.prepare_cached(HEARTBEAT)?.execute([now]);
        if self.storage_problem().is_some() {
            // A full disk may still accept a few bytes. It has recovered when it accepts as much as the largest write.
            let probe = |connection: &Connection| connection.prepare_cached(PROBE)?.execute([PROBE_BYTES]);
            self.inner.writer.run(probe).await?;
        }
        self.inner.writer.run(write_heartbeat).await.map(|_| ())
    }

    fn storage_problem(&self) -> Option<&'static str> {
        self.inner.writer.disk().problem()
    }
}

/// Whether a directory has a database that is not empty.
#[must_use]
pub fn has_database(directory: &Path) -> bool {
    directory.join(DATABASE_FILE).metadata().is_ok_and(|metadata| metadata.len() > 0)
}

fn connect(file: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(file)?;
    // Rows are small and a commit writes whole pages: half the default size halves what sends to many users write.
    connection.pragma_update(None, "page_size", 2_048)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // Query plans do not depend on bound values, so a statement is never prepared again for another topic or user.
    connection.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    connection.pragma_update(None, "cache_size", CACHE_KIB)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    // An operator's sqlite3 shell may hold a lock for a moment.
    connection.busy_timeout(Duration::from_secs(1))?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

/// Opens or creates a file that only its owner may read and write. SQLite gives its other files the same mode.
fn open_private(path: &Path) -> Result<File> {
    File::options()
        .create(true)
        .write(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|source| Error::failed(ENGINE, format!("cannot open {}: {source}", path.display())))
}

fn lock_directory(directory: &Path) -> Result<File> {
    let file = open_private(&directory.join(LOCK_FILE))?;
    file.try_lock().map_err(|_locked| {
        let advice = "another weir process is using it; stop that one, choose another --data, or run several \
                      processes on one --store postgres://…";
        Error::failed(ENGINE, format!("{} is locked: {advice}", directory.display()))
    })?;
    Ok(file)
}
