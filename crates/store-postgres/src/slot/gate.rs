//! Who of this server may work on a config. The locks that servers share are in the database; a batch waits here first,
//! without a connection, so that others of this server find one free.

use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use weir_core::ConfigName;
use weir_store::shard;

/// Configs share this many locks. Two that share one wait for each other, no more.
const LOCKS: u16 = 64;

/// How a batch goes about its configs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Beside other batches, whose windows it passes over.
    Shared,
    /// With no other batch on any server. Those who wait are served in order.
    Alone,
}

#[derive(Debug)]
pub(crate) struct Gate {
    locks: Box<[RwLock<()>]>,
}

/// Held for as long as a batch works.
#[expect(dead_code, reason = "it is there to be dropped")]
#[derive(Debug)]
pub(super) enum Pass<'a> {
    Shared(RwLockReadGuard<'a, ()>),
    Alone(RwLockWriteGuard<'a, ()>),
}

impl Default for Gate {
    fn default() -> Self {
        Self { locks: (0..LOCKS).map(|_| RwLock::default()).collect() }
    }
}

impl Gate {
    /// Waits until the batch may work on these configs. Locks are taken in order, so that no two batches wait for each other.
    pub(super) async fn pass(&self, configs: &[&ConfigName], access: Access) -> Vec<Pass<'_>> {
        let mut wanted: Vec<u16> = configs.iter().map(|name| shard::of(name.as_str(), LOCKS)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut passes = Vec::with_capacity(wanted.len());
        for index in wanted {
            let lock = &self.locks[usize::from(index)];
            passes.push(match access {
                Access::Shared => Pass::Shared(lock.read().await),
                Access::Alone => Pass::Alone(lock.write().await),
            });
        }
        passes
    }
}
