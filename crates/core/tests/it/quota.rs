//! Compares the quota rule with a model so naive that it cannot share the rule's mistakes: it stores every accepted
//! send and every window start, and counts.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    reason = "a model may panic; the test then fails"
)]

use std::time::Duration;

use proptest::prelude::*;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Timestamp, Verdict};

const START_SECONDS: i64 = 1_700_000_000;

/// The start of each window and the times of the sends accepted in it.
struct Model {
    limit: usize,
    window_micros: i64,
    windows: Vec<(i64, Vec<i64>)>,
}

impl Model {
    fn new(limit: u32, minutes: u32) -> Self {
        let start = START_SECONDS * 1_000_000;
        Self {
            limit: limit as usize,
            window_micros: i64::from(minutes) * 60_000_000,
            windows: vec![(start, Vec::new())],
        }
    }

    fn send(&mut self, now: i64) -> bool {
        // If the clock steps back, the window's start moves with it.
        let start = &mut self.windows.last_mut().unwrap().0;
        *start = now.min(*start);
        if now - self.windows.last().unwrap().0 >= self.window_micros {
            self.windows.push((now, Vec::new()));
        }
        let sends = &mut self.windows.last_mut().unwrap().1;
        let allowed = sends.len() < self.limit;
        if allowed {
            sends.push(now);
        }
        allowed
    }
}

/// Time steps that hit the ends of windows as often as their inside.
fn step_micros(minutes: u32) -> impl Strategy<Value = i64> {
    let window = i64::from(minutes) * 60_000_000;
    prop_oneof![
        4 => 0..window / 3 + 1,
        1 => Just(window),
        1 => Just(window - 1),
        1 => Just(window + 1),
        1 => -window..0,
        1 => window..window * 3,
    ]
}

fn history() -> impl Strategy<Value = (u32, u32, Vec<i64>)> {
    (1u32..6, 1u32..4).prop_flat_map(|(limit, minutes)| {
        (Just(limit), Just(minutes), prop::collection::vec(step_micros(minutes), 1..80))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn verdicts_match_the_model_and_never_exceed_the_limit((limit, minutes, steps) in history()) {
        let mut quota = Quota::new(
            QuotaLimits::new(limit, minutes).unwrap(),
            Timestamp::from_seconds(START_SECONDS),
        );
        let mut model = Model::new(limit, minutes);
        let mut now = START_SECONDS * 1_000_000;
        for step in steps {
            now += step;
            let before = quota;
            let verdict = quota.send(Timestamp::from_micros(now));
            prop_assert_eq!(verdict.is_allowed(), model.send(now));
            let (window_start, sends) = model.windows.last().unwrap();
            prop_assert!(sends.len() <= limit as usize);
            match verdict {
                Verdict::Allowed(grant) => {
                    prop_assert_eq!(quota.current_count as usize, sends.len());
                    prop_assert_eq!(quota.last_refresh.as_micros(), *window_start);
                    prop_assert_eq!(grant.remaining as usize, limit as usize - sends.len());
                    prop_assert_eq!(grant.reset_at, quota.reset_at());
                }
                Verdict::Denied(denial) => {
                    prop_assert!(denial.retry_after <= quota.limits.window(), "longer than a window");
                    let mut expected = before;
                    expected.clamp_window_start(Timestamp::from_micros(now));
                    prop_assert_eq!(quota, expected, "a denial changed the row");
                }
            }
        }
    }

    #[test]
    fn a_new_window_counts_from_1((limit, minutes, steps) in history()) {
        let start = Timestamp::from_seconds(START_SECONDS);
        let mut quota = Quota::new(QuotaLimits::new(limit, minutes).unwrap(), start);
        let mut now = START_SECONDS * 1_000_000;
        for step in steps {
            now += step;
            let began = quota.last_refresh;
            let _ = quota.send(Timestamp::from_micros(now));
            if quota.last_refresh > began {
                prop_assert_eq!(quota.current_count, 1);
                prop_assert_eq!(quota.last_refresh.as_micros(), now);
            }
        }
    }

    #[test]
    fn a_send_after_retry_after_is_allowed((limit, minutes, steps) in history()) {
        let start = Timestamp::from_seconds(START_SECONDS);
        let mut quota = Quota::new(QuotaLimits::new(limit, minutes).unwrap(), start);
        let mut now = start;
        for step in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            if let Verdict::Denied(denial) = quota.send(now) {
                prop_assert!(denial.retry_after > Duration::ZERO);
                let mut waited = quota;
                let just_short = now.plus(denial.retry_after - Duration::from_micros(1));
                prop_assert!(!waited.send(just_short).is_allowed(), "retry_after was longer than needed");
                prop_assert!(waited.send(now.plus(denial.retry_after)).is_allowed());
            }
        }
    }
}
