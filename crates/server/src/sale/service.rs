//! Sale: products, purchases through lanes, and what this server knows of sales.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use weir_core::UserId;
use weir_core::sale::{PurchaseReceipt, PurchaseRefusal, Sku, Terms, TermsChange};
use weir_store::sale::{Buy, BuyOutcome, ChangeOutcome, CreateOutcome, Product, ProductId, SaleStore};
use weir_store::throttle::{Throttle, ThrottleDecision};
use weir_store::{Batch, Error, Lanes, Result};

use super::challenge::Challenge;
use super::events_ring::Events;
use super::view::{SaleView, Seen};
use crate::engines::{Engines, within};
use crate::settings::Settings;
use crate::telemetry::labels::OutcomeLabels;
use crate::telemetry::metrics::Metrics;

/// Sale.
pub struct SaleService {
    store: Arc<dyn SaleStore>,
    lanes: Lanes<Buy, BuyOutcome>,
    view: Arc<SaleView>,
    events: Arc<Events>,
    throttle: Option<Arc<dyn Throttle>>,
    challenge: Option<Challenge>,
    timeout: Duration,
    counters: Counters,
}

#[derive(Debug)]
struct Counters {
    bought: Counter,
    already_purchased: Counter,
    sold_out: Counter,
    not_active: Counter,
    unknown_sku: Counter,
    throttled: Counter,
    failed: Counter,
}

