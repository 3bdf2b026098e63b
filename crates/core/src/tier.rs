//! Tier: AI calls per plan, minute and day; and the limits behind it, for anyone.
//!
//! A [`Rule`] says how much a key may spend, and a few bytes beside it say what the key has spent. Both belong to the
//! engine, which locks the bytes, asks the rule, and keeps what comes back. A refusal changes nothing, so several rules
//! can be spent together or not at all. What a plan allows, and how an answer looks to a caller, are data and functions
//! here too: [`Plan`], [`Tier`], [`TierLimits`], [`TierHeaders`].

mod bucket;
mod headers;
mod hold;
mod limit;
mod plan;
mod rule;
mod sliding;
mod window;

pub use bucket::{BucketLevel, TokenBucket};
pub use headers::{HeaderPair, NamedLimit, TierHeaders};
pub use hold::{Correction, Hold, HoldSettlement};
pub use limit::{Limit, LimitError, LimitUsage};
pub use plan::{DAILY, MINUTE, Plan, Tier, TierLimits, TierRule, Tiers, UnknownPlan, UnknownTier};
pub use rule::{Decision, KeyCharge, LimitDenial, LimitState, Rule, ScopedRule, take_all};
pub use sliding::{SlidingWindow, SlidingWindowCounts};
pub use window::{FixedWindow, FixedWindowCount};
