//! A real Redis Cluster: three masters without replicas, each with a third of the hash slots.

use std::time::Duration;

use super::{NAME, Options, Reply, Server};
use crate::instance::with_unused_port;
use crate::wait::{becomes_true_blocking, until};

const NODES: u16 = 3;
const SLOTS: u16 = 16_384;
/// Includes the two seconds that a Redis master waits before it accepts writes.
const AGREEMENT_TIMEOUT: Duration = Duration::from_secs(60);

/// A running cluster. It is stopped and its files are removed when this value is dropped or the test process ends.
pub struct Cluster {
    nodes: Vec<Server>,
}

impl Cluster {
    /// A cluster for one test. Blocks until every node knows all others and the owner of each slot.
    pub fn private() -> Self {
        let node = |_| {
            with_unused_port(NAME, |port| {
                Server::create(port, &Options::default(), Some(crate::ports::unused()))
            })
        };
        let cluster = Self { nodes: (0..NODES).map(node).collect() };
        cluster.join();
        let agreed = becomes_true_blocking(AGREEMENT_TIMEOUT, || cluster.nodes.iter().all(is_ok));
        assert!(agreed, "the Redis cluster did not form within {AGREEMENT_TIMEOUT:?}:\n{}", cluster.report());
        cluster
    }

    /// `redis+cluster://` with the addresses of all nodes.
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self.nodes.iter().map(|node| node.address().to_string()).collect();
        format!("redis+cluster://{}", addresses.join(","))
    }

    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// The nodes, to stop, crash, pause or restart them. A restarted node refuses commands for two seconds; see
    /// [`wait_until_ok`](Self::wait_until_ok).
    pub fn nodes_mut(&mut self) -> &mut [Server] {
        &mut self.nodes
    }

    /// Waits until every node knows all others and reports that all slots are served.
    pub async fn wait_until_ok(&self) {
        until("cluster_state:ok on every node", AGREEMENT_TIMEOUT, async || {
            for node in &self.nodes {
                if !node.try_command(&["CLUSTER", "INFO"]).await.is_ok_and(|info| reports_ok(&info)) {
                    return false;
                }
            }
            true
        })
        .await;
    }

    /// The slot that `key` belongs to.
    pub async fn slot_of(&self, key: &str) -> u16 {
        let slot = self.ask_any(&["CLUSTER", "KEYSLOT", key]).await.integer();
        u16::try_from(slot).expect("there are fewer than 65536 slots")
    }

    /// The index of the node that serves `slot`.
    pub async fn owner_of(&self, slot: u16) -> usize {
        let Reply::List(ranges) = self.ask_any(&["CLUSTER", "SLOTS"]).await else {
            panic!("CLUSTER SLOTS must answer with a list");
        };
        let port = ranges.iter().find_map(|range| port_of(range, slot));
        let index = self.nodes.iter().position(|node| Some(i64::from(node.address().port())) == port);
        index.unwrap_or_else(|| panic!("no node serves slot {slot}:\n{}", self.report()))
    }

    /// Moves `slot` with its keys to node `to`. The old owner then replies with MOVED.
    pub async fn move_slot(&self, slot: u16, to: usize) {
        self.begin_slot_move(slot, to).await;
        self.finish_slot_move(slot, to).await;
    }

    /// Marks `slot` as migrating to node `to` without moving keys. Its owner serves the keys that it has and replies with
    /// ASK for others.
    pub async fn begin_slot_move(&self, slot: u16, to: usize) {
        let from = self.owner_of(slot).await;
        assert_ne!(from, to, "node {to} serves slot {slot} already");
        let (from_id, to_id) = (self.id(from).await, self.id(to).await);
        self.set_slot(to, slot, &["IMPORTING", &from_id]).await;
        self.set_slot(from, slot, &["MIGRATING", &to_id]).await;
    }

    /// Moves the keys of a slot after [`begin_slot_move`](Self::begin_slot_move) and makes node `to` its owner.
    pub async fn finish_slot_move(&self, slot: u16, to: usize) {
        let from = self.owner_of(slot).await;
        self.move_keys(slot, from, to).await;
        let to_id = self.id(to).await;
        // The new owner first: otherwise neither node would serve the slot for a moment.
        let others = (0..self.nodes.len()).filter(|&node| node != to && node != from);
        for node in [to, from].into_iter().chain(others) {
            self.set_slot(node, slot, &["NODE", &to_id]).await;
        }
    }

    async fn move_keys(&self, slot: u16, from: usize, to: usize) {
        let port = self.nodes[to].address().port().to_string();
        loop {
            let batch = ["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "100"];
            let keys = self.nodes[from].command(&batch).await.texts();
            if keys.is_empty() {
                return;
            }
            let mut words = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            words.extend(keys.iter().map(String::as_str));
            self.nodes[from].command(&words).await;
        }
    }

    async fn set_slot(&self, node: usize, slot: u16, state: &[&str]) {
        let slot = slot.to_string();
        self.nodes[node].command(&[&["CLUSTER", "SETSLOT", &slot], state].concat()).await;
    }

    async fn id(&self, node: usize) -> String {
        self.nodes[node].command(&["CLUSTER", "MYID"]).await.text()
    }

    /// The reply of the first node that responds, since some may be down.
    async fn ask_any(&self, words: &[&str]) -> Reply {
        for node in &self.nodes {
            if let Ok(reply) = node.try_command(words).await {
                return reply;
            }
        }
        panic!("no node of the cluster answers {}:\n{}", words.join(" "), self.report());
    }

    /// Assigns the slots to the nodes and joins them to a cluster.
    fn join(&self) {
        for (index, node) in (0..NODES).zip(&self.nodes) {
            let first_of = |index: u16| {
                let slot = u32::from(SLOTS) * u32::from(index) / u32::from(NODES);
                u16::try_from(slot).expect("no slot is past the last")
            };
            let (first, last) = (first_of(index), first_of(index + 1) - 1);
            run(node, &["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
            // Otherwise all have the same epoch and must resolve that conflict first.
            run(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
        }
        for (index, node) in self.nodes.iter().enumerate() {
            for other in &self.nodes[index + 1..] {
                let bus_port = run(other, &["CONFIG", "GET", "cluster-port"]).texts().remove(1);
                run(node, &["CLUSTER", "MEET", "127.0.0.1", &other.address().port().to_string(), &bus_port]);
            }
        }
    }

    /// How each node sees the cluster, for messages.
    fn report(&self) -> String {
        let view = |node: &Server| {
            let nodes = try_run(node, &["CLUSTER", "NODES"]);
            format!("{}:\n{}", node.address(), nodes.map_or_else(|reason| reason, |nodes| nodes.text()))
        };
        self.nodes.iter().map(view).collect::<Vec<_>>().join("\n")
    }
}

fn is_ok(node: &Server) -> bool {
    try_run(node, &["CLUSTER", "INFO"]).is_ok_and(|info| reports_ok(&info))
}

fn reports_ok(info: &Reply) -> bool {
    let info = info.text();
    let wanted = [
        "cluster_state:ok".to_owned(),
        format!("cluster_slots_ok:{SLOTS}"),
        format!("cluster_known_nodes:{NODES}"),
    ];
    wanted.iter().all(|wanted| info.lines().any(|line| line == wanted))
}

/// The port that serves `slot`, if it is in this `range` of CLUSTER SLOTS: first, last, `[host, port, …]`, ….
fn port_of(range: &Reply, slot: u16) -> Option<i64> {
    let Reply::List(range) = range else { return None };
    let [Reply::Integer(first), Reply::Integer(last), Reply::List(master), ..] = range.as_slice() else {
        return None;
    };
    (*first..=*last).contains(&i64::from(slot)).then(|| master[1].integer())
}

fn run(node: &Server, words: &[&str]) -> Reply {
    try_run(node, words).unwrap_or_else(|reason| panic!("{reason}\nin command: {}", words.join(" ")))
}

/// [`Server::try_command`] for code without a runtime.
fn try_run(node: &Server, words: &[&str]) -> Result<Reply, String> {
    node.endpoint.run(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
}
