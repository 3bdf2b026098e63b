//! Sale on Redis, which decides, in front of a store that follows.
//!
//! One script sells, numbers, records and appends to a stream that a worker moves to the store. A sale in Redis belongs to one
//! run and one promotion of one Redis, as a hash of quota does: after a restart, a flush or a failover nothing is sold until
//! the sale was rebuilt from the store. What this process has sold and does not know to be written down it remembers, and
//! writes down itself within a moment, so a Redis that forgets loses nothing that a living server has answered. Before a
//! running sale is opened again, everybody gets the time to do that.

mod dead;
mod events;
mod follow;
mod rebuild;
mod reconcile;
mod reply;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};
use redis::Value;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::sale::{ChangeError, PurchaseReceipt, SaleState, Sku, Terms, TermsChange};
use weir_core::{Clock, UserId};
use weir_store::sale::{
    Buy, BuyOutcome, ChangeOutcome, CreateOutcome, LedgerMetrics, Product, ProductId, SaleAudit, SaleEvent,
    SaleLedger, SaleSnapshot, SaleStore,
};
use weir_store::{Batch, Error, Result};

use self::reply::{Bought, Peeked};
use crate::ENGINE;
use crate::client::{Item, Redis};
use crate::script::Script;

/// How often a sale is rebuilt for one batch before its buyers are told to come back.
const ROUNDS: usize = 3;
/// How long somebody waits for the store to name what is new.
const CATALOGUE_PATIENCE: Duration = Duration::from_millis(500);
/// Purchases that are remembered until they are written down; further ones are only in the stream.
const UNSETTLED_MAX: usize = 200_000;

/// Purchases by product and buyer.
type Unsettled = BTreeMap<(ProductId, Sku), HashMap<UserId, Sold>>;

/// A purchase that is not known to be written down.
#[derive(Clone, Debug)]
struct Sold {
    receipt: PurchaseReceipt,
    /// Its entry in the stream.
    entry: String,
}

/// Sale on Redis. Clones share it.
#[derive(Clone)]
pub struct RedisSales {
    parts: Arc<Parts>,
    _recording: Arc<DropGuard>,
}

/// What every call needs.
struct Parts {
    redis: Redis,
    ledger: Arc<dyn SaleLedger>,
    /// A clock other than Redis's, for tests.
    clock: Option<Arc<dyn Clock>>,
    /// What the store said last: names and terms change seldom, and may be asked for while the store is down.
    catalogue: RwLock<Option<HashMap<Sku, Product>>>,
    /// Whether `sale:events` is listened to.
    is_told: AtomicBool,
    /// Rung when something may have come into a stream.
    sold: Notify,
    /// Counts what was told of products that were made or changed, and how much of that the catalogue was read after.
    products_told: AtomicU64,
    products_read: AtomicU64,
    /// Whether the store could not be asked when it should have been.
    is_catalogue_late: AtomicBool,
    /// Counts what was made and removed here.
    changes: AtomicU64,
    /// Sold by this process, and not known to be written down.
    unsettled: Mutex<Unsettled>,
    rebuilding: tokio::sync::Mutex<()>,
    metrics: LedgerMetrics,
}

impl RedisSales {
    /// Puts Redis in front of `ledger`; `clock` replaces Redis's own, for tests.
    #[must_use]
    pub fn new(
        redis: Redis,
        ledger: Arc<dyn SaleLedger>,
        clock: Option<Arc<dyn Clock>>,
        metrics: LedgerMetrics,
    ) -> Self {
        let parts = Arc::new(Parts {
            redis,
            ledger,
            clock,
            catalogue: RwLock::default(),
            is_told: AtomicBool::new(false),
            sold: Notify::new(),
            products_told: AtomicU64::new(0),
            products_read: AtomicU64::new(0),
            is_catalogue_late: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            unsettled: Mutex::default(),
            rebuilding: tokio::sync::Mutex::default(),
            metrics,
        });
        let closing = CancellationToken::new();
        let record = follow::keep_recording(Arc::downgrade(&parts));
        tokio::spawn(closing.clone().run_until_cancelled_owned(record));
        Self { parts, _recording: Arc::new(closing.drop_guard()) }
    }

    /// Whether everything that this process has sold is written down.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.parts.unsettled.lock().is_empty()
    }
}

