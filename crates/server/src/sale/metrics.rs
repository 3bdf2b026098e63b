//! How sales go.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use weir_store::sale::LedgerMetrics;

use crate::telemetry::labels::OutcomeLabels;

/// How sales go. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct SaleMetrics {
    /// Attempts to buy, by what became of them.
    pub purchases: Family<OutcomeLabels, Counter>,
    /// Buyers who were asked for a proof, by what became of it.
    pub challenges: Family<OutcomeLabels, Counter>,
    /// Event streams open now.
    pub listeners: Gauge,
    /// Events told, each once however many listen.
    pub events: Counter,
    /// Calls refused because their address makes too many.
    pub address_limited: Counter,
    /// How the store follows Redis.
    pub follow: LedgerMetrics,
}

impl SaleMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("sale_purchases", "Attempts to buy, by outcome", self.purchases.clone());
        r.register("sale_challenges", "Proofs asked of buyers, by outcome", self.challenges.clone());
        r.register("sale_streams", "Event streams of sales open now", self.listeners.clone());
        r.register("sale_events", "Events told, each once however many listen", self.events.clone());
        let limited = "Calls refused because their address makes too many";
        r.register("edge_limited", limited, self.address_limited.clone());
        let mismatches = "Purchases that Redis had and the store had not, or the other way round";
        r.register("reconciliation_mismatches", mismatches, self.follow.mismatches.clone());
        let depth = "Purchases that wait to be written down";
        r.register("sale_queue_depth", depth, self.follow.depth.clone());
    }
}
