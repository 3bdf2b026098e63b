//! Compares the limits of tier with models in rational numbers, which store everything and round nothing.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a model may panic; the test then fails"
)]

mod bucket;
mod permit;
mod together;
mod window;

use std::time::Duration;

use num_rational::Ratio;
use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::tier::{Decision, Rule};

type Rational = Ratio<i128>;

const START_US: i64 = 1_700_000_000_123_457;

fn at(micros: i64) -> Timestamp {
    Timestamp::from_micros(START_US + micros)
}

/// Periods from a millisecond to a year, some with large prime factors.
fn period() -> impl Strategy<Value = Duration> {
    let ms = [1, 7, 1_000, 60_000, 86_399_993, 86_400_000, 366 * 86_400_000];
    prop::sample::select(ms.to_vec()).prop_map(Duration::from_millis)
}

/// Time steps around the ends of windows and around single units, as often as in between.
fn step_us(period: Duration, units: u32) -> impl Strategy<Value = i64> {
    let period = i64::try_from(period.as_micros()).unwrap();
    let unit = period / i64::from(units);
    prop_oneof![
        2 => Just(0),
        3 => 0..=unit,
        2 => (0..3_i64, 0..3_i64).prop_map(move |(n, off)| (unit * n + off - 1).max(0)),
        2 => 0..=period,
        1 => (0..3_i64, 0..3_i64).prop_map(move |(n, off)| (period * n + off - 1).max(0)),
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Take(u32),
    Charge(u32),
    GiveBack(u32),
}

fn op(limit: u32) -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..=limit + 1).prop_map(Op::Take),
        4 => Just(Op::Take(1)),
        1 => (1..=limit + 3).prop_map(Op::Charge),
        1 => (1..=limit + 1).prop_map(Op::GiveBack),
    ]
}

/// Checks that a denial changes nothing and that its wait is exact.
fn check_denial<R: Rule + std::fmt::Debug>(
    rule: &R,
    before: &R::Usage,
    after: &R::Usage,
    (cost, decision, now): (u32, Decision, Timestamp),
) -> Result<(), TestCaseError> {
    let Decision::Denied(denial) = decision else { return Ok(()) };
    prop_assert_eq!(before, after, "a denial changed something");
    if let Some(wait) = denial.retry_after {
        prop_assert!(wait > Duration::ZERO);
        let early = now.plus(wait - Duration::from_micros(1));
        prop_assert!(!rule.has_room(after, cost, early), "the wait of {:?} is too long", wait);
        prop_assert!(rule.has_room(after, cost, now.plus(wait)), "the wait of {:?} is too short", wait);
    }
    Ok(())
}
