//! Compares Redis with the store and repairs differences: every purchase in one must be in the other. Runs at the start, every
//! five minutes, and a minute after the end of each sale.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use weir_core::sale::{EndReason, PurchaseReceipt, Sku};
use weir_core::{Timestamp, UserId};
use weir_store::Result;
use weir_store::sale::{Product, ProductId, Purchase};

use super::{RedisSales, SharedSales, malformed_reply, reply, sale_call};
use crate::script::Script;

const COMPARE_EVERY: Duration = Duration::from_secs(300);
/// How long after its end a sale is compared once more.
const AFTER_END: Duration = Duration::from_secs(60);
/// How often it is checked whether a sale has ended.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// Younger purchases may still be on their way to the store.
const IN_FLIGHT_FOR: Duration = Duration::from_secs(60);
const PAGE: usize = 1_000;

/// When each sale that has ended is compared for the last time.
#[derive(Debug, Default)]
struct FinalChecks {
    /// `None` when it is done.
    due: HashMap<ProductId, Option<Timestamp>>,
    has_looked: bool,
}

impl FinalChecks {
    /// Records that a sale was seen at `now`. The first look does not know when a sale that was sold out, or ended by an
    /// operator, has ended: `compared` says so later.
    fn see(&mut self, product: &Product, now: Timestamp) {
        let ended_at = match product.sale.state.end_reason() {
            None => return,
            Some(EndReason::TimeExpired) => product.sale.terms.end,
            Some(EndReason::SoldOut | EndReason::EndedByOperator) => now,
        };
        self.due.entry(product.id).or_insert(Some(ended_at.plus(AFTER_END)));
    }

    /// Records when the last unit was sold: a minute later nothing is on its way any more, whenever the sale was first seen.
    fn compared(&mut self, product: &Product, last_sold: Option<Timestamp>) {
        let is_first_look = !self.has_looked;
        if let (Some(Some(due)), Some(last_sold)) = (self.due.get_mut(&product.id), last_sold)
            && is_first_look
            && product.sale.state.end_reason() != Some(EndReason::TimeExpired)
        {
            *due = (*due).min(last_sold.plus(AFTER_END));
        }
    }

    fn is_due(&self, product: &Product, now: Timestamp) -> bool {
        self.due.get(&product.id).copied().flatten().is_some_and(|due| due <= now)
    }

    fn done(&mut self, product: &Product) {
        self.due.insert(product.id, None);
    }
}

/// What a comparison of one sale has found.
struct Comparison {
    /// Purchases that differed, and were repaired if that was possible.
    mismatches: u64,
    /// When the last unit was sold, by Redis.
    last_sold: Option<Timestamp>,
}

impl RedisSales {
    /// Compares all sales periodically, until the server stops.
    pub async fn reconcile(self, closing: CancellationToken) {
        let (mut due, mut finals) = (Instant::now(), FinalChecks::default());
        loop {
            let is_due = Instant::now() >= due;
            match self.shared.reconcile_due(is_due, &mut finals).await {
                Ok(()) if is_due => due = Instant::now() + COMPARE_EVERY,
                Ok(()) => {}
                Err(error) => {
                    tracing::warn!(error = %error.with_causes(), "cannot compare the sales in Redis with the store; retrying");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(CHECK_EVERY) => {}
                () = closing.cancelled() => return,
            }
        }
    }

    /// Compares one sale, repairs the differences, and returns how many purchases differed. Fails when Redis or the store does.
    pub async fn reconcile_sale(&self, sku: &Sku) -> Result<u64> {
        let Some(product) = self.shared.product(sku).await? else { return Ok(0) };
        Ok(self.shared.compare(&product, Duration::ZERO).await?.mismatches)
    }

    /// Compares a sale that is over for the last time. Returns how many purchases differed, and how many still do after the
    /// repair. Fails when Redis or the store does.
    pub async fn reconcile_finally(&self, sku: &Sku) -> Result<(u64, u64)> {
        let Some(product) = self.shared.product(sku).await? else { return Ok((0, 0)) };
        self.shared.compare_finally(&product).await
    }
}

impl SharedSales {
    /// Compares every sale if `is_due`, otherwise those that ended a minute ago.
    async fn reconcile_due(&self, is_due: bool, finals: &mut FinalChecks) -> Result<()> {
        let products: Vec<Product> = self.catalogue().await?.into_values().collect();
        finals.due.retain(|id, _| products.iter().any(|product| product.id == *id));
        let mut skus: Vec<Sku> = products.iter().map(|product| product.sku.clone()).collect();
        skus.extend(Sku::parse("-").ok());
        let peeked = self.peek(&skus).await?;
        let now = peeked.last().ok_or_else(malformed_reply)?.now;
        for (in_store, peeked) in products.iter().zip(peeked) {
            let Some(product) = peeked.product else { continue };
            self.repeat_decision(in_store, &product).await;
            finals.see(&product, now);
            if is_due {
                let last_sold = self.compare(&product, IN_FLIGHT_FOR).await?.last_sold;
                finals.compared(&product, last_sold);
            }
            if finals.is_due(&product, now) {
                self.compare_finally(&product).await?;
                finals.done(&product);
            }
        }
        finals.has_looked = true;
        Ok(())
    }

