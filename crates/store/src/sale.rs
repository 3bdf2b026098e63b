//! Sale at the store: its commands and outcomes, the traits an engine implements, and the plan of a batch.
//!
//! A product has an id of its own besides its sku: one that was reset and made again under the same sku is another product,
//! and nothing that was decided about the first may be written to the second.

use std::collections::{BTreeMap, HashMap, HashSet};

use async_trait::async_trait;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use weir_core::sale::{
    ChangeError, PurchaseReceipt, PurchaseRefusal, Sale, SaleState, Sku, Terms, TermsChange, TermsError,
};
use weir_core::{Timestamp, UserId};

use crate::{Batch, Result};

/// Sales that are not over and that [`SaleStore::board`] shows at most, the running ones first.
pub const SNAPSHOT_OPEN_MAX: usize = 1_000;
/// Sales that are over and that it shows at most, the latest first.
pub const SNAPSHOT_ENDED_MAX: usize = 100;
/// Products that [`SaleAudit`] name one by one at most.
pub const AUDIT_ITEMS_MAX: usize = 100;

/// The store's own name for a product; never used again, also when its sku is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProductId(pub i64);

/// A product and its sale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// Its id.
    pub id: ProductId,
    /// Its name.
    pub sku: Sku,
    /// Its sale, in the state it has at the store's time.
    pub sale: Sale,
    /// Since when it is there.
    pub created_at: Timestamp,
}

/// What became of a new product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CreateOutcome {
    /// It is there.
    Created(Product),
    /// There is one with that sku.
    Exists,
    /// Its sale would have begun already.
    Refused(TermsError),
}

/// What became of a change of a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeOutcome {
    /// It is as wanted.
    Changed(Product),
    /// It stays as it was.
    Refused(ChangeError),
    /// There is none with that sku.
    UnknownSku,
}

/// One buyer's wish for a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buy {
    /// Of which product.
    pub sku: Sku,
    /// Who.
    pub buyer: UserId,
}

/// What became of a [`Buy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuyOutcome {
    /// The buyer has a unit.
    Bought {
        /// Of which product.
        product: ProductId,
        /// What the buyer gets in hand.
        receipt: PurchaseReceipt,
        /// Units left then.
        stock: u32,
    },
    /// The buyer gets none.
    Refused(PurchaseRefusal),
    /// There is no such product.
    UnknownSku,
}

/// A purchase as it is written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Purchase {
    /// Of which product.
    pub product: ProductId,
    /// Whose.
    pub buyer: UserId,
    /// Its number and time.
    pub receipt: PurchaseReceipt,
}

/// The topic of purchases that could not be written down and are to be tried again.
pub const PURCHASES_TOPIC: &str = "sale-purchases";

/// Something that was sold, or said to be, and could not be written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadPurchase {
    /// Its name as a dead letter: the same for the same thing, whoever finds it.
    pub id: String,
    /// In whose stream it was.
    pub sku: Sku,
    /// What it says.
    pub payload: String,
    /// Why it could not be written down.
    pub reason: String,
    /// How often that was tried.
    pub attempts: u32,
}

/// All sales that matter to somebody who looks: those to come and those that run, and the last that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaleSnapshot {
    /// The store's time.
    pub now: Timestamp,
    /// The sales; in no order.
    pub products: Vec<Product>,
    /// Whether what was made on other servers until now is among them.
    pub is_current: bool,
}

/// What a store tells of sales by itself, whoever has changed them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaleEvent {
    /// From now on everything is told; what happened before has to be read.
    Subscribed,
    /// Nothing more is told until it has begun again.
    Lost,
    /// So many units are left, or fewer.
    Sold {
        /// Of which product.
        sku: Sku,
        /// The same.
        product: ProductId,
        /// Units left.
        stock: u32,
    },
    /// A sale is in this state.
    StateChanged {
        /// Which.
        sku: Sku,
        /// The same.
        product: ProductId,
        /// The state.
        state: SaleState,
    },
    /// A product was made, changed or removed.
    ProductChanged {
        /// Which.
        sku: Sku,
    },
}

