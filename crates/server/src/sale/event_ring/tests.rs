//! The ring alone, and on a shared log in memory.

use async_trait::async_trait;
use futures_util::FutureExt;
use parking_lot::Mutex as StdMutex;
use weir_core::sale::{Sale, SaleState, Terms, TermsChange};
use weir_core::{Timestamp, UserId};
use weir_store::sale::{
    Buy, BuyOutcome, ChangeOutcome, CreateOutcome, DeleteOutcome, EndOutcome, FoundPurchase, ProductId,
    Purchase, PurchasePosition, SaleAudit, SaleSnapshot,
};
use weir_store::{Batch, Error};

use super::*;

const START: SaleStage = SaleStage { state: SaleState::Active, stock: 100_000 };
const SOLD_OUT: SaleState = SaleState::Ended(EndReason::SoldOut);

fn sku(text: &str) -> Sku {
    Sku::parse(text).unwrap()
}

/// A product of 100,000 units.
fn product(name: &str, state: SaleState, stock: u32) -> Product {
    let terms = Terms::new(name, START.stock, Timestamp::EPOCH, Timestamp::from_seconds(1)).unwrap();
    let sale = Sale { terms, sold: START.stock - stock, state };
    Product { id: ProductId(7), sku: sku(name), sale, created_at: Timestamp::EPOCH }
}

fn active(name: &str, stock: u32) -> Product {
    product(name, SaleState::Active, stock)
}

fn event_ring() -> Arc<EventRing> {
    Arc::new(EventRing::new(None, Gauge::default(), Counter::default()))
}

fn publish(ring: &EventRing, product: &Product) {
    ring.publish(product, START, Origin::Here);
}

fn subscribe(ring: &Arc<EventRing>, name: Option<&str>, last: Option<EventId>) -> SaleSubscription {
    ring.subscribe(name.map(sku), last, &active("W", START.stock)).1
}

/// Returns the stocks and states that a subscription receives without waiting.
fn received(subscription: &mut SaleSubscription) -> Vec<String> {
    let mut received = Vec::new();
    while let Some(frames) = subscription.next().now_or_never() {
        let text = String::from_utf8(frames.expect("the subscription keeps up").to_vec()).unwrap();
        for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
            let data: serde_json::Value = serde_json::from_str(data).unwrap();
            received.push(data.get("stock").unwrap_or(&data["state"]).to_string());
        }
    }
    received
}

fn latest(ring: &EventRing) -> EventId {
    *ring.latest_id.borrow()
}

#[test]
fn at_a_low_rate_every_stock_is_published_and_a_state_follows_its_stock() {
    let ring = event_ring();
    let mut subscription = subscribe(&ring, None, None);
    publish(&ring, &active("W", START.stock - 1));
    publish(&ring, &active("W", START.stock - 3));
    publish(&ring, &product("W", SaleState::Ended(EndReason::EndedByOperator), START.stock - 4));
    assert_eq!(received(&mut subscription), ["99999", "99998", "99997", "99996", "\"ENDED\""]);
}

#[test]
fn a_flood_is_throttled_and_neither_the_last_stock_nor_the_state_is_lost() {
    let ring = event_ring();
    let mut subscription = subscribe(&ring, None, None);
    for stock in (1..START.stock).rev() {
        publish(&ring, &active("W", stock));
    }
    publish(&ring, &product("W", SOLD_OUT, 0));
    let received = received(&mut subscription);
    assert!(received.len() < 1_000, "{}", received.len());
    assert_eq!(received[received.len() - 2..], ["0", "\"ENDED\""]);
    assert!(received.windows(2).all(|pair| pair[0] != pair[1]));
}

#[tokio::test]
async fn a_deferred_stock_is_published_soon() {
    let ring = event_ring();
    let closing = CancellationToken::new();
    let publisher = tokio::spawn(Arc::clone(&ring).run(closing.clone()));
    let mut subscription = subscribe(&ring, None, None);
    for stock in (7..START.stock).rev() {
        publish(&ring, &active("W", stock));
    }
    let mut last = String::new();
    while !last.contains("\"stock\":7}") {
        last = String::from_utf8(subscription.next().await.unwrap().to_vec()).unwrap();
    }
    closing.cancel();
    publisher.await.unwrap();
}

