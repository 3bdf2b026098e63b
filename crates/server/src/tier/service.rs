//! Tier: limits AI calls by plan, and keys that callers choose by policy.
//!
//! Everything a decision needs is in memory: definitions and plans are cached until they change, and spending is in the limit
//! store. The limit store handles its own outages, so a decision never waits long.

mod definition_sync;
mod definitions;
mod explanation;
mod hold;
mod key_states;
mod limits;
mod permits;
mod subscriptions;
mod unclaimed;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use weir_core::tier::{DAILY, Decision, LimitState, Plan, Rule, Tier, TierHeaders, TierLimits, Tiers};
use weir_core::{Clock, PolicyName, Timestamp, UserId};
use weir_store::tier::{
    ConcurrencyPolicy, LimitStatus, LimitStore, Origin, Policy, Subscription, SubscriptionTerms, TakePermits,
    TierStore,
};
use weir_store::{Batch, Error, Lanes, Result};

use self::definitions::Definitions;
pub(crate) use self::hold::{HoldOutcome, SettleOutcome};
pub(crate) use self::key_states::KeyState;
pub(crate) use self::limits::{Check, CheckOptions, CheckOutcome, CheckResult};
pub(crate) use self::permits::ReleaseOutcome;
use self::subscriptions::Subscriptions;
use self::unclaimed::TakenPermits;
use super::events::{CallDecided, PolicyLeftOut, UnknownPlanClaim};
use super::settings::TierSettings;
use super::settings::policy_input::PolicyDefinition;
use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::near_limits::NearLimits;
use crate::tier::metrics::TierMetrics;

/// Who makes an AI call.
#[derive(Clone, Copy, Debug)]
pub struct TierCaller<'a> {
    pub user: &'a str,
    /// What the token says of the plan, in the claim that `tier.plan_claim` names.
    pub plan_claim: Option<&'a str>,
}

impl<'a> From<&'a str> for TierCaller<'a> {
    /// A user whose token says nothing of a plan.
    fn from(user: &'a str) -> Self {
        Self { user, plan_claim: None }
    }
}

/// Whether an AI call is allowed, and the rate limit headers of its response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Allowed, because limits are disabled.
    Disabled(TierHeaders),
    /// Allowed and counted.
    Allowed(TierHeaders),
    /// Denied; nothing was spent.
    Denied {
        headers: TierHeaders,
        /// The error message for the user.
        message: String,
    },
    /// Denied because the user is new and there is no room for another one; nothing was spent.
    NoRoom {
        headers: TierHeaders,
        /// The setting that bounds the number of users.
        keys_max: usize,
    },
}

impl Admission {
    #[must_use]
    pub const fn headers(&self) -> &TierHeaders {
        match self {
            Self::Disabled(headers)
            | Self::Allowed(headers)
            | Self::Denied { headers, .. }
            | Self::NoRoom { headers, .. } => headers,
        }
    }
}

/// A user's plan, its limits, and what is left of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserLimits {
    /// Whether AI calls are limited at all.
    pub enabled: bool,
    pub plan: Plan,
    pub limits: TierLimits,
    /// The state of the minute's bucket.
    pub minute: LimitState,
    /// The state of the day's bucket.
    pub daily: LimitState,
}

pub struct TierService {
    shared: Arc<SharedState>,
    limits: Arc<dyn LimitStore>,
    permits: Lanes<TakePermits, TakenPermits>,
    settings: TierSettings,
    metrics: TierMetrics,
    near_limits: Arc<NearLimits>,
    task: Mutex<Option<JoinHandle<()>>>,
    /// Deletes permits that nobody has heard of.
    voiding: Mutex<Option<JoinHandle<()>>>,
}

/// A policy of any kind.
#[derive(Clone, Debug)]
pub enum AnyPolicy {
    Limit(Arc<Policy>),
    Concurrency(Arc<ConcurrencyPolicy>),
}

impl AnyPolicy {
    #[must_use]
    pub fn name(&self) -> &PolicyName {
        match self {
            Self::Limit(policy) => &policy.name,
            Self::Concurrency(policy) => &policy.name,
        }
    }

