//! Request: submissions that are accepted once per key and executed by a downstream of limited capacity.
//!
//! A submission is accepted once per tenant and key ([`idempotency`], on the [`canonical`] form of its payload), then
//! worked on until it is done. [`state`] defines the states of a request and whose report counts, [`retry`] what a
//! response of the downstream means and when to call again, [`breaker`] when not to call at all. [`turn`] decides whose
//! jobs are claimed next, and [`canary`] selects the tenants of a gradual rollout.
//!
//! Storing requests, calling the downstream and running workers is left to other crates.

pub mod breaker;
pub mod canary;
pub mod canonical;
pub mod idempotency;
mod json;
pub mod retry;
pub mod state;
pub mod turn;

pub use json::{DEPTH_MAX, JsonError};

/// The scope that a token needs for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Create,
    Read,
}

impl Scope {
    /// Returns the name in the `scope` claim of a token.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "requests:create",
            Self::Read => "requests:read",
        }
    }

    /// Whether a token's `scope`, names separated by spaces, contains this one.
    #[must_use]
    pub fn is_in(self, granted: &str) -> bool {
        granted.split(' ').any(|name| name == self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_matches_whole_names_only() {
        assert!(Scope::Create.is_in("openid requests:create"));
        assert!(Scope::Read.is_in("requests:read"));
        for other in
            ["", "requests", "requests:create:all", "xrequests:create", "REQUESTS:CREATE", "requests:read"]
        {
            assert!(!Scope::Create.is_in(other), "{other}");
        }
    }
}
