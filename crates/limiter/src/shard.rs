//! One shard: a row of places in which entries stand in the order of their hashes.
//!
//! A hash says where in the row its entry should stand. It stands there or a few places further on, where the row is
//! crowded, and never behind a free place. So a search reads one stretch of memory and follows no pointers: with millions
//! of keys, waiting for memory is all that a decision costs. A row about eight tenths full is searched in two to four
//! places on average and wastes little; it is copied, in order, to stay that full.

use std::mem;
use std::sync::Arc;

use weir_core::Timestamp;
use weir_core::tier::Rule;

use crate::id::Id;
use crate::memory::Policy;

/// What one key has spent, and of what. A cache line, for the two buckets of a tier and for a limit of any kind.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Entry<R: Rule> {
    pub(crate) id: Id,
    pub(crate) policy: Arc<Policy<R>>,
    pub(crate) spent: R::Usage,
    pub(crate) hash: u32,
    /// Whether its hash stands in `Shard::changed`.
    pub(crate) changed: bool,
}

impl<R: Rule> Entry<R> {
    pub(crate) fn new(policy: &Arc<Policy<R>>, id: &str, hash: u32, spent: R::Usage, changed: bool) -> Self {
        Self { id: Id::from(id), policy: Arc::clone(policy), spent, hash, changed }
    }

    fn is(&self, policy: &Policy<R>, id: &str) -> bool {
        self.policy.scope == policy.scope && self.id.as_bytes() == id.as_bytes()
    }

    /// Whether nothing is lost by dropping it.
    fn is_idle(&self, now: Timestamp) -> bool {
        !self.changed && self.policy.rule.is_unspent(&self.spent, now)
    }

    /// What it has spent, as the rule of `policy` sees it.
    pub(crate) fn spent_under(&self, policy: &Arc<Policy<R>>, now: Timestamp) -> R::Usage {
        if Arc::ptr_eq(&self.policy, policy) || self.policy.rule == policy.rule {
            self.spent
        } else {
            policy.rule.carry_over(&self.policy.rule, self.spent, now)
        }
    }
}

#[derive(Debug)]
pub(crate) struct Shard<R: Rule> {
    /// The places, and a few more at the end where it is crowded there.
    row: Vec<Option<Entry<R>>>,
    /// How many places hashes can ask for.
    places: u32,
    /// How many are taken.
    entries: u32,
    /// The place that is looked at next, for whether its entry can be dropped.
    sweep_next: u32,
    /// Which entries have changed, if anybody is going to ask. In a box, so that a shard and its lock are a cache line.
    changed: Option<Box<Changed>>,
}

/// The hashes of entries that have changed.
#[derive(Debug, Default)]
struct Changed {
    hashes: Vec<u32>,
}

impl Changed {
    fn push(&mut self, hash: u32) {
        if self.hashes.len() == self.hashes.capacity() {
            self.hashes.reserve_exact((self.hashes.len() / 8).max(16));
        }
        self.hashes.push(hash);
    }

    /// The next one. Memory is given back with the last.
    fn pop(&mut self) -> Option<u32> {
        let hash = self.hashes.pop();
        if self.hashes.is_empty() {
            self.hashes = Vec::new();
        }
        hash
    }
}

/// A row is copied to a longer one before more than so many of a hundred places are taken, and has these taken then.
const FULLEST_PERCENT: usize = 83;
const GROWN_PERCENT: usize = 73;
/// It is copied to a shorter one when fewer than so many are taken, and has these taken then.
const EMPTIEST_PERCENT: usize = 72;
const SHRUNK_PERCENT: usize = 79;
/// A row of no more places than these is not made shorter.
const SMALL: u32 = 16;
/// So many places past the end are set aside for crowding there; there may be more.
const CROWD: usize = 6;

impl<R: Rule> Shard<R> {
    pub(crate) fn new(tracks_changes: bool) -> Self {
        let changed = tracks_changes.then(Box::default);
        Self { row: Vec::new(), places: 0, entries: 0, sweep_next: 0, changed }
    }

    pub(crate) const fn len(&self) -> usize {
        self.entries as usize
    }

    /// The entry of a key, and where it stands; none if there is no such entry.
    pub(crate) fn find(&self, hash: u32, policy: &Policy<R>, id: &str) -> Option<(usize, &Entry<R>)> {
        let mut at = self.home(hash);
        while let Some(Some(entry)) = self.row.get(at) {
            if entry.hash == hash && entry.is(policy, id) {
                return Some((at, entry));
            }
            if entry.hash > hash {
                break;
            }
            at += 1;
        }
        None
    }

