//! The clocks of this process.
//!
//! [`SystemClock`] is the time of day, for engines whose state is in this process. [`SteadyClock`] measures durations.
//! Neither jumps with the system clock: between two readings, both advance with the machine's uptime.
//!
//! [`StepDetector`] detects jumps of other machines' clocks. With [`StoreClock`], an engine then corrects state that was
//! written while its clock was ahead.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use weir_core::{Clock, Timestamp};

use crate::Result;

/// A difference to the system clock of more than this is a step. Smaller ones are corrected gradually.
pub const STEP_MIN: Duration = Duration::from_secs(1);
/// How long a step of the system clock must last before it is followed. A clock that jumps and returns within this time is
/// not followed.
pub const STEP_CONFIRMED_AFTER: Duration = Duration::from_secs(5);

const STEP_MIN_US: i64 = 1_000_000;
/// Smaller differences are ignored: they are the jitter of reading two clocks one after the other.
const JITTER_US: i64 = 200;
/// A small difference is corrected at this fraction of passing time, so that time never stops or runs backwards.
const SLEW_DIVISOR: i64 = 20;
/// A correction assumes that at most this much time has passed since the last one.
const SLEWED_US_MAX: i64 = 100_000;
/// The longest time between two readings of uptime around a reading of the system clock.
const READING_US_MAX: i64 = 1_000;

/// The time of day, by the machine's uptime and slewed to the system clock.
///
/// A step of the system clock (more than [`STEP_MIN`]) is followed once it has lasted for [`STEP_CONFIRMED_AFTER`]. Only
/// then may this clock go back.
#[derive(Debug)]
pub struct SystemClock {
    /// Time of day minus uptime, in microseconds.
    offset_us: AtomicI64,
    /// The latest time returned: two threads may read the clocks in one order and return in the other.
    latest_us: AtomicI64,
    /// Whether a step is unconfirmed. If so, the follower runs even if the clocks agree again.
    has_pending_step: AtomicBool,
    follower: Mutex<Follower>,
}

impl Default for SystemClock {
    fn default() -> Self {
        let follower = Follower::new(uptime_us(), wall_us());
        Self {
            offset_us: AtomicI64::new(follower.offset_us),
            latest_us: AtomicI64::new(i64::MIN),
            has_pending_step: AtomicBool::new(false),
            follower: Mutex::new(follower),
        }
    }
}

impl SystemClock {
    /// The clock of this process. Sharing one clock ensures that it is read often enough to notice steps in time.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<SystemClock>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(Arc::default))
    }

    /// Passes both clocks to the follower, unless another thread is doing so.
    fn follow(&self) {
        let Some(mut follower) = self.follower.try_lock() else { return };
        let (before, wall, after) = (uptime_us(), wall_us(), uptime_us());
        // A thread that was suspended between the readings has read them at different moments.
        if after.saturating_sub(before) <= READING_US_MAX {
            self.offset_us.store(follower.follow(after, wall), Ordering::Relaxed);
            self.has_pending_step.store(follower.step.is_some(), Ordering::Relaxed);
        }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let difference =
            wall_us().saturating_sub(uptime_us()).saturating_sub(self.offset_us.load(Ordering::Relaxed));
        if difference.abs() > JITTER_US || self.has_pending_step.load(Ordering::Relaxed) {
            self.follow();
        }
        let now = uptime_us().saturating_add(self.offset_us.load(Ordering::Relaxed));
        let latest = self.latest_us.fetch_max(now, Ordering::Relaxed);
        if latest.saturating_sub(now) > STEP_MIN_US {
            // A step back was followed after that time was returned.
            self.latest_us.store(now, Ordering::Relaxed);
            return Timestamp::from_micros(now);
        }
        Timestamp::from_micros(now.max(latest))
    }
}

/// Follows a clock that may step, using one that never does. Pure: callers pass in what both clocks show.
#[derive(Debug)]
struct Follower {
    /// Added to uptime.
    offset_us: i64,
    /// The uptime of the last correction.
    slewed_at_us: i64,
    /// An unconfirmed step: the new offset, and the uptime at which it was first observed.
    step: Option<(i64, i64)>,
}

