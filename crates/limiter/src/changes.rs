//! Iterates over changed entries, for a journal that saves them.

use std::sync::Arc;
use std::vec;

use weir_core::tier::{Rule, ScopedRule};

use crate::id::Id;
use crate::memory::Memory;

/// The number of entries returned per lock.
const BATCH: usize = 256;

/// What a key has spent. If that is nothing, a saved row can be deleted.
#[derive(Debug)]
pub struct KeyChange<R: Rule> {
    pub policy: Arc<ScopedRule<R>>,
    pub id: Id,
    pub spent: R::Usage,
}

/// All changed entries, each once, shard by shard. Decisions continue meanwhile: a lock is held for a few hundred
/// entries at a time. What changes in a shard that was already visited is returned by the next iterator.
#[derive(Debug)]
pub struct KeyChanges<'a, R: Rule> {
    memory: &'a Memory<R>,
    /// The current shard.
    shard: usize,
    /// How many of its hashes are left; `None` before the shard is started.
    left: Option<usize>,
    batch: vec::IntoIter<KeyChange<R>>,
}

impl<R: Rule> Memory<R> {
    /// Returns what has changed since it was last returned, if [`MemoryOptions`](crate::MemoryOptions) enable
    /// tracking. The caller must save each change: it is not returned again.
    pub fn changes(&self) -> KeyChanges<'_, R> {
        KeyChanges { memory: self, shard: 0, left: None, batch: Vec::new().into_iter() }
    }
}

impl<R: Rule> KeyChanges<'_, R> {
    fn next_batch(&mut self) -> Vec<KeyChange<R>> {
        let mut shard = self.memory.lock(self.shard);
        let left = self.left.unwrap_or_else(|| shard.changed_len());
        let count = left.min(BATCH);
        let mut batch = Vec::with_capacity(count);
        for _ in 0..count {
            shard.next_changed(|entry| {
                let (policy, id) = (Arc::clone(&entry.policy), entry.id.clone());
                batch.push(KeyChange { policy, id, spent: entry.spent });
            });
        }
        self.left = Some(left - count);
        batch
    }
}

impl<R: Rule> Iterator for KeyChanges<'_, R> {
    type Item = KeyChange<R>;

    fn next(&mut self) -> Option<KeyChange<R>> {
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
