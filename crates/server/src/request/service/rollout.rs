//! What is switched on, remembered for a moment: every submission asks, and operators rarely change it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use weir_store::Result;
use weir_store::request::{RequestStore, Rollout, RolloutChange};

use crate::engines::within;

/// How long what was read is good for: how soon a change on another server holds here.
const FRESH_FOR: Duration = Duration::from_secs(5);
/// How long a failure to read is: nobody else tries meanwhile.
const FAILED_FOR: Duration = Duration::from_millis(500);
/// How long submissions are held up by it once something is known: they have to reach the store afterwards.
const PATIENCE: Duration = Duration::from_millis(500);

/// The switches of the store, or of the settings until an operator has used them.
pub struct Switches {
    store: Arc<dyn RequestStore>,
    default: Rollout,
    timeout: Duration,
    last: Mutex<Option<(Instant, Result<Rollout>)>>,
    /// Held by whoever reads them anew, so that callers who come together wait for one answer.
    reading: tokio::sync::Mutex<()>,
}

impl Switches {
    pub(super) fn new(store: Arc<dyn RequestStore>, default: Rollout, timeout: Duration) -> Self {
        Self { store, default, timeout, last: Mutex::default(), reading: tokio::sync::Mutex::default() }
    }

    /// What is switched on, at most five seconds old. While the store cannot say, what it said last holds: submissions
    /// that rely on it need the store too.
    pub async fn get(&self) -> Result<Rollout> {
        if let Some(known) = self.fresh() {
            return known;
        }
        let _reading = self.reading.lock().await;
        if let Some(known) = self.fresh() {
            return known;
        }
        let (asked, known) = (Instant::now(), self.known());
        let patience = if known.is_some() { PATIENCE } else { self.timeout };
        let answer = match within(patience, self.store.rollout()).await {
            Ok(found) => Ok(found.unwrap_or(self.default)),
            Err(error) => known.ok_or(error),
        };
        self.remember(asked, answer.clone());
        answer
    }

    /// Switches on or off: at once here, within five seconds on other servers. Says what holds now.
    pub async fn change(&self, change: RolloutChange) -> Result<Rollout> {
        // Whoever reads meanwhile must not remember what was before.
        let _reading = self.reading.lock().await;
        let changed = within(self.timeout, self.store.change_rollout(change, self.default)).await;
        match &changed {
            Ok(rollout) => self.remember(Instant::now(), Ok(*rollout)),
            // It may have been changed all the same.
            Err(_) => *self.last.lock() = None,
        }
        changed
    }

    fn fresh(&self) -> Option<Result<Rollout>> {
        let last = self.last.lock();
        let (at, answer) = last.as_ref()?;
        let good_for = if answer.is_ok() { FRESH_FOR } else { FAILED_FOR };
        (at.elapsed() < good_for).then(|| answer.clone())
    }

    fn known(&self) -> Option<Rollout> {
        self.last.lock().as_ref().and_then(|(_, answer)| answer.as_ref().ok().copied())
    }

    fn remember(&self, at: Instant, answer: Result<Rollout>) {
        *self.last.lock() = Some((at, answer));
    }
}
