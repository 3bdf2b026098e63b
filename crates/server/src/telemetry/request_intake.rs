//! What accepting requests tells about itself.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::telemetry::metrics::OutcomeLabels;

/// Submissions by what became of them, how long they took, and what waits for an operator.
#[derive(Clone, Debug)]
pub struct AcceptMetrics {
    accepts: Family<OutcomeLabels, Counter>,
    latency_seconds: Histogram,
    conflicts: Counter,
    /// Dead letters of request there are now.
    pub dlq_depth: Gauge,
}

impl Default for AcceptMetrics {
    fn default() -> Self {
        Self {
            accepts: Family::default(),
            // From 0.25 ms to 8 s, doubling.
            latency_seconds: Histogram::new(exponential_buckets(0.000_25, 2.0, 16)),
            conflicts: Counter::default(),
            dlq_depth: Gauge::default(),
        }
    }
}

impl AcceptMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("request_accept", "Submissions by outcome", self.accepts.clone());
        let latency = "Time from a submission to its answer, in seconds";
        r.register("request_accept_latency_seconds", latency, self.latency_seconds.clone());
        let conflicts = "Submissions under a key that was used for another payload";
        r.register("idempotency_conflict", conflicts, self.conflicts.clone());
        r.register("dlq_depth", "Requests that are dead letters now", self.dlq_depth.clone());
    }

    /// Counts one submission. `outcome` is one of a few fixed words.
    pub fn record(&self, outcome: &'static str, took: Duration) {
        self.accepts.get_or_create(&OutcomeLabels { outcome }).inc();
        self.latency_seconds.observe(took.as_secs_f64());
        if outcome == "conflict" {
            self.conflicts.inc();
        }
    }
}
