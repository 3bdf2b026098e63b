//! Metrics for Prometheus. Labels come from fixed sets (routes, methods, outcomes), never from callers.

mod exposition;

use std::fmt::Write;
use std::time::Duration;

use http::{Method, StatusCode};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use weir_store::LaneMetrics;
use weir_store::quota::CacheMetrics;
use weir_store::sale::LedgerMetrics;
use weir_store::writer_metrics::WriterMetrics;

pub(crate) use self::exposition::MetricsFormat;
use crate::gateway::metrics::GatewayMetrics;
use crate::quota::metrics::QuotaMetrics;
use crate::request::metrics::RequestMetrics;
use crate::sale::metrics::SaleMetrics;
use crate::slot::metrics::SlotMetrics;
use crate::tier::metrics::TierMetrics;

/// Every metric, and the registry that prints them.
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
    /// Metrics of quota.
    pub quota: QuotaMetrics,
    /// Metrics of slot.
    pub slot: SlotMetrics,
    /// Metrics of request.
    pub request: RequestMetrics,
    /// Metrics of tier.
    pub tier: TierMetrics,
    /// Metrics of forwarded AI calls.
    pub gateway: GatewayMetrics,
    /// Metrics of sale.
    pub sale: SaleMetrics,
    sqlite_writer: WriterMetrics,
    engine_up: Family<EngineLabels, Gauge>,
    /// Steps of the clocks that decide.
    pub(crate) clock_steps: ClockSteps,
    /// Connections open now.
    pub connections: Gauge,
    /// Connections that came while the most allowed were open.
    pub connections_held: Counter,
    /// Bytes that unfinished requests hold now.
    pub buffered_bytes: Gauge,
    /// Event streams and long polls now.
    pub long_lived: Gauge,
    shortages: Family<ShortageLabels, Counter>,
}

/// What there was too little of for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// Memory for unfinished requests (`http.max_buffered`).
    Memory,
    /// Connections (`http.max_connections`).
    Connections,
    /// Places for event streams and long polls (`http.max_streams`).
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    engine: &'static str,
}

/// Steps of clocks.
pub(crate) type ClockSteps = Family<ClockLabels, Counter>;

/// Whose clock it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ClockLabels {
    /// `system`, or the name of an engine.
    pub(crate) clock: &'static str,
}

/// A method, if it is one we know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct MethodLabel(&'static str);

impl EncodeLabelValue for MethodLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        encoder.write_str(self.0)
    }
}

impl MethodLabel {
    fn of(method: &Method) -> Self {
        Self(match *method {
            Method::GET => "GET",
            Method::POST => "POST",
            Method::PUT => "PUT",
            Method::DELETE => "DELETE",
            Method::HEAD => "HEAD",
            Method::OPTIONS => "OPTIONS",
            Method::PATCH => "PATCH",
            _ => "other",
        })
    }
}

/// From 100 µs to 13 s, doubling.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 2.0, 18))
}

/// From 1 to 4,096, doubling.
fn sizes() -> Histogram {
    Histogram::new(exponential_buckets(1.0, 2.0, 13))
}

impl Default for Metrics {
    fn default() -> Self {
        Self::of(LedgerMetrics::default(), CacheMetrics::default(), WriterMetrics::default())
    }
}

impl Metrics {
    /// All of them, with those by which engines tell about themselves.
    #[must_use]
    pub fn of(follow: LedgerMetrics, quota_cache: CacheMetrics, sqlite_writer: WriterMetrics) -> Self {
        let mut registry = Registry::with_prefix("weir");
        let metrics = Self {
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(seconds),
            lane_batch_size: Family::new_with_constructor(sizes),
            lane_wait_seconds: Family::new_with_constructor(seconds),
            lane_depth: Family::default(),
            lane_rejected: Family::default(),
            lane_abandoned: Family::default(),
            quota: QuotaMetrics { cache: quota_cache, ..QuotaMetrics::default() },
            slot: SlotMetrics::default(),
            request: RequestMetrics::default(),
            tier: TierMetrics::default(),
            gateway: GatewayMetrics::default(),
            sale: SaleMetrics { follow, ..SaleMetrics::default() },
            sqlite_writer,
            engine_up: Family::default(),
            clock_steps: ClockSteps::default(),
            connections: Gauge::default(),
            connections_held: Counter::default(),
            buffered_bytes: Gauge::default(),
            long_lived: Gauge::default(),
            shortages: Family::default(),
            registry: Registry::default(),
        };
        metrics.register(&mut registry);
        Self { registry, ..metrics }
    }
}

