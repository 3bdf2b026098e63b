//! The clocks of this process.
//!
//! [`SystemClock`] tells what time it is, for the engine whose state lives here. [`SteadyClock`] tells how long something
//! takes. Neither follows a system clock that jumps: between two readings both move as the machine's uptime does.
//!
//! The clocks of other machines are theirs. [`StepDetector`] notices when one of them jumps, and [`StoreClock`] is what an
//! engine then does for state that was written while its clock was ahead.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use weir_core::{Clock, Timestamp};

use crate::Result;

/// A difference to the system clock of more than this is a step. Smaller ones are made up for gradually.
pub const STEP_MIN: Duration = Duration::from_secs(1);
/// How long the system clock must keep to its new time before a step is followed. A clock that jumps and returns within this
/// time is not followed at all.
pub const STEP_CONFIRMED_AFTER: Duration = Duration::from_secs(5);

const STEP_MIN_US: i64 = 1_000_000;
/// Differences below this are left alone: they are the jitter of reading two clocks one after the other.
const JITTER_US: i64 = 200;
/// A small difference is made up for at this fraction of passing time, so that time never stands still or runs back.
const SLEW_DIVISOR: i64 = 20;
/// The most time that is made up for at once.
const SLEWED_US_MAX: i64 = 100_000;
/// Two readings of uptime around one of the system clock may be so far apart.
const READING_US_MAX: i64 = 1_000;

/// The time of day, by the machine's uptime and slewed to the system clock.
///
/// A step of the system clock (more than [`STEP_MIN`]) is followed once it has lasted for [`STEP_CONFIRMED_AFTER`]. That is the
/// only moment at which this clock may go back.
#[derive(Debug)]
pub struct SystemClock {
    /// Microseconds from uptime to the time of day.
    offset_us: AtomicI64,
    /// The latest answer: two threads may read their clocks in one order and answer in the other.
    latest_us: AtomicI64,
    /// Whether a step waits to be confirmed: the follower is asked even where the clocks agree again.
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
    /// The clock of this process. It is read often enough to notice a step in time, whoever else reads it.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<SystemClock>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(Arc::default))
    }

    /// Lets the follower see both clocks, unless another thread does so just now.
    fn follow(&self) {
        let Some(mut follower) = self.follower.try_lock() else { return };
        let (before, wall, after) = (uptime_us(), wall_us(), uptime_us());
        // A thread that was held up between the readings has seen two different moments.
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
            // A step back was followed since that answer.
            self.latest_us.store(now, Ordering::Relaxed);
            return Timestamp::from_micros(now);
        }
        Timestamp::from_micros(now.max(latest))
    }
}

/// Follows a clock that may step, by one that never does. Pure: it is told what both clocks show.
#[derive(Debug)]
struct Follower {
    /// What is added to uptime.
    offset_us: i64,
    /// The uptime up to which differences are made up for.
    slewed_at_us: i64,
    /// A step that waits to be confirmed: the new offset, and the uptime at which it was first seen.
    step: Option<(i64, i64)>,
}

impl Follower {
    const fn new(uptime: i64, wall: i64) -> Self {
        Self { offset_us: wall.saturating_sub(uptime), slewed_at_us: uptime, step: None }
    }

    /// Takes note of what both clocks show and returns the offset that holds now.
    fn follow(&mut self, uptime: i64, wall: i64) -> i64 {
        let seen = wall.saturating_sub(uptime);
        let difference = seen.saturating_sub(self.offset_us);
        if difference.abs() <= STEP_MIN_US {
            self.step = None;
            // Nobody asks while the clocks agree, so what has passed since the last time says little.
            let elapsed = uptime.saturating_sub(self.slewed_at_us).clamp(0, SLEWED_US_MAX);
            let most = elapsed / SLEW_DIVISOR;
            self.offset_us = self.offset_us.saturating_add(difference.clamp(-most, most));
        } else {
            match self.step {
                Some((step, since)) if seen.saturating_sub(step).abs() <= STEP_MIN_US => {
                    if uptime.saturating_sub(since) >= confirmed_after_us() {
                        (self.offset_us, self.step) = (seen, None);
                    }
                }
                _ => self.step = Some((seen, uptime)),
            }
        }
        self.slewed_at_us = uptime;
        self.offset_us
    }
}

fn confirmed_after_us() -> i64 {
    i64::try_from(STEP_CONFIRMED_AFTER.as_micros()).unwrap_or(i64::MAX)
}

/// The time of day when the process first asked for it, and from then on the machine's uptime: for how long something takes,
/// whatever becomes of the system clock. All clocks of this kind show the same.
#[derive(Clone, Copy, Debug, Default)]
pub struct SteadyClock;

impl Clock for SteadyClock {
    fn now(&self) -> Timestamp {
        /// Microseconds from uptime to the time of day.
        static OFFSET_US: OnceLock<i64> = OnceLock::new();
        let offset = *OFFSET_US.get_or_init(|| wall_us().saturating_sub(uptime_us()));
        Timestamp::from_micros(uptime_us().saturating_add(offset))
    }
}

/// The clock of an engine, and what was put off by it.
#[async_trait]
pub trait StoreClock: Send + Sync + 'static {
    /// What time it is there.
    async fn time(&self) -> Result<Timestamp>;
    /// Brings back messages and requests that were put off while the clock was ahead of where it is now: they wait for as long as
    /// they were to wait, and not until the clock has caught up. Returns how many there were. Nothing changes when it is called
    /// again, or by another server.
    async fn reschedule_deferred(&self) -> Result<u64>;
    /// Notices steps of this clock; none where it is the system clock of this machine, which the process watches itself.
    fn steps(&self) -> Option<&StepDetector>;
}

