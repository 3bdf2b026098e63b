//! The registry of all metrics, and those of HTTP, lanes and engines. Each capability defines its own in its `metrics`
//! module. Labels come from fixed sets (routes, methods, outcomes), never from callers.

mod exposition;

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use weir_store::LaneMetrics;
use weir_store::engine_calls::EngineCalls;
use weir_store::quota::CacheMetrics;
use weir_store::sale::LedgerMetrics;
use weir_store::writer_metrics::WriterMetrics;

pub(crate) use self::exposition::MetricsFormat;
use crate::gateway::metrics::GatewayMetrics;
use crate::operations::metrics::OperationsMetrics;
use crate::quota::metrics::QuotaMetrics;
use crate::request::metrics::RequestMetrics;
use crate::sale::metrics::SaleMetrics;
use crate::slot::metrics::SlotMetrics;
use crate::telemetry::decisions::{CAPABILITIES, CapabilityLatency, DecisionTotals};
use crate::telemetry::labels::{OutcomeLabels, method_label};
use crate::telemetry::near_limits::NearLimits;
use crate::tier::metrics::TierMetrics;

/// All metrics of the process, and the registry that prints them.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Family<RouteLabels, Histogram, fn() -> Histogram>,
    lane_batch_size: Family<LaneLabels, Histogram, fn() -> Histogram>,
    lane_wait_seconds: Family<LaneLabels, Histogram, fn() -> Histogram>,
    lane_depth: Family<LaneLabels, Gauge>,
    lane_rejected: Family<LaneLabels, Counter>,
    lane_abandoned: Family<LaneLabels, Counter>,
    pub quota: QuotaMetrics,
    pub slot: SlotMetrics,
    pub request: RequestMetrics,
    pub tier: TierMetrics,
    pub gateway: GatewayMetrics,
    pub sale: SaleMetrics,
    pub operations: OperationsMetrics,
    sqlite_writer: WriterMetrics,
    /// Open connections.
    pub connections: Gauge,
    /// Connections that arrived while `http.max_connections` were open.
    pub connections_held: Counter,
    /// Bytes that unfinished requests occupy.
    pub buffered_bytes: Gauge,
    /// Open event streams and long polls.
    pub long_lived: Gauge,
    shortages: Family<ShortageLabels, Counter>,
    spans: Family<OutcomeLabels, Counter>,
    /// For the console; not shown by `/metrics`.
    pub(crate) latency: CapabilityLatency,
    /// As [`Self::latency`].
    pub(crate) near_limits: Arc<NearLimits>,
}

/// A resource that ran out, so that a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// Memory for unfinished requests (`http.max_buffered`).
    Memory,
    /// Connections (`http.max_connections`).
    Connections,
    /// Event streams and long polls (`http.max_streams`).
    Streams,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ShortageLabels {
    of: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: MethodLabel,
    route: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    route: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LaneLabels {
    lane: &'static str,
}

/// The lanes of each capability, in the order of [`CAPABILITIES`].
const LANES: [&[&str]; CAPABILITIES.len()] =
    [&["quota"], &["slot"], &["request"], &["tier", "permit"], &["sale"]];

/// An HTTP method, or `other` for one outside of the fixed set.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MethodLabel(&'static str);

impl EncodeLabelValue for MethodLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        encoder.write_str(self.0)
    }
}

impl MethodLabel {
    fn new(method: &Method) -> Self {
        Self(method_label(method))
    }
}

/// Buckets from 100 µs to 13 s, doubling.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 2.0, 18))
}

/// Buckets from 1 to 4,096, doubling.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 13))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(LedgerMetrics::default(), CacheMetrics::default(), WriterMetrics::default(), &[])
    }
}

