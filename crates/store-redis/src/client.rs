//! Redis as the stores here see it: scripts called for many keys at once, each key on the server that has it.
//!
//! A call answers for each key on its own: what one server cannot answer is not a failure of the others. Nothing is
//! tried twice unless it certainly was not done.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::Timestamp;
use weir_store::clock::uptime;

use crate::cluster::{self, SLOTS};
use crate::node::{Link, Node};
use crate::script::{Names, Script};
use crate::target::{Address, Target};

/// Keys in one call of a script: Redis does nothing else meanwhile.
const KEYS_PER_CALL: usize = 128;
/// How often a cluster is asked who has what, at least.
const REFRESH: Duration = Duration::from_secs(5);
/// How often refused calls are told of.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// And at most.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// A connection to Redis. Clones share it.
#[derive(Clone, Debug)]
pub struct Redis {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    target: Target,
    topology: RwLock<Arc<Topology>>,
    outdated: Notify,
    refreshed: Notify,
    /// When a refused call was last told of.
    told: Mutex<Option<Instant>>,
    _keeper: DropGuard,
}

/// Who has what.
#[derive(Debug)]
struct Topology {
    nodes: Vec<Arc<Node>>,
    /// For each slot the index of its server; none for one server that has everything.
    slots: Option<Box<[Option<u16>]>>,
}

/// What a script is asked about one key.
pub(crate) struct Item {
    pub(crate) key: String,
    pub(crate) arguments: Vec<String>,
}

/// Redis did not do it, or nobody can say whether it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unanswered;

type Answers = Vec<Result<Value, Unanswered>>;

enum Fault {
    /// The keys are elsewhere.
    Moved,
    /// The scripts are not there (any more).
    NoScript,
    Unanswered,
}

impl Redis {
    /// Begins to connect. It is not an error when Redis does not answer: calls say so.
    #[must_use]
    pub fn start(target: Target) -> Self {
        let nodes = target.servers.iter().map(|server| Node::start(&target, server.clone())).collect();
        let slots = target.is_cluster.then(|| vec![None; SLOTS].into_boxed_slice());
        let closing = CancellationToken::new();
        let inner = Arc::new(Inner {
            topology: RwLock::new(Arc::new(Topology { nodes, slots })),
            outdated: Notify::new(),
            refreshed: Notify::new(),
            told: Mutex::default(),
            _keeper: closing.clone().drop_guard(),
            target,
        });
        if inner.target.is_cluster {
            let weak = Arc::downgrade(&inner);
            tokio::spawn(closing.run_until_cancelled_owned(async move {
                while let Some(inner) = weak.upgrade() {
                    inner.refresh().await;
                    inner.refreshed.notify_waiters();
                    let outdated = async {
                        inner.outdated.notified().await;
                        tokio::time::sleep(REFRESH_PAUSE).await;
                    };
                    let _ = tokio::time::timeout(REFRESH, outdated).await;
                }
            }));
        }
        Self { inner }
    }

    /// Waits until every server has been connected to.
    pub async fn connected(&self) {
        if self.inner.target.is_cluster {
            loop {
                let refreshed = self.inner.refreshed.notified();
                let topology = self.inner.topology();
                if topology.slots.as_ref().is_some_and(|slots| slots.iter().all(Option::is_some)) {
                    break;
                }
                refreshed.await;
            }
        }
        join_all(self.inner.topology().nodes.iter().map(|node| node.connected())).await;
    }

    /// Whether every server answers.
    pub async fn ping(&self) -> bool {
        let topology = self.inner.topology();
        let answers = topology.nodes.iter().map(|node| async move {
            let Some(link) = node.link() else { return false };
            link.call(&redis::cmd("PING")).await.inspect_err(|error| node.lose(&link, error)).is_ok()
        });
        join_all(answers).await.into_iter().all(|answered| answered)
    }

    /// What the clock of each server that answers shows, by its address, and when it was asked and answered by this machine's
    /// uptime.
    pub async fn times(&self) -> Vec<(String, Timestamp, [Duration; 2])> {
        let topology = self.inner.topology();
        let answers = topology.nodes.iter().map(|node| async move {
            let (link, asked) = (node.link()?, uptime());
            let answer = link.call(&redis::cmd("TIME")).await.inspect_err(|error| node.lose(&link, error));
            let (seconds, micros): (i64, i64) = redis::from_redis_value(answer.ok()?).ok()?;
            let shown = Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros));
            Some((node.address.to_string(), shown, [asked, uptime()]))
        });
        join_all(answers).await.into_iter().flatten().collect()
    }

    /// How to reach one of the servers, each time another one, and how long an answer may take.
    pub(crate) fn any_client(&self, round: usize) -> redis::RedisResult<(redis::Client, Duration)> {
        let nodes = &self.inner.topology().nodes;
        let node = nodes.get(round % nodes.len().max(1));
        let node = node.ok_or((ErrorKind::InvalidClientConfig, "no server is known"))?;
        Ok((self.inner.target.client(&node.address)?, self.inner.target.call_timeout))
    }

    /// Calls a script for many keys; one answer for each. Its first argument is the id of the server's present run,
    /// then come `common`, then each key's own.
    pub(crate) async fn call(&self, script: Script, common: &[&str], items: &[Item]) -> Answers {
        let mut answers = vec![Err(Unanswered); items.len()];
        let mut open: Vec<usize> = (0..items.len()).collect();
        // Twice at most: only what was certainly not done is asked again.
        for attempt in 0..2 {
            let topology = self.inner.topology();
            let groups = topology.group(items, &open);
            let calls = groups
                .iter()
                .map(|(node, places)| self.inner.call_node(node, script, common, items, places, &topology));
            let mut again = Vec::new();
            for ((_, places), outcome) in groups.iter().zip(join_all(calls).await) {
                for (&place, answer) in places.iter().zip(outcome) {
                    match answer {
                        Ok(value) => answers[place] = Ok(value),
                        Err(Fault::Moved | Fault::NoScript) => again.push(place),
                        Err(Fault::Unanswered) => {}
                    }
                }
            }
            if again.is_empty() || attempt > 0 {
                break;
            }
            if self.inner.target.is_cluster {
                self.inner.learn_topology().await;
            }
            open = again;
        }
        answers
    }
}

