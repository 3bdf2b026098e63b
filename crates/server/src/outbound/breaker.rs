//! The circuit breaker of one service that is called, shared by all calls of this process.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use weir_core::Clock;
use weir_core::request::breaker::{
    Breaker, BreakerRules, BreakerState, CallAdmission, CallPermit, DownstreamHealth,
};

/// A breaker with its clock and the gauge that shows its state.
#[derive(Debug)]
pub(crate) struct SharedBreaker {
    breaker: Mutex<Breaker>,
    clock: Arc<dyn Clock>,
    gauge: Gauge,
    name: String,
}

/// The breaker has opened, half-opened or closed.
struct BreakerChanged<'a> {
    name: &'a str,
    state: &'static str,
    /// The state as the metric shows it.
    number: i64,
}

impl BreakerChanged<'_> {
    fn emit(self, gauge: &Gauge) {
        let Self { name, state, number } = self;
        gauge.set(number);
        tracing::warn!(target: "weir::request", downstream = name, state, "the circuit breaker of a downstream changed");
    }
}

impl SharedBreaker {
    pub(crate) fn new(name: &str, rules: BreakerRules, clock: Arc<dyn Clock>, gauge: Gauge) -> Self {
        gauge.set(0);
        Self { breaker: Mutex::new(Breaker::new(rules)), clock, gauge, name: name.to_owned() }
    }

    /// How many calls the breaker allows now.
    pub(crate) fn available_calls(&self) -> usize {
        usize::try_from(self.breaker.lock().available_calls(self.clock.now())).unwrap_or(usize::MAX)
    }

    pub(crate) fn admit(&self) -> CallAdmission {
        self.change(|breaker| breaker.admit(self.clock.now()))
    }

    pub(crate) fn report(&self, permit: CallPermit, health: DownstreamHealth) {
        self.change(|breaker| breaker.report(permit, health, self.clock.now()));
    }

    fn change<T>(&self, change: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breaker = self.breaker.lock();
        let (number_before, _) = gauge_value(breaker.state());
        let changed = change(&mut breaker);
        let (number, state) = gauge_value(breaker.state());
        if number_before != number {
            BreakerChanged { name: &self.name, state, number }.emit(&self.gauge);
        }
        changed
    }
}

const fn gauge_value(state: BreakerState) -> (i64, &'static str) {
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
    fn the_gauge_shows_the_state_of_the_breaker() {
        let (clock, gauge) = (ManualClock::at(Timestamp::EPOCH), Gauge::default());
        let rules = BreakerRules::default();
        let breaker = SharedBreaker::new("pay", rules, Arc::new(clock.clone()), gauge.clone());
        for _ in 0..rules.failures.get() {
            assert_eq!((breaker.available_calls(), gauge.get()), (u32::MAX as usize, 0));
            fail(&breaker);
        }
        assert_eq!((breaker.available_calls(), gauge.get()), (0, 2));
        assert!(matches!(breaker.admit(), CallAdmission::Denied { .. }));
        clock.advance(rules.open_for);
        assert_eq!(breaker.available_calls(), 3, "probes");
        for _ in 0..3 {
            let CallAdmission::Allowed(permit) = breaker.admit() else { panic!("a probe") };
            assert_eq!(gauge.get(), 1);
            breaker.report(permit, DownstreamHealth::Up);
        }
        assert_eq!(gauge.get(), 0);
    }
}
