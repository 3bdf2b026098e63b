//! Compares the breaker with a model that stores every call it let through and evaluates them anew each time.

use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::request::breaker::{
    Breaker, BreakerRules, BreakerState, CallAdmission, CallPermit, DownstreamHealth,
};

const START: Timestamp = Timestamp::from_seconds(1_700_000_000);
const OPEN_FOR: Duration = Duration::from_secs(5);

fn rules(failures: u32, probes: u32) -> BreakerRules {
    let number = |n| NonZeroU32::new(n).unwrap();
    BreakerRules { failures: number(failures), open_for: OPEN_FOR, probes: number(probes) }
}

fn at(ms: u64) -> Timestamp {
    START.plus(Duration::from_millis(ms))
}

fn admit(breaker: &mut Breaker, now: Timestamp) -> CallPermit {
    match breaker.admit(now) {
        CallAdmission::Allowed(permit) => permit,
        CallAdmission::Denied { .. } => panic!("a call was denied while {:?}", breaker.state()),
    }
}

fn call(breaker: &mut Breaker, health: DownstreamHealth, now: Timestamp) {
    let permit = admit(breaker, now);
    breaker.report(permit, health, now);
}

fn opened() -> Breaker {
    let mut breaker = Breaker::new(rules(3, 2));
    for _ in 0..3 {
        call(&mut breaker, DownstreamHealth::Down, START);
    }
    breaker
}

#[test]
fn failures_in_a_row_open_it_and_others_do_not() {
    let mut breaker = Breaker::new(rules(3, 2));
    for health in [
        DownstreamHealth::Down,
        DownstreamHealth::Down,
        DownstreamHealth::Up,
        DownstreamHealth::Down,
        DownstreamHealth::Unknown,
        DownstreamHealth::Down,
    ] {
        call(&mut breaker, health, START);
    }
    assert_eq!(
        (breaker.state(), breaker.available_calls(START)),
        (BreakerState::Closed { failures: 2 }, u32::MAX)
    );
    call(&mut breaker, DownstreamHealth::Down, START);
    assert_eq!(
        (breaker.state(), breaker.available_calls(at(4_999))),
        (BreakerState::Open { until: at(5_000) }, 0)
    );
    assert_eq!(breaker.admit(at(4_999)), CallAdmission::Denied { until: at(5_000) });
}

#[test]
fn probes_that_succeed_close_it() {
    let mut breaker = opened();
    assert_eq!(breaker.available_calls(at(5_000)), 2);
    let probes = [admit(&mut breaker, at(5_000)), admit(&mut breaker, at(5_001))];
    assert_eq!(breaker.available_calls(at(5_002)), 0);
    assert_eq!(breaker.admit(at(5_002)), CallAdmission::Denied { until: at(10_000) });
    for probe in probes {
        breaker.report(probe, DownstreamHealth::Up, at(5_100));
    }
    assert_eq!(breaker.state(), BreakerState::Closed { failures: 0 });
    call(&mut breaker, DownstreamHealth::Up, at(5_101));
}

#[test]
fn one_probe_that_fails_opens_it_again() {
    let mut breaker = opened();
    let (good, bad) = (admit(&mut breaker, at(5_000)), admit(&mut breaker, at(5_000)));
    breaker.report(bad, DownstreamHealth::Down, at(5_050));
    breaker.report(good, DownstreamHealth::Up, at(5_060));
    assert_eq!(breaker.state(), BreakerState::Open { until: at(10_050) });
}

#[test]
fn reports_of_calls_from_before_it_opened_are_ignored() {
    let mut breaker = Breaker::new(rules(1, 1));
    let (old_bad, old_good) = (admit(&mut breaker, START), admit(&mut breaker, START));
    call(&mut breaker, DownstreamHealth::Down, START);
    let probe = admit(&mut breaker, at(5_000));
    breaker.report(old_good, DownstreamHealth::Up, at(5_001));
    breaker.report(old_bad, DownstreamHealth::Down, at(5_001));
    assert!(matches!(breaker.state(), BreakerState::HalfOpen { .. }));
    breaker.report(probe, DownstreamHealth::Up, at(5_002));
    assert_eq!(breaker.state(), BreakerState::Closed { failures: 0 });
}

