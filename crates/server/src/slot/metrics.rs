//! Metrics of slot: assignments and dispatches.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::telemetry::labels::OutcomeLabels;

/// Metrics of slot. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SlotMetrics {
    /// Events that asked for a slot, by what became of them.
    pub assignments: Family<OutcomeLabels, Counter>,
    /// Slots dispatched when their time came.
    pub dispatched: Counter,
}

impl SlotMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("slot_assignments", "Events that asked for a slot, by outcome", self.assignments.clone());
        let dispatched = "Slots published when their time came";
        r.register("slot_dispatched", dispatched, self.dispatched.clone());
    }
}
