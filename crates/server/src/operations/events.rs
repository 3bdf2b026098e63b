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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::log_capture::capture;

    #[test]
    fn a_step_of_a_clock_is_counted_and_logged() {
        let metrics = OperationsMetrics::default();
        let lines = capture(|| ClockStepped { clock: "system", seconds: -7_200.0 }.emit(&metrics));
        assert!(lines.contains("the clock of system has stepped by -7200.0 s"), "{lines}");
        assert_eq!(metrics.clock_steps("system").get(), 1);
    }
}
