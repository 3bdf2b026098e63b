//! Quota: sends go through lanes, the rest straight to the store. Users who are over their limit are known for a while
//! and refused without either.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use weir_core::UserId;
use weir_core::quota::{Quota, QuotaLimits};
use weir_store::denial_cache::DenialCache;
use weir_store::limit_changes::LimitChange;
use weir_store::quota::{QuotaStore, SendMessage, SendOutcome};
use weir_store::{Lanes, Result};

use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::labels::OutcomeLabels;
use crate::telemetry::metrics::Metrics;

/// Quota.
pub struct QuotaService {
    store: Arc<dyn QuotaStore>,
    lanes: Lanes<SendMessage, SendOutcome>,
    denials: Arc<DenialCache>,
    timeout: Duration,
    counters: Counters,
}

/// Handles taken once, so that counting a send costs one addition.
#[derive(Debug)]
struct Counters {
    accepted: Counter,
    denied: Counter,
    denied_from_memory: Counter,
    not_configured: Counter,
    failed: Counter,
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
        let counter = |outcome| metrics.quota.sends.get_or_create_owned(&OutcomeLabels { outcome });
        let counters = Counters {
            accepted: counter("accepted"),
            denied: counter("denied"),
            denied_from_memory: counter("denied_from_memory"),
            not_configured: counter("not_configured"),
            failed: counter("failed"),
        };
        let denials = DenialCache::new(
            Arc::clone(&engines.store.limit_changes),
            Arc::clone(&engines.store.steady_clock),
        );
        Self { store, lanes, denials, timeout: settings.http.timeout, counters }
    }

    /// Users that are known to be over their limit.
    pub(crate) fn denials(&self) -> Arc<DenialCache> {
        Arc::clone(&self.denials)
    }

    /// Creates or replaces a user's limits.
    pub async fn configure(&self, user: &UserId, limits: QuotaLimits) -> Result<Quota> {
        let configured = within(self.timeout, self.store.configure(user, limits)).await;
        // Whatever came of it: an error may hide a commit.
        self.denials.invalidate(&LimitChange::User(user.clone()));
        configured
    }

    /// A user's row as it counts now.
    pub async fn find(&self, user: &UserId) -> Result<Option<Quota>> {
        within(self.timeout, self.store.find(user)).await
    }

    /// Removes a user's limits; false when there were none.
    pub async fn remove(&self, user: &UserId) -> Result<bool> {
        let removed = within(self.timeout, self.store.remove(user)).await;
        self.denials.invalidate(&LimitChange::User(user.clone()));
        removed
    }

    /// Decides one send.
    /// Fails when the lane is full or the store does not answer.
    pub async fn send(&self, send: SendMessage) -> Result<SendOutcome> {
        if let Some(denied) = self.denials.get(&send.user) {
            self.counters.denied_from_memory.inc();
            return Ok(denied);
        }
        let (user, asked) = (send.user.clone(), self.denials.begin_query());
        // The lane itself answers in time.
        let outcome = self.lanes.submit(user.as_str(), send).await;
        match &outcome {
            Ok(SendOutcome::Accepted { .. }) => self.counters.accepted.inc(),
            Ok(denied @ SendOutcome::Denied { .. }) => {
                self.denials.record(asked, &user, denied);
                self.counters.denied.inc()
            }
            Ok(SendOutcome::NotConfigured) => self.counters.not_configured.inc(),
            Ok(SendOutcome::NotQueued(_)) | Err(_) => self.counters.failed.inc(),
        };
        outcome
    }

    /// Takes no new sends, waits for those under way, and brings the counts to where they are kept.
    pub async fn drain(&self) {
        self.lanes.drain().await;
        self.store.close().await;
    }
}
