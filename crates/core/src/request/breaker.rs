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
pub struct Rules {
    /// Failures in a row that open it.
    pub failures: NonZeroU32,
    /// How long it stays open; also how long a round of probes may take. Longer than a call may take.
    pub open_for: Duration,
    /// Calls let through in a round of probes. It closes when all of them succeed.
    pub probes: NonZeroU32,
}

impl Default for Rules {
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
pub enum State {
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
pub enum Health {
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
pub struct Permit {
    round: u64,
}

/// Whether a call may be made.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Admission {
    /// Yes.
    Pass(Permit),
    /// Not now.
    Park {
        /// When to ask again.
        until: Timestamp,
    },
}

/// One process's memory of how one downstream does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    rules: Rules,
    state: State,
    /// Counts changes of state. What is reported about a call from before the last one says nothing about the present.
    round: u64,
}

impl Breaker {
    /// A breaker that lets everything through.
    #[must_use]
    pub const fn new(rules: Rules) -> Self {
        Self { rules, state: State::Closed { failures: 0 }, round: 0 }
    }

    /// What it does, as of the last call or report.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// How many calls it would let through now: for claiming no more work than can be done.
    #[must_use]
    pub fn room(&self, now: Timestamp) -> u32 {
        match self.state_at(now) {
            State::Closed { .. } => u32::MAX,
            State::Open { .. } => 0,
            State::HalfOpen { admitted, .. } => self.rules.probes.get().saturating_sub(admitted),
        }
    }

    /// Asks to make a call.
    pub fn admit(&mut self, now: Timestamp) -> Admission {
        let state = self.state_at(now);
        if state != self.state {
            self.turn(state);
        }
        match &mut self.state {
            State::Closed { .. } => {}
            State::Open { until } => return Admission::Park { until: *until },
            State::HalfOpen { ends, admitted, .. } if *admitted >= self.rules.probes.get() => {
                return Admission::Park { until: *ends };
            }
            State::HalfOpen { admitted, .. } => *admitted = admitted.saturating_add(1),
        }
        Admission::Pass(Permit { round: self.round })
    }

    /// Takes in what came of a call.
    pub fn report(&mut self, permit: Permit, health: Health, now: Timestamp) {
        if permit.round != self.round {
            return;
        }
        match (&mut self.state, health) {
            (State::Closed { failures }, Health::Up) => *failures = 0,
            (State::Closed { failures }, Health::Down) => {
                *failures = failures.saturating_add(1);
                if *failures >= self.rules.failures.get() {
                    self.open(now);
                }
            }
            (State::HalfOpen { succeeded, .. }, Health::Up) => {
                *succeeded = succeeded.saturating_add(1);
                if *succeeded >= self.rules.probes.get() {
                    self.turn(State::Closed { failures: 0 });
                }
            }
            (State::HalfOpen { .. }, Health::Down) => self.open(now),
            (State::HalfOpen { admitted, .. }, Health::Unknown) => *admitted = admitted.saturating_sub(1),
            (State::Closed { .. }, Health::Unknown) | (State::Open { .. }, _) => {}
        }
    }

    /// The state that time alone makes of the present one: a new round of probes, or no change.
    fn state_at(&self, now: Timestamp) -> State {
        match self.state {
            State::Open { until: over } | State::HalfOpen { ends: over, .. } if now >= over => {
                State::HalfOpen { ends: now.plus(self.rules.open_for), admitted: 0, succeeded: 0 }
            }
            state => state,
        }
    }

    fn open(&mut self, now: Timestamp) {
        self.turn(State::Open { until: now.plus(self.rules.open_for) });
    }

    const fn turn(&mut self, state: State) {
        self.state = state;
        self.round = self.round.saturating_add(1);
    }
}