    /// Compares a sale that is over: nothing is on its way any more, and what still differs after the repair stays different.
    /// Returns how many purchases differed, and how many still do.
    async fn compare_finally(&self, product: &Product) -> Result<(u64, u64)> {
        let mismatches = self.compare(product, IN_FLIGHT_FOR).await?.mismatches;
        let remaining =
            if mismatches == 0 { 0 } else { self.compare(product, Duration::ZERO).await?.mismatches };
        if remaining > 0 {
            tracing::error!(sku = %product.sku, mismatches, remaining, "CRITICAL: purchases in Redis and in the store still differ after the end of a sale; the log says why they cannot be repaired, and GET /admin/dlq names those that the store refuses");
        } else if mismatches > 0 {
            tracing::error!(sku = %product.sku, mismatches, remaining, "CRITICAL: purchases in Redis and in the store differed after the end of a sale; they were repaired");
        } else {
            tracing::info!(sku = %product.sku, sold = product.sale.sold, "the final reconciliation of a sale found no difference");
        }
        Ok((mismatches, remaining))
    }

    /// Compares one sale, repairs the differences, and returns how many purchases differed. Purchases in Redis that are younger
    /// than `in_flight_for` are ignored.
    async fn compare(&self, product: &Product, in_flight_for: Duration) -> Result<Comparison> {
        let in_redis = self.buyers_in_redis(product).await?;
        let in_store = self.buyers_in_store(product).await?;
        let now = self.peek(std::slice::from_ref(&product.sku)).await?.pop().ok_or_else(malformed_reply)?.now;
        let purchase = |(buyer, receipt): (&UserId, &PurchaseReceipt)| Purchase {
            product: product.id,
            buyer: buyer.clone(),
            receipt: *receipt,
        };
        let is_late = |receipt: &PurchaseReceipt| receipt.at.plus(in_flight_for) <= now;
        let unrecorded =
            in_redis.iter().filter(|(buyer, receipt)| !in_store.contains_key(*buyer) && is_late(receipt));
        let unrecorded: Vec<Purchase> = unrecorded.map(purchase).collect();
        let lost: Vec<Purchase> =
            in_store.iter().filter(|(buyer, _)| !in_redis.contains_key(*buyer)).map(purchase).collect();
        for Purchase { buyer, .. } in &unrecorded {
            tracing::warn!(sku = %product.sku, "Reconciliation: re-enqueuing purchase for user {buyer}");
        }
        for page in unrecorded.chunks(PAGE) {
            let refused = self.record_each(product.id, page).await?;
            if let Some((buyer, error)) = refused.iter().next() {
                let (count, error) = (refused.len(), error.with_causes());
                tracing::error!(sku = %product.sku, count, %buyer, %error, "Reconciliation: the store refused purchases");
            }
        }
        for Purchase { buyer, .. } in &lost {
            tracing::warn!(sku = %product.sku, "Reconciliation: restoring purchase of user {buyer} in Redis");
        }
        for page in lost.chunks(PAGE) {
            self.load_sale(product, page, true).await?;
        }
        let mismatches = (unrecorded.len() + lost.len()) as u64;
        self.metrics.mismatches.inc_by(mismatches);
        let last_sold = in_redis.values().map(|receipt| receipt.at).max();
        Ok(Comparison { mismatches, last_sold })
    }

