//! Upkeep: old requests and keys are purged a little at a time, stranded ones are given to the broker again, and gauges
//! say how much is waiting.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use weir_core::Clock;
use weir_store::Result;
use weir_store::request::RequestStore;

use super::Switch;
use super::broker::Broker;
use crate::telemetry::metrics::WorkMetrics;

/// How many rows of a kind are purged at once: few enough that nobody waits for it.
const PURGED_AT_ONCE: usize = 500;
/// The pause between two full batches.
const PAUSE_BETWEEN: Duration = Duration::from_millis(500);
/// The pause when there is nothing left to purge.
const PAUSE_WHEN_CLEAN: Duration = Duration::from_secs(60);
/// How often the reconciler looks, and the gauges are set.
const LOOK: Duration = Duration::from_secs(5);

/// What upkeep works with.
#[derive(Clone)]
pub struct Upkeep {
    /// Where requests live.
    pub store: Arc<dyn RequestStore>,
    /// Who gets stranded jobs; none where the store alone hands out jobs.
    pub broker: Option<Broker>,
    /// How long requests are kept.
    pub retention: Duration,
    /// Whether stranded ones are looked for: `request.reconciler.enabled`, as it is now.
    pub is_reconciling: Switch,
    /// By which the heart beats.
    pub clock: Arc<dyn Clock>,
    /// What is shown.
    pub metrics: WorkMetrics,
}

impl Upkeep {
    /// Goes on until told to stop.
    pub async fn run(self, closing: CancellationToken) {
        let purging = repeat("old requests cannot be purged", &closing, || self.purge());
        let gauging = repeat("the gauges of requests cannot be set", &closing, || self.gauge());
        let reconciling = repeat("stranded requests cannot be mended", &closing, || self.reconcile());
        tokio::join!(purging, gauging, reconciling);
    }

    /// Purges one batch, and says when to go on.
    async fn purge(&self) -> Result<Duration> {
        let purged = self.store.purge_requests(self.retention, PURGED_AT_ONCE).await?;
        if purged > 0 {
            tracing::debug!(purged, "old requests and keys were purged");
        }
        Ok(if purged >= PURGED_AT_ONCE as u64 { PAUSE_BETWEEN } else { PAUSE_WHEN_CLEAN })
    }

    async fn gauge(&self) -> Result<Duration> {
        let dead = self.store.count_dead_requests().await?;
        self.metrics.dlq_depth.set(i64::try_from(dead).unwrap_or(i64::MAX));
        let oldest = self.store.pending_requests(Duration::ZERO, 1).await?;
        let age = oldest.first().map_or(0, |pending| pending.age.as_secs());
        self.metrics.reconciler_backlog_age_seconds.set(i64::try_from(age).unwrap_or(i64::MAX));
        Ok(LOOK)
    }

    /// The heart beats as long as stranded requests are looked for, whether there is a broker or not.
    async fn reconcile(&self) -> Result<Duration> {
        if !(self.is_reconciling)().await {
            return Ok(LOOK);
        }
        self.metrics.reconciler_heartbeat_seconds.set(self.clock.now().as_micros().div_euclid(1_000_000));
        let has_more = match &self.broker {
            Some(broker) => broker.reconcile().await?,
            None => false,
        };
        Ok(if has_more { Duration::ZERO } else { LOOK })
    }
}

/// Does something again and again, and says once when it begins to fail.
async fn repeat<F>(failing: &str, closing: &CancellationToken, mut act: impl FnMut() -> F)
where
    F: Future<Output = Result<Duration>>,
{
    let mut works = true;
    while !closing.is_cancelled() {
        let outcome = act().await;
        if let Err(error) = &outcome
            && std::mem::replace(&mut works, false)
        {
            tracing::warn!(error = %error.with_causes(), "{failing}; this is tried again");
        }
        works = outcome.is_ok();
        tokio::select! {
            () = tokio::time::sleep(outcome.unwrap_or(LOOK)) => {}
            () = closing.cancelled() => {}
        }
    }
}
