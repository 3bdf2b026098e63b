//! The memory: shards of keys, each behind a lock of its own.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use weir_core::Timestamp;
use weir_core::tier::{Decision, Rule};

use crate::hash::{Hash, Seeds};
use crate::shard::{Entry, Shard};

pub use weir_core::tier::ScopedRule as Policy;

/// How large a memory may become, and what it keeps track of.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The most keys that have spent something at the same time. They are spread over the shards by chance, so a few in
    /// a hundred fewer may fit.
    pub keys_max: usize,
    /// How many locks there are, rounded up to a power of two; fewer for few keys. A shard that grows does so alone.
    pub shards: usize,
    /// Whether [`Memory::changes`] is going to be asked. Entries it has not handed out yet are not dropped.
    pub tracks_changes: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { keys_max: 20_000_000, shards: 512, tracks_changes: false }
    }
}

/// There is no room for another key that has spent something, and none of those there are has become idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the memory of limits is full")]
pub struct Full;

/// A decision, and what the key has spent after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Taken<S> {
    /// Whether it was allowed.
    pub decision: Decision,
    /// What has been spent now; as before, if it was denied.
    pub spent: S,
}

/// What keys have spent of rules, shared by all threads.
pub struct Memory<R: Rule> {
    seeds: Seeds,
    shards: Box<[Padded<Mutex<Shard<R>>>]>,
    keys_max_per_shard: usize,
}

/// Keeps neighbours out of each other's cache line.
#[repr(align(64))]
struct Padded<T>(T);

/// Shards for fewer keys would be filled too unevenly.
const KEYS_PER_SHARD_MIN: usize = 1_024;
/// How many places are looked at for every new key. With these, no more than a fifth or so of the entries are idle ones
/// that nobody has come across yet, however many keys come and go.
const SWEPT_PER_INSERT: usize = 8;
/// How many are looked at when a new key finds no room.
const SWEPT_WHEN_FULL: usize = 64;