    /// Keeps what the entry at a place has spent.
    pub(crate) fn save(&mut self, at: usize, policy: &Arc<Policy<R>>, spent: R::Usage) {
        let Some(Some(entry)) = self.row.get_mut(at) else { return };
        let mut has_changed = entry.spent != spent;
        if !Arc::ptr_eq(&entry.policy, policy) {
            has_changed |= entry.policy.rule != policy.rule;
            entry.policy = Arc::clone(policy);
        }
        entry.spent = spent;
        if has_changed
            && let Some(changed) = &mut self.changed
            && !mem::replace(&mut entry.changed, true)
        {
            changed.push(entry.hash);
        }
    }

    /// Adds an entry for a key that has none. Others may move.
    pub(crate) fn insert(&mut self, mut entry: Entry<R>) {
        match &mut self.changed {
            Some(changed) if entry.changed => changed.push(entry.hash),
            _ => entry.changed = false,
        }
        self.entries += 1;
        if self.len() * 100 > self.places as usize * FULLEST_PERCENT {
            self.copy(GROWN_PERCENT);
        }
        let at = self.home(entry.hash);
        let at = at + self.row[at..].iter().take_while(|place| is_up_to(entry.hash, place)).count();
        let crowd = self.row[at..].iter().take_while(|place| place.is_some()).count();
        if at + crowd == self.row.len() {
            self.push(None);
        }
        self.row[at..=at + crowd].rotate_right(1);
        self.row[at] = Some(entry);
    }

    /// Drops the entry at a place. Others may move.
    pub(crate) fn remove(&mut self, at: usize) {
        self.row[at] = None;
        let away = self.row[at + 1..]
            .iter()
            .zip(at + 1..)
            .take_while(|(place, at)| place.as_ref().is_some_and(|entry| self.home(entry.hash) < *at));
        let away = away.count();
        self.row[at..=at + away].rotate_left(1);
        self.entries -= 1;
        if self.len() * 100 < self.places as usize * EMPTIEST_PERCENT && self.places > SMALL {
            self.copy(SHRUNK_PERCENT);
        }
    }

    /// Makes the entry at a place as good as new: drops it, or has that handed out first.
    pub(crate) fn forget(&mut self, at: usize) {
        if self.changed.is_none() {
            self.remove(at);
        } else if let Some(Some(entry)) = self.row.get(at) {
            let policy = Arc::clone(&entry.policy);
            self.save(at, &policy, policy.rule.unspent());
        }
    }

    /// Looks at up to `budget` places, going round, and drops entries that are as good as new. Answers how many.
    pub(crate) fn sweep(&mut self, budget: usize, now: Timestamp) -> usize {
        let before = self.len();
        // Dropping one is a step that does not get on.
        let round = self.row.len() + before + 1;
        for _ in 0..budget.min(round) {
            let at = self.sweep_next as usize;
            match self.row.get(at) {
                Some(Some(entry)) if entry.is_idle(now) => self.remove(at),
                Some(_) => self.sweep_next += 1,
                None => self.sweep_next = 0,
            }
        }
        before - self.len()
    }

    /// How many hashes of changed entries there are to go through.
    pub(crate) fn changed_len(&self) -> usize {
        self.changed.as_ref().map_or(0, |changed| changed.hashes.len())
    }

    /// Goes on to the next hash of changed entries and hands out what stands there.
    pub(crate) fn next_changed(&mut self, mut each: impl FnMut(&Entry<R>)) {
        let Some(hash) = self.changed.as_mut().and_then(|changed| changed.pop()) else { return };
        let home = self.home(hash);
        for entry in self.row[home..].iter_mut().map_while(Option::as_mut) {
            if entry.hash > hash {
                break;
            }
            if entry.hash == hash && mem::replace(&mut entry.changed, false) {
                each(entry);
            }
        }
    }

    /// The place that a hash asks for.
    fn home(&self, hash: u32) -> usize {
        ((u64::from(hash) * u64::from(self.places)) >> 32) as usize
    }

    /// Copies the row to one with so many of a hundred places taken, keeping the order.
    fn copy(&mut self, taken_percent: usize) {
        let places = (self.len() * 100 / taken_percent).max(SMALL as usize / 2);
        let swept = u64::from(self.sweep_next) * places as u64 / u64::from(self.places.max(1));
        self.sweep_next = u32::try_from(swept).unwrap_or(0);
        self.places = u32::try_from(places).unwrap_or(u32::MAX);
        let old = mem::replace(&mut self.row, Vec::with_capacity(places + CROWD));
        for entry in old.into_iter().flatten() {
            while self.row.len() < self.home(entry.hash) {
                self.row.push(None);
            }
            self.push(Some(entry));
        }
        while self.row.len() < places {
            self.row.push(None);
        }
    }

