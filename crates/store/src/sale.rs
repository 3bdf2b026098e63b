//! Sale at the store: its commands and outcomes, the traits engines implement, and the plan for a batch of purchases.
//!
//! A product has an id besides its sku: one that is deleted and created again under the same sku is another product, and
//! purchases of the first must not be recorded for the second.

mod event_log;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use weir_core::sale::{
    ChangeError, PurchaseReceipt, PurchaseRefusal, Sale, SaleState, Sku, Terms, TermsChange, TermsError,
};
use weir_core::{Timestamp, UserId};

pub use self::event_log::{EventId, EventIdError, EventPage, LoggedEvent, Publication};
use crate::throttle::AddressLimit;
use crate::{Batch, Error, Result};

/// The most sales that are not over in a [`SaleSnapshot`]; running ones come first.
pub const SNAPSHOT_OPEN_MAX: usize = 1_000;
/// The most sales that are over in a [`SaleSnapshot`]; the latest come first.
pub const SNAPSHOT_ENDED_MAX: usize = 100;
/// The most products that [`SaleAudit`] lists one by one.
pub const AUDIT_ITEMS_MAX: usize = 100;

/// The store's id of a product. It is never reused, even if the sku is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProductId(pub i64);

/// A product and its sale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    pub id: ProductId,
    pub sku: Sku,
    /// The sale, in its state at the store's present time.
    pub sale: Sale,
    pub created_at: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CreateOutcome {
    Created(Product),
    /// The sku is taken.
    Exists,
    /// The sale would have started already.
    Refused(TermsError),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeOutcome {
    Changed(Product),
    Refused(ChangeError),
    UnknownSku,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndOutcome {
    Ended(Product),
    /// The sale has not begun, or has ended already.
    NotActive,
    UnknownSku,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteOutcome {
    Deleted,
    /// Only unused products may be deleted, and this one is active or has purchases.
    InUse,
    UnknownSku,
}

/// A request for one unit of a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buy {
    pub sku: Sku,
    pub buyer: UserId,
    pub limits: AttemptLimits,
}

/// The limits by which a store that several servers share counts an attempt to buy before it decides it. Other stores count
/// nothing: then the throttles of each server are all there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttemptLimits {
    /// Attempts of the buyer in any second; 0 is no limit.
    pub user_per_second: u32,
    pub address: Option<AddressLimit>,
}

/// Who has made too many attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThrottledBy {
    User,
    Address,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuyOutcome {
    Bought {
        product: ProductId,
        receipt: PurchaseReceipt,
        /// Units left after this purchase.
        stock: u32,
    },
    Refused(PurchaseRefusal),
    UnknownSku,
    /// The attempt is one too many on all servers together. Nothing was decided.
    Throttled {
        by: ThrottledBy,
        retry_after: Duration,
    },
}

/// A purchase as tables store it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Purchase {
    pub product: ProductId,
    pub buyer: UserId,
    pub receipt: PurchaseReceipt,
}

/// A buyer's purchase, and the product that was bought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPurchase {
    pub sku: Sku,
    pub receipt: PurchaseReceipt,
}

/// A place in the list of a product's purchases, which is in order of time and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PurchasePosition {
    pub at: Timestamp,
    pub number: u32,
}

impl Purchase {
    #[must_use]
    pub const fn position(&self) -> PurchasePosition {
        PurchasePosition { at: self.receipt.at, number: self.receipt.number }
    }
}

/// The topic of purchases that could not be recorded and are retried.
pub const PURCHASES_TOPIC: &str = "sale-purchases";

/// A stream entry whose purchase could not be recorded, or that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadPurchase {
    /// The id of the dead letter. It is derived from the entry, so every server that finds it uses the same one.
    pub id: String,
    /// The sku whose stream has the entry.
    pub sku: Sku,
    pub payload: String,
    pub reason: String,
    pub attempts: u32,
}

/// The sales to display: upcoming and running ones, and the last that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaleSnapshot {
    pub now: Timestamp,
    /// In no particular order.
    pub products: Vec<Product>,
    /// Whether products that other servers have just created are included.
    pub is_current: bool,
}

/// A change of a sale on any server, published by the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaleEvent {
    /// Events are delivered from now on. Changes before have to be read from the store.
    Subscribed,
    /// The subscription is lost: no events arrive until the next [`SaleEvent::Subscribed`].
    Lost,
    /// At most `stock` units are left.
    Sold {
        sku: Sku,
        product: ProductId,
        stock: u32,
    },
    StateChanged {
        sku: Sku,
        product: ProductId,
        state: SaleState,
    },
    /// A product was created, changed or deleted.
    ProductChanged {
        sku: Sku,
    },
    /// A server has appended events to the shared log.
    Logged(Vec<LoggedEvent>),
}

/// The audit of one product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductAudit {
    pub sku: String,
    pub initial_stock: u64,
    pub sold: u64,
    /// Recorded purchases. Must equal `sold`.
    pub persisted: u64,
}

/// Checks of the sale tables, read in one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaleAudit {
    pub products: u64,
    /// Units sold of all products.
    pub sold: u64,
    /// Recorded purchases. Must equal `sold`.
    pub persisted: u64,
    /// Some of the products where these differ or exceed the initial stock. There must be none.
    pub different: Vec<String>,
    /// The newest products.
    pub items: Vec<ProductAudit>,
}

