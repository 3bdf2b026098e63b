//! The cluster topology: which server owns which hash slot, and the task that refreshes it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::SharedClient;
use super::cluster::{self, HASH_SLOTS};
use crate::node::Node;
use crate::target::{Address, RedisTarget};

/// The longest time between two refreshes.
const REFRESH_EVERY: Duration = Duration::from_secs(5);
/// The shortest time between two refreshes.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// The known servers and the hash slots that they own.
#[derive(Debug)]
pub(super) struct Topology {
    pub(super) nodes: Vec<Arc<Node>>,
    /// The index of the node of each hash slot; `None` for a single server, which owns every key.
    node_of_slot: Option<Box<[Option<u16>]>>,
}

impl Topology {
    /// Returns the topology before the first refresh: the configured servers.
    pub(super) fn initial(target: &RedisTarget) -> Self {
        let nodes = target.servers.iter().map(|server| Node::start(target, server.clone())).collect();
        Self { nodes, node_of_slot: target.is_cluster.then(|| vec![None; HASH_SLOTS].into_boxed_slice()) }
    }

    /// Returns whether every key has a server.
    pub(super) fn is_complete(&self) -> bool {
        self.node_of_slot.as_ref().is_none_or(|slots| slots.iter().all(Option::is_some))
    }

    /// Returns the server that owns a key.
    pub(super) fn node_of(&self, key: &str) -> Option<Arc<Node>> {
        let index = match &self.node_of_slot {
            None => 0,
            Some(nodes) => usize::from(nodes[cluster::hash_slot(key.as_bytes())]?),
        };
        self.nodes.get(index).cloned()
    }

    /// Returns the topology with these slot ranges. Nodes that are still part of the cluster keep their connections.
    fn with_ranges(&self, target: &RedisTarget, ranges: &[cluster::SlotRange]) -> Self {
        let mut nodes: Vec<Arc<Node>> = Vec::new();
        let mut node_of_slot = vec![None; HASH_SLOTS].into_boxed_slice();
        for cluster::SlotRange { first, last, server } in ranges {
            let index = nodes.iter().position(|node| node.address == *server).unwrap_or_else(|| {
                let connected = self.nodes.iter().find(|node| node.address == *server);
                nodes.push(connected.cloned().unwrap_or_else(|| Node::start(target, server.clone())));
                nodes.len() - 1
            });
            node_of_slot[*first..=*last].fill(u16::try_from(index).ok());
        }
        Self { nodes, node_of_slot: Some(node_of_slot) }
    }

    /// Returns the topology with the configured servers added.
    fn with_configured_servers(&self, target: &RedisTarget) -> Self {
        let is_known = |server: &Address| self.nodes.iter().any(|node| node.address == *server);
        let missing = target.servers.iter().filter(|server| !is_known(server));
        let missing = missing.map(|server| Node::start(target, server.clone()));
        Self {
            nodes: self.nodes.iter().cloned().chain(missing).collect(),
            node_of_slot: self.node_of_slot.clone(),
        }
    }
}

/// Groups the indices of keys: on a cluster by hash slot, otherwise into one group.
pub(super) fn group<'a>(keys: impl Iterator<Item = &'a str>, is_cluster: bool) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut group_of: HashMap<usize, usize> = HashMap::new();
    for (index, key) in keys.enumerate() {
        let slot = if is_cluster { cluster::hash_slot(key.as_bytes()) } else { 0 };
        let group = *group_of.entry(slot).or_insert(groups.len());
        if group == groups.len() {
            groups.push(Vec::new());
        }
        groups[group].push(index);
    }
    groups
}

/// Refreshes the topology of a cluster until its client is dropped.
pub(super) async fn refresh_periodically(shared: Weak<SharedClient>) {
    while let Some(shared) = shared.upgrade() {
        shared.refresh().await;
        let outdated = async {
            shared.outdated.notified().await;
            tokio::time::sleep(REFRESH_PAUSE).await;
        };
        let _ = tokio::time::timeout(REFRESH_EVERY, outdated).await;
    }
}

impl SharedClient {
    /// Requests a refresh and waits for it, but not for long.
    pub(super) async fn refresh_topology(&self) {
        let mut topologies = self.topology.subscribe();
        self.outdated.notify_one();
        let _ = tokio::time::timeout(REFRESH_PAUSE * 3, topologies.changed()).await;
    }

    async fn refresh(&self) {
        let topology = self.topology();
        for node in &topology.nodes {
            let Some(reply) = node.query(redis::cmd("CLUSTER").arg("SLOTS")).await else { continue };
            let ranges =
                cluster::parse_slot_ranges(&reply, &node.address).filter(|ranges| !ranges.is_empty());
            if let Some(ranges) = ranges {
                self.topology.send_replace(Arc::new(topology.with_ranges(&self.target, &ranges)));
                return;
            }
        }
        if topology.nodes.iter().all(|node| node.connection().is_none()) {
            self.topology.send_replace(Arc::new(topology.with_configured_servers(&self.target)));
        }
        self.outdated.notify_one();
    }
}
