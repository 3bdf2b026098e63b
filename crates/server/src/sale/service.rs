//! Sale: changes products in the store, sends purchases through lanes, and answers status from the view of all sales.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_core::sale::{SaleStage, Sku, Terms, TermsChange};
use weir_core::{Timestamp, UserId};
use weir_store::sale::{
    AttemptLimits, Buy, BuyOutcome, ChangeOutcome, CreateOutcome, DeleteOutcome, EndOutcome, EventId,
    FoundPurchase, Product, ProductId, Purchase, PurchasePosition, SaleStore,
};
use weir_store::throttle::{AddressLimit, Throttle, ThrottleDecision};
use weir_store::{Batch, Error, Lanes, Result};
use weir_store_redis::RedisAttempts;

use super::anomalies::Anomalies;
use super::challenge::Challenge;
use super::event_ring::{EventRing, Origin, SaleSubscription};
use super::metrics::SaleMetrics;
use super::page::SalePage;
use super::view::{Lookup, SaleView};
use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::metrics::Metrics;

pub struct SaleService {
    store: Arc<dyn SaleStore>,
    lanes: Lanes<Buy, BuyOutcome>,
    view: Arc<SaleView>,
    events: Arc<EventRing>,
    throttle: Option<Arc<dyn Throttle>>,
    /// Counts attempts together with other servers.
    together: Option<RedisAttempts>,
    user_per_second: u32,
    challenge: Option<Challenge>,
    anomalies: Anomalies,
    page: SalePage,
    allow_reset: bool,
    timeout: Duration,
    metrics: SaleMetrics,
}

