//! A batch in flight: the outcome of each event, and a wake-up when the last is known.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_store::Error;

use crate::publish::PublishOutcome;

/// The outcomes of a batch, as far as they are known.
#[derive(Debug)]
pub(super) struct PublishBatch {
    progress: Mutex<PublishProgress>,
    complete: Notify,
}

#[derive(Debug)]
struct PublishProgress {
    outcomes: Vec<Option<PublishOutcome>>,
    unknown: usize,
}

/// Passed through librdkafka with an event, and back with its delivery report.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) batch: Arc<PublishBatch>,
    pub(super) index: usize,
}

impl PublishBatch {
    pub(super) fn new(events: usize) -> Arc<Self> {
        let progress = PublishProgress { outcomes: vec![None; events], unknown: events };
        Arc::new(Self { progress: Mutex::new(progress), complete: Notify::new() })
    }

    /// Records an outcome. Ignored after the batch is closed.
    pub(super) fn report(&self, index: usize, outcome: PublishOutcome) {
        let mut progress = self.progress.lock();
        if let Some(entry @ None) = progress.outcomes.get_mut(index) {
            *entry = Some(outcome);
            progress.unknown -= 1;
            if progress.unknown == 0 {
                self.complete.notify_one();
            }
        }
    }

    /// Waits until every outcome is known.
    pub(super) async fn complete(&self) {
        if self.progress.lock().unknown > 0 {
            self.complete.notified().await;
        }
    }

    /// Returns the outcomes. Events without a report are unknown.
    pub(super) fn close(&self, unreported: impl Fn() -> Error) -> Vec<PublishOutcome> {
        let outcomes = std::mem::take(&mut self.progress.lock().outcomes);
        outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|| PublishOutcome::Unknown(unreported())))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_batch_is_complete_with_its_last_outcome_and_keeps_their_order() {
        let batch = PublishBatch::new(2);
        batch.report(1, PublishOutcome::Failed(Error::ShuttingDown));
        batch.report(1, PublishOutcome::Confirmed);
        let early = tokio::time::timeout(std::time::Duration::ZERO, batch.complete()).await;
        assert!(early.is_err(), "one is missing; a second report of another does not replace it");
        batch.report(0, PublishOutcome::Confirmed);
        batch.complete().await;
        let outcomes = batch.close(|| Error::ShuttingDown);
        assert!(
            matches!(outcomes[..], [PublishOutcome::Confirmed, PublishOutcome::Failed(_)]),
            "{outcomes:?}"
        );
    }

    #[tokio::test]
    async fn events_without_a_report_are_unknown_and_later_reports_are_ignored() {
        let batch = PublishBatch::new(2);
        batch.report(0, PublishOutcome::Confirmed);
        let outcomes = batch.close(|| Error::ShuttingDown);
        assert!(
            matches!(outcomes[..], [PublishOutcome::Confirmed, PublishOutcome::Unknown(_)]),
            "{outcomes:?}"
        );
        batch.report(1, PublishOutcome::Confirmed);
    }
}
