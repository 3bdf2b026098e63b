//! Metrics of sale: purchases, challenges, event streams, and the ledger behind Redis.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use weir_core::sale::PurchaseRefusal;
use weir_store::Result;
use weir_store::sale::{BuyOutcome, LedgerMetrics};

use crate::telemetry::labels::OutcomeLabels;

/// Metrics of sale. The counter of each outcome of a purchase is looked up once. Clones share the values.
#[derive(Clone, Debug)]
pub struct SaleMetrics {
    purchases: Family<OutcomeLabels, Counter>,
    bought: Counter,
    already_purchased: Counter,
    sold_out: Counter,
    not_active: Counter,
    unknown_sku: Counter,
    /// Attempts refused because the buyer made too many.
    pub throttled: Counter,
    failed: Counter,
    challenges: Family<OutcomeLabels, Counter>,
    /// Open event streams.
    pub streams: Gauge,
    /// Published events, each counted once however many streams receive it.
    pub events: Counter,
    /// Calls refused because their address makes too many.
    pub address_limited: Counter,
    ledger: LedgerMetrics,
}

impl Default for SaleMetrics {
    fn default() -> Self {
        Self::new(LedgerMetrics::default())
    }
}

impl SaleMetrics {
    #[must_use]
    pub fn new(ledger: LedgerMetrics) -> Self {
        let purchases = Family::default();
        let counter =
            |outcome| Family::<_, Counter>::get_or_create_owned(&purchases, &OutcomeLabels { outcome });
        Self {
            bought: counter("bought"),
            already_purchased: counter("already_purchased"),
            sold_out: counter("sold_out"),
            not_active: counter("not_active"),
            unknown_sku: counter("unknown_sku"),
            throttled: counter("throttled"),
            failed: counter("failed"),
            purchases,
            challenges: Family::default(),
            streams: Gauge::default(),
            events: Counter::default(),
            address_limited: Counter::default(),
            ledger,
        }
    }

    pub(crate) fn register(&self, r: &mut Registry) {
        r.register("sale_purchases", "Attempts to buy, by outcome", self.purchases.clone());
        r.register("sale_challenges", "Challenges of buyers, by outcome", self.challenges.clone());
        r.register("sale_streams", "Open event streams of sales", self.streams.clone());
        let events = "Published events of sales, each counted once however many streams receive it";
        r.register("sale_events", events, self.events.clone());
        let limited = "Calls refused because their address makes too many";
        r.register("edge_limited", limited, self.address_limited.clone());
        let mismatches =
            "Purchases that were in Redis but not in the store, or in the store but not in Redis";
        r.register("reconciliation_mismatches", mismatches, self.ledger.mismatches.clone());
        let depth = "Purchases decided by Redis that are not saved in the store yet";
        r.register("sale_queue_depth", depth, self.ledger.depth.clone());
    }

    pub fn record_purchase(&self, outcome: &Result<BuyOutcome>) {
        match outcome {
            Ok(BuyOutcome::Bought { .. }) => &self.bought,
            Ok(BuyOutcome::Refused(PurchaseRefusal::AlreadyPurchased)) => &self.already_purchased,
            Ok(BuyOutcome::Refused(PurchaseRefusal::SoldOut)) => &self.sold_out,
            Ok(BuyOutcome::Refused(PurchaseRefusal::NotActive)) => &self.not_active,
            Ok(BuyOutcome::UnknownSku) => &self.unknown_sku,
            Err(_) => &self.failed,
        }
        .inc();
    }

    /// Counts a challenge. `outcome` is one of a fixed set of words.
    pub fn record_challenge(&self, outcome: &'static str) {
        self.challenges.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    #[cfg(test)]
    pub(crate) fn challenge_count(&self, outcome: &'static str) -> u64 {
        self.challenges.get_or_create(&OutcomeLabels { outcome }).get()
    }
}