#[test]
fn a_reconnecting_subscription_gets_missed_events_once_and_no_initial() {
    let ring = event_ring();
    let mut subscription = subscribe(&ring, None, None);
    publish(&ring, &active("W", 99_999));
    assert_eq!(received(&mut subscription), ["99999"]);
    let last = latest(&ring);
    publish(&ring, &active("W", 99_998));
    publish(&ring, &active("X", 99_999));
    publish(&ring, &active("W", 99_997));
    let (initial, mut back) = ring.subscribe(Some(sku("W")), Some(last), &active("W", 99_997));
    assert_eq!(initial, None);
    assert_eq!(received(&mut back), ["99998", "99997"]);
    assert_eq!(received(&mut subscribe(&ring, None, Some(latest(&ring)))), Vec::<String>::new());
}

#[test]
fn initial_tells_what_the_events_have_told_and_not_what_is_known() {
    let ring = event_ring();
    let _first = subscribe(&ring, None, None);
    for stock in (50_000..START.stock).rev() {
        publish(&ring, &active("W", stock));
    }
    // The stocks from here on are deferred: the events have told less than this server knows.
    let (initial, mut subscription) = ring.subscribe(None, None, &active("W", 50_000));
    let (id, stage) = initial.unwrap();
    assert_eq!((id, stage.state), (latest(&ring), SaleState::Active));
    publish(&ring, &product("W", SOLD_OUT, 0));
    let stocks: Vec<u32> =
        received(&mut subscription).iter().filter_map(|stock| stock.parse().ok()).collect();
    assert!(stocks.iter().all(|stock| *stock < stage.stock), "{stocks:?} after {stage:?}");
}

#[test]
fn ids_that_are_too_old_or_unknown_get_no_past_events() {
    let ring = event_ring();
    let first = latest(&ring);
    for n in 0..HISTORY_MAX + 10 {
        publish(&ring, &product(&format!("S{n}"), SOLD_OUT, START.stock));
    }
    let id = |number: u64| EventId { number, ..first };
    let latest_id = id(HISTORY_MAX as u64 + 10);
    assert_eq!(latest(&ring), latest_id);
    let other = EventId { epoch: first.epoch + 1, number: 1 };
    for last in [EventId::default(), id(0), id(9), latest_id.next(), other] {
        let (initial, mut subscription) = ring.subscribe(None, Some(last), &active("W", 1));
        assert_eq!((initial.unwrap().0, received(&mut subscription).len()), (latest_id, 0), "{last}");
    }
    assert_eq!(received(&mut subscribe(&ring, None, Some(id(10)))).len(), HISTORY_MAX);
}

#[test]
fn a_subscription_that_falls_behind_is_dropped() {
    let ring = event_ring();
    let mut slow = subscribe(&ring, None, None);
    for n in 0..=HISTORY_MAX {
        publish(&ring, &product(&format!("S{n}"), SOLD_OUT, START.stock));
    }
    assert_eq!(slow.next().now_or_never(), Some(None));
    drop(slow);
    assert!(!ring.has_subscriptions());
}

#[test]
fn events_of_a_deleted_product_are_not_sent_again() {
    let ring = event_ring();
    let first = latest(&ring);
    publish(&ring, &active("W", 99_999));
    publish(&ring, &active("X", 99_998));
    ring.remove(&sku("W"));
    assert_eq!(received(&mut subscribe(&ring, None, Some(first))), ["99999", "99998"]);
}

/// A log that several rings share, by the rule of `sale_log.lua`. Nothing arrives through a channel unless a test says so.
#[derive(Default)]
struct SharedLog(StdMutex<LogState>);

#[derive(Default)]
struct LogState {
    latest: EventId,
    dropped: EventId,
    events: Vec<LoggedEvent>,
    stages: HashMap<ProductId, SaleStage>,
    is_down: bool,
    calls: usize,
}