impl SaleService {
    /// Starts the lanes. A sale always uses the same lane, so its buyers are served in order of arrival.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, metrics: &Metrics) -> Self {
        let store = engines.sales();
        let log = store.has_event_log().then(|| Arc::clone(&store));
        let events = Arc::new(EventRing::new(log, metrics.sale.streams.clone(), metrics.sale.events.clone()));
        let view = Arc::new(SaleView::new(
            Arc::clone(&store),
            engines.sales_clock(),
            engines.sales_are_shared(),
            Arc::clone(&events),
        ));
        let lanes = engines.start_lanes("sale", metrics.lane("sale"), {
            let (store, view) = (Arc::clone(&store), Arc::clone(&view));
            move |batch: Batch<Buy>| {
                let (store, view) = (Arc::clone(&store), Arc::clone(&view));
                async move {
                    let outcomes = store.buy_batch(batch).await;
                    match &outcomes {
                        Ok(outcomes) => record_stocks(&view, outcomes),
                        Err(_) => view.invalidate(),
                    }
                    outcomes
                }
            }
        });
        let user_per_second = settings.sale.user_per_second;
        let throttle = engines.throttle(user_per_second, user_per_second);
        let challenge = Challenge::new(&settings.sale, &metrics.sale);
        let page = SalePage::new(&settings.sale);
        let anomalies = Anomalies::new(Arc::clone(&engines.store.wall_clock), metrics.sale.clone());
        let (timeout, metrics) = (settings.http.timeout, metrics.sale.clone());
        let allow_reset = settings.sale.allow_reset;
        Self {
            store,
            lanes,
            view,
            events,
            throttle,
            together: engines.attempts(),
            user_per_second,
            challenge,
            anomalies,
            page,
            allow_reset,
            timeout,
            metrics,
        }
    }

    /// Starts the tasks that update the view and publish its changes, until the server stops.
    pub fn run(&self, tasks: &TaskTracker, closing: &CancellationToken) {
        tasks.spawn(Arc::clone(&self.view).run_timer(closing.clone()));
        tasks.spawn(Arc::clone(&self.view).sync(closing.clone()));
        tasks.spawn(Arc::clone(&self.events).run(closing.clone()));
    }

    /// Returns a sale by its sku, or else the most relevant one, at most 100 ms old.
    pub async fn status(&self, sku: Option<&Sku>) -> Result<Option<Product>> {
        let Some(sku) = sku else { return within(self.timeout, self.view.current()).await };
        match within(self.timeout, self.view.find(sku)).await? {
            Lookup::Found(product) => Ok(Some(product)),
            Lookup::NotFound => Ok(None),
            Lookup::NotInView => {
                let product = self.product(sku).await?;
                // From now on its changes are published.
                product.iter().for_each(|product| self.view.update(product.clone()));
                Ok(product)
            }
        }
    }

    /// Subscribes to the events of one sale, or of all. A caller that returns with the id of its last event continues there if
    /// possible; otherwise also returns what `product` was when the subscription begins, and the id of that moment.
    pub async fn subscribe(
        &self,
        sku: Option<Sku>,
        last_id: Option<EventId>,
        product: &Product,
    ) -> Result<(Option<(EventId, SaleStage)>, SaleSubscription)> {
        within(self.timeout, self.events.prepare(product, last_id)).await?;
        Ok(self.events.subscribe(sku, last_id, product))
    }

    /// Returns the challenge of buyers, if one is configured.
    #[must_use]
    pub const fn challenge(&self) -> Option<&Challenge> {
        self.challenge.as_ref()
    }

    /// Returns the anomalies in attempts to buy.
    #[must_use]
    pub const fn anomalies(&self) -> &Anomalies {
        &self.anomalies
    }

    #[must_use]
    pub(crate) const fn page(&self) -> &SalePage {
        &self.page
    }

    /// Counts a buyer's attempt against the throttle of this server and, if that lets it pass, against that of all servers,
    /// unless the store counts it when it decides it. Returns `None` if no limit is configured.
    pub async fn attempt(&self, buyer: &UserId) -> Option<ThrottleDecision> {
        let mut decision = self.throttle.as_ref()?.take(buyer.as_str());
        let together = self.together.as_ref().filter(|together| !together.counts_purchases());
        if let Some(together) = together
            && decision.is_allowed
            && let Some(wait) = together.count_user(buyer, self.user_per_second).await
        {
            decision = decision.refused_together(wait);
        }
        if !decision.is_allowed {
            self.metrics.throttled.inc();
        }
        Some(decision)
    }

    /// Counts an attempt to buy by the caller's `User-Agent`.
    pub fn record_client(&self, user_agent: Option<&str>) {
        self.metrics.record_client(user_agent);
    }

    /// Buys one unit. `address` is the limit by which the store counts the attempt of an address.
    /// Fails when the lane is full or the store does not answer in time.
    pub async fn buy(&self, sku: Sku, buyer: UserId, address: Option<AddressLimit>) -> Result<BuyOutcome> {
        let limits = AttemptLimits { user_per_second: self.user_per_second, address };
        // The lane enforces the timeout.
        let outcome = self.lanes.submit(sku.as_str(), Buy { sku: sku.clone(), buyer, limits }).await;
        self.metrics.record_purchase(&outcome);
        outcome
    }

    /// Finds a buyer's purchase of one product, or the latest of any.
    pub async fn purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<FoundPurchase>> {
        within(self.timeout, self.store.find_purchase(buyer, sku)).await
    }

    /// Lists the purchases of a product in order of time.
    pub async fn purchases(
        &self,
        product: &Product,
        after: Option<PurchasePosition>,
        limit: usize,
    ) -> Result<Vec<Purchase>> {
        within(self.timeout, self.store.list_purchases(product, after, limit)).await
    }

    pub async fn create(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome> {
        let sku = sku.clone();
        self.change_products(move |store, view| async move {
            let outcome = store.create_product(&sku, terms).await?;
            if let CreateOutcome::Created(product) = &outcome {
                view.update(product.clone());
            }
            Ok(outcome)
        })
        .await
    }

    pub async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        within(self.timeout, self.store.product(sku)).await
    }

    /// Lists products in order of sku.
    pub async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>> {
        within(self.timeout, self.store.products(after, limit)).await
    }

    /// Changes the terms of a sale that has not begun.
    pub async fn change(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome> {
        let sku = sku.clone();
        self.change_products(move |store, view| async move {
            let outcome = store.change_product(&sku, change).await?;
            if let ChangeOutcome::Changed(product) = &outcome {
                view.update(product.clone());
            }
            Ok(outcome)
        })
        .await
    }

    /// Ends an active sale.
    pub async fn end(&self, sku: &Sku) -> Result<EndOutcome> {
        let sku = sku.clone();
        self.change_products(move |store, view| async move {
            let outcome = store.end_sale(&sku).await?;
            if let EndOutcome::Ended(product) = &outcome {
                view.update(product.clone());
            }
            Ok(outcome)
        })
        .await
    }

    /// Moves the end of a sale that has not ended to a later time.
    pub async fn extend(&self, sku: &Sku, end: Timestamp) -> Result<ChangeOutcome> {
        let sku = sku.clone();
        self.change_products(move |store, view| async move {
            let outcome = store.extend_sale(&sku, end).await?;
            if let ChangeOutcome::Changed(product) = &outcome {
                view.update(product.clone());
            }
            Ok(outcome)
        })
        .await
    }

    /// Deletes a product and its purchases; one that is active or has purchases only if `sale.allow_reset` is on.
    pub async fn delete(&self, sku: &Sku) -> Result<DeleteOutcome> {
        let (sku, only_unused) = (sku.clone(), !self.allow_reset);
        self.change_products(move |store, view| async move {
            let outcome = store.delete_product(&sku, only_unused).await?;
            if outcome != DeleteOutcome::InUse {
                view.remove(&sku);
            }
            Ok(outcome)
        })
        .await
    }

    /// Runs a change of products to its end, even if its caller disconnects.
    async fn change_products<T, F>(
        &self,
        change: impl FnOnce(Arc<dyn SaleStore>, Arc<SaleView>) -> F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let (store, view) = (Arc::clone(&self.store), Arc::clone(&self.view));
        let change = change(store, Arc::clone(&view));
        let change = tokio::spawn(async move { view.run_change(change).await });
        let change = async { change.await.unwrap_or_else(|panic| Err(Error::failed("sale", panic))) };
        within(self.timeout, change).await
    }

    /// Accepts no more purchases and waits for those in flight.
    pub async fn drain(&self) {
        self.lanes.drain().await;
    }
}

/// Records the lowest stock of each product that a batch has sold.
fn record_stocks(view: &SaleView, outcomes: &[BuyOutcome]) {
    let mut left: HashMap<ProductId, u32> = HashMap::new();
    for outcome in outcomes {
        if let BuyOutcome::Bought { product, stock, .. } = outcome {
            left.entry(*product).and_modify(|least| *least = (*least).min(*stock)).or_insert(*stock);
        }
    }
    for (product, stock) in left {
        view.record_stock(product, stock, Origin::Here);
    }
}
