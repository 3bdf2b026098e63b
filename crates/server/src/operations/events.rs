//! What happens in operations: each event writes its log line and moves its metric.

use weir_store::Error;
use weir_store::book::Recount;

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

/// All rows were read and compared with the books.
pub(super) struct RecountFinished<'a> {
    pub(super) recount: &'a Recount,
}

impl RecountFinished<'_> {
    pub(super) fn emit(self) {
        let Recount { started_at, finished_at, differences, .. } = self.recount;
        let seconds = finished_at.since(*started_at).as_secs_f64();
        if differences.is_empty() {
            tracing::info!(seconds, "all rows were read: the books are right");
        }
        for difference in differences {
            tracing::error!(
                book = difference.book,
                what = difference.what,
                "the books are wrong: keep the data and the logs, and report it, unless rows were edited by hand"
            );
        }
    }
}

/// Rows could not be read for a comparison with the books.
pub(super) struct RecountFailed<'a> {
    pub(super) error: &'a Error,
}

impl RecountFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot read all rows to compare them with the books; trying again later");
    }
}

/// The counts of rows could not be completed or summed up. Logged once per outage.
pub(super) struct CountsFailed<'a> {
    pub(super) error: &'a Error,
}

impl CountsFailed<'_> {
    pub(super) fn emit(self) {
        tracing::warn!(error = %self.error.with_causes(), "cannot sum up the counts of rows; trying again");
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
