//! Tokens that were found genuine: whoever calls often brings the same one, and looking at a signature takes longer than most
//! answers do.
//!
//! A token is known by all of its bytes, signature included, so no other one passes for it. What it says does not change, and
//! the keys it was signed with are read once; only its end has to be looked for each time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::fast::RandomState;

use super::{Claims, LEEWAY_SECONDS};

/// How many locks there are. The last characters of a token are its signature's: chance itself.
const SHARDS: usize = 16;
/// Tokens behind one lock.
const TOKENS_MAX: usize = 1_024;
/// Longer tokens are looked at each time.
const BYTES_MAX: usize = 4_096;

/// Only tokens that we or an issuer signed are keys, so nobody can choose them to collide.
type Shard = HashMap<Box<str>, Arc<Claims>, RandomState>;

/// Tokens that were found genuine.
#[derive(Default)]
pub(super) struct Remembered {
    shards: [Mutex<Shard>; SHARDS],
}

impl Remembered {
    /// What a token says, if it was found genuine before and its time is not over.
    pub(super) fn find(&self, token: &str, now_seconds: u64) -> Option<Arc<Claims>> {
        let mut shard = self.shard(token);
        let claims = shard.get(token)?;
        if is_over(claims, now_seconds) {
            shard.remove(token);
            return None;
        }
        Some(Arc::clone(claims))
    }

    /// Remembers a token that was found genuine.
    pub(super) fn keep(&self, token: &str, claims: &Arc<Claims>, now_seconds: u64) {
        if token.len() > BYTES_MAX {
            return;
        }
        let mut shard = self.shard(token);
        if shard.len() >= TOKENS_MAX {
            shard.retain(|_, claims| !is_over(claims, now_seconds));
        }
        if shard.len() >= TOKENS_MAX {
            // Those that are used will be back at their next call.
            shard.clear();
        }
        shard.insert(token.into(), Arc::clone(claims));
    }

    fn shard(&self, token: &str) -> MutexGuard<'_, Shard> {
        let last = token.bytes().rev().take(2).fold(0, |sum, byte| sum * 31 + usize::from(byte));
        self.shards[last % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As it is judged when the signature is looked at.
const fn is_over(claims: &Claims, now_seconds: u64) -> bool {
    claims.exp.saturating_add(LEEWAY_SECONDS) < now_seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(exp: u64) -> Arc<Claims> {
        Arc::new(Claims { sub: "a@b.c".into(), exp, tenant_id: None, scope: Some("x".into()) })
    }

    #[test]
    fn a_token_is_known_until_its_time_is_over() {
        let remembered = Remembered::default();
        remembered.keep("a.b.c", &claims(100), 50);
        assert_eq!(remembered.find("a.b.c", 100 + LEEWAY_SECONDS), Some(claims(100)));
        assert_eq!(remembered.find("a.b.d", 50), None, "another signature is another token");
        assert_eq!(remembered.find("a.b.c", 101 + LEEWAY_SECONDS), None);
        assert_eq!(remembered.find("a.b.c", 50), None, "it was forgotten");
    }

    #[test]
    fn no_more_are_remembered_than_there_is_room_for() {
        let remembered = Remembered::default();
        let held = || remembered.shards.iter().map(|shard| shard.lock().unwrap().len()).sum::<usize>();
        for n in 0..50_000 {
            remembered.keep(&format!("{n}"), &claims(100), 50);
            assert!(remembered.find(&format!("{n}"), 50).is_some());
        }
        assert!(held() <= SHARDS * TOKENS_MAX);
        remembered.keep(&"x".repeat(BYTES_MAX + 1), &claims(100), 50);
        assert!(remembered.find(&"x".repeat(BYTES_MAX + 1), 50).is_none());
    }
}
