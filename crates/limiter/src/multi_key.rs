//! Several keys in one decision: all are spent or none.

use std::sync::Arc;

use parking_lot::MutexGuard;
use weir_core::Timestamp;
use weir_core::tier::{Decision, KeyCharge, LimitDenial, Rule, ScopedRule, take_all};

use crate::hash::Hash;
use crate::memory::{KeyOutcome, Memory, MemoryFull};
use crate::shard::{Entry, Shard};

/// A key and the cost to spend.
#[derive(Clone, Copy, Debug)]
pub struct KeyRequest<'a, R: Rule> {
    pub policy: &'a Arc<ScopedRule<R>>,
    pub id: &'a str,
    /// The cost. If a key occurs twice, its costs are added up.
    pub cost: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MultiKeyOutcome<S> {
    /// The decision for all keys. Its `denied_by` is the index in the order of the requests.
    pub decision: Decision,
    /// The decision for each key by itself, and its usage afterwards; unchanged if any key was denied.
    pub each: Vec<KeyOutcome<S>>,
}

/// A distinct key of a decision, with its total cost.
struct MergedKey<'w, R: Rule> {
    request: &'w KeyRequest<'w, R>,
    /// The index of its first request.
    first: usize,
    hash: Hash,
    cost: u32,
    /// The index of its lock, and its position in the shard if it has an entry.
    lock: usize,
    at: Option<usize>,
    spent: R::Usage,
}

type Locks<'m, R> = Vec<MutexGuard<'m, Shard<R>>>;

impl<R: Rule> Memory<R> {
    /// Spends for all keys, or for none if any has no room. Meant for a handful of keys: all their shards are locked.
    /// Fails without spending if a key is new and there is no room for it in memory.
    pub fn take_all(
        &self,
        requests: &[KeyRequest<'_, R>],
        now: Timestamp,
    ) -> Result<MultiKeyOutcome<R::Usage>, MemoryFull> {
        let (mut keys, key_index) = self.merge(requests);
        let mut locks = self.lock_all(&mut keys);
        self.make_room_for(&mut locks, &keys, now)?;
        load(&locks, &mut keys, now);
        let alone: Vec<_> = keys.iter().map(|key| key.decide_alone(now)).collect();
        let decision = decide(&mut keys, now);
        // Existing entries come first: inserting an entry moves others.
        keys.iter().filter(|key| key.at.is_some()).for_each(|key| key.save(&mut locks));
        keys.iter().filter(|key| key.at.is_none()).for_each(|key| key.save(&mut locks));
        let taken = |at: usize| KeyOutcome { decision: alone[at], spent: keys[at].spent };
        Ok(MultiKeyOutcome { decision, each: key_index.into_iter().map(taken).collect() })
    }

    /// Returns what [`Memory::take_all`] would return, without spending.
    #[must_use]
    pub fn peek_all(&self, requests: &[KeyRequest<'_, R>], now: Timestamp) -> MultiKeyOutcome<R::Usage> {
        let (mut keys, key_index) = self.merge(requests);
        load(&self.lock_all(&mut keys), &mut keys, now);
        let taken = |at: usize| KeyOutcome { decision: keys[at].decide_alone(now), spent: keys[at].spent };
        let each = key_index.into_iter().map(taken).collect();
        MultiKeyOutcome { decision: decide(&mut keys, now), each }
    }

    /// Merges requests for the same key, and returns the index of the merged key for each request.
    fn merge<'w>(&self, requests: &'w [KeyRequest<'w, R>]) -> (Vec<MergedKey<'w, R>>, Vec<usize>) {
        let mut keys: Vec<MergedKey<'w, R>> = Vec::with_capacity(requests.len());
        let mut key_index = Vec::with_capacity(requests.len());
        for (first, request) in requests.iter().enumerate() {
            let known = keys.iter().position(|key| key.request.is_same_key(request));
            key_index.push(known.unwrap_or(keys.len()));
            if let Some(known) = known {
                keys[known].cost = keys[known].cost.saturating_add(request.cost);
            } else {
                let (hash, spent) = (self.hash(request.policy, request.id), request.policy.rule.unspent());
                keys.push(MergedKey { request, first, hash, cost: request.cost, lock: 0, at: None, spent });
            }
        }
        (keys, key_index)
    }

    /// Locks the shards of all keys in order, so that decisions cannot deadlock.
    fn lock_all(&self, keys: &mut [MergedKey<'_, R>]) -> Locks<'_, R> {
        let mut shards: Vec<_> = keys.iter().map(|key| key.hash.shard).collect();
        shards.sort_unstable();
        shards.dedup();
        for key in keys {
            key.lock = shards.partition_point(|shard| *shard < key.hash.shard);
        }
        shards.into_iter().map(|shard| self.lock(shard)).collect()
    }

    /// Makes room for the keys without an entry.
    fn make_room_for(
        &self,
        locks: &mut Locks<'_, R>,
        keys: &[MergedKey<'_, R>],
        now: Timestamp,
    ) -> Result<(), MemoryFull> {
        for (lock, shard) in locks.iter_mut().enumerate() {
            let is_new = |key: &&MergedKey<'_, R>| key.lock == lock && key.find(shard).is_none();
            let new = keys.iter().filter(is_new).count();
            if new > 0 {
                self.make_room(shard, new, now)?;
            }
        }
        Ok(())
    }
}

/// Loads the position and usage of every key.
fn load<R: Rule>(locks: &Locks<'_, R>, keys: &mut [MergedKey<'_, R>], now: Timestamp) {
    for key in keys {
        if let Some((at, entry)) = key.find(&locks[key.lock]) {
            (key.at, key.spent) = (Some(at), entry.spent_under(key.request.policy, now));
        }
    }
}

impl<R: Rule> KeyRequest<'_, R> {
    fn is_same_key(&self, other: &Self) -> bool {
        (self.policy.scope, self.id) == (other.policy.scope, other.id)
    }
}

impl<R: Rule> MergedKey<'_, R> {
    fn find<'s>(&self, shard: &'s Shard<R>) -> Option<(usize, &'s Entry<R>)> {
        shard.find(self.hash.position, self.request.policy, self.request.id)
    }

    /// Returns the decision for this key by itself.
    fn decide_alone(&self, now: Timestamp) -> Decision {
        let mut spent = self.spent;
        self.request.policy.rule.take(&mut spent, self.cost, now)
    }

    fn save(&self, locks: &mut Locks<'_, R>) {
        let KeyRequest { policy, id, .. } = self.request;
        let shard = &mut locks[self.lock];
        if let Some(at) = self.at {
            shard.save(at, policy, self.spent);
        } else if self.spent != policy.rule.unspent() {
            shard.insert(Entry::new(policy, id, self.hash.position, self.spent, true));
        }
    }
}

/// Decides for all keys. They are in the order of the requests, so the first denied key belongs to the first denied
/// request.
fn decide<R: Rule>(keys: &mut [MergedKey<'_, R>], now: Timestamp) -> Decision {
    let firsts: Vec<_> = keys.iter().map(|key| key.first).collect();
    let claims = keys.iter_mut().map(|key| KeyCharge {
        rule: &key.request.policy.rule,
        spent: &mut key.spent,
        cost: key.cost,
    });
    match take_all(&mut claims.collect::<Vec<_>>(), now) {
        Decision::Denied(refusal) => {
            Decision::Denied(LimitDenial { denied_by: firsts[refusal.denied_by], ..refusal })
        }
        Decision::Allowed => Decision::Allowed,
    }
}
