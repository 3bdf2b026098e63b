//! Redis as the stores here see it: scripts called for many keys at once, each key on the server that has it.
//!
//! A call answers for each key on its own: what one server cannot answer is not a failure of the others. Nothing is
//! tried twice unless it certainly was not done.

mod cluster;
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

use self::topology::Topology;
use crate::node::{Link, Node, send};
use crate::script::Script;
use crate::target::Target;

/// Keys in one call of a script: Redis does nothing else meanwhile.
const KEYS_PER_CALL: usize = 128;
/// How often the log tells of refused calls, at most.
const WARN_EVERY: Duration = Duration::from_secs(1);

/// A connection to Redis. Clones share it.
#[derive(Clone, Debug)]
pub struct Redis {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    target: Target,
    topology: watch::Sender<Arc<Topology>>,
    /// Notified when a call found that the topology is not up to date.
    outdated: Notify,
    warned_at: Mutex<Option<Instant>>,
}

/// What a script is asked about one key.
pub(crate) struct Item {
    pub(crate) key: String,
    pub(crate) arguments: Vec<String>,
}

/// Redis did not do it, or nobody can say whether it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unanswered;

impl Redis {
    /// Begins to connect. It is not an error when Redis does not answer: calls say so.
    #[must_use]
    pub fn start(target: Target) -> Self {
        let (topology, _) = watch::channel(Arc::new(Topology::first(&target)));
        let inner = Inner { target, topology, outdated: Notify::new(), warned_at: Mutex::default() };
        let inner = Arc::new(inner);
        if inner.target.is_cluster {
            tokio::spawn(topology::keep_current(Arc::downgrade(&inner)));
        }
        Self { inner }
    }

    /// Waits until every server has been connected to.
    pub async fn connected(&self) {
        let mut topologies = self.inner.topology.subscribe();
        // The sender is ours, so the wait cannot fail.
        let _ = topologies.wait_for(|topology| topology.is_complete()).await;
        join_all(self.inner.topology().nodes.iter().map(|node| node.connected())).await;
    }

    /// Whether every server answers.
    pub async fn ping(&self) -> bool {
        let (topology, ping) = (self.inner.topology(), redis::cmd("PING"));
        join_all(topology.nodes.iter().map(|node| node.ask(&ping))).await.iter().all(Option::is_some)
    }

