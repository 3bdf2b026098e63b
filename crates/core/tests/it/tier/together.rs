//! Several limits in one decision: all are spent or none.

use std::time::Duration;

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::tier::{
    DAILY, Decision, FixedWindow, Hold, HoldSettlement, KeyCharge, Limit, LimitDenial, LimitUsage, MINUTE,
    Rule, SlidingWindow, Tier, TokenBucket, take_all,
};

use super::{at, check_denial, period, step_us};

fn limit() -> impl Strategy<Value = Limit> {
    (0..3, 1_u32..9, 1_u32..9, period()).prop_map(|(kind, amount, refill, period)| match kind {
        0 => Limit::TokenBucket(TokenBucket::new(amount, refill, period).unwrap()),
        1 => Limit::FixedWindow(FixedWindow::new(amount, period).unwrap()),
        _ => Limit::SlidingWindow(SlidingWindow::new(amount, period).unwrap()),
    })
}

fn steps() -> impl Strategy<Value = Vec<(i64, [u32; 3])>> {
    let step = prop_oneof![step_us(Duration::from_secs(60), 7), step_us(Duration::from_millis(7), 3)];
    prop::collection::vec((step, [0_u32..6, 0_u32..6, 0_u32..6]), 1..60)
}

/// Returns the expected decision, from the decision of each limit by itself.
fn expected(rules: &[Limit; 3], spent: &[LimitUsage; 3], costs: [u32; 3], now: Timestamp) -> Decision {
    let mut denials = Vec::new();
    for (at, ((rule, spent), cost)) in rules.iter().zip(spent).zip(costs).enumerate() {
        if let Decision::Denied(denial) = rule.take(&mut spent.clone(), cost, now) {
            denials.push((at, denial.retry_after));
        }
    }
    let Some((denied_by, _)) = denials.first().copied() else { return Decision::Allowed };
    let waits: Option<Vec<_>> = denials.into_iter().map(|(_, wait)| wait).collect();
    Decision::Denied(LimitDenial { denied_by, retry_after: waits.and_then(|waits| waits.into_iter().max()) })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn limits_in_an_array_are_spent_together_or_not_at_all(rules in [limit(), limit(), limit()], steps in steps()) {
        let (mut spent, mut now) = (rules.unspent(), at(0));
        for (step, [cost, ..]) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let before = spent;
            let decision = rules.take(&mut spent, cost, now);
            prop_assert_eq!(decision, expected(&rules, &before, [cost; 3], now));
            check_denial(&rules, &before, &spent, (cost, decision, now))?;
            if decision.is_allowed() {
                for (at, rule) in rules.iter().enumerate() {
                    let mut single = before[at];
                    let _ = rule.take(&mut single, cost, now);
                    prop_assert_eq!(single, spent[at]);
                }
            }
        }
    }

    #[test]
    fn keys_in_one_decision_are_spent_together_or_not_at_all(rules in [limit(), limit(), limit()], steps in steps()) {
        let (mut spent, mut now) = (rules.unspent(), at(0));
        for (step, costs) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let before = spent;
            let mut claims: Vec<_> = rules
                .iter()
                .zip(&mut spent)
                .zip(costs)
                .map(|((rule, spent), cost)| KeyCharge { rule, spent, cost })
                .collect();
            let decision = take_all(&mut claims, now);
            prop_assert_eq!(decision, expected(&rules, &before, costs, now));
            if !decision.is_allowed() {
                prop_assert_eq!(before, spent);
            }
        }
    }

    #[test]
    fn a_settled_hold_leaves_what_its_true_cost_would_have(rule in limit(), estimate in 1_u32..9, cost in 0_u32..12) {
        let mut held = rule.unspent();
        let estimate = estimate.min(rule.limit_state(&held, at(0)).limit);
        prop_assert!(rule.take(&mut held, estimate, at(0)).is_allowed());
        let mut hold = Hold::new(estimate, at(0), Duration::from_secs(1));
        let HoldSettlement::Settled(correction) = hold.settle(cost, at(0)) else { panic!("not settled") };
        hold.correct(correction, &rule, &mut held, at(0));
        let mut from_checked = rule.unspent();
        rule.charge(&mut from_checked, cost, at(0));
        prop_assert_eq!(rule.limit_state(&held, at(0)).remaining, rule.limit_state(&from_checked, at(0)).remaining);
        prop_assert_eq!(rule.spent_units(&held, at(0)), cost);
    }

    #[test]
    fn a_limit_of_any_kind_takes_over_what_was_spent(old in limit(), new in limit(), steps in steps()) {
        let (mut spent, mut now) = (old.unspent(), at(0));
        for (step, [cost, ..]) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let _ = old.take(&mut spent, cost, now);
            let adopted = new.carry_over(&old, spent, now);
            // Windows of one kind keep their start, and a shorter one may have ended.
            let same_cut = matches!((old, new), (Limit::FixedWindow(_), Limit::FixedWindow(_)));
            prop_assert!(same_cut || new.spent_units(&adopted, now) == old.spent_units(&spent, now));
        }
    }
}

#[test]
fn a_minute_that_denies_leaves_the_day_alone() {
    let rule = Tier::Free.defaults().rule();
    let mut spent = rule.unspent();
    for _ in 0..8 {
        assert!(rule.take(&mut spent, 1, at(0)).is_allowed());
    }
    let Decision::Denied(denial) = rule.take(&mut spent, 1, at(0)) else { panic!("the ninth was allowed") };
    assert_eq!((denial.denied_by, denial.retry_after), (MINUTE, Some(Duration::from_secs(12))));
    assert_eq!(rule[DAILY].limit_state(&spent[DAILY], at(0)).remaining, 42);
}

#[test]
fn a_day_that_denies_is_named_first_and_leaves_the_minute_alone() {
    let rule = Tier::Starter.defaults().rule();
    let mut spent = rule.unspent();
    rule[DAILY].charge(&mut spent[DAILY], 200, at(0));
    let wait = Some(Duration::from_secs(432));
    assert_eq!(
        rule.take(&mut spent, 1, at(0)),
        Decision::Denied(LimitDenial { denied_by: DAILY, retry_after: wait })
    );
    assert_eq!(rule[MINUTE].limit_state(&spent[MINUTE], at(0)).remaining, 20);
    // Both are exhausted: the day is named, and the longer wait counts.
    rule[MINUTE].charge(&mut spent[MINUTE], 20, at(0));
    assert_eq!(
        rule.take(&mut spent, 1, at(0)),
        Decision::Denied(LimitDenial { denied_by: DAILY, retry_after: wait })
    );
}
