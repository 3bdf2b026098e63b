//! What this server knows of sales: status is answered from here, and changes are told from here.
//!
//! Where this process owns the store, everything that changes passes through it and the board is always current. Where others
//! share the store, the board is read anew when somebody asks and it is older than a tenth of a second, once for all who
//! ask meanwhile. While somebody listens it is read as often, or, where the store tells of changes by itself, whenever it
//! begins to, and seldom after that; while nobody does, nothing is read. States turn by a timer to the next one that is
//! due, by the store's time.

mod state;
mod sync;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;
use weir_core::sale::{SaleState, Sku};
use weir_core::{Clock, Timestamp};
use weir_store::sale::{Product, ProductId, SNAPSHOT_ENDED_MAX, SNAPSHOT_OPEN_MAX, SaleSnapshot, SaleStore};
use weir_store::{Error, Result};

use self::state::{ReadStart, ViewState};
use super::events_ring::Events;

/// How old what is told may be.
const FRESH_FOR: Duration = Duration::from_millis(100);
/// For so long a product that was heard of stays, though a list that is not quite current does not name it.
const LEARNED_FOR: Duration = Duration::from_secs(5);
/// How often a reading is repeated because products were made or removed meanwhile.
const ATTEMPTS: u32 = 3;

/// What this server knows of sales.
pub(crate) struct SaleView {
    store: Arc<dyn SaleStore>,
    /// The store's clock, where this process can read it.
    clock: Option<Arc<dyn Clock>>,
    /// Whether other processes may change the store.
    is_shared: bool,
    known: RwLock<ViewState>,
    reading: Mutex<()>,
    /// Counts products made and removed here, before and after each.
    membership: AtomicU64,
    events: Arc<Events>,
    /// Rung when there may be an earlier turn to wait for.
    earlier: Notify,
    /// Whether the store tells of changes by itself at present.
    is_told: AtomicBool,
    /// Rung when the store has to be read for those who listen.
    stirred: Notify,
}

/// What the board says of a sku.
#[derive(Debug)]
pub(crate) enum Seen {
    /// The product, in its present state.
    Here(Product),
    /// There is none.
    Nowhere,
    /// The store has to be asked: there are more than the board holds.
    Unknown,
}

impl SaleView {
    /// A board of this store. `clock` is the store's, where it can be read here.
    #[must_use]
    pub(crate) fn new(
        store: Arc<dyn SaleStore>,
        clock: Option<Arc<dyn Clock>>,
        is_shared: bool,
        events: Arc<Events>,
    ) -> Self {
        Self {
            store,
            clock,
            is_shared,
            known: RwLock::default(),
            reading: Mutex::default(),
            membership: AtomicU64::new(0),
            events,
            earlier: Notify::new(),
            is_told: AtomicBool::new(false),
            stirred: Notify::new(),
        }
    }

    /// A sale by its sku, in its present state.
    pub(crate) async fn find(&self, sku: &Sku) -> Result<Seen> {
        self.freshen().await?;
        let known = self.known.read();
        Ok(match known.products.get(sku) {
            Some(product) => Seen::Here(self.present(&known, product)),
            None if known.is_whole => Seen::Nowhere,
            None => Seen::Unknown,
        })
    }

