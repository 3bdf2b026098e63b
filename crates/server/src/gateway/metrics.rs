//! Metrics of forwarded AI calls.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::telemetry::labels::OutcomeLabels;

/// AI calls by outcome, time to first byte, and open tunnels. Clones share the metrics.
#[derive(Clone, Debug)]
pub struct GatewayMetrics {
    calls: Family<OutcomeLabels, Counter>,
    first_byte_seconds: Histogram,
    /// Open WebSocket tunnels.
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
        r.register("ai_calls", "AI calls by outcome", self.calls.clone());
        let first_byte = "Time until the upstream began its response, in seconds";
        r.register("ai_first_byte_seconds", first_byte, self.first_byte_seconds.clone());
        r.register("ai_tunnels", "Open WebSocket tunnels", self.tunnels.clone());
    }

    /// Counts a call that the upstream answered.
    pub(super) fn record_answered(&self, duration: Duration) {
        self.record("answered");
        self.first_byte_seconds.observe(duration.as_secs_f64());
    }

    /// Counts a call. `outcome` is one of a few fixed words.
    pub(super) fn record(&self, outcome: &'static str) {
        self.calls.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    #[cfg(test)]
    pub(super) fn calls(&self, outcome: &'static str) -> u64 {
        self.calls.get_or_create(&OutcomeLabels { outcome }).get()
    }
}