impl Redis {
    /// Which of these keys are together: on a cluster those of one slot, else all. Answers for each key the number of its
    /// group.
    pub(crate) fn groups(&self, keys: &[&str]) -> Vec<usize> {
        if !self.inner.target.is_cluster {
            return vec![0; keys.len()];
        }
        keys.iter().map(|key| cluster::slot(key.as_bytes())).collect()
    }

    /// Calls a script once for keys that are together. Its first argument is the id of the server's present run.
    pub(crate) async fn call_together(
        &self,
        script: Script,
        keys: &[&str],
        arguments: &[String],
    ) -> Result<Value, Unanswered> {
        let first = keys.first().ok_or(Unanswered)?;
        // Twice at most: only what was certainly not done is asked again.
        for attempt in 0..2 {
            let topology = self.inner.topology();
            let node =
                topology.index_of(first).and_then(|index| topology.nodes.get(index)).ok_or(Unanswered)?;
            match self.inner.call_once(node, script, keys, arguments).await {
                Ok(value) => return Ok(value),
                Err(Fault::Unanswered) => return Err(Unanswered),
                Err(Fault::Moved | Fault::NoScript) if attempt > 0 => return Err(Unanswered),
                Err(Fault::Moved) => self.inner.learn_topology().await,
                Err(Fault::NoScript) => {}
            }
        }
        Err(Unanswered)
    }
}

impl Inner {
    async fn call_once(
        &self,
        node: &Arc<Node>,
        script: Script,
        keys: &[&str],
        arguments: &[String],
    ) -> Result<Value, Fault> {
        let link = node.link().ok_or(Fault::Unanswered)?;
        let mut command = redis::cmd("EVALSHA");
        command.arg(link.scripts.of(script)).arg(keys.len()).arg(keys).arg(&*link.run).arg(arguments);
        match link.call(&command).await {
            Ok(Value::ServerError(error)) => self.judge_missing(node, &link, &error.into()).await,
            Ok(value) => Ok(value),
            Err(error) => self.judge_missing(node, &link, &error).await,
        }
    }

    /// What an error means; scripts that are not there are loaded.
    async fn judge_missing(&self, node: &Node, link: &Link, error: &RedisError) -> Result<Value, Fault> {
        let fault = self.judge(node, link, error);
        if matches!(fault, Fault::NoScript) {
            let _ = Names::load(&mut link.connection.clone()).await;
        }
        Err(fault)
    }