impl<R: Rule> Memory<R> {
    /// An empty memory.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let worthwhile = options.keys_max / KEYS_PER_SHARD_MIN;
        let count = options.shards.min(worthwhile).clamp(1, 1 << 16).next_power_of_two();
        let shards = (0..count).map(|_| Padded(Mutex::new(Shard::new(options.tracks_changes)))).collect();
        let keys_max_per_shard = options.keys_max.div_ceil(count).min(1 << 30);
        Self { seeds: Seeds::random(), shards, keys_max_per_shard }
    }

    /// Spends `cost` for a key if it fits. A refusal changes nothing; a cost of 0 only looks.
    ///
    /// A rule other than the one this key met last takes over what was spent under that.
    /// Fails when the key is new and there is no room for it. Nothing is spent then.
    pub fn take(
        &self,
        policy: &Arc<Policy<R>>,
        id: &str,
        cost: u32,
        now: Timestamp,
    ) -> Result<Taken<R::Usage>, Full> {
        let hash = self.hash(policy, id);
        let (decision, spent) =
            self.update(hash, policy, id, now, |spent| policy.rule.take(spent, cost, now))?;
        Ok(Taken { decision, spent })
    }

    /// Spends `cost` whether it fits or not, as a debt if need be. Answers with what has been spent then.
    /// Fails when the key is new and there is no room for it. Nothing is spent then.
    pub fn charge(
        &self,
        policy: &Arc<Policy<R>>,
        id: &str,
        cost: u32,
        now: Timestamp,
    ) -> Result<R::Usage, Full> {
        let hash = self.hash(policy, id);
        Ok(self.update(hash, policy, id, now, |spent| policy.rule.charge(spent, cost, now))?.1)
    }

    /// Gives back `cost`, which was taken at `taken_at` if that is known. Answers with what has been spent then.
    pub fn give_back(
        &self,
        policy: &Arc<Policy<R>>,
        id: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
        now: Timestamp,
    ) -> R::Usage {
        let hash = self.hash(policy, id);
        let given = self.update(hash, policy, id, now, |spent| {
            if !policy.rule.is_unspent(spent, now) {
                policy.rule.give_back(spent, cost, taken_at, now);
            }
        });
        given.map_or_else(|Full| policy.rule.unspent(), |((), spent)| spent)
    }

    /// What a key has spent, as the rule sees it.
    #[must_use]
    pub fn peek(&self, policy: &Arc<Policy<R>>, id: &str, now: Timestamp) -> R::Usage {
        let hash = self.hash(policy, id);
        let shard = self.lock(hash.shard);
        let found = shard.find(hash.place, policy, id);
        found.map_or_else(|| policy.rule.unspent(), |(_, entry)| entry.spent_under(policy, now))
    }

    /// Makes a key as good as new. Answers whether there was anything to forget.
    pub fn forget(&self, policy: &Policy<R>, id: &str) -> bool {
        let hash = self.hash(policy, id);
        let mut shard = self.lock(hash.shard);
        let Some((at, _)) = shard.find(hash.place, policy, id) else { return false };
        shard.forget(at);
        true
    }

    /// Puts back what [`Memory::changes`] handed out, in place of anything there is. What has become as good as new in
    /// the meantime is left out.
    /// Fails when there is no room.
    pub fn restore(
        &self,
        policy: &Arc<Policy<R>>,
        id: &str,
        spent: R::Usage,
        now: Timestamp,
    ) -> Result<(), Full> {
        if policy.rule.is_unspent(&spent, now) {
            return Ok(());
        }
        let hash = self.hash(policy, id);
        let mut shard = self.lock(hash.shard);
        if let Some((at, _)) = shard.find(hash.place, policy, id) {
            shard.remove(at);
        }
        self.make_room(&mut shard, 1, now)?;
        shard.insert(Entry::new(policy, id, hash.place, spent, false));
        Ok(())
    }

    /// Looks at up to `budget` places in every shard and drops entries that are as good as new; answers how many that
    /// were. Every new key does the same for a few places, so this is only needed when no new ones come.
    pub fn sweep(&self, budget: usize, now: Timestamp) -> usize {
        (0..self.shards.len()).map(|index| self.lock(index).sweep(budget, now)).sum()
    }

    /// How many keys there are.
    #[must_use]
    pub fn len(&self) -> usize {
        (0..self.shards.len()).map(|index| self.lock(index).len()).sum()
    }

    /// How many changed keys wait for [`Memory::changes`], and perhaps a few that are named twice.
    #[must_use]
    pub fn changed_len(&self) -> usize {
        (0..self.shards.len()).map(|index| self.lock(index).changed_len()).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Changes what a key has spent, under its lock. A key that is new and stays unspent gets no entry.
    fn update<T>(
        &self,
        hash: Hash,
        policy: &Arc<Policy<R>>,
        id: &str,
        now: Timestamp,
        change: impl FnOnce(&mut R::Usage) -> T,
    ) -> Result<(T, R::Usage), Full> {
        let mut shard = self.lock(hash.shard);
        if let Some((at, entry)) = shard.find(hash.place, policy, id) {
            let mut spent = entry.spent_under(policy, now);
            let answer = change(&mut spent);
            shard.save(at, policy, spent);
            return Ok((answer, spent));
        }
        let mut spent = policy.rule.unspent();
        let answer = change(&mut spent);
        if spent != policy.rule.unspent() {
            self.make_room(&mut shard, 1, now)?;
            shard.insert(Entry::new(policy, id, hash.place, spent, true));
        }
        Ok((answer, spent))
    }

    /// Drops a few entries that have become idle, more of them when there is no room for `count` new ones.
    pub(crate) fn make_room(&self, shard: &mut Shard<R>, count: usize, now: Timestamp) -> Result<(), Full> {
        let has_room = |shard: &Shard<R>| shard.len() + count <= self.keys_max_per_shard;
        let budget = if has_room(shard) { SWEPT_PER_INSERT } else { SWEPT_WHEN_FULL };
        shard.sweep(budget * count, now);
        if has_room(shard) { Ok(()) } else { Err(Full) }
    }

    /// Where a key belongs.
    pub(crate) fn hash(&self, policy: &Policy<R>, id: &str) -> Hash {
        self.seeds.hash(policy.scope, id, self.shards.len())
    }

    pub(crate) const fn shards(&self) -> usize {
        self.shards.len()
    }

    /// Locks a shard. A thread that panicked in the middle of one cannot have left half an entry.
    pub(crate) fn lock(&self, index: usize) -> MutexGuard<'_, Shard<R>> {
        self.shards[index].0.lock()
    }
}

impl<R: Rule> std::fmt::Debug for Memory<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("shards", &self.shards.len()).finish_non_exhaustive()
    }
}
