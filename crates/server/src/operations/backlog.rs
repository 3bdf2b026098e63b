//! Gauges of the work that is in the store, jobs of requests and dead letters, and counts of scripts in Redis. They are read
//! when `/metrics` is asked for. When an engine does not answer its values are absent, so that nobody takes an old value for
//! the present one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use weir_queue::Queue;
use weir_store::Result;
use weir_store::quota::TOPIC;
use weir_store::request::{RequestStore, WEBHOOKS_TOPIC};
use weir_store::sale::PURCHASES_TOPIC;
use weir_store_redis::Redis;

use super::metrics::{BacklogCounts, OperationsMetrics, TOPICS_COUNTED};
use crate::engines::{Engines, within};
use crate::request::settings::RequestSettings;
use crate::settings::Settings;

/// How long values count as the present ones.
const CACHED_FOR: Duration = Duration::from_secs(5);
/// How long reading them may delay the response of `/metrics`.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Counts end here: an index is read up to this many entries, however large the backlog.
const COUNT_MAX: usize = 10_000;
/// The most downstreams that are counted. Those of the settings come first; others are of earlier settings.
const DOWNSTREAMS_MAX: usize = 100;
/// The topics whose dead letters are counted.
const TOPICS: [&str; TOPICS_COUNTED] = [TOPIC, WEBHOOKS_TOPIC, PURCHASES_TOPIC];

/// Reads the gauges.
pub(crate) struct Backlog {
    redis: Option<Redis>,
    requests: Arc<dyn RequestStore>,
    queue: Arc<dyn Queue>,
    /// The names in the settings. They are counted also while they have no jobs.
    downstreams: Vec<String>,
    metrics: OperationsMetrics,
    read_at: Mutex<Option<Instant>>,
    latest: parking_lot::Mutex<Option<Arc<BacklogCounts>>>,
}

impl Backlog {
    pub(crate) fn new(engines: &Engines, settings: &Settings, metrics: &OperationsMetrics) -> Self {
        Self {
            redis: engines.redis.clone(),
            requests: Arc::clone(&engines.store.requests),
            queue: Arc::clone(&engines.store.queue),
            downstreams: std::iter::once(RequestSettings::DEFAULT_DOWNSTREAM.to_owned())
                .chain(settings.request.downstreams.keys().cloned())
                .collect(),
            metrics: metrics.clone(),
            read_at: Mutex::default(),
            latest: parking_lot::Mutex::default(),
        }
    }

    /// Brings the gauges up to date. Callers that ask at the same time wait for one reading.
    pub(crate) async fn update(&self) {
        let mut read_at = self.read_at.lock().await;
        if read_at.is_some_and(|at| at.elapsed() < CACHED_FOR) {
            return;
        }
        let scripts = async {
            let counts = self.redis.as_ref()?.script_counts();
            tokio::time::timeout(READ_TIMEOUT, counts).await.ok().flatten()
        };
        let (counts, scripts) = tokio::join!(within(READ_TIMEOUT, self.read()), scripts);
        self.metrics.show_scripts(scripts);
        match counts {
            Ok(counts) => {
                self.metrics.show_backlog(&counts);
                *self.latest.lock() = Some(Arc::new(counts));
                *read_at = Some(Instant::now());
            }
            Err(_) => {
                self.metrics.hide_backlog();
                *self.latest.lock() = None;
                *read_at = None;
            }
        }
    }

    /// What was last read; `None` if the store did not answer, or nothing was read yet.
    pub(crate) fn latest(&self) -> Option<Arc<BacklogCounts>> {
        self.latest.lock().clone()
    }

    /// One statement after the other, so that a scrape occupies one connection.
    async fn read(&self) -> Result<BacklogCounts> {
        let known: BTreeSet<&str> = self.downstreams.iter().map(String::as_str).collect();
        let stored = self.requests.job_downstreams().await?;
        let others = stored.into_iter().filter(|name| !known.contains(name.as_str()));
        let names: Vec<String> =
            self.downstreams.iter().cloned().chain(others).take(DOWNSTREAMS_MAX).collect();
        let jobs = self.requests.count_jobs(&names, COUNT_MAX).await?;
        let oldest = self.requests.pending_requests(Duration::ZERO, 1).await?;
        let dead_requests = self.requests.count_dead_requests().await?;
        let mut dead_letters = TOPICS.map(|topic| (topic, 0));
        for (topic, count) in &mut dead_letters {
            *count = self.queue.count_dead_letters(topic, COUNT_MAX).await?;
        }
        let oldest_pending = oldest.first().map_or(Duration::ZERO, |pending| pending.age);
        Ok(BacklogCounts { jobs, oldest_pending, dead_requests, dead_letters })
    }
}
