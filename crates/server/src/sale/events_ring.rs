//! What happens to sales, told to everybody who listens.
//!
//! An event is written as text once and shared by all who hear it. The last ones are kept in a ring, which is how listeners
//! that were away catch up, and how slow ones are noticed: whoever falls behind the ring is dropped, and nothing is kept for
//! anybody. While a sale sells calmly every stock is told; in a flood only the newest, a few times a second. A change of
//! state is told at once, behind the stock that led to it.
//!
//! Ids only grow, also over a restart: they begin with the time of the start in microseconds. So an id of another process is
//! never taken for one of ours, and whoever comes with one is told the present and no past.

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

/// Events that are kept.
const HISTORY_MAX: usize = 1_024;
/// Stocks of one sale that are told one by one before only the newest is.
const BURST: u32 = 20;
/// How often the newest is told then, and how soon one more may be told by itself.
const PACE: Duration = Duration::from_millis(50);

/// What happened, ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    id: u64,
    sku: Sku,
    frame: Bytes,
}

/// What is told of sales.
#[derive(Debug)]
pub struct Events {
    ring: RwLock<Ring>,
    flows: Mutex<HashMap<Sku, Flow>>,
    latest: watch::Sender<u64>,
    /// Rung when something is held back that nobody is about to tell.
    held: Notify,
    listeners: Gauge,
    /// Rung when somebody begins to listen.
    arrivals: Notify,
    told: Counter,
}

/// The last events.
#[derive(Debug)]
struct Ring {
    events: VecDeque<Event>,
    /// The id of the last event that is no longer there because there are too many.
    lost: u64,
}

/// How fast the stock of one sale is told.
#[derive(Debug)]
struct Flow {
    left: u32,
    since: Instant,
    held: Option<u32>,
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

impl Events {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(listeners: Gauge, told: Counter) -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let first = u64::try_from(since_epoch.as_micros()).unwrap_or(0);
        Self {
            ring: RwLock::new(Ring { events: VecDeque::new(), lost: first }),
            flows: Mutex::default(),
            latest: watch::Sender::new(first),
            held: Notify::new(),
            listeners,
            arrivals: Notify::new(),
            told,
        }
    }

    /// Tells how many units are left, now or, in a flood, soon.
    pub fn tell_stock(&self, sku: &Sku, stock: u32) {
        let mut flows = self.flows.lock();
        let flow = flows.entry(sku.clone()).or_insert_with(|| Flow::new(Instant::now()));
        if flow.may_speak(Instant::now()) {
            self.push_stock(sku, stock);
        } else if flow.held.replace(stock).is_none() {
            self.held.notify_one();
        }
    }

    /// Tells a new state, at once.
    pub fn tell_state(&self, sku: &Sku, state: SaleState) {
        let mut flows = self.flows.lock();
        if let Some(stock) = flows.get_mut(sku).and_then(|flow| flow.held.take()) {
            self.push_stock(sku, stock);
        }
        if let SaleState::Ended(_) = state {
            flows.remove(sku);
        }
        let reason = state.end_reason().map(EndReason::as_str);
        self.push(sku, "state-change", &StateData { sku: sku.as_str(), state: state.as_str(), reason });
    }

    /// Forgets what was told of a sale that is gone: the next of that name is another.
    pub fn forget(&self, sku: &Sku) {
        self.flows.lock().remove(sku);
        self.ring.write().events.retain(|event| event.sku != *sku);
    }

    /// Tells what is held back, a few times a second, until the server stops.
    pub async fn pace(self: Arc<Self>, closing: CancellationToken) {
        loop {
            tokio::select! {
                () = self.held.notified() => {}
                () = closing.cancelled() => return,
            }
            tokio::time::sleep(PACE).await;
            for (sku, flow) in self.flows.lock().iter_mut() {
                if let Some(stock) = flow.held.take() {
                    self.push_stock(sku, stock);
                }
            }
        }
    }

    /// Begins to listen: to one sale, or to all. `last` is the id that somebody who comes back heard last. The id with which
    /// the present is to be told comes along: what follows it is still to come from the listener.
    #[must_use]
    pub fn listen(self: &Arc<Self>, sku: Option<Sku>, last: Option<u64>) -> (u64, Listener) {
        let changes = self.latest.subscribe();
        let ring = self.ring.read();
        let latest = *self.latest.borrow();
        let seen = last.filter(|last| (ring.lost..=latest).contains(last)).unwrap_or(latest);
        drop(ring);
        self.listeners.inc();
        self.arrivals.notify_waiters();
        (seen, Listener { events: Arc::clone(self), sku, seen, changes })
    }

