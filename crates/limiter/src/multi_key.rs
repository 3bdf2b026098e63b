//! Several keys in one decision: all of them are spent or none.

use std::sync::Arc;

use parking_lot::MutexGuard;
use weir_core::Timestamp;
use weir_core::tier::{Decision, KeyCharge, LimitDenial, Rule, take_all};

use crate::hash::Hash;
use crate::memory::{Full, Memory, Policy, Taken};
use crate::shard::{Entry, Shard};

/// What one key asks for.
#[derive(Clone, Copy, Debug)]
pub struct Want<'a, R: Rule> {
    /// What it may spend.
    pub policy: &'a Arc<Policy<R>>,
    /// The key.
    pub id: &'a str,
    /// What it asks for. The costs of a key that stands there twice add up.
    pub cost: u32,
}

/// A decision about several keys.
#[derive(Clone, Debug, PartialEq)]
pub struct TakenAll<S> {
    /// The decision for all of them. Its `denied_by` counts in the order they were given.
    pub decision: Decision,
    /// What each of them alone would have been told, and what it has spent now: as before, if any was denied.
    pub each: Vec<Taken<S>>,
}

/// One key of a decision, once, with everything it asks for.
struct Part<'w, R: Rule> {
    want: &'w Want<'w, R>,
    /// The first place it has among the wants.
    first: usize,
    hash: Hash,
    cost: u32,
    /// Which of the locks it is behind, and where it stands there if it is known.
    lock: usize,
    at: Option<usize>,
    spent: R::Usage,
}

type Locks<'m, R> = Vec<MutexGuard<'m, Shard<R>>>;

impl<R: Rule> Memory<R> {
    /// Spends for all keys, or for none if any has no room. Meant for a handful of keys: all their shards are locked.
    /// Fails when a key is new and there is no room for it in memory. Nothing is spent then.
    pub fn take_all(&self, wants: &[Want<'_, R>], now: Timestamp) -> Result<TakenAll<R::Usage>, Full> {
        let (mut parts, part_of) = self.parts(wants);
        let mut locks = self.lock_all(&mut parts);
        self.make_room_for(&mut locks, &parts, now)?;
        load(&locks, &mut parts, now);
        let alone: Vec<_> = parts.iter().map(|part| part.alone(now)).collect();
        let decision = decide(&mut parts, now);
        // Those that are known come first: adding one moves others.
        parts.iter().filter(|part| part.at.is_some()).for_each(|part| part.save(&mut locks));
        parts.iter().filter(|part| part.at.is_none()).for_each(|part| part.save(&mut locks));
        let taken = |at: usize| Taken { decision: alone[at], spent: parts[at].spent };
        Ok(TakenAll { decision, each: part_of.into_iter().map(taken).collect() })
    }

    /// What [`Memory::take_all`] would answer. Nothing is spent.
    #[must_use]
    pub fn peek_all(&self, wants: &[Want<'_, R>], now: Timestamp) -> TakenAll<R::Usage> {
        let (mut parts, part_of) = self.parts(wants);
        load(&self.lock_all(&mut parts), &mut parts, now);
        let taken = |at: usize| Taken { decision: parts[at].alone(now), spent: parts[at].spent };
        let each = part_of.into_iter().map(taken).collect();
        TakenAll { decision: decide(&mut parts, now), each }
    }

    /// The wants with those of the same key as one, and which of the parts each want belongs to.
    fn parts<'w>(&self, wants: &'w [Want<'w, R>]) -> (Vec<Part<'w, R>>, Vec<usize>) {
        let mut parts: Vec<Part<'w, R>> = Vec::with_capacity(wants.len());
        let mut part_of = Vec::with_capacity(wants.len());
        for (first, want) in wants.iter().enumerate() {
            let known = parts.iter().position(|part| part.want.is_same_key(want));
            part_of.push(known.unwrap_or(parts.len()));
            if let Some(known) = known {
                parts[known].cost = parts[known].cost.saturating_add(want.cost);
            } else {
                let (hash, spent) = (self.hash(want.policy, want.id), want.policy.rule.unspent());
                parts.push(Part { want, first, hash, cost: want.cost, lock: 0, at: None, spent });
            }
        }
        (parts, part_of)
    }

    /// Locks the shards of all parts, in order, so that no two decisions wait for each other in a circle.
    fn lock_all(&self, parts: &mut [Part<'_, R>]) -> Locks<'_, R> {
        let mut shards: Vec<_> = parts.iter().map(|part| part.hash.shard).collect();
        shards.sort_unstable();
        shards.dedup();
        for part in parts {
            part.lock = shards.partition_point(|shard| *shard < part.hash.shard);
        }
        shards.into_iter().map(|shard| self.lock(shard)).collect()
    }

    /// Finds room for the parts that are new.
    fn make_room_for(
        &self,
        locks: &mut Locks<'_, R>,
        parts: &[Part<'_, R>],
        now: Timestamp,
    ) -> Result<(), Full> {
        for (lock, shard) in locks.iter_mut().enumerate() {
            let is_new = |part: &&Part<'_, R>| part.lock == lock && part.find(shard).is_none();
            let new = parts.iter().filter(is_new).count();
            if new > 0 {
                self.make_room(shard, new, now)?;
            }
        }
        Ok(())
    }
}

/// Finds where every part stands, and what it has spent.
fn load<R: Rule>(locks: &Locks<'_, R>, parts: &mut [Part<'_, R>], now: Timestamp) {
    for part in parts {
        if let Some((at, entry)) = part.find(&locks[part.lock]) {
            (part.at, part.spent) = (Some(at), entry.spent_under(part.want.policy, now));
        }
    }
}

impl<R: Rule> Want<'_, R> {
    fn is_same_key(&self, other: &Self) -> bool {
        (self.policy.scope, self.id) == (other.policy.scope, other.id)
    }
}

impl<R: Rule> Part<'_, R> {
    fn find<'s>(&self, shard: &'s Shard<R>) -> Option<(usize, &'s Entry<R>)> {
        shard.find(self.hash.place, self.want.policy, self.want.id)
    }

    /// What it would be told if it were asked about alone.
    fn alone(&self, now: Timestamp) -> Decision {
        let mut spent = self.spent;
        self.want.policy.rule.take(&mut spent, self.cost, now)
    }

    fn save(&self, locks: &mut Locks<'_, R>) {
        let Want { policy, id, .. } = self.want;
        let shard = &mut locks[self.lock];
        if let Some(at) = self.at {
            shard.save(at, policy, self.spent);
        } else if self.spent != policy.rule.unspent() {
            shard.insert(Entry::new(policy, id, self.hash.place, self.spent, true));
        }
    }
}

/// Decides for all parts. They stand in the order of the wants, so the first that is denied is the first want that is.
fn decide<R: Rule>(parts: &mut [Part<'_, R>], now: Timestamp) -> Decision {
    let firsts: Vec<_> = parts.iter().map(|part| part.first).collect();
    let claims = parts.iter_mut().map(|part| KeyCharge {
        rule: &part.want.policy.rule,
        spent: &mut part.spent,
        cost: part.cost,
    });
    match take_all(&mut claims.collect::<Vec<_>>(), now) {
        Decision::Denied(refusal) => {
            Decision::Denied(LimitDenial { denied_by: firsts[refusal.denied_by], ..refusal })
        }
        Decision::Allowed => Decision::Allowed,
    }
}
