//! Quota: sends go through lanes, all other calls straight to the store. Users known to be over their limit are refused by
//! the denial cache, without either.

use std::sync::Arc;
use std::time::Duration;

use weir_core::UserId;
use weir_core::quota::{Quota, QuotaLimits};
use weir_store::denial_cache::DenialCache;
use weir_store::limit_changes::LimitChange;
use weir_store::quota::{QuotaStore, SendMessage, SendOutcome};
use weir_store::{Lanes, Result};

use super::metrics::QuotaMetrics;
use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;

pub struct QuotaService {
    store: Arc<dyn QuotaStore>,
    lanes: Lanes<SendMessage, SendOutcome>,
    denials: Arc<DenialCache>,
    timeout: Duration,
    metrics: QuotaMetrics,
}

impl QuotaService {
    /// Starts the lanes.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, metrics: &Metrics) -> Self {
        let store = Arc::clone(&engines.store.quota);
        let lanes = engines.start_lanes("quota", metrics.lane("quota"), {
            let store = Arc::clone(&store);
            move |batch| {
                let store = Arc::clone(&store);
                async move { store.send_batch(batch).await }
            }
        });
        let denials = DenialCache::new(
            Arc::clone(&engines.store.limit_changes),
            Arc::clone(&engines.store.steady_clock),
        );
        Self { store, lanes, denials, timeout: settings.http.timeout, metrics: metrics.quota.clone() }
    }

    pub(crate) fn denials(&self) -> Arc<DenialCache> {
        Arc::clone(&self.denials)
    }

    /// Creates or replaces a user's limits.
    pub async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let configured = within(self.timeout, self.store.configure(user, limits)).await;
        // Also after an error, which may hide a commit.
        self.denials.invalidate(&LimitChange::User(user.clone()));
        configured
    }

    /// Returns a user's quota in the present window.
    pub async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        within(self.timeout, self.store.find(user)).await
    }

    /// Removes a user's limits. Returns false if the user had none.
    pub async fn remove(&self, user: &UserId) -> Result<bool> {
        let removed = within(self.timeout, self.store.remove(user)).await;
        self.denials.invalidate(&LimitChange::User(user.clone()));
        removed
    }

    /// Decides one send. Fails when the lane is full or the store does not answer in time.
    pub async fn send(&self, send: SendMessage) -> Result<SendOutcome> {
        if let Some(denied) = self.denials.get(&send.user) {
            self.metrics.denied_from_cache.inc();
            return Ok(denied);
        }
        let (user, query) = (send.user.clone(), self.denials.begin_query());
        // The lane enforces the timeout.
        let outcome = self.lanes.submit(user.as_str(), send).await;
        if let Ok(denied @ SendOutcome::Denied { .. }) = &outcome {
            self.denials.record(query, &user, denied);
        }
        self.metrics.record_send(&outcome);
        outcome
    }

    /// Accepts no more sends, waits for those in flight, and closes the store, which saves counts that are only in memory.
    pub async fn drain(&self) {
        self.lanes.drain().await;
        self.store.close().await;
    }
}
