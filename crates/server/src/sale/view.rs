//! An in-memory view of all sales: answers their status and publishes their changes.
//!
//! If this process owns the store, every change passes through it and the view is always current. If other servers share the
//! store, a call refreshes the view when it is older than 100 ms, once for all concurrent calls. While there are event
//! streams, the view is refreshed that often too; if the store publishes its changes, only when they start and every two
//! seconds. Without streams and calls nothing is read. A timer advances states when they are due, by the store's time.

mod state;
mod sync;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;
use weir_core::sale::{EndReason, Sale, SaleState, Sku};
use weir_core::{Clock, Timestamp};
use weir_store::sale::{Product, ProductId, SNAPSHOT_ENDED_MAX, SNAPSHOT_OPEN_MAX, SaleSnapshot, SaleStore};
use weir_store::{Error, Result};

use self::state::{ReadStart, ViewState};
use super::event_ring::{EventRing, Origin};

/// The greatest age of the view on a shared store.
const AGE_MAX: Duration = Duration::from_millis(100);
/// How long a product that was updated stays in the view although a snapshot that is not current lacks it.
const UPDATED_FOR: Duration = Duration::from_secs(5);
/// How often a refresh is repeated because products were created or deleted meanwhile.
const ATTEMPTS: u32 = 3;

pub(crate) struct SaleView {
    store: Arc<dyn SaleStore>,
    /// The store's clock, where this process can read it.
    clock: Option<Arc<dyn Clock>>,
    /// Whether other processes may change the store.
    is_shared: bool,
    state: RwLock<ViewState>,
    /// Held during a refresh, so that concurrent calls share it.
    refreshing: Mutex<()>,
    /// Raised before and after each change of products by this process: odd while one is running.
    product_changes: AtomicU64,
    events: Arc<EventRing>,
    /// Notified when a state may be due earlier than the timer expects.
    timer_reset: Notify,
    /// Whether the store publishes its changes at present.
    has_store_events: AtomicBool,
    /// Notified when the view must be refreshed for event streams.
    refresh_requested: Notify,
}

/// The result of looking up a sku.
#[derive(Debug)]
pub(crate) enum Lookup {
    /// The product, in its present state.
    Found(Product),
    NotFound,
    /// The view does not hold all products, so the store has to be asked.
    NotInView,
}

impl SaleView {
    /// Creates an empty view. `clock` is the store's clock, if this process can read it.
    #[must_use]
    pub(crate) fn new(
        store: Arc<dyn SaleStore>,
        clock: Option<Arc<dyn Clock>>,
        is_shared: bool,
        events: Arc<EventRing>,
    ) -> Self {
        Self {
            store,
            clock,
            is_shared,
            state: RwLock::default(),
            refreshing: Mutex::default(),
            product_changes: AtomicU64::new(0),
            events,
            timer_reset: Notify::new(),
            has_store_events: AtomicBool::new(false),
            refresh_requested: Notify::new(),
        }
    }

    /// Looks up a sale by its sku.
    pub(crate) async fn find(&self, sku: &Sku) -> Result<Lookup> {
        self.refresh().await?;
        let state = self.state.read();
        Ok(match state.products.get(sku) {
            Some(product) => Lookup::Found(self.at_present(&state, product)),
            None if state.is_complete => Lookup::NotFound,
            None => Lookup::NotInView,
        })
    }

    /// Returns the most relevant sale: an active one, else the next, else the last that ended.
    pub(crate) async fn current(&self) -> Result<Option<Product>> {
        self.refresh().await?;
        let state = self.state.read();
        let products = state.products.values().map(|product| self.at_present(&state, product));
        let rank = |product: &Product| {
            let terms = &product.sale.terms;
            match product.sale.state {
                SaleState::Active => (0, terms.start.as_micros(), product.id),
                SaleState::Upcoming => (1, terms.start.as_micros(), product.id),
                SaleState::Ended(_) => (2, terms.end.as_micros().saturating_neg(), product.id),
            }
        };
        Ok(products.min_by_key(rank))
    }

    /// Runs a change of products and returns its result. The view must learn the result even if the caller disconnects, so
    /// callers run this in a task of its own.
    pub(crate) async fn run_change<T>(&self, change: impl Future<Output = Result<T>>) -> Result<T> {
        self.product_changes.fetch_add(1, Ordering::SeqCst);
        let outcome = change.await;
        self.product_changes.fetch_add(1, Ordering::SeqCst);
        if outcome.is_err() {
            self.invalidate();
        }
        outcome
    }

    /// Marks the view as outdated, after an unknown outcome: the next call reads the store first.
    pub(crate) fn invalidate(&self) {
        let mut state = self.state.write();
        state.read_at = None;
        state.invalidations += 1;
    }

    /// Adds or updates a product.
    pub(crate) fn update(&self, product: Product) {
        let mut state = self.state.write();
        state.updated.retain(|_, at| at.elapsed() < UPDATED_FOR);
        state.updated.insert(product.sku.clone(), Instant::now());
        self.merge(&mut state, product, Origin::Here);
        drop(state);
        self.timer_reset.notify_one();
    }

    /// Removes a deleted product.
    pub(crate) fn remove(&self, sku: &Sku) {
        let mut state = self.state.write();
        state.updated.remove(sku);
        if state.products.remove(sku).is_some() {
            self.events.remove(sku);
        }
    }

