//! Metrics of operations: whether engines answer, how long their calls take, steps of clocks, and the backlog in the store.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::Registry;
use weir_store::request::JobCounts;
use weir_store_redis::ScriptCounts;

use crate::telemetry::labels::DownstreamLabels;

/// How many topics have their dead letters counted.
pub(crate) const TOPICS_COUNTED: usize = 3;

/// Clones share the metrics.
#[derive(Clone, Debug, Default)]
pub struct OperationsMetrics {
    engine_up: Family<EngineLabels, Gauge>,
    clock_steps: Family<ClockLabels, Counter>,
    backlog: BacklogMetrics,
    redis_scripts: Optional<ConstCounter<u64>>,
    redis_slow_scripts: Optional<ConstCounter<u64>>,
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

/// Nothing is shown of a family without members.
#[derive(Clone, Debug, Default)]
struct BacklogMetrics {
    jobs: Family<JobLabels, Gauge>,
    oldest_waiting_seconds: Family<DownstreamLabels, Gauge>,
    dead_requests: Optional<ConstGauge<i64>>,
    oldest_pending_seconds: Optional<ConstGauge<i64>>,
    dead_letters: Family<TopicLabels, Gauge>,
    /// The downstreams that are shown.
    downstreams: Arc<Mutex<Vec<String>>>,
}

/// A metric without labels that is shown only while its value is known. Clones share it.
#[derive(Debug)]
struct Optional<M>(Arc<Mutex<Option<M>>>);

impl<M> Clone for Optional<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M> Default for Optional<M> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<M> Optional<M> {
    fn set(&self, metric: Option<M>) {
        *self.0.lock() = metric;
    }
}

impl<M: EncodeMetric + TypedMetric> EncodeMetric for Optional<M> {
    fn encode(&self, encoder: MetricEncoder<'_>) -> std::fmt::Result {
        self.0.lock().as_ref().map_or(Ok(()), |metric| metric.encode(encoder))
    }

    fn metric_type(&self) -> MetricType {
        M::TYPE
    }

