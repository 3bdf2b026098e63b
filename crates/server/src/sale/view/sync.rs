//! Keeping the board: what the store tells by itself, what is read for those who listen, and states that turn by a timer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weir_core::sale::{SaleState, Sku};
use weir_store::sale::{ProductId, SaleEvent};

use super::{FRESH_FOR, SaleView};

/// How often the store is read for those who listen although it tells of changes by itself.
const SAFETY_NET: Duration = Duration::from_secs(2);
/// A timer is never set for longer: clocks are compared again after that.
const SLEEP_MAX: Duration = Duration::from_secs(600);

impl SaleView {
    /// Keeps the board current as long as somebody listens, where others may change the store.
    pub(crate) async fn follow(self: Arc<Self>, closing: CancellationToken) {
        if !self.is_shared {
            return;
        }
        let hear = |news| self.hear(news);
        let hearing = async {
            self.store.follow_events(&hear).await;
            // A store that tells nothing is only read.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = hearing => {}
            () = self.keep_reading() => {}
            () = closing.cancelled() => {}
        }
    }

    async fn keep_reading(&self) {
        loop {
            self.events.wait_for_listeners().await;
            // Never more often, whatever is told.
            tokio::time::sleep(FRESH_FOR).await;
            if self.is_told.load(Ordering::SeqCst) && self.is_read() {
                let _ = tokio::time::timeout(SAFETY_NET, self.stirred.notified()).await;
            }
            if let Err(error) = self.freshen().await {
                tracing::debug!(error = %error.with_causes(), "sales could not be read");
            }
        }
    }

    /// Takes note of what the store tells by itself.
    fn hear(&self, news: SaleEvent) {
        match news {
            SaleEvent::Sold { product, stock, .. } => self.sold(product, stock),
            SaleEvent::StateChanged { sku, product, state } => self.turned(&sku, product, state),
            SaleEvent::Subscribed | SaleEvent::ProductChanged { .. } => {
                self.is_told.store(true, Ordering::SeqCst);
                self.invalidate();
                self.stirred.notify_one();
            }
            SaleEvent::Lost => {
                self.is_told.store(false, Ordering::SeqCst);
                self.stirred.notify_one();
            }
        }
    }

    /// Tells states when they turn, until the server stops.
    pub(crate) async fn keep_time(self: Arc<Self>, closing: CancellationToken) {
        loop {
            let (is_turned, next) = self.turn();
            if is_turned && let Err(error) = self.store.save_due_states().await {
                // Whoever asks is told the due state anyway.
                tracing::warn!(error = %error.with_causes(), "a sale's state could not be written down");
            }
            tokio::select! {
                () = tokio::time::sleep(next.unwrap_or(SLEEP_MAX).min(SLEEP_MAX)) => {}
                () = self.earlier.notified() => {}
                () = closing.cancelled() => return,
            }
        }
    }

    /// Takes note of a state.
    fn turned(&self, sku: &Sku, id: ProductId, state: SaleState) {
        let mut known = self.known.write();
        let Some(product) = known.products.get(sku).filter(|product| product.id == id) else { return };
        let mut news = product.clone();
        news.sale.state = state;
        self.merge(&mut known, news);
    }

    /// Tells the states that are due. Whether there were any, and how long until the next.
    fn turn(&self) -> (bool, Option<Duration>) {
        let mut known = self.known.write();
        let Some(now) = self.now(&known) else { return (false, None) };
        let (mut is_turned, mut next) = (false, None);
        for product in known.products.values_mut() {
            if product.sale.advance(now) {
                is_turned = true;
                self.events.tell_state(&product.sku, product.sale.state);
            }
            let turn = product.sale.next_transition(now).map(|turn| turn.since(now));
            next = next.into_iter().chain(turn).min();
        }
        (is_turned, next)
    }

    fn is_read(&self) -> bool {
        self.known.read().read.is_some()
    }
}