#[test]
fn probes_that_vanish_or_are_not_made_do_not_lock_it() {
    let mut breaker = opened();
    let unused = admit(&mut breaker, at(5_000));
    breaker.report(unused, DownstreamHealth::Unknown, at(5_001));
    assert_eq!(breaker.available_calls(at(5_001)), 2);
    let _vanished = (admit(&mut breaker, at(5_002)), admit(&mut breaker, at(5_002)));
    assert_eq!(breaker.available_calls(at(9_999)), 0);
    assert_eq!(breaker.available_calls(at(10_000)), 2);
    let _probe = admit(&mut breaker, at(10_000));
}

#[derive(Clone, Debug)]
enum Step {
    Wait(u64),
    Admit,
    Report(usize, DownstreamHealth),
}

fn step() -> impl Strategy<Value = Step> {
    let health = prop_oneof![4 => Just(DownstreamHealth::Down), 4 => Just(DownstreamHealth::Up), 1 => Just(DownstreamHealth::Unknown)];
    prop_oneof![
        2 => prop_oneof![Just(0), Just(1), Just(2_500), Just(4_999), Just(5_000), Just(5_001)].prop_map(Step::Wait),
        4 => Just(Step::Admit),
        4 => (0_usize..6, health).prop_map(|(which, health)| Step::Report(which, health)),
    ]
}

/// A period in one state: 'c'losed, 'o'pen or 'h'alf open, with the reports about its own calls.
struct Period {
    kind: char,
    began: Timestamp,
    admitted: usize,
    reports: Vec<DownstreamHealth>,
}

impl Period {
    const fn new(kind: char, began: Timestamp) -> Self {
        Self { kind, began, admitted: 0, reports: Vec::new() }
    }

    /// Returns the state that follows this period at `now`, computed from all its reports, or `None` while it lasts.
    fn end(&self, now: Timestamp, failures: usize, probes: usize) -> Option<char> {
        let known: Vec<_> =
            self.reports.iter().filter(|health| **health != DownstreamHealth::Unknown).collect();
        let last_run = known.iter().rev().take_while(|health| ***health == DownstreamHealth::Down).count();
        let ups = known.iter().filter(|health| ***health == DownstreamHealth::Up).count();
        match self.kind {
            'c' => (last_run >= failures).then_some('o'),
            'h' if known.contains(&&DownstreamHealth::Down) => Some('o'),
            'h' if ups >= probes => Some('c'),
            _ => (now >= self.began.plus(OPEN_FOR)).then_some('h'),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn it_admits_the_same_calls_as_the_model(
        failures in 1_usize..4, probes in 1_usize..4, steps in prop::collection::vec(step(), 1..100),
    ) {
        let mut breaker = Breaker::new(rules(u32::try_from(failures).unwrap(), u32::try_from(probes).unwrap()));
        let (mut now, mut periods) = (START, vec![Period::new('c', START)]);
        let mut calls: Vec<(usize, CallPermit)> = Vec::new();
        for step in steps {
            let period = periods.last_mut().unwrap();
            match step {
                Step::Wait(ms) => now = now.plus(Duration::from_millis(ms)),
                Step::Report(which, _) if which >= calls.len() => {}
                Step::Report(which, health) => {
                    let (origin, permit) = calls.remove(which);
                    breaker.report(permit, health, now);
                    if origin + 1 != periods.len() {
                        continue;
                    }
                    let period = periods.last_mut().unwrap();
                    period.reports.push(health);
                    // Only a call notices that time has passed; a report does not.
                    if let Some(kind @ ('o' | 'c')) = period.end(now, failures, probes) {
                        periods.push(Period::new(kind, now));
                    }
                }
                Step::Admit => {
                    if let Some(kind) = period.end(now, failures, probes) {
                        periods.push(Period::new(kind, now));
                    }
                    let (index, period) = (periods.len() - 1, periods.last_mut().unwrap());
                    let unused = period.reports.iter().filter(|health| **health == DownstreamHealth::Unknown).count();
                    let available = match period.kind {
                        'c' => usize::MAX,
                        'o' => 0,
                        _ => probes - (period.admitted - unused),
                    };
                    prop_assert_eq!(breaker.available_calls(now), u32::try_from(available).unwrap_or(u32::MAX));
                    match breaker.admit(now) {
                        CallAdmission::Allowed(permit) => {
                            prop_assert!(available > 0, "more than its probes were let through");
                            period.admitted += 1;
                            calls.push((index, permit));
                        }
                        CallAdmission::Denied { until } => {
                            prop_assert_eq!(available, 0, "a call was denied without need");
                            prop_assert!(until > now, "a call was denied until a time in the past");
                        }
                    }
                }
            }
        }
    }
}
