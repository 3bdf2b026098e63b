//! The breaker of one downstream, shared by all calls of this process.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use weir_core::Clock;
use weir_core::request::breaker::{
    Breaker, BreakerRules, BreakerState, CallAdmission, CallPermit, DownstreamHealth,
};

/// A breaker, the clock it goes by, and the gauge that shows it.
#[derive(Debug)]
pub(super) struct SharedBreaker {
    breaker: Mutex<Breaker>,
    clock: Arc<dyn Clock>,
    gauge: Gauge,
    name: String,
}

impl SharedBreaker {
    pub(super) fn new(name: &str, rules: BreakerRules, clock: Arc<dyn Clock>, gauge: Gauge) -> Self {
        gauge.set(0);
        Self { breaker: Mutex::new(Breaker::new(rules)), clock, gauge, name: name.to_owned() }
    }

    /// How many calls it would let through now.
    pub(super) fn room(&self) -> usize {
        usize::try_from(self.breaker.lock().available_calls(self.clock.now())).unwrap_or(usize::MAX)
    }

    /// Asks to make a call.
    pub(super) fn admit(&self) -> CallAdmission {
        self.change(|breaker| breaker.admit(self.clock.now()))
    }

    /// Takes in what came of it.
    pub(super) fn report(&self, permit: CallPermit, health: DownstreamHealth) {
        self.change(|breaker| breaker.report(permit, health, self.clock.now()));
    }

    fn change<T>(&self, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breaker = self.breaker.lock();
        let before = shown(breaker.state());
        let changed = change(&mut breaker);
        let (number, state) = shown(breaker.state());
        if before.0 != number {
            self.gauge.set(number);
            tracing::warn!(target: "weir::request", downstream = self.name, state, "the breaker has changed");
        }
        changed
    }
}

const fn shown(state: BreakerState) -> (i64, &'static str) {
    match state {
        BreakerState::Closed { .. } => (0, "closed"),
        BreakerState::HalfOpen { .. } => (1, "half-open"),
        BreakerState::Open { .. } => (2, "open"),
    }
}

#[cfg(test)]
mod tests {
    use weir_core::{ManualClock, Timestamp};

    use super::*;

    fn fail(breaker: &SharedBreaker) {
        let CallAdmission::Allowed(permit) = breaker.admit() else { panic!("it lets calls through") };
        breaker.report(permit, DownstreamHealth::Down);
    }

    #[test]
    fn a_breaker_shows_what_it_does() {
        let (clock, gauge) = (ManualClock::at(Timestamp::EPOCH), Gauge::default());
        let rules = BreakerRules::default();
        let breaker = SharedBreaker::new("pay", rules, Arc::new(clock.clone()), gauge.clone());
        for _ in 0..rules.failures.get() {
            assert_eq!((breaker.room(), gauge.get()), (u32::MAX as usize, 0));
            fail(&breaker);
        }
        assert_eq!((breaker.room(), gauge.get()), (0, 2));
        assert!(matches!(breaker.admit(), CallAdmission::Denied { .. }));
        clock.advance(rules.open_for);
        assert_eq!(breaker.room(), 3, "probes");
        for _ in 0..3 {
            let CallAdmission::Allowed(permit) = breaker.admit() else { panic!("a probe") };
            assert_eq!(gauge.get(), 1);
            breaker.report(permit, DownstreamHealth::Up);
        }
        assert_eq!(gauge.get(), 0);
    }
}
