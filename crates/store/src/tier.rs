//! Tier at the store: definitions of limits, subscriptions, holds and what keys have spent.
//!
//! There are two traits. [`TierStore`] stores subscriptions, tiers, policies, holds, and the usage that an in-memory
//! limiter restores after a restart. [`LimitStore`] decides: it knows what each key has spent and charges all keys of a
//! decision or none. Any implementation of one works with any of the other.

mod permit;
mod policy;
mod spent_record;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use weir_core::tier::{
    Anchor, BucketLevel, Decision, Hold, HoldSettlement, LimitUsage, Plan, ScopedRule, Tier, TierLimits,
    TierRule,
};
use weir_core::{HoldId, PermitId, PolicyName, Timestamp, UserId};

use crate::Result;

pub use self::permit::{
    ConcurrencyPolicy, ConcurrencySpec, NewPermit, OpenPermits, PermitAsk, PermitsOutcome, ReleasedPermit,
    TakePermits, permit_keys, plan_permits,
};
pub use self::policy::{Match, OnOutage, POLICIES_MAX, Policy, PolicySpec, UnreadablePolicy};
pub use self::spent_record::{SpentRecord, SpentRow, UnreadableSpent};

/// The scope of the tiers' keys. Policies have scopes from 1 on.
pub const TIER_SCOPE: u32 = 0;

/// What a user subscribes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubscriptionTerms {
    pub plan: Plan,
    /// From then on, by the store's clock, it is as if there were no subscription. `None` if it never ends.
    pub expires_at: Option<Timestamp>,
    /// The day on which monthly meters turn.
    pub anchor: Option<Anchor>,
}

impl From<Plan> for SubscriptionTerms {
    /// A plan that never expires, with months that begin on the 1st.
    fn from(plan: Plan) -> Self {
        Self { plan, expires_at: None, anchor: None }
    }
}

/// A subscription that has not expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscription {
    pub user: UserId,
    pub terms: SubscriptionTerms,
    pub updated_at: Timestamp,
    /// How long the subscription had left, by the store's clock, when it was read. `None` if it never expires.
    pub expires_in: Option<Duration>,
}

impl Subscription {
    /// Creates a subscription as it was read at `now`.
    #[must_use]
    pub fn new(user: UserId, terms: SubscriptionTerms, updated_at: Timestamp, now: Timestamp) -> Self {
        let expires_in = terms.expires_at.map(|at| at.since(now));
        Self { user, terms, updated_at, expires_in }
    }
}

/// Where a policy comes from. The settings file never overwrites a policy that an operator has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    File,
    /// Set over the API while the server runs.
    Operator,
}

impl Origin {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Operator => "operator",
        }
    }
}

/// A hold whose cost has been charged and that has to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewHold {
    pub id: HoldId,
    pub policy: PolicyName,
    /// The policy's scope.
    pub scope: u32,
    pub key: String,
    pub cost: u32,
    /// By the clock of the [`LimitStore`] that charged it.
    pub taken_at: Timestamp,
    /// For how long after it is stored the hold can be settled.
    pub ttl: Duration,
}

/// The result of settling a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettledHold {
    pub policy: PolicyName,
    /// The policy's scope.
    pub scope: u32,
    pub key: String,
    /// The hold after the call.
    pub hold: Hold,
    /// Contains the correction to apply only the first time.
    pub settlement: HoldSettlement,
}

/// Counts of the stored holds; each is open, settled or expired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldAudit {
    pub holds: u64,
    /// Holds that can still be settled.
    pub open: u64,
    /// The total cost of the open holds.
    pub open_cost: u64,
    pub settled: u64,
    /// Holds that were never settled: their cost stays spent in full.
    pub expired: u64,
}

/// A definition that servers cache and that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedDefinition {
    Subscription(UserId),
    /// Some tier or policy, or whether AI calls are limited.
    Definitions,
}

