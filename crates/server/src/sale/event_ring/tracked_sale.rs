//! How far the events of one sale have led, where they should lead, and how many may be published meanwhile.

use std::time::Duration;

use tokio::time::Instant;
use weir_core::sale::{SaleChange, SaleStage, SaleState, Sku, Stock};
use weir_store::sale::{Product, ProductId, Publication};

/// Stocks of one sale that are published one by one before they are throttled.
pub(super) const BURST: u32 = 20;
/// How often the throttle permits one more stock.
pub(super) const INTERVAL: Duration = Duration::from_millis(50);

/// A sale whose events are published.
#[derive(Debug)]
pub(super) struct TrackedSale {
    pub(super) product: ProductId,
    initial_stock: Stock,
    /// What listeners know: exactly what the events up to the latest have told.
    pub(super) published: SaleStage,
    /// Whether `published` is from the events. Until then it is what this server knew, which the shared log may not have told.
    pub(super) is_confirmed: bool,
    /// What they should know.
    target: SaleStage,
    /// When the target may be published, if it is not yet.
    ready_at: Option<Instant>,
    /// A token bucket for stocks.
    tokens: u32,
    refilled_at: Instant,
}

impl TrackedSale {
    pub(super) fn new(product: ProductId, initial_stock: Stock, published: SaleStage) -> Self {
        Self {
            product,
            initial_stock,
            published,
            is_confirmed: false,
            target: published,
            ready_at: None,
            tokens: BURST,
            refilled_at: Instant::now(),
        }
    }

    /// Tracks a sale that an event has led to `published`. The first target brings the initial stock.
    pub(super) fn confirmed(product: ProductId, published: SaleStage) -> Option<Self> {
        let sale = Self::new(product, Stock::new(published.stock.max(1)).ok()?, published);
        Some(Self { is_confirmed: true, ..sale })
    }

    /// Returns whether an event that leads to `stage` tells listeners anything.
    pub(super) fn is_news(&self, stage: &SaleStage) -> bool {
        !self.is_confirmed || self.published.is_before(stage)
    }

    /// Sets what listeners should know, `ready_at` if they do not know it by then.
    pub(super) fn aim_at(&mut self, product: &Product, ready_at: Instant) {
        self.initial_stock = product.sale.terms.initial_stock;
        let to = product.sale.stage();
        if (self.published.state, to.state) == (SaleState::Upcoming, SaleState::Upcoming) {
            // A sale that has not begun has no events, but what it offers may change.
            (self.published, self.target) = (to, to);
        } else if self.published.is_before(&to) {
            self.target = to;
            self.ready_at = Some(self.ready_at.map_or(ready_at, |at| at.min(ready_at)));
        }
    }

    /// Records what the events have told.
    pub(super) fn record(&mut self, published: SaleStage) {
        (self.published, self.is_confirmed) = (published, true);
        if !published.is_before(&self.target) {
            self.ready_at = None;
        }
    }

    /// Returns when the target is to be published, or `None` if it is known.
    pub(super) fn due_at(&self) -> Option<Instant> {
        let ready_at = self.ready_at?;
        let is_throttled = self.tokens == 0 && self.published.state == self.target.state;
        Some(if is_throttled { ready_at.max(self.refilled_at + INTERVAL) } else { ready_at })
    }

    /// Returns whether the target is to be published at `now`.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.refilled_at).as_millis();
        let added = u32::try_from(elapsed / INTERVAL.as_millis().max(1)).unwrap_or(u32::MAX);
        if added > 0 {
            self.tokens = self.tokens.saturating_add(added).min(BURST);
            self.refilled_at = now;
        }
        self.due_at().is_some_and(|at| at <= now)
    }

    /// Returns the events that lead to the target.
    pub(super) fn changes(&self) -> Vec<(SaleChange, SaleStage)> {
        self.published.changes_to(&self.target, self.initial_stock, self.tokens)
    }

    pub(super) fn publication(&self, sku: &Sku) -> Publication {
        Publication {
            sku: sku.clone(),
            product: self.product,
            from: self.published,
            to: self.target,
            initial_stock: self.initial_stock,
            stocks_max: self.tokens,
        }
    }

    /// Takes a token for each stock that was published.
    pub(super) fn spend(&mut self, stocks: usize) {
        self.tokens = self.tokens.saturating_sub(u32::try_from(stocks).unwrap_or(u32::MAX));
    }
}
