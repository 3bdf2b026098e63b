//! A cache of bounded size, spread over several locks.
//!
//! A value that was read before an invalidation is not stored after it: callers take the cache's [`Version`] before they
//! read from the source, and an insertion under an older version does nothing.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// Values by key. A full shard drops its outdated values or, if there are none, all of them.
#[derive(Debug)]
pub struct BoundedCache<K, V, S = RandomState> {
    shards: Box<[Mutex<HashMap<K, V, S>>]>,
    shard_max: usize,
    hasher: S,
    len: AtomicUsize,
    version: AtomicU64,
}

/// The number of invalidations of a cache so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version(u64);

impl<K: Hash + Eq, V: Clone, S: BuildHasher + Default> BoundedCache<K, V, S> {
    /// Creates a cache of at least one shard, each with room for `shard_max` values.
    #[must_use]
    pub fn new(shards: usize, shard_max: usize) -> Self {
        let shards = (0..shards.max(1)).map(|_| Mutex::default()).collect();
        let (len, version) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { shards, shard_max, hasher: S::default(), len, version }
    }

    /// Takes no lock.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Takes no lock.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The version to pass to [`BoundedCache::insert`]; call this before reading from the source.
    pub fn version(&self) -> Version {
        Version(self.version.load(Ordering::Acquire))
    }

