//! Looks for anomalies in the attempts to buy that this server takes, and keeps those found for operators. The patterns are in
//! `weir_core::sale::anomaly`.

use std::sync::Arc;

use parking_lot::Mutex;
use weir_core::Clock;
use weir_core::sale::anomaly::{Anomaly, AnomalyWatch, Attempt};

use super::events::AnomalyFound;
use super::metrics::SaleMetrics;

pub struct Anomalies {
    watch: Mutex<AnomalyWatch>,
    clock: Arc<dyn Clock>,
    metrics: SaleMetrics,
}

impl Anomalies {
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, metrics: SaleMetrics) -> Self {
        Self { watch: Mutex::default(), clock, metrics }
    }

    /// Looks at an attempt, whatever becomes of it.
    pub fn record(&self, attempt: &Attempt<'_>) {
        let now = self.clock.now();
        let sightings = self.watch.lock().record(attempt, now);
        for sighting in sightings {
            self.metrics.record_anomalous_attempt(sighting.pattern);
            if let Some(anomaly) = &sighting.found {
                AnomalyFound { anomaly }.emit(&self.metrics);
            }
        }
    }

    /// Returns up to `limit` anomalies, the latest first, that were found before the one with the id `before`.
    #[must_use]
    pub fn list(&self, before: Option<u64>, limit: usize) -> Vec<Anomaly> {
        self.watch.lock().list(before).take(limit).cloned().collect()
    }
}
