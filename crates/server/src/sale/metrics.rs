//! Metrics of sale: purchases, challenges, event streams, and the ledger behind Redis.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use weir_core::sale::PurchaseRefusal;
use weir_core::sale::anomaly::Pattern;
use weir_store::Result;
use weir_store::sale::{BuyOutcome, LedgerMetrics, ThrottledBy};

use crate::telemetry::decisions::DecisionTotals;
use crate::telemetry::labels::OutcomeLabels;

/// The rate from which the calls of an address are counted as fast: the one at which operators are alerted.
pub(crate) const FAST_PER_SECOND: u32 = 500;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClientLabels {
    client: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PatternLabels {
    pattern: &'static str,
}

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
    anomalies: PatternCounters,
    anomalous_attempts: PatternCounters,
    clients: Family<ClientLabels, Counter>,
    browsers: Counter,
    other_clients: Counter,
    /// Open event streams.
    pub streams: Gauge,
    /// Published events, each counted once however many streams receive it.
    pub events: Counter,
    /// Calls refused because their address makes too many.
    pub address_limited: Counter,
    /// Calls of an address beyond [`FAST_PER_SECOND`].
    pub address_fast: Counter,
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
        let clients = Family::default();
        let client = |client| Family::<_, Counter>::get_or_create_owned(&clients, &ClientLabels { client });
        Self {
            bought: counter("bought"),
            already_purchased: counter("already_purchased"),
            sold_out: counter("sold_out"),
            not_active: counter("not_active"),
            unknown_sku: counter("unknown_sku"),
            throttled: counter("throttled"),
            failed: counter("failed"),
            purchases,
            browsers: client("browser"),
            other_clients: client("other"),
            clients,
            anomalies: PatternCounters::new(),
            anomalous_attempts: PatternCounters::new(),
            challenges: Family::default(),
            streams: Gauge::default(),
            events: Counter::default(),
            address_limited: Counter::default(),
            address_fast: Counter::default(),
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
        let fast = "Calls of an address beyond its first 500 in a second";
        r.register("edge_fast", fast, self.address_fast.clone());
        let clients = "Attempts to buy, by the kind of client that User-Agent names: browser or other";
        r.register("sale_clients", clients, self.clients.clone());
        let anomalies = "Anomalies found in attempts to buy, by pattern";
        r.register("sale_anomalies", anomalies, self.anomalies.family.clone());
        let attempts = "Attempts to buy that belong to an anomaly, by pattern";
        r.register("sale_anomalous_attempts", attempts, self.anomalous_attempts.family.clone());
        let mismatches =
            "Purchases that were in Redis but not in the store, or in the store but not in Redis";
        r.register("reconciliation_mismatches", mismatches, self.ledger.mismatches.clone());
        let depth = "Purchases decided by Redis that are not saved in the store yet";
        r.register("sale_queue_depth", depth, self.ledger.depth.clone());
    }

    /// All attempts to buy so far.
    pub(crate) fn decisions(&self) -> DecisionTotals {
        let denied = [&self.already_purchased, &self.sold_out, &self.not_active, &self.throttled];
        DecisionTotals {
            allowed: self.bought.get(),
            denied: denied.into_iter().map(Counter::get).sum(),
            failed: self.failed.get(),
        }
    }

    pub fn record_purchase(&self, outcome: &Result<BuyOutcome>) {
        match outcome {
            Ok(BuyOutcome::Bought { .. }) => &self.bought,
            Ok(BuyOutcome::Refused(PurchaseRefusal::AlreadyPurchased)) => &self.already_purchased,
            Ok(BuyOutcome::Refused(PurchaseRefusal::SoldOut)) => &self.sold_out,
            Ok(BuyOutcome::Refused(PurchaseRefusal::NotActive)) => &self.not_active,
            Ok(BuyOutcome::UnknownSku) => &self.unknown_sku,
            Ok(BuyOutcome::Throttled { by: ThrottledBy::User, .. }) => &self.throttled,
            Ok(BuyOutcome::Throttled { by: ThrottledBy::Address, .. }) => &self.address_limited,
            Err(_) => &self.failed,
        }
        .inc();
    }

    /// Counts an attempt to buy by its `User-Agent`. Every browser's begins with `Mozilla/`, and what claims to be one counts as
    /// one.
    pub fn record_client(&self, user_agent: Option<&str>) {
        let is_browser = user_agent.is_some_and(|agent| agent.starts_with("Mozilla/"));
        if is_browser { &self.browsers } else { &self.other_clients }.inc();
    }

    /// Counts a challenge. `outcome` is one of a fixed set of words.
    pub fn record_challenge(&self, outcome: &'static str) {
        self.challenges.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub fn record_anomaly(&self, pattern: Pattern) {
        self.anomalies.inc(pattern);
    }

    pub fn record_anomalous_attempt(&self, pattern: Pattern) {
        self.anomalous_attempts.inc(pattern);
    }

    #[cfg(test)]
    pub(crate) fn challenge_count(&self, outcome: &'static str) -> u64 {
        self.challenges.get_or_create(&OutcomeLabels { outcome }).get()
    }
}

/// A counter for each pattern, looked up once. All are there from the start, so that the first increase is seen.
#[derive(Clone, Debug)]
struct PatternCounters {
    family: Family<PatternLabels, Counter>,
    counters: [(Pattern, Counter); 4],
}

impl PatternCounters {
    fn new() -> Self {
        let family = Family::default();
        let counters = Pattern::ALL.map(|pattern| {
            let labels = PatternLabels { pattern: pattern.as_str() };
            (pattern, Family::<_, Counter>::get_or_create_owned(&family, &labels))
        });
        Self { family, counters }
    }

    fn inc(&self, pattern: Pattern) {
        if let Some((_, counter)) = self.counters.iter().find(|(counted, _)| *counted == pattern) {
            counter.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_do_not_claim_to_be_a_browser_are_other_clients() {
        let metrics = SaleMetrics::default();
        for agent in [Some("curl/8.5.0"), Some("python-requests/2.31 Mozilla/5.0"), Some(""), None] {
            metrics.record_client(agent);
        }
        metrics.record_client(Some(
            "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0",
        ));
        assert_eq!((metrics.browsers.get(), metrics.other_clients.get()), (1, 4));
    }
}
