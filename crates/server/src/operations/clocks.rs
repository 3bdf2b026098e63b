//! Watches the clocks that decide: this machine's, the store's and Redis's.
//!
//! A clock that steps ends windows early or holds state in the future. The rules and engines see to it that nobody is kept out
//! for longer than their own window; this module tells operators, and has the store bring back what waits for a time that is
//! further away than it should be.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use weir_core::{Clock, Timestamp};
use weir_store::clock::{STEP_CONFIRMED_AFTER, StepDetector, system_time, uptime};
use weir_store::denial_cache::DenialCache;
use weir_store::limit_changes::LimitChange;
use weir_store::{StoreClock, SystemClock};
use weir_store_redis::Redis;

use crate::engines::Engines;
use crate::telemetry::metrics::{ClockLabels, ClockSteps};

/// How often the system clock is looked at: a jump that lasts for less may go unnoticed, and is not followed either.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often the clocks of other machines are asked for.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// When what waits is looked at again after a step: the clock of this process follows one only after a while.
const AGAIN_AFTER: Duration = STEP_CONFIRMED_AFTER.saturating_mul(2);
/// How long `/health` tells of a step.
const TOLD_FOR: Duration = Duration::from_secs(600);

/// The name of this machine's clock in metrics, logs and `/health`.
const SYSTEM: &str = "system";

/// The last step of a clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockStep {
    /// By how many seconds; negative when it was set back.
    pub(crate) seconds: f64,
    /// When it was noticed, by the clock after the step.
    pub(crate) at: Timestamp,
    uptime: Duration,
}

/// How a clock goes, as far as is known.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ClockState {
    /// It has not been seen yet.
    Unknown,
    Steady,
    /// It has stepped lately.
    Stepped(ClockStep),
}

/// The clocks that decide.
pub(crate) struct Clocks {
    store: Arc<dyn StoreClock>,
    store_name: &'static str,
    redis: Option<Redis>,
    /// What is remembered of users over their limit, until a time that a step makes doubtful.
    denials: Arc<DenialCache>,
    system: StepDetector,
    /// By the address of the server.
    redis_steps: Mutex<HashMap<String, StepDetector>>,
    last: Mutex<BTreeMap<&'static str, ClockStep>>,
    steps: ClockSteps,
}

impl Clocks {
    pub(crate) fn new(engines: &Engines, denials: Arc<DenialCache>, steps: ClockSteps) -> Arc<Self> {
        let clocks = Self {
            store: Arc::clone(&engines.store.clock),
            store_name: engines.store.name,
            redis: engines.redis.clone(),
            denials,
            system: StepDetector::default(),
            redis_steps: Mutex::default(),
            last: Mutex::default(),
            steps,
        };
        clocks.look_at_system();
        // From 0 on: Prometheus takes a counter that begins with 1 for one that has not moved.
        for clock in clocks.report().into_keys() {
            drop(clocks.steps.get_or_create(&ClockLabels { clock }));
        }
        Arc::new(clocks)
    }

    /// How every clock goes that decides.
    pub(crate) fn report(&self) -> BTreeMap<&'static str, ClockState> {
        let last = self.last.lock();
        let state = |name: &'static str, is_seen: bool| {
            let lately = last.get(name).filter(|step| uptime().saturating_sub(step.uptime) < TOLD_FOR);
            let state = match (lately, is_seen) {
                (Some(step), _) => ClockState::Stepped(*step),
                (None, true) => ClockState::Steady,
                (None, false) => ClockState::Unknown,
            };
            (name, state)
        };
        let store = self.store.steps().map(|steps| state(self.store_name, steps.has_seen()));
        let redis =
            self.redis.as_ref().map(|_| state(weir_store_redis::ENGINE, !self.redis_steps.lock().is_empty()));
        [Some(state(SYSTEM, true)), store, redis].into_iter().flatten().collect()
    }

    /// Watches until told to stop.
    pub(crate) async fn watch(self: Arc<Self>, closing: CancellationToken) {
        let mut ask_at = uptime();
        // Once at the start: the clock may have been set back while no server was there to see it.
        let mut bring_back_at = vec![uptime()];
        loop {
            let now = uptime();
            self.look_at_system();
            if now >= ask_at {
                ask_at = now + ASK_EVERY;
                self.ask_others().await;
            }
            if self.tell_of_steps() {
                bring_back_at = vec![now, now + AGAIN_AFTER];
            }
            if bring_back_at.first().is_some_and(|at| *at <= now) {
                if self.bring_back().await {
                    bring_back_at.remove(0);
                } else {
                    bring_back_at[0] = now + ASK_EVERY;
                }
            }
            if closing.run_until_cancelled(tokio::time::sleep(LOOK_EVERY)).await.is_none() {
                return;
            }
        }
    }

    /// Notices a step of the system clock, and lets this process's own clock follow it.
    fn look_at_system(&self) {
        let asked = uptime();
        self.system.observe(system_time(), asked, uptime());
        let _ = SystemClock::shared().now();
    }

    async fn ask_others(&self) {
        if self.store.steps().is_some() {
            // An outage shows elsewhere.
            let _ = self.store.time().await;
        }
        let Some(redis) = &self.redis else { return };
        let times = redis.server_times().await;
        let mut detectors = self.redis_steps.lock();
        detectors.retain(|address, _| times.is_empty() || times.iter().any(|(known, ..)| known == address));
        for (address, shown, [asked, answered]) in times {
            detectors.entry(address).or_default().observe(shown, asked, answered);
        }
    }

    /// Forgets what was remembered by another time, and has the store bring back what waits for too long. Says whether the store
    /// could be asked.
    async fn bring_back(&self) -> bool {
        self.denials.invalidate(&LimitChange::AllUsers);
        match self.store.reschedule_deferred().await {
            Ok(0) => true,
            Ok(count) => {
                tracing::warn!(count, "brought back work that was put off before the clock was set back");
                true
            }
            Err(_unavailable) => false,
        }
    }

    /// Tells of the steps since the last look, and says whether there were any.
    fn tell_of_steps(&self) -> bool {
        let of_redis: Vec<i64> =
            self.redis_steps.lock().values().flat_map(StepDetector::take_steps).collect();
        let of_store = self.store.steps().map(StepDetector::take_steps).unwrap_or_default();
        let all = [
            (SYSTEM, self.system.take_steps()),
            (self.store_name, of_store),
            (weir_store_redis::ENGINE, of_redis),
        ];
        let mut any = false;
        for (clock, steps) in all {
            for step in steps {
                any = true;
                self.tell(clock, step);
            }
        }
        any
    }

    #[expect(clippy::cast_precision_loss, reason = "a number to read")]
    fn tell(&self, clock: &'static str, step_us: i64) {
        let seconds = step_us as f64 / 1e6;
        tracing::warn!(
            clock,
            stepped_by_seconds = seconds,
            "the clock of {clock} has stepped by {seconds:+.1} s; check its time synchronization"
        );
        self.steps.get_or_create(&ClockLabels { clock }).inc();
        let step = ClockStep { seconds, at: system_time(), uptime: uptime() };
        self.last.lock().insert(clock, step);
    }
}
