//! Tier at the store: what is limited, who has subscribed to what, and what has been spent.
//!
//! Two seams. [`TierStore`] is where definitions live: subscriptions, tiers, policies, holds, and what a memory wants to
//! find again after a restart. [`LimitStore`] decides: it knows what each key has spent, and spends all keys of a decision
//! or none. Any engine of the first goes with any engine of the second.

mod policy;
mod spent_record;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use weir_core::tier::{
    BucketLevel, Decision, Hold, HoldSettlement, LimitUsage, Plan, ScopedRule, Tier, TierLimits, TierRule,
};
use weir_core::{HoldId, PolicyName, Timestamp, UserId};

use crate::Result;

pub use self::policy::{Match, OnOutage, POLICIES_MAX, Policy, PolicySpec, UnreadablePolicy};
pub use self::spent_record::{SpentRecord, SpentRow, UnreadableSpent};

/// The number under which keys of the tiers are kept; policies have numbers from 1 on.
pub const TIER_SCOPE: u32 = 0;

/// What a user has subscribed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscription {
    /// Who.
    pub user: UserId,
    /// To what.
    pub plan: Plan,
    /// Since when.
    pub updated_at: Timestamp,
}

/// Where a policy comes from. One that an operator has made is not changed by a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From the settings.
    File,
    /// From an operator, while running.
    Operator,
}

/// A hold that has been spent and is to be remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewHold {
    /// Its name.
    pub id: HoldId,
    /// What it was taken from.
    pub policy: PolicyName,
    /// The number of that.
    pub scope: u32,
    /// The key it was taken for.
    pub key: String,
    /// What was taken.
    pub cost: u32,
    /// When, by the clock of whoever decided it.
    pub taken_at: Timestamp,
    /// How long it may be settled, from when it is remembered.
    pub ttl: Duration,
}

/// A hold that was asked to be settled, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettledHold {
    /// What it was taken from.
    pub policy: PolicyName,
    /// The number of that.
    pub scope: u32,
    /// The key it was taken for.
    pub key: String,
    /// The hold as it is now.
    pub hold: Hold,
    /// What came of it. A correction is handed out once.
    pub settlement: HoldSettlement,
}

/// The holds that are remembered: each is in one of three states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldAudit {
    /// All of them.
    pub holds: u64,
    /// Those that can be settled.
    pub open: u64,
    /// What these hold, together.
    pub open_cost: u64,
    /// Those that were.
    pub settled: u64,
    /// Those that never were, and are spent in full.
    pub expired: u64,
}

/// Something a server remembers is no longer so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedDefinition {
    /// A user's subscription.
    Subscription(UserId),
    /// A tier or a policy.
    Definitions,
}

/// What was changed since a version, by this server or another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefinitionChanges {
    /// The version to ask with the next time.
    pub version: i64,
    /// What was changed; none when so much has been that it is no longer known what.
    pub changed: Option<Vec<ChangedDefinition>>,
}

