//! Metrics of tier.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::telemetry::decisions::DecisionTotals;
use crate::telemetry::labels::OutcomeLabels;

/// Decisions by outcome. Handles are looked up once, so that counting costs one addition. Clones share the metrics.
#[derive(Clone, Debug)]
pub struct TierMetrics {
    calls: Family<OutcomeLabels, Counter>,
    checks: Family<OutcomeLabels, Counter>,
    /// AI calls that were allowed.
    pub allowed: Counter,
    /// AI calls that were allowed because limits are disabled.
    pub disabled: Counter,
    /// AI calls without a decision, because the limit store failed.
    pub failed: Counter,
    /// AI calls that were denied for the day.
    pub denied_daily: Counter,
    /// AI calls that were denied for the minute.
    pub denied_minute: Counter,
    check_allowed: Counter,
    check_denied: Counter,
    /// Checks without a decision, because the limit store failed.
    pub check_failed: Counter,
    shadow_denied: Counter,
    decided_without_redis: Counter,
    /// AI calls whose token claims an unknown plan.
    pub unknown_plan_claims: Counter,
    /// Keys whose last change is not saved yet.
    pub unsaved: Gauge,
    /// Since when changes cannot be saved, in seconds.
    pub unsaved_seconds: Gauge,
}

impl Default for TierMetrics {
    fn default() -> Self {
        let (calls, checks) = (Family::default(), Family::default());
        let counter = |family: &Family<OutcomeLabels, Counter>, outcome| {
            family.get_or_create_owned(&OutcomeLabels { outcome })
        };
        Self {
            allowed: counter(&calls, "allowed"),
            disabled: counter(&calls, "disabled"),
            failed: counter(&calls, "failed"),
            denied_daily: counter(&calls, "denied_daily"),
            denied_minute: counter(&calls, "denied_minute"),
            check_allowed: counter(&checks, "allowed"),
            check_denied: counter(&checks, "denied"),
            check_failed: counter(&checks, "failed"),
            shadow_denied: Counter::default(),
            decided_without_redis: Counter::default(),
            unknown_plan_claims: Counter::default(),
            unsaved: Gauge::default(),
            unsaved_seconds: Gauge::default(),
            calls,
            checks,
        }
    }
}

impl TierMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("tier_calls", "AI calls by outcome", self.calls.clone());
        r.register("tier_checks", "Checks of policies by outcome", self.checks.clone());
        let shadow_denied = "Checks that a shadow policy would have denied";
        r.register("tier_shadow_denied", shadow_denied, self.shadow_denied.clone());
        let without_redis = "Decisions made without Redis, because it did not answer";
        r.register("tier_decided_alone", without_redis, self.decided_without_redis.clone());
        let unknown_plans = "AI calls whose token claims an unknown plan";
        r.register("tier_unknown_plan_claims", unknown_plans, self.unknown_plan_claims.clone());
        r.register("tier_unsaved", "Keys whose last change is not saved yet", self.unsaved.clone());
        let unsaved = "How long spending could not be saved, in seconds";
        r.register("tier_unsaved_seconds", unsaved, self.unsaved_seconds.clone());
    }

    /// All AI calls and checks so far.
    pub(crate) fn decisions(&self) -> DecisionTotals {
        DecisionTotals {
            allowed: self.allowed.get() + self.disabled.get() + self.check_allowed.get(),
            denied: self.denied_daily.get() + self.denied_minute.get() + self.check_denied.get(),
            failed: self.failed.get() + self.check_failed.get(),
        }
    }

    /// Raises the counter of decisions without Redis to their total since the start.
    pub fn set_decided_without_redis(&self, total: u64) {
        self.decided_without_redis.inc_by(total.saturating_sub(self.decided_without_redis.get()));
    }

    /// Counts a check, and how many shadow policies in it would have denied it.
    pub fn count_check(&self, allowed: bool, shadow_denied: u64) {
        if allowed { &self.check_allowed } else { &self.check_denied }.inc();
        if shadow_denied > 0 {
            self.shadow_denied.inc_by(shadow_denied);
        }
    }
}