/// The changes since a version, by this server and others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DefinitionChanges {
    /// The version to pass with the next call.
    pub version: i64,
    /// `None` if the requested version is too old to list what changed since.
    pub changed: Option<Vec<ChangedDefinition>>,
}

#[async_trait]
pub trait TierStore: Send + Sync + 'static {
    /// Whether other servers may write to this store.
    fn is_shared(&self) -> bool;
    /// The subscription of a user; `None` if there is none or it has expired.
    async fn subscription(&self, user: &UserId) -> Result<Option<Subscription>>;
    /// The subscriptions that have not expired, in order of user, after the given one.
    async fn subscriptions(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<Subscription>>;
    /// Subscribes a user, in place of an earlier subscription.
    async fn put_subscription(&self, user: &UserId, terms: SubscriptionTerms) -> Result<Subscription>;
    /// Returns `false` if there is no subscription or it has expired.
    async fn delete_subscription(&self, user: &UserId) -> Result<bool>;
    /// Deletes up to `limit` subscriptions that have expired and returns how many.
    async fn purge_subscriptions(&self, limit: usize) -> Result<u64>;
    /// Whether operators have switched the limits of AI calls on or off while the server runs.
    async fn limits_enabled(&self) -> Result<Option<bool>>;
    async fn put_limits_enabled(&self, is_enabled: bool) -> Result<()>;
    /// The tiers whose limits operators have changed while the server runs.
    async fn tiers(&self) -> Result<Vec<(Tier, TierLimits)>>;
    async fn put_tier(&self, tier: Tier, limits: TierLimits) -> Result<()>;
    /// Forgets what operators have changed of a tier.
    async fn delete_tier(&self, tier: Tier) -> Result<()>;
    /// All policies, in order of name.
    async fn policies(&self) -> Result<Vec<Policy>>;
    /// Creates or replaces a policy. Returns `None` if there are [`POLICIES_MAX`] others. A policy from the settings file does
    /// not replace one that an operator has set: the existing one is returned.
    async fn put_policy(
        &self,
        name: &PolicyName,
        spec: &PolicySpec,
        origin: Origin,
    ) -> Result<Option<Policy>>;
    /// Deletes a policy of any kind and what was spent of it. Returns `false` if there is none.
    async fn delete_policy(&self, name: &PolicyName) -> Result<bool>;
    /// All concurrency policies, in order of name. If a server of an earlier version has put another policy of the same name
    /// since, that one counts.
    async fn concurrency_policies(&self) -> Result<Vec<ConcurrencyPolicy>>;
    /// As [`TierStore::put_policy`]. A name is that of one policy: each of these methods replaces one that the other has put.
    async fn put_concurrency(
        &self,
        name: &PolicyName,
        spec: &ConcurrencySpec,
        origin: Origin,
    ) -> Result<Option<ConcurrencyPolicy>>;
    /// Decides a batch of permits in order, and stores those that it gives, in one commit.
    async fn take_permits(&self, batch: Vec<TakePermits>) -> Result<Vec<PermitsOutcome>>;
    /// Gives a permit back. Returns `None` if there is no such permit.
    async fn release_permit(&self, id: PermitId) -> Result<Option<ReleasedPermit>>;
    /// Deletes permits that nobody has heard of.
    async fn void_permits(&self, ids: Vec<PermitId>) -> Result<()>;
    /// Deletes the open permits of a key.
    async fn reset_permits(&self, scope: u32, key: &str) -> Result<()>;
    /// Deletes up to `limit` permits whose time was over longer than `keep` ago and returns how many.
    async fn purge_permits(&self, keep: Duration, limit: usize) -> Result<u64>;
    /// Stores a hold and returns when it expires.
    async fn put_hold(&self, hold: NewHold) -> Result<Timestamp>;
    /// Settles a hold at its true cost, once. Returns `None` if there is no such hold.
    async fn settle_hold(&self, id: HoldId, cost: u32) -> Result<Option<SettledHold>>;
    /// Deletes up to `limit` holds that expired longer than `keep` ago and returns how many.
    async fn purge_holds(&self, keep: Duration, limit: usize) -> Result<u64>;
    /// Counts the stored holds in one snapshot.
    async fn audit_holds(&self) -> Result<HoldAudit>;
    /// Saves what keys have spent, replacing their earlier rows.
    async fn save_spent(&self, rows: Vec<SpentRow>) -> Result<()>;
    /// The saved rows in order of scope and key, after the given one.
    async fn load_spent(&self, after: Option<(u32, String)>, limit: usize) -> Result<Vec<SpentRow>>;
    /// The changes since a version. With `None`, returns only the present version.
    async fn changes_since(&self, since: Option<i64>) -> Result<DefinitionChanges>;
}

