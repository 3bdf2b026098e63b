//! Tier: AI calls are limited by plan, and policies limit whatever callers name.
//!
//! Everything a decision needs is in memory: definitions and plans are remembered until they change, and what was spent is
//! with the engine of limits. That one handles its own outages, so a decision never waits long.

mod definition_sync;
mod definitions;
mod hold;
mod limits;
mod subscriptions;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use weir_core::tier::{DAILY, Decision, LimitState, Plan, Tier, TierHeaders, TierLimits, Tiers};
use weir_core::{PolicyName, UserId};
use weir_store::Result;
use weir_store::tier::{LimitStatus, LimitStore, Origin, Policy, PolicySpec, Subscription, TierStore};

use self::definitions::Definitions;
pub(crate) use self::hold::{HoldOutcome, SettleOutcome};
pub(crate) use self::limits::{Answer, Check, CheckOutcome};
use self::subscriptions::Subscriptions;
use super::settings::TierSettings;
use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;
use crate::tier::metrics::TierMetrics;

/// Whether an AI call may go on, and what its response says of limits either way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may: limits are switched off.
    Disabled(TierHeaders),
    /// It may, and is counted.
    Allowed(TierHeaders),
    /// It may not, and nothing was spent.
    Denied {
        /// What the response's headers say.
        headers: TierHeaders,
        /// What the user is told.
        message: String,
    },
}

impl Admission {
    /// What the response's headers say.
    #[must_use]
    pub const fn headers(&self) -> &TierHeaders {
        match self {
            Self::Disabled(headers) | Self::Allowed(headers) | Self::Denied { headers, .. } => headers,
        }
    }
}

/// Where a user stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserStanding {
    /// Whether AI calls are limited at all.
    pub enabled: bool,
    /// What the user has subscribed to.
    pub plan: Plan,
    /// What that allows.
    pub limits: TierLimits,
    /// What is left of the minute's bucket.
    pub minute: LimitState,
    /// What is left of the daily one.
    pub daily: LimitState,
}

/// Tier.
pub struct TierService {
    shared: Arc<Shared>,
    limits: Arc<dyn LimitStore>,
    settings: TierSettings,
    metrics: TierMetrics,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// What the task in the background works with, too.
struct Shared {
    store: Arc<dyn TierStore>,
    definitions: Definitions,
    subscriptions: Subscriptions,
    timeout: Duration,
}

impl Drop for TierService {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().take() {
            task.abort();
        }
    }
}

