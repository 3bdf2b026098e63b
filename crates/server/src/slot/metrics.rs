//! Metrics of slot: assignments and dispatches.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use weir_store::slot::AssignOutcome;

use crate::telemetry::decisions::DecisionTotals;
use crate::telemetry::labels::OutcomeLabels;

/// Metrics of slot. The counter of each outcome is looked up once. Clones share the values.
#[derive(Clone, Debug)]
pub struct SlotMetrics {
    assignments: Family<OutcomeLabels, Counter>,
    new: Counter,
    existing: Counter,
    unknown_config: Counter,
    exhausted: Counter,
    /// Calls, or batches of an upload, that the store failed to decide.
    pub failed: Counter,
    /// Slots published by the dispatcher.
    pub dispatched: Counter,
}

impl Default for SlotMetrics {
    fn default() -> Self {
        let assignments = Family::default();
        let counter =
            |outcome| Family::<_, Counter>::get_or_create_owned(&assignments, &OutcomeLabels { outcome });
        Self {
            new: counter("new"),
            existing: counter("existing"),
            unknown_config: counter("unknown_config"),
            exhausted: counter("exhausted"),
            failed: counter("failed"),
            assignments,
            dispatched: Counter::default(),
        }
    }
}

impl SlotMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("slot_assignments", "Events that asked for a slot, by outcome", self.assignments.clone());
        let dispatched = "Slots published when their scheduled time came";
        r.register("slot_dispatched", dispatched, self.dispatched.clone());
    }

    /// All assignments so far.
    pub(crate) fn decisions(&self) -> DecisionTotals {
        DecisionTotals {
            allowed: self.new.get() + self.existing.get(),
            denied: self.exhausted.get(),
            failed: self.failed.get(),
        }
    }

    pub fn record_assignment(&self, outcome: &AssignOutcome) {
        match outcome {
            AssignOutcome::New(_) => &self.new,
            AssignOutcome::Existing(_) => &self.existing,
            AssignOutcome::UnknownConfig => &self.unknown_config,
            AssignOutcome::Exhausted => &self.exhausted,
            AssignOutcome::Recounting(_) => &self.failed,
        }
        .inc();
    }
}
