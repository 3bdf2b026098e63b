//! Watches the clocks that decide: this machine's, the store's and Redis's.
//!
//! A step of a clock ends windows early or leaves state in the future. The rules and engines make sure that nobody is locked
//! out for longer than their own window. This module reports steps to operators and has the store reschedule deferred work
//! that would otherwise wait for too long.

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
use crate::operations::events::{ClockStepped, DeferredWorkRescheduled};
use crate::operations::metrics::OperationsMetrics;

/// How often the system clock is read. A shorter jump may go unnoticed; it is not followed, either.
const SYSTEM_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often the clocks of other machines are read.
const ENGINE_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long after a step deferred work is rescheduled a second time: this process's clock follows a step only after a while.
const SECOND_RESCHEDULE_AFTER: Duration = STEP_CONFIRMED_AFTER.saturating_mul(2);
/// How long `/health` shows a step.
const SHOWN_FOR: Duration = Duration::from_secs(600);

/// The name of this machine's clock in metrics, logs and `/health`.
const SYSTEM: &str = "system";

/// The last step of a clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockStep {
    /// Negative if the clock was set back.
    pub(crate) seconds: f64,
    /// When the step was noticed, by the clock after the step.
    pub(crate) at: Timestamp,
    uptime: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ClockState {
    /// The clock has not been read yet.
    Unknown,
    Steady,
    /// The clock has stepped within the last ten minutes.
    Stepped(ClockStep),
}

/// The clocks that decide.
pub(crate) struct Clocks {
    store: Arc<dyn StoreClock>,
    store_name: &'static str,
    redis: Option<Redis>,
    /// Cached denials, whose end times a step invalidates.
    denials: Arc<DenialCache>,
    system: StepDetector,
    /// By the address of the Redis server.
    redis_steps: Mutex<HashMap<String, StepDetector>>,
    last: Mutex<BTreeMap<&'static str, ClockStep>>,
    metrics: OperationsMetrics,
}

impl Clocks {
    pub(crate) fn new(engines: &Engines, denials: Arc<DenialCache>, metrics: OperationsMetrics) -> Arc<Self> {
        let clocks = Self {
            store: Arc::clone(&engines.store.clock),
            store_name: engines.store.name,
            redis: engines.redis.clone(),
            denials,
            system: StepDetector::default(),
            redis_steps: Mutex::default(),
            last: Mutex::default(),
            metrics,
        };
        clocks.observe_system_clock();
        // Shown as 0 from the start: Prometheus sees no increase in a counter that first appears as 1.
        for clock in clocks.report().into_keys() {
            let _ = clocks.metrics.clock_steps(clock);
        }
        Arc::new(clocks)
    }

    /// The state of every clock.
    pub(crate) fn report(&self) -> BTreeMap<&'static str, ClockState> {
        let last = self.last.lock();
        let state = |name: &'static str, was_read: bool| {
            let recent = last.get(name).filter(|step| uptime().saturating_sub(step.uptime) < SHOWN_FOR);
            let state = match (recent, was_read) {
                (Some(step), _) => ClockState::Stepped(*step),
                (None, true) => ClockState::Steady,
                (None, false) => ClockState::Unknown,
            };
            (name, state)
        };
        let store = self.store.steps().map(|steps| state(self.store_name, steps.has_observed()));
        let redis =
            self.redis.as_ref().map(|_| state(weir_store_redis::ENGINE, !self.redis_steps.lock().is_empty()));
        [Some(state(SYSTEM, true)), store, redis].into_iter().flatten().collect()
    }

    /// Watches the clocks until `closing` is cancelled.
    pub(crate) async fn watch(self: Arc<Self>, closing: CancellationToken) {
        let mut next_engine_poll = uptime();
        // Also at the start: the clock may have been set back while no server was running.
        let mut reschedule_at = vec![uptime()];
        loop {
            let now = uptime();
            self.observe_system_clock();
            if now >= next_engine_poll {
                next_engine_poll = now + ENGINE_POLL_INTERVAL;
                self.observe_engine_clocks().await;
            }
            if self.record_steps() {
                reschedule_at = vec![now, now + SECOND_RESCHEDULE_AFTER];
            }
            if reschedule_at.first().is_some_and(|at| *at <= now) {
                if self.reschedule_deferred_work().await {
                    reschedule_at.remove(0);
                } else {
                    reschedule_at[0] = now + ENGINE_POLL_INTERVAL;
                }
            }
            if closing.run_until_cancelled(tokio::time::sleep(SYSTEM_POLL_INTERVAL)).await.is_none() {
                return;
            }
        }
    }

    /// Detects steps of the system clock and lets this process's own clock follow them.
    fn observe_system_clock(&self) {
        let asked_at = uptime();
        self.system.observe(system_time(), asked_at, uptime());
        let _ = SystemClock::shared().now();
    }

    async fn observe_engine_clocks(&self) {
        if self.store.steps().is_some() {
            // Health checks report an outage.
            let _ = self.store.time().await;
        }
        let Some(redis) = &self.redis else { return };
        let times = redis.server_times().await;
        let mut detectors = self.redis_steps.lock();
        detectors
            .retain(|address, _| times.is_empty() || times.iter().any(|(answered, ..)| answered == address));
        for (address, time, [asked_at, answered_at]) in times {
            detectors.entry(address).or_default().observe(time, asked_at, answered_at);
        }
    }

    /// Clears cached denials and has the store reschedule work that was deferred before a step. Returns whether the store
    /// answered.
    async fn reschedule_deferred_work(&self) -> bool {
        self.denials.invalidate(&LimitChange::AllUsers);
        match self.store.reschedule_deferred().await {
            Ok(0) => true,
            Ok(count) => {
                DeferredWorkRescheduled { count }.emit();
                true
            }
            Err(_unavailable) => false,
        }
    }

    /// Records new steps and returns whether there were any.
    fn record_steps(&self) -> bool {
        let redis: Vec<i64> = self.redis_steps.lock().values().flat_map(StepDetector::take_steps).collect();
        let store = self.store.steps().map(StepDetector::take_steps).unwrap_or_default();
        let all =
            [(SYSTEM, self.system.take_steps()), (self.store_name, store), (weir_store_redis::ENGINE, redis)];
        let mut any = false;
        for (clock, steps) in all {
            for step in steps {
                any = true;
                self.record_step(clock, step);
            }
        }
        any
    }

    #[expect(clippy::cast_precision_loss, reason = "the number is for people")]
    fn record_step(&self, clock: &'static str, step_us: i64) {
        let seconds = step_us as f64 / 1e6;
        ClockStepped { clock, seconds }.emit(&self.metrics);
        let step = ClockStep { seconds, at: system_time(), uptime: uptime() };
        self.last.lock().insert(clock, step);
    }
}
