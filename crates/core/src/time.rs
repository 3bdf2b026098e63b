//! Timestamps as the rules use them, and the clock that engines pass to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// Microseconds since the Unix epoch in UTC: the resolution of a Postgres timestamp.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    pub const EPOCH: Self = Self(0);

    /// Creates a timestamp from microseconds since the epoch; negative values lie before it.
    #[must_use]
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    #[must_use]
    pub const fn from_seconds(seconds: i64) -> Self {
        Self(seconds.saturating_mul(1_000_000))
    }

    #[must_use]
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// Returns the time elapsed since `earlier`, or zero if `earlier` is later. A clock that steps back thus looks
    /// like one that stands still.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        let micros = self.0.saturating_sub(earlier.0);
        if micros <= 0 { Duration::ZERO } else { Duration::from_micros(micros.unsigned_abs()) }
    }

    /// Subtracts `span` and saturates at the smallest timestamp.
    #[must_use]
    pub fn minus(self, span: Duration) -> Self {
        let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_sub(micros))
    }

    /// Adds `span` and saturates at the largest timestamp.
    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(micros))
    }
}

/// The source of `now`. Each engine has one: the clock of the machine that holds the state.
pub trait Clock: std::fmt::Debug + Send + Sync + 'static {
    /// Returns the current time. It is earlier than a previous result only if the clock was set back, which is rare. A
    /// rule treats a window that starts in the future as if it started now.
    fn now(&self) -> Timestamp;
}

/// A clock for tests that moves only when a test advances it. Clones share the time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicI64>);

impl ManualClock {
    #[must_use]
    pub fn at(start: Timestamp) -> Self {
        Self(Arc::new(AtomicI64::new(start.as_micros())))
    }

    pub fn advance(&self, span: Duration) {
        let step = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        self.0.fetch_add(step, Ordering::SeqCst);
    }

    pub fn set_back(&self, span: Duration) {
        let step = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        self.0.fetch_sub(step, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_is_zero_if_the_clock_stepped_back() {
        let later = Timestamp::from_seconds(10);
        let earlier = Timestamp::from_seconds(7);
        assert_eq!(later.since(earlier), Duration::from_secs(3));
        assert_eq!(earlier.since(later), Duration::ZERO);
    }

    #[test]
    fn arithmetic_saturates_at_the_largest_timestamp() {
        let end = Timestamp::from_micros(i64::MAX);
        assert_eq!(end.plus(Duration::MAX), end);
        assert_eq!(Timestamp::EPOCH.plus(Duration::MAX), end);
    }

    #[test]
    fn clones_of_a_manual_clock_share_the_time() {
        let clock = ManualClock::at(Timestamp::EPOCH);
        let same = clock.clone();
        clock.advance(Duration::from_millis(5));
        assert_eq!(same.now(), Timestamp::from_micros(5_000));
    }
}
