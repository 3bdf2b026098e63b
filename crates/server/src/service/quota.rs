//! Quota: sends go through lanes, the rest straight to the store.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use weir_core::UserId;
use weir_core::quota::{Limits, Quota};
use weir_store::quota::{QuotaStore, SendMessage, SendOutcome};
use weir_store::{LaneSettings, Lanes, Result};

use super::within;
use crate::config::Settings;
use crate::engine::Engine;
use crate::telemetry::metrics::{Metrics, OutcomeLabels};

/// Quota.
pub struct QuotaService {
    store: Arc<dyn QuotaStore>,
    lanes: Lanes<SendMessage, SendOutcome>,
    timeout: Duration,
    counters: Counters,
}

/// Handles taken once, so that counting a send costs one addition.
#[derive(Debug)]
struct Counters {
    accepted: Counter,
    denied: Counter,
    not_configured: Counter,
    failed: Counter,
}

impl QuotaService {
    /// Starts the lanes.
    #[must_use]
    pub fn start(engine: &Engine, settings: &Settings, metrics: &Metrics) -> Self {
        let store = engine.quota();
        let lane_settings = LaneSettings {
            lanes: engine.lanes(settings),
            capacity: settings.lane.capacity,
            batch_max: settings.lane.batch_max,
            in_flight: engine.in_flight(),
            timeout: settings.http.timeout,
        };
        let lanes = Lanes::start("quota", lane_settings, metrics.lane("quota"), {
            let store = Arc::clone(&store);
            move |batch| {
                let store = Arc::clone(&store);
                async move { store.send_batch(batch).await }
            }
        });
        let counter = |outcome| metrics.quota_sends.get_or_create_owned(&OutcomeLabels { outcome });
        let counters = Counters {
            accepted: counter("accepted"),
            denied: counter("denied"),
            not_configured: counter("not_configured"),
            failed: counter("failed"),
        };
        Self { store, lanes, timeout: settings.http.timeout, counters }
    }

    /// Creates or replaces a user's limits.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn configure(&self, user: &UserId, limits: Limits) -> Result<Quota> {
        within(self.timeout, self.store.configure(user, limits)).await
    }

    /// A user's row as it counts now.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        within(self.timeout, self.store.find(user)).await
    }

    /// Removes a user's limits; false when there were none.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn remove(&self, user: &UserId) -> Result<bool> {
        within(self.timeout, self.store.remove(user)).await
    }

    /// Decides one send.
    ///
    /// # Errors
    /// When the lane is full or the store cannot say.
    pub async fn send(&self, send: SendMessage) -> Result<SendOutcome> {
        let user = send.user.clone();
        // The lane itself answers in time.
        let outcome = self.lanes.submit(user.as_str(), send).await;
        match &outcome {
            Ok(SendOutcome::Accepted { .. }) => self.counters.accepted.inc(),
            Ok(SendOutcome::Denied { .. }) => self.counters.denied.inc(),
            Ok(SendOutcome::NotConfigured) => self.counters.not_configured.inc(),
            Err(_) => self.counters.failed.inc(),
        };
        outcome
    }

    /// Takes no new sends and waits for those under way.
    pub async fn drain(&self) {
        self.lanes.drain().await;
    }
}
