//! What is switched on, remembered for a moment: every submission asks, and operators rarely change it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use weir_store::Result;
use weir_store::request::{RequestStore, Rollout};

use super::super::within;

/// How long what was read is good for: how soon a change on another server holds here.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// The switches of the store, or of the settings until an operator has used them.
pub struct Switches {
    store: Arc<dyn RequestStore>,
    default: Rollout,
    timeout: Duration,
    last: Mutex<Option<(Instant, Rollout)>>,
    /// Held by whoever reads them anew, so that callers who come together wait for one answer.
    reading: tokio::sync::Mutex<()>,
}

impl Switches {
    pub(super) fn new(store: Arc<dyn RequestStore>, default: Rollout, timeout: Duration) -> Self {
        Self { store, default, timeout, last: Mutex::default(), reading: tokio::sync::Mutex::default() }
    }

    /// What is switched on, at most five seconds old.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn get(&self) -> Result<Rollout> {
        if let Some(rollout) = self.fresh() {
            return Ok(rollout);
        }
        let _reading = self.reading.lock().await;
        match self.fresh() {
            Some(rollout) => Ok(rollout),
            None => self.ask().await,
        }
    }

    /// What is switched on, as the store has it now.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn read(&self) -> Result<Rollout> {
        let _reading = self.reading.lock().await;
        self.ask().await
    }

    async fn ask(&self) -> Result<Rollout> {
        let asked = Instant::now();
        let rollout = within(self.timeout, self.store.rollout()).await?.unwrap_or(self.default);
        self.remember(asked, rollout);
        Ok(rollout)
    }

    /// Switches on or off: at once here, within five seconds on other servers.
    ///
    /// # Errors
    /// When the store cannot say.
    pub async fn set(&self, rollout: Rollout) -> Result<()> {
        // Whoever reads meanwhile must not remember what was before.
        let _reading = self.reading.lock().await;
        let set = within(self.timeout, self.store.set_rollout(rollout)).await;
        match &set {
            Ok(()) => self.remember(Instant::now(), rollout),
            // It may have been set all the same.
            Err(_) => *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None,
        }
        set
    }

    fn fresh(&self) -> Option<Rollout> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.filter(|(at, _)| at.elapsed() < FRESH_FOR).map(|(_, rollout)| rollout)
    }

    fn remember(&self, at: Instant, rollout: Rollout) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((at, rollout));
    }
}
