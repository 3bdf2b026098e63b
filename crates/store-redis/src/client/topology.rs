//! Which server has which key, and how that is found out again when it has changed.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Inner;
use super::cluster::{self, SLOTS};
use crate::node::Node;
use crate::target::{Address, Target};

/// How often a cluster is asked which server has what, at least.
const REFRESH: Duration = Duration::from_secs(5);
/// And at most.
const REFRESH_PAUSE: Duration = Duration::from_millis(100);

/// Which server has what.
#[derive(Debug)]
pub(super) struct Topology {
    pub(super) nodes: Vec<Arc<Node>>,
    /// For each hash slot the index of its server; none for one server that has everything.
    slots: Option<Box<[Option<u16>]>>,
}

impl Topology {
    /// What is known before anybody was asked.
    pub(super) fn first(target: &Target) -> Self {
        let nodes = target.servers.iter().map(|server| Node::start(target, server.clone())).collect();
        Self { nodes, slots: target.is_cluster.then(|| vec![None; SLOTS].into_boxed_slice()) }
    }

    /// Whether every key has a server.
    pub(super) fn is_complete(&self) -> bool {
        self.slots.as_ref().is_none_or(|slots| slots.iter().all(Option::is_some))
    }

    /// The server that has a key.
    pub(super) fn node_of(&self, key: &str) -> Option<Arc<Node>> {
        let index = match &self.slots {
            None => 0,
            Some(slots) => usize::from(slots[cluster::slot(key.as_bytes())]?),
        };
        self.nodes.get(index).cloned()
    }

    /// The same with these ranges. Connections to servers that are still there go on.
    fn with_ranges(&self, target: &Target, ranges: &[cluster::Range]) -> Self {
        let mut nodes: Vec<Arc<Node>> = Vec::new();
        let mut slots = vec![None; SLOTS].into_boxed_slice();
        for cluster::Range { first, last, server } in ranges {
            let index = nodes.iter().position(|node| node.address == *server).unwrap_or_else(|| {
                let known = self.nodes.iter().find(|node| node.address == *server);
                nodes.push(known.cloned().unwrap_or_else(|| Node::start(target, server.clone())));
                nodes.len() - 1
            });
            slots[*first..=*last].fill(u16::try_from(index).ok());
        }
        Self { nodes, slots: Some(slots) }
    }

    /// The same with the servers that we were given at the start.
    fn with_first(&self, target: &Target) -> Self {
        let is_known = |server: &Address| self.nodes.iter().any(|node| node.address == *server);
        let missing = target.servers.iter().filter(|server| !is_known(server));
        let missing = missing.map(|server| Node::start(target, server.clone()));
        Self { nodes: self.nodes.iter().cloned().chain(missing).collect(), slots: self.slots.clone() }
    }
}

/// The places of keys that are together: on a cluster those of one hash slot, else all.
pub(super) fn group<'a>(keys: impl Iterator<Item = &'a str>, is_cluster: bool) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut group_of: HashMap<usize, usize> = HashMap::new();
    for (place, key) in keys.enumerate() {
        let slot = if is_cluster { cluster::slot(key.as_bytes()) } else { 0 };
        let group = *group_of.entry(slot).or_insert(groups.len());
        if group == groups.len() {
            groups.push(Vec::new());
        }
        groups[group].push(place);
    }
    groups
}

/// Asks a cluster again and again which server has what, for as long as somebody uses it.
pub(super) async fn keep_current(inner: Weak<Inner>) {
    while let Some(inner) = inner.upgrade() {
        inner.refresh().await;
        let outdated = async {
            inner.outdated.notified().await;
            tokio::time::sleep(REFRESH_PAUSE).await;
        };
        let _ = tokio::time::timeout(REFRESH, outdated).await;
    }
}

impl Inner {
    /// Has the cluster asked which server has what, and waits for the answer for a moment.
    pub(super) async fn learn_topology(&self) {
        let mut topologies = self.topology.subscribe();
        self.outdated.notify_one();
        let _ = tokio::time::timeout(REFRESH_PAUSE * 3, topologies.changed()).await;
    }

    async fn refresh(&self) {
        let topology = self.topology();
        for node in &topology.nodes {
            let Some(answer) = node.ask(redis::cmd("CLUSTER").arg("SLOTS")).await else { continue };
            let ranges = cluster::ranges(&answer, &node.address).filter(|ranges| !ranges.is_empty());
            if let Some(ranges) = ranges {
                self.topology.send_replace(Arc::new(topology.with_ranges(&self.target, &ranges)));
                return;
            }
        }
        if topology.nodes.iter().all(|node| node.link().is_none()) {
            self.topology.send_replace(Arc::new(topology.with_first(&self.target)));
        }
        self.outdated.notify_one();
    }
}
