//! Recounts: all rows are read and compared with the books, every few hours by one of the servers and whenever an operator asks
//! for it. The store does the reading; this says when, and what is being read.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use weir_store::Result;
use weir_store::book::BookStore;

use super::events::{CountsFailed, RecountFailed, RecountFinished};
use crate::purge::FailureStreak;

/// How often counts are tended, and the pause after a failure: the store is away, or a table is busy.
const TEND_INTERVAL: Duration = Duration::from_secs(1);
const PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// How often a server looks whether a recount is due.
const CLAIM_INTERVAL: Duration = Duration::from_secs(60);

/// A recount of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunningRecount {
    pub(crate) began: Instant,
    /// What is being read.
    pub(crate) step: &'static str,
}

pub(crate) struct Recounter {
    books: Arc<dyn BookStore>,
    running: Mutex<Option<RunningRecount>>,
    closing: CancellationToken,
}

impl Recounter {
    pub(crate) fn new(books: Arc<dyn BookStore>, closing: CancellationToken) -> Arc<Self> {
        Arc::new(Self { books, running: Mutex::default(), closing })
    }

    /// The recount of this process, if there is one.
    pub(crate) fn running(&self) -> Option<RunningRecount> {
        *self.running.lock()
    }

    /// Begins a recount, unless this process is at it. It goes on when the caller is gone, until the process stops.
    pub(crate) fn begin(self: &Arc<Self>) {
        if let Some(guard) = self.claim_process() {
            tokio::spawn(async move {
                let closing = guard.recounter.closing.clone();
                closing.run_until_cancelled(guard.run()).await;
            });
        }
    }

    /// Tends counts, and recounts when no server has done so within `every`, until the process stops.
    pub(crate) async fn run(self: Arc<Self>, every: Duration) {
        let closing = self.closing.clone();
        let tend = async {
            let mut streak = FailureStreak::default();
            loop {
                let tended = self.books.tend_counts().await;
                if let Some(error) = streak.first_error(&tended) {
                    CountsFailed { error }.emit();
                }
                let pause = if tended.is_ok() { TEND_INTERVAL } else { PAUSE_AFTER_FAILURE };
                tokio::time::sleep(pause).await;
            }
        };
        let recount = async {
            loop {
                tokio::time::sleep(CLAIM_INTERVAL.min(every)).await;
                // While the store is away, there is nothing to recount; the next minute tries again.
                if self.books.claim_recount(every).await.unwrap_or(false)
                    && let Some(guard) = self.claim_process()
                {
                    guard.run().await;
                }
            }
        };
        closing.run_until_cancelled(async { tokio::join!(tend, recount) }).await;
    }

    fn claim_process(self: &Arc<Self>) -> Option<RunningGuard> {
        let mut running = self.running.lock();
        if running.is_some() {
            return None;
        }
        *running = Some(RunningRecount { began: Instant::now(), step: "nothing yet" });
        Some(RunningGuard { recounter: Arc::clone(self) })
    }
}

/// The one recount of this process. It ends when this is dropped.
struct RunningGuard {
    recounter: Arc<Recounter>,
}

impl RunningGuard {
    async fn run(self) {
        let on_step = |step| {
            if let Some(running) = &mut *self.recounter.running.lock() {
                running.step = step;
            }
        };
        let outcome: Result<_> = self.recounter.books.recount(&on_step).await;
        match &outcome {
            Ok(recount) => RecountFinished { recount }.emit(),
            Err(error) => RecountFailed { error }.emit(),
        }
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        *self.recounter.running.lock() = None;
    }
}
