//! What happens in tier: each event writes its log line.

use weir_core::tier::{Plan, Tier, TierLimits};
use weir_core::{PolicyName, UserId};
use weir_store::Error;
use weir_store::tier::PolicySpec;

use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::request_context::LogIds;

/// A policy of the settings was not created, because there are too many.
pub(super) struct PolicyLeftOut<'a> {
    pub(super) policy: &'a PolicyName,
}

impl PolicyLeftOut<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(policy = %self.policy, "too many policies: this one of the settings was not created");
    }
}

/// An operator created or changed a policy.
pub(super) struct PolicyChanged<'a> {
    pub(super) policy: &'a PolicyName,
    pub(super) spec: &'a PolicySpec,
    /// The policy as this server knew it just before.
    pub(super) before: Option<&'a PolicySpec>,
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
            spec = ?self.spec,
            before = self.before.map(debug),
            "a policy was changed"
        );
    }
}

/// An operator deleted a policy.
pub(super) struct PolicyDeleted<'a> {
    pub(super) policy: &'a PolicyName,
    pub(super) before: Option<&'a PolicySpec>,
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
    pub(super) plan: Plan,
    /// The plan as it was read just before.
    pub(super) before: Option<Plan>,
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
            plan = %self.plan,
            before = self.before.map(display),
            "a subscription was changed"
        );
    }
}

/// An operator ended a subscription.
pub(super) struct SubscriptionEnded<'a> {
    pub(super) user: &'a UserId,
    pub(super) before: Option<Plan>,
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
            before = self.before.map(display),
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
                "cannot read the plan of a user; the free plan applies until the store answers"
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

/// The store did not delete old holds.
pub(super) struct HoldPurgeFailed<'a> {
    pub(super) error: &'a Error,
}

impl HoldPurgeFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot delete expired holds; trying again");
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
    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn a_changed_subscription_is_logged_with_user_and_plan() {
        let user = UserId::parse("alice").unwrap();
        let lines = capture(|| {
            SubscriptionChanged { user: &user, plan: Plan::ProMonthly, before: Some(Plan::Free) }.emit()
        });
        assert!(lines.contains("userId=alice") && lines.contains("plan=PRO_MONTHLY"), "{lines}");
        assert!(lines.contains("before=FREE"), "{lines}");
    }
}
