//! Publishes changes of sales to all event streams.
//!
//! An event is serialized once and shared by all subscriptions. The last events are stored in a ring buffer. Subscriptions
//! that reconnect catch up from it, and a subscription that falls behind it is dropped, so nothing is queued per
//! subscription. At a low rate of purchases every stock is published; in a flood only the newest, a few times a second. A
//! change of state is published at once, after the stock that led to it.
//!
//! Servers on one Redis share a log of events: what is published is appended there, and the ring has what the log has, in its
//! order and with its ids. So a client may continue on any server. Without such a log the ring is the log, and its ids begin
//! with the time of the start; those of another process are unknown.
//!
//! A subscription begins with what the events up to the latest have told, and not with what this server knows by now. So no
//! stock is ever followed by a greater one.

mod tracked_sale;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use parking_lot::{Mutex, RwLock};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use weir_core::sale::{EndReason, SaleChange, SaleStage, Sku};
use weir_store::Result;
use weir_store::sale::{EventId, EventPage, LoggedEvent, Product, Publication, SaleStore};

use self::tracked_sale::TrackedSale;
use super::events::PublishFailed;

/// Events in the ring.
const HISTORY_MAX: usize = 1_024;
/// How long the server that sold has to publish it in the shared log before another one does.
const SELLER_PUBLISHES_FOR: Duration = Duration::from_millis(100);
/// The pause after the log could not be used.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);
/// How often the log is read for a subscription because newer events have arrived before the reply.
const READS_MAX: usize = 5;

/// How a server has learned of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It was made or found out here: this server publishes it.
    Here,
    /// Another server has made it, and is publishing it.
    Elsewhere,
}

/// A serialized event.
#[derive(Clone, Debug)]
struct RingEvent {
    id: EventId,
    sku: Sku,
    frame: Bytes,
}

/// Publishes events and holds the last ones.
pub(crate) struct EventRing {
    ring: RwLock<RingBuffer>,
    /// Locked before the ring: what a sale's events have told belongs to the latest event of the ring.
    sales: Mutex<HashMap<Sku, TrackedSale>>,
    latest_id: watch::Sender<EventId>,
    /// The store whose log other servers share, if it has one.
    log: Option<Arc<dyn SaleStore>>,
    /// Held during a call of the log.
    log_calls: tokio::sync::Mutex<()>,
    /// Whether the ring has what the log had at some time. Always true without a shared log.
    was_read: AtomicBool,
    /// Whether events of the log were missed.
    is_behind: AtomicBool,
    /// Notified when there may be something to publish, or to read.
    due: Notify,
    streams: Gauge,
    /// Notified when a subscription starts.
    subscribed: Notify,
    published: Counter,
}

#[derive(Debug)]
struct RingBuffer {
    events: VecDeque<RingEvent>,
    /// The last event that is no longer in the ring.
    dropped_id: EventId,
}

#[derive(Serialize)]
struct StockData<'a> {
    sku: &'a str,
    stock: u32,
}

#[derive(Serialize)]
struct StateData<'a> {
    sku: &'a str,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

