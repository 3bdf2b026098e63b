//! A value of the store that every submission needs and operators rarely change, cached for five seconds.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use weir_store::Result;

use crate::engines::within;

/// How long a value is cached, which is how soon a change on another server applies here.
const CACHED_FOR: Duration = Duration::from_secs(5);
/// How long a failure is cached: nobody reads the store meanwhile.
const FAILURE_CACHED_FOR: Duration = Duration::from_millis(500);
/// How long a read may delay submissions if there is an older value: they need time for the store after that.
const REFRESH_TIMEOUT: Duration = Duration::from_millis(500);

pub(super) struct CachedRead<T> {
    timeout: Duration,
    cached: Mutex<Option<(Instant, Result<T>)>>,
    /// Held during a read, so that concurrent callers wait for one answer.
    reading: tokio::sync::Mutex<()>,
}

impl<T: Clone> CachedRead<T> {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { timeout, cached: Mutex::default(), reading: tokio::sync::Mutex::default() }
    }

    /// The value, at most five seconds old. While the store does not answer, the last value applies: submissions need the
    /// store anyway.
    pub(super) async fn get(&self, read: impl Future<Output = Result<T>>) -> Result<T> {
        if let Some(cached) = self.cached() {
            return cached;
        }
        let _reading = self.reading.lock().await;
        if let Some(cached) = self.cached() {
            return cached;
        }
        let (asked_at, last_value) = (Instant::now(), self.last_value());
        let timeout = if last_value.is_some() { REFRESH_TIMEOUT } else { self.timeout };
        let answer = match within(timeout, read).await {
            Ok(found) => Ok(found),
            Err(error) => last_value.ok_or(error),
        };
        *self.cached.lock() = Some((asked_at, answer.clone()));
        answer
    }

    /// Changes the value in the store. It is read again by the next call on this server, also after an error: the store may have
    /// made the change all the same.
    pub(super) async fn change<R>(&self, change: impl Future<Output = Result<R>>) -> Result<R> {
        // A concurrent read must not cache the old value.
        let _reading = self.reading.lock().await;
        let changed = within(self.timeout, change).await;
        *self.cached.lock() = None;
        changed
    }

    fn cached(&self) -> Option<Result<T>> {
        let cached = self.cached.lock();
        let (at, answer) = cached.as_ref()?;
        let cached_for = if answer.is_ok() { CACHED_FOR } else { FAILURE_CACHED_FOR };
        (at.elapsed() < cached_for).then(|| answer.clone())
    }

    fn last_value(&self) -> Option<T> {
        self.cached.lock().as_ref().and_then(|(_, answer)| answer.as_ref().ok().cloned())
    }
}
