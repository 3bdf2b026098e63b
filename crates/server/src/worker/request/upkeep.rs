//! Upkeep: old requests and keys are purged as fast as they come, stranded ones are given to the broker again, and gauges
//! say how much is waiting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use weir_core::Clock;
use weir_core::request::state::Status;
use weir_store::Result;
use weir_store::request::RequestStore;

use super::{OnChange, Switch};
use crate::engine::broker_jobs::{Broker, Reconciled};
use crate::telemetry::metrics::WorkMetrics;

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
    /// Who is told of changes.
    pub on_change: OnChange,
}

/// How much is purged, and when. The more there is, the more; the store sees to it that others are not kept waiting.
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
    const PAUSE: Duration = LOOK;
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

/// When to do what.
struct Plan {
    look_at: Instant,
    purge_at: Instant,
    pace: PurgePace,
}

impl Upkeep {
    /// Goes on until told to stop. One thing is done after the other, on one connection.
    pub(crate) async fn run(self, closing: CancellationToken) {
        let mut works = true;
        // A server that starts has more urgent things to do.
        let mut pause = PAUSE_AT_START;
        let mut plan = Plan { look_at: Instant::now(), purge_at: Instant::now(), pace: PurgePace::START };
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = closing.cancelled() => return,
            }
            let outcome = self.keep_up(&mut plan).await;
            if let Err(error) = &outcome
                && std::mem::replace(&mut works, false)
            {
                tracing::warn!(error = %error.with_causes(), "the upkeep of requests fails and is tried again");
            }
            works = outcome.is_ok();
            pause = match outcome {
                Ok(()) => plan.purge_at.min(plan.look_at).saturating_duration_since(Instant::now()),
                Err(_) => LOOK,
            };
        }
    }

    /// Does what is due. The broker is last: it may be away when the store is not.
    async fn keep_up(&self, plan: &mut Plan) -> Result<()> {
        if Instant::now() >= plan.purge_at {
            let purged = self.store.purge_requests(self.retention, plan.pace.rows).await?;
            if purged > 0 {
                tracing::debug!(purged, "old requests and keys were purged");
            }
            plan.pace = plan.pace.after(purged);
            plan.purge_at = Instant::now() + plan.pace.pause;
        }
        if Instant::now() >= plan.look_at {
            self.gauge().await?;
            let may_be_more = self.reconcile().await?;
            plan.look_at = Instant::now() + if may_be_more { Duration::ZERO } else { LOOK };
        }
        Ok(())
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
        let Some(broker) = &self.broker else { return Ok(false) };
        let Reconciled { published, may_be_more } = broker.reconcile().await?;
        published.into_iter().for_each(|id| (self.on_change)(id, Status::Accepted));
        Ok(may_be_more)
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
