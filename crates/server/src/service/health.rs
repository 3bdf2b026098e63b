//! Whether the engines answer. Asked often and by anybody, so the answer is shared for a moment.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::engine::Engine;

/// How long an answer is good for.
const FRESH_FOR: Duration = Duration::from_millis(500);
/// How long an engine may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether the engines answer.
#[derive(Debug)]
pub struct Health {
    engine: Engine,
    last: Mutex<Option<(Instant, Check)>>,
}

/// One engine's answer.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// Which engine.
    pub engine: &'static str,
    /// Whether it answered.
    pub up: bool,
    /// How long it took.
    pub latency: Duration,
}

impl Health {
    /// Checks of this engine.
    #[must_use]
    pub fn new(engine: Engine) -> Self {
        Self { engine, last: Mutex::default() }
    }

    /// The engine's present state, at most half a second old.
    pub async fn check(&self) -> Check {
        // Callers that come together wait for one check.
        let mut last = self.last.lock().await;
        if let Some((at, check)) = *last
            && at.elapsed() < FRESH_FOR
        {
            return check;
        }
        let started = Instant::now();
        let up = matches!(tokio::time::timeout(PATIENCE, self.engine.ping()).await, Ok(Ok(())));
        let check = Check { engine: self.engine.name(), up, latency: started.elapsed() };
        *last = Some((Instant::now(), check));
        check
    }
}