    /// Records that at most `stock` units of a product are left.
    pub(crate) fn record_stock(&self, id: ProductId, stock: u32, origin: Origin) {
        let mut state = self.state.write();
        let Some(product) = state.products.values().find(|product| product.id == id) else { return };
        let mut update = product.clone();
        update.sale.sold = update.sale.terms.initial_stock.get().saturating_sub(stock);
        // The last unit ends the sale whatever the time, and any unit shows that it has begun.
        update.sale.state = update.sale.state.max(SaleState::Active);
        update.sale.advance(Timestamp::from_micros(i64::MIN));
        self.merge(&mut state, update, origin);
    }

    /// Reads the store if the view is outdated.
    pub(crate) async fn refresh(&self) -> Result<()> {
        if self.is_fresh() {
            return Ok(());
        }
        let _guard = self.refreshing.lock().await;
        // Another call may have refreshed the view while this one waited.
        if self.is_fresh() {
            return Ok(());
        }
        for attempt in 1..=ATTEMPTS {
            let start = ReadStart { at: Instant::now(), invalidations: self.invalidations() };
            let before = self.product_changes.load(Ordering::SeqCst);
            let snapshot = self.store.snapshot().await?;
            let is_same = self.product_changes.load(Ordering::SeqCst) == before && before.is_multiple_of(2);
            if is_same || attempt == ATTEMPTS {
                self.apply_snapshot(snapshot, start, is_same);
                return Ok(());
            }
        }
        Err(Error::unavailable("sale", "the view could not be refreshed because products kept changing"))
    }

    fn invalidations(&self) -> u64 {
        self.state.read().invalidations
    }

    fn is_fresh(&self) -> bool {
        let state = self.state.read();
        state.read_at.is_some_and(|at| !self.is_shared || at.elapsed() < AGE_MAX)
    }

    /// Applies a snapshot of the store. Products that it lacks are removed if `is_certain`: no product was created or deleted
    /// here while it was read.
    fn apply_snapshot(&self, snapshot: SaleSnapshot, start: ReadStart, is_certain: bool) {
        let ended = |product: &&Product| product.sale.state.end_reason().is_some();
        let ended = snapshot.products.iter().filter(ended).count();
        let open = snapshot.products.len() - ended;
        let mut state = self.state.write();
        state.is_complete =
            is_certain && snapshot.is_current && open < SNAPSHOT_OPEN_MAX && ended < SNAPSHOT_ENDED_MAX;
        if is_certain {
            let named: HashMap<&Sku, ProductId> =
                snapshot.products.iter().map(|product| (&product.sku, product.id)).collect();
            state.updated.retain(|_, at| !snapshot.is_current && at.elapsed() < UPDATED_FOR);
            let is_deleted = |sku: &&Sku| !named.contains_key(*sku) && !state.updated.contains_key(*sku);
            let deleted: Vec<Sku> = state.products.keys().filter(is_deleted).cloned().collect();
            for sku in deleted {
                state.products.remove(&sku);
                self.events.remove(&sku);
            }
        }
        state.read_at = (state.invalidations == start.invalidations).then_some(start.at);
        state.sync_time(snapshot.now);
        for product in snapshot.products {
            self.merge(&mut state, product, Origin::Elsewhere);
        }
        state.was_read = true;
        drop(state);
        self.timer_reset.notify_one();
    }

    /// Merges an update of a product into the view and publishes the difference. Updates may arrive out of order, so within one
    /// product nothing goes backwards. Its terms change before anything is sold; later only its end, to a later time.
    fn merge(&self, state: &mut ViewState, update: Product, origin: Origin) {
        let Some(product) = state.products.get_mut(&update.sku).filter(|product| product.id == update.id)
        else {
            let is_newer = state.products.get(&update.sku).is_none_or(|product| product.id < update.id);
            if is_newer {
                self.events.remove(&update.sku);
                // Created on another server and first seen after it began: nothing else publishes the state here.
                if state.was_read && update.sale.state == SaleState::Active {
                    let from = Sale::new(update.sale.terms.clone()).stage();
                    self.events.publish(&update, from, origin);
                }
                state.products.insert(update.sku.clone(), update);
            }
            return;
        };
        let (from, sold, before) = (product.sale.stage(), product.sale.sold, product.sale.state);
        let was_extended = update.sale.terms.end > product.sale.terms.end;
        if before == SaleState::Upcoming {
            product.sale.terms = update.sale.terms;
        } else if was_extended {
            product.sale.terms.end = update.sale.terms.end;
        }
        product.sale.sold = sold.max(update.sale.sold);
        product.sale.state = match before {
            // The store had extended the sale before its time was over; this server did not know.
            SaleState::Ended(EndReason::TimeExpired) if was_extended => update.sale.state,
            SaleState::Ended(_) => before,
            SaleState::Upcoming | SaleState::Active => before.max(update.sale.state),
        };
        if product.sale.stage() != from {
            self.events.publish(product, from, origin);
        }
    }

    /// Returns a product with the state that is due now.
    fn at_present(&self, state: &ViewState, product: &Product) -> Product {
        let mut product = product.clone();
        if let Some(now) = self.now(state) {
            product.sale.advance(now);
        }
        product
    }

    /// Returns the store's time: from its clock, or estimated from the last snapshot.
    fn now(&self, state: &ViewState) -> Option<Timestamp> {
        match &self.clock {
            Some(clock) => Some(clock.now()),
            None => state.time(),
        }
    }
}

#[cfg(test)]
mod tests;