impl Metrics {
    fn register(&self, r: &mut Registry) {
        self.quota.register(r);
        self.slot.register(r);
        self.request.register(r);
        self.tier.register(r);
        self.gateway.register(r);
        self.sale.register(r);
        r.register("http_requests", "Requests answered", self.requests.clone());
        r.register("http_request_seconds", "Time to answer, in seconds", self.request_seconds.clone());
        r.register("http_connections", "Connections open now", self.connections.clone());
        let held = "Connections that came while the most allowed were open";
        r.register("http_connections_held", held, self.connections_held.clone());
        let buffered = "Memory that unfinished requests hold now, in bytes";
        r.register("http_buffered_bytes", buffered, self.buffered_bytes.clone());
        let long_lived = "Event streams and calls that wait for a change, open now";
        r.register("http_long_lived", long_lived, self.long_lived.clone());
        let shortages = "Requests refused because there was too little of something";
        r.register("http_shortages", shortages, self.shortages.clone());
        r.register("lane_batch_size", "Commands in each batch", self.lane_batch_size.clone());
        let wait = "How long the oldest command of each batch waited, in seconds";
        r.register("lane_wait_seconds", wait, self.lane_wait_seconds.clone());
        r.register("lane_depth", "Commands waiting behind the last batch", self.lane_depth.clone());
        r.register("lane_rejected", "Commands refused by a full lane", self.lane_rejected.clone());
        let abandoned = "Commands whose caller had gone before their batch";
        r.register("lane_abandoned", abandoned, self.lane_abandoned.clone());
        r.register("engine_up", "Whether an engine answers: 1 or 0", self.engine_up.clone());
        r.register(
            "clock_steps",
            "Steps of more than a second of the clocks that decide: system, postgresql, redis",
            self.clock_steps.clone(),
        );
        let WriterMetrics { turn_seconds, long_turns, commit_seconds } = &self.sqlite_writer;
        let held = "How long each turn of a job held the writer of SQLite, in seconds";
        r.register("sqlite_writer_held_seconds", held, turn_seconds.clone());
        let too_long = "Turns that held the writer of SQLite for more than 50 ms";
        r.register("sqlite_writer_held_too_long", too_long, long_turns.clone());
        let commit = "How long each commit of SQLite took, in seconds";
        r.register("sqlite_writer_commit_seconds", commit, commit_seconds.clone());
    }

    /// The handles one set of lanes reports through.
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

    /// Counts one answered request. `route` is the pattern it matched.
    pub fn record_request(&self, method: &Method, route: &'static str, status: StatusCode, took: Duration) {
        let labels = RequestLabels { method: MethodLabel::of(method), route, status: status.as_u16() };
        self.requests.get_or_create(&labels).inc();
        self.request_seconds.get_or_create(&RouteLabels { route }).observe(took.as_secs_f64());
    }

    /// Counts one request that was refused for want of something.
    pub fn record_shortage(&self, shortage: Shortage) {
        self.shortage(shortage).inc();
    }

    /// The counter of requests that were refused for want of something.
    #[must_use]
    pub fn shortage(&self, shortage: Shortage) -> Counter {
        let of = match shortage {
            Shortage::Memory => "memory",
            Shortage::Connections => "connections",
            Shortage::Streams => "streams",
        };
        self.shortages.get_or_create_owned(&ShortageLabels { of })
    }

    /// Takes note of whether an engine answers.
    pub fn record_engine(&self, engine: &'static str, up: bool) {
        self.engine_up.get_or_create(&EngineLabels { engine }).set(i64::from(up));
    }

    /// Everything, as text.
    #[must_use]
    pub fn encode(&self, format: MetricsFormat) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail; an encoder that does has left what it could.
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
    use crate::request::metrics::DownstreamLabels;

    const ALERTS: &str = include_str!("../../../../deploy/prometheus/alerts.yml");

    #[test]
    fn alerts_are_about_metrics_that_there_are() {
        let metrics = Metrics::default();
        metrics.record_request(&Method::GET, "/", StatusCode::OK, Duration::ZERO);
        let _ = metrics.lane("request");
        drop(metrics.clock_steps.get_or_create(&ClockLabels { clock: "system" }));
        let labels = DownstreamLabels { downstream: "default".to_owned() };
        metrics.request.work.breaker_state.get_or_create(&labels).set(0);
        let shown = metrics.encode(MetricsFormat::OpenMetrics);
        let words = ALERTS.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let names: Vec<&str> = words.filter(|word| word.starts_with("weir_")).collect();
        assert!(names.len() >= 6);
        for name in names {
            let family = name.trim_end_matches("_bucket").trim_end_matches("_total");
            assert!(shown.contains(&format!("# TYPE {family} ")), "{name}");
        }
    }

    #[test]
    fn the_work_on_requests_has_the_names_of_its_design() {
        let shown = Metrics::default().encode(MetricsFormat::OpenMetrics);
        for name in ["worker_processing_latency_seconds", "worker_retry_count", "dlq_depth"] {
            assert!(shown.contains(&format!("# TYPE weir_{name} ")), "{name}");
        }
        assert_eq!(shown.matches("# TYPE weir_dlq_depth ").count(), 1);
    }
}
