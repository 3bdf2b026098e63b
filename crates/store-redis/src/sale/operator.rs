//! What operators do to a running sale: end it, extend it, and read who bought.
//!
//! Redis decides whether a sale can be ended or extended, and the store follows: at once, or when it is back. Until the store has
//! followed, a Redis that loses its memory loses the decision, too.

use std::collections::HashSet;

use redis::Value;
use weir_core::Timestamp;
use weir_core::sale::{ChangeError, EndReason, SaleState, Sku, TermsError};
use weir_store::Result;
use weir_store::sale::{ChangeOutcome, EndOutcome, Product, Purchase, PurchasePosition};

use super::{REBUILDS_MAX, SharedSales, malformed_reply, reply, sale_call, unavailable};
use crate::script::Script;

/// The most purchases that may wait to be recorded while purchases are listed.
const WAITING_MAX: usize = 10_000;

impl SharedSales {
    pub(super) async fn end_sale(&self, sku: &Sku) -> Result<EndOutcome> {
        match self.decide(Script::SaleEnd, sku, Vec::new()).await? {
            None => Ok(EndOutcome::UnknownSku),
            Some(1) => Ok(self.follow_decision(sku).await?.map_or(EndOutcome::UnknownSku, EndOutcome::Ended)),
            Some(_) => Ok(EndOutcome::NotActive),
        }
    }

    pub(super) async fn extend_sale(&self, sku: &Sku, end: Timestamp) -> Result<ChangeOutcome> {
        match self.decide(Script::SaleExtend, sku, vec![end.as_micros().to_string()]).await? {
            None => Ok(ChangeOutcome::UnknownSku),
            Some(1) => {
                let product = self.follow_decision(sku).await?;
                Ok(product.map_or(ChangeOutcome::UnknownSku, ChangeOutcome::Changed))
            }
            Some(2) => Ok(ChangeOutcome::Refused(ChangeError::NotModifiable)),
            Some(_) => Ok(ChangeOutcome::Refused(TermsError::NotExtended.into())),
        }
    }

    /// Calls a script that decides about one sale, and returns its reply, or `None` if there is no such product. A sale that
    /// Redis lacks is rebuilt from the store first.
    async fn decide(&self, script: Script, sku: &Sku, arguments: Vec<String>) -> Result<Option<i64>> {
        for _round in 0..REBUILDS_MAX {
            let calls = [sale_call(sku, arguments.clone())];
            match self.call(script, &[&self.now()], &calls).await?.first() {
                Some(Value::Int(0)) if self.rebuild(sku).await?.is_none() => return Ok(None),
                Some(Value::Int(0)) => {}
                Some(Value::Int(decision)) => return Ok(Some(*decision)),
                _ => return Err(malformed_reply()),
            }
        }
        Err(unavailable())
    }

    /// Returns the product as Redis has decided, and saves that in the store.
    async fn follow_decision(&self, sku: &Sku) -> Result<Option<Product>> {
        let Some(product) = self.product(sku).await? else { return Ok(None) };
        self.save_decision(&product).await;
        Ok(Some(product))
    }

    /// Saves in the store what was decided. If that fails, reconciliation repeats it.
    async fn save_decision(&self, product: &Product) {
        let saved = tokio::time::timeout(super::CATALOGUE_TIMEOUT, self.ledger.save_decision(product)).await;
        let problem = match saved {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.with_causes().to_string(),
            Err(_elapsed) => "timed out".to_owned(),
        };
        tracing::warn!(sku = %product.sku, error = problem, "cannot save in the store that an operator has ended or extended a sale; retrying every few seconds");
    }

    /// Saves decisions of operators that the store does not have yet. `products` are those of the store.
    pub(super) async fn repeat_decision(&self, in_store: &Product, in_redis: &Product) {
        if in_store.id == in_redis.id && is_behind(in_store, in_redis) {
            self.save_decision(in_redis).await;
        }
    }

    /// Lists purchases by time: those that the store has, and those that wait to be recorded. These are read first, so none is
    /// missed that is recorded meanwhile.
    pub(super) async fn list_purchases(
        &self,
        product: &Product,
        after: Option<PurchasePosition>,
        limit: usize,
    ) -> Result<Vec<Purchase>> {
        let bounds = [&*WAITING_MAX.to_string(), "0"];
        let replies = self.call(Script::SaleRead, &bounds, &[sale_call(&product.sku, Vec::new())]).await?;
        let (length, entries) = replies.first().and_then(reply::parse_entries).ok_or_else(malformed_reply)?;
        if length > WAITING_MAX {
            let cause =
                format!("{length} purchases wait to be recorded; list them when the store has caught up");
            return Err(weir_store::Error::unavailable(crate::ENGINE, cause));
        }
        let mut purchases = self.ledger.list_purchases(product, after, limit).await?;
        let recorded: HashSet<_> = purchases.iter().map(|purchase| purchase.buyer.clone()).collect();
        let waiting = entries.into_iter().filter_map(|entry| entry.purchase).filter(|purchase| {
            let is_next = after.is_none_or(|after| purchase.position() > after);
            purchase.product == product.id && is_next && !recorded.contains(&purchase.buyer)
        });
        purchases.extend(waiting);
        purchases.sort_unstable_by_key(Purchase::position);
        purchases.truncate(limit);
        Ok(purchases)
    }
}

/// Returns whether the store lacks an end by the operator or an extension.
fn is_behind(in_store: &Product, in_redis: &Product) -> bool {
    let by_operator = SaleState::Ended(EndReason::EndedByOperator);
    let is_final = in_store.sale.state == SaleState::Ended(EndReason::SoldOut);
    (in_redis.sale.state == by_operator && in_store.sale.state != by_operator && !is_final)
        || in_redis.sale.terms.end > in_store.sale.terms.end
}