    /// What the clock of each server that answers shows, by its address, and when it was asked and answered by this machine's
    /// uptime.
    pub async fn times(&self) -> Vec<(String, Timestamp, [Duration; 2])> {
        let (topology, time) = (self.inner.topology(), redis::cmd("TIME"));
        let answers = topology.nodes.iter().map(|node| async {
            let asked = uptime();
            let (seconds, micros): (i64, i64) = redis::from_redis_value(node.ask(&time).await?).ok()?;
            let shown = Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros));
            Some((node.address.to_string(), shown, [asked, uptime()]))
        });
        join_all(answers).await.into_iter().flatten().collect()
    }

    /// How to reach one of the servers, each time another one, and how long an answer may take.
    pub(crate) fn any_client(&self, round: usize) -> RedisResult<(redis::Client, Duration)> {
        let nodes = &self.inner.topology().nodes;
        let node = nodes.get(round % nodes.len().max(1));
        let node = node.ok_or((ErrorKind::InvalidClientConfig, "no server is known"))?;
        Ok((self.inner.target.client(&node.address)?, self.call_timeout()))
    }

    /// Calls a script for many keys; one answer for each. Its arguments are `common` and then each key's own.
    pub(crate) async fn call(
        &self,
        script: Script,
        common: &[&str],
        items: &[Item],
    ) -> Vec<Result<Value, Unanswered>> {
        let groups = self.group(items.iter().map(|item| &*item.key));
        let calls = groups.iter().map(|places| {
            let keys: Vec<&str> = places.iter().map(|place| &*items[*place].key).collect();
            let own = places.iter().flat_map(|place| &items[*place].arguments).map(String::as_str);
            let arguments: Vec<&str> = common.iter().copied().chain(own).collect();
            async move { self.call_together(script, &keys, &arguments).await }
        });
        let mut answers = vec![Err(Unanswered); items.len()];
        for (places, reply) in groups.iter().zip(join_all(calls).await) {
            if let Ok(Value::Array(values)) = reply
                && values.len() == places.len()
            {
                places.iter().zip(values).for_each(|(place, value)| answers[*place] = Ok(value));
            }
        }
        answers
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.inner.target.is_cluster
    }

    /// How long a call may take.
    pub(crate) fn call_timeout(&self) -> Duration {
        self.inner.target.call_timeout
    }

    /// Which of these keys one call can be about: on a cluster those of one hash slot, else all, but not too many at once.
    pub(crate) fn group<'a>(&self, keys: impl Iterator<Item = &'a str>) -> Vec<Vec<usize>> {
        let mut groups = topology::group(keys, self.is_cluster());
        if groups.iter().any(|group| group.len() > KEYS_PER_CALL) {
            groups =
                groups.iter().flat_map(|group| group.chunks(KEYS_PER_CALL)).map(<[usize]>::to_vec).collect();
        }
        groups
    }

    /// Says in the log that a script could not do a part of what it was asked.
    pub(crate) fn warn_of_refusal(&self, error: &dyn Display) {
        self.inner.warn_of_refusal(&self.inner.target.address(), error);
    }

    /// Calls a script once, for keys that are together.
    pub(crate) async fn call_together<A: ToRedisArgs>(
        &self,
        script: Script,
        keys: &[&str],
        arguments: &[A],
    ) -> Result<Value, Unanswered> {
        let first = keys.first().ok_or(Unanswered)?;
        let mut command = redis::cmd("EVALSHA");
        command.arg(script.text().get_hash()).arg(keys.len()).arg(keys).arg(arguments);
        // Again at most twice, and only what was certainly not done: a server that does not have the script, or not the key,
        // has done nothing.
        let (mut is_loaded, mut is_located) = (false, false);
        loop {
            let node = self.inner.topology().node_of(first).ok_or(Unanswered)?;
            let link = node.link().ok_or(Unanswered)?;
            let mut answer = send(&link, &command).await;
            if is_error(&answer, ServerErrorKind::NoScript) && !std::mem::replace(&mut is_loaded, true) {
                match script.text().load_async(&mut (*link).clone()).await {
                    Ok(_) => continue,
                    Err(error) => answer = Err(error),
                }
            }
            if is_error(&answer, ServerErrorKind::Moved) && !std::mem::replace(&mut is_located, true) {
                self.inner.learn_topology().await;
                continue;
            }
            return answer.map_err(|error| self.inner.judge(&node, &link, &error));
        }
    }
}

fn is_error(answer: &RedisResult<Value>, kind: ServerErrorKind) -> bool {
    answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(kind))
}

impl Inner {
    fn topology(&self) -> Arc<Topology> {
        Arc::clone(&self.topology.borrow())
    }

    /// What an error means for the connection.
    fn judge(&self, node: &Node, link: &Link, error: &RedisError) -> Unanswered {
        match error.kind() {
            // Under way to another server, or not decided yet: Postgres answers meanwhile.
            ErrorKind::Server(
                ServerErrorKind::Moved
                | ServerErrorKind::Ask
                | ServerErrorKind::TryAgain
                | ServerErrorKind::CrossSlot
                | ServerErrorKind::NoScript,
            ) => {}
            // A script that failed, or memory that is full: the connection is well, and so are other keys.
            ErrorKind::Server(ServerErrorKind::ResponseError | ServerErrorKind::ExecAbort)
            | ErrorKind::Extension => self.warn_of_refusal(&node.address, error),
            _ => {
                node.lose(link, error);
                if self.target.is_cluster {
                    self.outdated.notify_one();
                }
            }
        }
        Unanswered
    }

    /// Once a second at most: every call may fail alike.
    fn warn_of_refusal(&self, address: &dyn Display, error: &dyn Display) {
        let mut warned_at = self.warned_at.lock();
        if warned_at.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
            *warned_at = Some(Instant::now());
            tracing::warn!(%address, %error, "Redis refused a call; Postgres answers it");
        }
    }
}
