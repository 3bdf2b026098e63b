//! The rollout switches, cached: every submission reads them, and operators rarely change them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use weir_store::Result;
use weir_store::request::{RequestStore, Rollout, RolloutChange};

use crate::engines::within;

/// How long a value is cached, which is how soon a change on another server applies here.
const CACHED_FOR: Duration = Duration::from_secs(5);
/// How long a failure is cached: nobody reads the store meanwhile.
const FAILURE_CACHED_FOR: Duration = Duration::from_millis(500);
/// How long a read may delay submissions if there is an older value: they need time for the store after that.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(500);

/// The switches in the store, or those of the settings until an operator changes them.
pub struct RolloutSwitches {
    store: Arc<dyn RequestStore>,
    default: Rollout,
    timeout: Duration,
    cached: Mutex<Option<(Instant, Result<Rollout>)>>,
    /// Held during a read, so that concurrent callers wait for one answer.
    reading: tokio::sync::Mutex<()>,
}

impl RolloutSwitches {
    pub(super) fn new(store: Arc<dyn RequestStore>, default: Rollout, timeout: Duration) -> Self {
        Self { store, default, timeout, cached: Mutex::default(), reading: tokio::sync::Mutex::default() }
    }

    /// The rollout, at most five seconds old. While the store does not answer, the last value applies: submissions need the
    /// store anyway.
    pub async fn get(&self) -> Result<Rollout> {
        if let Some(cached) = self.cached() {
            return cached;
        }
        let _reading = self.reading.lock().await;
        if let Some(cached) = self.cached() {
            return cached;
        }
        let (asked_at, last_value) = (Instant::now(), self.last_value());
        let timeout = if last_value.is_some() { REFRESH_TIMEOUT } else { self.timeout };
        let answer = match within(timeout, self.store.rollout()).await {
            Ok(found) => Ok(found.unwrap_or(self.default)),
            Err(error) => last_value.ok_or(error),
        };
        self.cache(asked_at, answer.clone());
        answer
    }

    /// Changes switches: at once on this server, within five seconds on others. Returns the rollout as it is now.
    pub async fn change(&self, change: RolloutChange) -> Result<Rollout> {
        // A concurrent read must not cache the old value.
        let _reading = self.reading.lock().await;
        let changed = within(self.timeout, self.store.change_rollout(change, self.default)).await;
        match &changed {
            Ok(rollout) => self.cache(Instant::now(), Ok(*rollout)),
            // The store may have made the change all the same.
            Err(_) => *self.cached.lock() = None,
        }
        changed
    }

    fn cached(&self) -> Option<Result<Rollout>> {
        let cached = self.cached.lock();
        let (at, answer) = cached.as_ref()?;
        let cached_for = if answer.is_ok() { CACHED_FOR } else { FAILURE_CACHED_FOR };
        (at.elapsed() < cached_for).then(|| answer.clone())
    }

    fn last_value(&self) -> Option<Rollout> {
        self.cached.lock().as_ref().and_then(|(_, answer)| answer.as_ref().ok().copied())
    }

    fn cache(&self, at: Instant, answer: Result<Rollout>) {
        *self.cached.lock() = Some((at, answer));
    }
}
