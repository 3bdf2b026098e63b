//! Metrics of quota: sends, deliveries and the denial cache.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use weir_store::Result;
use weir_store::quota::{CacheMetrics, SendOutcome};

use crate::telemetry::decisions::DecisionTotals;
use crate::telemetry::labels::OutcomeLabels;

/// Metrics of quota. The counter of each outcome is looked up once, so that counting a send is one addition. Clones share
/// the values.
#[derive(Clone, Debug)]
pub struct QuotaMetrics {
    sends: Family<OutcomeLabels, Counter>,
    accepted: Counter,
    denied: Counter,
    /// Sends refused by the denial cache.
    pub denied_from_cache: Counter,
    not_configured: Counter,
    replayed: Counter,
    key_conflict: Counter,
    failed: Counter,
    deliveries: Family<OutcomeLabels, Counter>,
    /// Messages delivered by the sender.
    pub delivered: Counter,
    /// Messages that the sender could not decode.
    pub malformed: Counter,
    /// Calls to the provider after which a message is tried again.
    pub retried: Counter,
    /// Messages that the provider did not accept.
    pub given_up: Counter,
    /// The state of the provider's circuit breaker.
    pub provider_breaker: Gauge,
    /// Idempotency keys that were deleted when they had expired.
    pub keys_purged: Counter,
    cache: CacheMetrics,
}

impl QuotaMetrics {
    #[must_use]
    pub fn new(cache: CacheMetrics) -> Self {
        let (sends, deliveries) = (Family::default(), Family::default());
        let counter = |family: &Family<OutcomeLabels, Counter>, outcome| {
            family.get_or_create_owned(&OutcomeLabels { outcome })
        };
        Self {
            accepted: counter(&sends, "accepted"),
            denied: counter(&sends, "denied"),
            denied_from_cache: counter(&sends, "denied_from_memory"),
            not_configured: counter(&sends, "not_configured"),
            replayed: counter(&sends, "replayed"),
            key_conflict: counter(&sends, "key_conflict"),
            failed: counter(&sends, "failed"),
            sends,
            delivered: counter(&deliveries, "sent"),
            malformed: counter(&deliveries, "malformed"),
            retried: counter(&deliveries, "retried"),
            given_up: counter(&deliveries, "given_up"),
            provider_breaker: Gauge::default(),
            deliveries,
            keys_purged: Counter::default(),
            cache,
        }
    }

    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("quota_sends", "Calls of /api/send by outcome", self.sends.clone());
        let forgotten = "Hashes deleted in Redis because the limits of their users changed, on any server";
        r.register("quota_cache_forgotten", forgotten, self.cache.forgotten.clone());
        let purged = "Idempotency keys of sends that were deleted when they had expired";
        r.register("quota_keys_purged", purged, self.keys_purged.clone());
        let breaker = "Circuit breaker of sender.url: 0 closed, 1 half-open, 2 open";
        r.register("quota_provider_breaker_state", breaker, self.provider_breaker.clone());
        r.register(
            "quota_deliveries",
            "Messages claimed by the sender, by outcome; one that is tried again is counted each time",
            self.deliveries.clone(),
        );
    }

    /// All sends so far.
    pub(crate) fn decisions(&self) -> DecisionTotals {
        DecisionTotals {
            allowed: self.accepted.get() + self.replayed.get(),
            denied: self.denied.get() + self.denied_from_cache.get() + self.key_conflict.get(),
            failed: self.failed.get(),
        }
    }

    /// Counts a send that the store decided, or failed to decide.
    pub fn record_send(&self, outcome: &Result<SendOutcome>) {
        match outcome {
            Ok(SendOutcome::Accepted { .. }) => &self.accepted,
            Ok(SendOutcome::Denied { .. }) => &self.denied,
            Ok(SendOutcome::NotConfigured) => &self.not_configured,
            Ok(SendOutcome::Replayed { .. }) => &self.replayed,
            Ok(SendOutcome::KeyConflict) => &self.key_conflict,
            Ok(SendOutcome::NotQueued(_)) | Err(_) => &self.failed,
        }
        .inc();
    }
}