    /// Whether anybody listens.
    #[must_use]
    pub fn has_listeners(&self) -> bool {
        self.listeners.get() > 0
    }

    /// Waits until somebody begins to listen, if nobody does.
    pub async fn wait_for_listeners(&self) {
        loop {
            let arrival = self.arrivals.notified();
            if self.has_listeners() {
                return;
            }
            arrival.await;
        }
    }

    fn push_stock(&self, sku: &Sku, stock: u32) {
        self.push(sku, "stock-update", &StockData { sku: sku.as_str(), stock });
    }

    fn push(&self, sku: &Sku, event: &str, data: &impl Serialize) {
        let mut ring = self.ring.write();
        let id = *self.latest.borrow() + 1;
        if ring.events.len() >= HISTORY_MAX
            && let Some(oldest) = ring.events.pop_front()
        {
            ring.lost = oldest.id;
        }
        ring.events.push_back(Event { id, sku: sku.clone(), frame: frame(id, event, data) });
        self.latest.send_replace(id);
        self.told.inc();
    }

    /// What a listener has not heard yet, and up to where; none when it has fallen behind.
    fn after(&self, seen: u64, sku: Option<&Sku>) -> Option<(u64, Bytes)> {
        let ring = self.ring.read();
        let latest = *self.latest.borrow();
        if seen < ring.lost {
            return None;
        }
        let news =
            ring.events.iter().filter(|event| event.id > seen && sku.is_none_or(|sku| event.sku == *sku));
        let mut news = news.map(|event| &event.frame);
        let Some(first) = news.next() else { return Some((latest, Bytes::new())) };
        // One is the rule, and is shared; several are put together, so that they are sent at once.
        let mut rest = news.peekable();
        if rest.peek().is_none() {
            return Some((latest, first.clone()));
        }
        let mut together = BytesMut::from(&first[..]);
        rest.for_each(|frame| together.extend_from_slice(frame));
        Some((latest, together.freeze()))
    }
}

impl Flow {
    fn new(now: Instant) -> Self {
        Self { left: BURST, since: now, held: None }
    }

    /// Takes one of those that may be told by themselves; a new one comes with every [`PACE`].
    fn may_speak(&mut self, now: Instant) -> bool {
        let grown = now.saturating_duration_since(self.since).as_millis() / PACE.as_millis().max(1);
        if grown > 0 {
            self.left = self.left.saturating_add(u32::try_from(grown).unwrap_or(u32::MAX)).min(BURST);
            self.since = now;
        }
        // Never before one that is held back.
        if self.left == 0 || self.held.is_some() {
            return false;
        }
        self.left -= 1;
        true
    }
}

/// One event as it is sent: `data` is one line of JSON.
pub(crate) fn frame(id: u64, event: &str, data: &impl Serialize) -> Bytes {
    // Strings and numbers always become JSON.
    let data = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("event: {event}\nid: {id}\ndata: {data}\n\n"))
}

/// Somebody who listens.
#[derive(Debug)]
pub struct Listener {
    events: Arc<Events>,
    sku: Option<Sku>,
    seen: u64,
    changes: watch::Receiver<u64>,
}

