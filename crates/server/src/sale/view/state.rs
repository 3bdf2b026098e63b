//! The data of the view: products and the store's time.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weir_core::Timestamp;
use weir_core::sale::Sku;
use weir_store::sale::Product;

/// How far the estimated time may be ahead of a new reading that took longer to arrive. Beyond it the clock was set back.
const AHEAD_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(super) struct ViewState {
    /// Products in the state that was published last.
    pub(super) products: HashMap<Sku, Product>,
    /// When the last valid snapshot was requested.
    pub(super) read_at: Option<Instant>,
    /// Whether a snapshot was ever read. Products that appear later are published.
    pub(super) was_read: bool,
    /// Number of invalidations. A snapshot requested before the last one does not make the view valid.
    pub(super) invalidations: u64,
    /// When the store's time was received, and that time.
    pub(super) store_time: Option<(Instant, Timestamp)>,
    /// Whether the view holds all products.
    pub(super) is_complete: bool,
    /// When a product was updated other than by a snapshot. A snapshot that is not current may not have it yet.
    pub(super) updated: HashMap<Sku, Instant>,
}

/// When a snapshot was requested, and the number of invalidations before.
#[derive(Clone, Copy)]
pub(super) struct ReadStart {
    pub(super) at: Instant,
    pub(super) invalidations: u64,
}

impl ViewState {
    /// Estimates the store's time. The estimate is never ahead, or a sale would be shown as active before the store sells.
    pub(super) fn time(&self) -> Option<Timestamp> {
        self.store_time.map(|(at, time)| time.plus(at.elapsed()))
    }

    /// Records the store's time. Of two readings with different delays the later time is more exact. A reading that is far
    /// behind means that the clock was set back, and is used.
    pub(super) fn sync_time(&mut self, time: Timestamp) {
        let ahead = self.time().map_or(Duration::ZERO, |estimate| estimate.since(time));
        if ahead.is_zero() || ahead > AHEAD_MAX {
            self.store_time = Some((Instant::now(), time));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_time_is_used_unless_the_clock_was_set_back() {
        let (mut state, time) = (ViewState::default(), Timestamp::from_seconds(1_000));
        assert_eq!(state.time(), None);
        state.sync_time(time);
        let before = state.store_time;
        state.sync_time(Timestamp::from_seconds(999));
        assert_eq!(state.store_time, before, "this reading was delayed");
        state.sync_time(Timestamp::from_seconds(900));
        assert_eq!(state.store_time.map(|(_, time)| time), Some(Timestamp::from_seconds(900)));
        state.sync_time(Timestamp::from_seconds(2_000));
        assert!(state.time() >= Some(Timestamp::from_seconds(2_000)));
    }
}
