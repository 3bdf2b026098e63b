//! Permits that the store has given and nobody has heard of: their call timed out or was left while the store decided, its outcome
//! is unknown, or another policy denied. Unless a caller keeps them, they are deleted.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use weir_core::PermitId;
use weir_store::tier::{PermitsOutcome, TakePermits, TierStore};
use weir_store::{Error, Result};

use super::{SharedState, within};
use crate::purge::FailureStreak;
use crate::tier::events::{PermitsLeft, PermitsNotVoided};

/// The most checks whose permits wait to be deleted.
const WAITING_MAX: usize = 16_384;
/// The most of them that one commit deletes.
const VOID_BATCH: usize = 256;
/// The pause after the store has not deleted them.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// When a commit of unknown outcome has ended: the connection was closed, but the database may be at it still.
const COMMITTED_WITHIN: Duration = Duration::from_secs(10);

/// The decision about one [`TakePermits`], with the permits that it gave.
#[derive(Debug)]
pub(super) struct TakenPermits {
    pub(super) outcome: PermitsOutcome,
    /// `None` if no permit was given.
    pub(super) unclaimed: Option<UnclaimedPermits>,
}

/// Permits that are deleted when this is dropped.
#[derive(Debug)]
pub(super) struct UnclaimedPermits {
    ids: Vec<PermitId>,
    waiting: mpsc::Sender<Vec<PermitId>>,
}

impl UnclaimedPermits {
    fn new(ids: Vec<PermitId>, waiting: &mpsc::Sender<Vec<PermitId>>) -> Option<Self> {
        (!ids.is_empty()).then(|| Self { ids, waiting: waiting.clone() })
    }

    /// The caller gets them.
    pub(super) fn keep(mut self) {
        self.ids.clear();
    }

    /// Deletes them before the caller is answered.
    pub(super) async fn void(mut self, shared: &SharedState) {
        match within(shared.timeout, shared.store.void_permits(self.ids.clone())).await {
            Ok(()) => self.ids.clear(),
            Err(error) => PermitsNotVoided { error: &error }.emit(),
        }
    }
}

impl Drop for UnclaimedPermits {
    fn drop(&mut self) {
        let ids = std::mem::take(&mut self.ids);
        if !ids.is_empty()
            && let Err(mpsc::error::TrySendError::Full(_)) = self.waiting.try_send(ids)
        {
            PermitsLeft.emit();
        }
    }
}

/// The permits that wait to be deleted.
pub(super) fn waiting_permits() -> (mpsc::Sender<Vec<PermitId>>, mpsc::Receiver<Vec<PermitId>>) {
    mpsc::channel(WAITING_MAX)
}

/// Takes the permits of a batch. Those of a caller who is not answered are in an outcome that nobody takes, which deletes them.
pub(super) async fn take(
    store: &dyn TierStore,
    waiting: &mpsc::Sender<Vec<PermitId>>,
    batch: Vec<TakePermits>,
) -> Result<Vec<TakenPermits>> {
    let asked: Vec<Vec<PermitId>> =
        batch.iter().map(|take| take.asks.iter().map(|ask| ask.id).collect()).collect();
    let outcomes = store.take_permits(batch).await.inspect_err(|error| {
        if !matches!(error, Error::NotDone { .. }) {
            let all = || UnclaimedPermits::new(asked.concat(), waiting);
            let later = all();
            tokio::spawn(async move {
                tokio::time::sleep(COMMITTED_WITHIN).await;
                drop(later);
            });
            drop(all());
        }
    })?;
    let taken = |(ids, outcome): (Vec<PermitId>, PermitsOutcome)| {
        let given = ids.into_iter().zip(&outcome.each).filter(|(_, (_, _, is_given))| *is_given);
        let unclaimed = UnclaimedPermits::new(given.map(|(id, _)| id).collect(), waiting);
        TakenPermits { outcome, unclaimed }
    };
    Ok(asked.into_iter().zip(outcomes).map(taken).collect())
}

/// Deletes permits until no more can come.
pub(super) async fn void_all(shared: Arc<SharedState>, mut waiting: mpsc::Receiver<Vec<PermitId>>) {
    let (mut checks, mut streak) = (Vec::new(), FailureStreak::default());
    while waiting.recv_many(&mut checks, VOID_BATCH).await > 0 {
        let ids = std::mem::take(&mut checks).concat();
        loop {
            let voided = within(shared.timeout, shared.store.void_permits(ids.clone())).await;
            if let Some(error) = streak.first_error(&voided) {
                PermitsNotVoided { error }.emit();
            }
            if voided.is_ok() {
                break;
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}
