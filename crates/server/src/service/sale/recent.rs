//! What callers did a moment ago: the throttle of one user's attempts, and the bucket of one address.
//!
//! Entries that are old enough mean nothing. So there are two maps: the present one, and the one before, which is thrown away
//! whole when it has grown too old, or the present one too large. That bounds them without a walk over any of them: in a flood
//! of names the oldest are forgotten early.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Callers are spread over so many locks.
const SHARDS: usize = 16;
/// Callers in one map.
const CALLERS_MAX: usize = 16_384;

/// What is remembered of each caller for at least a span of time.
#[derive(Debug)]
struct Recent<K, V> {
    span: Duration,
    hasher: RandomState,
    shards: [Mutex<Shard<K, V>>; SHARDS],
}

#[derive(Debug)]
struct Shard<K, V> {
    since: Option<Instant>,
    present: HashMap<K, V>,
    before: HashMap<K, V>,
}

impl<K: Hash + Eq, V: Default> Recent<K, V> {
    fn new(span: Duration) -> Self {
        let shard = || Mutex::new(Shard { since: None, present: HashMap::new(), before: HashMap::new() });
        Self { span, hasher: RandomState::new(), shards: std::array::from_fn(|_| shard()) }
    }

    /// Looks at, and may change, what is remembered of a caller.
    fn with<T>(&self, key: K, now: Instant, look: impl FnOnce(&mut V) -> T) -> T {
        let place = usize::try_from(self.hasher.hash_one(&key) % SHARDS as u64).unwrap_or(0);
        let shard = &self.shards[place];
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        shard.age(now, self.span);
        if shard.present.len() >= CALLERS_MAX && !shard.present.contains_key(&key) {
            shard.before = std::mem::take(&mut shard.present);
            shard.since = Some(now);
        }
        let known = shard.before.remove(&key);
        let Shard { present, .. } = &mut *shard;
        look(present.entry(key).or_insert_with(|| known.unwrap_or_default()))
    }
}

