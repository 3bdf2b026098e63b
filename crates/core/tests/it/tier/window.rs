//! Compares both kinds of windows with logs of everything that was spent.

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::tier::{FixedWindow, Rule, SlidingWindow};

use super::{Op, Rational, at, check_denial, op, period, step_us};

/// A log of when how much was spent.
#[derive(Default)]
struct Log(Vec<(i64, i128)>);

impl Log {
    fn between(&self, from: i64, until: i64) -> i128 {
        self.0.iter().filter(|(at, _)| (from..until).contains(at)).map(|(_, cost)| cost).sum()
    }

    fn add(&mut self, now: Timestamp, cost: u32) {
        self.0.push((now.as_micros(), i128::from(cost)));
    }

    /// Removes units from the latest entries, but not from before `from`.
    fn give_back(&mut self, from: i64, cost: u32) {
        let mut left = i128::from(cost);
        for (_, spent) in self.0.iter_mut().rev().filter(|(at, _)| *at >= from) {
            let taken = left.min(*spent);
            *spent -= taken;
            left -= taken;
        }
    }
}

fn history() -> impl Strategy<Value = (u32, std::time::Duration, Vec<(i64, Op)>)> {
    (1_u32..20, period()).prop_flat_map(|(limit, window)| {
        (Just(limit), Just(window), prop::collection::vec((step_us(window, limit), op(limit)), 1..60))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn a_fixed_window_counts_what_was_spent_since_it_began((limit, window, steps) in history()) {
        let rule = FixedWindow::new(limit, window).unwrap();
        let window_us = i64::try_from(window.as_micros()).unwrap();
        let (mut count, mut log, mut start, mut now) = (rule.unspent(), Log::default(), None, at(0));
        for (step, op) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let live = start.filter(|start| now.as_micros() - start < window_us);
            let spent = live.map_or(0, |start| log.between(start, i64::MAX));
            let begins = if spent > 0 { live } else { Some(now.as_micros()) };
            let before = count;
            match op {
                Op::Take(cost) => {
                    let decision = rule.take(&mut count, cost, now);
                    let fits = cost == 0 || spent + i128::from(cost) <= i128::from(limit);
                    prop_assert_eq!(decision.is_allowed(), fits);
                    check_denial(&rule, &before, &count, (cost, decision, now))?;
                    if fits && cost > 0 {
                        start = begins;
                        log.add(now, cost);
                    }
                }
                Op::Charge(cost) => {
                    rule.charge(&mut count, cost, now);
                    start = begins;
                    log.add(now, cost);
                }
                Op::GiveBack(cost) => {
                    rule.give_back(&mut count, cost, None, now);
                    log.give_back(live.unwrap_or(i64::MAX), cost);
                }
            }
            let live = start.filter(|start| now.as_micros() - start < window_us);
            let spent = live.map_or(0, |start| log.between(start, i64::MAX));
            let remaining = (i128::from(limit) - spent).max(0);
            prop_assert_eq!(i128::from(rule.limit_state(&count, now).remaining), remaining);
            prop_assert_eq!(rule.is_unspent(&count, now), spent == 0);
        }
    }

    #[test]
    fn a_sliding_window_weighs_the_last_window_exactly((limit, window, steps) in history()) {
        let rule = SlidingWindow::new(limit, window).unwrap();
        let window_us = i64::try_from(window.as_micros()).unwrap();
        let (mut counts, mut log, mut now) = (rule.unspent(), Log::default(), at(0));
        for (step, op) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let before = counts;
            let weighed = weigh(&log, now.as_micros(), window_us);
            match op {
                Op::Take(cost) => {
                    let decision = rule.take(&mut counts, cost, now);
                    let asked = Rational::from(i128::from(cost));
                    let fits = cost == 0 || weighed + asked <= Rational::from(i128::from(limit));
                    prop_assert_eq!(decision.is_allowed(), fits);
                    check_denial(&rule, &before, &counts, (cost, decision, now))?;
                    if fits {
                        log.add(now, cost);
                    }
                }
                Op::Charge(cost) => {
                    rule.charge(&mut counts, cost, now);
                    log.add(now, cost);
                }
                Op::GiveBack(cost) => {
                    rule.give_back(&mut counts, cost, None, now);
                    log.give_back(cut(now.as_micros(), window_us) - window_us, cost);
                }
            }
            let spent = weigh(&log, now.as_micros(), window_us);
            let remaining = (Rational::from(i128::from(limit)) - spent).floor().to_integer().max(0);
            let limit_state = rule.limit_state(&counts, now);
            prop_assert_eq!(i128::from(limit_state.remaining), remaining);
            prop_assert_eq!(rule.is_unspent(&counts, now), spent == Rational::from(0));
            prop_assert!(rule.is_unspent(&counts, now.plus(limit_state.reset_after)));
            if limit_state.remaining < limit {
                let next = now.plus(limit_state.next_after);
                prop_assert!(rule.has_room(&counts, limit_state.remaining + 1, next));
            }
        }
    }

    #[test]
    fn a_span_of_one_length_has_less_than_twice_the_limit((limit, window, steps) in history()) {
        let rule = SlidingWindow::new(limit, window).unwrap();
        let window_us = i64::try_from(window.as_micros()).unwrap();
        let (mut counts, mut log, mut now) = (rule.unspent(), Log::default(), at(0));
        for (step, op) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let Op::Take(cost) = op else { continue };
            if rule.take(&mut counts, cost, now).is_allowed() {
                log.add(now, cost);
            }
        }
        for (from, _) in &log.0 {
            let start = cut(*from, window_us);
            prop_assert!(log.between(start, start + window_us) <= i128::from(limit));
            prop_assert!(log.between(*from, from + window_us) < 2 * i128::from(limit));
        }
    }
}

fn cut(now_us: i64, window_us: i64) -> i64 {
    now_us.div_euclid(window_us) * window_us
}

/// Returns what counts at `now`: this window, and the covered share of the previous one.
fn weigh(log: &Log, now_us: i64, window_us: i64) -> Rational {
    let start = cut(now_us, window_us);
    let covered = Rational::new(i128::from(window_us - (now_us - start)), i128::from(window_us));
    let last = Rational::from(log.between(start - window_us, start));
    Rational::from(log.between(start, start + window_us)) + last * covered
}