impl EventRing {
    /// Creates an empty ring. `log` is the store, if its servers share a log; `streams` is the number of subscriptions,
    /// `published` that of events.
    #[must_use]
    pub(crate) fn new(log: Option<Arc<dyn SaleStore>>, streams: Gauge, published: Counter) -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = if log.is_some() { 0 } else { u64::try_from(since_epoch.as_micros()).unwrap_or(0) };
        let first = EventId { epoch, number: 0 };
        Self {
            ring: RwLock::new(RingBuffer { events: VecDeque::new(), dropped_id: first }),
            sales: Mutex::default(),
            latest_id: watch::Sender::new(first),
            was_read: AtomicBool::new(log.is_none()),
            log,
            log_calls: tokio::sync::Mutex::default(),
            is_behind: AtomicBool::new(false),
            due: Notify::new(),
            streams,
            subscribed: Notify::new(),
            published,
        }
    }

    /// Publishes the state and stock of a product whose listeners knew `from` unless they know more: now or, in a flood of
    /// purchases, within a moment.
    pub(crate) fn publish(&self, product: &Product, from: SaleStage, origin: Origin) {
        let mut sales = self.sales.lock();
        let new = || TrackedSale::new(product.id, product.sale.terms.initial_stock, from);
        let sale = sales.entry(product.sku.clone()).or_insert_with(new);
        if sale.product < product.id {
            *sale = new();
        } else if sale.product > product.id {
            return;
        }
        let now = Instant::now();
        let is_shared = self.log.is_some();
        let grace =
            if is_shared && origin == Origin::Elsewhere { SELLER_PUBLISHES_FOR } else { Duration::ZERO };
        sale.aim_at(product, now + grace);
        if is_shared || !sale.is_due(now) {
            self.due.notify_one();
        } else {
            self.append(&product.sku, sale);
        }
    }

    /// Removes the events of a deleted product. A later product with the same sku is another sale.
    pub(crate) fn remove(&self, sku: &Sku) {
        self.sales.lock().remove(sku);
        self.ring.write().events.retain(|event| event.sku != *sku);
    }

    /// Publishes what is due, until the server stops.
    pub(crate) async fn run(self: Arc<Self>, closing: CancellationToken) {
        loop {
            let due_at = self.sales.lock().values().filter_map(TrackedSale::due_at).min();
            let timer = async {
                match due_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.due.notified() => {}
                () = timer => {}
                () = closing.cancelled() => return,
            }
            if let Err(error) = self.publish_due().await {
                PublishFailed { error: &error }.emit();
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                // What was to be read has no timer, unlike what is to be published.
                self.due.notify_one();
            }
        }
    }

    async fn publish_due(&self) -> Result<()> {
        let publications = self.take_due();
        let Some(log) = &self.log else { return Ok(()) };
        if publications.is_empty() && !self.is_behind.load(Ordering::SeqCst) {
            return Ok(());
        }
        let _turn = self.log_calls.lock().await;
        self.call_log(&**log, &publications).await
    }

    /// Appends what is due to the ring or, with a shared log, returns it.
    fn take_due(&self) -> Vec<Publication> {
        let (now, mut publications) = (Instant::now(), Vec::new());
        for (sku, sale) in self.sales.lock().iter_mut().filter(|(_, sale)| sale.due_at().is_some()) {
            match sale.is_due(now) {
                true if self.log.is_some() => publications.push(sale.publication(sku)),
                true => self.append(sku, sale),
                false => {}
            }
        }
        publications
    }

    /// Publishes in the shared log, and reads what else it has. The caller holds `log_calls`.
    async fn call_log(&self, log: &dyn SaleStore, publications: &[Publication]) -> Result<()> {
        let after = self.was_read.load(Ordering::SeqCst).then(|| *self.latest_id.borrow());
        self.is_behind.store(false, Ordering::SeqCst);
        match log.publish_events(publications, after).await {
            Ok(page) => {
                self.apply_page(publications, page);
                Ok(())
            }
            Err(error) => {
                self.is_behind.store(true, Ordering::SeqCst);
                Err(error)
            }
        }
    }

    fn apply_page(&self, publications: &[Publication], page: EventPage) {
        let mut sales = self.sales.lock();
        let before = *self.latest_id.borrow();
        let was_read = self.was_read.swap(true, Ordering::SeqCst);
        let is_missing = page.dropped.number > 0 && before < page.dropped;
        if !was_read || is_missing || page.latest.epoch < before.epoch {
            let mut ring = self.ring.write();
            ring.events.clear();
            ring.dropped_id = page.dropped;
            self.latest_id.send_replace(page.dropped);
        }
        for event in page.events {
            self.take_in(&mut sales, event, was_read);
        }
        if page.latest < *self.latest_id.borrow() {
            // More has arrived through the channel meanwhile.
            return;
        }
        self.latest_id.send_replace(page.latest);
        for (publication, stage) in publications.iter().zip(page.stages) {
            let Publication { sku, product, initial_stock, .. } = publication;
            let new = || TrackedSale::new(*product, *initial_stock, stage);
            let sale = sales.entry(sku.clone()).or_insert_with(new);
            if sale.product == *product {
                sale.record(stage);
            }
        }
    }

    /// Takes in events of the shared log that arrive through the channel.
    pub(crate) fn apply_logged(&self, events: Vec<LoggedEvent>) {
        let mut sales = self.sales.lock();
        let (latest, was_read) = (*self.latest_id.borrow(), self.was_read.load(Ordering::SeqCst));
        let Some(first) = events.first().map(|event| event.id) else { return };
        if was_read && first.epoch == latest.epoch && first <= latest.next() {
            for event in events {
                self.take_in(&mut sales, event, true);
            }
        } else {
            self.read_log();
        }
    }

    /// Reads the log soon: events may have been missed.
    pub(crate) fn read_log(&self) {
        if self.log.is_some() {
            self.is_behind.store(true, Ordering::SeqCst);
            self.due.notify_one();
        }
    }

    /// Adds an event of the log to the ring. With `is_new`, one that tells nothing new is left out: a log that Redis has lost
    /// may begin with what listeners know.
    fn take_in(&self, sales: &mut HashMap<Sku, TrackedSale>, event: LoggedEvent, is_new: bool) {
        let LoggedEvent { id, sku, product, change, stage } = event;
        if id <= *self.latest_id.borrow() {
            return;
        }
        let is_news = match sales.get_mut(&sku) {
            Some(sale) if sale.product == product => {
                let is_news = !is_new || sale.is_news(&stage);
                if is_news {
                    sale.record(stage);
                    sale.spend(usize::from(matches!(change, SaleChange::Stock(_))));
                }
                is_news
            }
            Some(sale) if sale.product > product => false,
            _ => {
                sales.extend(TrackedSale::confirmed(product, stage).map(|sale| (sku.clone(), sale)));
                true
            }
        };
        if is_news {
            self.push(id, &sku, change);
        } else {
            self.latest_id.send_replace(id);
        }
    }

    /// Appends the events that lead to the target of a sale.
    fn append(&self, sku: &Sku, sale: &mut TrackedSale) {
        for (change, stage) in sale.changes() {
            let id = self.latest_id.borrow().next();
            self.push(id, sku, change);
            sale.record(stage);
            sale.spend(usize::from(matches!(change, SaleChange::Stock(_))));
        }
    }

    /// Prepares a subscription: reads the log as far as the caller has, and learns what it has told of the product.
    pub(crate) async fn prepare(&self, product: &Product, last_id: Option<EventId>) -> Result<()> {
        let Some(log) = &self.log else { return Ok(()) };
        let is_confirmed = || {
            let sales = self.sales.lock();
            self.was_read.load(Ordering::SeqCst)
                && sales.get(&product.sku).is_some_and(|sale| sale.product == product.id && sale.is_confirmed)
        };
        let is_prepared = || is_confirmed() && last_id.is_none_or(|id| id <= *self.latest_id.borrow());
        if is_prepared() {
            return Ok(());
        }
        let _turn = self.log_calls.lock().await;
        let stage = product.sale.stage();
        let sale = TrackedSale::new(product.id, product.sale.terms.initial_stock, stage);
        for read in 0..READS_MAX {
            // An id that no log has had is not waited for.
            if is_prepared() || (read > 0 && is_confirmed()) {
                break;
            }
            self.call_log(&**log, &[sale.publication(&product.sku)]).await?;
        }
        Ok(())
    }

    /// Subscribes to one sale, or to all. `last_id` is the last id that a reconnecting caller has received: the subscription
    /// continues there, if that event is in the ring. Otherwise also returns the id of the latest event, and what the events up
    /// to it have told of `product`.
    #[must_use]
    pub(crate) fn subscribe(
        self: &Arc<Self>,
        sku: Option<Sku>,
        last_id: Option<EventId>,
        product: &Product,
    ) -> (Option<(EventId, SaleStage)>, SaleSubscription) {
        let mut sales = self.sales.lock();
        let changes = self.latest_id.subscribe();
        let latest = *self.latest_id.borrow();
        let dropped = self.ring.read().dropped_id;
        let resumed = last_id.filter(|id| (dropped..=latest).contains(id));
        let initial = resumed.is_none().then(|| {
            let new = || TrackedSale::new(product.id, product.sale.terms.initial_stock, product.sale.stage());
            let sale = sales.entry(product.sku.clone()).or_insert_with(new);
            if sale.product < product.id {
                *sale = new();
            }
            (latest, sale.published)
        });
        drop(sales);
        self.streams.inc();
        self.subscribed.notify_waiters();
        let sent_id = resumed.unwrap_or(latest);
        (initial, SaleSubscription { ring: Arc::clone(self), sku, sent_id, changes })
    }

    #[must_use]
    pub(crate) fn has_subscriptions(&self) -> bool {
        self.streams.get() > 0
    }

    /// Returns when there is a subscription.
    pub(crate) async fn wait_for_subscription(&self) {
        loop {
            let subscribed = self.subscribed.notified();
            if self.has_subscriptions() {
                return;
            }
            subscribed.await;
        }
    }

    fn push(&self, id: EventId, sku: &Sku, change: SaleChange) {
        let frame = match change {
            SaleChange::Stock(stock) => frame(id, "stock-update", &StockData { sku: sku.as_str(), stock }),
            SaleChange::State(state) => {
                let reason = state.end_reason().map(EndReason::as_str);
                frame(id, "state-change", &StateData { sku: sku.as_str(), state: state.as_str(), reason })
            }
        };
        let mut ring = self.ring.write();
        if ring.events.len() >= HISTORY_MAX
            && let Some(oldest) = ring.events.pop_front()
        {
            ring.dropped_id = oldest.id;
        }
        ring.events.push_back(RingEvent { id, sku: sku.clone(), frame });
        self.latest_id.send_replace(id);
        self.published.inc();
    }

    /// Returns the frames after an id and the id of the last event, or `None` if frames after `sent_id` are no longer in the
    /// ring, or if the log was begun anew with smaller ids.
    fn frames_after(&self, sent_id: EventId, sku: Option<&Sku>) -> Option<(EventId, Bytes)> {
        let ring = self.ring.read();
        let latest = *self.latest_id.borrow();
        if !(ring.dropped_id..=latest).contains(&sent_id) {
            return None;
        }
        let events =
            ring.events.iter().filter(|event| event.id > sent_id && sku.is_none_or(|sku| event.sku == *sku));
        let mut frames = events.map(|event| &event.frame);
        let Some(first) = frames.next() else { return Some((latest, Bytes::new())) };
        // Usually there is one frame, which is shared. Several are joined, so that they are sent at once.
        let mut rest = frames.peekable();
        if rest.peek().is_none() {
            return Some((latest, first.clone()));
        }
        let mut joined = BytesMut::from(&first[..]);
        rest.for_each(|frame| joined.extend_from_slice(frame));
        Some((latest, joined.freeze()))
    }
}

/// Formats an event of a stream. `data` is one line of JSON.
pub(crate) fn frame(id: EventId, event: &str, data: &impl Serialize) -> Bytes {
    // Serializing strings and numbers to memory cannot fail.
    let data = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("event: {event}\nid: {id}\ndata: {data}\n\n"))
}

/// The position of one event stream in the ring.
pub struct SaleSubscription {
    ring: Arc<EventRing>,
    sku: Option<Sku>,
    /// The id up to which frames were returned.
    sent_id: EventId,
    changes: watch::Receiver<EventId>,
}

impl SaleSubscription {
    /// Waits for the next frames. Returns `None` if the subscription has fallen behind the ring.
    pub async fn next(&mut self) -> Option<Bytes> {
        loop {
            let (sent_id, frames) = self.ring.frames_after(self.sent_id, self.sku.as_ref())?;
            self.sent_id = sent_id;
            if !frames.is_empty() {
                return Some(frames);
            }
            // Does not fail: the sender belongs to the ring, which is alive as long as the subscription.
            self.changes.changed().await.ok()?;
        }
    }
}

impl Drop for SaleSubscription {
    fn drop(&mut self) {
        self.ring.streams.dec();
    }
}

#[cfg(test)]
mod tests;
