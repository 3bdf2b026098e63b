//! The Postgres engine: rows are locked in key order, decided in Rust, written back together.
//!
//! Several servers may share one database: row locks keep their decisions exact, and only the database's clock counts. Every
//! call is bounded: the wait for a free connection, connecting, and the statements.

mod book;
mod clock;
mod connection;
mod error;
mod listener;
mod migrate;
mod pool;
mod primary;
mod purge_size;
#[cfg(test)]
mod query_plan_tests;
mod queue;
mod quota;
mod request;
mod requirements;
mod row;
mod sale;
mod slot;
mod target;
mod tier;
mod time;
mod tls;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::SystemTime;

use async_trait::async_trait;
use tokio::task::AbortHandle;
use weir_core::Clock;
use weir_queue::notify::TopicNotify;
use weir_queue::publish::Publisher;
use weir_store::clock::StepDetector;
use weir_store::engine_calls::EngineCalls;
use weir_store::limit_changes::LimitChangeFeed;
use weir_store::{Result, StoreClock, StoreHealth};

use crate::pool::Pool;
pub use crate::requirements::{Unsuitable, unsuitable};
pub use crate::target::{PostgresTarget, PostgresTargetError};

/// The name of this engine in errors, health checks and metrics.
pub const ENGINE: &str = "postgresql";

/// The Postgres engine. Clones share it.
#[derive(Clone)]
pub struct Postgres {
    inner: Arc<Inner>,
    /// Publishes accepted messages to a broker instead of the table queue.
    publisher: Option<Arc<dyn Publisher>>,
    /// The cache in front, if there is one. Its hashes must be invalidated by new limits.
    cache: Option<quota::CacheInFront>,
    slots: SlotOptions,
}

/// How slots are assigned.
#[derive(Clone, Copy, Debug)]
struct SlotOptions {
    /// How many windows past the first open one are tried while other servers hold them.
    headroom: u32,
    /// Whether slots are recorded for dispatch at their time.
    is_dispatching: bool,
}

impl Default for SlotOptions {
    fn default() -> Self {
        Self { headroom: 100, is_dispatching: false }
    }
}

impl std::fmt::Debug for Postgres {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Postgres").field("pool", &self.inner.pool).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Inner {
    pool: Pool,
    /// Replaces the database's clock in tests.
    clock: Option<Arc<dyn Clock>>,
    /// Detects steps of the database's clock.
    clock_steps: StepDetector,
    topic_notify: TopicNotify,
    config_locks: slot::ConfigLocks,
    limit_changes: Arc<LimitChangeFeed>,
    listener: AbortHandle,
    /// Batches that were published but whose counts could not be saved.
    save_failures: quota::SaveFailures,
    /// The number of jobs that this server has ended.
    ended_jobs: AtomicU64,
    /// Whether the indexes for claims by turns are known to exist.
    has_turn_indexes: AtomicBool,
    /// The average number of messages per pack in the last claim.
    pack_size: AtomicUsize,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl Postgres {
    /// Connects and migrates the schema. Several servers may do so at once. Fails when the server cannot be reached or refuses
    /// the credentials, when the schema is newer, and when the database must not be used ([`unsuitable`]).
    pub async fn open(target: PostgresTarget, connections: usize) -> Result<Self> {
        Self::open_with_clock(target, connections, None).await
    }

    /// Like [`Postgres::open`], with a clock that replaces the database's, for tests.
    pub async fn open_with_clock(
        target: PostgresTarget,
        connections: usize,
        clock: Option<Arc<dyn Clock>>,
    ) -> Result<Self> {
        migrate::run(&target).await?;
        let limit_changes = Arc::new(LimitChangeFeed::new());
        let listener = listener::start(target.clone(), &limit_changes);
        let inner = Inner {
            pool: Pool::new(target, connections),
            clock,
            clock_steps: StepDetector::default(),
            topic_notify: TopicNotify::default(),
            config_locks: slot::ConfigLocks::default(),
            limit_changes,
            listener,
            save_failures: quota::SaveFailures::default(),
            ended_jobs: AtomicU64::new(0),
            has_turn_indexes: AtomicBool::new(false),
            pack_size: AtomicUsize::new(1),
        };
        Ok(Self { inner: Arc::new(inner), publisher: None, cache: None, slots: SlotOptions::default() })
    }

    /// Publishes messages to a broker and counts only those that it confirms.
    #[must_use]
    pub fn publishing(mut self, publisher: Arc<dyn Publisher>) -> Self {
        self.publisher = Some(publisher);
        self
    }

    /// Sets how many windows that other servers hold an event may be moved past. The default is 100.
    #[must_use]
    pub fn with_headroom(mut self, windows: u32) -> Self {
        self.slots.headroom = windows;
        self
    }

    /// Records every slot for dispatch at its time.
    #[must_use]
    pub fn dispatching(mut self) -> Self {
        self.slots.is_dispatching = true;
        self
    }

    /// The duration of round trips, and of opening connections.
    #[must_use]
    pub fn calls(&self) -> EngineCalls {
        self.inner.pool.calls().clone()
    }

    /// Returns the clock that replaces the database's in tests.
    #[must_use]
    pub fn test_clock(&self) -> Option<Arc<dyn Clock>> {
        self.inner.clock.clone()
    }

    /// Returns the test clock's time for `coalesce($n, clock_timestamp())` in statements.
    fn clock_override(&self) -> Option<SystemTime> {
        self.inner.clock.as_ref().map(|clock| time::to_system(clock.now()))
    }
}

#[async_trait]
impl StoreHealth for Postgres {
    async fn ping(&self) -> Result<()> {
        self.time().await.map(drop)
    }
}

/// Returns whether an error is permanent: the server refuses the credentials or the database, or its certificate is refused.
#[must_use]
pub fn is_refusal(error: &weir_store::Error) -> bool {
    let mut cause = error.cause();
    while let Some(error) = cause {
        if let Some(no_primary) = error.downcast_ref::<primary::NoPrimary>() {
            return no_primary.is_refusal();
        }
        let refused_by_server = error
            .downcast_ref::<tokio_postgres::Error>()
            .and_then(tokio_postgres::Error::code)
            .is_some_and(|code| code.code().starts_with("28") || code.code().starts_with("3D"));
        // TLS errors are wrapped in I/O errors, whose `source` does not return the wrapped error.
        let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        if refused_by_server
            || error.is::<rustls::Error>()
            || wrapped.is_some_and(|inner| inner.is::<rustls::Error>())
        {
            return true;
        }
        cause = error.source();
    }
    false
}
