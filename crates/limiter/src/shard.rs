//! A shard: an open-addressing hash table whose entries are sorted by hash.
//!
//! The hash of an entry determines its home cell. The entry is in that cell, or a few cells further on where the row
//! is crowded, and never behind an empty cell. So a search reads one stretch of memory and follows no pointers: with
//! millions of keys, a decision costs little more than waiting for memory. A search in a row that is about 80 % full
//! reads two to four cells on average and little memory is wasted. The row is copied, in order, to stay that full.

use std::mem;
use std::sync::Arc;

use weir_core::Timestamp;
use weir_core::tier::{Rule, ScopedRule};

use crate::id::Id;

/// What one key has spent under which rule. It fits a cache line, both for the two buckets of a tier and for a limit
/// of any kind.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Entry<R: Rule> {
    pub(crate) id: Id,
    pub(crate) policy: Arc<ScopedRule<R>>,
    pub(crate) spent: R::Usage,
    pub(crate) hash: u32,
    /// Whether its hash is in `Shard::changed`.
    pub(crate) changed: bool,
}

impl<R: Rule> Entry<R> {
    pub(crate) fn new(
        policy: &Arc<ScopedRule<R>>,
        id: &str,
        hash: u32,
        spent: R::Usage,
        changed: bool,
    ) -> Self {
        Self { id: Id::from(id), policy: Arc::clone(policy), spent, hash, changed }
    }

    fn has_key(&self, policy: &ScopedRule<R>, id: &str) -> bool {
        self.policy.scope == policy.scope && self.id.as_bytes() == id.as_bytes()
    }

    /// Whether the entry can be dropped without loss.
    fn is_idle(&self, now: Timestamp) -> bool {
        !self.changed && self.policy.rule.is_unspent(&self.spent, now)
    }

    /// Returns the usage, converted to the rule of `policy`.
    pub(crate) fn spent_under(&self, policy: &Arc<ScopedRule<R>>, now: Timestamp) -> R::Usage {
        if Arc::ptr_eq(&self.policy, policy) || self.policy.rule == policy.rule {
            self.spent
        } else {
            policy.rule.carry_over(&self.policy.rule, self.spent, now)
        }
    }
}

#[derive(Debug)]
pub(crate) struct Shard<R: Rule> {
    /// The cells, and a few more for entries that overflow the end.
    row: Vec<Option<Entry<R>>>,
    /// The number of home cells.
    cells: u32,
    /// The number of entries.
    entries: u32,
    /// The cell to sweep next.
    sweep_next: u32,
    /// Which entries have changed, if changes are tracked. Boxed, so that a shard and its lock fit a cache line.
    changed: Option<Box<ChangedHashes>>,
}

#[derive(Debug, Default)]
struct ChangedHashes {
    hashes: Vec<u32>,
}

impl ChangedHashes {
    fn push(&mut self, hash: u32) {
        if self.hashes.len() == self.hashes.capacity() {
            self.hashes.reserve_exact((self.hashes.len() / 8).max(16));
        }
        self.hashes.push(hash);
    }

    /// Returns the next hash. Frees the memory with the last one.
    fn pop(&mut self) -> Option<u32> {
        let hash = self.hashes.pop();
        if self.hashes.is_empty() {
            self.hashes = Vec::new();
        }
        hash
    }
}

/// Percentages of used cells: a row that would become fuller than the first is copied to a longer one that is as full
/// as the second.
const FULLEST_PERCENT: usize = 83;
const GROWN_PERCENT: usize = 73;
/// A row that becomes emptier than the first is copied to a shorter one that is as full as the second.
const EMPTIEST_PERCENT: usize = 72;
const SHRUNK_PERCENT: usize = 79;
/// A row with at most this many cells is not shortened.
const SMALL: u32 = 16;
/// The number of cells reserved past the end for overflow; there may be more.
const OVERFLOW: usize = 6;

impl<R: Rule> Shard<R> {
    pub(crate) fn new(tracks_changes: bool) -> Self {
        let changed = tracks_changes.then(Box::default);
        Self { row: Vec::new(), cells: 0, entries: 0, sweep_next: 0, changed }
    }

    pub(crate) const fn len(&self) -> usize {
        self.entries as usize
    }

    /// Returns the entry of a key and its cell.
    pub(crate) fn find(&self, hash: u32, policy: &ScopedRule<R>, id: &str) -> Option<(usize, &Entry<R>)> {
        let mut at = self.home(hash);
        while let Some(Some(entry)) = self.row.get(at) {
            if entry.hash == hash && entry.has_key(policy, id) {
                return Some((at, entry));
            }
            if entry.hash > hash {
                break;
            }
            at += 1;
        }
        None
    }

