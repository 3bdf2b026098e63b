//! The Redis client of the stores in this crate: calls a script for many keys at once, each key on the server that owns it.
//!
//! A call returns one result per key, so a server that does not answer fails only its own keys. A call is repeated only if
//! it certainly had no effect.

mod cluster;
mod latency;
mod topology;

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind, ToRedisArgs, Value};
use tokio::sync::{Notify, watch};
use weir_core::Timestamp;
use weir_store::clock::uptime;
use weir_store::engine_calls::EngineCalls;

pub use self::latency::{SLOW_SCRIPT, ScriptCounts};
use self::topology::Topology;
use crate::node::{Connection, Node, send};
use crate::script::Script;
use crate::target::RedisTarget;

/// Most keys in one call of a script: Redis runs nothing else meanwhile.
const KEYS_PER_CALL: usize = 128;
/// The shortest pause between two log lines about refused calls.
const WARN_EVERY: Duration = Duration::from_secs(1);

/// A client of one Redis server or cluster. Clones share its connections.
#[derive(Clone, Debug)]
pub struct Redis {
    shared: Arc<SharedClient>,
}

#[derive(Debug)]
struct SharedClient {
    target: RedisTarget,
    topology: watch::Sender<Arc<Topology>>,
    /// Notified when a call finds that the topology is outdated.
    outdated: Notify,
    warned_at: Mutex<Option<Instant>>,
    calls: EngineCalls,
}

/// One key of a script call, with the arguments that belong to it.
pub(crate) struct KeyCall {
    pub(crate) key: String,
    pub(crate) arguments: Vec<String>,
}

/// Redis did not execute the call, or it is unknown whether it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoReply;

impl Redis {
    /// Starts to connect in the background. An unavailable Redis is no error here; the calls fail.
    #[must_use]
    pub fn start(target: RedisTarget) -> Self {
        let (topology, _) = watch::channel(Arc::new(Topology::initial(&target)));
        let (outdated, calls) = (Notify::new(), EngineCalls::new(target.purpose.metric_name()));
        let shared = SharedClient { target, topology, outdated, warned_at: Mutex::default(), calls };
        let shared = Arc::new(shared);
        if shared.target.is_cluster {
            tokio::spawn(topology::refresh_periodically(Arc::downgrade(&shared)));
        }
        Self { shared }
    }

    /// The duration of script calls, by script.
    #[must_use]
    pub fn calls(&self) -> EngineCalls {
        self.shared.calls.clone()
    }

    /// Returns how many scripts the servers have executed since they started, and how many of them took longer than
    /// [`SLOW_SCRIPT`]: the scripts of all clients, without the network. `None` if a server does not say: before Redis 7,
    /// without the permission for `LATENCY`, or because it does not answer.
    pub async fn script_counts(&self) -> Option<ScriptCounts> {
        let topology = self.shared.topology();
        let mut command = redis::cmd("LATENCY");
        command.arg("HISTOGRAM").arg("evalsha");
        let replies = topology.nodes.iter().map(|node| node.query_optional(&command));
        let mut all = ScriptCounts::default();
        for reply in join_all(replies).await {
            let ScriptCounts { executed, slow } = latency::read_reply(&reply?)?;
            all.executed += executed;
            all.slow += slow;
        }
        (!topology.nodes.is_empty()).then_some(all)
    }

    /// Waits until every server is connected.
    pub async fn connected(&self) {
        let mut topologies = self.shared.topology.subscribe();
        // Cannot fail: `self` owns the sender.
        let _ = topologies.wait_for(|topology| topology.is_complete()).await;
        join_all(self.shared.topology().nodes.iter().map(|node| node.connected())).await;
    }

    /// Returns whether every server answers.
    pub async fn ping(&self) -> bool {
        let (topology, ping) = (self.shared.topology(), redis::cmd("PING"));
        join_all(topology.nodes.iter().map(|node| node.query(&ping))).await.iter().all(Option::is_some)
    }