    async fn buyers_in_redis(&self, product: &Product) -> Result<HashMap<UserId, PurchaseReceipt>> {
        let mut buyers = HashMap::new();
        let mut cursor = "0".to_owned();
        loop {
            let calls = [sale_call(&product.sku, vec![cursor])];
            let replies = self.call(Script::SaleBuyers, &[], &calls).await?;
            let (id, next, page) =
                replies.first().and_then(reply::parse_buyers).ok_or_else(malformed_reply)?;
            if id == product.id {
                buyers.extend(page.into_iter().map(|purchase| (purchase.buyer, purchase.receipt)));
            }
            if next == "0" {
                return Ok(buyers);
            }
            cursor = next;
        }
    }

    async fn buyers_in_store(&self, product: &Product) -> Result<HashMap<UserId, PurchaseReceipt>> {
        let (mut buyers, mut after) = (HashMap::new(), None);
        loop {
            let page = self.ledger.purchases(product.id, after.as_ref(), PAGE).await?;
            after = page.last().map(|purchase| purchase.buyer.clone());
            let is_last = page.len() < PAGE;
            buyers.extend(page.into_iter().map(|purchase| (purchase.buyer, purchase.receipt)));
            if is_last {
                return Ok(buyers);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use weir_core::sale::{Sale, SaleState, Terms};

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_seconds(seconds)
    }

    /// A sale from 100 s to 1,000 s.
    fn product(state: SaleState) -> Product {
        let sale = Sale { state, ..Sale::new(Terms::new("Widget", 5, at(100), at(1_000)).unwrap()) };
        Product { id: ProductId(1), sku: Sku::parse("W").unwrap(), sale, created_at: at(0) }
    }

    fn ended(reason: EndReason) -> Product {
        product(SaleState::Ended(reason))
    }

    #[test]
    fn a_sale_is_compared_a_minute_after_it_was_seen_to_end() {
        for (reason, due) in
            [(EndReason::SoldOut, 260), (EndReason::EndedByOperator, 260), (EndReason::TimeExpired, 1_060)]
        {
            let mut finals = FinalChecks { has_looked: true, ..FinalChecks::default() };
            finals.see(&product(SaleState::Active), at(195));
            finals.see(&ended(reason), at(200));
            finals.see(&ended(reason), at(205));
            finals.compared(&ended(reason), Some(at(120)));
            assert!(
                !finals.is_due(&ended(reason), at(due - 1)) && finals.is_due(&ended(reason), at(due)),
                "{reason:?}"
            );
            finals.done(&ended(reason));
            finals.see(&ended(reason), at(5_000));
            assert!(!finals.is_due(&ended(reason), at(6_000)), "once");
        }
    }

    #[test]
    fn a_sale_that_ended_before_the_reconciler_started_is_compared_a_minute_after_its_last_purchase() {
        for (last_sold, due) in [(150, 210), (500, 560)] {
            let (mut finals, sold_out) = (FinalChecks::default(), ended(EndReason::SoldOut));
            finals.see(&sold_out, at(520));
            finals.compared(&sold_out, Some(at(last_sold)));
            assert!(!finals.is_due(&sold_out, at(due - 1)) && finals.is_due(&sold_out, at(due)));
        }
        let (mut finals, expired) = (FinalChecks::default(), ended(EndReason::TimeExpired));
        finals.see(&expired, at(5_000));
        assert!(finals.is_due(&expired, at(5_000)), "its end is known");
    }
}
