//! Upkeep: old requests and keys are purged a little at a time, stranded ones are given to the broker again, and gauges
//! say how much is waiting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use weir_core::Clock;
use weir_store::Result;
use weir_store::request::RequestStore;

use super::Switch;
use crate::engine::broker_jobs::Broker;
use crate::telemetry::metrics::WorkMetrics;

/// How many rows of a kind are purged at once: few enough that nobody waits for it.
const PURGED_AT_ONCE: usize = 500;
/// The pause between two full batches.
const PAUSE_BETWEEN: Duration = Duration::from_millis(500);
/// The pause when there is nothing left to purge.
const PAUSE_WHEN_CLEAN: Duration = Duration::from_secs(60);
/// The pause before the first look.
const PAUSE_AT_START: Duration = Duration::from_secs(1);
/// How often the reconciler looks, and the gauges are set.
const LOOK: Duration = Duration::from_secs(5);

/// What upkeep works with.
#[derive(Clone)]
pub(crate) struct Upkeep {
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
    /// Goes on until told to stop. One thing is done after the other, on one connection.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut works = true;
        let mut clean_until = Instant::now();
        // A server that starts has more urgent things to do.
        let mut pause = PAUSE_AT_START;
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = closing.cancelled() => return,
            }
            let outcome = self.look(&mut clean_until).await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut works, false)
            {
                tracing::warn!(error = %error.with_causes(), "the upkeep of requests fails and is tried again");
            }
            works = outcome.is_ok();
            pause = outcome.unwrap_or(LOOK);
        }
    }

    /// Sees to everything once, and says when to look again. The broker is last: it may be away when the store is not.
    async fn look(&self, clean_until: &mut Instant) -> Result<Duration> {
        self.gauge().await?;
        let mut pause = LOOK;
        if Instant::now() >= *clean_until {
            if self.purge().await? {
                pause = PAUSE_BETWEEN;
            } else {
                *clean_until = Instant::now() + PAUSE_WHEN_CLEAN;
            }
        }
        Ok(if self.reconcile().await? { Duration::ZERO } else { pause })
    }

    /// Purges one batch, and says whether there may be more.
    async fn purge(&self) -> Result<bool> {
        let purged = self.store.purge_requests(self.retention, PURGED_AT_ONCE).await?;
        if purged > 0 {
            tracing::debug!(purged, "old requests and keys were purged");
        }
        Ok(purged >= PURGED_AT_ONCE as u64)
    }

    async fn gauge(&self) -> Result<()> {
        let dead = self.store.count_dead_requests().await?;
        self.metrics.dlq_depth.set(i64::try_from(dead).unwrap_or(i64::MAX));
        let oldest = self.store.pending_requests(Duration::ZERO, 1).await?;
        let age = oldest.first().map_or(0, |pending| pending.age.as_secs());
        self.metrics.reconciler_backlog_age_seconds.set(i64::try_from(age).unwrap_or(i64::MAX));
        Ok(())
    }

    /// The heart beats as long as stranded requests are looked for, whether there is a broker or not.
    async fn reconcile(&self) -> Result<bool> {
        if !(self.is_reconciling)().await {
            return Ok(false);
        }
        self.metrics.reconciler_heartbeat_seconds.set(self.clock.now().as_micros().div_euclid(1_000_000));
        match &self.broker {
            Some(broker) => broker.reconcile().await,
            None => Ok(false),
        }
    }
}
