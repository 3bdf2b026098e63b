//! A cache of verified tokens: callers send the same token again and again, and verifying a signature takes longer than most
//! requests.
//!
//! The key is the whole token including its signature, so no other token can hit the entry. The claims of a token do not change,
//! and the cache belongs to a set of keys and is dropped with it, so only the expiry is checked each time.

use std::sync::Arc;

use weir_store::BoundedCache;

use super::{LEEWAY_SECONDS, VerifiedClaims};

const SHARDS: usize = 16;
/// Tokens per shard.
const SHARD_MAX: usize = 1_024;
/// Longer tokens are not cached.
const BYTES_MAX: usize = 4_096;

pub(super) struct VerifiedTokens {
    /// Keys are tokens with a valid signature, so callers cannot choose keys that collide. A fast hash is safe.
    cache: BoundedCache<Box<str>, Arc<VerifiedClaims>, foldhash::fast::RandomState>,
}

impl Default for VerifiedTokens {
    fn default() -> Self {
        Self { cache: BoundedCache::new(SHARDS, SHARD_MAX) }
    }
}

impl VerifiedTokens {
    /// Returns the claims of a token that was verified before and has not expired.
    pub(super) fn get(&self, token: &str, now_seconds: u64) -> Option<Arc<VerifiedClaims>> {
        self.cache.get(token, |claims| !is_expired(claims, now_seconds))
    }

    pub(super) fn insert(&self, token: &str, claims: &Arc<VerifiedClaims>, now_seconds: u64) {
        if token.len() <= BYTES_MAX {
            let (claims, version) = (Arc::clone(claims), self.cache.version());
            self.cache.insert(token.into(), claims, version, |claims| !is_expired(claims, now_seconds));
        }
    }
}

/// The same rule as in the verification of a token.
fn is_expired(claims: &VerifiedClaims, now_seconds: u64) -> bool {
    claims.exp.saturating_add(LEEWAY_SECONDS) < now_seconds
}

#[cfg(test)]
mod tests {
    use super::super::Claims;
    use super::*;

    fn claims(exp: u64) -> Arc<VerifiedClaims> {
        let claims = Claims { sub: "a@b.c".into(), exp, tenant_id: None, scope: Some("x".into()) };
        Arc::new(VerifiedClaims { claims, plan: None })
    }

    #[test]
    fn a_token_is_cached_until_it_expires() {
        let tokens = VerifiedTokens::default();
        tokens.insert("a.b.c", &claims(100), 50);
        assert_eq!(tokens.get("a.b.c", 100 + LEEWAY_SECONDS), Some(claims(100)));
        assert_eq!(tokens.get("a.b.d", 50), None, "another signature is another token");
        assert_eq!(tokens.get("a.b.c", 101 + LEEWAY_SECONDS), None);
        assert_eq!(tokens.get("a.b.c", 50), None, "an expired token is removed");
    }

    #[test]
    fn no_more_tokens_are_cached_than_the_bound() {
        let tokens = VerifiedTokens::default();
        for n in 0..50_000 {
            tokens.insert(&format!("{n}"), &claims(100), 50);
            assert!(tokens.get(&format!("{n}"), 50).is_some());
        }
        assert!(tokens.cache.len() <= SHARDS * SHARD_MAX);
        tokens.insert(&"x".repeat(BYTES_MAX + 1), &claims(100), 50);
        assert!(tokens.get(&"x".repeat(BYTES_MAX + 1), 50).is_none());
    }
}
