//! The keys that were last near or over a limit on this server, for operators who ask who is near a limit, and why somebody was
//! denied. In memory, bounded, and of this process alone: nothing decides by it.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use parking_lot::Mutex;
use weir_core::Timestamp;

/// Keys that are remembered. A key takes the place of the one before it with the same hash.
const KEYS_MAX: usize = 8_192;
/// How much of a limit must be used before its key is remembered: half of it.
const USED_AT_LEAST: u32 = 2;

/// How a key stood after a decision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LimitDecision<'a> {
    pub(crate) capability: &'static str,
    /// The limit: a policy's name, or `quota`, `minute`, `daily`.
    pub(crate) limit_name: &'a str,
    pub(crate) key: &'a str,
    pub(crate) limit: u32,
    pub(crate) remaining: u32,
    /// Whether the decision was a denial by this limit.
    pub(crate) is_denied: bool,
    pub(crate) at: Timestamp,
    /// When what was asked for would fit; for an allowed call, when the window ends, as far as that is known.
    pub(crate) until: Option<Timestamp>,
}

/// A key that was near or over a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NearLimit {
    pub(crate) capability: &'static str,
    pub(crate) limit_name: Box<str>,
    pub(crate) key: Box<str>,
    pub(crate) limit: u32,
    pub(crate) remaining: u32,
    /// When it was last decided about, by the clock that decided.
    pub(crate) at: Timestamp,
    pub(crate) until: Option<Timestamp>,
    /// Denials since the key is remembered.
    pub(crate) denials: u64,
    pub(crate) last_denial: Option<LastDenial>,
}

/// How the limit stood when it last denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastDenial {
    pub(crate) at: Timestamp,
    pub(crate) limit: u32,
    pub(crate) remaining: u32,
    pub(crate) until: Option<Timestamp>,
}

impl NearLimit {
    /// The used part of the limit, in thousandths.
    pub(crate) fn used_permille(&self) -> u32 {
        let used = u64::from(self.limit.saturating_sub(self.remaining)) * 1_000;
        u32::try_from(used / u64::from(self.limit.max(1))).unwrap_or(1_000)
    }

    fn is(&self, decision: &LimitDecision<'_>) -> bool {
        self.capability == decision.capability
            && *self.limit_name == *decision.limit_name
            && *self.key == *decision.key
    }

    fn update(&mut self, decision: &LimitDecision<'_>) {
        (self.limit, self.remaining) = (decision.limit, decision.remaining);
        (self.at, self.until) = (decision.at, decision.until);
        if decision.is_denied {
            self.denials += 1;
            self.last_denial = Some(LastDenial {
                at: decision.at,
                limit: decision.limit,
                remaining: decision.remaining,
                until: decision.until,
            });
        }
    }
}

/// The places of keys, each with its own lock, so that decisions about different keys do not wait for each other.
pub(crate) struct NearLimits {
    places: Box<[Mutex<Option<Box<NearLimit>>>]>,
    hasher: RandomState,
}

impl std::fmt::Debug for NearLimits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NearLimits").finish_non_exhaustive()
    }
}

impl Default for NearLimits {
    fn default() -> Self {
        Self { places: (0..KEYS_MAX).map(|_| Mutex::new(None)).collect(), hasher: RandomState::default() }
    }
}

impl NearLimits {
    /// Remembers a decision if the key is near its limit, or is denied.
    pub(crate) fn record(&self, decision: &LimitDecision<'_>) {
        let used = decision.limit.saturating_sub(decision.remaining);
        let is_near = decision.is_denied || used >= decision.limit.div_ceil(USED_AT_LEAST);
        if !is_near {
            return;
        }
        let hash = self.hasher.hash_one((decision.capability, decision.limit_name, decision.key));
        let at = usize::try_from(hash % KEYS_MAX as u64).unwrap_or(0);
        let Some(place) = self.places.get(at) else { return };
        let mut place = place.lock();
        if let Some(near) = place.as_mut().filter(|near| near.is(decision)) {
            near.update(decision);
            return;
        }
        let mut near = Box::new(NearLimit {
            capability: decision.capability,
            limit_name: decision.limit_name.into(),
            key: decision.key.into(),
            limit: decision.limit,
            remaining: decision.remaining,
            at: decision.at,
            until: decision.until,
            denials: 0,
            last_denial: None,
        });
        near.update(decision);
        *place = Some(near);
    }

