//! The view on a scripted store, in virtual time.

use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use parking_lot::Mutex as StdMutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::UserId;
use weir_core::sale::{Sale, Terms, TermsChange};
use weir_store::Batch;
use weir_store::sale::{
    Buy, BuyOutcome, ChangeOutcome, CreateOutcome, DeleteOutcome, EndOutcome, FoundPurchase, Purchase,
    PurchasePosition, SaleAudit, SaleEvent,
};

use super::*;
use crate::sale::event_ring::SaleSubscription;

const START: Timestamp = Timestamp::from_seconds(1_771_149_600);
const FOREVER: Duration = Duration::from_secs(86_400);

/// A store that has some products and may publish its changes.
struct ChangingStore {
    since: Instant,
    products: StdMutex<Vec<Product>>,
    events: tokio::sync::Mutex<Option<mpsc::UnboundedReceiver<SaleEvent>>>,
    reads: AtomicUsize,
    state_saves: AtomicUsize,
}

fn refused<T>() -> Result<T> {
    Err(Error::unavailable("test", "not used by these tests"))
}

#[async_trait]
impl SaleStore for ChangingStore {
    async fn create_product(&self, _: &Sku, _: Terms) -> Result<CreateOutcome> {
        refused()
    }
    async fn product(&self, _: &Sku) -> Result<Option<Product>> {
        refused()
    }
    async fn products(&self, _: Option<&Sku>, _: usize) -> Result<Vec<Product>> {
        refused()
    }
    async fn change_product(&self, _: &Sku, _: TermsChange) -> Result<ChangeOutcome> {
        refused()
    }
    async fn end_sale(&self, _: &Sku) -> Result<EndOutcome> {
        refused()
    }
    async fn extend_sale(&self, _: &Sku, _: Timestamp) -> Result<ChangeOutcome> {
        refused()
    }
    async fn delete_product(&self, _: &Sku, _: bool) -> Result<DeleteOutcome> {
        refused()
    }
    async fn buy_batch(&self, _: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
        refused()
    }
    async fn find_purchase(&self, _: &UserId, _: Option<&Sku>) -> Result<Option<FoundPurchase>> {
        refused()
    }
    async fn list_purchases(
        &self,
        _: &Product,
        _: Option<PurchasePosition>,
        _: usize,
    ) -> Result<Vec<Purchase>> {
        refused()
    }
    async fn snapshot(&self) -> Result<SaleSnapshot> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let products = self.products.lock().clone();
        Ok(SaleSnapshot { now: START.plus(self.since.elapsed()), products, is_current: true })
    }
    async fn save_due_states(&self) -> Result<()> {
        self.state_saves.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    async fn follow_events(&self, apply: &(dyn Fn(SaleEvent) + Send + Sync)) {
        let mut events = self.events.lock().await;
        let Some(events) = &mut *events else { return };
        while let Some(event) = events.recv().await {
            apply(event);
        }
    }
    async fn audit_sales(&self) -> Result<SaleAudit> {
        refused()
    }
}

fn sku(text: &str) -> Sku {
    Sku::parse(text).unwrap()
}

/// A product whose sale begins and ends the given times after the start.
fn product(name: &str, begins: Duration, ends: Duration) -> Product {
    let terms = Terms::new(name, 10, START.plus(begins), START.plus(ends)).unwrap();
    let sale = Sale { terms, sold: 0, state: SaleState::Upcoming };
    Product { id: ProductId(7), sku: sku(name), sale, created_at: START }
}

struct Fixture {
    store: Arc<ChangingStore>,
    view: Arc<SaleView>,
    subscription: SaleSubscription,
    publisher: mpsc::UnboundedSender<SaleEvent>,
    since: Instant,
    _running: DropGuard,
}

impl Fixture {
    /// Starts a view that has read the store, with its tasks and one subscription.
    async fn start(products: Vec<Product>, publishes: bool) -> Self {
        let (publisher, receiver) = mpsc::unbounded_channel();
        let since = Instant::now();
        let store = Arc::new(ChangingStore {
            since,
            products: StdMutex::new(products),
            events: tokio::sync::Mutex::new(publishes.then_some(receiver)),
            reads: AtomicUsize::new(0),
            state_saves: AtomicUsize::new(0),
        });
        let events = Arc::new(EventRing::new(None, Gauge::default(), Counter::default()));
        let view =
            Arc::new(SaleView::new(Arc::<ChangingStore>::clone(&store), None, true, Arc::clone(&events)));
        // A product that no test has.
        let (_, subscription) = events.subscribe(None, None, &product("NONE", FOREVER, FOREVER * 2));
        view.refresh().await.unwrap();
        let closing = CancellationToken::new();
        tokio::spawn(Arc::clone(&view).run_timer(closing.clone()));
        tokio::spawn(Arc::clone(&view).sync(closing.clone()));
        Self { store, view, subscription, publisher, since, _running: closing.drop_guard() }
    }

    /// Returns the next published frames, and how long after the start they came.
    async fn next_event(&mut self) -> (String, Duration) {
        let frames = tokio::time::timeout(FOREVER, self.subscription.next()).await.expect("an event");
        let text = String::from_utf8(frames.expect("the subscription keeps up").to_vec()).unwrap();
        (text, self.since.elapsed())
    }

    fn reads(&self) -> usize {
        self.store.reads.load(Ordering::SeqCst)
    }
}