impl TierService {
    /// Puts it together. Until [`TierService::load`], there are no policies, and tiers are as the settings say.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, metrics: &Metrics) -> Self {
        let store = Arc::clone(&engines.store.tiers);
        let shared = Shared {
            definitions: Definitions::new(Arc::clone(&store), settings.tier.tiers),
            subscriptions: Subscriptions::new(Arc::clone(&store)),
            timeout: settings.http.timeout,
            store,
        };
        Self {
            shared: Arc::new(shared),
            limits: engines.limits(settings, metrics.lane("tier")),
            settings: settings.tier.clone(),
            metrics: metrics.tier.clone(),
            task: Mutex::default(),
        }
    }

    /// Makes the policies of the settings, reads what there is, and begins to hear of changes.
    pub async fn load(&self) -> Result<()> {
        for (name, spec) in &self.settings.policies {
            if self.shared.store.put_policy(name, spec, Origin::File).await?.is_none() {
                tracing::warn!(policy = %name, "there are too many policies; this one is left out");
            }
        }
        // The version first: what is changed while the rest is read is then heard of.
        let since = self.shared.store.changes_since(None).await?.version;
        self.shared.definitions.load(self.shared.timeout).await?;
        let task = tokio::spawn(definition_sync::run(Arc::clone(&self.shared), since));
        *self.task.lock() = Some(task);
        Ok(())
    }

    /// Whether a user's AI call may go on: the day first, then the minute, both or neither are spent.
    /// Fails when there is no room in memory for another user.
    pub async fn admit(&self, user: &str) -> Result<Admission> {
        let (plan, definitions) = (self.shared.subscriptions.plan(user).await, self.shared.definitions.get());
        let limits = definitions.tiers().get(plan.tier());
        if !self.settings.enabled {
            self.metrics.disabled.inc();
            return Ok(Admission::Disabled(TierHeaders::unlimited(limits)));
        }
        let taken = self.limits.take_tier(&tidy(user), definitions.rule(plan.tier()), 1).await;
        let taken = taken.inspect_err(|_| {
            self.metrics.failed.inc();
        })?;
        let headers = TierHeaders::after(limits, &taken.spent, &taken.decision, taken.now);
        Ok(match taken.decision {
            Decision::Allowed => {
                self.metrics.allowed.inc();
                Admission::Allowed(headers)
            }
            Decision::Denied(refusal) => {
                self.metrics.count_denied(refusal.denied_by == DAILY);
                Admission::Denied { headers, message: limits.message(refusal.denied_by) }
            }
        })
    }

    /// Where a user stands. Nothing is spent.
    /// Fails when the engine of limits does not answer.
    pub async fn limits_me(&self, user: &str) -> Result<UserStanding> {
        let (plan, definitions) = (self.shared.subscriptions.plan(user).await, self.shared.definitions.get());
        let rule = definitions.rule(plan.tier());
        let taken = self.limits.take_tier(&tidy(user), rule, 0).await?;
        let ([daily, minute], [daily_level, minute_level]) = (&rule.rule, &taken.spent);
        Ok(UserStanding {
            enabled: self.settings.enabled,
            plan,
            limits: *definitions.tiers().get(plan.tier()),
            minute: minute.limit_state(minute_level, taken.now),
            daily: daily.limit_state(daily_level, taken.now),
        })
    }

    /// A user's subscription.
    pub async fn subscription(&self, user: &UserId) -> Result<Option<Subscription>> {
        self.shared.subscriptions.read(user, self.shared.timeout).await
    }

    /// Subscribes a user to a plan: for its next call here, within five seconds on other servers.
    pub async fn put_subscription(&self, user: &UserId, plan: Plan) -> Result<Subscription> {
        self.shared.subscriptions.put(user, plan, self.shared.timeout).await
    }

    /// Ends a subscription; false when there is none.
    pub async fn delete_subscription(&self, user: &UserId) -> Result<bool> {
        self.shared.subscriptions.delete(user, self.shared.timeout).await
    }

    /// What tiers allow.
    #[must_use]
    pub fn tiers(&self) -> Tiers {
        *self.shared.definitions.get().tiers()
    }

    /// Sets what a tier allows: for the next call here, within five seconds on other servers.
    pub async fn put_tier(&self, tier: Tier, limits: TierLimits) -> Result<()> {
        self.shared.definitions.put_tier(tier, limits, self.shared.timeout).await
    }

    /// The policy of that name.
    #[must_use]
    pub fn policy(&self, name: &str) -> Option<Arc<Policy>> {
        self.shared.definitions.get().policy(name).cloned()
    }

    /// Policies in order of name, after the one named `after`.
    #[must_use]
    pub fn policies(&self, after: Option<&str>, limit: usize) -> Vec<Arc<Policy>> {
        let definitions = self.shared.definitions.get();
        let later =
            definitions.policies().filter(|policy| after.is_none_or(|after| policy.name.as_str() > after));
        let mut policies: Vec<_> = later.cloned().collect();
        policies.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        policies.truncate(limit);
        policies
    }

    /// Makes or changes a policy; none when there are too many. What was spent of it stays spent.
    pub async fn put_policy(&self, name: &PolicyName, spec: &PolicySpec) -> Result<Option<Policy>> {
        let put = self.shared.store.put_policy(name, spec, Origin::Operator);
        let put = within(self.shared.timeout, put).await;
        self.shared.definitions.load_after(put, self.shared.timeout).await
    }

    /// Ends a policy; false when there is none.
    pub async fn delete_policy(&self, name: &PolicyName) -> Result<bool> {
        let gone = within(self.shared.timeout, self.shared.store.delete_policy(name)).await;
        self.shared.definitions.load_after(gone, self.shared.timeout).await
    }

    /// The policies about a descriptor of a proxy, and the key that it spends under, for [`TierService::decide`].
    #[must_use]
    pub fn matching(&self, domain: &str, entries: &[(&str, &str)]) -> Vec<(Arc<Policy>, String)> {
        self.shared.definitions.get().matching(domain, entries)
    }

    /// How many keys are known, and how much of what they have spent is not kept yet.
    #[must_use]
    pub fn limit_status(&self) -> LimitStatus {
        self.limits.status()
    }

    /// Tells metrics how much of what was spent is not kept yet, and since when that cannot be helped.
    pub fn measure(&self) {
        let LimitStatus { unsaved, unsaved_for, decided_alone, .. } = self.limits.status();
        self.metrics.unsaved.set(i64::try_from(unsaved).unwrap_or(i64::MAX));
        self.metrics.count_alone(decided_alone);
        let unsaved_seconds = unsaved_for.unwrap_or_default().as_secs();
        self.metrics.unsaved_seconds.set(i64::try_from(unsaved_seconds).unwrap_or(i64::MAX));
    }

    /// Has what was spent kept, for a clean stop. What is spent afterwards ends with the process.
    pub async fn drain(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await;
        }
        self.limits.drain().await;
    }
}

/// A user's name as engines can keep it. Tokens may name anybody; what no name could be is told apart no further.
fn tidy(user: &str) -> Cow<'_, str> {
    if UserId::parse(user).is_ok() {
        return Cow::Borrowed(user);
    }
    let plain = user.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c });
    Cow::Owned(plain.take(weir_core::id::NAME_MAX_CHARS).collect())
}

#[cfg(test)]
mod tests;