/// A cost that one key has to pay under a policy.
#[derive(Clone, Copy, Debug)]
pub struct LimitCheck<'a> {
    pub policy: &'a Arc<Policy>,
    pub key: &'a str,
    /// The costs of checks with the same policy and key add up.
    pub cost: u32,
}

/// The outcome of checking several keys together.
#[derive(Clone, Debug, PartialEq)]
pub struct LimitOutcome {
    /// The decision for all checks. Its `denied_by` is an index into them.
    pub decision: Decision,
    /// For each check: the decision it would have had alone, and the key's usage, which is unchanged if any was denied.
    pub each: Vec<(Decision, LimitUsage)>,
    /// When it was decided, by the clock of the store that decided.
    pub now: Timestamp,
    /// Whether this process decided without the shared store, as the `on_outage` of each policy says.
    pub decided_alone: bool,
}

/// The outcome of checking a user's tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierOutcome {
    pub decision: Decision,
    /// The user's daily and minute level after the decision.
    pub spent: [BucketLevel; 2],
    pub now: Timestamp,
}

/// The state of a [`LimitStore`], for metrics and audits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitStatus {
    /// Keys with usage that this process knows of.
    pub keys: usize,
    /// Keys whose latest usage is not saved yet.
    pub unsaved: usize,
    /// For how long saving has failed; `None` while it works.
    pub unsaved_for: Option<Duration>,
    /// Decisions since the start that this process made without the shared store, which did not answer.
    pub decided_alone: u64,
}

/// Knows what keys have spent and decides whether they may spend more.
///
/// A shadowed policy never denies; `each` in the outcome shows whether it would have.
#[async_trait]
pub trait LimitStore: Send + Sync + 'static {
    /// Charges all keys, or none if any would exceed its limit. With `peek`, nothing is charged.
    async fn take(&self, checks: &[LimitCheck<'_>], peek: bool) -> Result<LimitOutcome>;
    /// Charges `cost` even beyond the limit.
    async fn charge(&self, policy: &Arc<Policy>, key: &str, cost: u32) -> Result<(LimitUsage, Timestamp)>;
    /// Gives back `cost`, which was charged at `taken_at` if that is known.
    async fn give_back(
        &self,
        policy: &Arc<Policy>,
        key: &str,
        cost: u32,
        taken_at: Option<Timestamp>,
    ) -> Result<(LimitUsage, Timestamp)>;
    /// Resets what a key has spent.
    async fn forget(&self, policy: &Arc<Policy>, key: &str) -> Result<()>;
    /// Charges `cost` to a user's day and minute, or to neither. A cost of 0 only reads them.
    async fn take_tier(&self, user: &str, rule: &Arc<ScopedRule<TierRule>>, cost: u32)
    -> Result<TierOutcome>;
    /// Waits until everything spent so far would survive a crash of this process.
    async fn flush(&self);
    /// Saves everything spent so far, for a clean stop. Nothing is saved afterwards.
    async fn drain(&self);
    fn status(&self) -> LimitStatus;
}
