//! Metrics of quota: sends, deliveries and the denial cache.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use weir_store::quota::CacheMetrics;

use crate::telemetry::labels::OutcomeLabels;

/// Metrics of quota. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct QuotaMetrics {
    /// Sends by what became of them.
    pub sends: Family<OutcomeLabels, Counter>,
    /// Messages the sender took, by what became of them.
    pub deliveries: Family<OutcomeLabels, Counter>,
    /// Users that the cache has forgotten.
    pub cache: CacheMetrics,
}

impl QuotaMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("quota_sends", "Sends by outcome", self.sends.clone());
        let forgotten =
            "Users whose limits have changed, on any server, and whom the cache has forgotten since";
        r.register("quota_cache_forgotten", forgotten, self.cache.forgotten.clone());
        r.register("quota_deliveries", "Messages the sender took, by outcome", self.deliveries.clone());
    }
}