    fn is_empty(&self) -> bool {
        self.0.lock().is_none()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JobLabels {
    /// Its name in the settings, never one from a caller, or `default`.
    downstream: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TopicLabels {
    topic: &'static str,
}

/// What there is to do, and what was given up.
pub(crate) struct BacklogCounts {
    pub(crate) jobs: Vec<JobCounts>,
    /// How long the oldest request has waited to be published to the broker.
    pub(crate) oldest_pending: Duration,
    pub(crate) dead_requests: u64,
    /// Dead letters of each topic.
    pub(crate) dead_letters: [(&'static str, u64); TOPICS_COUNTED],
}

impl OperationsMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("engine_up", "Whether an engine answers: 1 or 0", self.engine_up.clone());
        let steps = "Steps of more than a second of the clocks that decide: system, postgresql, redis";
        r.register("clock_steps", steps, self.clock_steps.clone());
        self.backlog.register(r);
        let scripts = "Scripts that Redis has executed since it started, of all its clients";
        r.register("redis_scripts", scripts, self.redis_scripts.clone());
        let slow = "Scripts that occupied Redis for more than a millisecond, of all its clients";
        r.register("redis_slow_scripts", slow, self.redis_slow_scripts.clone());
    }

    pub fn show_engine(&self, engine: &'static str, is_up: bool) {
        self.engine_up.get_or_create(&EngineLabels { engine }).set(i64::from(is_up));
    }

    /// The counter of a clock's steps. Creating it shows the metric with the value 0.
    pub(crate) fn clock_steps(&self, clock: &'static str) -> Counter {
        self.clock_steps.get_or_create_owned(&ClockLabels { clock })
    }

    #[cfg(test)]
    pub(crate) fn show_every_gauge(&self) {
        self.show_scripts(Some(ScriptCounts::default()));
        self.show_backlog(&BacklogCounts {
            jobs: vec![JobCounts::default()],
            oldest_pending: Duration::ZERO,
            dead_requests: 0,
            dead_letters: [("", 0); 3],
        });
    }

    pub(super) fn show_backlog(&self, counts: &BacklogCounts) {
        self.backlog.show(counts);
    }

    /// Shows how many scripts Redis has executed, or no values if that is unknown.
    pub(super) fn show_scripts(&self, counts: Option<ScriptCounts>) {
        self.redis_scripts.set(counts.map(|counts| ConstCounter::new(counts.executed)));
        self.redis_slow_scripts.set(counts.map(|counts| ConstCounter::new(counts.slow)));
    }

    /// Shows no values of the backlog, because none could be read.
    pub(super) fn hide_backlog(&self) {
        self.backlog.hide();
    }
}

impl BacklogMetrics {
    fn register(&self, r: &mut Registry) {
        let jobs = "Unfinished requests, by downstream and by whether they wait for a worker, are running, or are parked \
                    until later; 10,000 stands for more, too";
        r.register("request_jobs", jobs, self.jobs.clone());
        let oldest = "How long the request that waits longest for a worker has been due, in seconds";
        r.register("request_oldest_waiting_seconds", oldest, self.oldest_waiting_seconds.clone());
        r.register("dlq_depth", "Requests that are dead letters now", self.dead_requests.clone());
        let age = "How long the oldest request has waited to be published to the broker, in seconds";
        r.register("reconciler_backlog_age_seconds", age, self.oldest_pending_seconds.clone());
        let dead = "Messages of the queue that are dead letters now, by topic; 10,000 stands for more, too";
        r.register("dead_letters", dead, self.dead_letters.clone());
    }

    fn show(&self, counts: &BacklogCounts) {
        let gauge = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let mut downstreams = self.downstreams.lock();
        for gone in downstreams.iter().filter(|name| counts.jobs.iter().all(|jobs| jobs.downstream != **name))
        {
            self.remove(gone);
        }
        *downstreams = counts.jobs.iter().map(|jobs| jobs.downstream.clone()).collect();
        for jobs in &counts.jobs {
            let downstream = || shown_name(&jobs.downstream);
            for (state, count) in job_states(jobs) {
                let labels = JobLabels { downstream: downstream(), state };
                self.jobs.get_or_create(&labels).set(gauge(count));
            }
            let age = jobs.oldest_waiting.unwrap_or_default().as_secs();
            let labels = DownstreamLabels { downstream: downstream() };
            self.oldest_waiting_seconds.get_or_create(&labels).set(gauge(age));
        }
        self.dead_requests.set(Some(ConstGauge::new(gauge(counts.dead_requests))));
        self.oldest_pending_seconds.set(Some(ConstGauge::new(gauge(counts.oldest_pending.as_secs()))));
        for (topic, count) in counts.dead_letters {
            self.dead_letters.get_or_create(&TopicLabels { topic }).set(gauge(count));
        }
    }

    fn remove(&self, downstream: &str) {
        for (state, _) in job_states(&JobCounts::default()) {
            self.jobs.remove(&JobLabels { downstream: shown_name(downstream), state });
        }
        self.oldest_waiting_seconds.remove(&DownstreamLabels { downstream: shown_name(downstream) });
    }

    fn hide(&self) {
        self.downstreams.lock().clear();
        self.jobs.clear();
        self.oldest_waiting_seconds.clear();
        self.dead_requests.set(None);
        self.oldest_pending_seconds.set(None);
        self.dead_letters.clear();
    }
}

/// The default downstream has an empty name in the store.
pub(crate) fn shown_name(downstream: &str) -> String {
    if downstream.is_empty() { "default".to_owned() } else { downstream.to_owned() }
}

const fn job_states(jobs: &JobCounts) -> [(&'static str, u64); 3] {
    [("waiting", jobs.waiting), ("running", jobs.running), ("parked", jobs.parked)]
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    fn shown(metrics: &OperationsMetrics) -> String {
        let (mut registry, mut shown) = (Registry::default(), String::new());
        metrics.register(&mut registry);
        text::encode(&mut shown, &registry).unwrap();
        shown.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect()
    }

    fn counts(downstream: &str) -> BacklogCounts {
        BacklogCounts {
            jobs: vec![JobCounts {
                downstream: downstream.to_owned(),
                waiting: 3,
                running: 2,
                parked: 1,
                oldest_waiting: Some(Duration::from_millis(61_500)),
            }],
            oldest_pending: Duration::from_secs(7),
            dead_requests: 5,
            dead_letters: [("a", 1), ("b", 0), ("c", 0)],
        }
    }

    #[test]
    fn scripts_of_redis_are_shown_while_it_says() {
        let metrics = OperationsMetrics::default();
        metrics.show_scripts(Some(ScriptCounts { executed: 100, slow: 2 }));
        let lines = shown(&metrics);
        assert!(
            lines.contains("redis_scripts_total 100\n") && lines.contains("redis_slow_scripts_total 2\n"),
            "{lines}"
        );
        metrics.show_scripts(None);
        assert_eq!(shown(&metrics), "");
    }

    #[test]
    fn the_backlog_is_shown_while_it_is_known() {
        let metrics = OperationsMetrics::default();
        assert_eq!(shown(&metrics), "", "nothing is known yet");
        metrics.show_backlog(&counts("bank"));
        let lines = shown(&metrics);
        for line in [
            r#"request_jobs{downstream="bank",state="waiting"} 3"#,
            r#"request_jobs{downstream="bank",state="running"} 2"#,
            r#"request_jobs{downstream="bank",state="parked"} 1"#,
            r#"request_oldest_waiting_seconds{downstream="bank"} 61"#,
            "dlq_depth 5",
            "reconciler_backlog_age_seconds 7",
            r#"dead_letters{topic="a"} 1"#,
            r#"dead_letters{topic="b"} 0"#,
        ] {
            assert!(lines.lines().any(|shown| shown == line), "{line}:\n{lines}");
        }
        metrics.show_backlog(&counts(""));
        let lines = shown(&metrics);
        assert!(
            lines.contains("downstream=\"default\"") && !lines.contains("bank"),
            "a downstream that is gone: {lines}"
        );
        metrics.hide_backlog();
        assert_eq!(shown(&metrics), "", "the store does not answer");
    }
}
