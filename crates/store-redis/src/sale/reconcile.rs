//! Comparing the two sides: every buyer that Redis knows must be in the store, and every buyer the store knows in Redis. At the
//! start, every five minutes, and a minute after the end of each sale.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use weir_core::sale::{PurchaseReceipt, Sku};
use weir_core::{Timestamp, UserId};
use weir_store::Result;
use weir_store::sale::{Product, Purchase};

use super::{Parts, RedisSales, item, reply, unreadable};
use crate::script::Script;

const EVERY: Duration = Duration::from_secs(300);
/// How long after the end of a sale it is looked at once more.
const AFTER_END: Duration = Duration::from_secs(60);
/// How often it is looked whether a sale has ended.
const LOOK: Duration = Duration::from_secs(5);
/// A purchase that is younger may be on its way.
const ON_ITS_WAY: Duration = Duration::from_secs(60);
const PAGE: usize = 1_000;

impl RedisSales {
    /// Compares the two sides now and then, until the server stops.
    pub async fn reconcile(self, closing: CancellationToken) {
        let mut due = Instant::now();
        let mut looked: Option<Timestamp> = None;
        loop {
            let is_due = Instant::now() >= due;
            match self.parts.reconcile_due(is_due, looked).await {
                Ok(now) => {
                    looked = Some(now);
                    if is_due {
                        due = Instant::now() + EVERY;
                    }
                }
                Err(error) => {
                    tracing::warn!(error = %error.with_causes(), "sales could not be compared with the store");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = closing.cancelled() => return,
            }
        }
    }

    /// Compares the two sides of one sale, and mends what differs. How many purchases did.
    /// Fails when either cannot say.
    pub async fn reconcile_sale(&self, sku: &Sku) -> Result<u64> {
        let Some(product) = self.parts.product(sku).await? else { return Ok(0) };
        self.parts.compare(&product, Duration::ZERO).await
    }
}

impl Parts {
    /// Compares every sale when it is time to, and those that ended a minute ago. The time of Redis.
    async fn reconcile_due(&self, is_due: bool, looked: Option<Timestamp>) -> Result<Timestamp> {
        let products: Vec<Product> = self.catalogue().await?.into_values().collect();
        let mut skus: Vec<Sku> = products.iter().map(|product| product.sku.clone()).collect();
        skus.extend(Sku::parse("-").ok());
        let peeked = self.peek(&skus).await?;
        let now = peeked.last().ok_or_else(unreadable)?.now;
        for peeked in peeked {
            let Some(product) = peeked.product else { continue };
            let at = product.sale.terms.end.plus(AFTER_END);
            let is_final = at <= now && looked.is_some_and(|looked| looked < at);
            if !is_due && !is_final {
                continue;
            }
            let mismatches = self.compare(&product, ON_ITS_WAY).await?;
            if mismatches > 0 && is_final {
                tracing::error!(sku = %product.sku, mismatches, "CRITICAL: purchases differed after the end of a sale");
            }
        }
        Ok(now)
    }

    async fn compare(&self, product: &Product, on_its_way: Duration) -> Result<u64> {
        let here = self.buyers_here(product).await?;
        let there = self.buyers_there(product).await?;
        let now = self.peek(std::slice::from_ref(&product.sku)).await?.pop().ok_or_else(unreadable)?.now;
        let purchase = |(buyer, receipt): (&UserId, &PurchaseReceipt)| Purchase {
            product: product.id,
            buyer: buyer.clone(),
            receipt: *receipt,
        };
        let is_late = |receipt: &PurchaseReceipt| receipt.at.plus(on_its_way) <= now;
        let unwritten =
            here.iter().filter(|(buyer, receipt)| !there.contains_key(*buyer) && is_late(receipt));
        let unwritten: Vec<Purchase> = unwritten.map(purchase).collect();
        let forgotten: Vec<Purchase> =
            there.iter().filter(|(buyer, _)| !here.contains_key(*buyer)).map(purchase).collect();
        for Purchase { buyer, .. } in &unwritten {
            tracing::warn!(sku = %product.sku, "Reconciliation: re-enqueuing purchase for user {buyer}");
        }
        for page in unwritten.chunks(PAGE) {
            let refused = self.record_each(product.id, page).await?;
            if let Some((buyer, error)) = refused.iter().next() {
                let (count, error) = (refused.len(), error.with_causes());
                tracing::error!(sku = %product.sku, count, %buyer, %error, "Reconciliation: purchases are refused by the store");
            }
        }
        for Purchase { buyer, .. } in &forgotten {
            tracing::warn!(sku = %product.sku, "Reconciliation: restoring purchase of user {buyer} in Redis");
        }
        for page in forgotten.chunks(PAGE) {
            self.open(product, page, true).await?;
        }
        let mismatches = (unwritten.len() + forgotten.len()) as u64;
        self.metrics.mismatches.inc_by(mismatches);
        Ok(mismatches)
    }

    async fn buyers_here(&self, product: &Product) -> Result<HashMap<UserId, PurchaseReceipt>> {
        let mut buyers = HashMap::new();
        let mut cursor = "0".to_owned();
        loop {
            let items = [item(&product.sku, vec![cursor])];
            let answers = self.ask(Script::SaleBuyers, &[], &items).await?;
            let (id, next, page) = answers.first().and_then(reply::buyers).ok_or_else(unreadable)?;
            if id == product.id {
                buyers.extend(page.into_iter().map(|purchase| (purchase.buyer, purchase.receipt)));
            }
            if next == "0" {
                return Ok(buyers);
            }
            cursor = next;
        }
    }

    async fn buyers_there(&self, product: &Product) -> Result<HashMap<UserId, PurchaseReceipt>> {
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
