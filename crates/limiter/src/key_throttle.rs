//! A token bucket per key in the memory of this process. Nothing is stored.

use std::sync::Arc;

use weir_core::Clock;
use weir_core::tier::{Rule, ScopedRule, TokenBucket};
use weir_store::throttle::{Throttle, ThrottleDecision};

use crate::memory::{Memory, MemoryFull, MemoryOptions};

/// Limits how often each key may do something.
///
/// Keys whose buckets are full again are dropped, so there is room for `keys_max` keys with recent calls. When it is
/// full, a new key is allowed without being counted: a flood of invented names must not keep everybody else out. Keys
/// that are already counted remain limited.
#[derive(Debug)]
pub struct KeyThrottle {
    memory: Memory<TokenBucket>,
    policy: Arc<ScopedRule<TokenBucket>>,
    clock: Arc<dyn Clock>,
}

impl KeyThrottle {
    #[must_use]
    pub fn new(bucket: TokenBucket, keys_max: usize, clock: Arc<dyn Clock>) -> Self {
        let memory = Memory::new(MemoryOptions { keys_max, ..MemoryOptions::default() });
        Self { memory, policy: Arc::new(ScopedRule { scope: 0, rule: bucket }), clock }
    }
}

impl Throttle for KeyThrottle {
    fn take(&self, key: &str) -> ThrottleDecision {
        let (bucket, now) = (&self.policy.rule, self.clock.now());
        let (is_allowed, level) = match self.memory.take(&self.policy, key, 1, now) {
            Ok(taken) => (taken.decision.is_allowed(), taken.spent),
            Err(MemoryFull) => (true, bucket.unspent()),
        };
        ThrottleDecision { is_allowed, limit_state: bucket.limit_state(&level, now) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use weir_core::{ManualClock, Timestamp};

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    /// Creates a throttle for `capacity` calls at once and `per_second` in the long run, on a clock that stands still.
    fn throttle(capacity: u32, per_second: u32, keys_max: usize) -> (KeyThrottle, ManualClock) {
        let clock = ManualClock::at(Timestamp::from_seconds(1_700_000_000));
        let bucket = TokenBucket::new(capacity, per_second, SECOND).unwrap();
        (KeyThrottle::new(bucket, keys_max, Arc::new(clock.clone())), clock)
    }

    fn allowed(throttle: &KeyThrottle, key: &str, calls: usize) -> usize {
        (0..calls).filter(|_| throttle.take(key).is_allowed).count()
    }

    /// Returns the wait of a denied call.
    fn wait(throttle: &KeyThrottle, key: &str) -> Duration {
        let throttled = throttle.take(key);
        assert!(!throttled.is_allowed && throttled.limit_state.remaining == 0, "{throttled:?}");
        throttled.limit_state.next_after
    }

    #[test]
    fn one_call_a_second_is_one_in_any_second() {
        let (throttle, clock) = throttle(1, 1, 1_000);
        let first = throttle.take("u");
        assert!(first.is_allowed);
        assert_eq!((first.limit_state.remaining, first.limit_state.reset_after), (0, SECOND));
        clock.advance(MS * 400);
        assert_eq!(wait(&throttle, "u"), MS * 600);
        assert!(throttle.take("v").is_allowed, "keys have buckets of their own");
        clock.advance(MS * 599);
        assert_eq!(wait(&throttle, "u"), MS);
        clock.advance(MS);
        assert!(throttle.take("u").is_allowed, "denied calls do not count");
        clock.advance(MS * 999);
        assert!(
            !throttle.take("u").is_allowed,
            "the second starts with the call, not with the clock's second"
        );
        clock.advance(MS);
        assert!(throttle.take("u").is_allowed);
    }

    #[test]
    fn no_second_burst_follows_at_the_edge_of_a_second() {
        let (throttle, clock) = throttle(3, 3, 1_000);
        clock.advance(MS * 999);
        assert_eq!(allowed(&throttle, "u", 10), 3);
        clock.advance(MS);
        assert_eq!(allowed(&throttle, "u", 10), 0);
        clock.advance(MS * 333);
        assert_eq!(allowed(&throttle, "u", 10), 1, "a third of a second is worth one");
        clock.advance(SECOND);
        assert_eq!(allowed(&throttle, "u", 10), 3);
    }

    #[test]
    fn a_bucket_holds_a_burst_and_fills_again() {
        let (throttle, clock) = throttle(51, 100, 1_000);
        assert_eq!(allowed(&throttle, "a", 51), 51);
        assert_eq!(wait(&throttle, "a"), MS * 10);
        assert!(throttle.take("b").is_allowed);
        clock.advance(MS * 9);
        assert_eq!(wait(&throttle, "a"), MS);
        clock.advance(MS);
        assert_eq!(allowed(&throttle, "a", 5), 1);
        clock.advance(SECOND * 10);
        assert_eq!(allowed(&throttle, "a", 200), 51);
    }

    proptest! {
        // docs/sale.md promises this for `sale.user_per_second`.
        #[test]
        fn any_second_has_at_most_twice_the_limit_less_one(
            limit in 1_u32..6,
            pauses in prop::collection::vec(0_u32..400, 1..200),
        ) {
            let (throttle, clock) = throttle(limit, limit, 1_000);
            let mut calls = Vec::new();
            for pause in pauses {
                clock.advance(MS * pause);
                if throttle.take("u").is_allowed {
                    calls.push(clock.now());
                }
            }
            let most = calls.iter().map(|first| {
                calls.iter().filter(|call| **call >= *first && call.since(*first) < SECOND).count()
            });
            prop_assert!(most.max().unwrap_or(0) < 2 * limit as usize);
        }
    }

    #[test]
    fn a_full_throttle_limits_known_keys_and_allows_new_ones() {
        const KEYS_MAX: usize = 1_000;
        let (throttle, clock) = throttle(1, 1, KEYS_MAX);
        let name = |n: usize| format!("user-{n}");
        assert!((0..KEYS_MAX * 3).all(|n| throttle.take(&name(n)).is_allowed));
        assert_eq!(throttle.memory.len(), KEYS_MAX);
        assert!((0..KEYS_MAX).all(|n| !throttle.take(&name(n)).is_allowed), "nobody was forgotten");
        assert_eq!(allowed(&throttle, "new", 5), 5);
        clock.advance(SECOND);
        assert_eq!(allowed(&throttle, "new", 5), 1, "those who called a second ago make room");
    }

    #[test]
    fn idle_keys_are_dropped() {
        let (throttle, clock) = throttle(1, 1, 100_000);
        for n in 0..10_000 {
            clock.advance(MS * 2);
            assert!(throttle.take(&n.to_string()).is_allowed);
        }
        assert!(throttle.memory.len() <= 2_000, "500 have called within a second; {}", throttle.memory.len());
    }
}