impl SharedLog {
    fn new() -> Arc<Self> {
        let log = Arc::new(Self::default());
        log.0.lock().latest.epoch = 5;
        log
    }

    fn ring(self: &Arc<Self>) -> Arc<EventRing> {
        let log: Arc<dyn SaleStore> = Arc::<Self>::clone(self);
        Arc::new(EventRing::new(Some(log), Gauge::default(), Counter::default()))
    }

    /// Loses all, as a Redis that was flushed.
    fn lose(&self) {
        let epoch = self.0.lock().latest.epoch + 1;
        *self.0.lock() = LogState { latest: EventId { epoch, number: 0 }, ..LogState::default() };
    }
}

fn refused<T>() -> Result<T> {
    Err(Error::unavailable("test", "not used by these tests"))
}

#[async_trait]
impl SaleStore for SharedLog {
    async fn publish_events(
        &self,
        publications: &[Publication],
        after: Option<EventId>,
    ) -> Result<EventPage> {
        let mut log = self.0.lock();
        log.calls += 1;
        if log.is_down {
            return refused();
        }
        let mut stages = Vec::new();
        for Publication { sku, product, from, to, initial_stock, stocks_max } in publications {
            let stage = *log.stages.entry(*product).or_insert(*from);
            let changes = stage.changes_to(to, *initial_stock, *stocks_max);
            for (change, stage) in changes {
                log.latest = log.latest.next();
                let id = log.latest;
                log.events.push(LoggedEvent { id, sku: sku.clone(), product: *product, change, stage });
                log.stages.insert(*product, stage);
            }
            stages.push(log.stages[product]);
        }
        let is_missed = |event: &&LoggedEvent| after.is_none_or(|after| event.id > after);
        let events = log.events.iter().filter(is_missed).cloned().collect();
        Ok(EventPage {
            dropped: EventId { epoch: log.latest.epoch, ..log.dropped },
            latest: log.latest,
            events,
            stages,
        })
    }
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
        refused()
    }
    async fn save_due_states(&self) -> Result<()> {
        refused()
    }
    async fn audit_sales(&self) -> Result<SaleAudit> {
        refused()
    }
}

/// Connects a client as the route does. Returns what `initial` tells, if it is sent.
async fn connect(
    ring: &Arc<EventRing>,
    known: &Product,
    last: Option<EventId>,
) -> (Option<(EventId, SaleStage)>, SaleSubscription) {
    ring.prepare(known, last).await.unwrap();
    ring.subscribe(Some(known.sku.clone()), last, known)
}