    fn topology(&self) -> Arc<Topology> {
        Arc::clone(&self.topology.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Asks who has what, and waits for the answer for a moment.
    async fn learn_topology(&self) {
        let refreshed = self.refreshed.notified();
        self.outdated.notify_one();
        let _ = tokio::time::timeout(REFRESH_PAUSE * 3, refreshed).await;
    }

    async fn refresh(&self) {
        let topology = self.topology();
        for node in &topology.nodes {
            let Some(link) = node.link() else { continue };
            let Ok(answer) = link.call(redis::cmd("CLUSTER").arg("SLOTS")).await else { continue };
            if let Some(ranges) = cluster::ranges(&answer, &node.address).filter(|ranges| !ranges.is_empty())
            {
                let learned = Arc::new(self.arrange(&topology, &ranges));
                *self.topology.write().unwrap_or_else(PoisonError::into_inner) = learned;
                return;
            }
        }
        // Nobody answered: the servers we were given may know others by now.
        if topology.nodes.iter().all(|node| node.link().is_none()) {
            let known: HashMap<&Address, &Arc<Node>> =
                topology.nodes.iter().map(|node| (&node.address, node)).collect();
            let missing = self.target.servers.iter().filter(|server| !known.contains_key(server));
            let nodes = missing.map(|server| Node::start(&self.target, server.clone()));
            let nodes: Vec<_> = topology.nodes.iter().cloned().chain(nodes).collect();
            let slots = topology.slots.clone();
            *self.topology.write().unwrap_or_else(PoisonError::into_inner) =
                Arc::new(Topology { nodes, slots });
        }
        self.outdated.notify_one();
    }

    /// Keeps the connections to servers that are still there.
    fn arrange(&self, before: &Topology, ranges: &[cluster::Range]) -> Topology {
        let mut nodes: Vec<Arc<Node>> = Vec::new();
        let mut slots = vec![None; SLOTS].into_boxed_slice();
        for cluster::Range { first, last, server } in ranges {
            let index = nodes.iter().position(|node| node.address == *server).unwrap_or_else(|| {
                let known = before.nodes.iter().find(|node| node.address == *server);
                nodes.push(known.cloned().unwrap_or_else(|| Node::start(&self.target, server.clone())));
                nodes.len() - 1
            });
            slots[*first..=*last].fill(u16::try_from(index).ok());
        }
        Topology { nodes, slots: Some(slots) }
    }

    async fn call_node(
        &self,
        node: &Arc<Node>,
        script: Script,
        common: &[&str],
        items: &[Item],
        places: &[usize],
        topology: &Topology,
    ) -> Vec<Result<Value, Fault>> {
        let unanswered = || places.iter().map(|_| Err(Fault::Unanswered)).collect();
        let Some(link) = node.link() else { return unanswered() };
        // The keys of one call must be in one slot of a cluster, and seldom are.
        let per_call = if topology.slots.is_some() { 1 } else { KEYS_PER_CALL };
        let mut commands = redis::pipe();
        let mut count = 0;
        for chunk in places.chunks(per_call) {
            let command = commands.cmd("EVALSHA").arg(link.scripts.of(script)).arg(chunk.len());
            for &place in chunk {
                command.arg(&items[place].key);
            }
            command.arg(&*link.run).arg(common);
            for &place in chunk {
                command.arg(&items[place].arguments);
            }
            count += 1;
        }
        let replies = match link.call_all(&commands, count).await {
            Ok(replies) => replies,
            Err(error) => {
                node.lose(&link, &error);
                return unanswered();
            }
        };
        let mut answers = Vec::with_capacity(places.len());
        let mut is_missing = false;
        for (chunk, reply) in places.chunks(per_call).zip(replies) {
            let fault = match reply {
                Value::Array(values) if values.len() == chunk.len() => {
                    answers.extend(values.into_iter().map(Ok));
                    continue;
                }
                Value::ServerError(error) => self.judge(node, &link, &error.into()),
                _ => Fault::Unanswered,
            };
            is_missing |= matches!(fault, Fault::NoScript);
            answers.extend(chunk.iter().map(|_| Err(fault.again())));
        }
        if is_missing {
            let _ = Names::load(&mut link.connection.clone()).await;
        }
        answers
    }

    /// Once a second at most: every call may fail alike.
    fn tell_of_error(&self, node: &Node, error: &RedisError) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
            *told = Some(Instant::now());
            tracing::warn!(address = %node.address, %error, "Redis refused a call; Postgres answers it");
        }
    }

    /// What an error means for the connection and for the call.
    fn judge(&self, node: &Node, link: &Link, error: &RedisError) -> Fault {
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved) => Fault::Moved,
            ErrorKind::Server(ServerErrorKind::NoScript) => Fault::NoScript,
            // Under way to another server, or not decided yet: Postgres answers meanwhile.
            ErrorKind::Server(
                ServerErrorKind::Ask | ServerErrorKind::TryAgain | ServerErrorKind::CrossSlot,
            ) => Fault::Unanswered,
            // A script that failed, or memory that is full: the connection is well, and so are other keys.
            ErrorKind::Server(ServerErrorKind::ResponseError | ServerErrorKind::ExecAbort)
            | ErrorKind::Extension => {
                self.tell_of_error(node, error);
                Fault::Unanswered
            }
            _ => {
                node.lose(link, error);
                if self.target.is_cluster {
                    self.outdated.notify_one();
                }
                Fault::Unanswered
            }
        }
    }
}

impl Fault {
    const fn again(&self) -> Self {
        match self {
            Self::Moved => Self::Moved,
            Self::NoScript => Self::NoScript,
            Self::Unanswered => Self::Unanswered,
        }
    }
}

impl Topology {
    fn index_of(&self, key: &str) -> Option<usize> {
        match &self.slots {
            None => Some(0),
            Some(slots) => slots[cluster::slot(key.as_bytes())].map(usize::from),
        }
    }

    /// The items in `open` by the server that has them. Those that nobody has stay unanswered.
    fn group(&self, items: &[Item], open: &[usize]) -> Vec<(Arc<Node>, Vec<usize>)> {
        let mut groups: Vec<(Arc<Node>, Vec<usize>)> =
            self.nodes.iter().map(|node| (Arc::clone(node), Vec::new())).collect();
        for &place in open {
            if let Some((_, places)) =
                self.index_of(&items[place].key).and_then(|index| groups.get_mut(index))
            {
                places.push(place);
            }
        }
        groups.retain(|(_, places)| !places.is_empty());
        groups
    }
}
