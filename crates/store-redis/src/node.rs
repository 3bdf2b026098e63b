//! One Redis server: its connection while it answers, and the task that reconnects.
//!
//! The connection and its pipelining are redis-rs's. The reconnecting clients of redis-rs are not used: with them every call to
//! a server that does not answer waits for its timeout, and one of them keeps a connection whose peer is silent. Here the
//! first call without an answer closes the connection, and later calls fail at once until a new one is open.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, RedisError, RedisResult, Value};
use tokio::sync::watch;

use crate::target::{Address, Purpose, RedisTarget};

/// The timeout of connecting, in call timeouts.
const CONNECT_FACTOR: u32 = 2;

/// A connection on which no call has failed yet.
pub(crate) type Connection = Arc<MultiplexedConnection>;

pub(crate) struct Node {
    pub(crate) address: Address,
    connection: watch::Sender<Option<Connection>>,
    /// Whether the loss of the connection has been logged.
    is_loss_logged: AtomicBool,
    purpose: Purpose,
}

impl Node {
    /// Creates a node that connects in the background until it is dropped.
    pub(crate) fn start(target: &RedisTarget, address: Address) -> Arc<Self> {
        let (connection, connections) = watch::channel(None);
        let is_loss_logged = AtomicBool::new(false);
        let node = Arc::new(Self { address, connection, is_loss_logged, purpose: target.purpose });
        tokio::spawn(keep_connected(Arc::downgrade(&node), connections, target.clone()));
        node
    }

    /// Returns the connection, or `None` while the server is unavailable.
    pub(crate) fn connection(&self) -> Option<Connection> {
        self.connection.borrow().clone()
    }

    /// Waits until the connection is open.
    pub(crate) async fn connected(&self) {
        // Cannot fail: `self` owns the sender.
        let _ = self.connection.subscribe().wait_for(Option::is_some).await;
    }

    /// Sends one command and returns its reply, or `None` on any error.
    pub(crate) async fn query(&self, command: &Cmd) -> Option<Value> {
        let connection = self.connection()?;
        let reply = send(&connection, command).await;
        reply.inspect_err(|error| self.drop_connection(&connection, error)).ok()
    }

    /// Sends a command that the server may refuse without harm to the connection.
    pub(crate) async fn query_optional(&self, command: &Cmd) -> Option<Value> {
        let connection = self.connection()?;
        match send(&connection, command).await {
            Ok(reply) => Some(reply),
            Err(error) => {
                if !matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) {
                    self.drop_connection(&connection, &error);
                }
                None
            }
        }
    }

    /// Drops a connection on which a call failed. Logged once, however many calls were waiting.
    pub(crate) fn drop_connection(&self, failed: &Connection, error: &RedisError) {
        let remove = |current: &mut Option<Connection>| {
            current.take_if(|current| Arc::ptr_eq(current, failed)).is_some()
        };
        if self.connection.send_if_modified(remove) {
            self.log_loss(error);
        }
    }

    fn log_loss(&self, error: &dyn std::fmt::Display) {
        if !self.is_loss_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(address = %self.address, %error, "{}", self.purpose.loss_message());
        }
    }

    /// Connects once. The PING fails while a server only accepts connections, or is still loading its data.
    async fn connect(&self, target: &RedisTarget) -> RedisResult<()> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(target.call_timeout * CONNECT_FACTOR))
            .set_response_timeout(Some(target.call_timeout));
        let client = target.client(&self.address)?;
        let connection = Arc::new(client.get_multiplexed_async_connection_with_config(&config).await?);
        send(&connection, &redis::cmd("PING")).await?;
        self.connection.send_replace(Some(connection));
        if self.is_loss_logged.swap(false, Ordering::Relaxed) {
            tracing::info!(address = %self.address, "{}", self.purpose.recovery_message());
        }
        Ok(())
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Sends one command, once: neither this function nor redis-rs's connection retries.
pub(crate) async fn send(connection: &Connection, command: &Cmd) -> RedisResult<Value> {
    match MultiplexedConnection::clone(connection).send_packed_command(command).await? {
        Value::ServerError(error) => Err(error.into()),
        value => Ok(value),
    }
}

/// Reconnects whenever the connection is dropped, until the node is.
async fn keep_connected(
    node: Weak<Node>,
    mut connections: watch::Receiver<Option<Connection>>,
    target: RedisTarget,
) {
    let mut backoff = ReconnectBackoff::default();
    let timeout = target.call_timeout * CONNECT_FACTOR * 2;
    while connections.wait_for(Option::is_none).await.is_ok() {
        backoff.pause().await;
        let Some(node) = node.upgrade() else { return };
        let connected = tokio::time::timeout(timeout, node.connect(&target)).await;
        match connected.unwrap_or_else(|_elapsed| Err((ErrorKind::Io, "timed out while connecting").into())) {
            Ok(()) => backoff.connected(),
            Err(error) => node.log_loss(&error),
        }
    }
}

/// The pauses between attempts to connect: none after a connection that lasted, otherwise doubled each time.
#[derive(Debug, Default)]
pub(crate) struct ReconnectBackoff {
    next: Duration,
    connected_at: Option<Instant>,
}

impl ReconnectBackoff {
    const MIN: Duration = Duration::from_millis(50);
    const MAX: Duration = Duration::from_secs(1);
    /// A connection that lasted this long resets the pause.
    const STEADY_AFTER: Duration = Duration::from_secs(5);

    /// Records a successful attempt.
    pub(crate) fn connected(&mut self) {
        self.connected_at = Some(Instant::now());
    }

    /// Waits before the next attempt.
    pub(crate) async fn pause(&mut self) {
        if self.connected_at.take().is_some_and(|at| at.elapsed() >= Self::STEADY_AFTER) {
            self.next = Duration::ZERO;
        }
        // Jitter of up to half the pause, so that servers do not reconnect in step.
        tokio::time::sleep(self.next.mul_f64(1.0 - fastrand::f64() / 2.0)).await;
        self.next = (self.next * 2).clamp(Self::MIN, Self::MAX);
    }
}
