//! The board on a store that says what it is told to, in time that stands still until everybody waits.

use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use parking_lot::Mutex as StdMutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_core::UserId;
use weir_core::sale::{PurchaseReceipt, Sale, Terms, TermsChange};
use weir_store::Batch;
use weir_store::sale::{Buy, BuyOutcome, ChangeOutcome, CreateOutcome, SaleAudit, SaleEvent};

use super::*;
use crate::sale::events_ring::Listener;

const START: Timestamp = Timestamp::from_seconds(1_771_149_600);
const FOREVER: Duration = Duration::from_secs(86_400);

/// A store that has some products, and may tell of changes by itself.
struct ChangingStore {
    since: Instant,
    products: StdMutex<Vec<Product>>,
    news: tokio::sync::Mutex<Option<mpsc::UnboundedReceiver<SaleEvent>>>,
    reads: AtomicUsize,
    turns: AtomicUsize,
}

fn refused<T>() -> Result<T> {
    Err(Error::unavailable("test", "nobody asks for this here"))
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
    async fn delete_product(&self, _: &Sku) -> Result<bool> {
        refused()
    }
    async fn buy_batch(&self, _: Batch<Buy>) -> Result<Vec<BuyOutcome>> {
        refused()
    }
    async fn find_purchase(&self, _: &UserId, _: Option<&Sku>) -> Result<Option<PurchaseReceipt>> {
        refused()
    }
    async fn snapshot(&self) -> Result<SaleSnapshot> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let products = self.products.lock().clone();
        Ok(SaleSnapshot { now: START.plus(self.since.elapsed()), products, is_current: true })
    }
    async fn save_due_states(&self) -> Result<()> {
        self.turns.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    async fn follow_events(&self, hear: &(dyn Fn(SaleEvent) + Send + Sync)) {
        let mut news = self.news.lock().await;
        let Some(news) = &mut *news else { return };
        while let Some(news) = news.recv().await {
            hear(news);
        }
    }
    async fn audit_sales(&self) -> Result<SaleAudit> {
        refused()
    }
}

fn sku(text: &str) -> Sku {
    Sku::parse(text).unwrap()
}

/// A product whose sale begins and ends so long after the start.
fn product(name: &str, begins: Duration, ends: Duration) -> Product {
    let terms = Terms::new(name, 10, START.plus(begins), START.plus(ends)).unwrap();
    let sale = Sale { terms, sold: 0, state: SaleState::Upcoming };
    Product { id: ProductId(7), sku: sku(name), sale, created_at: START }
}

struct Given {
    store: Arc<ChangingStore>,
    view: Arc<SaleView>,
    listener: Listener,
    say: mpsc::UnboundedSender<SaleEvent>,
    since: Instant,
    _running: DropGuard,
}

impl Given {
    /// A board that has read the store and is kept; somebody listens.
    async fn start(products: Vec<Product>, tells: bool) -> Self {
        let (say, news) = mpsc::unbounded_channel();
        let since = Instant::now();
        let store = Arc::new(ChangingStore {
            since,
            products: StdMutex::new(products),
            news: tokio::sync::Mutex::new(tells.then_some(news)),
            reads: AtomicUsize::new(0),
            turns: AtomicUsize::new(0),
        });
        let events = Arc::new(Events::new(Gauge::default(), Counter::default()));
        let view =
            Arc::new(SaleView::new(Arc::<ChangingStore>::clone(&store), None, true, Arc::clone(&events)));
        let (_, listener) = events.listen(None, None);
        view.freshen().await.unwrap();
        let closing = CancellationToken::new();
        tokio::spawn(Arc::clone(&view).keep_time(closing.clone()));
        tokio::spawn(Arc::clone(&view).follow(closing.clone()));
        Self { store, view, listener, say, since, _running: closing.drop_guard() }
    }

    /// What is told next, and how long after the start.
    async fn hears(&mut self) -> (String, Duration) {
        let heard = tokio::time::timeout(FOREVER, self.listener.next()).await.expect("something is told");
        let text = String::from_utf8(heard.expect("it keeps up").to_vec()).unwrap();
        (text, self.since.elapsed())
    }

    fn reads(&self) -> usize {
        self.store.reads.load(Ordering::SeqCst)
    }
}

fn expect_at(at: Duration, wanted: Duration) {
    // Timers have a grain of a millisecond.
    assert!(at >= wanted && at - wanted <= Duration::from_millis(2), "{at:?} instead of {wanted:?}");
}

