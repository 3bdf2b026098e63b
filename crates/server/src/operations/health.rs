//! Checks whether the engines answer. Anybody may ask, so the result is cached for a moment.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::engines::Engines;

/// How long a result is cached.
const CACHED_FOR: Duration = Duration::from_millis(500);
/// How long an engine may take to answer.
const PING_TIMEOUT: Duration = Duration::from_secs(1);

pub struct Health {
    engines: Engines,
    cached: Mutex<Option<(Instant, Vec<EngineCheck>)>>,
}

/// The result of checking one engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineCheck {
    pub engine: &'static str,
    pub up: bool,
    pub latency: Duration,
    /// Why the engine is down, where that is known and not confidential.
    pub reason: Option<&'static str>,
}

impl Health {
    #[must_use]
    pub fn new(engines: Engines) -> Self {
        Self { engines, cached: Mutex::default() }
    }

    /// The state of every engine, at most half a second old. The store comes first.
    pub async fn check(&self) -> Vec<EngineCheck> {
        // Concurrent callers wait for one check.
        let mut cached = self.cached.lock().await;
        if let Some((at, checks)) = &*cached
            && at.elapsed() < CACHED_FOR
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
            let mut check = check(weir_queue::kafka::ENGINE, async { kafka.ping().await.is_ok() }).await;
            check.reason = kafka.problem().filter(|_| !check.up);
            Some(check)
        };
        let store = check(store.name, async { store.health.ping().await.is_ok() });
        let (mut store, redis, kafka) = tokio::join!(store, redis, kafka);
        store.reason = self.engines.store.health.storage_problem();
        store.up &= store.reason.is_none();
        let checks: Vec<EngineCheck> = [Some(store), redis, kafka].into_iter().flatten().collect();
        *cached = Some((Instant::now(), checks.clone()));
        checks
    }

    /// Whether writes of the store have begun to fail or to succeed since the check.
    fn is_outdated(&self, checks: &[EngineCheck]) -> bool {
        checks.first().map(|store| store.reason) != Some(self.engines.store.health.storage_problem())
    }
}

async fn check(engine: &'static str, ping: impl Future<Output = bool>) -> EngineCheck {
    let started = Instant::now();
    let up = tokio::time::timeout(PING_TIMEOUT, ping).await.unwrap_or(false);
    EngineCheck { engine, up, latency: started.elapsed(), reason: None }
}