    /// Stores the usage of the entry in a cell.
    pub(crate) fn save(&mut self, at: usize, policy: &Arc<ScopedRule<R>>, spent: R::Usage) {
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

    /// Adds an entry for a key that has none. Other entries may move.
    pub(crate) fn insert(&mut self, mut entry: Entry<R>) {
        match &mut self.changed {
            Some(changed) if entry.changed => changed.push(entry.hash),
            _ => entry.changed = false,
        }
        self.entries += 1;
        if self.len() * 100 > self.cells as usize * FULLEST_PERCENT {
            self.copy(GROWN_PERCENT);
        }
        let at = self.home(entry.hash);
        let at = at + self.row[at..].iter().take_while(|cell| is_up_to(entry.hash, cell)).count();
        let run = self.row[at..].iter().take_while(|cell| cell.is_some()).count();
        if at + run == self.row.len() {
            self.push(None);
        }
        self.row[at..=at + run].rotate_right(1);
        self.row[at] = Some(entry);
    }

    /// Removes the entry in a cell. Other entries may move.
    pub(crate) fn remove(&mut self, at: usize) {
        self.row[at] = None;
        let displaced = self.row[at + 1..]
            .iter()
            .zip(at + 1..)
            .take_while(|(cell, at)| cell.as_ref().is_some_and(|entry| self.home(entry.hash) < *at));
        let displaced = displaced.count();
        self.row[at..=at + displaced].rotate_left(1);
        self.entries -= 1;
        if self.len() * 100 < self.cells as usize * EMPTIEST_PERCENT && self.cells > SMALL {
            self.copy(SHRUNK_PERCENT);
        }
    }

    /// Resets the entry in a cell: removes it, or first marks it as changed if changes are tracked.
    pub(crate) fn forget(&mut self, at: usize) {
        if self.changed.is_none() {
            self.remove(at);
        } else if let Some(Some(entry)) = self.row.get(at) {
            let policy = Arc::clone(&entry.policy);
            self.save(at, &policy, policy.rule.unspent());
        }
    }

    /// Sweeps up to `budget` cells, starting where the last sweep ended, and drops idle entries. Returns their number.
    pub(crate) fn sweep(&mut self, budget: usize, now: Timestamp) -> usize {
        let before = self.len();
        // Removing an entry does not advance to the next cell.
        let full_round = self.row.len() + before + 1;
        for _ in 0..budget.min(full_round) {
            let at = self.sweep_next as usize;
            match self.row.get(at) {
                Some(Some(entry)) if entry.is_idle(now) => self.remove(at),
                Some(_) => self.sweep_next += 1,
                None => self.sweep_next = 0,
            }
        }
        before - self.len()
    }

    /// Returns the number of hashes of changed entries.
    pub(crate) fn changed_len(&self) -> usize {
        self.changed.as_ref().map_or(0, |changed| changed.hashes.len())
    }

    /// Takes the next hash of changed entries and passes each changed entry with that hash to `each`.
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

    /// Returns the home cell of a hash.
    fn home(&self, hash: u32) -> usize {
        ((u64::from(hash) * u64::from(self.cells)) >> 32) as usize
    }

    /// Copies the row, in order, to one with this percentage of used cells.
    fn copy(&mut self, used_percent: usize) {
        let cells = (self.len() * 100 / used_percent).max(SMALL as usize / 2);
        let swept = u64::from(self.sweep_next) * cells as u64 / u64::from(self.cells.max(1));
        self.sweep_next = u32::try_from(swept).unwrap_or(0);
        self.cells = u32::try_from(cells).unwrap_or(u32::MAX);
        let old = mem::replace(&mut self.row, Vec::with_capacity(cells + OVERFLOW));
        for entry in old.into_iter().flatten() {
            while self.row.len() < self.home(entry.hash) {
                self.row.push(None);
            }
            self.push(Some(entry));
        }
        while self.row.len() < cells {
            self.row.push(None);
        }
    }

    /// Appends a cell, and reserves at most a few: a row whose capacity doubled would be half empty.
    fn push(&mut self, cell: Option<Entry<R>>) {
        if self.row.len() == self.row.capacity() {
            self.row.reserve_exact(OVERFLOW);
        }
        self.row.push(cell);
    }
}

fn is_up_to<R: Rule>(hash: u32, cell: &Option<Entry<R>>) -> bool {
    cell.as_ref().is_some_and(|entry| entry.hash <= hash)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::prelude::*;
    use weir_core::tier::{BucketLevel, Limit, Tier, TierRule, TokenBucket};

    use super::*;

    const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);

    fn policy() -> Arc<ScopedRule<TokenBucket>> {
        let rule = TokenBucket::new(1_000, 1, Duration::from_secs(1)).unwrap();
        Arc::new(ScopedRule { scope: 7, rule })
    }

    /// Checks that every entry is where a search finds it, in order, and that the counters are right.
    fn check(shard: &Shard<TokenBucket>) {
        let mut last = 0;
        for (at, entry) in shard.row.iter().enumerate().filter_map(|(at, cell)| Some((at, cell.as_ref()?))) {
            let home = shard.home(entry.hash);
            assert!(home <= at && last <= entry.hash);
            assert!(shard.row[home..at].iter().all(Option::is_some), "a gap before {at}");
            last = entry.hash;
        }
        assert_eq!(shard.row.iter().flatten().count(), shard.len());
        let cells = shard.cells as usize;
        assert!(cells <= SMALL as usize || shard.len() * 100 >= cells * EMPTIEST_PERCENT);
        assert!(shard.len() * 100 <= cells * FULLEST_PERCENT);
        assert!(shard.row.capacity() <= shard.row.len().max(cells) + OVERFLOW);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        // Few hashes, so that they collide and crowd; the highest ones overflow the end.
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
    fn a_sweep_covers_the_row_while_it_grows() {
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
        assert_eq!(shard.len(), 1_000, "all idle entries are dropped");
    }

    #[test]
    fn an_entry_is_a_cache_line_and_so_is_a_shard_with_its_lock() {
        assert_eq!(size_of::<Option<Entry<TierRule>>>(), 64);
        assert_eq!(size_of::<Option<Entry<Limit>>>(), 64);
        assert_eq!(size_of::<parking_lot::Mutex<Shard<TierRule>>>(), 56);
        assert_eq!(size_of_val(&Tier::Free.defaults().rule().unspent()), 24);
    }
}
