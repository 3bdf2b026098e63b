//! One Redis server: its connection while it answers, and the task that finds out when it answers again.
//!
//! The connection and its pipelining are redis-rs's. Its own reconnecting clients are not used: they let every call to a server
//! that does not answer wait for its timeout, and one of them keeps a connection whose other end is silent. Here the first
//! call that is not answered closes the connection, and the following ones fail at once until a new one is there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisError, RedisResult, Value};
use tokio::sync::watch;

use crate::target::{Address, Purpose, Target};

/// How much longer than a call a connection may take to be ready.
const CONNECT_FACTOR: u32 = 2;

/// A connection that worked a moment ago.
pub(crate) type Link = Arc<MultiplexedConnection>;

pub(crate) struct Node {
    pub(crate) address: Address,
    link: watch::Sender<Option<Link>>,
    /// Whether the log says that it does not answer.
    is_reported: AtomicBool,
    purpose: Purpose,
}

impl Node {
    /// A server that is connected to in the background, for as long as the node exists.
    pub(crate) fn start(target: &Target, address: Address) -> Arc<Self> {
        let (link, links) = watch::channel(None);
        let node =
            Arc::new(Self { address, link, is_reported: AtomicBool::new(false), purpose: target.purpose });
        tokio::spawn(keep_connected(Arc::downgrade(&node), links, target.clone()));
        node
    }

    /// The connection, unless the server is known not to answer.
    pub(crate) fn link(&self) -> Option<Link> {
        self.link.borrow().clone()
    }

    /// Waits for the connection to be there.
    pub(crate) async fn connected(&self) {
        // The sender is ours, so the wait cannot fail.
        let _ = self.link.subscribe().wait_for(Option::is_some).await;
    }

    /// Sends one command; none when it was not answered.
    pub(crate) async fn ask(&self, command: &Cmd) -> Option<Value> {
        let link = self.link()?;
        let answer = send(&link, command).await;
        answer.inspect_err(|error| self.lose(&link, error)).ok()
    }

    /// Stops using a connection that did not answer. One line in the log says so, however many calls were waiting.
    pub(crate) fn lose(&self, link: &Link, error: &RedisError) {
        let is_ours = |held: &mut Option<Link>| held.take_if(|held| Arc::ptr_eq(held, link)).is_some();
        if self.link.send_if_modified(is_ours) {
            self.report_loss(error);
        }
    }

    fn report_loss(&self, error: &dyn std::fmt::Display) {
        if !self.is_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(address = %self.address, %error, "{}", self.purpose.lost());
        }
    }

    /// Connects once. A server that only accepts connections, or is still reading its files, is not ready.
    async fn connect(&self, target: &Target) -> RedisResult<()> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(target.call_timeout * CONNECT_FACTOR))
            .set_response_timeout(Some(target.call_timeout));
        let client = target.client(&self.address)?;
        let link = Arc::new(client.get_multiplexed_async_connection_with_config(&config).await?);
        send(&link, &redis::cmd("PING")).await?;
        self.link.send_replace(Some(link));
        if self.is_reported.swap(false, Ordering::Relaxed) {
            tracing::info!(address = %self.address, "{}", self.purpose.back());
        }
        Ok(())
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Sends one command, once: nothing here or in redis-rs's connection tries again.
pub(crate) async fn send(link: &Link, command: &Cmd) -> RedisResult<Value> {
    match MultiplexedConnection::clone(link).send_packed_command(command).await? {
        Value::ServerError(error) => Err(error.into()),
        value => Ok(value),
    }
}

async fn keep_connected(node: Weak<Node>, mut links: watch::Receiver<Option<Link>>, target: Target) {
    let mut backoff = Backoff::default();
    let patience = target.call_timeout * CONNECT_FACTOR * 2;
    // Ends with the node.
    while links.wait_for(Option::is_none).await.is_ok() {
        backoff.pause().await;
        let Some(node) = node.upgrade() else { return };
        let connected = tokio::time::timeout(patience, node.connect(&target)).await;
        match connected.unwrap_or_else(|_late| Err((ErrorKind::Io, "it did not answer in time").into())) {
            Ok(()) => backoff.succeeded(),
            Err(error) => node.report_loss(&error),
        }
    }
}

/// The pauses between attempts to connect: none after a connection that lasted, longer and longer ones otherwise.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    next: Duration,
    connected_at: Option<Instant>,
}

impl Backoff {
    const MIN: Duration = Duration::from_millis(50);
    const MAX: Duration = Duration::from_secs(1);
    /// A connection that lasted for so long was no mistake.
    const STEADY_AFTER: Duration = Duration::from_secs(5);

    /// Takes note of a connection that works.
    pub(crate) fn succeeded(&mut self) {
        self.connected_at = Some(Instant::now());
    }

    /// Waits before the next attempt.
    pub(crate) async fn pause(&mut self) {
        if self.connected_at.take().is_some_and(|at| at.elapsed() >= Self::STEADY_AFTER) {
            self.next = Duration::ZERO;
        }
        // Less up to half of it, so that servers do not come back in step.
        tokio::time::sleep(self.next.mul_f64(1.0 - fastrand::f64() / 2.0)).await;
        self.next = (self.next * 2).clamp(Self::MIN, Self::MAX);
    }
}