    /// Adds a place at the end, and room for a few at most: a row that doubled would be half empty.
    fn push(&mut self, place: Option<Entry<R>>) {
        if self.row.len() == self.row.capacity() {
            self.row.reserve_exact(CROWD);
        }
        self.row.push(place);
    }
}

fn is_up_to<R: Rule>(hash: u32, place: &Option<Entry<R>>) -> bool {
    place.as_ref().is_some_and(|entry| entry.hash <= hash)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::prelude::*;
    use weir_core::tier::{BucketLevel, Limit, Tier, TierRule, TokenBucket};

    use super::*;

    const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);

    fn policy() -> Arc<Policy<TokenBucket>> {
        let rule = TokenBucket::new(1_000, 1, Duration::from_secs(1)).unwrap();
        Arc::new(Policy { scope: 7, rule })
    }

    /// Every entry is where a search finds it, in order, and there are as many as the shard believes.
    fn check(shard: &Shard<TokenBucket>) {
        let mut last = 0;
        for (at, entry) in shard.row.iter().enumerate().filter_map(|(at, place)| Some((at, place.as_ref()?)))
        {
            let home = shard.home(entry.hash);
            assert!(home <= at && last <= entry.hash);
            assert!(shard.row[home..at].iter().all(Option::is_some), "a gap before {at}");
            last = entry.hash;
        }
        assert_eq!(shard.row.iter().flatten().count(), shard.len());
        let places = shard.places as usize;
        assert!(places <= SMALL as usize || shard.len() * 100 >= places * EMPTIEST_PERCENT);
        assert!(shard.len() * 100 <= places * FULLEST_PERCENT);
        assert!(shard.row.capacity() <= shard.row.len().max(places) + CROWD);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        // Few hashes, so that they collide and crowd; the highest ones run past the end.
        #[test]
        fn entries_stay_in_order_and_are_found(
            steps in prop::collection::vec((any::<bool>(), 0_u32..200, prop::bool::weighted(0.3)), 1..600),
        ) {
            let (policy, mut shard, mut model) = (policy(), Shard::new(false), BTreeMap::new());
            for (adds, number, is_high) in steps {
                let hash = if is_high { u32::MAX - number % 5 } else { number * 21_000_000 };
                let id = number.to_string();
                let found = shard.find(hash, &policy, &id).map(|(at, entry)| (at, entry.spent));
                prop_assert_eq!(found.map(|(_, spent)| spent), model.get(&(hash, number)).copied());
                match found {
                    None if adds => {
                        let spent = BucketLevel::from_parts(i64::from(number), hash);
                        shard.insert(Entry::new(&policy, &id, hash, spent, true));
                        model.insert((hash, number), spent);
                    }
                    Some((at, _)) if !adds => {
                        shard.remove(at);
                        model.remove(&(hash, number));
                    }
                    _ => {}
                }
                check(&shard);
                prop_assert_eq!(shard.len(), model.len());
            }
        }
    }

    #[test]
    fn a_sweep_gets_round_while_the_row_grows() {
        let (policy, mut shard) = (policy(), Shard::new(false));
        let insert = |shard: &mut Shard<TokenBucket>, number: u32, spent| {
            let hash = number.wrapping_mul(0x9E37_79B9);
            shard.insert(Entry::new(&policy, &number.to_string(), hash, spent, true));
        };
        for number in 0..1_000 {
            insert(&mut shard, number, policy.rule.unspent());
        }
        let mut spent = policy.rule.unspent();
        policy.rule.charge(&mut spent, 1, NOW);
        for number in 1_000..2_000 {
            shard.sweep(3, NOW);
            insert(&mut shard, number, spent);
        }
        check(&shard);
        assert_eq!(shard.len(), 1_000, "idle ones are all gone");
    }

    #[test]
    fn an_entry_is_a_cache_line_and_so_is_a_shard_with_its_lock() {
        assert_eq!(size_of::<Option<Entry<TierRule>>>(), 64);
        assert_eq!(size_of::<Option<Entry<Limit>>>(), 64);
        assert_eq!(size_of::<parking_lot::Mutex<Shard<TierRule>>>(), 56);
        assert_eq!(size_of_val(&Tier::Free.defaults().rule().unspent()), 24);
    }
}