impl Listener {
    /// Waits for what comes next; none for a listener that was too slow for it.
    pub async fn next(&mut self) -> Option<Bytes> {
        loop {
            let (seen, news) = self.events.after(self.seen, self.sku.as_ref())?;
            self.seen = seen;
            if !news.is_empty() {
                return Some(news);
            }
            // The sender is as old as the events, which are held here.
            self.changes.changed().await.ok()?;
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.events.listeners.dec();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn sku(text: &str) -> Sku {
        Sku::parse(text).unwrap()
    }

    fn events() -> Arc<Events> {
        Arc::new(Events::new(Gauge::default(), Counter::default()))
    }

    /// What a listener hears without waiting: the values of stocks, and the states.
    fn heard(listener: &mut Listener) -> Vec<String> {
        let mut heard = Vec::new();
        while let Some(news) = listener.next().now_or_never() {
            let text = String::from_utf8(news.expect("it keeps up").to_vec()).unwrap();
            for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
                let data: serde_json::Value = serde_json::from_str(data).unwrap();
                heard.push(data.get("stock").unwrap_or(&data["state"]).to_string());
            }
        }
        heard
    }

    #[test]
    fn in_calm_every_stock_is_told_and_a_state_follows_its_stock() {
        let (events, w) = (events(), sku("W"));
        let (_, mut listener) = events.listen(None, None);
        for stock in (0..3).rev() {
            events.tell_stock(&w, stock);
        }
        events.tell_state(&w, SaleState::Ended(EndReason::SoldOut));
        assert_eq!(heard(&mut listener), ["2", "1", "0", "\"ENDED\""]);
    }

    #[test]
    fn a_flood_is_cut_short_and_neither_the_last_stock_nor_the_state_is_lost() {
        let (events, w) = (events(), sku("W"));
        let (_, mut listener) = events.listen(None, None);
        for stock in (0..100_000).rev() {
            events.tell_stock(&w, stock);
        }
        events.tell_state(&w, SaleState::Ended(EndReason::SoldOut));
        let heard = heard(&mut listener);
        assert!(heard.len() < 1_000, "{}", heard.len());
        assert_eq!(heard[heard.len() - 2..], ["0", "\"ENDED\""]);
        assert!(heard.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[tokio::test]
    async fn what_is_held_back_in_a_flood_is_told_soon() {
        let (events, w) = (events(), sku("W"));
        let closing = CancellationToken::new();
        let pacing = tokio::spawn(Arc::clone(&events).pace(closing.clone()));
        let (_, mut listener) = events.listen(None, None);
        for stock in (7..100_000).rev() {
            events.tell_stock(&w, stock);
        }
        let mut last = String::new();
        while !last.contains("\"stock\":7}") {
            last = String::from_utf8(listener.next().await.unwrap().to_vec()).unwrap();
        }
        closing.cancel();
        pacing.await.unwrap();
    }

    #[test]
    fn whoever_comes_back_hears_what_was_missed_and_nothing_twice() {
        let (events, w) = (events(), sku("W"));
        let (first, mut listener) = events.listen(None, None);
        events.tell_stock(&w, 5);
        assert_eq!(heard(&mut listener), ["5"]);
        events.tell_stock(&w, 4);
        events.tell_stock(&sku("X"), 9);
        events.tell_stock(&w, 3);
        let (seen, mut back) = events.listen(Some(w), Some(first + 1));
        assert_eq!(seen, first + 1);
        assert_eq!(heard(&mut back), ["4", "3"]);
        assert_eq!(heard(&mut events.listen(None, Some(first + 4)).1), Vec::<String>::new());
    }

    #[test]
    fn ids_that_are_too_old_or_not_ours_bring_no_past() {
        let (events, w) = (events(), sku("W"));
        let (first, _) = events.listen(None, None);
        for _ in 0..HISTORY_MAX + 10 {
            events.tell_state(&w, SaleState::Active);
        }
        let latest = first + HISTORY_MAX as u64 + 10;
        for last in [0, first, first + 9, latest + 1, u64::MAX] {
            let (seen, mut listener) = events.listen(None, Some(last));
            assert_eq!((seen, heard(&mut listener).len()), (latest, 0), "{last}");
        }
        assert_eq!(heard(&mut events.listen(None, Some(first + 10)).1).len(), HISTORY_MAX);
    }

    #[test]
    fn a_listener_that_falls_behind_is_dropped() {
        let (events, w) = (events(), sku("W"));
        let (_, mut slow) = events.listen(None, None);
        for _ in 0..=HISTORY_MAX {
            events.tell_state(&w, SaleState::Active);
        }
        assert_eq!(slow.next().now_or_never(), Some(None));
        drop(slow);
        assert!(!events.has_listeners());
    }

    #[test]
    fn what_was_told_of_a_sale_that_is_gone_is_not_told_again() {
        let (events, w) = (events(), sku("W"));
        let (first, _) = events.listen(None, None);
        events.tell_stock(&w, 1);
        events.tell_stock(&sku("X"), 2);
        events.forget(&w);
        assert_eq!(heard(&mut events.listen(None, Some(first)).1), ["2"]);
    }
}
