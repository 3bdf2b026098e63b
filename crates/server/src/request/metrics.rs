//! Metrics of request: accepting requests and working on them.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use weir_core::request::state::RequestStatus;

use crate::telemetry::decisions::DecisionTotals;
use crate::telemetry::labels::{DownstreamLabels, OutcomeLabels};

/// Metrics of request. Clones share them.
#[derive(Clone, Debug)]
pub struct RequestMetrics {
    /// Metrics of submissions.
    pub accept: AcceptMetrics,
    /// Metrics of workers, webhooks and the reconciler.
    pub work: WorkMetrics,
}

impl Default for RequestMetrics {
    fn default() -> Self {
        let accept = AcceptMetrics::default();
        let work = WorkMetrics { finished: accept.finished.clone(), ..WorkMetrics::default() };
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

/// Edges of the buckets of the latency of reads. 80 ms, the objective for 95 %, is among them.
const READ_LATENCY_EDGES_S: [f64; 13] =
    [0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56];

/// Submissions by outcome, their latency, and that of reads.
#[derive(Clone, Debug)]
pub struct AcceptMetrics {
    accepts: Family<OutcomeLabels, Counter>,
    latency_seconds: Histogram,
    conflicts: Counter,
    read_latency_seconds: Histogram,
    /// Requests that have ended.
    pub finished: FinishedMetrics,
}

impl Default for AcceptMetrics {
    fn default() -> Self {
        Self {
            accepts: Family::default(),
            latency_seconds: Histogram::new(ACCEPT_LATENCY_EDGES_S),
            conflicts: Counter::default(),
            read_latency_seconds: Histogram::new(READ_LATENCY_EDGES_S),
            finished: FinishedMetrics::default(),
        }
    }
}

impl AcceptMetrics {
    fn register(&self, r: &mut Registry) {
        r.register("request_accept", "Submissions by outcome", self.accepts.clone());
        let latency = "Time from a submission to its response, in seconds";
        r.register("request_accept_latency_seconds", latency, self.latency_seconds.clone());
        let conflicts = "Submissions under a key that was already used for another payload";
        r.register("idempotency_conflict", conflicts, self.conflicts.clone());
        let reads = "Time to read the status of a request, without long polls, in seconds";
        r.register("request_read_latency_seconds", reads, self.read_latency_seconds.clone());
        self.finished.register(r);
    }

    /// Counts the reading of a status that did not wait for a change.
    pub(super) fn record_read(&self, duration: Duration) {
        self.read_latency_seconds.observe(duration.as_secs_f64());
    }

    /// All submissions so far.
    pub(crate) fn decisions(&self) -> DecisionTotals {
        let of = |outcome| self.accepts.get_or_create(&OutcomeLabels { outcome }).get();
        DecisionTotals {
            allowed: of("accepted") + of("replayed"),
            denied: of("limited") + of("conflict") + of("switched_off"),
            failed: of("failed"),
        }
    }

    /// Counts one submission. `outcome` is one of a few fixed words.
    pub fn record(&self, outcome: &'static str, duration: Duration) {
        self.accepts.get_or_create(&OutcomeLabels { outcome }).inc();
        self.latency_seconds.observe(duration.as_secs_f64());
        if outcome == "conflict" {
            self.conflicts.inc();
        }
    }

    #[cfg(test)]
    pub(super) fn submissions(&self, outcome: &'static str) -> u64 {
        self.accepts.get_or_create(&OutcomeLabels { outcome }).get()
    }
}

/// Requests that have ended, by status. Clones share the counters.
#[derive(Clone, Debug)]
pub struct FinishedMetrics(Family<StatusLabels, Counter>);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabels {
    status: &'static str,
}

/// All statuses are shown from the start, so that the first failure is an increase.
impl Default for FinishedMetrics {
    fn default() -> Self {
        let finished = Self(Family::default());
        for status in RequestStatus::ALL.into_iter().filter(|status| status.is_final()) {
            drop(finished.0.get_or_create(&StatusLabels { status: status.as_str() }));
        }
        finished
    }
}

impl FinishedMetrics {
    fn register(&self, r: &mut Registry) {
        r.register("request_finished", "Requests that have ended, by status", self.0.clone());
    }

    /// Counts a request if its new status is final.
    pub(super) fn record(&self, status: RequestStatus) {
        if status.is_final() {
            self.0.get_or_create(&StatusLabels { status: status.as_str() }).inc();
        }
    }

    /// How many requests have ended with a status.
    pub(crate) fn count(&self, status: RequestStatus) -> u64 {
        self.0.get_or_create(&StatusLabels { status: status.as_str() }).get()
    }
}

/// Metrics of workers, webhooks and the reconciler. Clones share them.
#[derive(Clone, Debug)]
pub struct WorkMetrics {
    /// From the claim of a job until its report is on disk, for each attempt.
    pub processing_latency_seconds: Histogram,
    /// Failed attempts that are followed by another one.
    pub retries: Counter,
    /// Calls made for jobs of workers that have not reported, which may have called before.
    pub duplicate_calls: Counter,
    /// Requests that have ended; the same counters as [`AcceptMetrics`] has.
    pub finished: FinishedMetrics,
    /// The state of a downstream's breaker: 0 closed, 1 half-open, 2 open.
    pub breaker_state: Family<DownstreamLabels, Gauge>,
    /// When the reconciler last ran, in seconds since 1970.
    pub reconciler_heartbeat_seconds: Gauge,
    webhooks: Family<OutcomeLabels, Counter>,
}

impl Default for WorkMetrics {
    fn default() -> Self {
        Self {
            // From 1 ms to half a minute, doubling.
            processing_latency_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
            retries: Counter::default(),
            duplicate_calls: Counter::default(),
            finished: FinishedMetrics::default(),
            breaker_state: Family::default(),
            reconciler_heartbeat_seconds: Gauge::default(),
            webhooks: Family::default(),
        }
    }
}

impl WorkMetrics {
    fn register(&self, r: &mut Registry) {
        let latency = "Time from the claim of a job to its report on disk, for each attempt, in seconds";
        r.register("worker_processing_latency_seconds", latency, self.processing_latency_seconds.clone());
        r.register(
            "worker_retry_count",
            "Failed attempts that are followed by another one",
            self.retries.clone(),
        );
        let duplicates =
            "Calls of downstreams that may be a repetition: the worker of the call before has not reported";
        r.register("request_duplicate_calls", duplicates, self.duplicate_calls.clone());
        let breaker = "State of a downstream's breaker: 0 closed, 1 half-open, 2 open";
        r.register("request_breaker_state", breaker, self.breaker_state.clone());
        let heartbeat = "When the reconciler last ran, in seconds since 1970";
        r.register("reconciler_heartbeat_seconds", heartbeat, self.reconciler_heartbeat_seconds.clone());
        r.register("request_webhooks", "Webhooks sent, by outcome", self.webhooks.clone());
    }

    /// Counts a webhook. `outcome` is one of a few fixed words.
    pub(super) fn count_webhook(&self, outcome: &'static str) {
        self.webhooks.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    #[cfg(test)]
    pub(super) fn webhooks(&self, outcome: &'static str) -> u64 {
        self.webhooks.get_or_create(&OutcomeLabels { outcome }).get()
    }
}
