//! Reports: what calls came to is put on disk in batches. Whatever was done while the last batch was under way is the next
//! one. While the store cannot be reached, reports are kept and tried again for as long as they can still count.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;
use weir_core::request::retry::{FailureCause, RetryDecision, RetryPolicy};
use weir_core::request::state::{RequestStatus, TransitionError, WorkerReport};
use weir_store::request::RequestStore;
use weir_store::{Error, Result};

use super::call::Done;
use super::{OnChange, Parts};
use crate::request::metrics::WorkMetrics;

/// Reports in a batch.
const BATCH_MAX: usize = 512;
/// Bytes of results in a batch, but for its last one.
const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// The pause after the store could not be reached, doubling from the first to the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Puts reports on disk.
pub(super) struct Reporter {
    store: Arc<dyn RequestStore>,
    policy: RetryPolicy,
    metrics: WorkMetrics,
    on_change: OnChange,
}

impl Reporter {
    pub(super) fn new(parts: &Parts) -> Self {
        Self {
            store: Arc::clone(&parts.store),
            policy: parts.settings.policy,
            metrics: parts.metrics.clone(),
            on_change: Arc::clone(&parts.on_change),
        }
    }

    /// Goes on until nobody can report any more and everything is on disk.
    pub(super) async fn run(self, mut inbox: Receiver<Done>) {
        let mut held: Vec<Done> = Vec::new();
        let mut pause = PAUSES.0;
        loop {
            if held.is_empty() {
                let Some(first) = inbox.recv().await else { return };
                held.push(first);
            }
            fill(&mut held, &mut inbox);
            match self.put_down(&mut held).await {
                Ok(()) => pause = PAUSES.0,
                Err(error) => {
                    if pause == PAUSES.0 {
                        let (held, error) = (held.len(), error.with_causes());
                        tracing::warn!(held, %error, "reports of requests cannot be stored and are tried again");
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
            self.give_up_late(&mut held);
        }
    }

    /// Stores what is held; what could not be stored is still held.
    async fn put_down(&self, held: &mut Vec<Done>) -> Result<()> {
        match self.store_batch(held).await {
            Ok(()) => {
                held.clear();
                Ok(())
            }
            // One of them may be what the store cannot bear; the others have nothing to do with it.
            Err(error) if !error.is_transient() && held.len() > 1 => self.put_down_singly(held, error).await,
            Err(error) => Err(error),
        }
    }

    async fn put_down_singly(&self, held: &mut Vec<Done>, error: Error) -> Result<()> {
        let mut left = Vec::new();
        for done in held.drain(..) {
            if self.store_batch(std::slice::from_ref(&done)).await.is_err() {
                left.push(done);
            }
        }
        *held = left;
        if held.is_empty() { Ok(()) } else { Err(error) }
    }

    async fn store_batch(&self, batch: &[Done]) -> Result<()> {
        let reports = batch.iter().map(|done| done.report.clone()).collect();
        let outcomes = self.store.report_batch(reports, &self.policy).await?;
        for (done, outcome) in batch.iter().zip(outcomes) {
            self.tell(done, outcome);
        }
        Ok(())
    }

    fn tell(&self, done: &Done, outcome: std::result::Result<RequestStatus, TransitionError>) {
        self.metrics.processing_latency_seconds.observe(done.claimed.elapsed().as_secs_f64());
        let (id, tenant) = (done.report.id, done.tenant.as_str());
        let status = match outcome {
            Ok(status) => status,
            Err(refused) => {
                tracing::warn!(
                    target: "weir::request",
                    requestId = %id, tenantId = tenant, %refused, "a late report has changed nothing"
                );
                // It may be an earlier try of this report that has changed it, and failed before it could say so.
                if let TransitionError::Final(status) = refused {
                    (self.on_change)(id, status);
                }
                return;
            }
        };
        if status == RequestStatus::InProgress
            && matches!(done.report.report, WorkerReport::Called(RetryDecision::Retry { .. }))
        {
            self.metrics.retries.inc();
        }
        log(done, status);
        (self.on_change)(id, status);
    }

    /// Twice the lease after its claim, a request has long been somebody else's.
    fn give_up_late(&self, held: &mut Vec<Done>) {
        let late = self.policy.lease.saturating_mul(2);
        held.retain(|done| {
            let is_late = done.claimed.elapsed() > late;
            if is_late {
                let (id, tenant) = (done.report.id, done.tenant.as_str());
                tracing::error!(
                    target: "weir::request",
                    requestId = %id, tenantId = tenant, "a report could not be stored; the work will be done again"
                );
            }
            !is_late
        });
    }
}

/// One line for each change. What was not called has not changed for anybody.
fn log(done: &Done, status: RequestStatus) {
    let (id, tenant, attempt) = (done.report.id, done.tenant.as_str(), done.attempt);
    let problem = done.problem.as_deref();
    if matches!(done.report.report, WorkerReport::NotCalled { .. }) {
        tracing::debug!(
            target: "weir::request",
            requestId = %id, tenantId = tenant, problem, "a request was put back without a call"
        );
        return;
    }
    tracing::info!(
        target: "weir::request",
        requestId = %id,
        tenantId = tenant,
        statusTransition = %format_args!("{} -> {}", RequestStatus::InProgress.as_str(), status.as_str()),
        attempt,
        failureCode = done.cause().map(FailureCause::code),
        problem,
        "request"
    );
}

/// Adds what has come meanwhile, within bounds.
fn fill(held: &mut Vec<Done>, inbox: &mut Receiver<Done>) {
    let mut bytes: usize = held.iter().map(Done::bytes).sum();
    while held.len() < BATCH_MAX && bytes < BATCH_BYTES_MAX {
        let Ok(done) = inbox.try_recv() else { return };
        bytes += done.bytes();
        held.push(done);
    }
}
