//! Selects the tenants of a gradual rollout.
//!
//! A tenant's percentile depends only on its name: the first eight bytes of the SHA-256 of `weir request canary v1`, a
//! NUL and the name, as a big-endian number, modulo 100. A rollout to `p` percent includes the percentiles below `p`.
//! So all servers and versions agree, and a tenant that is included stays included while the percentage grows.

use sha2::{Digest, Sha256};

use crate::TenantId;

/// The percentage of tenants that a rollout includes: 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u8);

/// A number above 100. The message completes the sentence "the percentage …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be an integer from 0 to 100")]
pub struct PercentError;

impl Percent {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self(100);

    pub const fn new(percent: u8) -> Result<Self, PercentError> {
        if percent <= Self::ALL.0 { Ok(Self(percent)) } else { Err(PercentError) }
    }

    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns whether a rollout to this percentage includes the tenant.
    #[must_use]
    pub fn includes(self, tenant: &TenantId) -> bool {
        percentile(tenant) < u64::from(self.0)
    }
}

fn percentile(tenant: &TenantId) -> u64 {
    let hash =
        Sha256::new().chain_update(b"weir request canary v1\0").chain_update(tenant.as_str()).finalize();
    let number = hash.iter().take(8).fold(0_u64, |number, byte| (number << 8) | u64::from(*byte));
    number.checked_rem(100).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantId {
        TenantId::parse(name).unwrap()
    }

    /// The expected values were computed elsewhere. A change would move tenants in and out of a rollout in progress.
    #[test]
    fn percentiles_never_change() {
        assert_eq!(["acme", "globex", "t-0", "ü"].map(|name| percentile(&tenant(name))), [78, 66, 23, 86]);
        let at = |percent| Percent::new(percent).unwrap();
        assert!(!at(78).includes(&tenant("acme")));
        assert!(at(79).includes(&tenant("acme")));
    }

    #[test]
    fn a_percentage_includes_that_share_of_tenants_and_a_larger_one_includes_them_too() {
        let tenants: Vec<_> = (0..2_000).map(|n| tenant(&format!("tenant-{n}"))).collect();
        let reached = |percent| {
            let percent = Percent::new(percent).unwrap();
            tenants.iter().map(|tenant| percent.includes(tenant)).collect::<Vec<_>>()
        };
        let count = |reached: &[bool]| reached.iter().filter(|reached| **reached).count();
        assert_eq!(count(&reached(0)), 0);
        assert!((60..140).contains(&count(&reached(5))));
        assert!((900..1_100).contains(&count(&reached(50))));
        assert_eq!(count(&reached(100)), 2_000);
        for percent in 0..100 {
            let (before, after) = (reached(percent), reached(percent + 1));
            assert!(before.iter().zip(&after).all(|(before, after)| before <= after), "{percent}");
        }
    }

    #[test]
    fn a_percentage_above_100_is_rejected() {
        assert_eq!(Percent::new(101), Err(PercentError));
        assert_eq!(Percent::new(100), Ok(Percent::ALL));
        assert_eq!(Percent::new(0).map(Percent::get), Ok(0));
    }
}
