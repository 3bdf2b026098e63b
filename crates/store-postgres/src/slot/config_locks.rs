//! In-process locks of configs. The locks between servers are in the database; a batch first waits for the other batches of its
//! own server here, without holding a connection.

use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use weir_core::ConfigName;
use weir_store::shard;

/// The number of locks, which configs share by hash. Two configs with the same lock only wait for each other.
const LOCKS: u16 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConfigAccess {
    /// Concurrently with other batches, whose locked windows are skipped.
    Shared,
    /// Without any other batch on any server. Waiting batches are served in order.
    Exclusive,
}

#[derive(Debug)]
pub(crate) struct ConfigLocks {
    locks: Box<[RwLock<()>]>,
}

/// Held until the batch ends.
#[expect(dead_code, reason = "the guards are only dropped")]
#[derive(Debug)]
pub(super) enum ConfigGuard<'a> {
    Shared(RwLockReadGuard<'a, ()>),
    Exclusive(RwLockWriteGuard<'a, ()>),
}

impl Default for ConfigLocks {
    fn default() -> Self {
        Self { locks: (0..LOCKS).map(|_| RwLock::default()).collect() }
    }
}

impl ConfigLocks {
    /// Waits for the locks of these configs. They are taken in order, so that batches cannot deadlock.
    pub(super) async fn lock(&self, configs: &[&ConfigName], access: ConfigAccess) -> Vec<ConfigGuard<'_>> {
        let mut indices: Vec<u16> = configs.iter().map(|name| shard::of(name.as_str(), LOCKS)).collect();
        indices.sort_unstable();
        indices.dedup();
        let mut guards = Vec::with_capacity(indices.len());
        for index in indices {
            let lock = &self.locks[usize::from(index)];
            guards.push(match access {
                ConfigAccess::Shared => ConfigGuard::Shared(lock.read().await),
                ConfigAccess::Exclusive => ConfigGuard::Exclusive(lock.write().await),
            });
        }
        guards
    }
}