    #[must_use]
    pub fn definition(&self) -> PolicyDefinition {
        match self {
            Self::Limit(policy) => PolicyDefinition::Limit(policy.spec.clone()),
            Self::Concurrency(policy) => PolicyDefinition::Concurrency(policy.spec),
        }
    }
}

/// State shared with the background task.
struct SharedState {
    store: Arc<dyn TierStore>,
    definitions: Definitions,
    subscriptions: Subscriptions,
    timeout: Duration,
    wall_clock: Arc<dyn Clock>,
}

impl Drop for TierService {
    fn drop(&mut self) {
        for task in [self.task.get_mut(), self.voiding.get_mut()].into_iter().filter_map(Option::take) {
            task.abort();
        }
    }
}

impl TierService {
    /// Creates the service. Until [`TierService::load`] there are no policies, and tiers are those of the settings.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, metrics: &Metrics) -> Self {
        let store = Arc::clone(&engines.store.tiers);
        let (to_void, waiting) = unclaimed::waiting_permits();
        let permits = engines.start_lanes("permit", metrics.lane("permit"), {
            let store = Arc::clone(&store);
            move |batch: Batch<TakePermits>| {
                let (store, to_void, batch) = (Arc::clone(&store), to_void.clone(), batch.take());
                async move {
                    // All callers may have disconnected.
                    if batch.is_empty() {
                        return Ok(Vec::new());
                    }
                    unclaimed::take(&*store, &to_void, batch).await
                }
            }
        });
        let shared = SharedState {
            definitions: Definitions::new(Arc::clone(&store), settings.tier.enabled, settings.tier.tiers),
            subscriptions: Subscriptions::new(Arc::clone(&store), Arc::clone(&engines.store.steady_clock)),
            timeout: settings.http.timeout,
            wall_clock: Arc::clone(&engines.store.wall_clock),
            store,
        };
        let shared = Arc::new(shared);
        let voiding = tokio::spawn(unclaimed::void_all(Arc::clone(&shared), waiting));
        Self {
            shared,
            limits: engines.limits(settings, metrics.lane("tier")),
            permits,
            settings: settings.tier.clone(),
            metrics: metrics.tier.clone(),
            near_limits: Arc::clone(&metrics.near_limits),
            task: Mutex::default(),
            voiding: Mutex::new(Some(voiding)),
        }
    }

    /// Creates the policies of the settings, loads all definitions, and starts to follow changes.
    pub async fn load(&self) -> Result<()> {
        for (name, definition) in &self.settings.policies {
            if !self.store_policy(name, definition, Origin::File).await? {
                PolicyLeftOut { policy: name }.emit();
            }
        }
        // The version is read first, so that changes during the load are applied later.
        let since = self.shared.store.changes_since(None).await?.version;
        self.shared.definitions.load(self.shared.timeout).await?;
        let task = tokio::spawn(definition_sync::run(Arc::clone(&self.shared), since));
        *self.task.lock() = Some(task);
        Ok(())
    }

    /// The plan of a caller: that of the subscription, else that of the token's claim, else the free plan.
    async fn plan(&self, caller: TierCaller<'_>) -> Plan {
        if let Some(plan) = self.shared.subscriptions.plan(caller.user).await {
            return plan;
        }
        let Some(claimed) = caller.plan_claim else { return Plan::Free };
        claimed.parse().unwrap_or_else(|_unknown| {
            UnknownPlanClaim { claimed }.emit(&self.metrics);
            Plan::Free
        })
    }

    /// Decides about a user's AI call: the day first, then the minute; both are spent or neither.
    /// Fails when the limit store does not decide.
    pub async fn admit(&self, caller: impl Into<TierCaller<'_>>) -> Result<Admission> {
        let caller = caller.into();
        let (plan, definitions) = (self.plan(caller).await, self.shared.definitions.snapshot());
        let limits = definitions.tiers().get(plan.tier());
        if !definitions.is_enabled() {
            CallDecided::Unlimited.emit(&self.metrics);
            return Ok(Admission::Disabled(TierHeaders::unlimited(limits)));
        }
        let rule = definitions.rule(plan.tier());
        let taken = self.limits.take_tier(&storable_name(caller.user), rule, 1).await;
        let taken = taken.inspect_err(|_| CallDecided::Failed.emit(&self.metrics));
        let taken = match taken {
            Err(Error::KeysExhausted { max: keys_max }) => {
                // A user who is not in memory has spent nothing.
                let (unspent, now) = (rule.rule.unspent(), Timestamp::EPOCH);
                let headers = TierHeaders::after(limits, &unspent, &Decision::Allowed, now);
                return Ok(Admission::NoRoom { headers, keys_max });
            }
            taken => taken?,
        };
        let headers = TierHeaders::after(limits, &taken.spent, &taken.decision, taken.now);
        self.remember_tier(caller.user, rule, &taken);
        Ok(match taken.decision {
            Decision::Allowed => {
                CallDecided::Allowed.emit(&self.metrics);
                Admission::Allowed(headers)
            }
            Decision::Denied(refusal) => {
                let is_daily = refusal.denied_by == DAILY;
                if is_daily { CallDecided::DeniedByDay } else { CallDecided::DeniedByMinute }
                    .emit(&self.metrics);
                Admission::Denied { headers, message: limits.message(refusal.denied_by) }
            }
        })
    }

    /// Returns a user's limits and what is left of them. Nothing is spent.
    /// Fails when the limit store does not answer.
    pub async fn user_limits(&self, caller: impl Into<TierCaller<'_>>) -> Result<UserLimits> {
        let caller = caller.into();
        let (plan, definitions) = (self.plan(caller).await, self.shared.definitions.snapshot());
        let rule = definitions.rule(plan.tier());
        let taken = self.limits.take_tier(&storable_name(caller.user), rule, 0).await?;
        let ([daily, minute], [daily_level, minute_level]) = (&rule.rule, &taken.spent);
        Ok(UserLimits {
            enabled: definitions.is_enabled(),
            plan,
            limits: *definitions.tiers().get(plan.tier()),
            minute: minute.limit_state(minute_level, taken.now),
            daily: daily.limit_state(daily_level, taken.now),
        })
    }

    pub async fn subscription(&self, user: &UserId) -> Result<Option<Subscription>> {
        self.shared.subscriptions.read(user, self.shared.timeout).await
    }

    /// The time of day, to tell times in the past.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.shared.wall_clock.now()
    }

    /// The subscriptions in order of user, starting after `after`.
    pub async fn subscriptions(&self, after: Option<&UserId>, limit: usize) -> Result<Vec<Subscription>> {
        self.shared.subscriptions.list(after, limit, self.shared.timeout).await
    }

    /// Subscribes a user to a plan: from the next call on this server, within five seconds on others.
    pub async fn put_subscription(&self, user: &UserId, terms: SubscriptionTerms) -> Result<Subscription> {
        self.shared.subscriptions.put(user, terms, self.shared.timeout).await
    }

    /// Ends a subscription; returns false if there is none.
    pub async fn delete_subscription(&self, user: &UserId) -> Result<bool> {
        self.shared.subscriptions.delete(user, self.shared.timeout).await
    }

    #[must_use]
    pub fn tiers(&self) -> Tiers {
        *self.shared.definitions.snapshot().tiers()
    }

    /// Sets the limits of a tier: from the next call on this server, within five seconds on others.
    pub async fn put_tier(&self, tier: Tier, limits: TierLimits) -> Result<()> {
        self.shared.definitions.put_tier(tier, limits, self.shared.timeout).await
    }

    /// Sets the limits of a tier back to those of the settings, at the same times, and returns them.
    pub async fn reset_tier(&self, tier: Tier) -> Result<TierLimits> {
        self.shared.definitions.delete_tier(tier, self.shared.timeout).await?;
        Ok(*self.tiers().get(tier))
    }

    /// Whether AI calls are limited by plan.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.shared.definitions.snapshot().is_enabled()
    }

    /// Switches the limits of AI calls on or off: from the next call on this server, within five seconds on others.
    pub async fn set_enabled(&self, is_enabled: bool) -> Result<()> {
        self.shared.definitions.switch(is_enabled, self.shared.timeout).await
    }

    #[must_use]
    pub fn policy(&self, name: &str) -> Option<Arc<Policy>> {
        self.shared.definitions.snapshot().policy(name).cloned()
    }

    /// The policy of a name, of any kind.
    #[must_use]
    pub fn any_policy(&self, name: &str) -> Option<AnyPolicy> {
        let definitions = self.shared.definitions.snapshot();
        let limit = definitions.policy(name).cloned().map(AnyPolicy::Limit);
        limit.or_else(|| definitions.concurrency(name).cloned().map(AnyPolicy::Concurrency))
    }

    /// Policies of any kind in order of name, starting after `after`.
    #[must_use]
    pub fn policies(&self, after: Option<&str>, limit: usize) -> Vec<AnyPolicy> {
        let definitions = self.shared.definitions.snapshot();
        let limits = definitions.policies().cloned().map(AnyPolicy::Limit);
        let all = limits.chain(definitions.concurrency_policies().cloned().map(AnyPolicy::Concurrency));
        let mut policies: Vec<_> =
            all.filter(|policy| after.is_none_or(|after| policy.name().as_str() > after)).collect();
        policies.sort_unstable_by(|a, b| a.name().cmp(b.name()));
        policies.truncate(limit);
        policies
    }

    /// Creates or changes a policy; returns false if there are too many. Spending under it stays, if it is of the same kind or
    /// both are limits.
    pub async fn put_policy(&self, name: &PolicyName, definition: &PolicyDefinition) -> Result<bool> {
        let put = within(self.shared.timeout, self.store_policy(name, definition, Origin::Operator)).await;
        self.shared.definitions.load_after(put, self.shared.timeout).await
    }

    /// Returns false if there are too many policies, or a policy of the file would replace an operator's of another kind.
    async fn store_policy(
        &self,
        name: &PolicyName,
        definition: &PolicyDefinition,
        origin: Origin,
    ) -> Result<bool> {
        let store = &self.shared.store;
        Ok(match definition {
            PolicyDefinition::Limit(spec) => store.put_policy(name, spec, origin).await?.is_some(),
            PolicyDefinition::Concurrency(spec) => store.put_concurrency(name, spec, origin).await?.is_some(),
        })
    }

    /// Deletes a policy; returns false if there is none.
    pub async fn delete_policy(&self, name: &PolicyName) -> Result<bool> {
        let deleted = within(self.shared.timeout, self.shared.store.delete_policy(name)).await;
        self.shared.definitions.load_after(deleted, self.shared.timeout).await
    }

    /// The policies that match a proxy's descriptor, each with the key to spend under, for [`TierService::decide`].
    #[must_use]
    pub fn matching(&self, domain: &str, entries: &[(&str, &str)]) -> Vec<(Arc<Policy>, String)> {
        self.shared.definitions.snapshot().matching(domain, entries)
    }

    /// How many keys are in memory, and how many of them are not saved yet.
    #[must_use]
    pub fn limit_status(&self) -> LimitStatus {
        self.limits.status()
    }

    /// Updates the gauges of unsaved spending.
    pub fn update_metrics(&self) {
        let LimitStatus { unsaved, unsaved_for, decided_alone, .. } = self.limits.status();
        self.metrics.unsaved.set(i64::try_from(unsaved).unwrap_or(i64::MAX));
        self.metrics.set_decided_without_redis(decided_alone);
        let unsaved_seconds = unsaved_for.unwrap_or_default().as_secs();
        self.metrics.unsaved_seconds.set(i64::try_from(unsaved_seconds).unwrap_or(i64::MAX));
    }

    /// Answers the checks that wait for permits and saves all spending, for a clean stop. Spending after that is lost when the
    /// process ends.
    pub async fn drain(&self) {
        self.permits.drain().await;
        let voiding = self.voiding.lock().take();
        if let Some(mut voiding) = voiding
            && tokio::time::timeout(self.shared.timeout, &mut voiding).await.is_err()
        {
            voiding.abort();
        }
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await;
        }
        self.limits.drain().await;
    }
}

/// A user's name as engines can store it. Tokens may contain any name; names that only differ in invalid characters or past
/// the maximum length share limits.
fn storable_name(user: &str) -> Cow<'_, str> {
    if UserId::parse(user).is_ok() {
        return Cow::Borrowed(user);
    }
    let plain = user.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c });
    Cow::Owned(plain.take(weir_core::id::NAME_MAX_CHARS).collect())
}

#[cfg(test)]
mod permit_tests;
#[cfg(test)]
mod tests;
