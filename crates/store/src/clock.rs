//! The clocks of this process: wall-clock time for the engine whose state lives here, and one that measures how long
//! something was.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use weir_core::{Clock, Timestamp};

/// Wall-clock time that stands still where the system's clock steps back.
#[derive(Debug, Default)]
pub struct SystemClock {
    latest_micros: AtomicI64,
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let micros = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_micros()).unwrap_or(i64::MAX),
            Err(_before_epoch) => 0,
        };
        let latest = self.latest_micros.fetch_max(micros, Ordering::Relaxed);
        Timestamp::from_micros(micros.max(latest))
    }
}

/// Time since the clock was made: it tells durations, and not what time it is.
#[derive(Debug)]
pub struct SteadyClock {
    started: Instant,
}

impl Default for SteadyClock {
    fn default() -> Self {
        Self { started: Instant::now() }
    }
}

impl Clock for SteadyClock {
    fn now(&self) -> Timestamp {
        Timestamp::EPOCH.plus(self.started.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_never_answers_with_an_earlier_time() {
        let clock = SystemClock { latest_micros: AtomicI64::new(i64::MAX - 1) };
        assert_eq!(clock.now(), Timestamp::from_micros(i64::MAX - 1));
    }
}
