//! Publishes changes of sales to all event streams.
//!
//! An event is serialized once and shared by all subscriptions. The last events are stored in a ring buffer. Subscriptions
//! that reconnect catch up from it, and a subscription that falls behind it is dropped, so nothing is queued per
//! subscription. At a low rate of purchases every stock is published; in a flood only the newest, a few times a second. A
//! change of state is published at once, after the stock that led to it.
//!
//! Ids only grow, also over a restart: they start at the time of the start in microseconds. An id of an earlier process is
//! older than the ring, so its subscription gets the present state and no past events.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use parking_lot::{Mutex, RwLock};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use weir_core::sale::{EndReason, SaleState, Sku};

/// Events in the ring.
const HISTORY_MAX: usize = 1_024;
/// Stocks of one sale that are published one by one before the throttle defers them.
const BURST: u32 = 20;
/// How often deferred stocks are published, and how often the throttle permits one more.
const INTERVAL: Duration = Duration::from_millis(50);

/// A serialized event.
#[derive(Clone, Debug)]
struct RingEvent {
    id: u64,
    sku: Sku,
    frame: Bytes,
}

/// Publishes events and holds the last ones.
#[derive(Debug)]
pub struct EventRing {
    ring: RwLock<RingBuffer>,
    throttles: Mutex<HashMap<Sku, StockThrottle>>,
    latest_id: watch::Sender<u64>,
    /// Notified when a stock is deferred.
    deferred: Notify,
    streams: Gauge,
    /// Notified when a subscription starts.
    subscribed: Notify,
    published: Counter,
}

#[derive(Debug)]
struct RingBuffer {
    events: VecDeque<RingEvent>,
    /// The id of the last event that was dropped because the ring was full.
    dropped_id: u64,
}

