//! Bringing a sale into Redis: when it is made, and when Redis has forgotten it.

use std::time::Duration;

use weir_core::sale::{EndReason, SaleState, Sku};
use weir_store::Result;
use weir_store::sale::{Product, Purchase};

use super::{Parts, follow, item, unreadable};
use crate::script::Script;

/// Purchases in one call.
const PAGE: usize = 1_000;
/// How long everybody has to write down what they have sold, before a running sale that Redis forgot is opened again: several
/// times as long as it takes.
const GRACE: Duration = Duration::from_millis(1_200);

impl Parts {
    /// Puts a sale and purchases of it into Redis, and opens it if that was all.
    pub(super) async fn open(&self, product: &Product, purchases: &[Purchase], is_all: bool) -> Result<bool> {
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
            u8::from(is_all).to_string(),
            purchases.len().to_string(),
        ];
        for Purchase { buyer, receipt, .. } in purchases {
            arguments.extend([
                buyer.to_string(),
                receipt.number.to_string(),
                receipt.at.as_micros().to_string(),
            ]);
        }
        let answers = self.ask(Script::SaleOpen, &[], &[item(&product.sku, arguments)]).await?;
        Ok(matches!(answers.first().ok_or_else(unreadable)?, redis::Value::Int(1)))
    }

    /// Rebuilds a sale that Redis does not know, from what the store knows; none when there is no such product.
    pub(super) async fn rebuild(&self, sku: &Sku) -> Result<Option<()>> {
        let _turn = self.rebuilding.lock().await;
        let peeked = self.peek(std::slice::from_ref(sku)).await?;
        if peeked.first().is_some_and(|peeked| peeked.product.is_some()) {
            // Somebody else was faster.
            return Ok(Some(()));
        }
        let Some(product) = self.ledger.product(sku).await? else { return Ok(None) };
        if product.sale.state != SaleState::Upcoming {
            tracing::warn!(%sku, "Redis has lost a sale; it is rebuilt from the store before it sells again");
            follow::record_unsettled(self).await?;
            tokio::time::sleep(GRACE).await;
        }
        self.bring(&product).await?;
        // A product that was removed meanwhile must not stay here.
        match self.ledger.product(sku).await? {
            Some(now) if now.id == product.id => {
                self.note(&product);
                Ok(Some(()))
            }
            _ => {
                self.forget(sku, product.id.0).await?;
                Ok(None)
            }
        }
    }

    /// Brings all purchases that the store knows of, page by page, and opens the sale with the last.
    async fn bring(&self, product: &Product) -> Result<()> {
        let mut after = None;
        loop {
            let page = self.ledger.purchases(product.id, after.as_ref(), PAGE).await?;
            let is_last = page.len() < PAGE;
            self.open(product, &page, is_last).await?;
            if is_last {
                return Ok(());
            }
            after = page.last().map(|purchase| purchase.buyer.clone());
        }
    }

    /// Removes a product: from the store first, so that nobody rebuilds it from there.
    pub(super) async fn delete(&self, sku: &Sku) -> Result<bool> {
        let id = self.ledger.product(sku).await?.map_or(i64::MAX, |product| product.id.0);
        let was_there = self.ledger.delete_product(sku).await?;
        let was_here = self.forget(sku, id).await?;
        self.changes.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let mut catalogue = self.catalogue.write();
        if let Some(catalogue) = &mut *catalogue {
            catalogue.remove(sku);
        }
        Ok(was_there || was_here)
    }

    async fn forget(&self, sku: &Sku, id: i64) -> Result<bool> {
        let answers =
            self.ask(Script::SaleDrop, &[], &[item(sku, vec![id.to_string(), sku.to_string()])]).await?;
        Ok(matches!(answers.first(), Some(redis::Value::Int(1))))
    }
}