#[async_trait]
pub trait SaleStore: Send + Sync + 'static {
    /// Creates a product whose sale has not started.
    async fn create_product(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome>;
    async fn product(&self, sku: &Sku) -> Result<Option<Product>>;
    /// Products in order of sku, after the one named `after`.
    async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>>;
    /// Changes the terms of a sale that has not started.
    async fn change_product(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome>;
    /// Ends an active sale at once.
    async fn end_sale(&self, sku: &Sku) -> Result<EndOutcome>;
    /// Moves the end of a sale that has not ended to a later time.
    async fn extend_sale(&self, sku: &Sku, end: Timestamp) -> Result<ChangeOutcome>;
    /// Deletes a product with its purchases; with `only_unused` not one that is active or has purchases.
    async fn delete_product(&self, sku: &Sku, only_unused: bool) -> Result<DeleteOutcome>;
    /// Decides purchases in order and in one commit.
    async fn buy_batch(&self, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>>;
    /// The buyer's purchase of a product or, without a sku, the latest of any product.
    async fn find_purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<FoundPurchase>>;
    /// Purchases of a product in order of time and number, after `after`.
    async fn list_purchases(
        &self,
        product: &Product,
        after: Option<PurchasePosition>,
        limit: usize,
    ) -> Result<Vec<Purchase>>;
    async fn snapshot(&self) -> Result<SaleSnapshot>;
    /// Saves the states that are due by the store's time. Reads compute the due state anyway; saving it keeps an ended sale
    /// ended if the clock steps back.
    async fn save_due_states(&self) -> Result<()>;
    /// Calls `on_event` for changes of sales on any server while the future is polled. Returns at once if the store publishes
    /// no events and has to be polled.
    async fn follow_events(&self, _on_event: &(dyn Fn(SaleEvent) + Send + Sync)) {}
    /// Whether all servers share a log of events.
    fn has_event_log(&self) -> bool {
        false
    }
    /// Appends to the shared log what the publications add to it, and returns what it has after the event `after`, or all.
    async fn publish_events(
        &self,
        _publications: &[Publication],
        _after: Option<EventId>,
    ) -> Result<EventPage> {
        Err(Error::failed("sale", "this store has no log of events"))
    }
    async fn audit_sales(&self) -> Result<SaleAudit>;
    /// Completes the ledger's books by what decides sales in front of it. There is nothing to add unless this is a store in front
    /// of a ledger.
    async fn complete_books(&self, ledger: SaleAudit) -> Result<SaleAudit> {
        Ok(ledger)
    }
}

/// Metrics of recording purchases in the ledger.
#[derive(Clone, Debug, Default)]
pub struct LedgerMetrics {
    /// Purchases found in Redis or in the ledger, but not in both.
    pub mismatches: Counter,
    /// Purchases not recorded yet.
    pub depth: Gauge,
}

/// A store that records what Redis has sold.
#[async_trait]
pub trait SaleLedger: SaleStore {
    /// Records purchases of one product that Redis decided, skipping those already recorded. Returns how many were new, or
    /// `None` if the product does not exist.
    async fn record_purchases(&self, product: ProductId, purchases: Vec<Purchase>) -> Result<Option<u64>>;
    /// Saves that an operator has ended or extended a sale, as Redis has decided. What is saved already and later wins, so it
    /// does not matter when this is called, or how often.
    async fn save_decision(&self, product: &Product) -> Result<()>;
    /// Saves dead letters of [`PURCHASES_TOPIC`], skipping those that exist.
    async fn save_dead_purchases(&self, dead: Vec<DeadPurchase>) -> Result<()>;
    /// Purchases of a product in order of buyer, after the one named `after`.
    async fn purchases(
        &self,
        product: ProductId,
        after: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<Purchase>>;
}

/// The outcomes of a batch of purchases, and what the engine must save in the same commit.
#[derive(Debug, Default)]
pub struct BuyPlan {
    /// One outcome per command, in order.
    pub outcomes: Vec<BuyOutcome>,
    /// Purchases to record, in order.
    pub purchases: Vec<Purchase>,
    /// Sales that have sold a unit or changed their state, each once.
    pub changed: Vec<(ProductId, u32, SaleState)>,
}

/// Decides `batch` in order, on the products that the engine has loaded and locked. `has_bought` returns whether a buyer
/// has bought the product in an earlier commit; its errors are passed on.
pub fn plan_purchases<E>(
    batch: &[Buy],
    products: &mut HashMap<String, Product>,
    now: Timestamp,
    mut has_bought: impl FnMut(&Product, &UserId) -> Result<bool, E>,
) -> Result<BuyPlan, E> {
    let mut plan = BuyPlan::default();
    let mut changed: BTreeMap<ProductId, (u32, SaleState)> = BTreeMap::new();
    let mut bought: HashSet<(ProductId, &UserId)> = HashSet::new();
    for Buy { sku, buyer, .. } in batch {
        let Some(product) = products.get_mut(sku.as_str()) else {
            plan.outcomes.push(BuyOutcome::UnknownSku);
            continue;
        };
        let id = product.id;
        let has_bought = bought.contains(&(id, buyer)) || has_bought(product, buyer)?;
        let before = (product.sale.sold, product.sale.state);
        let answer = product.sale.sell(has_bought, now);
        let after = (product.sale.sold, product.sale.state);
        if before != after {
            changed.insert(id, after);
        }
        plan.outcomes.push(match answer {
            Ok(receipt) => {
                bought.insert((id, buyer));
                plan.purchases.push(Purchase { product: id, buyer: buyer.clone(), receipt });
                BuyOutcome::Bought { product: id, receipt, stock: product.sale.stock() }
            }
            Err(refusal) => BuyOutcome::Refused(refusal),
        });
    }
    plan.changed = changed.into_iter().map(|(id, (sold, state))| (id, sold, state)).collect();
    Ok(plan)
}
