//! Whether a downstream is worth calling. After too many failures in a row nothing is sent to it for a while: requests
//! stay queued and lose no attempts. Then a few calls are let through as probes; only when they succeed do the others
//! follow.
//!
//! A breaker is the memory of one process about one downstream. It takes the time as an argument and starts nothing.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::Timestamp;

/// When a breaker opens and how it closes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerRules {
    /// Failures in a row that open it.
    pub failures: NonZeroU32,
    /// How long it stays open; also how long a round of probes may take. Longer than a call may take.
    pub open_for: Duration,
    /// Calls let through in a round of probes. It closes when all of them succeed.
    pub probes: NonZeroU32,
}

impl Default for BreakerRules {
    /// 10 failures in a row (more than the attempts of one request that fails by itself), 5 s, 3 probes.
    fn default() -> Self {
        Self {
            failures: const { NonZeroU32::new(10).expect("10 is not 0") },
            open_for: Duration::from_secs(5),
            probes: const { NonZeroU32::new(3).expect("3 is not 0") },
        }
    }
}

/// What a breaker does at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Every call goes through.
    Closed {
        /// Failures since the last success.
        failures: u32,
    },
    /// No call goes through.
    Open {
        /// When probes begin.
        until: Timestamp,
    },
    /// Probes go through and nothing else.
    HalfOpen {
        /// When a round whose probes were never reported gives way to another one.
        ends: Timestamp,
        /// Probes let through in this round.
        admitted: u32,
        /// How many of them have succeeded.
        succeeded: u32,
    },
}

/// What a call says about the downstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownstreamHealth {
    /// It answers.
    Up,
    /// It does not, or fails.
    Down,
    /// The call was not made after all.
    Unknown,
}

/// The right to make one call, and to report once what came of it. A permit that is dropped is a probe without an answer.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct CallPermit {
    round: u64,
}

/// Whether a call may be made.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum CallAdmission {
    /// Yes.
    Allowed(CallPermit),
    /// Not now.
    Denied {
        /// When to ask again.
        until: Timestamp,
    },
}

/// One process's memory of how one downstream does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    rules: BreakerRules,
    state: BreakerState,
    /// Counts changes of state. What is reported about a call from before the last one says nothing about the present.
    round: u64,
}

impl Breaker {
    /// A breaker that lets everything through.
    #[must_use]
    pub const fn new(rules: BreakerRules) -> Self {
        Self { rules, state: BreakerState::Closed { failures: 0 }, round: 0 }
    }

    /// What it does, as of the last call or report.
    #[must_use]
    pub const fn state(&self) -> BreakerState {
        self.state
    }

    /// How many calls it would let through now: for claiming no more work than can be done.
    #[must_use]
    pub fn available_calls(&self, now: Timestamp) -> u32 {
        match self.state_at(now) {
            BreakerState::Closed { .. } => u32::MAX,
            BreakerState::Open { .. } => 0,
            BreakerState::HalfOpen { admitted, .. } => self.rules.probes.get().saturating_sub(admitted),
        }
    }

    /// Asks to make a call.
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

    /// Takes in what came of a call.
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

    /// The state that time alone makes of the present one: a new round of probes, or no change.
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