impl Follower {
    const fn new(uptime: i64, wall: i64) -> Self {
        Self { offset_us: wall.saturating_sub(uptime), slewed_at_us: uptime, step: None }
    }

    /// Processes a reading of both clocks and returns the present offset.
    fn follow(&mut self, uptime: i64, wall: i64) -> i64 {
        let offset = wall.saturating_sub(uptime);
        let difference = offset.saturating_sub(self.offset_us);
        if difference.abs() <= STEP_MIN_US {
            self.step = None;
            // This is not called while the clocks agree, so the time since the last call may be long.
            let elapsed = uptime.saturating_sub(self.slewed_at_us).clamp(0, SLEWED_US_MAX);
            let most = elapsed / SLEW_DIVISOR;
            self.offset_us = self.offset_us.saturating_add(difference.clamp(-most, most));
        } else {
            match self.step {
                Some((step, since)) if offset.saturating_sub(step).abs() <= STEP_MIN_US => {
                    if uptime.saturating_sub(since) >= confirmed_after_us() {
                        (self.offset_us, self.step) = (offset, None);
                    }
                }
                _ => self.step = Some((offset, uptime)),
            }
        }
        self.slewed_at_us = uptime;
        self.offset_us
    }
}

fn confirmed_after_us() -> i64 {
    i64::try_from(STEP_CONFIRMED_AFTER.as_micros()).unwrap_or(i64::MAX)
}

/// The time of day at the first reading, advanced by the machine's uptime: for measuring durations independently of the
/// system clock. All instances show the same time.
#[derive(Clone, Copy, Debug, Default)]
pub struct SteadyClock;

impl Clock for SteadyClock {
    fn now(&self) -> Timestamp {
        /// Time of day minus uptime, in microseconds.
        static OFFSET_US: OnceLock<i64> = OnceLock::new();
        let offset = *OFFSET_US.get_or_init(|| wall_us().saturating_sub(uptime_us()));
        Timestamp::from_micros(uptime_us().saturating_add(offset))
    }
}

/// The clock of an engine, and the work deferred by it.
#[async_trait]
pub trait StoreClock: Send + Sync + 'static {
    /// The present time at the engine.
    async fn time(&self) -> Result<Timestamp>;
    /// Reschedules messages and requests that were deferred while the clock was ahead of its present time: they wait as long as
    /// intended, not until the clock has caught up. Returns how many were rescheduled. Idempotent, also across servers.
    async fn reschedule_deferred(&self) -> Result<u64>;
    /// The detector of this clock's steps; `None` for the system clock of this machine, which [`SystemClock`] watches.
    fn steps(&self) -> Option<&StepDetector>;
}

/// Detects steps of a clock by comparing it with the machine's uptime.
#[derive(Debug, Default)]
pub struct StepDetector {
    observations: Mutex<Observations>,
}

#[derive(Debug, Default)]
struct Observations {
    /// Bounds of the clock's offset from uptime, in microseconds.
    offset: Option<(i64, i64)>,
    steps: Vec<i64>,
}

/// The most steps that are stored until [`StepDetector::take_steps`].
const STEPS_MAX: usize = 64;

impl StepDetector {
    /// Records what the clock showed at some moment between two readings of [`uptime`].
    pub fn observe(&self, shown: Timestamp, before: Duration, after: Duration) {
        let micros = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        let offset = (
            shown.as_micros().saturating_sub(micros(after)),
            shown.as_micros().saturating_sub(micros(before)),
        );
        let mut observations = self.observations.lock();
        let step = match observations.offset {
            Some((_, most)) if offset.0.saturating_sub(most) > STEP_MIN_US => offset.0.saturating_sub(most),
            Some((least, _)) if least.saturating_sub(offset.1) > STEP_MIN_US => {
                offset.1.saturating_sub(least)
            }
            _ => 0,
        };
        if step != 0 && observations.steps.len() < STEPS_MAX {
            observations.steps.push(step);
        }
        // A slow answer gives wide bounds, which replace narrower ones only after a step.
        let is_narrower = observations.offset.is_none_or(|(least, most)| {
            offset.1.saturating_sub(offset.0) <= most.saturating_sub(least).max(STEP_MIN_US / 2)
        });
        if step != 0 || is_narrower {
            observations.offset = Some(offset);
        }
    }