    /// The sale that matters most: the one that runs, else the next, else the last.
    pub(crate) async fn current(&self) -> Result<Option<Product>> {
        self.freshen().await?;
        let known = self.known.read();
        let products = known.products.values().map(|product| self.present(&known, product));
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

    /// Makes, changes or removes a product. The board must know what came of it also when whoever asked for it has gone, so
    /// callers run this as a task of its own.
    /// What the change said.
    pub(crate) async fn changing<T>(&self, change: impl Future<Output = Result<T>>) -> Result<T> {
        self.membership.fetch_add(1, Ordering::SeqCst);
        let outcome = change.await;
        self.membership.fetch_add(1, Ordering::SeqCst);
        if outcome.is_err() {
            self.invalidate();
        }
        outcome
    }

    /// Takes note that nobody knows what became of something: the store is read before anything is answered.
    pub(crate) fn invalidate(&self) {
        let mut known = self.known.write();
        known.read = None;
        known.invalidations += 1;
    }

    /// Takes note of how a product stands.
    pub(crate) fn learn(&self, product: Product) {
        let mut known = self.known.write();
        known.learned.retain(|_, at| at.elapsed() < LEARNED_FOR);
        known.learned.insert(product.sku.clone(), Instant::now());
        self.merge(&mut known, product);
        drop(known);
        self.earlier.notify_one();
    }

    /// Takes note that a product is gone.
    pub(crate) fn forget(&self, sku: &Sku) {
        let mut known = self.known.write();
        known.learned.remove(sku);
        if known.products.remove(sku).is_some() {
            self.events.forget(sku);
        }
    }

    /// Takes note of units sold: so many are left, or fewer.
    pub(crate) fn sold(&self, id: ProductId, stock: u32) {
        let mut known = self.known.write();
        let Some(product) = known.products.values().find(|product| product.id == id) else { return };
        let mut news = product.clone();
        news.sale.sold = news.sale.terms.initial_stock.get().saturating_sub(stock);
        // The last unit ends the sale whatever the time, and any unit shows that it has begun.
        news.sale.state = news.sale.state.max(SaleState::Active);
        news.sale.advance(Timestamp::from_micros(i64::MIN));
        self.merge(&mut known, news);
    }

    /// Reads the store, if what is known is too old.
    pub(crate) async fn freshen(&self) -> Result<()> {
        if self.is_fresh() {
            return Ok(());
        }
        let _turn = self.reading.lock().await;
        // Somebody else may have read it while this call waited for its turn.
        if self.is_fresh() {
            return Ok(());
        }
        for attempt in 1..=ATTEMPTS {
            let asked = ReadStart { at: Instant::now(), invalidations: self.invalidations() };
            let before = self.membership.load(Ordering::SeqCst);
            let snapshot = self.store.snapshot().await?;
            let is_same = self.membership.load(Ordering::SeqCst) == before && before.is_multiple_of(2);
            if is_same || attempt == ATTEMPTS {
                self.take(snapshot, asked, is_same);
                return Ok(());
            }
        }
        Err(Error::unavailable("sale", "the view could not be read"))
    }

    fn invalidations(&self) -> u64 {
        self.known.read().invalidations
    }

    fn is_fresh(&self) -> bool {
        let known = self.known.read();
        known.read.is_some_and(|at| !self.is_shared || at.elapsed() < FRESH_FOR)
    }

    /// Takes over what the store said. What it does not name is gone, if no product was made or removed meanwhile and it
    /// has named all there are.
    fn take(&self, snapshot: SaleSnapshot, asked: ReadStart, is_certain: bool) {
        let ended = |product: &&Product| product.sale.state.end_reason().is_some();
        let ended = snapshot.products.iter().filter(ended).count();
        let open = snapshot.products.len() - ended;
        let mut known = self.known.write();
        known.is_whole =
            is_certain && snapshot.is_current && open < SNAPSHOT_OPEN_MAX && ended < SNAPSHOT_ENDED_MAX;
        if is_certain {
            let named: HashMap<&Sku, ProductId> =
                snapshot.products.iter().map(|product| (&product.sku, product.id)).collect();
            known.learned.retain(|_, at| !snapshot.is_current && at.elapsed() < LEARNED_FOR);
            let is_gone = |sku: &&Sku| !named.contains_key(*sku) && !known.learned.contains_key(*sku);
            let gone: Vec<Sku> = known.products.keys().filter(is_gone).cloned().collect();
            for sku in gone {
                known.products.remove(&sku);
                self.events.forget(&sku);
            }
        }
        known.read = (known.invalidations == asked.invalidations).then_some(asked.at);
        known.hear(snapshot.now);
        for product in snapshot.products {
            self.merge(&mut known, product);
        }
        known.was_read = true;
        drop(known);
        self.earlier.notify_one();
    }

    /// Joins what is known of a product with what is heard of it, and tells the difference. News may be older than what is
    /// known, so within one product nothing goes back but its terms, which only change before anything is sold.
    fn merge(&self, known: &mut ViewState, news: Product) {
        let Some(product) = known.products.get_mut(&news.sku).filter(|product| product.id == news.id) else {
            let is_newer = known.products.get(&news.sku).is_none_or(|product| product.id < news.id);
            if is_newer {
                self.events.forget(&news.sku);
                // Made elsewhere, and heard of only after it began: nobody else tells those who listen.
                if known.was_read && news.sale.state == SaleState::Active {
                    self.events.tell_state(&news.sku, SaleState::Active);
                }
                known.products.insert(news.sku.clone(), news);
            }
            return;
        };
        let (sku, sold, state) = (news.sku, product.sale.sold, product.sale.state);
        if state == SaleState::Upcoming {
            product.sale.terms = news.sale.terms;
        }
        product.sale.sold = sold.max(news.sale.sold);
        product.sale.state = if let SaleState::Ended(_) = state { state } else { state.max(news.sale.state) };
        if product.sale.sold > sold {
            self.events.tell_stock(&sku, product.sale.stock());
        }
        if product.sale.state != state {
            self.events.tell_state(&sku, product.sale.state);
        }
    }

    fn present(&self, known: &ViewState, product: &Product) -> Product {
        let mut product = product.clone();
        if let Some(now) = self.now(known) {
            product.sale.advance(now);
        }
        product
    }

    /// The store's time: read, or reckoned from when it was last heard.
    fn now(&self, known: &ViewState) -> Option<Timestamp> {
        match &self.clock {
            Some(clock) => Some(clock.now()),
            None => known.time(),
        }
    }
}

#[cfg(test)]
mod tests;
