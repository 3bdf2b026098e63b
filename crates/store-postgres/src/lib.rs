//! The Postgres engine: rows are locked in key order, decided in Rust, written back together.
//!
//! Several servers may share one database; row locks keep them exact, and the database's clock is the only one.
//! Every call is bounded: in waiting for a connection, in making one, and in what the server does with it.

mod clock;
mod error;
mod listener;
mod migrate;
mod pool;
#[cfg(test)]
mod query_plan_tests;
mod queue;
mod quota;
mod request;
mod requirements;
mod row;
mod sale;
mod session;
mod slot;
mod target;
mod tier;
mod time;
mod tls;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::SystemTime;

use async_trait::async_trait;
use tokio::task::AbortHandle;
use weir_core::Clock;
use weir_queue::notify::TopicNotify;
use weir_queue::publish::Publisher;
use weir_store::clock::StepDetector;
use weir_store::limit_changes::LimitChangeFeed;
use weir_store::{Result, StoreClock, StoreHealth};

use crate::pool::Pool;
pub use crate::requirements::{Unsuitable, unsuitable};
pub use crate::target::{PostgresTarget, PostgresTargetError};

/// The name in errors, health checks and metrics.
pub const ENGINE: &str = "postgresql";

/// The Postgres engine. Clones share it.
#[derive(Clone)]
pub struct Postgres {
    inner: Arc<Inner>,
    /// Where accepted messages go instead of the table queue.
    publisher: Option<Arc<dyn Publisher>>,
    /// Whether a cache stands in front, which has to be told of new limits.
    has_cache: bool,
    slots: SlotOptions,
}

/// How slots are assigned.
#[derive(Clone, Copy, Debug)]
struct SlotOptions {
    /// How many windows past the first one with room are searched while other servers hold them.
    headroom: u32,
    /// Whether slots are noted, to be dispatched when their time comes.
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
    /// A clock other than the database's, for tests.
    clock: Option<Arc<dyn Clock>>,
    /// Notices when the database's clock steps.
    clock_steps: StepDetector,
    topic_notify: TopicNotify,
    slot_gate: slot::Gate,
    limit_changes: Arc<LimitChangeFeed>,
    watch: AbortHandle,
    /// Batches that were published and could not be counted.
    uncounted: quota::Uncounted,
    /// Jobs that this server has ended.
    ended_jobs: AtomicU64,
    /// How many messages there were in a pack of the queue, on an average of the last claim.
    pack_size: AtomicUsize,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

impl Postgres {
    /// Connects, and migrates the schema as needed. Several servers may do so at once.
    /// Fails when the server cannot be reached, refuses the credentials, or holds a newer schema; when its database
    /// must not be used ([`unsuitable`]).
    pub async fn open(target: PostgresTarget, connections: usize) -> Result<Self> {
        Self::open_with_clock(target, connections, None).await
    }

    /// The same on another clock than the database's, for tests.
    pub async fn open_with_clock(
        target: PostgresTarget,
        connections: usize,
        clock: Option<Arc<dyn Clock>>,
    ) -> Result<Self> {
        migrate::run(&target).await?;
        let limit_changes = Arc::new(LimitChangeFeed::new());
        let watch = listener::start(target.clone(), &limit_changes);
        let inner = Inner {
            pool: Pool::new(target, connections),
            clock,
            clock_steps: StepDetector::default(),
            topic_notify: TopicNotify::default(),
            slot_gate: slot::Gate::default(),
            limit_changes,
            watch,
            uncounted: quota::Uncounted::default(),
            ended_jobs: AtomicU64::new(0),
            pack_size: AtomicUsize::new(1),
        };
        Ok(Self { inner: Arc::new(inner), publisher: None, has_cache: false, slots: SlotOptions::default() })
    }

    /// The same engine behind a cache: until that has forgotten a user's old limits, it is told of new ones.
    #[must_use]
    pub fn behind_cache(mut self) -> Self {
        self.has_cache = true;
        self
    }

    /// The same engine with its messages published by a broker, and only those counted that it has confirmed.
    #[must_use]
    pub fn publishing(mut self, publisher: Arc<dyn Publisher>) -> Self {
        self.publisher = Some(publisher);
        self
    }

    /// The same engine with another headroom than 100 windows: how far an event is put past those that other servers
    /// hold.
    #[must_use]
    pub fn with_headroom(mut self, windows: u32) -> Self {
        self.slots.headroom = windows;
        self
    }

    /// The same engine with every slot noted, to be dispatched when its time comes.
    #[must_use]
    pub fn dispatching(mut self) -> Self {
        self.slots.is_dispatching = true;
        self
    }

    /// The clock other than the database's, for tests.
    #[must_use]
    pub fn test_clock(&self) -> Option<Arc<dyn Clock>> {
        self.inner.clock.clone()
    }

    /// The test clock's time for statements that would otherwise ask the database's: `coalesce($n, clock_timestamp())`.
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

/// Whether waiting will not help: the server refuses our credentials or database, or we refuse its certificate.
#[must_use]
pub fn is_refusal(error: &weir_store::Error) -> bool {
    let mut cause = error.cause();
    while let Some(error) = cause {
        let refused_by_server = error
            .downcast_ref::<tokio_postgres::Error>()
            .and_then(tokio_postgres::Error::code)
            .is_some_and(|code| code.code().starts_with("28") || code.code().starts_with("3D"));
        // TLS errors come wrapped in I/O errors, which do not name what they wrap as their source.
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
