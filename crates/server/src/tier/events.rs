//! What happens in tier: each event writes its log line and moves its metric.

use weir_core::tier::{Tier, TierLimits};
use weir_core::{PolicyName, UserId};
use weir_queue::rfc3339;
use weir_store::Error;
use weir_store::tier::SubscriptionTerms;

use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::request_context::LogIds;
use crate::tier::metrics::TierMetrics;
use crate::tier::settings::policy_input::PolicyDefinition;

/// A policy of the settings was not created, because there are too many.
pub(super) struct PolicyLeftOut<'a> {
    pub(super) policy: &'a PolicyName,
}

impl PolicyLeftOut<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(policy = %self.policy, "too many policies, or an operator has put one of another kind: this one of the settings was not created");
    }
}

/// An operator created or changed a policy.
pub(super) struct PolicyChanged<'a> {
    pub(super) policy: &'a PolicyName,
    pub(super) definition: &'a PolicyDefinition,
    /// The policy as this server knew it just before.
    pub(super) before: Option<&'a PolicyDefinition>,
}

impl PolicyChanged<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            policy = %self.policy,
            spec = ?self.definition,
            before = self.before.map(debug),
            "a policy was changed"
        );
    }
}

/// An operator deleted a policy.
pub(super) struct PolicyDeleted<'a> {
    pub(super) policy: &'a PolicyName,
    pub(super) before: Option<&'a PolicyDefinition>,
}

impl PolicyDeleted<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            policy = %self.policy,
            before = self.before.map(debug),
            "a policy was deleted"
        );
    }
}

/// An operator subscribed a user to a plan.
pub(super) struct SubscriptionChanged<'a> {
    pub(super) user: &'a UserId,
    pub(super) terms: SubscriptionTerms,
    /// The subscription as it was read just before.
    pub(super) before: Option<SubscriptionTerms>,
}

impl SubscriptionChanged<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            userId = %self.user,
            plan = %self.terms.plan,
            expiresAt = self.terms.expires_at.map(|at| display(rfc3339(at))),
            anchor = self.terms.anchor.map(display),
            before = self.before.map(|before| display(before.plan)),
            beforeExpiresAt = self.before.and_then(|before| before.expires_at).map(|at| display(rfc3339(at))),
            beforeAnchor = self.before.and_then(|before| before.anchor).map(display),
            "a subscription was changed"
        );
    }
}

/// An operator ended a subscription.
pub(super) struct SubscriptionEnded<'a> {
    pub(super) user: &'a UserId,
    pub(super) before: Option<SubscriptionTerms>,
}

impl SubscriptionEnded<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            userId = %self.user,
            before = self.before.map(|before| display(before.plan)),
            "a subscription was ended"
        );
    }
}

/// An operator changed the limits of a tier.
pub(super) struct TierChanged {
    pub(super) tier: Tier,
    pub(super) limits: TierLimits,
    /// The limits as this server knew them just before.
    pub(super) before: TierLimits,
}

impl TierChanged {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            tier = %self.tier,
            limits = ?self.limits,
            before = ?self.before,
            "a tier was changed"
        );
    }
}

/// An operator set the limits of a tier back to those of the settings.
pub(super) struct TierReset {
    pub(super) tier: Tier,
    pub(super) limits: TierLimits,
    /// The limits as this server knew them just before.
    pub(super) before: TierLimits,
}

impl TierReset {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            tier = %self.tier,
            limits = ?self.limits,
            before = ?self.before,
            "a tier was set back to the settings"
        );
    }
}

/// An operator switched the limits of AI calls on or off.
pub(super) struct LimitsSwitched {
    pub(super) is_enabled: bool,
    /// As this server knew it just before.
    pub(super) before: bool,
}

impl LimitsSwitched {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            enabled = self.is_enabled,
            before = self.before,
            "the limits of AI calls were switched"
        );
    }
}

/// An AI call was decided, or could not be. The caller learns why; no line is written for each.
#[derive(Clone, Copy)]
pub(super) enum CallDecided {
    Allowed,
    /// Allowed because limits are switched off.
    Unlimited,
    DeniedByDay,
    DeniedByMinute,
    /// The limit store failed.
    Failed,
}

impl CallDecided {
    pub(super) fn emit(self, metrics: &TierMetrics) {
        match self {
            Self::Allowed => &metrics.allowed,
            Self::Unlimited => &metrics.disabled,
            Self::DeniedByDay => &metrics.denied_daily,
            Self::DeniedByMinute => &metrics.denied_minute,
            Self::Failed => &metrics.failed,
        }
        .inc();
    }
}

/// A check of policies was decided.
pub(super) struct CheckDecided {
    pub(super) is_allowed: bool,
    /// How many shadow policies in it would have denied it.
    pub(super) shadow_denied: u64,
}

impl CheckDecided {
    pub(super) fn emit(self, metrics: &TierMetrics) {
        metrics.count_check(self.is_allowed, self.shadow_denied);
    }
}

/// The limit store did not decide a check. The caller's response has its line.
pub(super) struct CheckFailed;

impl CheckFailed {
    pub(super) fn emit(self, metrics: &TierMetrics) {
        metrics.check_failed.inc();
    }
}