    /// Reads the clock of each server that answers: its address, its time, and this machine's uptime before and after the
    /// call.
    pub async fn server_times(&self) -> Vec<(String, Timestamp, [Duration; 2])> {
        let (topology, time) = (self.shared.topology(), redis::cmd("TIME"));
        let answers = topology.nodes.iter().map(|node| async {
            let called_at = uptime();
            let (seconds, micros): (i64, i64) = redis::from_redis_value(node.query(&time).await?).ok()?;
            let server_time =
                Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros));
            Some((node.address.to_string(), server_time, [called_at, uptime()]))
        });
        join_all(answers).await.into_iter().flatten().collect()
    }

    /// Returns a client of one server, another one for each `round`, and the timeout of a call.
    pub(crate) fn any_client(&self, round: usize) -> RedisResult<(redis::Client, Duration)> {
        let nodes = &self.shared.topology().nodes;
        let node = nodes.get(round % nodes.len().max(1));
        let node = node.ok_or((ErrorKind::InvalidClientConfig, "no Redis server is known"))?;
        Ok((self.shared.target.client(&node.address)?, self.call_timeout()))
    }

    /// Calls a script for many keys and returns one result per key. Its arguments are `common`, then those of each key.
    pub(crate) async fn call_each(
        &self,
        script: Script,
        common: &[&str],
        key_calls: &[KeyCall],
    ) -> Vec<Result<Value, NoReply>> {
        let groups = self.group(key_calls.iter().map(|call| &*call.key));
        let calls = groups.iter().map(|group| {
            let keys: Vec<&str> = group.iter().map(|index| &*key_calls[*index].key).collect();
            let own = group.iter().flat_map(|index| &key_calls[*index].arguments).map(String::as_str);
            let arguments: Vec<&str> = common.iter().copied().chain(own).collect();
            async move { self.call_once(script, &keys, &arguments).await }
        });
        let mut results = vec![Err(NoReply); key_calls.len()];
        for (group, reply) in groups.iter().zip(join_all(calls).await) {
            if let Ok(Value::Array(values)) = reply
                && values.len() == group.len()
            {
                group.iter().zip(values).for_each(|(index, value)| results[*index] = Ok(value));
            }
        }
        results
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.shared.target.is_cluster
    }

    pub(crate) fn call_timeout(&self) -> Duration {
        self.shared.target.call_timeout
    }

    /// Groups the indices of keys that one call can take: on a cluster those of one hash slot, otherwise all, up to
    /// [`KEYS_PER_CALL`].
    pub(crate) fn group<'a>(&self, keys: impl Iterator<Item = &'a str>) -> Vec<Vec<usize>> {
        let mut groups = topology::group(keys, self.is_cluster());
        if groups.iter().any(|group| group.len() > KEYS_PER_CALL) {
            groups =
                groups.iter().flat_map(|group| group.chunks(KEYS_PER_CALL)).map(<[usize]>::to_vec).collect();
        }
        groups
    }

    /// Logs that a script could not process one of its keys.
    pub(crate) fn warn_refused(&self, error: &dyn Display) {
        self.shared.warn_refused(&self.shared.target.address(), error);
    }

    /// Calls a script once, for keys of one group ([`Redis::group`]).
    pub(crate) async fn call_once<A: ToRedisArgs>(
        &self,
        script: Script,
        keys: &[&str],
        arguments: &[A],
    ) -> Result<Value, NoReply> {
        let first = keys.first().ok_or(NoReply)?;
        let _timer = self.shared.calls.start(script.name());
        let mut command = redis::cmd("EVALSHA");
        command.arg(script.script().get_hash()).arg(keys.len()).arg(keys).arg(arguments);
        // Repeated at most twice, after errors that prove that nothing was executed: the server lacks the script, or does not
        // own the key.
        let (mut has_loaded_script, mut has_refreshed) = (false, false);
        loop {
            let node = self.shared.topology().node_of(first).ok_or(NoReply)?;
            let connection = node.connection().ok_or(NoReply)?;
            let mut reply = send(&connection, &command).await;
            if is_error(&reply, ServerErrorKind::NoScript) && !std::mem::replace(&mut has_loaded_script, true)
            {
                match script.script().load_async(&mut (*connection).clone()).await {
                    Ok(_) => continue,
                    Err(error) => reply = Err(error),
                }
            }
            if is_error(&reply, ServerErrorKind::Moved) && !std::mem::replace(&mut has_refreshed, true) {
                self.shared.refresh_topology().await;
                continue;
            }
            return reply.map_err(|error| self.shared.handle_error(&node, &connection, &error));
        }
    }
}

fn is_error(reply: &RedisResult<Value>, kind: ServerErrorKind) -> bool {
    reply.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(kind))
}

impl SharedClient {
    fn topology(&self) -> Arc<Topology> {
        Arc::clone(&self.topology.borrow())
    }

    /// Drops the connection if the error may be its fault, and logs an error of a script or a key.
    fn handle_error(&self, node: &Node, connection: &Connection, error: &RedisError) -> NoReply {
        match error.kind() {
            // The key is moving to another server, or the topology is outdated: the store behind Redis decides meanwhile.
            ErrorKind::Server(
                ServerErrorKind::Moved
                | ServerErrorKind::Ask
                | ServerErrorKind::TryAgain
                | ServerErrorKind::CrossSlot
                | ServerErrorKind::NoScript,
            ) => {}
            // The script failed, or memory is full: the connection and other keys are fine.
            ErrorKind::Server(ServerErrorKind::ResponseError | ServerErrorKind::ExecAbort)
            | ErrorKind::Extension => self.warn_refused(&node.address, error),
            _ => {
                node.drop_connection(connection, error);
                if self.target.is_cluster {
                    self.outdated.notify_one();
                }
            }
        }
        NoReply
    }

    /// Logs once a second at most, since every call may fail alike.
    fn warn_refused(&self, address: &dyn Display, error: &dyn Display) {
        let mut warned_at = self.warned_at.lock();
        if warned_at.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
            *warned_at = Some(Instant::now());
            tracing::warn!(%address, %error, "Redis refused a call; Postgres answers it");
        }
    }
}