/// A token bucket for the stocks of one sale.
#[derive(Debug)]
struct StockThrottle {
    tokens: u32,
    refilled_at: Instant,
    /// The newest stock that was not published.
    deferred: Option<u32>,
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
    /// Creates an empty ring. `streams` is the number of subscriptions, `published` that of events.
    #[must_use]
    pub fn new(streams: Gauge, published: Counter) -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let first = u64::try_from(since_epoch.as_micros()).unwrap_or(0);
        Self {
            ring: RwLock::new(RingBuffer { events: VecDeque::new(), dropped_id: first }),
            throttles: Mutex::default(),
            latest_id: watch::Sender::new(first),
            deferred: Notify::new(),
            streams,
            subscribed: Notify::new(),
            published,
        }
    }

    /// Publishes how many units are left: now or, in a flood, within [`INTERVAL`].
    pub fn publish_stock(&self, sku: &Sku, stock: u32) {
        let mut throttles = self.throttles.lock();
        let throttle = throttles.entry(sku.clone()).or_insert_with(|| StockThrottle::new(Instant::now()));
        if throttle.take(Instant::now()) {
            self.push_stock(sku, stock);
        } else if throttle.deferred.replace(stock).is_none() {
            self.deferred.notify_one();
        }
    }

    /// Publishes a new state at once, after a deferred stock.
    pub fn publish_state(&self, sku: &Sku, state: SaleState) {
        let mut throttles = self.throttles.lock();
        if let Some(stock) = throttles.get_mut(sku).and_then(|throttle| throttle.deferred.take()) {
            self.push_stock(sku, stock);
        }
        if let SaleState::Ended(_) = state {
            throttles.remove(sku);
        }
        let reason = state.end_reason().map(EndReason::as_str);
        self.push(sku, "state-change", &StateData { sku: sku.as_str(), state: state.as_str(), reason });
    }

    /// Removes the events of a deleted product. A later product with the same sku is another sale.
    pub fn remove(&self, sku: &Sku) {
        self.throttles.lock().remove(sku);
        self.ring.write().events.retain(|event| event.sku != *sku);
    }

    /// Publishes deferred stocks a few times a second, until the server stops.
    pub async fn publish_deferred(self: Arc<Self>, closing: CancellationToken) {
        loop {
            tokio::select! {
                () = self.deferred.notified() => {}
                () = closing.cancelled() => return,
            }
            tokio::time::sleep(INTERVAL).await;
            for (sku, throttle) in self.throttles.lock().iter_mut() {
                if let Some(stock) = throttle.deferred.take() {
                    self.push_stock(sku, stock);
                }
            }
        }
    }

    /// Subscribes to one sale, or to all. `last_id` is the last id that a reconnecting caller has received. Also returns the id
    /// for the event with the present state: the subscription continues after that id.
    #[must_use]
    pub fn subscribe(self: &Arc<Self>, sku: Option<Sku>, last_id: Option<u64>) -> (u64, SaleSubscription) {
        let changes = self.latest_id.subscribe();
        let ring = self.ring.read();
        let latest = *self.latest_id.borrow();
        let sent_id = last_id.filter(|id| (ring.dropped_id..=latest).contains(id)).unwrap_or(latest);
        drop(ring);
        self.streams.inc();
        self.subscribed.notify_waiters();
        (sent_id, SaleSubscription { ring: Arc::clone(self), sku, sent_id, changes })
    }

    #[must_use]
    pub fn has_subscriptions(&self) -> bool {
        self.streams.get() > 0
    }

    /// Returns when there is a subscription.
    pub async fn wait_for_subscription(&self) {
        loop {
            let subscribed = self.subscribed.notified();
            if self.has_subscriptions() {
                return;
            }
            subscribed.await;
        }
    }

    fn push_stock(&self, sku: &Sku, stock: u32) {
        self.push(sku, "stock-update", &StockData { sku: sku.as_str(), stock });
    }

    fn push(&self, sku: &Sku, event: &str, data: &impl Serialize) {
        let mut ring = self.ring.write();
        let id = *self.latest_id.borrow() + 1;
        if ring.events.len() >= HISTORY_MAX
            && let Some(oldest) = ring.events.pop_front()
        {
            ring.dropped_id = oldest.id;
        }
        ring.events.push_back(RingEvent { id, sku: sku.clone(), frame: frame(id, event, data) });
        self.latest_id.send_replace(id);
        self.published.inc();
    }

    /// Returns the frames after an id and the id of the last event, or `None` if frames after `sent_id` are no longer in the
    /// ring.
    fn frames_after(&self, sent_id: u64, sku: Option<&Sku>) -> Option<(u64, Bytes)> {
        let ring = self.ring.read();
        let latest = *self.latest_id.borrow();
        if sent_id < ring.dropped_id {
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

impl StockThrottle {
    fn new(now: Instant) -> Self {
        Self { tokens: BURST, refilled_at: now, deferred: None }
    }

    /// Takes a token if there is one. A token is added every [`INTERVAL`].
    fn take(&mut self, now: Instant) -> bool {
        let added = now.saturating_duration_since(self.refilled_at).as_millis() / INTERVAL.as_millis().max(1);
        if added > 0 {
            self.tokens = self.tokens.saturating_add(u32::try_from(added).unwrap_or(u32::MAX)).min(BURST);
            self.refilled_at = now;
        }
        // A deferred stock is published first.
        if self.tokens == 0 || self.deferred.is_some() {
            return false;
        }
        self.tokens -= 1;
        true
    }
}

/// Formats an event of a stream. `data` is one line of JSON.
pub(crate) fn frame(id: u64, event: &str, data: &impl Serialize) -> Bytes {
    // Serializing strings and numbers to memory cannot fail.
    let data = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("event: {event}\nid: {id}\ndata: {data}\n\n"))
}

/// The position of one event stream in the ring.
#[derive(Debug)]
pub struct SaleSubscription {
    ring: Arc<EventRing>,
    sku: Option<Sku>,
    /// The id up to which frames were returned.
    sent_id: u64,
    changes: watch::Receiver<u64>,
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
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn sku(text: &str) -> Sku {
        Sku::parse(text).unwrap()
    }

    fn event_ring() -> Arc<EventRing> {
        Arc::new(EventRing::new(Gauge::default(), Counter::default()))
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

    #[test]
    fn at_a_low_rate_every_stock_is_published_and_a_state_follows_its_stock() {
        let (ring, w) = (event_ring(), sku("W"));
        let (_, mut subscription) = ring.subscribe(None, None);
        for stock in (0..3).rev() {
            ring.publish_stock(&w, stock);
        }
        ring.publish_state(&w, SaleState::Ended(EndReason::SoldOut));
        assert_eq!(received(&mut subscription), ["2", "1", "0", "\"ENDED\""]);
    }

    #[test]
    fn a_flood_is_throttled_and_neither_the_last_stock_nor_the_state_is_lost() {
        let (ring, w) = (event_ring(), sku("W"));
        let (_, mut subscription) = ring.subscribe(None, None);
        for stock in (0..100_000).rev() {
            ring.publish_stock(&w, stock);
        }
        ring.publish_state(&w, SaleState::Ended(EndReason::SoldOut));
        let received = received(&mut subscription);
        assert!(received.len() < 1_000, "{}", received.len());
        assert_eq!(received[received.len() - 2..], ["0", "\"ENDED\""]);
        assert!(received.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[tokio::test]
    async fn a_deferred_stock_is_published_soon() {
        let (ring, w) = (event_ring(), sku("W"));
        let closing = CancellationToken::new();
        let publisher = tokio::spawn(Arc::clone(&ring).publish_deferred(closing.clone()));
        let (_, mut subscription) = ring.subscribe(None, None);
        for stock in (7..100_000).rev() {
            ring.publish_stock(&w, stock);
        }
        let mut last = String::new();
        while !last.contains("\"stock\":7}") {
            last = String::from_utf8(subscription.next().await.unwrap().to_vec()).unwrap();
        }
        closing.cancel();
        publisher.await.unwrap();
    }

    #[test]
    fn a_reconnecting_subscription_gets_missed_events_once() {
        let (ring, w) = (event_ring(), sku("W"));
        let (first, mut subscription) = ring.subscribe(None, None);
        ring.publish_stock(&w, 5);
        assert_eq!(received(&mut subscription), ["5"]);
        ring.publish_stock(&w, 4);
        ring.publish_stock(&sku("X"), 9);
        ring.publish_stock(&w, 3);
        let (sent_id, mut back) = ring.subscribe(Some(w), Some(first + 1));
        assert_eq!(sent_id, first + 1);
        assert_eq!(received(&mut back), ["4", "3"]);
        assert_eq!(received(&mut ring.subscribe(None, Some(first + 4)).1), Vec::<String>::new());
    }

    #[test]
    fn ids_that_are_too_old_or_unknown_get_no_past_events() {
        let (ring, w) = (event_ring(), sku("W"));
        let (first, _) = ring.subscribe(None, None);
        for _ in 0..HISTORY_MAX + 10 {
            ring.publish_state(&w, SaleState::Active);
        }
        let latest = first + HISTORY_MAX as u64 + 10;
        for last in [0, first, first + 9, latest + 1, u64::MAX] {
            let (sent_id, mut subscription) = ring.subscribe(None, Some(last));
            assert_eq!((sent_id, received(&mut subscription).len()), (latest, 0), "{last}");
        }
        assert_eq!(received(&mut ring.subscribe(None, Some(first + 10)).1).len(), HISTORY_MAX);
    }

    #[test]
    fn a_subscription_that_falls_behind_is_dropped() {
        let (ring, w) = (event_ring(), sku("W"));
        let (_, mut slow) = ring.subscribe(None, None);
        for _ in 0..=HISTORY_MAX {
            ring.publish_state(&w, SaleState::Active);
        }
        assert_eq!(slow.next().now_or_never(), Some(None));
        drop(slow);
        assert!(!ring.has_subscriptions());
    }

    #[test]
    fn events_of_a_deleted_product_are_not_sent_again() {
        let (ring, w) = (event_ring(), sku("W"));
        let (first, _) = ring.subscribe(None, None);
        ring.publish_stock(&w, 1);
        ring.publish_stock(&sku("X"), 2);
        ring.remove(&w);
        assert_eq!(received(&mut ring.subscribe(None, Some(first)).1), ["2"]);
    }
}