impl<K, V> Shard<K, V> {
    fn age(&mut self, now: Instant, span: Duration) {
        let age = now.saturating_duration_since(*self.since.get_or_insert(now));
        if age >= span {
            self.before = if age >= span * 2 { HashMap::new() } else { std::mem::take(&mut self.present) };
            self.present = HashMap::new();
            self.since = Some(now);
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// A sliding window: so many attempts in any second. Refused attempts do not count.
#[derive(Debug)]
pub(crate) struct Throttle {
    per_second: usize,
    attempts: Recent<Box<str>, Vec<Instant>>,
}

/// How an attempt stands with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whether it may be made.
    pub is_allowed: bool,
    /// How many more may be made now.
    pub remaining: u32,
    /// After how long one more may be, when none may now; else when all are free again.
    pub after: Duration,
}

impl Throttle {
    /// A throttle at so many attempts a second.
    #[must_use]
    pub(crate) fn new(per_second: u32) -> Self {
        Self { per_second: usize::try_from(per_second).unwrap_or(usize::MAX), attempts: Recent::new(SECOND) }
    }

    /// Counts one attempt of a user, if it may be made.
    pub(crate) fn attempt(&self, user: &str, now: Instant) -> Standing {
        self.attempts.with(user.into(), now, |made| {
            made.retain(|at| now.saturating_duration_since(*at) < SECOND);
            let is_allowed = made.len() < self.per_second;
            if is_allowed {
                made.push(now);
            }
            let remaining = u32::try_from(self.per_second - made.len()).unwrap_or(u32::MAX);
            let frees = if is_allowed { made.last() } else { made.first() };
            let after = frees.map_or(SECOND, |at| SECOND - now.saturating_duration_since(*at));
            Standing { is_allowed, remaining, after }
        })
    }
}

/// Token buckets: so many requests a second of each caller, and a few more at once.
#[derive(Debug)]
pub(crate) struct Buckets<K> {
    /// What one request costs.
    cost: Duration,
    /// How far ahead of time a caller may be.
    ahead: Duration,
    /// When each caller's bucket is full again.
    full_at: Recent<K, Option<Instant>>,
}

impl<K: Hash + Eq> Buckets<K> {
    /// Buckets of `burst` and one more, filled at `per_second`, which is not 0.
    #[must_use]
    pub(crate) fn new(per_second: u32, burst: u32) -> Self {
        let cost = SECOND / per_second.max(1);
        let ahead = cost.saturating_mul(burst.saturating_add(1));
        Self { cost, ahead, full_at: Recent::new(ahead.max(SECOND)) }
    }

    /// Takes one token of a caller, or says after how long there is one.
    ///
    /// # Errors
    /// How long to wait.
    pub(crate) fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
        self.full_at.with(key, now, |full_at| {
            let then = full_at.unwrap_or(now).max(now) + self.cost;
            let ahead = then.saturating_duration_since(now);
            if ahead > self.ahead {
                return Err(ahead - self.ahead);
            }
            *full_at = Some(then);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn one_attempt_a_second_is_one_in_any_second() {
        let (throttle, start) = (Throttle::new(1), Instant::now());
        let at = |ms: u32| throttle.attempt("u", start + MS * ms);
        assert_eq!(at(0), Standing { is_allowed: true, remaining: 0, after: SECOND });
        assert_eq!(at(400), Standing { is_allowed: false, remaining: 0, after: MS * 600 });
        assert_eq!(at(999), Standing { is_allowed: false, remaining: 0, after: MS });
        assert!(at(1_000).is_allowed, "refused attempts do not count");
        assert!(!at(1_999).is_allowed, "not one in each second of the clock");
        assert!(at(2_000).is_allowed);
        assert!(throttle.attempt("v", start).is_allowed, "users are apart");
    }

    #[test]
    fn windows_slide() {
        let (throttle, start) = (Throttle::new(3), Instant::now());
        let at = |ms: u32| throttle.attempt("u", start + MS * ms);
        assert!([0, 500, 900].iter().all(|ms| at(*ms).is_allowed));
        assert_eq!(at(950), Standing { is_allowed: false, remaining: 0, after: MS * 50 });
        assert!(at(1_000).is_allowed);
        assert!(!at(1_499).is_allowed);
        assert!(at(1_500).is_allowed);
    }

    #[test]
    fn no_more_callers_are_remembered_than_the_bound() {
        let (recent, now) = (Recent::<usize, ()>::new(SECOND), Instant::now());
        for caller in 0..SHARDS * CALLERS_MAX * 3 {
            recent.with(caller, now, |()| {});
        }
        for shard in &recent.shards {
            let shard = shard.lock().unwrap();
            assert!(shard.present.len() <= CALLERS_MAX && shard.before.len() <= CALLERS_MAX);
        }
    }

    #[test]
    fn nothing_is_remembered_for_long() {
        let (throttle, start) = (Throttle::new(1), Instant::now());
        for n in 0..10_000_u32 {
            assert!(throttle.attempt(&n.to_string(), start + MS * (n * 2)).is_allowed);
        }
        let sizes = throttle.attempts.shards.iter().map(|shard| {
            let shard = shard.lock().unwrap();
            shard.present.len() + shard.before.len()
        });
        assert!(sizes.sum::<usize>() <= 2_000, "only those of two seconds");
    }

    #[test]
    fn a_bucket_holds_a_burst_and_fills_again() {
        let (buckets, start) = (Buckets::new(100, 50), Instant::now());
        assert!((0..51).all(|_| buckets.take(1, start).is_ok()));
        assert_eq!(buckets.take(1, start), Err(MS * 10));
        assert_eq!(buckets.take(2, start), Ok(()), "callers are apart");
        assert_eq!(buckets.take(1, start + MS * 9), Err(MS));
        assert_eq!(buckets.take(1, start + MS * 10), Ok(()));
        let later = start + SECOND * 10;
        assert_eq!((0..200).filter(|_| buckets.take(1, later).is_ok()).count(), 51);
    }
}
