//! Tasks that update the view: events of the store, polling for event streams, and the timer that advances states.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weir_core::sale::{SaleState, Sku};
use weir_store::sale::{ProductId, SaleEvent};

use super::{AGE_MAX, SaleView};
use crate::sale::event_ring::Origin;
use crate::sale::events::{RefreshFailed, StateSaveFailed};

/// How often the store is polled for event streams although it publishes its changes.
const POLL_WITH_EVENTS: Duration = Duration::from_secs(2);
/// The longest sleep of the timer. After it the clocks are compared again.
const SLEEP_MAX: Duration = Duration::from_secs(600);
/// How long the store may take to say whether a sale was extended before its end is published.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

impl SaleView {
    /// Keeps the view of a shared store current while there are event streams, until the server stops.
    pub(crate) async fn sync(self: Arc<Self>, closing: CancellationToken) {
        if !self.is_shared {
            return;
        }
        let apply = |event| self.apply_event(event);
        let events = async {
            self.store.follow_events(&apply).await;
            // A store that publishes nothing is only polled.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = events => {}
            () = self.poll_store() => {}
            () = closing.cancelled() => {}
        }
    }

    async fn poll_store(&self) {
        loop {
            self.events.wait_for_subscription().await;
            // Limits how often the store is read, however many events it publishes.
            tokio::time::sleep(AGE_MAX).await;
            if self.has_store_events.load(Ordering::SeqCst) && self.has_snapshot() {
                let _ = tokio::time::timeout(POLL_WITH_EVENTS, self.refresh_requested.notified()).await;
            }
            if let Err(error) = self.refresh().await {
                RefreshFailed { error: &error }.emit();
            }
        }
    }

    /// Applies an event of the store to the view.
    fn apply_event(&self, event: SaleEvent) {
        match event {
            SaleEvent::Sold { product, stock, .. } => self.record_stock(product, stock, Origin::Elsewhere),
            SaleEvent::Logged(events) => self.events.apply_logged(events),
            SaleEvent::StateChanged { sku, product, state } => self.record_state(&sku, product, state),
            SaleEvent::Subscribed | SaleEvent::ProductChanged { .. } => {
                if event == SaleEvent::Subscribed {
                    self.events.read_log();
                }
                self.has_store_events.store(true, Ordering::SeqCst);
                self.invalidate();
                self.refresh_requested.notify_one();
            }
            SaleEvent::Lost => {
                self.has_store_events.store(false, Ordering::SeqCst);
                self.refresh_requested.notify_one();
            }
        }
    }

    /// Publishes and saves states when they are due, until the server stops.
    pub(crate) async fn run_timer(self: Arc<Self>, closing: CancellationToken) {
        loop {
            if self.is_end_due() {
                // Another server may have extended the sale. Without the store, what is known here counts.
                let _ = tokio::time::timeout(READ_TIMEOUT, self.read_again()).await;
            }
            let (has_changed, next) = self.advance_states();
            if has_changed && let Err(error) = self.store.save_due_states().await {
                StateSaveFailed { error: &error }.emit();
            }
            tokio::select! {
                () = tokio::time::sleep(next.unwrap_or(SLEEP_MAX).min(SLEEP_MAX)) => {}
                () = self.timer_reset.notified() => {}
                () = closing.cancelled() => return,
            }
        }
    }

    fn record_state(&self, sku: &Sku, id: ProductId, state: SaleState) {
        let mut view = self.state.write();
        let Some(product) = view.products.get(sku).filter(|product| product.id == id) else { return };
        let mut update = product.clone();
        update.sale.state = state;
        self.merge(&mut view, update, Origin::Elsewhere);
    }

    /// Publishes the states that are due. Returns whether there were any, and how long until the next one.
    fn advance_states(&self) -> (bool, Option<Duration>) {
        let mut view = self.state.write();
        let Some(now) = self.now(&view) else { return (false, None) };
        let (mut has_changed, mut next) = (false, None);
        for product in view.products.values_mut() {
            let from = product.sale.stage();
            if product.sale.advance(now) {
                has_changed = true;
                self.events.publish(product, from, Origin::Here);
            }
            let transition = product.sale.next_transition(now).map(|at| at.since(now));
            next = next.into_iter().chain(transition).min();
        }
        (has_changed, next)
    }

    /// Returns whether other servers may have extended a sale whose time is over here.
    fn is_end_due(&self) -> bool {
        let view = self.state.read();
        let Some(now) = self.now(&view).filter(|_| self.is_shared) else { return false };
        view.products.values().any(|product| {
            product.sale.state.end_reason().is_none() && product.sale.state_at(now).end_reason().is_some()
        })
    }

    async fn read_again(&self) {
        self.invalidate();
        if let Err(error) = self.refresh().await {
            RefreshFailed { error: &error }.emit();
        }
    }

    fn has_snapshot(&self) -> bool {
        self.state.read().read_at.is_some()
    }
}
