//! What can happen while slots are dispatched: each event writes its log line.

use weir_store::Error;

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
}
