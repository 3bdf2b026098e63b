//! Loads sales into Redis: new and changed ones, and those that Redis has lost. Also removes them.

use std::time::Duration;

use weir_core::sale::{EndReason, SaleState, Sku};
use weir_store::Result;
use weir_store::sale::{DeleteOutcome, Product, Purchase};

use super::{SharedSales, malformed_reply, persist, sale_call};
use crate::script::Script;

/// The most purchases in one call.
const PAGE: usize = 1_000;
/// How long every server has to record its purchases before a running sale that Redis has lost is opened again: several times
/// as long as that takes.
const GRACE: Duration = Duration::from_millis(1_200);

impl SharedSales {
    /// Puts a sale and some of its purchases into Redis, and opens it after the last of them. Returns false if Redis has a newer
    /// product of this sku.
    pub(super) async fn load_sale(
        &self,
        product: &Product,
        purchases: &[Purchase],
        is_last: bool,
    ) -> Result<bool> {
        let (terms, sale) = (&product.sale.terms, &product.sale);
        let mut arguments = vec![
            product.id.0.to_string(),
            product.sku.to_string(),
            terms.product_name.to_string(),
            terms.initial_stock.get().to_string(),
            terms.start.as_micros().to_string(),
            terms.end.as_micros().to_string(),
            product.created_at.as_micros().to_string(),
            sale.state.as_str().to_owned(),
            sale.state.end_reason().map(EndReason::as_str).unwrap_or_default().to_owned(),
            u8::from(is_last).to_string(),
            purchases.len().to_string(),
        ];
        for Purchase { buyer, receipt, .. } in purchases {
            arguments.extend([
                buyer.to_string(),
                receipt.number.to_string(),
                receipt.at.as_micros().to_string(),
            ]);
        }
        let replies = self.call(Script::SaleOpen, &[], &[sale_call(&product.sku, arguments)]).await?;
        Ok(matches!(replies.first().ok_or_else(malformed_reply)?, redis::Value::Int(1)))
    }

    /// Rebuilds a sale that Redis lacks from the store. Returns `None` if there is no such product.
    pub(super) async fn rebuild(&self, sku: &Sku) -> Result<Option<()>> {
        let _guard = self.rebuilding.lock().await;
        let peeked = self.peek(std::slice::from_ref(sku)).await?;
        if peeked.first().is_some_and(|peeked| peeked.product.is_some()) {
            // Another call has rebuilt it meanwhile.
            return Ok(Some(()));
        }
        let Some(product) = self.ledger.product(sku).await? else { return Ok(None) };
        if product.sale.state != SaleState::Upcoming {
            tracing::warn!(%sku, "Redis has lost a sale; it is rebuilt from the store before it sells again");
            persist::record_own(self).await?;
            tokio::time::sleep(GRACE).await;
        }
        self.load_all(&product).await?;
        // A product that was removed meanwhile must not stay in Redis.
        match self.ledger.product(sku).await? {
            Some(now) if now.id == product.id => {
                self.cache_product(&product);
                Ok(Some(()))
            }
            _ => {
                self.drop_sale(sku, product.id.0, false).await?;
                Ok(None)
            }
        }
    }

    /// Loads all purchases of the store page by page, and opens the sale with the last page.
    async fn load_all(&self, product: &Product) -> Result<()> {
        let mut after = None;
        loop {
            let page = self.ledger.purchases(product.id, after.as_ref(), PAGE).await?;
            let is_last = page.len() < PAGE;
            self.load_sale(product, &page, is_last).await?;
            if is_last {
                return Ok(());
            }
            after = page.last().map(|purchase| purchase.buyer.clone());
        }
    }

    /// Removes a product: from the store first, so that no server rebuilds it from there. With `only_unused` Redis is asked
    /// before, which knows best whether anything is sold.
    pub(super) async fn delete(&self, sku: &Sku, only_unused: bool) -> Result<DeleteOutcome> {
        let id = self.ledger.product(sku).await?.map_or(i64::MAX, |product| product.id.0);
        if only_unused {
            // A sale that Redis lacks is rebuilt first: all that was sold is in Redis then.
            self.product(sku).await?;
            if self.drop_sale(sku, id, true).await? == DeleteOutcome::InUse {
                return Ok(DeleteOutcome::InUse);
            }
        }
        let in_store = self.ledger.delete_product(sku, only_unused).await?;
        if in_store == DeleteOutcome::InUse {
            return Ok(in_store);
        }
        let in_redis = self.drop_sale(sku, id, false).await?;
        self.remove_events(id).await;
        self.own_changes.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let mut catalogue = self.catalogue.write();
        if let Some(catalogue) = &mut *catalogue {
            catalogue.remove(sku);
        }
        Ok(if in_store == DeleteOutcome::Deleted { in_store } else { in_redis })
    }

    /// Deletes the sale in Redis if it is that of product `id` or an older one, with `only_unused` if nothing is sold.
    async fn drop_sale(&self, sku: &Sku, id: i64, only_unused: bool) -> Result<DeleteOutcome> {
        let arguments = vec![id.to_string(), sku.to_string(), u8::from(only_unused).to_string()];
        let replies = self.call(Script::SaleDrop, &[&self.now()], &[sale_call(sku, arguments)]).await?;
        match replies.first() {
            Some(redis::Value::Int(1)) => Ok(DeleteOutcome::Deleted),
            Some(redis::Value::Int(2)) => Ok(DeleteOutcome::InUse),
            Some(redis::Value::Int(0)) => Ok(DeleteOutcome::UnknownSku),
            _ => Err(malformed_reply()),
        }
    }
}
