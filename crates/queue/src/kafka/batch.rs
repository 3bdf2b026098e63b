//! A batch on its way: one slot for each event's fate, and one wake-up when the last is known.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_store::Error;

use crate::publish::PublishOutcome;

/// The fates of a batch, as far as they are known.
#[derive(Debug)]
pub(super) struct Batch {
    progress: Mutex<Progress>,
    complete: Notify,
}

#[derive(Debug)]
struct Progress {
    fates: Vec<Option<PublishOutcome>>,
    unknown: usize,
}

/// What travels with an event through librdkafka.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) batch: Arc<Batch>,
    pub(super) index: usize,
}

impl Batch {
    pub(super) fn new(events: usize) -> Arc<Self> {
        let progress = Progress { fates: vec![None; events], unknown: events };
        Arc::new(Self { progress: Mutex::new(progress), complete: Notify::new() })
    }

    /// Notes a fate. What comes after the batch was closed is too late and forgotten.
    pub(super) fn report(&self, index: usize, fate: PublishOutcome) {
        let mut progress = self.progress.lock();
        if let Some(slot @ None) = progress.fates.get_mut(index) {
            *slot = Some(fate);
            progress.unknown -= 1;
            if progress.unknown == 0 {
                self.complete.notify_one();
            }
        }
    }

    /// Returns when every fate is known.
    pub(super) async fn complete(&self) {
        if self.progress.lock().unknown > 0 {
            self.complete.notified().await;
        }
    }

    /// Takes the fates; an event not heard of may be anywhere.
    pub(super) fn close(&self, unheard_of: impl Fn() -> Error) -> Vec<PublishOutcome> {
        let fates = std::mem::take(&mut self.progress.lock().fates);
        fates.into_iter().map(|fate| fate.unwrap_or_else(|| PublishOutcome::Unknown(unheard_of()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_batch_is_complete_with_its_last_fate_and_keeps_their_order() {
        let batch = Batch::new(2);
        batch.report(1, PublishOutcome::Failed(Error::ShuttingDown));
        batch.report(1, PublishOutcome::Confirmed);
        let early = tokio::time::timeout(std::time::Duration::ZERO, batch.complete()).await;
        assert!(early.is_err(), "one is missing; hearing of another twice does not replace it");
        batch.report(0, PublishOutcome::Confirmed);
        batch.complete().await;
        let fates = batch.close(|| Error::ShuttingDown);
        assert!(matches!(fates[..], [PublishOutcome::Confirmed, PublishOutcome::Failed(_)]), "{fates:?}");
    }

    #[tokio::test]
    async fn what_is_not_heard_of_in_time_is_unknown_and_later_news_is_ignored() {
        let batch = Batch::new(2);
        batch.report(0, PublishOutcome::Confirmed);
        let fates = batch.close(|| Error::ShuttingDown);
        assert!(matches!(fates[..], [PublishOutcome::Confirmed, PublishOutcome::Unknown(_)]), "{fates:?}");
        batch.report(1, PublishOutcome::Confirmed);
    }
}
