//! What happens in operations: each event writes its log line and moves its metric.

use super::metrics::OperationsMetrics;

/// A clock that decides has stepped by more than a second.
pub(super) struct ClockStepped {
    /// `system`, or the name of an engine.
    pub(super) clock: &'static str,
    /// Negative if the clock was set back.
    pub(super) seconds: f64,
}

impl ClockStepped {
    pub(super) fn emit(self, metrics: &OperationsMetrics) {
        let Self { clock, seconds } = self;
        metrics.clock_steps(clock).inc();
        tracing::warn!(
            clock,
            stepped_by_seconds = seconds,
            "the clock of {clock} has stepped by {seconds:+.1} s; check its time synchronization"
        );
    }
}

/// Work that was deferred before the clock was set back is due again.
pub(super) struct DeferredWorkRescheduled {
    pub(super) count: u64,
}

impl DeferredWorkRescheduled {
    pub(super) fn emit(self) {
        tracing::warn!(
            count = self.count,
            "rescheduled work that was deferred before the clock was set back"
        );
    }
}