impl SaleService {
    /// Starts the lanes. A sale is always in the same lane, so its buyers are served in the order in which they came.
    #[must_use]
    pub fn start(engines: &Engines, settings: &Settings, metrics: &Metrics) -> Self {
        let store = engines.sales();
        let events = Arc::new(Events::new(metrics.sale.listeners.clone(), metrics.sale.events.clone()));
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
                        Ok(outcomes) => show(&view, outcomes),
                        Err(_) => view.invalidate(),
                    }
                    outcomes
                }
            }
        });
        let counter = |outcome| metrics.sale.purchases.get_or_create_owned(&OutcomeLabels { outcome });
        let counters = Counters {
            bought: counter("bought"),
            already_purchased: counter("already_purchased"),
            sold_out: counter("sold_out"),
            not_active: counter("not_active"),
            unknown_sku: counter("unknown_sku"),
            throttled: counter("throttled"),
            failed: counter("failed"),
        };
        let per_second = settings.sale.user_per_second;
        let throttle = engines.throttle(per_second, per_second);
        let challenge = Challenge::new(&settings.sale, metrics);
        Self { store, lanes, view, events, throttle, challenge, timeout: settings.http.timeout, counters }
    }

    /// Starts what keeps the board and tells of it; it stops when the server does.
    pub fn run(&self, tasks: &TaskTracker, closing: &CancellationToken) {
        tasks.spawn(Arc::clone(&self.view).keep_time(closing.clone()));
        tasks.spawn(Arc::clone(&self.view).follow(closing.clone()));
        tasks.spawn(Arc::clone(&self.events).pace(closing.clone()));
    }

    /// A sale, by its sku or the one that matters most, at most a tenth of a second old.
    pub async fn status(&self, sku: Option<&Sku>) -> Result<Option<Product>> {
        let Some(sku) = sku else { return within(self.timeout, self.view.current()).await };
        match within(self.timeout, self.view.find(sku)).await? {
            Seen::Here(product) => Ok(Some(product)),
            Seen::Nowhere => Ok(None),
            Seen::Unknown => {
                let product = self.product(sku).await?;
                // From now on its changes are told.
                product.iter().for_each(|product| self.view.learn(product.clone()));
                Ok(product)
            }
        }
    }

    /// What happens to sales.
    #[must_use]
    pub const fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// What a buyer has to prove, if anything.
    #[must_use]
    pub const fn challenge(&self) -> Option<&Challenge> {
        self.challenge.as_ref()
    }

    /// Counts an attempt of a user to buy, if there is a limit.
    pub fn attempt(&self, buyer: &UserId) -> Option<ThrottleDecision> {
        let throttled = self.throttle.as_ref()?.take(buyer.as_str());
        if !throttled.is_allowed {
            self.counters.throttled.inc();
        }
        Some(throttled)
    }

    /// Buys one unit.
    /// Fails when the lane is full or the store does not answer.
    pub async fn buy(&self, buy: Buy) -> Result<BuyOutcome> {
        let sku = buy.sku.clone();
        // The lane itself answers in time.
        let outcome = self.lanes.submit(sku.as_str(), buy).await;
        match &outcome {
            Ok(BuyOutcome::Bought { .. }) => &self.counters.bought,
            Ok(BuyOutcome::Refused(PurchaseRefusal::AlreadyPurchased)) => &self.counters.already_purchased,
            Ok(BuyOutcome::Refused(PurchaseRefusal::SoldOut)) => &self.counters.sold_out,
            Ok(BuyOutcome::Refused(PurchaseRefusal::NotActive)) => &self.counters.not_active,
            Ok(BuyOutcome::UnknownSku) => &self.counters.unknown_sku,
            Err(_) => &self.counters.failed,
        }
        .inc();
        outcome
    }

    /// A buyer's purchase: of one product, or the latest of any.
    pub async fn purchase(&self, buyer: &UserId, sku: Option<&Sku>) -> Result<Option<PurchaseReceipt>> {
        within(self.timeout, self.store.find_purchase(buyer, sku)).await
    }

    /// Makes a product.
    pub async fn create(&self, sku: &Sku, terms: Terms) -> Result<CreateOutcome> {
        let sku = sku.clone();
        self.change_board(move |store, view| async move {
            let outcome = store.create_product(&sku, terms).await?;
            if let CreateOutcome::Created(product) = &outcome {
                view.learn(product.clone());
            }
            Ok(outcome)
        })
        .await
    }

    /// A product as it stands.
    pub async fn product(&self, sku: &Sku) -> Result<Option<Product>> {
        within(self.timeout, self.store.product(sku)).await
    }

    /// Products in order of sku.
    pub async fn products(&self, after: Option<&Sku>, limit: usize) -> Result<Vec<Product>> {
        within(self.timeout, self.store.products(after, limit)).await
    }

    /// Changes what a sale offers, as long as it has not begun.
    pub async fn change(&self, sku: &Sku, change: TermsChange) -> Result<ChangeOutcome> {
        let sku = sku.clone();
        self.change_board(move |store, view| async move {
            let outcome = store.change_product(&sku, change).await?;
            if let ChangeOutcome::Changed(product) = &outcome {
                view.learn(product.clone());
            }
            Ok(outcome)
        })
        .await
    }

    /// Removes a product with all its purchases; false when there is none.
    pub async fn delete(&self, sku: &Sku) -> Result<bool> {
        let sku = sku.clone();
        self.change_board(move |store, view| async move {
            let is_gone = store.delete_product(&sku).await?;
            view.forget(&sku);
            Ok(is_gone)
        })
        .await
    }

    /// Runs a change to its end, whether or not its caller waits for it.
    async fn change_board<T, F>(
        &self,
        change: impl FnOnce(Arc<dyn SaleStore>, Arc<SaleView>) -> F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let (store, view) = (Arc::clone(&self.store), Arc::clone(&self.view));
        let change = change(store, Arc::clone(&view));
        let change = tokio::spawn(async move { view.changing(change).await });
        let change = async { change.await.unwrap_or_else(|panic| Err(Error::failed("sale", panic))) };
        within(self.timeout, change).await
    }

    /// Takes no new purchases and waits for those under way.
    pub async fn drain(&self) {
        self.lanes.drain().await;
    }
}

/// Shows what a batch has sold, once for each product.
fn show(view: &SaleView, outcomes: &[BuyOutcome]) {
    let mut left: HashMap<ProductId, u32> = HashMap::new();
    for outcome in outcomes {
        if let BuyOutcome::Bought { product, stock, .. } = outcome {
            left.entry(*product).and_modify(|least| *least = (*least).min(*stock)).or_insert(*stock);
        }
    }
    for (product, stock) in left {
        view.sold(product, stock);
    }
}
