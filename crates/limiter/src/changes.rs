//! What has changed since it was last asked for, for whoever keeps it on disk.

use std::sync::Arc;
use std::vec;

use weir_core::tier::Rule;

use crate::id::Id;
use crate::memory::{Memory, Policy};

/// How many entries are handed out under one lock.
const BATCH: usize = 256;

/// What one key has spent, as it was when it was handed out. One that is as good as new can be deleted.
#[derive(Debug)]
pub struct Change<R: Rule> {
    /// What it was spent of.
    pub policy: Arc<Policy<R>>,
    /// The key.
    pub id: Id,
    /// What it has spent.
    pub spent: R::Usage,
}

/// Every entry that has changed, each once, shard by shard. Decisions go on meanwhile: a lock is held for a few hundred
/// entries at a time, and what changes behind the iterator is handed out the next time.
#[derive(Debug)]
pub struct Changes<'a, R: Rule> {
    memory: &'a Memory<R>,
    /// The shard that is gone through.
    shard: usize,
    /// How many hashes of it are left; none before it is begun.
    left: Option<usize>,
    batch: vec::IntoIter<Change<R>>,
}

impl<R: Rule> Memory<R> {
    /// Hands out what has changed since it was last handed out, if [`Options`](crate::Options) say that it is tracked.
    /// Whoever takes a change must write it or keep it: it does not come again.
    pub fn changes(&self) -> Changes<'_, R> {
        Changes { memory: self, shard: 0, left: None, batch: Vec::new().into_iter() }
    }
}

impl<R: Rule> Changes<'_, R> {
    fn next_batch(&mut self) -> Vec<Change<R>> {
        let mut shard = self.memory.lock(self.shard);
        let left = self.left.unwrap_or_else(|| shard.changed_len());
        let count = left.min(BATCH);
        let mut batch = Vec::with_capacity(count);
        for _ in 0..count {
            shard.next_changed(|entry| {
                let (policy, id) = (Arc::clone(&entry.policy), entry.id.clone());
                batch.push(Change { policy, id, spent: entry.spent });
            });
        }
        self.left = Some(left - count);
        batch
    }
}

impl<R: Rule> Iterator for Changes<'_, R> {
    type Item = Change<R>;

    fn next(&mut self) -> Option<Change<R>> {
        loop {
            if let Some(change) = self.batch.next() {
                return Some(change);
            }
            if self.left == Some(0) {
                self.left = None;
                self.shard += 1;
            }
            if self.shard >= self.memory.shards() {
                return None;
            }
            self.batch = self.next_batch().into_iter();
        }
    }
}
