//! What happens to slot configs, and while slots are assigned and dispatched: each event writes its log line and moves its metric.

use weir_core::ConfigName;
use weir_store::Error;
use weir_store::slot::{AssignOutcome, SlotConfig, window_text};

use super::metrics::SlotMetrics;
use crate::telemetry::request_context::LogIds;

/// An operator saved a new version of a slot config.
pub(super) struct ConfigChanged<'a> {
    pub(super) config: &'a SlotConfig,
    /// The active version as it was read just before.
    pub(super) before: Option<&'a SlotConfig>,
}

impl ConfigChanged<'_> {
    pub(super) fn emit(self) {
        let (ids, SlotConfig { name, version, pace, .. }) = (LogIds::current(), self.config);
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            configName = %name,
            version,
            maxPerWindow = pace.max_per_window(),
            windowSize = window_text(pace),
            before = self.before.map(describe),
            "a slot config was changed"
        );
    }
}

/// An operator deactivated a slot config.
pub(super) struct ConfigDeactivated<'a> {
    pub(super) name: &'a ConfigName,
    pub(super) before: Option<&'a SlotConfig>,
}

impl ConfigDeactivated<'_> {
    pub(super) fn emit(self) {
        let ids = LogIds::current();
        tracing::info!(
            httpRequestId = ids.http_request_id(),
            traceId = ids.trace_id(),
            callerScope = ids.caller_scope(),
            tenantId = ids.caller_tenant(),
            configName = %self.name,
            before = self.before.map(describe),
            "a slot config was deactivated"
        );
    }
}

fn describe(config: &SlotConfig) -> String {
    let SlotConfig { version, pace, .. } = config;
    format!("version={version} maxPerWindow={} windowSize={}", pace.max_per_window(), window_text(pace))
}

/// A slot was assigned to an event, or there is none. The caller learns why; no line is written for each.
pub(super) struct SlotDecided<'a> {
    pub(super) outcome: &'a AssignOutcome,
}

impl SlotDecided<'_> {
    pub(super) fn emit(self, metrics: &SlotMetrics) {
        metrics.record_assignment(self.outcome);
    }
}

/// The store did not decide a call, or a batch of an upload. The caller's response has its line.
pub(super) struct AssignmentFailed;

impl AssignmentFailed {
    pub(super) fn emit(self, metrics: &SlotMetrics) {
        metrics.failed.inc();
    }
}

/// Slots were published when their time came.
pub(super) struct SlotsDispatched {
    pub(super) count: usize,
}

impl SlotsDispatched {
    pub(super) fn emit(self, metrics: &SlotMetrics) {
        let Self { count } = self;
        if count > 0 {
            metrics.dispatched.inc_by(count as u64);
            tracing::debug!(count, "dispatched due slots");
        }
    }
}

/// Due slots could not be claimed, published or settled. Logged once per outage.
pub(super) struct DispatchFailed<'a> {
    pub(super) error: &'a Error,
}

impl DispatchFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot dispatch due slots; retrying until it succeeds");
    }
}

/// Slots were published after their lease had expired, so they are published again.
pub(super) struct LeaseExpired {
    pub(super) slots: usize,
}

impl LeaseExpired {
    pub(super) fn emit(self) {
        tracing::warn!(
            slots = self.slots,
            "due slots were not settled before their lease expired and will be dispatched again"
        );
    }
}

/// The store has deleted old slots, counters and versions of configs.
pub(super) struct SlotsPurged {
    pub(super) count: u64,
}

impl SlotsPurged {
    pub(super) fn emit(self) {
        tracing::debug!(purged = self.count, "deleted old slots, their counters and old versions of configs");
    }
}

/// The store did not delete old slots. Logged once per outage.
pub(super) struct PurgeFailed<'a> {
    pub(super) error: &'a Error,
}

impl PurgeFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot delete old slots; trying again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn a_failed_dispatch_is_logged_with_its_cause() {
        let error = Error::unavailable("kafka", "no broker");
        let line = capture(|| DispatchFailed { error: &error }.emit());
        assert!(line.contains("WARN") && line.contains("no broker"), "{line}");
    }

    #[test]
    fn dispatched_slots_are_counted_and_logged() {
        let metrics = SlotMetrics::default();
        let line = capture(|| SlotsDispatched { count: 4 }.emit(&metrics));
        assert!(line.contains("count=4") && line.contains("dispatched"), "{line}");
        assert_eq!(metrics.dispatched.get(), 4);
    }
}
