//! Stores the reports of jobs in batches. Reports that arrive while a batch is stored form the next one. While the store cannot
//! be reached, reports are retried for as long as they can still have an effect.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;
use weir_core::request::retry::RetryPolicy;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_store::request::RequestStore;
use weir_store::{Error, Result};

use super::call::FinishedJob;
use super::{OnChange, WorkerDependencies};
use crate::request::events::{JobReported, ReportDropped, ReportRefused, ReportsDelayed};
use crate::request::metrics::WorkMetrics;

/// The most reports in a batch.
const BATCH_MAX: usize = 512;
/// The most bytes of results in a batch, not counting the last one.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// The pause after the store could not be reached, doubling from the first to the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Stores reports.
pub(super) struct Reporter {
    store: Arc<dyn RequestStore>,
    policy: RetryPolicy,
    metrics: WorkMetrics,
    on_change: OnChange,
}

impl Reporter {
    pub(super) fn new(parts: &WorkerDependencies) -> Self {
        Self {
            store: Arc::clone(&parts.store),
            policy: parts.settings.policy,
            metrics: parts.metrics.clone(),
            on_change: Arc::clone(&parts.on_change),
        }
    }

    /// Runs until all senders are closed and every report is stored.
    pub(super) async fn run(self, mut inbox: Receiver<FinishedJob>) {
        let mut pending: Vec<FinishedJob> = Vec::new();
        let mut pause = PAUSES.0;
        loop {
            if pending.is_empty() {
                let Some(first) = inbox.recv().await else { return };
                pending.push(first);
            }
            fill(&mut pending, &mut inbox);
            match self.store(&mut pending).await {
                Ok(()) => pause = PAUSES.0,
                Err(error) => {
                    if pause == PAUSES.0 {
                        ReportsDelayed { count: pending.len(), error: &error }.emit();
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
            self.drop_expired(&mut pending);
        }
    }

    /// Stores pending reports; those that could not be stored stay pending.
    async fn store(&self, pending: &mut Vec<FinishedJob>) -> Result<()> {
        match self.store_batch(pending).await {
            Ok(()) => {
                pending.clear();
                Ok(())
            }
            // One report may be what the store refuses; the others can be stored without it.
            Err(error) if !error.is_transient() && pending.len() > 1 => {
                self.store_one_by_one(pending, error).await
            }
            Err(error) => Err(error),
        }
    }

    async fn store_one_by_one(&self, pending: &mut Vec<FinishedJob>, error: Error) -> Result<()> {
        let mut failed = Vec::new();
        for job in pending.drain(..) {
            if self.store_batch(std::slice::from_ref(&job)).await.is_err() {
                failed.push(job);
            }
        }
        *pending = failed;
        if pending.is_empty() { Ok(()) } else { Err(error) }
    }

    async fn store_batch(&self, batch: &[FinishedJob]) -> Result<()> {
        let reports = batch.iter().map(|job| job.report.clone()).collect();
        let outcomes = self.store.report_batch(reports, &self.policy).await?;
        for (job, outcome) in batch.iter().zip(outcomes) {
            self.publish(job, outcome);
        }
        Ok(())
    }

    fn publish(&self, job: &FinishedJob, outcome: std::result::Result<RequestStatus, TransitionError>) {
        let id = job.report.id;
        match outcome {
            Ok(status) => {
                JobReported { job, status }.emit(&self.metrics);
                (self.on_change)(id, status);
            }
            Err(reason) => {
                ReportRefused { job, reason }.emit(&self.metrics);
                // An earlier try of this report may have made the change and failed after that.
                if let TransitionError::Final(status) = reason {
                    (self.on_change)(id, status);
                }
            }
        }
    }

    /// Drops reports older than two leases: by then another worker has the request.
    fn drop_expired(&self, pending: &mut Vec<FinishedJob>) {
        let late = self.policy.lease.saturating_mul(2);
        pending.retain(|job| {
            let is_late = job.claimed_at.elapsed() > late;
            if is_late {
                ReportDropped { job }.emit();
            }
            !is_late
        });
    }
}

/// Adds reports that have arrived, within bounds.
fn fill(pending: &mut Vec<FinishedJob>, inbox: &mut Receiver<FinishedJob>) {
    let mut bytes: usize = pending.iter().map(FinishedJob::bytes).sum();
    while pending.len() < BATCH_MAX && bytes < BATCH_BYTES_MAX {
        let Ok(job) = inbox.try_recv() else { return };
        bytes += job.bytes();
        pending.push(job);
    }
}
