//! Compares concurrency limits with a count of what is in use, microsecond by microsecond.

use std::time::Duration;

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::tier::{Concurrency, Decision, LimitDenial, OpenPermit};

use super::at;

#[derive(Clone, Copy, Debug)]
enum Step {
    Take(u32),
    /// Gives back the permit at this place among the open ones.
    Release(usize),
    Wait(i64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0_u32..6).prop_map(Step::Take),
        1 => (0_usize..8).prop_map(Step::Release),
        2 => (0_i64..4_000).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 1..80)
}

/// What is in use at this time, each microsecond of it counted on its own.
fn in_use(open: &[OpenPermit], micros: i64) -> u32 {
    open.iter().filter(|permit| at(micros) < permit.expires_at).map(|permit| permit.cost).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn no_more_is_in_use_than_the_limit_and_waits_are_exact(limit in 1_u32..6, ttl_ms in 1_u64..6, steps in steps()) {
        let rule = Concurrency::new(limit, Duration::from_millis(ttl_ms)).unwrap();
        let (mut open, mut now) = (Vec::<OpenPermit>::new(), 0_i64);
        for step in steps {
            match step {
                Step::Wait(micros) => now += micros,
                Step::Release(place) => drop((place < open.len()).then(|| open.remove(place))),
                Step::Take(cost) => {
                    let used = in_use(&open, now);
                    prop_assert!(used <= limit);
                    let state = rule.limit_state(&open, at(now));
                    prop_assert_eq!(state.remaining, limit - used);
                    match rule.decide(&open, cost, at(now)) {
                        Decision::Allowed => {
                            prop_assert!(cost == 0 || used + cost <= limit);
                            let expires_at = at(now).plus(rule.ttl());
                            open.push(OpenPermit { expires_at, cost });
                        }
                        Decision::Denied(LimitDenial { retry_after: None, .. }) => prop_assert!(cost > limit),
                        Decision::Denied(LimitDenial { retry_after: Some(wait), .. }) => {
                            let later = now + i64::try_from(wait.as_micros()).unwrap();
                            prop_assert!(in_use(&open, later) + cost <= limit);
                            prop_assert!(in_use(&open, later - 1) + cost > limit, "not a microsecond too long");
                        }
                    }
                }
            }
        }
        let end = rule.limit_state(&open, at(now)).reset_after;
        let end = Timestamp::from_micros(at(now).as_micros() + i64::try_from(end.as_micros()).unwrap());
        prop_assert_eq!(rule.limit_state(&open, end).remaining, limit);
    }
}
