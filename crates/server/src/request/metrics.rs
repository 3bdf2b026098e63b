//! Metrics of request: accepting requests and working on them.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::telemetry::labels::OutcomeLabels;

/// Metrics of request. Clones share them.
#[derive(Clone, Debug)]
pub struct RequestMetrics {
    /// Requests accepted and refused.
    pub accept: AcceptMetrics,
    /// How the work on requests goes.
    pub work: WorkMetrics,
}

impl Default for RequestMetrics {
    fn default() -> Self {
        let accept = AcceptMetrics::default();
        let work = WorkMetrics { dlq_depth: accept.dlq_depth.clone(), ..WorkMetrics::default() };
        Self { accept, work }
    }
}

impl RequestMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        self.accept.register(r);
        self.work.register(r);
    }
}

/// Edges of the buckets of acceptance latency. The objectives are among them (95 % within 120 ms, 99 % within 250 ms): a quantile
/// is interpolated between edges, so an alert is right only if its threshold is one.
const ACCEPT_LATENCY_EDGES_S: [f64; 16] =
    [0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.12, 0.18, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0];

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
            latency_seconds: Histogram::new(ACCEPT_LATENCY_EDGES_S),
            conflicts: Counter::default(),
            dlq_depth: Gauge::default(),
        }
    }
}

impl AcceptMetrics {
    fn register(&self, r: &mut Registry) {
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

/// How the work on requests goes. Clones share it.
#[derive(Clone, Debug)]
pub struct WorkMetrics {
    /// From the claim of a request until its report is on disk, one attempt.
    pub processing_latency_seconds: Histogram,
    /// Attempts that have to be made again.
    pub retries: Counter,
    /// Requests that are dead letters; the same gauge as [`AcceptMetrics`] has.
    pub dlq_depth: Gauge,
    /// What the breaker of a downstream does: 0 lets all through, 1 lets probes through, 2 nothing.
    pub breaker_state: Family<DownstreamLabels, Gauge>,
    /// When the reconciler last looked, in seconds since 1970.
    pub reconciler_heartbeat_seconds: Gauge,
    /// For how long the oldest request has waited to be given to the broker.
    pub reconciler_backlog_age_seconds: Gauge,
    /// Webhooks sent, by what became of them.
    pub webhooks: Family<OutcomeLabels, Counter>,
}

/// A downstream of the settings.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DownstreamLabels {
    /// Its name there: never one that a caller gave.
    pub downstream: String,
}

impl Default for WorkMetrics {
    fn default() -> Self {
        Self {
            // From 1 ms to half a minute, doubling.
            processing_latency_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
            retries: Counter::default(),
            dlq_depth: Gauge::default(),
            breaker_state: Family::default(),
            reconciler_heartbeat_seconds: Gauge::default(),
            reconciler_backlog_age_seconds: Gauge::default(),
            webhooks: Family::default(),
        }
    }
}

impl WorkMetrics {
    fn register(&self, r: &mut Registry) {
        let latency = "From the claim of a request to its report on disk, one attempt, in seconds";
        r.register("worker_processing_latency_seconds", latency, self.processing_latency_seconds.clone());
        r.register("worker_retry_count", "Attempts that have to be made again", self.retries.clone());
        let breaker = "What a downstream's breaker lets through: 0 all, 1 probes, 2 nothing";
        r.register("request_breaker_state", breaker, self.breaker_state.clone());
        let heartbeat = "When the reconciler last looked, in seconds since 1970";
        r.register("reconciler_heartbeat_seconds", heartbeat, self.reconciler_heartbeat_seconds.clone());
        let age = "How long the oldest request has waited for the broker, in seconds";
        r.register("reconciler_backlog_age_seconds", age, self.reconciler_backlog_age_seconds.clone());
        r.register("request_webhooks", "Webhooks sent, by outcome", self.webhooks.clone());
    }
}