    /// Whether the clock has been observed at all.
    pub fn has_observed(&self) -> bool {
        self.observations.lock().offset.is_some()
    }

    /// The steps since the last call, in microseconds.
    pub fn take_steps(&self) -> Vec<i64> {
        std::mem::take(&mut self.observations.lock().steps)
    }
}

#[must_use]
pub fn uptime() -> Duration {
    Duration::from_micros(uptime_us().max(0).unsigned_abs())
}

/// What the system clock shows, without any correction.
#[must_use]
pub fn system_time() -> Timestamp {
    Timestamp::from_micros(wall_us())
}

/// What the system clock shows, in microseconds since the epoch.
fn wall_us() -> i64 {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_micros()).unwrap_or(i64::MAX),
        Err(_before_epoch) => 0,
    }
}

/// The machine's uptime in microseconds, including time in which it was suspended: a window ends on time even if the machine
/// slept through its end.
fn uptime_us() -> i64 {
    let uptime = clock_gettime(UPTIME);
    uptime.tv_sec.saturating_mul(1_000_000).saturating_add(uptime.tv_nsec / 1_000)
}

#[cfg(target_os = "linux")]
const UPTIME: ClockId = ClockId::Boottime;
#[cfg(not(target_os = "linux"))]
const UPTIME: ClockId = ClockId::Monotonic;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000;
    const HOUR: i64 = 3_600 * SECOND;

    /// A follower whose two clocks agreed at 0.
    struct Simulation {
        follower: Follower,
        uptime: i64,
    }

    impl Simulation {
        fn new() -> Self {
            Self { follower: Follower::new(0, 0), uptime: 0 }
        }

        /// Lets `span` of uptime pass while the system clock is `off` by a constant. Returns the follower's offset.
        fn pass(&mut self, span: i64, off: i64) -> i64 {
            let until = self.uptime + span;
            let mut latest = self.uptime + self.follower.offset_us;
            while self.uptime < until {
                self.uptime += 10_000;
                let now = self.uptime + self.follower.follow(self.uptime, self.uptime + off);
                let is_followed = self.follower.offset_us == off;
                assert!(now >= latest || is_followed, "time ran back at {}", self.uptime);
                latest = now;
            }
            self.follower.offset_us
        }
    }

    #[test]
    fn a_clock_that_jumps_and_returns_is_not_followed() {
        for jump in [2 * HOUR, -2 * HOUR] {
            let mut simulation = Simulation::new();
            assert_eq!(simulation.pass(300_000, jump), 0);
            assert_eq!(simulation.pass(4_000_000, jump), 0);
            assert_eq!(simulation.pass(10 * SECOND, 0), 0);
            assert_eq!(simulation.follower.step, None);
        }
    }

    #[test]
    fn a_difference_after_a_long_time_is_corrected_gradually_too() {
        let mut follower = Follower::new(0, 0);
        assert_eq!(follower.follow(99 * SECOND, 99 * SECOND + 900_000), 5_000);
    }

    #[test]
    fn a_clock_that_jumps_and_returns_twice_is_not_followed() {
        let clock = SystemClock::default();
        let offset = clock.offset_us.load(Ordering::Relaxed);
        for _ in 0..2 {
            // As if the follower had observed a jump long ago.
            let long_ago = uptime_us() - HOUR;
            clock.follower.lock().step = Some((offset + 2 * HOUR, long_ago));
            clock.has_pending_step.store(true, Ordering::Relaxed);
            clock.now();
            assert_eq!(clock.follower.lock().step, None, "the clocks agree, so there is no step");
        }
    }

    #[test]
    fn a_step_that_lasts_is_followed_forward_and_back() {
        for jump in [2 * HOUR, -2 * HOUR] {
            let mut simulation = Simulation::new();
            assert_eq!(simulation.pass(5 * SECOND, jump), 0, "not before it is confirmed");
            assert_eq!(simulation.pass(SECOND, jump), jump);
            assert_eq!(simulation.pass(6 * SECOND, 0), 0, "and back");
        }
    }

    #[test]
    fn a_clock_that_keeps_jumping_is_not_followed_until_it_stops() {
        let mut simulation = Simulation::new();
        for n in 1..20 {
            assert_eq!(simulation.pass(2 * SECOND, n * HOUR), 0);
        }
        assert_eq!(simulation.pass(6 * SECOND, HOUR), HOUR);
    }

    #[test]
    fn small_differences_are_corrected_gradually_and_time_never_runs_backwards() {
        let mut simulation = Simulation::new();
        assert_eq!(simulation.pass(2 * SECOND, 900_000), 100_000);
        assert_eq!(simulation.pass(20 * SECOND, 900_000), 900_000);
        assert_eq!(simulation.pass(2 * SECOND, 0), 800_000);
        assert_eq!(simulation.pass(20 * SECOND, 0), 0);
    }

    #[test]
    fn the_clock_never_returns_an_earlier_time() {
        let clock = SystemClock::default();
        let mut latest = clock.now();
        for _ in 0..10_000 {
            let now = clock.now();
            assert!(now >= latest);
            latest = now;
        }
    }

    #[test]
    fn a_time_returned_before_a_step_back_does_not_hold_the_clock() {
        let clock = SystemClock::default();
        let before = clock.now();
        clock.latest_us.store(before.as_micros() + HOUR, Ordering::Relaxed);
        assert!(clock.now().since(before) < Duration::from_secs(60));
        assert!(clock.now() >= before);
    }

    /// A detector that has observed a clock at 1,000 s of uptime, within 1 ms.
    fn detector() -> (StepDetector, impl Fn(u64) -> Duration) {
        let detector = StepDetector::default();
        let uptime = |ms: u64| Duration::from_millis(1_000_000 + ms);
        detector.observe(Timestamp::from_seconds(50_000), uptime(0), uptime(1));
        (detector, uptime)
    }

    fn shown(ms: i64) -> Timestamp {
        Timestamp::from_micros(50_000 * SECOND + ms * 1_000)
    }

    #[test]
    fn a_step_of_another_clock_is_detected_once_in_both_directions() {
        let (detector, uptime) = detector();
        detector.observe(shown(7_200_300), uptime(300), uptime(301));
        detector.observe(shown(7_200_400), uptime(400), uptime(401));
        assert!(
            matches!(detector.take_steps()[..], [step] if (7_199_000_000..=7_201_000_000).contains(&step))
        );
        detector.observe(shown(500), uptime(500), uptime(501));
        assert!(
            matches!(detector.take_steps()[..], [step] if (-7_201_000_000..=-7_199_000_000).contains(&step))
        );
        assert_eq!(detector.take_steps(), []);
    }

    #[test]
    fn a_late_reading_is_not_a_step() {
        let (detector, uptime) = detector();
        // The clock was read at 100 ms, and this process got the answer half a minute later.
        detector.observe(shown(100), uptime(99), uptime(30_000));
        detector.observe(shown(30_100), uptime(30_100), uptime(30_101));
        assert_eq!(detector.take_steps(), []);
    }

    #[test]
    fn drift_is_not_a_step() {
        let (detector, uptime) = detector();
        for n in 1..1_000 {
            let ms = n * 5_000;
            detector.observe(
                shown(ms + ms / 1_000),
                uptime(ms.unsigned_abs()),
                uptime(ms.unsigned_abs() + 2),
            );
        }
        assert_eq!(detector.take_steps(), []);
    }

    #[test]
    fn both_clocks_show_the_time_of_day() {
        let day = Timestamp::from_micros(wall_us());
        for now in [SystemClock::default().now(), SteadyClock.now()] {
            assert!(now.since(day) < Duration::from_secs(60) && day.since(now) < Duration::from_secs(60));
        }
    }
}