#[tokio::test(start_paused = true)]
async fn states_are_told_at_their_very_time_and_not_when_the_store_is_next_read() {
    let (begins, ends) = (Duration::from_millis(10_007), Duration::from_millis(700_033));
    let mut given = Given::start(vec![product("W", begins, ends)], true).await;
    given.say.send(SaleEvent::Subscribed).unwrap();
    let (told, at) = given.hears().await;
    assert!(told.contains("\"ACTIVE\""), "{told}");
    expect_at(at, begins);
    let (told, at) = given.hears().await;
    assert!(told.contains("\"TIME_EXPIRED\""), "{told}");
    expect_at(at, ends);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(given.store.turns.load(Ordering::SeqCst), 2, "and written down, once each");
}

#[tokio::test(start_paused = true)]
async fn an_earlier_sale_that_is_heard_of_later_is_told_at_its_time() {
    let minute = Duration::from_secs(60);
    let mut given = Given::start(vec![product("LATE", minute * 60, minute * 90)], true).await;
    given.say.send(SaleEvent::Subscribed).unwrap();
    tokio::time::sleep(minute).await;
    let begins = minute * 2 + Duration::from_millis(503);
    given.view.learn(product("EARLY", begins, minute * 5));
    given.store.products.lock().push(product("EARLY", begins, minute * 5));
    let (told, at) = given.hears().await;
    assert!(told.contains("\"EARLY\"") && told.contains("\"ACTIVE\""), "{told}");
    expect_at(at, begins);
}

#[tokio::test(start_paused = true)]
async fn a_sale_that_is_heard_of_only_after_it_began_is_told_then() {
    let begun = |name| {
        let mut product = product(name, Duration::from_secs(1), FOREVER);
        product.sale.state = SaleState::Active;
        product
    };
    let mut given = Given::start(vec![begun("OLD")], false).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    given.store.products.lock().push(begun("NEW"));
    let (told, at) = given.hears().await;
    assert!(told.contains("\"NEW\"") && told.contains("\"ACTIVE\""), "and nothing of the old one: {told}");
    assert!(at <= Duration::from_secs(60) + FRESH_FOR * 2, "{at:?}");
}

#[tokio::test(start_paused = true)]
async fn what_the_store_tells_is_told_at_once_and_the_store_hardly_read() {
    let hour = Duration::from_secs(3_600);
    let mut given = Given::start(vec![product("W", Duration::from_secs(1), hour)], true).await;
    given.say.send(SaleEvent::Subscribed).unwrap();
    assert!(given.hears().await.0.contains("\"ACTIVE\""));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (before, reads) = (Instant::now(), given.reads());
    given.say.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(7), stock: 4 }).unwrap();
    assert!(given.hears().await.0.contains("\"stock\":4}"));
    assert_eq!((before.elapsed(), given.reads()), (Duration::ZERO, reads), "without a look at the store");
    given.say.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(6), stock: 1 }).unwrap();
    given.say.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(7), stock: 5 }).unwrap();
    given.say.send(SaleEvent::Sold { sku: sku("W"), product: ProductId(7), stock: 3 }).unwrap();
    assert!(given.hears().await.0.contains("\"stock\":3}"), "neither of another product, nor what is old");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let read = given.reads() - reads;
    assert!((20..=31).contains(&read), "every two seconds: {read}");
}

#[tokio::test(start_paused = true)]
async fn whatever_was_not_heard_is_read_when_the_store_begins_to_tell_again() {
    let hour = Duration::from_secs(3_600);
    let mut given = Given::start(vec![product("W", Duration::from_secs(1), hour)], true).await;
    given.say.send(SaleEvent::Subscribed).unwrap();
    assert!(given.hears().await.0.contains("\"ACTIVE\""));
    tokio::time::sleep(Duration::from_secs(5)).await;
    given.say.send(SaleEvent::Lost).unwrap();
    let reads = given.reads();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(given.reads() - reads >= 90, "while nothing is told it is read ten times a second");
    given.say.send(SaleEvent::Subscribed).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let reads = given.reads();
    // Sold while nobody was told.
    given.store.products.lock()[0].sale.sold = 9;
    given.say.send(SaleEvent::Subscribed).unwrap();
    let before = Instant::now();
    assert!(given.hears().await.0.contains("\"stock\":1}"));
    assert!(before.elapsed() <= FRESH_FOR * 2 && given.reads() == reads + 1, "by one reading");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_tells_nothing_is_read_ten_times_a_second_while_somebody_listens() {
    let hour = Duration::from_secs(3_600);
    let given = Given::start(vec![product("W", hour, hour * 2)], false).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let reads = given.reads();
    assert!((90..=101).contains(&reads), "{reads}");
    drop(given.listener);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let reads = given.store.reads.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(given.store.reads.load(Ordering::SeqCst), reads, "and not at all while nobody does");
}
