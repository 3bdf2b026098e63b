//! Whether the engines answer. Asked often and by anybody, so the answer is shared for a moment.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::engines::Engines;

/// How long an answer is good for.
const FRESH_FOR: Duration = Duration::from_millis(500);
/// How long an engine may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether the engines answer.
pub struct Health {
    engines: Engines,
    last: Mutex<Option<(Instant, Checks)>>,
}

/// Every engine's answer: first the store's, which nothing goes without.
pub(crate) type Checks = Vec<Check>;

/// One engine's answer.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Which engine.
    pub engine: &'static str,
    /// Whether it answered.
    pub up: bool,
    /// How long it took.
    pub latency: Duration,
    /// Why it does not, where that is known and may be told to anybody.
    pub reason: Option<&'static str>,
}

impl Health {
    /// Checks of these engines.
    #[must_use]
    pub fn new(engines: Engines) -> Self {
        Self { engines, last: Mutex::default() }
    }

    /// The engines' present state, at most half a second old.
    pub async fn check(&self) -> Checks {
        // Callers that come together wait for one check.
        let mut last = self.last.lock().await;
        if let Some((at, checks)) = &*last
            && at.elapsed() < FRESH_FOR
            && !self.is_outdated(checks)
        {
            return checks.clone();
        }
        let Engines { store, redis, kafka, .. } = &self.engines;
        let redis = async {
            let redis = redis.as_ref()?;
            Some(check(weir_store_redis::ENGINE, redis.ping()).await)
        };
        let kafka = async {
            let kafka = kafka.as_ref()?;
            Some(check(weir_queue::kafka::ENGINE, async { kafka.ping().await.is_ok() }).await)
        };
        let store = check(store.name, async { store.health.ping().await.is_ok() });
        let (mut store, redis, kafka) = tokio::join!(store, redis, kafka);
        store.reason = self.engines.store.health.storage_problem();
        store.up &= store.reason.is_none();
        let checks: Checks = [Some(store), redis, kafka].into_iter().flatten().collect();
        *last = Some((Instant::now(), checks.clone()));
        checks
    }

    /// Whether the store's writes have begun to fail, or to succeed again, since it was checked.
    fn is_outdated(&self, checks: &Checks) -> bool {
        checks.first().map(|store| store.reason) != Some(self.engines.store.health.storage_problem())
    }
}

async fn check(engine: &'static str, ping: impl Future<Output = bool>) -> Check {
    let started = Instant::now();
    let up = tokio::time::timeout(PATIENCE, ping).await.unwrap_or(false);
    Check { engine, up, latency: started.elapsed(), reason: None }
}