impl Parts {
    fn now(&self) -> String {
        self.clock.as_ref().map(|clock| clock.now().as_micros().to_string()).unwrap_or_default()
    }

    /// Calls a script that must answer for every sale.
    async fn ask(&self, script: Script, common: &[&str], items: &[Item]) -> Result<Vec<Value>> {
        let answers = self.redis.call(script, common, items).await;
        answers.into_iter().map(|answer| answer.map_err(|_unanswered| unanswered())).collect()
    }

    async fn peek(&self, skus: &[Sku]) -> Result<Vec<Peeked>> {
        let items: Vec<Item> = skus.iter().map(|sku| item(sku, Vec::new())).collect();
        let answers = self.ask(Script::SalePeek, &[&self.now()], &items).await?;
        let peeked = answers.iter().zip(skus).map(|(answer, sku)| reply::peeked(answer, sku));
        peeked.map(|peeked| peeked.ok_or_else(unreadable)).collect()
    }

    /// A product as it stands: as Redis has it, else as the store does, once it is in Redis again.
    async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        for _round in 0..ROUNDS {
            let peeked = self.peek(std::slice::from_ref(sku)).await?.pop().ok_or_else(unreadable)?;
            if let Some(product) = peeked.product {
                return Ok(Some(as_of(product, peeked.now)));
            }
            if self.rebuild(sku).await?.is_none() {
                return Ok(None);
            }
        }
        Err(unanswered())
    }

    /// The products the store has told of, if it ever has.
    async fn catalogue(&self) -> Result<HashMap<Sku, Product>> {
        let known = self.catalogue.read().clone();
        let Some(known) = known else { return self.read_catalogue().await };
        let told = self.products_told.load(Ordering::SeqCst);
        if self.products_read.load(Ordering::SeqCst) >= told {
            return Ok(known);
        }
        let read = tokio::time::timeout(CATALOGUE_PATIENCE, self.read_catalogue()).await;
        self.products_read.fetch_max(told, Ordering::SeqCst);
        // While the store is down, what it said last holds, and nobody else waits for it.
        Ok(read.ok().and_then(Result::ok).unwrap_or_else(|| {
            self.is_catalogue_late.store(true, Ordering::SeqCst);
            known
        }))
    }

    async fn read_catalogue(&self) -> Result<HashMap<Sku, Product>> {
        let before = self.changes.load(Ordering::SeqCst);
        let products = self.ledger.snapshot().await?.products;
        let read: HashMap<Sku, Product> =
            products.into_iter().map(|product| (product.sku.clone(), product)).collect();
        let mut catalogue = self.catalogue.write();
        // What was made or removed here meanwhile may be newer than what was read: then the next one to ask reads again.
        if self.changes.load(Ordering::SeqCst) == before {
            *catalogue = Some(read.clone());
        }
        Ok(read)
    }

    fn note(&self, product: &Product) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let mut catalogue = self.catalogue.write();
        if let Some(catalogue) = &mut *catalogue {
            catalogue.insert(product.sku.clone(), product.clone());
        }
    }

    /// Remembers what was sold of one sale until it is written down.
    fn remember<'a>(&self, bought: impl Iterator<Item = (&'a Buy, &'a BuyOutcome)>, entries: Vec<String>) {
        if entries.is_empty() {
            return;
        }
        self.sold.notify_one();
        let mut unsettled = self.unsettled.lock();
        let sold = bought.filter_map(|(buy, outcome)| match outcome {
            BuyOutcome::Bought { product, receipt, .. } => Some((buy, *product, *receipt)),
            _ => None,
        });
        for ((buy, product, receipt), entry) in sold.zip(entries) {
            note_unsettled(&mut unsettled, (product, &buy.sku), &buy.buyer, Sold { receipt, entry });
        }
    }

    /// Asks for each sale of a batch once; its buyers' outcomes, or none for a sale that has to be rebuilt.
    async fn buy_once(
        &self,
        batch: &[Buy],
        groups: &[(Sku, Vec<usize>)],
    ) -> Result<Vec<Option<Vec<BuyOutcome>>>> {
        let items: Vec<Item> = groups
            .iter()
            .map(|(sku, places)| {
                let buyers = places.iter().map(|place| batch[*place].buyer.to_string());
                item(sku, std::iter::once(places.len().to_string()).chain(buyers).collect())
            })
            .collect();
        let answers = self.redis.call(Script::SaleBuy, &[&self.now()], &items).await;
        let mut decided = Vec::with_capacity(groups.len());
        let mut failed = None;
        for (answer, (_, places)) in answers.into_iter().zip(groups) {
            let bought = match answer {
                Ok(answer) => reply::bought(&answer, places.len()).ok_or_else(unreadable),
                Err(_unanswered) => Err(unanswered()),
            };
            match bought {
                Ok(Bought::Decided(outcomes, entries)) => {
                    // Also when another sale of the batch was not answered: this one has sold.
                    let wishes = places.iter().map(|place| &batch[*place]);
                    self.remember(wishes.zip(&outcomes), entries);
                    decided.push(Some(outcomes));
                }
                Ok(Bought::Untrusted) => decided.push(None),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(decided), Err)
    }

    async fn buy(&self, batch: &[Buy]) -> Result<Vec<BuyOutcome>> {
        let mut open: BTreeMap<Sku, Vec<usize>> = BTreeMap::new();
        for (place, buy) in batch.iter().enumerate() {
            open.entry(buy.sku.clone()).or_default().push(place);
        }
        let mut outcomes = vec![BuyOutcome::UnknownSku; batch.len()];
        for _round in 0..ROUNDS {
            let groups: Vec<(Sku, Vec<usize>)> = std::mem::take(&mut open).into_iter().collect();
            let decided = self.buy_once(batch, &groups).await?;
            for ((sku, places), decided) in groups.into_iter().zip(decided) {
                match decided {
                    Some(decided) => {
                        for (place, outcome) in places.into_iter().zip(decided) {
                            outcomes[place] = outcome;
                        }
                    }
                    None if self.rebuild(&sku).await?.is_some() => {
                        open.insert(sku, places);
                    }
                    // What is in neither is no product.
                    None => {}
                }
            }
            if open.is_empty() {
                return Ok(outcomes);
            }
        }
        Err(unanswered())
    }

    async fn latest_purchase(&self, buyer: &UserId) -> Result<Option<PurchaseReceipt>> {
        let skus: Vec<Sku> = self.catalogue().await?.into_keys().collect();
        let items: Vec<Item> = skus.iter().map(|sku| item(sku, Vec::new())).collect();
        let answers = self.ask(Script::SaleFind, &[buyer.as_str()], &items).await?;
        let here = answers.iter().filter_map(|answer| reply::found(answer)?);
        let here = here.max_by_key(|receipt| receipt.at);
        match self.ledger.find_purchase(buyer, None).await {
            Ok(there) => Ok(here.into_iter().chain(there).max_by_key(|receipt| receipt.at)),
            // While the store is down, what is here is what there is to tell.
            Err(error) => here.map_or(Err(error), |here| Ok(Some(here))),
        }
    }
}

