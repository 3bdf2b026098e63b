//! Sale on Redis, which decides, in front of a store that records the purchases afterwards.
//!
//! One script sells, numbers and records a purchase, and appends it to a stream that a worker moves to the store. A sale in
//! Redis is valid for one process and one replication id of Redis, as a hash of quota is: after a restart, a flush or a
//! failover nothing is sold until the sale is rebuilt from the store. This process also remembers the purchases that it has
//! sold and that are not recorded yet, and records them itself within a moment, so a Redis that loses its data loses no
//! purchase that a living server has answered. Before a running sale is opened again, every server gets the time to do that.

mod attempts;
mod dead_letter;
mod event_log;
mod events;
mod operator;
mod persist;
mod rebuild;
mod reconcile;
mod reply;
mod unrecorded;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::RwLock;
use redis::Value;
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::sale::{ChangeError, SaleState, Sku, Terms, TermsChange};
use weir_core::{Clock, Timestamp, UserId};
use weir_store::sale::{
    Buy, BuyOutcome, ChangeOutcome, CreateOutcome, DeleteOutcome, EndOutcome, EventId, EventPage,
    FoundPurchase, LedgerMetrics, Product, Publication, Purchase, PurchasePosition, SNAPSHOT_ENDED_MAX,
    SNAPSHOT_OPEN_MAX, SaleAudit, SaleEvent, SaleLedger, SaleSnapshot, SaleStore,
};
use weir_store::{Batch, Error, Result};

pub use self::attempts::RedisAttempts;
use self::reply::{BuyReply, PeekedSale};
use self::unrecorded::UnrecordedPurchases;
use crate::ENGINE;
use crate::client::{KeyCall, Redis};
use crate::script::Script;

/// How often a sale is rebuilt for one batch before its buyers get an error.
const REBUILDS_MAX: usize = 3;
/// How long a call waits for the store to return the changed catalogue.
const CATALOGUE_TIMEOUT: Duration = Duration::from_millis(500);

/// Sale on Redis. Clones share it.
#[derive(Clone)]
pub struct RedisSales {
    shared: Arc<SharedSales>,
    _recording: Arc<DropGuard>,
}

/// The state that calls share with the background tasks.
struct SharedSales {
    redis: Redis,
    ledger: Arc<dyn SaleLedger>,
    /// Replaces Redis's clock in tests.
    clock: Option<Arc<dyn Clock>>,
    /// The products as the store returned them last. Their names and terms change seldom, and are needed while the store is
    /// down.
    catalogue: RwLock<Option<HashMap<Sku, Product>>>,
    /// Whether this server is subscribed to `sale:events`.
    is_subscribed: AtomicBool,
    /// Notified when an entry may have been appended to a stream.
    entry_added: Notify,
    /// Counts the events that a product was created or changed.
    product_events: AtomicU64,
    /// How many of these events had been received before the catalogue was last read.
    product_events_read: AtomicU64,
    /// Whether reading the catalogue failed when it was due.
    is_catalogue_stale: AtomicBool,
    /// Counts the products that this process has created and removed.
    own_changes: AtomicU64,
    unrecorded: UnrecordedPurchases,
    rebuilding: tokio::sync::Mutex<()>,
    metrics: LedgerMetrics,
}

impl RedisSales {
    /// Puts Redis in front of `ledger`. `clock` replaces Redis's own in tests.
    #[must_use]
    pub fn new(
        redis: Redis,
        ledger: Arc<dyn SaleLedger>,
        clock: Option<Arc<dyn Clock>>,
        metrics: LedgerMetrics,
    ) -> Self {
        let shared = Arc::new(SharedSales {
            redis,
            ledger,
            clock,
            catalogue: RwLock::default(),
            is_subscribed: AtomicBool::new(false),
            entry_added: Notify::new(),
            product_events: AtomicU64::new(0),
            product_events_read: AtomicU64::new(0),
            is_catalogue_stale: AtomicBool::new(false),
            own_changes: AtomicU64::new(0),
            unrecorded: UnrecordedPurchases::default(),
            rebuilding: tokio::sync::Mutex::default(),
            metrics,
        });
        let closing = CancellationToken::new();
        let record = persist::keep_recording(Arc::clone(&shared));
        tokio::spawn(closing.clone().run_until_cancelled_owned(record));
        Self { shared, _recording: Arc::new(closing.drop_guard()) }
    }
}

impl SharedSales {
    /// The test clock's time in microseconds, or an empty string for Redis's own clock.
    fn now(&self) -> String {
        self.clock.as_ref().map(|clock| clock.now().as_micros().to_string()).unwrap_or_default()
    }

