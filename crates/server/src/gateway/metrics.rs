//! What passing AI calls on tells about itself.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::telemetry::labels::OutcomeLabels;

/// Calls by what became of them, how long the upstream took, and tunnels.
#[derive(Clone, Debug)]
pub struct GatewayMetrics {
    calls: Family<OutcomeLabels, Counter>,
    first_byte_seconds: Histogram,
    /// Tunnels open now.
    pub tunnels: Gauge,
}

impl Default for GatewayMetrics {
    fn default() -> Self {
        Self {
            calls: Family::default(),
            // From 1 ms to 131 s, doubling.
            first_byte_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            tunnels: Gauge::default(),
        }
    }
}

impl GatewayMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("ai_calls", "AI calls passed on, by outcome", self.calls.clone());
        let first_byte = "Time until the upstream began its answer, in seconds";
        r.register("ai_first_byte_seconds", first_byte, self.first_byte_seconds.clone());
        r.register("ai_tunnels", "WebSockets open now", self.tunnels.clone());
    }

    /// Counts one call. `outcome` is one of a few fixed words.
    pub fn record(&self, outcome: &'static str, took: Duration) {
        self.calls.get_or_create(&OutcomeLabels { outcome }).inc();
        if outcome == "answered" {
            self.first_byte_seconds.observe(took.as_secs_f64());
        }
    }
}