/// A token names an unknown plan. Written at most once a second, and counted each time.
pub(super) struct UnknownPlanClaim<'a> {
    pub(super) claimed: &'a str,
}

impl UnknownPlanClaim<'_> {
    pub(super) fn emit(self, metrics: &TierMetrics) {
        static TOKENS: LogThrottle = LogThrottle::new();
        metrics.unknown_plan_claims.inc();
        if let Some(suppressed) = TOKENS.permit() {
            tracing::warn!(
                claimed = self.claimed,
                suppressed,
                "a token claims an unknown plan; the free plan applies. Have its issuer use a plan of docs/tier.md, or \
                 change tier.plan_claim"
            );
        }
    }
}

/// The store did not return a user's plan. Written at most once a second.
pub(super) struct PlanUnavailable<'a> {
    pub(super) error: &'a Error,
}

impl PlanUnavailable<'_> {
    pub(super) fn emit(self) {
        static OUTAGE: LogThrottle = LogThrottle::new();
        if let Some(suppressed) = OUTAGE.permit() {
            tracing::warn!(
                error = %self.error.with_causes(),
                suppressed,
                "cannot read the plan of a user; until the store answers, the last known plan applies, else that of the \
                 token's claim or the free plan"
            );
        }
    }
}

/// The store did not return the changes of other servers. Written at most once a second.
pub(super) struct DefinitionSyncFailed<'a> {
    pub(super) error: &'a Error,
}

impl DefinitionSyncFailed<'_> {
    pub(super) fn emit(self) {
        static OUTAGE: LogThrottle = LogThrottle::new();
        if let Some(suppressed) = OUTAGE.permit() {
            tracing::warn!(
                error = %self.error.with_causes(),
                suppressed,
                "cannot read changes of tiers, policies and plans on other servers; trying again"
            );
        }
    }
}

/// The subscriptions of users who have not called yet are known.
pub(super) struct SubscriptionsPreloaded {
    pub(super) count: usize,
}

impl SubscriptionsPreloaded {
    pub(super) fn emit(self) {
        tracing::info!(count = self.count, "read the subscriptions of the store");
    }
}

/// The store did not return all subscriptions at the start.
pub(super) struct PreloadFailed<'a> {
    pub(super) error: &'a Error,
}

impl PreloadFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            error = %self.error.with_causes(),
            "cannot read all subscriptions at the start; the others are read when their users call"
        );
    }
}

/// The store did not delete old holds, permits or subscriptions.
pub(super) struct PurgeFailed<'a> {
    pub(super) error: &'a Error,
}

impl PurgeFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            error = %self.error.with_causes(),
            "cannot delete expired holds, permits and subscriptions; trying again"
        );
    }
}

/// Permits were taken that no caller has, and the store did not delete them.
pub(super) struct PermitsNotVoided<'a> {
    pub(super) error: &'a Error,
}

impl PermitsNotVoided<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            error = %self.error.with_causes(),
            "cannot delete the permits of checks that were denied or not answered; they stay in use until the store answers, or \
             their time is over"
        );
    }
}

/// Too many permits that no caller has wait to be deleted.
pub(super) struct PermitsLeft;

impl PermitsLeft {
    pub(super) fn emit(self) {
        tracing::warn!(
            "too many permits of checks that were not answered wait to be deleted; those of one more stay in use until their \
             time is over"
        );
    }
}

/// A hold was settled, but the difference between estimate and cost was neither charged nor given back.
pub(super) struct HoldCorrectionFailed<'a> {
    pub(super) policy: &'a PolicyName,
    pub(super) error: &'a Error,
}

impl HoldCorrectionFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(
            policy = %self.policy,
            error = %self.error.with_causes(),
            "a hold was settled, but its estimate stays spent: cannot correct it to the true cost"
        );
    }
}

#[cfg(test)]
mod tests {
    use weir_core::Timestamp;
    use weir_core::tier::Plan;

    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn an_unknown_plan_is_counted_and_logged() {
        let metrics = TierMetrics::default();
        let lines = capture(|| UnknownPlanClaim { claimed: "GOLD" }.emit(&metrics));
        assert!(lines.contains("claimed=\"GOLD\"") && lines.contains("unknown plan"), "{lines}");
        assert_eq!(metrics.unknown_plan_claims.get(), 1);
    }

    #[test]
    fn a_changed_subscription_is_logged_with_user_and_plan() {
        let user = UserId::parse("alice").unwrap();
        let lines = capture(|| {
            let terms = SubscriptionTerms {
                expires_at: Some(Timestamp::from_seconds(1_767_225_600)),
                anchor: "2026-01-31".parse().ok(),
                ..Plan::ProMonthly.into()
            };
            SubscriptionChanged { user: &user, terms, before: Some(Plan::Free.into()) }.emit()
        });
        assert!(lines.contains("userId=alice") && lines.contains("plan=PRO_MONTHLY"), "{lines}");
        assert!(lines.contains("expiresAt=2026-01-01T00:00:00Z anchor=2026-01-31"), "{lines}");
        assert!(lines.contains("before=FREE") && !lines.contains("beforeExpiresAt"), "{lines}");
    }
}
