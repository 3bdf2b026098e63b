//! Maintenance of stored requests: deletes old requests and keys, publishes stranded requests to the broker again.
//! Deletion runs beside the rest, which must not wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use weir_core::Clock;
use weir_core::request::state::RequestStatus;
use weir_store::request::RequestStore;
use weir_store::{Error, Result};

use super::{EnabledCheck, OnChange};
use crate::engines::broker_jobs::{Reconciliation, RequestBroker};
use crate::request::events::{ErasureFailed, PurgeFailed, ReconcileFailed, RequestsPurged, TenantErased};
use crate::request::metrics::WorkMetrics;

/// The pause before the first run.
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

/// How much is deleted, and when: the more there is, the faster. The store makes sure that other work is not delayed.
#[derive(Debug, PartialEq, Eq)]
struct PurgePace {
    /// Rows of a kind with the next call.
    rows: usize,
    /// The pause before it.
    pause: Duration,
}

impl PurgePace {
    const ROWS_MIN: usize = 500;
    const ROWS_MAX: usize = 4_000;
    /// The pause while there is little to purge, and while there is nothing.
    const PAUSE: Duration = POLL_INTERVAL;
    const PAUSE_WHEN_CLEAN: Duration = Duration::from_secs(60);

    const START: Self = Self { rows: Self::ROWS_MIN, pause: Duration::ZERO };

    /// The pace after a call that purged so many rows.
    fn after(&self, purged: u64) -> Self {
        match usize::try_from(purged).unwrap_or(usize::MAX) {
            0 => Self { rows: Self::ROWS_MIN, pause: Self::PAUSE_WHEN_CLEAN },
            purged if purged < self.rows => Self { rows: Self::ROWS_MIN, pause: Self::PAUSE },
            // There may be more.
            _ => Self { rows: (self.rows * 2).min(Self::ROWS_MAX), pause: Duration::ZERO },
        }
    }
}

/// Tells the first of several failures in a row from the others.
#[derive(Default)]
struct FailureStreak {
    has_failed: bool,
}

impl FailureStreak {
    fn first_error<'a, T>(&mut self, outcome: &'a Result<T>) -> Option<&'a Error> {
        let had_failed = std::mem::replace(&mut self.has_failed, outcome.is_err());
        outcome.as_ref().err().filter(|_| !had_failed)
    }
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

    /// Deletes old requests at its own pace. On a slow store one call may take minutes, so a stop drops it: what it has deleted
    /// stays deleted, and the next purge continues from there.
    async fn purge(&self) {
        let (mut pace, mut streak) = (PurgePace::START, FailureStreak::default());
        let mut pause = PAUSE_AT_START;
        loop {
            tokio::time::sleep(pause).await;
            let outcome = self.store.purge_requests(self.retention, pace.rows).await;
            if let Some(error) = streak.first_error(&outcome) {
                PurgeFailed { error }.emit();
            }
            pause = match outcome {
                Ok(purged) => {
                    if purged > 0 {
                        RequestsPurged { count: purged }.emit();
                    }
                    pace = pace.after(purged);
                    pace.pause
                }
                Err(_) => POLL_INTERVAL,
            };
        }
    }

    /// Erases the data of tenants in small commits, with pauses as long as these take, so that other work is not delayed. What is
    /// left after a stop or a crash is in the store, for this server or another.
    async fn erase(&self) {
        let (mut streak, mut pause) = (FailureStreak::default(), PAUSE_AT_START);
        loop {
            tokio::time::sleep(pause).await;
            let begun = Instant::now();
            let outcome = self.store.erase_some(ERASURE_BATCH).await;
            if let Some(error) = streak.first_error(&outcome) {
                ErasureFailed { error }.emit();
            }
            pause = match outcome {
                Ok(Some(batch)) => {
                    if let Some(count) = batch.total {
                        TenantErased { tenant: &batch.tenant, count }.emit();
                    }
                    begun.elapsed()
                }
                Ok(None) => ERASURE_INTERVAL,
                Err(_) => POLL_INTERVAL,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_there_is_to_purge_the_faster_it_goes() {
        let mut pace = PurgePace::START;
        let mut purged = 0;
        // Whatever is asked for is there: no pause, and more each time.
        for _ in 0..100 {
            purged += pace.rows;
            pace = pace.after(pace.rows as u64);
            assert_eq!(pace.pause, Duration::ZERO);
        }
        assert_eq!(pace.rows, PurgePace::ROWS_MAX);
        assert!(purged > 95 * PurgePace::ROWS_MAX);
    }

    #[test]
    fn the_less_there_is_to_purge_the_longer_it_waits() {
        let busy = PurgePace { rows: PurgePace::ROWS_MAX, pause: Duration::ZERO };
        let slower = busy.after(PurgePace::ROWS_MAX as u64 - 1);
        assert_eq!((slower.rows, slower.pause), (PurgePace::ROWS_MIN, PurgePace::PAUSE));
        assert_eq!(slower.after(0).pause, PurgePace::PAUSE_WHEN_CLEAN);
        assert_eq!(slower.after(0).after(PurgePace::ROWS_MIN as u64).pause, Duration::ZERO);
    }
}