fn expect_at(at: Duration, expected: Duration) {
    // Timers are exact to a millisecond.
    assert!(at >= expected && at - expected <= Duration::from_millis(2), "{at:?} instead of {expected:?}");
}

#[tokio::test(start_paused = true)]
async fn states_are_published_when_due_and_not_when_the_store_is_next_read() {
    let (begins, ends) = (Duration::from_millis(10_007), Duration::from_millis(700_033));
    let mut fixture = Fixture::start(vec![product("W", begins, ends)], true).await;
    fixture.publisher.send(SaleEvent::Subscribed).unwrap();
    let (event, at) = fixture.next_event().await;
    assert!(event.contains("\"ACTIVE\""), "{event}");
    expect_at(at, begins);
    let (event, at) = fixture.next_event().await;
    assert!(event.contains("\"TIME_EXPIRED\""), "{event}");
    expect_at(at, ends);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(fixture.store.state_saves.load(Ordering::SeqCst), 2, "each is saved once");
}

#[tokio::test(start_paused = true)]
async fn an_earlier_sale_that_is_added_later_is_published_when_due() {
    let minute = Duration::from_secs(60);
    let mut fixture = Fixture::start(vec![product("LATE", minute * 60, minute * 90)], true).await;
    fixture.publisher.send(SaleEvent::Subscribed).unwrap();
    tokio::time::sleep(minute).await;
    let begins = minute * 2 + Duration::from_millis(503);
    fixture.view.update(product("EARLY", begins, minute * 5));
    fixture.store.products.lock().push(product("EARLY", begins, minute * 5));
    let (event, at) = fixture.next_event().await;
    assert!(event.contains("\"EARLY\"") && event.contains("\"ACTIVE\""), "{event}");
    expect_at(at, begins);
}

#[tokio::test(start_paused = true)]
async fn a_sale_first_seen_after_it_began_is_published_then() {
    let begun = |name| {
        let mut product = product(name, Duration::from_secs(1), FOREVER);
        product.sale.state = SaleState::Active;
        product
    };
    let mut fixture = Fixture::start(vec![begun("OLD")], false).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    fixture.store.products.lock().push(begun("NEW"));
    let (event, at) = fixture.next_event().await;
    assert!(event.contains("\"NEW\"") && event.contains("\"ACTIVE\""), "and nothing of the old one: {event}");
    assert!(at <= Duration::from_secs(60) + AGE_MAX * 2, "{at:?}");
}

#[tokio::test(start_paused = true)]
async fn events_of_the_store_are_published_at_once_and_the_store_is_rarely_read() {
    let hour = Duration::from_secs(3_600);
    let mut fixture = Fixture::start(vec![product("W", Duration::from_secs(1), hour)], true).await;
    fixture.publisher.send(SaleEvent::Subscribed).unwrap();
    assert!(fixture.next_event().await.0.contains("\"ACTIVE\""));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (before, reads) = (Instant::now(), fixture.reads());
    fixture.publisher.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(7), stock: 4 }).unwrap();
    assert!(fixture.next_event().await.0.contains("\"stock\":4}"));
    assert_eq!((before.elapsed(), fixture.reads()), (Duration::ZERO, reads), "without reading the store");
    fixture.publisher.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(6), stock: 1 }).unwrap();
    fixture.publisher.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(7), stock: 5 }).unwrap();
    fixture.publisher.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(7), stock: 3 }).unwrap();
    assert!(
        fixture.next_event().await.0.contains("\"stock\":3}"),
        "neither of another product, nor what is old"
    );
    tokio::time::sleep(Duration::from_secs(60)).await;
    let read = fixture.reads() - reads;
    assert!((20..=31).contains(&read), "every two seconds: {read}");
}

#[tokio::test(start_paused = true)]
async fn missed_changes_are_read_when_the_store_publishes_again() {
    let hour = Duration::from_secs(3_600);
    let mut fixture = Fixture::start(vec![product("W", Duration::from_secs(1), hour)], true).await;
    fixture.publisher.send(SaleEvent::Subscribed).unwrap();
    assert!(fixture.next_event().await.0.contains("\"ACTIVE\""));
    tokio::time::sleep(Duration::from_secs(5)).await;
    fixture.publisher.send(SaleEvent::Lost).unwrap();
    let reads = fixture.reads();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(fixture.reads() - reads >= 90, "without events it is read ten times a second");
    fixture.publisher.send(SaleEvent::Subscribed).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let reads = fixture.reads();
    // Sold while no events were published.
    fixture.store.products.lock()[0].sale.sold = 9;
    fixture.publisher.send(SaleEvent::Subscribed).unwrap();
    let before = Instant::now();
    assert!(fixture.next_event().await.0.contains("\"stock\":1}"));
    assert!(before.elapsed() <= AGE_MAX * 2 && fixture.reads() == reads + 1, "by one read");
}

#[tokio::test(start_paused = true)]
async fn a_store_without_events_is_read_ten_times_a_second_while_there_are_streams() {
    let hour = Duration::from_secs(3_600);
    let fixture = Fixture::start(vec![product("W", hour, hour * 2)], false).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let reads = fixture.reads();
    assert!((90..=101).contains(&reads), "{reads}");
    drop(fixture.subscription);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let reads = fixture.store.reads.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(fixture.store.reads.load(Ordering::SeqCst), reads, "and not at all without streams");
}
