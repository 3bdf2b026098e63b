//! One Redis server: its connection while it answers, and the task that finds out when it answers again.
//!
//! A connection belongs to one run of the server. What an earlier run has written, and a restart or a promoted replica
//! may have kept in part, is told apart by the run's id, which is asked for once a connection.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::Notify;

use crate::script::Names;
use crate::target::{Address, Purpose, Target};

/// How much longer than a call a connection may take to be ready.
const CONNECT_FACTOR: u32 = 2;

pub(crate) const PAUSE_MIN: Duration = Duration::from_millis(50);
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A connection that lasted for so long was no mistake.
pub(crate) const STEADY_AFTER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) address: Address,
    link: Mutex<Option<Link>>,
    /// Wakes the task that connects.
    lost: Notify,
    connected: Notify,
    /// Of the last link made.
    generation: AtomicU64,
    /// Whether a line has told that it does not answer.
    is_told: AtomicBool,
    purpose: Purpose,
}

/// A connection that worked a moment ago.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) connection: MultiplexedConnection,
    /// Which run of the server is at the other end.
    pub(crate) run: Arc<str>,
    pub(crate) scripts: Arc<Names>,
    generation: u64,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("run", &self.run).finish_non_exhaustive()
    }
}

impl Node {
    /// A server that is connected to in the background, for as long as somebody holds on to it.
    pub(crate) fn start(target: &Target, address: Address) -> Arc<Self> {
        let node = Arc::new(Self {
            address,
            link: Mutex::default(),
            lost: Notify::new(),
            connected: Notify::new(),
            generation: AtomicU64::new(0),
            is_told: AtomicBool::new(false),
            purpose: target.purpose,
        });
        tokio::spawn(keep_connected(Arc::downgrade(&node), target.clone()));
        node
    }

    /// The connection, unless the server is known not to answer.
    pub(crate) fn link(&self) -> Option<Link> {
        self.slot().clone()
    }

    /// Waits for the connection to be there.
    pub(crate) async fn connected(&self) {
        loop {
            let connected = self.connected.notified();
            if self.slot().is_some() {
                return;
            }
            connected.await;
        }
    }

    /// Takes note that a connection did not answer: nobody uses it any more. One line tells of it, however many calls
    /// were waiting.
    pub(crate) fn lose(&self, link: &Link, error: &RedisError) {
        let mut slot = self.slot();
        if slot.as_ref().is_none_or(|held| held.generation != link.generation) {
            return;
        }
        *slot = None;
        drop(slot);
        self.tell_of_loss(error);
        self.lost.notify_one();
    }

    fn tell_of_loss(&self, error: &dyn std::fmt::Display) {
        if !self.is_told.swap(true, Ordering::Relaxed) {
            tracing::warn!(address = %self.address, %error, "{}", self.purpose.lost());
        }
    }

    fn slot(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self, target: &Target) -> RedisResult<Link> {
        let client = target.client(&self.address)?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(target.call_timeout * CONNECT_FACTOR))
            .set_response_timeout(Some(target.call_timeout));
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await?;
        let run = info.lines().find_map(|line| line.strip_prefix("run_id:"));
        let run = run.ok_or((ErrorKind::UnexpectedReturnType, "INFO server has no run_id"))?;
        let scripts = Arc::new(Names::load(&mut connection).await?);
        let generation = self.generation.fetch_add(1, Ordering::Relaxed);
        Ok(Link { connection, run: run.into(), scripts, generation })
    }
}

impl Link {
    /// One command.
    pub(crate) async fn call(&self, command: &Cmd) -> RedisResult<Value> {
        self.connection.clone().send_packed_command(command).await
    }

    /// Several at once; a command that fails alone is an error in its place.
    pub(crate) async fn call_all(&self, commands: &Pipeline, count: usize) -> RedisResult<Vec<Value>> {
        self.connection.clone().send_packed_commands(commands, 0, count).await
    }
}

async fn keep_connected(node: Weak<Node>, target: Target) {
    let mut pause = PAUSE_MIN;
    let mut connected_at: Option<Instant> = None;
    while let Some(node) = node.upgrade() {
        if node.slot().is_some() {
            // The node may go while nothing is lost: look for that now and then.
            let _ = tokio::time::timeout(PAUSE_MAX, node.lost.notified()).await;
            continue;
        }
        match connected_at.take() {
            Some(at) if at.elapsed() >= STEADY_AFTER => pause = PAUSE_MIN,
            // It answers and then fails: asking it at once again would only fill the log.
            Some(_) => {
                drop(node);
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
                continue;
            }
            None => {}
        }
        let patience = target.call_timeout * CONNECT_FACTOR * 2;
        match tokio::time::timeout(patience, node.connect(&target)).await {
            Ok(Ok(link)) => {
                *node.slot() = Some(link);
                node.connected.notify_waiters();
                if node.is_told.swap(false, Ordering::Relaxed) {
                    tracing::info!(address = %node.address, "{}", node.purpose.back());
                }
                connected_at = Some(Instant::now());
                continue;
            }
            Ok(Err(error)) => node.tell_of_loss(&error),
            Err(elapsed) => node.tell_of_loss(&elapsed),
        }
        drop(node);
        // Less up to half of it, so that servers do not come back in step.
        tokio::time::sleep(pause.mul_f64(1.0 - fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}
