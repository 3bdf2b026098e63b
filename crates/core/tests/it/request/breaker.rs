//! The breaker against a model that keeps every call it let through and looks back over them.

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

fn pass(breaker: &mut Breaker, now: Timestamp) -> CallPermit {
    match breaker.admit(now) {
        CallAdmission::Allowed(permit) => permit,
        CallAdmission::Denied { .. } => panic!("parked while {:?}", breaker.state()),
    }
}

fn call(breaker: &mut Breaker, health: DownstreamHealth, now: Timestamp) {
    let permit = pass(breaker, now);
    breaker.report(permit, health, now);
}

/// A breaker that opened at `START`.
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
    let probes = [pass(&mut breaker, at(5_000)), pass(&mut breaker, at(5_001))];
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
    let (good, bad) = (pass(&mut breaker, at(5_000)), pass(&mut breaker, at(5_000)));
    breaker.report(bad, DownstreamHealth::Down, at(5_050));
    breaker.report(good, DownstreamHealth::Up, at(5_060));
    assert_eq!(breaker.state(), BreakerState::Open { until: at(10_050) });
}

#[test]
fn calls_from_before_it_opened_say_nothing_about_the_present() {
    let mut breaker = Breaker::new(rules(1, 1));
    let (old_bad, old_good) = (pass(&mut breaker, START), pass(&mut breaker, START));
    call(&mut breaker, DownstreamHealth::Down, START);
    let probe = pass(&mut breaker, at(5_000));
    breaker.report(old_good, DownstreamHealth::Up, at(5_001));
    breaker.report(old_bad, DownstreamHealth::Down, at(5_001));
    assert!(matches!(breaker.state(), BreakerState::HalfOpen { .. }));
    breaker.report(probe, DownstreamHealth::Up, at(5_002));
    assert_eq!(breaker.state(), BreakerState::Closed { failures: 0 });
}

#[test]
fn probes_that_vanish_or_are_not_made_do_not_lock_it() {
    let mut breaker = opened();
    let unused = pass(&mut breaker, at(5_000));
    breaker.report(unused, DownstreamHealth::Unknown, at(5_001));
    assert_eq!(breaker.available_calls(at(5_001)), 2);
    let _vanished = (pass(&mut breaker, at(5_002)), pass(&mut breaker, at(5_002)));
    assert_eq!(breaker.available_calls(at(9_999)), 0);
    assert_eq!(breaker.available_calls(at(10_000)), 2);
    let _probe = pass(&mut breaker, at(10_000));
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

/// A stretch of time in one state: 'c'losed, 'o'pen or 'h'alf open, when it began, and what was reported of its own calls.
struct Stretch {
    kind: char,
    began: Timestamp,
    admitted: usize,
    reports: Vec<DownstreamHealth>,
}

impl Stretch {
    const fn new(kind: char, began: Timestamp) -> Self {
        Self { kind, began, admitted: 0, reports: Vec::new() }
    }

    /// What this stretch has come to at `now`, worked out anew from all its reports; none while it goes on.
    fn end(&self, now: Timestamp, failures: usize, probes: usize) -> Option<char> {
        let heard: Vec<_> =
            self.reports.iter().filter(|health| **health != DownstreamHealth::Unknown).collect();
        let last_run = heard.iter().rev().take_while(|health| ***health == DownstreamHealth::Down).count();
        let ups = heard.iter().filter(|health| ***health == DownstreamHealth::Up).count();
        match self.kind {
            'c' => (last_run >= failures).then_some('o'),
            'h' if heard.contains(&&DownstreamHealth::Down) => Some('o'),
            'h' if ups >= probes => Some('c'),
            _ => (now >= self.began.plus(OPEN_FOR)).then_some('h'),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn it_lets_through_what_the_model_does(
        failures in 1_usize..4, probes in 1_usize..4, steps in prop::collection::vec(step(), 1..100),
    ) {
        let mut breaker = Breaker::new(rules(u32::try_from(failures).unwrap(), u32::try_from(probes).unwrap()));
        let (mut now, mut stretches) = (START, vec![Stretch::new('c', START)]);
        let mut calls: Vec<(usize, CallPermit)> = Vec::new();
        for step in steps {
            let stretch = stretches.last_mut().unwrap();
            match step {
                Step::Wait(ms) => now = now.plus(Duration::from_millis(ms)),
                Step::Report(which, _) if which >= calls.len() => {}
                Step::Report(which, health) => {
                    let (origin, permit) = calls.remove(which);
                    breaker.report(permit, health, now);
                    if origin + 1 != stretches.len() {
                        continue;
                    }
                    let stretch = stretches.last_mut().unwrap();
                    stretch.reports.push(health);
                    // Time alone is noticed by the next call, not by a report.
                    if let Some(kind @ ('o' | 'c')) = stretch.end(now, failures, probes) {
                        stretches.push(Stretch::new(kind, now));
                    }
                }
                Step::Admit => {
                    if let Some(kind) = stretch.end(now, failures, probes) {
                        stretches.push(Stretch::new(kind, now));
                    }
                    let (place, stretch) = (stretches.len() - 1, stretches.last_mut().unwrap());
                    let unused = stretch.reports.iter().filter(|health| **health == DownstreamHealth::Unknown).count();
                    let available_calls = match stretch.kind {
                        'c' => usize::MAX,
                        'o' => 0,
                        _ => probes - (stretch.admitted - unused),
                    };
                    prop_assert_eq!(breaker.available_calls(now), u32::try_from(available_calls).unwrap_or(u32::MAX));
                    match breaker.admit(now) {
                        CallAdmission::Allowed(permit) => {
                            prop_assert!(available_calls > 0, "more than its probes were let through");
                            stretch.admitted += 1;
                            calls.push((place, permit));
                        }
                        CallAdmission::Denied { until } => {
                            prop_assert_eq!(available_calls, 0, "parked without need");
                            prop_assert!(until > now, "parked into the past");
                        }
                    }
                }
            }
        }
    }
}
