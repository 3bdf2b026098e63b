//! Tier: limits on AI calls per plan, minute and day, and the general limits that policies use.
//!
//! A [`Rule`] says how much a key may spend; its `Usage`, a few bytes, says what the key has spent. Both belong to the
//! engine, which locks the bytes, applies the rule and saves the result. A denial changes nothing, so several rules
//! can be spent together or not at all. What a plan allows and which headers a response gets are defined here too:
//! [`Plan`], [`Tier`], [`TierLimits`], [`TierHeaders`].

mod anchor;
mod bucket;
mod headers;
mod hold;
mod limit;
mod permit;
mod plan;
mod rule;
mod sliding;
mod window;

pub use anchor::{Anchor, UnknownDay};
pub use bucket::{BucketLevel, TokenBucket};
pub use headers::{HeaderPair, NamedLimit, TierHeaders};
pub use hold::{Correction, Hold, HoldSettlement};
pub use limit::{Limit, LimitError, LimitUsage};
pub use permit::{Concurrency, ConcurrencyError, OpenPermit, Permit, PermitRelease};
pub use plan::{DAILY, MINUTE, Plan, Tier, TierLimits, TierRule, Tiers, UnknownPlan, UnknownTier};
pub use rule::{Decision, KeyCharge, LimitDenial, LimitState, Rule, ScopedRule, take_all};
pub use sliding::{SlidingWindow, SlidingWindowCounts};
pub use window::{FixedWindow, FixedWindowCount};