#[async_trait]
impl SaleStore for RedisSales {
    async fn create_product(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome> {
        let outcome = self.parts.ledger.create_product(sku, terms).await?;
        if let CreateOutcome::Created(product) = &outcome {
            self.parts.note(product);
            // A Redis that does not answer is told when somebody asks for the sale.
            let _ = self.parts.open(product, &[], true).await;
        }
        Ok(outcome)
    }

    async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        self.parts.product(sku).await
    }

    async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>> {
        let products = self.parts.ledger.products(after, limit).await?;
        let skus: Vec<Sku> = products.iter().map(|product| product.sku.clone()).collect();
        let peeked = self.parts.peek(&skus).await?;
        Ok(products.into_iter().zip(peeked).map(|(product, peeked)| overlay(product, peeked)).collect())
    }

    async fn change_product(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome> {
        let Some(product) = self.parts.product(sku).await? else { return Ok(ChangeOutcome::UnknownSku) };
        if product.sale.state != SaleState::Upcoming {
            return Ok(ChangeOutcome::Refused(ChangeError::NotModifiable));
        }
        let outcome = self.parts.ledger.change_product(sku, change).await?;
        if let ChangeOutcome::Changed(product) = &outcome {
            self.parts.note(product);
            self.parts.open(product, &[], true).await?;
        }
        Ok(outcome)
    }

    async fn delete_product(&self, sku: &Sku) -> Result<bool> {
        self.parts.delete(sku).await
    }

    async fn buy_batch(&self, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
        self.parts.buy(&batch.take()).await
    }

    async fn find_purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<PurchaseReceipt>> {
        let Some(sku) = sku else { return self.parts.latest_purchase(buyer).await };
        let items = [item(sku, Vec::new())];
        let answers = self.parts.ask(Script::SaleFind, &[buyer.as_str()], &items).await?;
        match answers.first().and_then(reply::found) {
            Some(found) => Ok(found),
            None => self.parts.ledger.find_purchase(buyer, Some(sku)).await,
        }
    }

    async fn snapshot(&self) -> Result<SaleSnapshot> {
        let products: Vec<Product> = self.parts.catalogue().await?.into_values().collect();
        let mut skus: Vec<Sku> = products.iter().map(|product| product.sku.clone()).collect();
        // One more, which there is not, for the time.
        skus.extend(Sku::parse("-").ok());
        let peeked = self.parts.peek(&skus).await?;
        let now = peeked.last().ok_or_else(unreadable)?.now;
        let products = products.into_iter().zip(peeked).map(|(product, peeked)| overlay(product, peeked));
        // The catalogue may be a second old.
        Ok(SaleSnapshot { now, products: products.collect(), is_current: false })
    }

    async fn save_due_states(&self) -> Result<()> {
        // Here, too, and so that everybody is told.
        let skus: Vec<Sku> = self.parts.catalogue().await?.into_keys().collect();
        self.parts.peek(&skus).await?;
        self.parts.ledger.save_due_states().await
    }

    async fn follow_events(&self, hear: &(dyn Fn(SaleEvent) + Send + Sync)) {
        self.parts.follow_events(hear).await;
    }

    async fn audit_sales(&self) -> Result<SaleAudit> {
        let mut books = self.parts.ledger.audit_sales().await?;
        let skus: Vec<Sku> = books.items.iter().filter_map(|item| Sku::parse(&item.sku).ok()).collect();
        let peeked = self.parts.peek(&skus).await?;
        for (item, peeked) in books.items.iter_mut().zip(peeked) {
            let Some(product) = peeked.product else { continue };
            let sold = u64::from(product.sale.sold);
            books.sold = books.sold.saturating_sub(item.sold).saturating_add(sold);
            item.sold = sold;
            let is_wrong = item.sold != item.persisted || item.sold > item.initial_stock;
            if is_wrong && !books.different.contains(&item.sku) && books.different.len() < 10 {
                books.different.push(item.sku.clone());
            }
        }
        Ok(books)
    }
}

/// How a product stands, with what Redis says of it, if it is the same one.
fn overlay(product: Product, peeked: Peeked) -> Product {
    let newer = peeked.product.filter(|newer| newer.id == product.id);
    as_of(newer.unwrap_or(product), peeked.now)
}

fn as_of(mut product: Product, now: weir_core::Timestamp) -> Product {
    product.sale.advance(now);
    product
}

fn item(sku: &Sku, arguments: Vec<String>) -> Item {
    Item { key: format!("sale:{{{sku}}}"), arguments }
}

fn unanswered() -> Error {
    Error::unavailable(ENGINE, "Redis decides sales, and does not answer")
}

fn unreadable() -> Error {
    Error::failed(ENGINE, "a script of sale gave an answer that there is not")
}

fn note_unsettled(unsettled: &mut Unsettled, (product, sku): (ProductId, &Sku), buyer: &UserId, sold: Sold) {
    if unsettled.values().map(HashMap::len).sum::<usize>() < UNSETTLED_MAX {
        unsettled.entry((product, sku.clone())).or_default().insert(buyer.clone(), sold);
    }
}

#[cfg(test)]
mod tests {
    use weir_core::Timestamp;

    use super::*;

    #[test]
    fn no_more_purchases_are_unsettled_than_the_bound() {
        let mut unsettled = Unsettled::new();
        let receipt = PurchaseReceipt { number: 1, at: Timestamp::EPOCH };
        let (sold, sku) = (Sold { receipt, entry: "1-1".to_owned() }, Sku::parse("W").unwrap());
        for n in 0..UNSETTLED_MAX + 10 {
            let product = (ProductId(i64::try_from(n % 2).unwrap()), &sku);
            note_unsettled(&mut unsettled, product, &UserId::parse(n.to_string()).unwrap(), sold.clone());
        }
        assert_eq!(unsettled.values().map(HashMap::len).sum::<usize>(), UNSETTLED_MAX);
    }
}
