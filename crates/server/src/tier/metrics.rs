//! What limits tell about themselves.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::telemetry::labels::OutcomeLabels;

/// Decisions by what became of them. Handles are taken once, so that counting costs one addition. Clones share them.
#[derive(Clone, Debug)]
pub struct TierMetrics {
    calls: Family<OutcomeLabels, Counter>,
    checks: Family<OutcomeLabels, Counter>,
    /// AI calls that went on.
    pub allowed: Counter,
    /// AI calls that went on because limits are switched off.
    pub disabled: Counter,
    /// AI calls that nobody could decide about.
    pub failed: Counter,
    denied_daily: Counter,
    denied_minute: Counter,
    check_allowed: Counter,
    check_denied: Counter,
    /// Checks that nobody could decide about.
    pub check_failed: Counter,
    shadow_denied: Counter,
    alone: Counter,
    /// Keys whose last change is not kept yet.
    pub unsaved: Gauge,
    /// For how long what was spent could not be kept, in seconds.
    pub unsaved_seconds: Gauge,
}

impl Default for TierMetrics {
    fn default() -> Self {
        let (calls, checks) = (Family::default(), Family::default());
        let of = |family: &Family<OutcomeLabels, Counter>, outcome| {
            family.get_or_create_owned(&OutcomeLabels { outcome })
        };
        Self {
            allowed: of(&calls, "allowed"),
            disabled: of(&calls, "disabled"),
            failed: of(&calls, "failed"),
            denied_daily: of(&calls, "denied_daily"),
            denied_minute: of(&calls, "denied_minute"),
            check_allowed: of(&checks, "allowed"),
            check_denied: of(&checks, "denied"),
            check_failed: of(&checks, "failed"),
            shadow_denied: Counter::default(),
            alone: Counter::default(),
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
        let shadowed = "Checks that a policy would have denied if it did more than observe";
        r.register("tier_shadow_denied", shadowed, self.shadow_denied.clone());
        let alone = "Decisions of this server alone, because Redis did not answer";
        r.register("tier_decided_alone", alone, self.alone.clone());
        r.register("tier_unsaved", "Keys whose last change is not kept yet", self.unsaved.clone());
        let unsaved = "How long what was spent last could not be kept, in seconds";
        r.register("tier_unsaved_seconds", unsaved, self.unsaved_seconds.clone());
    }

    /// Takes note of how many decisions were made without Redis since the start.
    pub fn count_alone(&self, total: u64) {
        self.alone.inc_by(total.saturating_sub(self.alone.get()));
    }

    /// Counts an AI call that was denied.
    pub fn count_denied(&self, is_daily: bool) {
        if is_daily { &self.denied_daily } else { &self.denied_minute }.inc();
    }

    /// Counts a check, and how many policies in it would have denied it.
    pub fn count_check(&self, allowed: bool, shadowed: u64) {
        if allowed { &self.check_allowed } else { &self.check_denied }.inc();
        if shadowed > 0 {
            self.shadow_denied.inc_by(shadowed);
        }
    }
}
