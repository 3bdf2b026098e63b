//! Metrics of operations: whether engines answer, and steps of clocks.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Clones share the metrics.
#[derive(Clone, Debug, Default)]
pub struct OperationsMetrics {
    engine_up: Family<EngineLabels, Gauge>,
    clock_steps: Family<ClockLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    engine: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClockLabels {
    /// `system`, or the name of an engine.
    clock: &'static str,
}

impl OperationsMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("engine_up", "Whether an engine answers: 1 or 0", self.engine_up.clone());
        let steps = "Steps of more than a second of the clocks that decide: system, postgresql, redis";
        r.register("clock_steps", steps, self.clock_steps.clone());
    }

    pub fn record_engine(&self, engine: &'static str, is_up: bool) {
        self.engine_up.get_or_create(&EngineLabels { engine }).set(i64::from(is_up));
    }

    /// The counter of a clock's steps. Creating it shows the metric with the value 0.
    pub(crate) fn clock_steps(&self, clock: &'static str) -> Counter {
        self.clock_steps.get_or_create_owned(&ClockLabels { clock })
    }
}