/// Notices steps of a clock by comparing it with the machine's uptime.
#[derive(Debug, Default)]
pub struct StepDetector {
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Between which two numbers of microseconds the clock is ahead of uptime.
    offset: Option<(i64, i64)>,
    steps: Vec<i64>,
}

/// Steps that are kept until somebody asks for them.
const STEPS_MAX: usize = 64;

impl StepDetector {
    /// Takes note of what the clock showed at some moment between two readings of [`uptime`].
    pub fn observe(&self, shown: Timestamp, asked: Duration, answered: Duration) {
        let micros = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        let offset = (
            shown.as_micros().saturating_sub(micros(answered)),
            shown.as_micros().saturating_sub(micros(asked)),
        );
        let mut seen = self.seen.lock();
        let step = match seen.offset {
            Some((_, most)) if offset.0.saturating_sub(most) > STEP_MIN_US => offset.0.saturating_sub(most),
            Some((least, _)) if least.saturating_sub(offset.1) > STEP_MIN_US => {
                offset.1.saturating_sub(least)
            }
            _ => 0,
        };
        if step != 0 && seen.steps.len() < STEPS_MAX {
            seen.steps.push(step);
        }
        // An answer that took long says little: it replaces what is known only where it says something else.
        let is_narrower = seen.offset.is_none_or(|(least, most)| {
            offset.1.saturating_sub(offset.0) <= most.saturating_sub(least).max(STEP_MIN_US / 2)
        });
        if step != 0 || is_narrower {
            seen.offset = Some(offset);
        }
    }

    /// Whether the clock has been seen at all.
    pub fn has_seen(&self) -> bool {
        self.seen.lock().offset.is_some()
    }

    /// The steps since the last call, in microseconds.
    pub fn take_steps(&self) -> Vec<i64> {
        std::mem::take(&mut self.seen.lock().steps)
    }
}

/// How long the machine has been up.
#[must_use]
pub fn uptime() -> Duration {
    Duration::from_micros(uptime_us().max(0).unsigned_abs())
}

/// What the system clock shows, wherever it has been set.
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

/// How long the machine has been up, in microseconds, time in which it was suspended included: a window ends on time for a
/// machine that slept through it.
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

    /// A follower whose two clocks agreed at 0, and the time it tells after each step of `every` while the system clock is `off`.
    struct Simulation {
        follower: Follower,
        uptime: i64,
    }

    impl Simulation {
        fn new() -> Self {
            Self { follower: Follower::new(0, 0), uptime: 0 }
        }

        /// Lets uptime pass, with the system clock `off` by so much, and returns how far the answers are from uptime.
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
    fn a_difference_after_a_long_time_is_made_up_for_as_gradually() {
        let mut follower = Follower::new(0, 0);
        assert_eq!(follower.follow(99 * SECOND, 99 * SECOND + 900_000), 5_000);
    }

    #[test]
    fn a_clock_that_blinks_twice_is_not_followed() {
        let clock = SystemClock::default();
        let offset = clock.offset_us.load(Ordering::Relaxed);
        for _ in 0..2 {
            // As if the follower had seen a jump long ago.
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
    fn a_clock_that_jumps_about_is_not_followed_until_it_rests() {
        let mut simulation = Simulation::new();
        for n in 1..20 {
            assert_eq!(simulation.pass(2 * SECOND, n * HOUR), 0);
        }
        assert_eq!(simulation.pass(6 * SECOND, HOUR), HOUR);
    }

    #[test]
    fn small_differences_are_made_up_for_gradually_and_time_never_runs_back() {
        let mut simulation = Simulation::new();
        assert_eq!(simulation.pass(2 * SECOND, 900_000), 100_000);
        assert_eq!(simulation.pass(20 * SECOND, 900_000), 900_000);
        assert_eq!(simulation.pass(2 * SECOND, 0), 800_000);
        assert_eq!(simulation.pass(20 * SECOND, 0), 0);
    }

    #[test]
    fn the_clock_never_answers_with_an_earlier_time() {
        let clock = SystemClock::default();
        let mut latest = clock.now();
        for _ in 0..10_000 {
            let now = clock.now();
            assert!(now >= latest);
            latest = now;
        }
    }

    #[test]
    fn an_answer_from_before_a_step_back_is_not_kept_to() {
        let clock = SystemClock::default();
        let before = clock.now();
        clock.latest_us.store(before.as_micros() + HOUR, Ordering::Relaxed);
        assert!(clock.now().since(before) < Duration::from_secs(60));
        assert!(clock.now() >= before);
    }

    /// A detector that has seen a clock at 1,000 s of uptime, within 1 ms.
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
    fn a_step_of_another_clock_is_noticed_both_ways_and_once() {
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
    fn a_late_answer_is_no_step() {
        let (detector, uptime) = detector();
        // Read at 100 ms, and answered when this process ran again, half a minute later.
        detector.observe(shown(100), uptime(99), uptime(30_000));
        detector.observe(shown(30_100), uptime(30_100), uptime(30_101));
        assert_eq!(detector.take_steps(), []);
    }

    #[test]
    fn a_clock_that_drifts_is_no_step() {
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
    fn both_clocks_tell_the_time_of_day() {
        let day = Timestamp::from_micros(wall_us());
        for now in [SystemClock::default().now(), SteadyClock.now()] {
            assert!(now.since(day) < Duration::from_secs(60) && day.since(now) < Duration::from_secs(60));
        }
    }
}
