//! Points in time as the rules see them, and the clock that engines hand to them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// A point in time: microseconds since the Unix epoch, UTC. The finest step Postgres keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The Unix epoch.
    pub const EPOCH: Self = Self(0);

    /// The point `micros` microseconds after the epoch (before it, when negative).
    #[must_use]
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// The point `seconds` after the epoch.
    #[must_use]
    pub const fn from_seconds(seconds: i64) -> Self {
        Self(seconds.saturating_mul(1_000_000))
    }

    /// Microseconds since the epoch.
    #[must_use]
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// How long after `earlier` this is; zero when it is not after it, so that a clock which steps back looks like
    /// one that stands still.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        let micros = self.0.saturating_sub(earlier.0);
        if micros <= 0 { Duration::ZERO } else { Duration::from_micros(micros.unsigned_abs()) }
    }

    /// The point `span` earlier, held at the beginning of time rather than wrapping round.
    #[must_use]
    pub fn minus(self, span: Duration) -> Self {
        let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_sub(micros))
    }

    /// The point `span` later, held at the end of time rather than wrapping round.
    #[must_use]
    pub fn plus(self, span: Duration) -> Self {
        let micros = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        Self(self.0.saturating_add(micros))
    }
}

/// Where `now` comes from. Each engine has one: the clock of whatever holds the state.
pub trait Clock: std::fmt::Debug + Send + Sync + 'static {
    /// The present. It may be earlier than an answer given before only when the clock was set back, which is rare. Rules treat
    /// state that is further ahead than they could have put it as if it had been written now.
    fn now(&self) -> Timestamp;
}

/// A clock that moves only when told to, for tests. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicI64>);

impl ManualClock {
    /// A clock standing at `start`.
    #[must_use]
    pub fn at(start: Timestamp) -> Self {
        Self(Arc::new(AtomicI64::new(start.as_micros())))
    }

    /// Moves the clock forward.
    pub fn advance(&self, span: Duration) {
        let step = i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        self.0.fetch_add(step, Ordering::SeqCst);
    }

    /// Sets the clock back, as an operator or a time server may.
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
    fn a_clock_that_stepped_back_looks_like_one_that_stands_still() {
        let later = Timestamp::from_seconds(10);
        let earlier = Timestamp::from_seconds(7);
        assert_eq!(later.since(earlier), Duration::from_secs(3));
        assert_eq!(earlier.since(later), Duration::ZERO);
    }

    #[test]
    fn the_end_of_time_is_a_wall() {
        let end = Timestamp::from_micros(i64::MAX);
        assert_eq!(end.plus(Duration::MAX), end);
        assert_eq!(Timestamp::EPOCH.plus(Duration::MAX), end);
    }

    #[test]
    fn clones_of_a_manual_clock_move_together() {
        let clock = ManualClock::at(Timestamp::EPOCH);
        let same = clock.clone();
        clock.advance(Duration::from_millis(5));
        assert_eq!(same.now(), Timestamp::from_micros(5_000));
    }
}