    /// Returns the key's value. Drops it instead if it is not current.
    pub fn get<Q>(&self, key: &Q, is_current: impl FnOnce(&V) -> bool) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let mut shard = self.shard(key);
        let value = shard.get(key)?;
        if is_current(value) {
            return Some(value.clone());
        }
        shard.remove(key);
        self.len.fetch_sub(1, Ordering::Relaxed);
        None
    }

    /// Stores a value, unless something was invalidated since `version`. A full shard first drops values that are not current.
    pub fn insert(&self, key: K, value: V, version: Version, is_current: impl Fn(&V) -> bool) {
        let mut shard = self.shard(&key);
        // Checked under the lock: an invalidation that comes later waits for the lock and then drops this value.
        if self.version() == version {
            self.store(&mut shard, key, value, is_current);
        }
    }

    /// Stores a value that is newer than whatever is on its way into the cache.
    pub fn replace(&self, key: K, value: V, is_current: impl Fn(&V) -> bool) {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.store(&mut self.shard(&key), key, value, is_current);
    }

    fn store(&self, shard: &mut HashMap<K, V, S>, key: K, value: V, is_current: impl Fn(&V) -> bool) {
        let before = shard.len();
        if before >= self.shard_max && !shard.contains_key(&key) {
            shard.retain(|_, value| is_current(value));
            if shard.len() >= self.shard_max {
                shard.clear();
            }
        }
        shard.insert(key, value);
        self.len.fetch_add(shard.len(), Ordering::Relaxed);
        self.len.fetch_sub(before, Ordering::Relaxed);
    }

    /// Drops the value of a key, and whatever is on its way into the cache.
    pub fn invalidate<Q>(&self, key: &Q)
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.version.fetch_add(1, Ordering::AcqRel);
        if self.shard(key).remove(key).is_some() {
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Changes the value of a key, if there is one.
    pub fn modify<Q>(&self, key: &Q, change: impl FnOnce(&mut V))
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if let Some(value) = self.shard(key).get_mut(key) {
            change(value);
        }
    }

    /// Marks the value of a key, and drops whatever is on its way into the cache.
    pub fn mark<Q>(&self, key: &Q, mark: impl FnOnce(&mut V))
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.version.fetch_add(1, Ordering::AcqRel);
        self.modify(key, mark);
    }

    /// Marks all values, and drops whatever is on its way into the cache.
    pub fn mark_all(&self, mark: impl Fn(&mut V)) {
        self.version.fetch_add(1, Ordering::AcqRel);
        for shard in &self.shards {
            shard.lock().values_mut().for_each(&mark);
        }
    }

    /// Drops all values, and whatever is on its way into the cache.
    pub fn invalidate_all(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
        for shard in &self.shards {
            let mut shard = shard.lock();
            self.len.fetch_sub(shard.len(), Ordering::Relaxed);
            shard.clear();
        }
    }

    fn shard<Q: Hash + ?Sized>(&self, key: &Q) -> MutexGuard<'_, HashMap<K, V, S>> {
        // The top bits: the map inside uses the low ones.
        let hash = usize::try_from(self.hasher.hash_one(key) >> 48).unwrap_or(0);
        self.shards[hash % self.shards.len()].lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> BoundedCache<u32, u32> {
        BoundedCache::new(4, 100)
    }

    fn put(cache: &BoundedCache<u32, u32>, key: u32, value: u32) {
        cache.insert(key, value, cache.version(), |_| true);
    }

    fn held(cache: &BoundedCache<u32, u32>) -> usize {
        cache.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    #[test]
    fn a_value_is_returned_while_it_is_current_and_dropped_then() {
        let cache = cache();
        put(&cache, 1, 10);
        put(&cache, 1, 11);
        assert_eq!((cache.get(&1, |_| true), cache.get(&2, |_| true)), (Some(11), None));
        assert_eq!(cache.get(&1, |value| *value > 11), None);
        assert!(cache.is_empty());
        assert_eq!(cache.get(&1, |_| true), None, "it was dropped");
    }

    #[test]
    fn a_read_before_an_invalidation_is_not_cached_after_it() {
        let cache = cache();
        let before = cache.version();
        put(&cache, 1, 10);
        cache.invalidate(&1);
        assert_eq!(cache.get(&1, |_| true), None);
        cache.insert(1, 11, before, |_| true);
        assert_eq!(cache.get(&1, |_| true), None);
        let before = cache.version();
        cache.invalidate_all();
        cache.insert(2, 20, before, |_| true);
        assert!(cache.is_empty());
        put(&cache, 2, 21);
        assert_eq!(cache.get(&2, |_| true), Some(21));
    }

    #[test]
    fn a_marked_value_stays_and_a_read_from_before_does_not_replace_it() {
        let cache = cache();
        for key in [1, 2] {
            put(&cache, key, 10);
        }
        let before = cache.version();
        cache.mark(&1, |value| *value += 1);
        cache.insert(1, 10, before, |_| true);
        assert_eq!([1, 2].map(|key| cache.get(&key, |_| true)), [Some(11), Some(10)]);
        let before = cache.version();
        cache.mark_all(|value| *value += 1);
        cache.insert(3, 10, before, |_| true);
        assert_eq!([1, 2, 3].map(|key| cache.get(&key, |_| true)), [Some(12), Some(11), None]);
        let before = cache.version();
        cache.replace(3, 30, |_| true);
        cache.insert(3, 10, before, |_| true);
        cache.modify(&4, |value| *value += 1);
        assert_eq!([3, 4].map(|key| cache.get(&key, |_| true)), [Some(30), None]);
        assert_eq!(cache.len(), held(&cache));
    }

    #[test]
    fn there_are_no_more_values_than_the_bound() {
        let cache = cache();
        for key in 0..4_000 {
            put(&cache, key, 0);
            assert_eq!(cache.get(&key, |_| true), Some(0), "the newest is always there");
            assert!(cache.shards.iter().all(|shard| shard.lock().len() <= 100));
        }
        assert_eq!(cache.len(), held(&cache));
        cache.invalidate_all();
        assert_eq!((cache.len(), held(&cache)), (0, 0));
    }

    #[test]
    fn a_full_shard_drops_outdated_values_first_and_none_for_a_key_it_has() {
        let cache: BoundedCache<u32, u32> = BoundedCache::new(1, 4);
        let insert = |key, value| cache.insert(key, value, cache.version(), |value| *value > 0);
        for (key, value) in [(1, 0), (2, 1), (3, 0), (4, 1), (4, 2)] {
            insert(key, value);
        }
        assert_eq!(cache.len(), 4);
        insert(5, 1);
        let is_there = |key: &u32| cache.get(key, |_| true).is_some();
        assert_eq!([1, 2, 3, 4, 5].map(|key| is_there(&key)), [false, true, false, true, true]);
        insert(6, 1);
        insert(7, 1);
        assert_eq!([2, 4, 5, 6, 7].map(|key| is_there(&key)), [false, false, false, false, true]);
        assert_eq!(cache.len(), held(&cache));
    }
}