#[tokio::test(start_paused = true)]
async fn a_client_continues_on_another_server_with_exactly_what_it_missed() {
    let log = SharedLog::new();
    let (a, b) = (log.ring(), log.ring());
    let (initial, mut first) = connect(&a, &active("W", 100), None).await;
    let (_, stage) = initial.unwrap();
    assert_eq!(stage.stock, 100);
    a.publish(&active("W", 98), stage, Origin::Here);
    a.publish_due().await.unwrap();
    assert_eq!(received(&mut first), ["99", "98"]);
    let last = latest(&a);
    a.publish(&active("W", 97), stage, Origin::Here);
    a.publish_due().await.unwrap();
    // The other server has heard nothing yet, and knows less of the sale than the client.
    let (initial, mut back) = connect(&b, &active("W", 100), Some(last)).await;
    assert_eq!(initial, None);
    b.publish(&active("W", 96), stage, Origin::Here);
    b.publish_due().await.unwrap();
    assert_eq!(received(&mut back), ["97", "96"]);
    assert_eq!(latest(&b).number, 4);
    // A third client begins on the server that knows more than was told.
    let (initial, mut third) = connect(&a, &active("W", 90), None).await;
    assert_eq!(initial.unwrap(), (EventId { epoch: 5, number: 3 }, SaleStage { stock: 97, ..stage }));
    a.read_log();
    a.publish_due().await.unwrap();
    assert_eq!(received(&mut third), ["96"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hears_of_a_sale_before_its_events_leaves_out_none_of_them() {
    let log = SharedLog::new();
    let (a, b) = (log.ring(), log.ring());
    connect(&a, &active("W", 100), None).await;
    b.read_log();
    b.publish_due().await.unwrap();
    let begin = latest(&b);
    a.publish(&active("W", 98), START, Origin::Here);
    a.publish_due().await.unwrap();
    // What was sold is known here before the events that tell it, and nobody has asked for this sale before.
    b.publish(&active("W", 98), SaleStage { stock: 99, ..START }, Origin::Elsewhere);
    let events = log.0.lock().events.clone();
    b.apply_logged(events);
    let (initial, mut back) = connect(&b, &active("W", 98), Some(begin)).await;
    assert_eq!((initial, received(&mut back)), (None, vec!["99".to_owned(), "98".to_owned()]));
    assert_eq!(latest(&b), latest(&a));
}

#[tokio::test(start_paused = true)]
async fn what_another_server_sells_is_published_by_it_or_after_a_moment_by_this_one() {
    let log = SharedLog::new();
    let ring = log.ring();
    let (_, mut subscription) = connect(&ring, &active("W", 100), None).await;
    let running = tokio::spawn(Arc::clone(&ring).run(CancellationToken::new()));
    let calls = log.0.lock().calls;
    ring.publish(&active("W", 99), START, Origin::Elsewhere);
    tokio::time::sleep(SELLER_PUBLISHES_FOR / 2).await;
    assert_eq!(log.0.lock().calls, calls, "the seller has published it, or is about to");
    let since = Instant::now();
    assert!(subscription.next().await.is_some(), "the seller has died");
    assert!(since.elapsed() <= SELLER_PUBLISHES_FOR, "{:?}", since.elapsed());
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_missed_message_is_read_and_an_outage_is_repeated() {
    let log = SharedLog::new();
    let (a, b) = (log.ring(), log.ring());
    let (_, mut subscription) = connect(&b, &active("W", 100), None).await;
    let running = tokio::spawn(Arc::clone(&b).run(CancellationToken::new()));
    for stock in [99, 98] {
        a.publish(&active("W", stock), START, Origin::Here);
    }
    connect(&a, &active("W", 100), None).await;
    a.publish_due().await.unwrap();
    let events = log.0.lock().events.clone();
    log.0.lock().is_down = true;
    b.apply_logged(vec![events[1].clone()]);
    tokio::time::sleep(PAUSE_AFTER_ERROR * 3).await;
    assert!(received(&mut subscription).is_empty(), "the first of them is missing");
    log.0.lock().is_down = false;
    let frames = subscription.next().await.unwrap();
    assert!(
        frames.starts_with(b"event: stock-update\nid: 5-1\ndata: {\"sku\":\"W\",\"stock\":99}"),
        "{frames:?}"
    );
    b.apply_logged(events);
    assert!(received(&mut subscription).iter().all(|stock| stock == "98"), "nothing comes twice");
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_lost_log_begins_anew_and_streams_go_on() {
    let log = SharedLog::new();
    let ring = log.ring();
    let (_, mut subscription) = connect(&ring, &active("W", 100), None).await;
    ring.publish(&active("W", 99), START, Origin::Here);
    ring.publish_due().await.unwrap();
    let last = latest(&ring);
    log.lose();
    ring.publish(&active("W", 98), START, Origin::Here);
    ring.publish_due().await.unwrap();
    assert_eq!(received(&mut subscription), ["99", "98"]);
    assert_eq!(latest(&ring), EventId { epoch: 6, number: 1 });
    let (initial, mut back) = connect(&ring, &active("W", 98), Some(last)).await;
    assert_eq!((initial, received(&mut back)), (None, vec!["98".to_owned()]), "this server has all of both");
    let other = log.ring();
    let (initial, _) = connect(&other, &active("W", 98), Some(last)).await;
    assert_eq!(
        initial.unwrap().0,
        EventId { epoch: 6, number: 1 },
        "and one that has not begins with the present"
    );
}
