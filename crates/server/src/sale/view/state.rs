//! What is known of sales, and of the store's time.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weir_core::Timestamp;
use weir_core::sale::Sku;
use weir_store::sale::Product;

/// By how much an earlier word of the store's time may be ahead of a later one that took longer to arrive.
const AHEAD_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(super) struct ViewState {
    /// In the state that was told last.
    pub(super) products: HashMap<Sku, Product>,
    /// When the store was asked for what is known.
    pub(super) read: Option<Instant>,
    /// Whether it ever was: what is new after that is news.
    pub(super) was_read: bool,
    /// Counts doubts: what was asked for before one does not settle it.
    pub(super) invalidations: u64,
    /// When the store's time was heard, and what it was at some moment before.
    pub(super) heard: Option<(Instant, Timestamp)>,
    /// Whether these are all products there are.
    pub(super) is_whole: bool,
    /// When a product was heard of other than by reading all: a list that is not quite current may not name it yet.
    pub(super) learned: HashMap<Sku, Instant>,
}

/// When the store was asked, and in which doubt.
#[derive(Clone, Copy)]
pub(super) struct ReadStart {
    pub(super) at: Instant,
    pub(super) invalidations: u64,
}

impl ViewState {
    /// The store's time, or a little before: never after, or a sale would be shown as open that the store does not sell yet.
    pub(super) fn time(&self) -> Option<Timestamp> {
        self.heard.map(|(at, time)| time.plus(at.elapsed()))
    }

    /// Takes note of the store's time. Of two that came by ways of different length the later one is nearer to the truth; a
    /// clock that was set back is believed.
    pub(super) fn hear(&mut self, time: Timestamp) {
        let ahead = self.time().map_or(Duration::ZERO, |known| known.since(time));
        if ahead.is_zero() || ahead > AHEAD_MAX {
            self.heard = Some((Instant::now(), time));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_word_of_the_stores_time_holds_unless_the_clock_was_set_back() {
        let (mut known, time) = (ViewState::default(), Timestamp::from_seconds(1_000));
        assert_eq!(known.time(), None);
        known.hear(time);
        let heard = known.heard;
        known.hear(Timestamp::from_seconds(999));
        assert_eq!(known.heard, heard, "this one was longer on its way");
        known.hear(Timestamp::from_seconds(900));
        assert_eq!(known.heard.map(|(_, time)| time), Some(Timestamp::from_seconds(900)));
        known.hear(Timestamp::from_seconds(2_000));
        assert!(known.time() >= Some(Timestamp::from_seconds(2_000)));
    }
}