impl Metrics {
    /// Creates and registers all metrics. The engines have created those passed in and update them.
    #[must_use]
    pub fn new(
        ledger: LedgerMetrics,
        quota_cache: CacheMetrics,
        sqlite_writer: WriterMetrics,
        engine_calls: &[EngineCalls],
    ) -> Self {
        let mut registry = Registry::with_prefix("weir");
        engine_calls.iter().for_each(|calls| calls.register(&mut registry));
        let metrics = Self {
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(seconds),
            lane_batch_size: Family::new_with_constructor(sizes),
            lane_wait_seconds: Family::new_with_constructor(seconds),
            lane_depth: Family::default(),
            lane_rejected: Family::default(),
            lane_abandoned: Family::default(),
            quota: QuotaMetrics::new(quota_cache),
            slot: SlotMetrics::default(),
            request: RequestMetrics::default(),
            tier: TierMetrics::default(),
            gateway: GatewayMetrics::default(),
            sale: SaleMetrics::new(ledger),
            sqlite_writer,
            operations: OperationsMetrics::default(),
            connections: Gauge::default(),
            connections_held: Counter::default(),
            buffered_bytes: Gauge::default(),
            long_lived: Gauge::default(),
            shortages: Family::default(),
            spans: Family::default(),
            latency: CapabilityLatency::default(),
            near_limits: Arc::default(),
            registry: Registry::default(),
        };
        metrics.register(&mut registry);
        Self { registry, ..metrics }
    }

    fn register(&self, r: &mut Registry) {
        self.quota.register(r);
        self.slot.register(r);
        self.request.register(r);
        self.tier.register(r);
        self.gateway.register(r);
        self.sale.register(r);
        self.operations.register(r);
        r.register(
            "http_requests",
            "Requests that got a response, by method, route and status",
            self.requests.clone(),
        );
        r.register(
            "http_request_seconds",
            "Time from a request to its response, in seconds",
            self.request_seconds.clone(),
        );
        r.register("http_connections", "Open connections", self.connections.clone());
        let held = "Connections that arrived while http.max_connections were open";
        r.register("http_connections_held", held, self.connections_held.clone());
        let buffered = "Memory that unfinished requests occupy, in bytes";
        r.register("http_buffered_bytes", buffered, self.buffered_bytes.clone());
        let long_lived = "Open event streams and long polls";
        r.register("http_long_lived", long_lived, self.long_lived.clone());
        let shortages = "Requests refused because a resource ran out: memory, connections or streams";
        r.register("http_shortages", shortages, self.shortages.clone());
        let spans =
            "Spans of sampled traces, by what became of them: exported, dropped for lack of room, or failed";
        r.register("trace_spans", spans, self.spans.clone());
        r.register("lane_batch_size", "Commands in each batch", self.lane_batch_size.clone());
        let wait = "Wait of the oldest command of each batch, in seconds";
        r.register("lane_wait_seconds", wait, self.lane_wait_seconds.clone());
        r.register("lane_depth", "Commands waiting behind the last batch", self.lane_depth.clone());
        r.register(
            "lane_rejected",
            "Commands refused because their lane was full",
            self.lane_rejected.clone(),
        );
        let abandoned = "Commands dropped because their caller disconnected before their batch started";
        r.register("lane_abandoned", abandoned, self.lane_abandoned.clone());
        let WriterMetrics { turn_seconds, long_turns, commit_seconds } = &self.sqlite_writer;
        let held = "How long each turn of a job occupied the SQLite writer, in seconds";
        r.register("sqlite_writer_held_seconds", held, turn_seconds.clone());
        let too_long = "Turns that occupied the SQLite writer for more than 50 ms";
        r.register("sqlite_writer_held_too_long", too_long, long_turns.clone());
        let commit = "Duration of each SQLite commit, in seconds";
        r.register("sqlite_writer_commit_seconds", commit, commit_seconds.clone());
    }

    /// Returns the metrics of one set of lanes.
    #[must_use]
    pub fn lane(&self, lane: &'static str) -> LaneMetrics {
        let labels = LaneLabels { lane };
        LaneMetrics {
            batch_size: self.lane_batch_size.get_or_create_owned(&labels),
            wait_seconds: self.lane_wait_seconds.get_or_create_owned(&labels),
            depth: self.lane_depth.get_or_create_owned(&labels),
            rejected: self.lane_rejected.get_or_create_owned(&labels),
            abandoned: self.lane_abandoned.get_or_create_owned(&labels),
        }
    }

    /// Counts a request that got a response. `route` is the pattern that it matched.
    pub fn record_request(&self, method: &Method, route: &'static str, status: StatusCode, took: Duration) {
        let labels = RequestLabels { method: MethodLabel::new(method), route, status: status.as_u16() };
        self.requests.get_or_create(&labels).inc();
        self.request_seconds.get_or_create(&RouteLabels { route }).observe(took.as_secs_f64());
        self.latency.record(route, took);
    }