    /// Calls a script and fails unless it replies for every sale.
    async fn call(&self, script: Script, common: &[&str], calls: &[KeyCall]) -> Result<Vec<Value>> {
        let replies = self.redis.call_each(script, common, calls).await;
        replies.into_iter().map(|reply| reply.map_err(|_no_reply| unavailable())).collect()
    }

    async fn peek(&self, skus: &[Sku]) -> Result<Vec<PeekedSale>> {
        let calls: Vec<KeyCall> = skus.iter().map(|sku| sale_call(sku, Vec::new())).collect();
        let replies = self.call(Script::SalePeek, &[&self.now()], &calls).await?;
        let peeked = replies.iter().zip(skus).map(|(reply, sku)| reply::parse_peek(reply, sku));
        peeked.map(|peeked| peeked.ok_or_else(malformed_reply)).collect()
    }

    /// Returns a product as Redis has it. A sale that Redis lacks is rebuilt from the store first.
    async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        for _round in 0..REBUILDS_MAX {
            let peeked = self.peek(std::slice::from_ref(sku)).await?.pop().ok_or_else(malformed_reply)?;
            if let Some(product) = peeked.product {
                return Ok(Some(as_of(product, peeked.now)));
            }
            if self.rebuild(sku).await?.is_none() {
                return Ok(None);
            }
        }
        Err(unavailable())
    }

    /// Returns the products of the store: those in memory if they are up to date or the store does not answer in time.
    async fn catalogue(&self) -> Result<HashMap<Sku, Product>> {
        let cached = self.catalogue.read().clone();
        let Some(cached) = cached else { return self.read_catalogue().await };
        let events = self.product_events.load(Ordering::SeqCst);
        if self.product_events_read.load(Ordering::SeqCst) >= events {
            return Ok(cached);
        }
        let read = tokio::time::timeout(CATALOGUE_TIMEOUT, self.read_catalogue()).await;
        self.product_events_read.fetch_max(events, Ordering::SeqCst);
        // While the store is down the cached products are used, and no other call waits for the store.
        Ok(read.ok().and_then(Result::ok).unwrap_or_else(|| {
            self.is_catalogue_stale.store(true, Ordering::SeqCst);
            cached
        }))
    }

    async fn read_catalogue(&self) -> Result<HashMap<Sku, Product>> {
        let before = self.own_changes.load(Ordering::SeqCst);
        let products = self.ledger.snapshot().await?.products;
        let read: HashMap<Sku, Product> =
            products.into_iter().map(|product| (product.sku.clone(), product)).collect();
        let mut catalogue = self.catalogue.write();
        // A product that was created or removed here meanwhile may be newer than what was read: then the next call reads again.
        if self.own_changes.load(Ordering::SeqCst) == before {
            *catalogue = Some(read.clone());
        }
        Ok(read)
    }

    /// Adds a product to the cached catalogue.
    fn cache_product(&self, product: &Product) {
        self.own_changes.fetch_add(1, Ordering::SeqCst);
        let mut catalogue = self.catalogue.write();
        if let Some(catalogue) = &mut *catalogue {
            catalogue.insert(product.sku.clone(), product.clone());
        }
    }

    /// Remembers the purchases of one sale until they are recorded.
    fn remember_purchases<'a>(
        &self,
        sku: &Sku,
        outcomes: impl Iterator<Item = (&'a Buy, &'a BuyOutcome)>,
        entry_ids: Vec<String>,
    ) {
        if entry_ids.is_empty() {
            return;
        }
        self.entry_added.notify_one();
        let bought = outcomes.filter_map(|(buy, outcome)| match outcome {
            BuyOutcome::Bought { product, receipt, .. } => Some((*product, &buy.buyer, *receipt)),
            _ => None,
        });
        let purchases = bought.zip(entry_ids);
        self.unrecorded
            .remember(sku, purchases.map(|((product, buyer, receipt), id)| (product, buyer, receipt, id)));
    }

    /// Calls the script once and returns, for each sale of a batch, its buyers' outcomes, or `None` if it has to be rebuilt.
    async fn buy_once(
        &self,
        batch: &[Buy],
        groups: &[(Sku, Vec<usize>)],
    ) -> Result<Vec<Option<Vec<BuyOutcome>>>> {
        let is_cluster = self.redis.is_cluster();
        let calls: Vec<KeyCall> = groups
            .iter()
            .map(|(sku, indices)| {
                let buyers = indices.iter().flat_map(|index| attempts::arguments(&batch[*index], is_cluster));
                sale_call(sku, std::iter::once(indices.len().to_string()).chain(buyers).collect())
            })
            .collect();
        let replies = self.redis.call_each(Script::SaleBuy, &[&self.now()], &calls).await;
        let mut decided = Vec::with_capacity(groups.len());
        let mut failed = None;
        for (reply, (sku, indices)) in replies.into_iter().zip(groups) {
            let reply = match reply {
                Ok(reply) => reply::parse_buy(&reply, indices.len()).ok_or_else(malformed_reply),
                Err(_no_reply) => Err(unavailable()),
            };
            match reply {
                Ok(BuyReply::Decided(outcomes, entry_ids)) => {
                    // Also if another sale of the batch fails: this one has sold.
                    let buys = indices.iter().map(|index| &batch[*index]);
                    self.remember_purchases(sku, buys.zip(&outcomes), entry_ids);
                    decided.push(Some(outcomes));
                }
                Ok(BuyReply::Untrusted) => decided.push(None),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(decided), Err)
    }

    async fn buy(&self, batch: &[Buy]) -> Result<Vec<BuyOutcome>> {
        self.unrecorded.wait_for_store().await;
        let mut undecided: BTreeMap<Sku, Vec<usize>> = BTreeMap::new();
        for (index, buy) in batch.iter().enumerate() {
            undecided.entry(buy.sku.clone()).or_default().push(index);
        }
        let mut outcomes = vec![BuyOutcome::UnknownSku; batch.len()];
        for _round in 0..REBUILDS_MAX {
            let groups: Vec<(Sku, Vec<usize>)> = std::mem::take(&mut undecided).into_iter().collect();
            let decided = self.buy_once(batch, &groups).await?;
            for ((sku, indices), decided) in groups.into_iter().zip(decided) {
                match decided {
                    Some(decided) => {
                        for (index, outcome) in indices.into_iter().zip(decided) {
                            outcomes[index] = outcome;
                        }
                    }
                    None if self.rebuild(&sku).await?.is_some() => {
                        undecided.insert(sku, indices);
                    }
                    // Neither Redis nor the store has such a product.
                    None => {}
                }
            }
            if undecided.is_empty() {
                return Ok(outcomes);
            }
        }
        Err(unavailable())
    }

    /// Finds a buyer's latest purchase of any product. While the store is down Redis answers alone, if it has all products.
    async fn latest_purchase(&self, buyer: &UserId) -> Result<Option<FoundPurchase>> {
        let products = self.catalogue().await?;
        let ended = products.values().filter(|product| product.sale.state.end_reason().is_some()).count();
        let mut has_all = ended < SNAPSHOT_ENDED_MAX && products.len() - ended < SNAPSHOT_OPEN_MAX;
        let skus: Vec<Sku> = products.into_keys().collect();
        let calls: Vec<KeyCall> = skus.iter().map(|sku| sale_call(sku, Vec::new())).collect();
        let replies = self.call(Script::SaleFind, &[buyer.as_str()], &calls).await?;
        let mut in_redis: Option<FoundPurchase> = None;
        for (sku, reply) in skus.into_iter().zip(&replies) {
            match reply::parse_find(reply) {
                Some(Some(receipt))
                    if in_redis.as_ref().is_none_or(|found| found.receipt.at < receipt.at) =>
                {
                    in_redis = Some(FoundPurchase { sku, receipt });
                }
                Some(_) => {}
                None => has_all = false,
            }
        }
        let in_store = tokio::time::timeout(CATALOGUE_TIMEOUT, self.ledger.find_purchase(buyer, None)).await;
        match in_store.unwrap_or_else(|_elapsed| Err(Error::unavailable(ENGINE, "the store does not answer")))
        {
            Ok(in_store) => {
                Ok(in_redis.into_iter().chain(in_store).max_by_key(|purchase| purchase.receipt.at))
            }
            Err(_) if has_all || in_redis.is_some() => Ok(in_redis),
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl SaleStore for RedisSales {
    async fn create_product(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome> {
        let outcome = self.shared.ledger.create_product(sku, terms).await?;
        if let CreateOutcome::Created(product) = &outcome {
            self.shared.cache_product(product);
            // If it fails, the first call for the sale rebuilds it.
            let _ = self.shared.load_sale(product, &[], true).await;
        }
        Ok(outcome)
    }

    async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        self.shared.product(sku).await
    }

    async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>> {
        let products = self.shared.ledger.products(after, limit).await?;
        let skus: Vec<Sku> = products.iter().map(|product| product.sku.clone()).collect();
        let peeked = self.shared.peek(&skus).await?;
        Ok(products
            .into_iter()
            .zip(peeked)
            .map(|(product, peeked)| with_redis_state(product, peeked))
            .collect())
    }

    async fn change_product(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome> {
        let Some(product) = self.shared.product(sku).await? else { return Ok(ChangeOutcome::UnknownSku) };
        if product.sale.state != SaleState::Upcoming {
            return Ok(ChangeOutcome::Refused(ChangeError::NotModifiable));
        }
        let outcome = self.shared.ledger.change_product(sku, change).await?;
        if let ChangeOutcome::Changed(product) = &outcome {
            self.shared.cache_product(product);
            self.shared.load_sale(product, &[], true).await?;
        }
        Ok(outcome)
    }

    async fn end_sale(&self, sku: &Sku) -> Result<EndOutcome> {
        self.shared.end_sale(sku).await
    }

    async fn extend_sale(&self, sku: &Sku, end: Timestamp) -> Result<ChangeOutcome> {
        self.shared.extend_sale(sku, end).await
    }

    async fn delete_product(&self, sku: &Sku, only_unused: bool) -> Result<DeleteOutcome> {
        self.shared.delete(sku, only_unused).await
    }

    async fn buy_batch(&self, batch: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
        self.shared.buy(&batch.take()).await
    }

    async fn find_purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<FoundPurchase>> {
        let Some(sku) = sku else { return self.shared.latest_purchase(buyer).await };
        let calls = [sale_call(sku, Vec::new())];
        let replies = self.shared.call(Script::SaleFind, &[buyer.as_str()], &calls).await?;
        match replies.first().and_then(reply::parse_find) {
            Some(found) => Ok(found.map(|receipt| FoundPurchase { sku: sku.clone(), receipt })),
            None => self.shared.ledger.find_purchase(buyer, Some(sku)).await,
        }
    }

    async fn list_purchases(
        &self,
        product: &Product,
        after: Option<PurchasePosition>,
        limit: usize,
    ) -> Result<Vec<Purchase>> {
        self.shared.list_purchases(product, after, limit).await
    }

    async fn snapshot(&self) -> Result<SaleSnapshot> {
        let products: Vec<Product> = self.shared.catalogue().await?.into_values().collect();
        let mut skus: Vec<Sku> = products.iter().map(|product| product.sku.clone()).collect();
        // An unknown product at the end, so that there is always a reply with Redis's time.
        skus.extend(Sku::parse("-").ok());
        let peeked = self.shared.peek(&skus).await?;
        let now = peeked.last().ok_or_else(malformed_reply)?.now;
        let products =
            products.into_iter().zip(peeked).map(|(product, peeked)| with_redis_state(product, peeked));
        // The catalogue may be a second old.
        Ok(SaleSnapshot { now, products: products.collect(), is_current: false })
    }

    async fn save_due_states(&self) -> Result<()> {
        // The script changes the states in Redis, too, and publishes the changes to every server.
        let skus: Vec<Sku> = self.shared.catalogue().await?.into_keys().collect();
        self.shared.peek(&skus).await?;
        self.shared.ledger.save_due_states().await
    }

    async fn follow_events(&self, hear: &(dyn Fn(SaleEvent) + Send + Sync)) {
        self.shared.follow_events(hear).await;
    }

    fn has_event_log(&self) -> bool {
        true
    }

    async fn publish_events(
        &self,
        publications: &[Publication],
        after: Option<EventId>,
    ) -> Result<EventPage> {
        self.shared.publish(publications, after).await
    }

    async fn audit_sales(&self) -> Result<SaleAudit> {
        self.complete_books(self.shared.ledger.audit_sales().await?).await
    }

    async fn complete_books(&self, mut books: SaleAudit) -> Result<SaleAudit> {
        let skus: Vec<Sku> = books.items.iter().filter_map(|item| Sku::parse(&item.sku).ok()).collect();
        let peeked = self.shared.peek(&skus).await?;
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

/// Returns the product with its state in Redis, if Redis has the same product.
fn with_redis_state(product: Product, peeked: PeekedSale) -> Product {
    let in_redis = peeked.product.filter(|in_redis| in_redis.id == product.id);
    as_of(in_redis.unwrap_or(product), peeked.now)
}

fn as_of(mut product: Product, now: Timestamp) -> Product {
    product.sale.advance(now);
    product
}

fn sale_call(sku: &Sku, arguments: Vec<String>) -> KeyCall {
    KeyCall { key: format!("sale:{{{sku}}}"), arguments }
}

fn unavailable() -> Error {
    Error::unavailable(ENGINE, "Redis, which decides sales, does not answer")
}

fn malformed_reply() -> Error {
    Error::failed(ENGINE, "malformed reply of a sale script in Redis")
}
