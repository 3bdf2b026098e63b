//! The limits' memory: shards of keys, each behind its own lock.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use weir_core::Timestamp;
use weir_core::tier::{Decision, Rule, ScopedRule};

use crate::hash::{Hash, Seeds};
use crate::shard::{Entry, Shard};

/// The size of a memory, and whether it tracks changes.
#[derive(Clone, Copy, Debug)]
pub struct MemoryOptions {
    /// The most keys with usage at the same time. They are spread randomly over the shards, so a few percent fewer may
    /// fit.
    pub keys_max: usize,
    /// The number of shards and locks, rounded up to a power of two; fewer for few keys. Shards grow independently.
    pub shards: usize,
    /// Whether [`Memory::changes`] will be called. Changed entries are not dropped before it has returned them.
    pub tracks_changes: bool,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self { keys_max: 20_000_000, shards: 512, tracks_changes: false }
    }
}

/// There is no room for another key, and no existing key is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory for limits is full")]
pub struct MemoryFull;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyOutcome<S> {
    pub decision: Decision,
    /// What the key has spent after the decision; unchanged if it was denied.
    pub spent: S,
}

/// What keys have spent, shared by all threads.
pub struct Memory<R: Rule> {
    seeds: Seeds,
    shards: Box<[Padded<Mutex<Shard<R>>>]>,
    keys_max_per_shard: usize,
}

/// Keeps neighbours in different cache lines.
#[repr(align(64))]
struct Padded<T>(T);

/// With fewer keys per shard, the shards would be filled too unevenly.
const KEYS_PER_SHARD_MIN: usize = 1_024;
/// How many cells are swept for every new key. With these, at most about a fifth of the entries are idle, however many
/// keys come and go.
const SWEPT_PER_INSERT: usize = 8;
/// How many cells are swept when there is no room for a new key.
const SWEPT_WHEN_FULL: usize = 64;

impl<R: Rule> Memory<R> {
    #[must_use]
    pub fn new(options: MemoryOptions) -> Self {
        let worthwhile = options.keys_max / KEYS_PER_SHARD_MIN;
        let count = options.shards.min(worthwhile).clamp(1, 1 << 16).next_power_of_two();
        let shards = (0..count).map(|_| Padded(Mutex::new(Shard::new(options.tracks_changes)))).collect();
        let keys_max_per_shard = options.keys_max.div_ceil(count).min(1 << 30);
        Self { seeds: Seeds::random(), shards, keys_max_per_shard }
    }

    /// Spends `cost` for a key if it fits. A denial changes nothing; a cost of 0 spends nothing.
    ///
    /// If the key was used under another rule before, its usage is carried over. Fails without spending if the key is
    /// new and there is no room for it.
    pub fn take(
        &self,
        policy: &Arc<ScopedRule<R>>,
        id: &str,
        cost: u32,
        now: Timestamp,
    ) -> Result<KeyOutcome<R::Usage>, MemoryFull> {
        let hash = self.hash(policy, id);
        let (decision, spent) =
            self.update(hash, policy, id, now, |spent| policy.rule.take(spent, cost, now))?;
        Ok(KeyOutcome { decision, spent })
    }

    /// Spends `cost` whether it fits or not, as a debt if necessary, and returns the new usage. Fails without spending
    /// if the key is new and there is no room for it.
    pub fn charge(
        &self,
        policy: &Arc<ScopedRule<R>>,
        id: &str,
        cost: u32,
        now: Timestamp,
    ) -> Result<R::Usage, MemoryFull> {
        let hash = self.hash(policy, id);
        Ok(self.update(hash, policy, id, now, |spent| policy.rule.charge(spent, cost, now))?.1)
    }

    /// Gives back `cost`, which was taken at `taken_at` if that is known, and returns the new usage.
    pub fn give_back(
        &self,
        policy: &Arc<ScopedRule<R>>,
        id: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
        now: Timestamp,
    ) -> R::Usage {
        let hash = self.hash(policy, id);
        let updated = self.update(hash, policy, id, now, |spent| {
            if !policy.rule.is_unspent(spent, now) {
                policy.rule.give_back(spent, cost, taken_at, now);
            }
        });
        updated.map_or_else(|MemoryFull| policy.rule.unspent(), |((), spent)| spent)
    }