/// Where the definitions of tier live.
#[async_trait]
pub trait TierStore: Send + Sync + 'static {
    /// Whether other servers may change what is here.
    fn is_shared(&self) -> bool;
    /// A user's subscription.
    async fn subscription(&self, user: &UserId) -> Result<Option<Subscription>>;
    /// Subscribes a user to a plan.
    async fn put_subscription(&self, user: &UserId, plan: Plan) -> Result<Subscription>;
    /// Ends a subscription; false when there is none.
    async fn delete_subscription(&self, user: &UserId) -> Result<bool>;
    /// What operators have set of tiers while running.
    async fn tiers(&self) -> Result<Vec<(Tier, TierLimits)>>;
    /// Sets what a tier allows.
    async fn put_tier(&self, tier: Tier, limits: TierLimits) -> Result<()>;
    /// All policies, in order of name.
    async fn policies(&self) -> Result<Vec<Policy>>;
    /// Makes or changes a policy. None when there are [`POLICIES_MAX`] others. One from a file leaves an operator's alone
    /// and answers with that.
    async fn put_policy(
        &self,
        name: &PolicyName,
        spec: &PolicySpec,
        origin: Origin,
    ) -> Result<Option<Policy>>;
    /// Ends a policy; false when there is none. What was spent of it is forgotten with it.
    async fn delete_policy(&self, name: &PolicyName) -> Result<bool>;
    /// Remembers a hold; answers when it expires.
    async fn put_hold(&self, hold: NewHold) -> Result<Timestamp>;
    /// Settles a hold at its true cost, once; none when there is no such hold.
    async fn settle_hold(&self, id: HoldId, cost: u32) -> Result<Option<SettledHold>>;
    /// Forgets up to `limit` holds that expired longer than `keep` ago; answers how many.
    async fn purge_holds(&self, keep: Duration, limit: usize) -> Result<u64>;
    /// Counts the holds that are remembered, in one moment.
    async fn audit_holds(&self) -> Result<HoldAudit>;
    /// Keeps what keys have spent, in place of what was kept of them.
    async fn save_spent(&self, rows: Vec<SpentRow>) -> Result<()>;
    /// What was kept, in order of scope and key, after the one named.
    async fn load_spent(&self, after: Option<(u32, String)>, limit: usize) -> Result<Vec<SpentRow>>;
    /// What was changed since a version; the present version alone when that is none.
    async fn changes_since(&self, since: Option<i64>) -> Result<DefinitionChanges>;
}

/// What one key asks for.
#[derive(Clone, Copy, Debug)]
pub struct LimitCheck<'a> {
    /// Of which policy.
    pub policy: &'a Arc<Policy>,
    /// The key.
    pub key: &'a str,
    /// How much. The costs of a key that stands there twice add up.
    pub cost: u32,
}

/// What was decided about several keys.
#[derive(Clone, Debug, PartialEq)]
pub struct LimitOutcome {
    /// For all of them. Its `denied_by` counts in the order they were asked.
    pub decision: Decision,
    /// What each alone would have been told, and what it has spent now: as before, if any was denied.
    pub each: Vec<(Decision, LimitUsage)>,
    /// When it was decided, by the clock of whoever did.
    pub now: Timestamp,
}

/// What was decided about a user's request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierOutcome {
    /// Whether it may go on.
    pub decision: Decision,
    /// What the user has spent now.
    pub spent: [BucketLevel; 2],
    /// When it was decided.
    pub now: Timestamp,
}

/// What a [`LimitStore`] tells about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitStatus {
    /// Keys that have spent something, as far as this process knows.
    pub keys: usize,
    /// Those of them whose last change is not stored yet.
    pub unsaved: usize,
    /// For how long changes could not be stored; `None` while they can be.
    pub unsaved_for: Option<Duration>,
    /// Decisions that this process made alone since its start, because the store it shares did not answer.
    pub decided_alone: u64,
}

/// Whoever knows what keys have spent.
///
/// A policy that is not shadowed is spent or denied; a shadowed one never denies. Whether it would have, `each` tells.
#[async_trait]
pub trait LimitStore: Send + Sync + 'static {
    /// Spends for all keys, or for none if any has no room. With `peek` nothing is spent in any case.
    async fn take(&self, asks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome>;
    /// Spends `cost` whether there is room or not.
    async fn charge(&self, policy: &Arc<Policy>, key: &str, cost: u32) -> Result<(LimitUsage, Timestamp)>;
    /// Gives back `cost`, which was taken at `taken_at` if that is known.
    async fn give_back(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<(LimitUsage, Timestamp)>;
    /// Makes a key as good as new.
    async fn forget(&self, policy: &Arc<Policy>, key: &str) -> Result<()>;
    /// Spends `cost` of a user's day and minute, or of neither; a cost of 0 only looks.
    async fn take_tier(&self, user: &str, rule: &Arc<ScopedRule<TierRule>>, cost: u32)
    -> Result<TierOutcome>;
    /// Waits until what was spent up to now would be there after a crash of this process.
    async fn flush(&self);
    /// Has everything that was spent up to now kept, for a clean stop. Afterwards nothing more is.
    async fn drain(&self);
    /// How it is doing, for metrics and books.
    fn status(&self) -> LimitStatus;
}
