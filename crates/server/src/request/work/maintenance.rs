//! Maintenance of stored requests: deletes old requests and keys, publishes stranded requests to the broker again.
//! Deletion runs beside the rest, which must not wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use weir_core::Clock;
use weir_core::request::state::RequestStatus;
use weir_store::Result;
use weir_store::request::RequestStore;

use super::{EnabledCheck, OnChange};
use crate::engines::broker_jobs::{Reconciliation, RequestBroker};
use crate::purge::{self, FailureStreak};
use crate::request::events::{ErasureFailed, PurgeFailed, ReconcileFailed, RequestsPurged, TenantErased};
use crate::request::metrics::WorkMetrics;

/// The pause before the first reconciliation.
const PAUSE_AT_START: Duration = Duration::from_secs(1);
/// How often the reconciler runs.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// How often maintenance looks for tenants whose data is to be erased.
const ERASURE_INTERVAL: Duration = Duration::from_secs(2);
/// Requests, or keys, that one commit of an erasure deletes.
const ERASURE_BATCH: usize = 200;

/// What maintenance needs.
#[derive(Clone)]
pub(crate) struct Maintenance {
    pub store: Arc<dyn RequestStore>,
    /// Gets stranded requests; `None` if workers only poll the store.
    pub broker: Option<RequestBroker>,
    /// How long requests are stored.
    pub retention: Duration,
    /// `request.reconciler.enabled`, as it is now.
    pub is_reconciling: EnabledCheck,
    /// The clock of the heartbeat.
    pub clock: Arc<dyn Clock>,
    pub metrics: WorkMetrics,
    /// Called with every change.
    pub on_change: OnChange,
}

impl Maintenance {
    /// Runs until `closing` is cancelled. Uses at most three connections to the store.
    pub(crate) async fn run(self, closing: CancellationToken) {
        tokio::join!(
            closing.run_until_cancelled(self.purge()),
            closing.run_until_cancelled(self.erase()),
            self.reconcile_until(&closing),
        );
    }

    /// Deletes old requests at its own pace. On a slow store one call may take minutes, so a stop drops it.
    async fn purge(&self) {
        purge::run(
            self.retention,
            |rows| self.store.purge_requests(self.retention, rows),
            |count| RequestsPurged { count }.emit(),
            |error| PurgeFailed { error }.emit(),
        )
        .await;
    }

    /// Erases the data of tenants in small commits, with pauses as long as these take, so that other work is not delayed. What is
    /// left after a stop or a crash is in the store, for this server or another. A tenant whose data cannot be erased is passed
    /// over until nothing is left of the others.
    async fn erase(&self) {
        let (mut streak, mut pause, mut passed_over) = (FailureStreak::default(), PAUSE_AT_START, 0);
        loop {
            tokio::time::sleep(pause).await;
            let begun = Instant::now();
            let outcome = self.store.erase_some(ERASURE_BATCH, passed_over).await;
            // That others can be erased does not end the failures of one that is passed over.
            if (passed_over == 0 || outcome.is_err())
                && let Some(error) = streak.first_error(&outcome)
            {
                ErasureFailed { error }.emit();
            }
            pause = match outcome {
                Ok(Some(batch)) => {
                    if let Some(count) = batch.total {
                        TenantErased { tenant: &batch.tenant, count }.emit();
                    }
                    begun.elapsed()
                }
                Ok(None) => {
                    passed_over = 0;
                    ERASURE_INTERVAL
                }
                Err(_) => {
                    passed_over += 1;
                    POLL_INTERVAL
                }
            };
        }
    }

    /// Reconciles until `closing` is cancelled. A run that has begun is finished.
    async fn reconcile_until(&self, closing: &CancellationToken) {
        let (mut pause, mut streak) = (PAUSE_AT_START, FailureStreak::default());
        while closing.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            let outcome = self.reconcile().await;
            if let Some(error) = streak.first_error(&outcome) {
                ReconcileFailed { error }.emit();
            }
            let has_more = outcome.unwrap_or(false);
            pause = if has_more { Duration::ZERO } else { POLL_INTERVAL };
        }
    }

    /// Returns whether there may be more to publish. The heartbeat moves while the reconciler is enabled, with or without a broker.
    async fn reconcile(&self) -> Result<bool> {
        if !(self.is_reconciling)().await {
            return Ok(false);
        }
        self.metrics.reconciler_heartbeat_seconds.set(self.clock.now().as_micros().div_euclid(1_000_000));
        let Some(broker) = &self.broker else { return Ok(false) };
        let Reconciliation { published, has_more } = broker.reconcile().await?;
        published.into_iter().for_each(|id| (self.on_change)(id, RequestStatus::Accepted));
        Ok(has_more)
    }
}
