//! Request: downstream capacity, once per key.
//!
//! A submission is accepted once for each key of its tenant ([`idempotency`], on the [`canonical`] form of its payload),
//! then worked on until it is done: [`state`] says which states follow which and whose report counts, [`retry`] what an
//! answer of the downstream means and when to call again, [`breaker`] when not to call at all. [`canary`] picks the
//! tenants that a gradual rollout has reached.
//!
//! How the record is stored, how the downstream is called and who does the work is left to others.

pub mod breaker;
pub mod canary;
pub mod canonical;
pub mod idempotency;
mod json;
pub mod retry;
pub mod state;

pub use json::{DEPTH_MAX, JsonError};

/// What a token must allow for a caller to do something with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Submit requests.
    Create,
    /// Read the tenant's own requests.
    Read,
}

impl Scope {
    /// The scope as tokens spell it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "requests:create",
            Self::Read => "requests:read",
        }
    }

    /// Whether a token's `scope`, names separated by spaces, allows this.
    #[must_use]
    pub fn is_in(self, granted: &str) -> bool {
        granted.split(' ').any(|name| name == self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_a_whole_word_of_what_was_granted() {
        assert!(Scope::Create.is_in("openid requests:create"));
        assert!(Scope::Read.is_in("requests:read"));
        for other in
            ["", "requests", "requests:create:all", "xrequests:create", "REQUESTS:CREATE", "requests:read"]
        {
            assert!(!Scope::Create.is_in(other), "{other}");
        }
    }
}