    /// What each capability has decided since the start, in the order of [`CAPABILITIES`].
    pub(crate) fn decisions(&self) -> [DecisionTotals; CAPABILITIES.len()] {
        [
            self.quota.decisions(),
            self.slot.decisions(),
            self.request.accept.decisions(),
            self.tier.decisions(),
            self.sale.decisions(),
        ]
    }

    /// How many commands each capability's lanes last left waiting, in the same order.
    pub(crate) fn waiting(&self) -> [u64; CAPABILITIES.len()] {
        LANES.map(|names| {
            let depth = |lane: &'static str| self.lane_depth.get_or_create(&LaneLabels { lane }).get();
            names.iter().copied().map(depth).map(|depth| u64::try_from(depth).unwrap_or(0)).sum()
        })
    }

    /// Returns the counter of spans with an outcome, one of a fixed set of words.
    #[must_use]
    pub(crate) fn spans(&self, outcome: &'static str) -> Counter {
        self.spans.get_or_create_owned(&OutcomeLabels { outcome })
    }

    /// Counts a refused request.
    pub fn record_shortage(&self, shortage: Shortage) {
        self.shortage(shortage).inc();
    }

    /// Returns the counter of requests refused because of one shortage.
    #[must_use]
    pub fn shortage(&self, shortage: Shortage) -> Counter {
        let of = match shortage {
            Shortage::Memory => "memory",
            Shortage::Connections => "connections",
            Shortage::Streams => "streams",
        };
        self.shortages.get_or_create_owned(&ShortageLabels { of })
    }

    /// Prints all metrics.
    #[must_use]
    pub fn encode(&self, format: MetricsFormat) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail. If an encoder fails anyway, the text has what came before it.
        let _ = text::encode(&mut text, &self.registry);
        match format {
            MetricsFormat::OpenMetrics => text,
            MetricsFormat::PrometheusText => exposition::to_prometheus_text(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::labels::DownstreamLabels;

    const ALERTS: &str = include_str!("../../../../deploy/prometheus/alerts.yml");

    #[test]
    fn alerts_use_metrics_that_exist() {
        let engines = ["postgresql", "sqlite", "redis", "redis_sale", "kafka"].map(EngineCalls::new);
        engines.iter().for_each(|calls| drop(calls.start("call")));
        let metrics = Metrics::new(
            LedgerMetrics::default(),
            CacheMetrics::default(),
            WriterMetrics::default(),
            &engines,
        );
        metrics.operations.show_every_gauge();
        metrics.operations.show_engine("sqlite", true);
        metrics.record_request(&Method::GET, "/", StatusCode::OK, Duration::ZERO);
        metrics.request.accept.record("accepted", Duration::ZERO);
        let _ = metrics.lane("request");
        let _ = metrics.operations.clock_steps("system");
        let labels = DownstreamLabels { downstream: "default".to_owned() };
        metrics.request.work.breaker_state.get_or_create(&labels).set(0);
        let shown = metrics.encode(MetricsFormat::OpenMetrics);
        let words = ALERTS.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let names: Vec<&str> = words.filter(|word| word.starts_with("weir_")).collect();
        assert!(names.len() >= 6);
        for name in names {
            let family =
                ["_bucket", "_count", "_total"].iter().fold(name, |name, end| name.trim_end_matches(end));
            assert!(shown.contains(&format!("# TYPE {family} ")), "{name}");
        }
        for (histogram, threshold) in [("accept", "0.12"), ("accept", "0.25"), ("read", "0.08")] {
            let bucket = format!("weir_request_{histogram}_latency_seconds_bucket{{le=\"{threshold}\"}}");
            assert!(
                shown.contains(&bucket),
                "a quantile is exact at {threshold} s only if a bucket ends there"
            );
        }
    }

    #[test]
    fn the_worker_of_requests_has_the_documented_metric_names() {
        let shown = Metrics::default().encode(MetricsFormat::OpenMetrics);
        for name in ["worker_processing_latency_seconds", "worker_retry_count"] {
            assert!(shown.contains(&format!("# TYPE weir_{name} ")), "{name}");
        }
    }
}
