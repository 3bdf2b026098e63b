//! Compares Redis with the store and repairs differences: every purchase in one must be in the other. Runs at the start, every
//! five minutes, and a minute after the end of each sale.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use weir_core::sale::{PurchaseReceipt, Sku};
use weir_core::{Timestamp, UserId};
use weir_store::Result;
use weir_store::sale::{Product, Purchase};

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

impl RedisSales {
    /// Compares all sales periodically, until the server stops.
    pub async fn reconcile(self, closing: CancellationToken) {
        let mut due = Instant::now();
        let mut checked_at: Option<Timestamp> = None;
        loop {
            let is_due = Instant::now() >= due;
            match self.shared.reconcile_due(is_due, checked_at).await {
                Ok(now) => {
                    checked_at = Some(now);
                    if is_due {
                        due = Instant::now() + COMPARE_EVERY;
                    }
                }
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
        self.shared.compare(&product, Duration::ZERO).await
    }
}

impl SharedSales {
    /// Compares every sale if `is_due`, otherwise those that ended a minute ago. Returns Redis's time.
    async fn reconcile_due(&self, is_due: bool, checked_at: Option<Timestamp>) -> Result<Timestamp> {
        let products: Vec<Product> = self.catalogue().await?.into_values().collect();
        let mut skus: Vec<Sku> = products.iter().map(|product| product.sku.clone()).collect();
        skus.extend(Sku::parse("-").ok());
        let peeked = self.peek(&skus).await?;
        let now = peeked.last().ok_or_else(malformed_reply)?.now;
        for (in_store, peeked) in products.iter().zip(peeked) {
            let Some(product) = peeked.product else { continue };
            self.repeat_decision(in_store, &product).await;
            let at = product.sale.terms.end.plus(AFTER_END);
            let is_final = at <= now && checked_at.is_some_and(|checked_at| checked_at < at);
            if !is_due && !is_final {
                continue;
            }
            let mismatches = self.compare(&product, IN_FLIGHT_FOR).await?;
            if mismatches > 0 && is_final {
                tracing::error!(sku = %product.sku, mismatches, "CRITICAL: purchases in Redis and in the store differed after the end of a sale; they were repaired");
            }
        }
        Ok(now)
    }

    /// Compares one sale, repairs the differences, and returns how many purchases differed. Purchases in Redis that are younger
    /// than `in_flight_for` are ignored.
    async fn compare(&self, product: &Product, in_flight_for: Duration) -> Result<u64> {
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
        Ok(mismatches)
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