/// What the books say of one product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductAudit {
    /// Which.
    pub sku: String,
    /// Units at first.
    pub initial_stock: u64,
    /// Units that were sold.
    pub sold: u64,
    /// Purchases that are written down: the same number.
    pub persisted: u64,
}

/// The books of sale, read in one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaleAudit {
    /// Products there are.
    pub products: u64,
    /// Units sold, of all of them.
    pub sold: u64,
    /// Purchases written down: the same number.
    pub persisted: u64,
    /// Some of the products where these differ, or are more than there were: there must be none.
    pub different: Vec<String>,
    /// The newest products.
    pub items: Vec<ProductAudit>,
}

/// Where sales live.
#[async_trait]
pub trait SaleStore: Send + Sync + 'static {
    /// Makes a product whose sale is still to come.
    async fn create_product(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome>;
    /// A product.
    async fn product(&self, sku: &Sku) -> Result<Option<Product>>;
    /// Products in order of sku, after the one named `after`.
    async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>>;
    /// Changes what a sale offers, as long as it has not begun.
    async fn change_product(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome>;
    /// Removes a product with all its purchases; false when there is none.
    async fn delete_product(&self, sku: &Sku) -> Result<bool>;
    /// Gives each buyer a unit or says why not, in order, one commit for all.
    async fn buy_batch(&self, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>>;
    /// A buyer's purchase: of one product, or the latest of any.
    async fn find_purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<PurchaseReceipt>>;
    /// The sales that matter now.
    async fn snapshot(&self) -> Result<SaleSnapshot>;
    /// Writes down the states that are due by the store's time. Whoever asks for a state is told the due one anyway; this
    /// is what keeps an ended sale ended should the clock step back.
    async fn save_due_states(&self) -> Result<()>;
    /// Tells what happens to sales on any server, as it happens, for as long as this is waited for. Ends at once where the
    /// store has to be asked.
    async fn follow_events(&self, _on_event: &(dyn Fn(SaleEvent) + Send + Sync)) {}
    /// Reads the books.
    async fn audit_sales(&self) -> Result<SaleAudit>;
}

/// What following tells about itself.
#[derive(Clone, Debug, Default)]
pub struct LedgerMetrics {
    /// Purchases that were on one side and not on the other.
    pub mismatches: Counter,
    /// Purchases that wait to be written down.
    pub depth: Gauge,
}

/// A store that also follows: what something faster has sold is written down here later.
#[async_trait]
pub trait SaleLedger: SaleStore {
    /// Writes down purchases of one product that were decided elsewhere; those that are there already are left alone. None
    /// when there is no such product (any more).
    async fn record_purchases(&self, product: ProductId, purchases: Vec<Purchase>) -> Result<Option<u64>>;
    /// Keeps what could not be written down as dead letters of [`PURCHASES_TOPIC`]; those that are there already are left alone.
    async fn save_dead_purchases(&self, dead: Vec<DeadPurchase>) -> Result<()>;
    /// Purchases of a product in order of buyer, after the one named `after`.
    async fn purchases(
        &self,
        product: ProductId,
        after: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<Purchase>>;
}

/// What a batch of purchases comes to: every outcome, and what an engine has to save in the same commit.
#[derive(Debug, Default)]
pub struct BuyPlan {
    /// One outcome per command, in order.
    pub outcomes: Vec<BuyOutcome>,
    /// Purchases to be written down, in order.
    pub purchases: Vec<Purchase>,
    /// Sales that have sold something or turned, each once.
    pub changed: Vec<(ProductId, u32, SaleState)>,
}

/// Decides `batch` in order over the products the engine has loaded (and locked). `has_bought` says whether a buyer has bought
/// a product in an earlier commit.
/// What `has_bought` said.
pub fn plan_purchases<E>(
    batch: &[Buy],
    products: &mut HashMap<String, Product>,
    now: Timestamp,
    mut has_bought: impl FnMut(&Product, &UserId) -> Result<bool, E>,
) -> Result<BuyPlan, E> {
    let mut plan = BuyPlan::default();
    let mut changed: BTreeMap<ProductId, (u32, SaleState)> = BTreeMap::new();
    let mut bought: HashSet<(ProductId, &UserId)> = HashSet::new();
    for Buy { sku, buyer } in batch {
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