    /// The keys whose windows are not over yet and that match, those that have used most of their limits first.
    pub(crate) fn list(
        &self,
        now: Timestamp,
        limit: usize,
        matches: impl Fn(&NearLimit) -> bool,
    ) -> Vec<NearLimit> {
        let is_over = |near: &NearLimit| near.until.is_some_and(|until| until <= now);
        let mut found = self.find(|near| !is_over(near) && matches(near));
        found.sort_by(|one, other| {
            let rank = |near: &NearLimit| (near.used_permille(), near.denials, near.at);
            rank(other).cmp(&rank(one))
        });
        found.truncate(limit);
        found
    }

    /// What is remembered of one key, the last decision first.
    pub(crate) fn of_key(&self, key: &str) -> Vec<NearLimit> {
        let mut found = self.find(|near| *near.key == *key);
        found.sort_by_key(|near| std::cmp::Reverse(near.at));
        found
    }

    fn find(&self, matches: impl Fn(&NearLimit) -> bool) -> Vec<NearLimit> {
        let found = self.places.iter().filter_map(|place| {
            let place = place.lock();
            place.as_ref().filter(|near| matches(near)).map(|near| NearLimit::clone(near))
        });
        found.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_seconds(1_000);

    fn decision(key: &str, remaining: u32) -> LimitDecision<'_> {
        LimitDecision {
            capability: "quota",
            limit_name: "quota",
            key,
            limit: 10,
            remaining,
            is_denied: false,
            at: NOW,
            until: Some(Timestamp::from_seconds(1_060)),
        }
    }

    fn keys(found: &[NearLimit]) -> Vec<&str> {
        found.iter().map(|near| &*near.key).collect()
    }

    #[test]
    fn keys_that_have_used_half_are_listed_the_nearest_first() {
        let near = NearLimits::default();
        for (key, remaining) in [("far", 6), ("half", 5), ("full", 0), ("close", 1)] {
            near.record(&decision(key, remaining));
        }
        assert_eq!(keys(&near.list(NOW, 10, |_| true)), ["full", "close", "half"]);
        assert_eq!(keys(&near.list(NOW, 1, |_| true)), ["full"]);
        assert_eq!(keys(&near.list(NOW, 10, |near| near.remaining > 0)), ["close", "half"]);
        assert!(near.list(Timestamp::from_seconds(1_060), 10, |_| true).is_empty(), "the windows are over");
        assert_eq!(keys(&near.of_key("full")), ["full"], "what was denied can still be explained");
    }

    #[test]
    fn the_last_denial_stays_while_later_calls_are_allowed() {
        let near = NearLimits::default();
        let denied = LimitDecision { is_denied: true, remaining: 0, ..decision("alice", 0) };
        near.record(&denied);
        near.record(&denied);
        near.record(&LimitDecision { at: Timestamp::from_seconds(1_010), ..decision("alice", 4) });
        let found = near.of_key("alice").remove(0);
        assert_eq!((found.denials, found.remaining), (2, 4));
        assert_eq!(found.last_denial.map(|denial| (denial.at, denial.remaining)), Some((NOW, 0)));
    }

    #[test]
    fn no_more_keys_are_remembered_than_the_bound() {
        let near = NearLimits::default();
        for n in 0..KEYS_MAX * 4 {
            near.record(&decision(&n.to_string(), 0));
        }
        let found = near.list(NOW, usize::MAX, |_| true);
        assert!((KEYS_MAX / 2..=KEYS_MAX).contains(&found.len()), "{}", found.len());
        assert!(near.list(NOW, usize::MAX, |near| *near.key == *(KEYS_MAX * 4 - 1).to_string()).len() == 1);
    }
}
