//! A circuit breaker for one downstream in one process. After too many failures in a row it opens: nothing is sent for
//! a while, requests stay queued and lose no attempts. Then it lets a few calls through as probes, and closes once
//! they succeed.
//!
//! It takes the time as an argument and starts no tasks.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::Timestamp;

/// When a breaker opens and when it closes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRules {
    pub failures: NonZeroU32,
    /// How long it stays open, and how long a round of probes may take. Must be longer than a call may take.
    pub open_for: Duration,
    /// The number of calls in a round of probes. The breaker closes when all of them succeed.
    pub probes: NonZeroU32,
}

impl Default for BreakerRules {
    /// 10 failures in a row (more than the attempts of a request that fails by itself), 5 s, 3 probes.
    fn default() -> Self {
        Self {
            failures: const { NonZeroU32::new(10).expect("10 is not 0") },
            open_for: Duration::from_secs(5),
            probes: const { NonZeroU32::new(3).expect("3 is not 0") },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    Closed {
        failures: u32,
    },
    Open {
        until: Timestamp,
    },
    /// Only probes are let through.
    HalfOpen {
        /// When the next round of probes may start, if probes of this round were never reported.
        ends: Timestamp,
        admitted: u32,
        succeeded: u32,
    },
}

/// What a call reveals about the downstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownstreamHealth {
    /// It responds.
    Up,
    /// It does not respond, or fails.
    Down,
    Unknown,
}

/// The right to make one call and to report its result once. A dropped permit counts as a probe without a result.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct CallPermit {
    round: u64,
}

#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum CallAdmission {
    Allowed(CallPermit),
    Denied { until: Timestamp },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    rules: BreakerRules,
    state: BreakerState,
    /// Counts changes of state. Reports about calls from an earlier round are ignored: they say nothing about the
    /// current state.
    round: u64,
}

impl Breaker {
    #[must_use]
    pub const fn new(rules: BreakerRules) -> Self {
        Self { rules, state: BreakerState::Closed { failures: 0 }, round: 0 }
    }

    /// Returns the state as of the last call or report.
    #[must_use]
    pub const fn state(&self) -> BreakerState {
        self.state
    }

    /// Returns how many calls would be let through now, so that a worker claims no more jobs than it can call.
    #[must_use]
    pub fn available_calls(&self, now: Timestamp) -> u32 {
        match self.state_at(now) {
            BreakerState::Closed { .. } => u32::MAX,
            BreakerState::Open { .. } => 0,
            BreakerState::HalfOpen { admitted, .. } => self.rules.probes.get().saturating_sub(admitted),
        }
    }

    /// Decides whether a call may be made.
    pub fn admit(&mut self, now: Timestamp) -> CallAdmission {
        let state = self.state_at(now);
        if state != self.state {
            self.enter(state);
        }
        match &mut self.state {
            BreakerState::Closed { .. } => {}
            BreakerState::Open { until } => return CallAdmission::Denied { until: *until },
            BreakerState::HalfOpen { ends, admitted, .. } if *admitted >= self.rules.probes.get() => {
                return CallAdmission::Denied { until: *ends };
            }
            BreakerState::HalfOpen { admitted, .. } => *admitted = admitted.saturating_add(1),
        }
        CallAdmission::Allowed(CallPermit { round: self.round })
    }

    /// Records the result of a call.
    pub fn report(&mut self, permit: CallPermit, health: DownstreamHealth, now: Timestamp) {
        if permit.round != self.round {
            return;
        }
        match (&mut self.state, health) {
            (BreakerState::Closed { failures }, DownstreamHealth::Up) => *failures = 0,
            (BreakerState::Closed { failures }, DownstreamHealth::Down) => {
                *failures = failures.saturating_add(1);
                if *failures >= self.rules.failures.get() {
                    self.open(now);
                }
            }
            (BreakerState::HalfOpen { succeeded, .. }, DownstreamHealth::Up) => {
                *succeeded = succeeded.saturating_add(1);
                if *succeeded >= self.rules.probes.get() {
                    self.enter(BreakerState::Closed { failures: 0 });
                }
            }
            (BreakerState::HalfOpen { .. }, DownstreamHealth::Down) => self.open(now),
            (BreakerState::HalfOpen { admitted, .. }, DownstreamHealth::Unknown) => {
                *admitted = admitted.saturating_sub(1)
            }
            (BreakerState::Closed { .. }, DownstreamHealth::Unknown) | (BreakerState::Open { .. }, _) => {}
        }
    }

    /// Returns the state at `now`: a new round of probes once its time has come, otherwise the recorded state.
    fn state_at(&self, now: Timestamp) -> BreakerState {
        match self.state {
            BreakerState::Open { until: over } | BreakerState::HalfOpen { ends: over, .. } if now >= over => {
                BreakerState::HalfOpen { ends: now.plus(self.rules.open_for), admitted: 0, succeeded: 0 }
            }
            state => state,
        }
    }

    fn open(&mut self, now: Timestamp) {
        self.enter(BreakerState::Open { until: now.plus(self.rules.open_for) });
    }

    const fn enter(&mut self, state: BreakerState) {
        self.state = state;
        self.round = self.round.saturating_add(1);
    }
}