    /// Returns what a key has spent, as the rule sees it.
    #[must_use]
    pub fn peek(&self, policy: &Arc<ScopedRule<R>>, id: &str, now: Timestamp) -> R::Usage {
        let hash = self.hash(policy, id);
        let shard = self.lock(hash.shard);
        let found = shard.find(hash.position, policy, id);
        found.map_or_else(|| policy.rule.unspent(), |(_, entry)| entry.spent_under(policy, now))
    }

    /// Resets the usage of a key. Returns whether there was any.
    pub fn forget(&self, policy: &ScopedRule<R>, id: &str) -> bool {
        let hash = self.hash(policy, id);
        let mut shard = self.lock(hash.shard);
        let Some((at, _)) = shard.find(hash.position, policy, id) else { return false };
        shard.forget(at);
        true
    }

    /// Restores what [`Memory::changes`] returned, in place of any existing entry. Skips usage that has expired in the
    /// meantime.
    pub fn restore(
        &self,
        policy: &Arc<ScopedRule<R>>,
        id: &str,
        spent: R::Usage,
        now: Timestamp,
    ) -> Result<(), MemoryFull> {
        if policy.rule.is_unspent(&spent, now) {
            return Ok(());
        }
        let hash = self.hash(policy, id);
        let mut shard = self.lock(hash.shard);
        if let Some((at, _)) = shard.find(hash.position, policy, id) {
            shard.remove(at);
        }
        self.make_room(&mut shard, 1, now)?;
        shard.insert(Entry::new(policy, id, hash.position, spent, false));
        Ok(())
    }

    /// Sweeps up to `budget` cells of every shard, drops idle entries and returns their number. Every new key sweeps a
    /// few cells as well, so this is only needed when no new keys come.
    pub fn sweep(&self, budget: usize, now: Timestamp) -> usize {
        (0..self.shards.len()).map(|index| self.lock(index).sweep(budget, now)).sum()
    }

    /// Returns the number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        (0..self.shards.len()).map(|index| self.lock(index).len()).sum()
    }

    /// Returns the number of changed keys that [`Memory::changes`] has not returned yet; a few may be counted twice.
    #[must_use]
    pub fn changed_len(&self) -> usize {
        (0..self.shards.len()).map(|index| self.lock(index).changed_len()).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes the usage of a key under its lock. A new key that stays unspent gets no entry.
    fn update<T>(
        &self,
        hash: Hash,
        policy: &Arc<ScopedRule<R>>,
        id: &str,
        now: Timestamp,
        change: impl FnOnce(&mut R::Usage) -> T,
    ) -> Result<(T, R::Usage), MemoryFull> {
        let mut shard = self.lock(hash.shard);
        if let Some((at, entry)) = shard.find(hash.position, policy, id) {
            let mut spent = entry.spent_under(policy, now);
            let result = change(&mut spent);
            shard.save(at, policy, spent);
            return Ok((result, spent));
        }
        let mut spent = policy.rule.unspent();
        let result = change(&mut spent);
        if spent != policy.rule.unspent() {
            self.make_room(&mut shard, 1, now)?;
            shard.insert(Entry::new(policy, id, hash.position, spent, true));
        }
        Ok((result, spent))
    }

    /// Drops a few idle entries, and more of them when there is no room for `count` new ones.
    pub(crate) fn make_room(
        &self,
        shard: &mut Shard<R>,
        count: usize,
        now: Timestamp,
    ) -> Result<(), MemoryFull> {
        let has_room = |shard: &Shard<R>| shard.len() + count <= self.keys_max_per_shard;
        let budget = if has_room(shard) { SWEPT_PER_INSERT } else { SWEPT_WHEN_FULL };
        shard.sweep(budget * count, now);
        if has_room(shard) { Ok(()) } else { Err(MemoryFull) }
    }

    pub(crate) fn hash(&self, policy: &ScopedRule<R>, id: &str) -> Hash {
        self.seeds.hash(policy.scope, id, self.shards.len())
    }

    pub(crate) const fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Locks a shard. A panic in another thread cannot have left a partial entry.
    pub(crate) fn lock(&self, index: usize) -> MutexGuard<'_, Shard<R>> {
        self.shards[index].0.lock()
    }
}

impl<R: Rule> std::fmt::Debug for Memory<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("shards", &self.shards.len()).finish_non_exhaustive()
    }
}
