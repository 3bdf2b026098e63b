//! Compares the token bucket with one that holds a rational number of tokens.

use std::time::Duration;

use proptest::prelude::*;
use weir_core::Timestamp;
use weir_core::tier::{Rule, TokenBucket};

use super::{Op, Rational, at, check_denial, op, period, step_us};

/// A bucket as one would explain it: tokens that grow with time, up to the capacity.
struct Model {
    capacity: Rational,
    tokens_per_us: Rational,
    tokens: Rational,
    at_us: i64,
}

impl Model {
    fn new(bucket: &TokenBucket) -> Self {
        let capacity = Rational::from(i128::from(bucket.capacity()));
        let period_us = i128::try_from(bucket.period().as_micros()).unwrap();
        let tokens_per_us = Rational::new(i128::from(bucket.refill()), period_us);
        Self { capacity, tokens_per_us, tokens: capacity, at_us: at(0).as_micros() }
    }

    fn refill(&mut self, now: Timestamp) {
        let elapsed = Rational::from(i128::from(now.as_micros() - self.at_us));
        self.tokens = self.capacity.min(self.tokens + self.tokens_per_us * elapsed);
        self.at_us = now.as_micros();
    }

    fn take(&mut self, cost: u32) -> bool {
        let cost = Rational::from(i128::from(cost));
        let fits = cost == Rational::from(0) || cost <= self.tokens;
        if fits {
            self.tokens -= cost;
        }
        fits
    }

    fn remaining(&self) -> i128 {
        self.tokens.floor().to_integer().max(0)
    }

    /// Returns the microseconds until there are this many tokens, or `None` if that never happens.
    fn wait_us(&self, tokens: Rational) -> Option<i128> {
        let missing = (tokens - self.tokens).max(Rational::from(0));
        (tokens <= self.capacity).then(|| (missing / self.tokens_per_us).ceil().to_integer())
    }
}

fn micros(wait: Duration) -> i128 {
    i128::try_from(wait.as_micros()).unwrap()
}

fn history() -> impl Strategy<Value = (TokenBucket, Vec<(i64, Op)>)> {
    (1_u32..20, 1_u32..40, period()).prop_flat_map(|(capacity, refill, period)| {
        let bucket = TokenBucket::new(capacity, refill, period).unwrap();
        (Just(bucket), prop::collection::vec((step_us(period, refill), op(capacity)), 1..60))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_500))]

    #[test]
    fn decisions_match_the_model((bucket, steps) in history()) {
        let (mut level, mut model, mut now) = (bucket.unspent(), Model::new(&bucket), at(0));
        for (step, op) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            model.refill(now);
            let before = level;
            match op {
                Op::Take(cost) => {
                    let wait = model.wait_us(Rational::from(i128::from(cost)));
                    let decision = bucket.take(&mut level, cost, now);
                    prop_assert_eq!(decision.is_allowed(), model.take(cost));
                    check_denial(&bucket, &before, &level, (cost, decision, now))?;
                    if let weir_core::tier::Decision::Denied(denial) = decision {
                        prop_assert_eq!(denial.retry_after.map(micros), wait);
                    }
                }
                Op::Charge(cost) => {
                    bucket.charge(&mut level, cost, now);
                    model.tokens -= Rational::from(i128::from(cost));
                }
                Op::GiveBack(cost) => {
                    bucket.give_back(&mut level, cost, None, now);
                    model.tokens = model.capacity.min(model.tokens + Rational::from(i128::from(cost)));
                }
            }
            let limit_state = bucket.limit_state(&level, now);
            prop_assert_eq!(i128::from(limit_state.remaining), model.remaining());
            prop_assert_eq!(Some(micros(limit_state.reset_after)), model.wait_us(model.capacity));
            let next = model.capacity.min(Rational::from(model.remaining() + 1));
            prop_assert_eq!(Some(micros(limit_state.next_after)), model.wait_us(next));
            prop_assert_eq!(bucket.is_unspent(&level, now), model.tokens == model.capacity);
        }
    }

    #[test]
    fn no_period_admits_more_than_the_capacity_and_its_refill((bucket, steps) in history()) {
        let period_us = i128::try_from(bucket.period().as_micros()).unwrap();
        let (mut level, mut now) = (bucket.unspent(), at(0));
        let mut taken: Vec<(i64, i128)> = Vec::new();
        for (step, op) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let Op::Take(cost) = op else { continue };
            if bucket.take(&mut level, cost, now).is_allowed() {
                taken.push((now.as_micros(), i128::from(cost)));
            }
        }
        for (first, (from, _)) in taken.iter().enumerate() {
            let mut sum = 0;
            for (until, cost) in &taken[first..] {
                sum += cost;
                let span = i128::from(until - from);
                // sum ≤ capacity + refill × span / period, without a division
                let most = i128::from(bucket.capacity()) * period_us + i128::from(bucket.refill()) * span;
                prop_assert!(sum * period_us <= most);
            }
        }
    }

    #[test]
    fn an_earlier_time_never_has_more_room((bucket, steps) in history(), back in 0_i64..1_000_000_000_000) {
        let (mut level, mut now) = (bucket.unspent(), at(0));
        for (step, op) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            let earlier = Timestamp::from_micros(now.as_micros() - back);
            if let Op::Take(cost) = op {
                prop_assert!(bucket.has_room(&level, cost, now) || !bucket.has_room(&level, cost, earlier));
                let _ = bucket.take(&mut level, cost, now);
            }
        }
    }

    #[test]
    fn usage_carries_over_to_another_bucket_to_less_than_a_tick(
        (old, steps) in history(),
        (refill, period) in (1_u32..40, period()),
    ) {
        let new = TokenBucket::new(1_000, refill, period).unwrap();
        let (mut level, mut model, mut now) = (old.unspent(), Model::new(&old), at(0));
        for (step, op) in steps {
            now = Timestamp::from_micros(now.as_micros() + step);
            model.refill(now);
            if let Op::Take(cost) = op {
                let _ = (old.take(&mut level, cost, now), model.take(cost));
            }
            let adopted = new.carry_over(&old, level, now);
            let mut twin = Model::new(&new);
            twin.tokens = twin.capacity - (model.capacity - model.tokens);
            let (exact, wait) = (twin.wait_us(twin.capacity), new.limit_state(&adopted, now).reset_after);
            prop_assert!(micros(wait) >= exact.unwrap() && micros(wait) <= exact.unwrap() + 1);
            prop_assert!(i128::from(new.limit_state(&adopted, now).remaining) <= twin.remaining());
        }
    }
}

#[test]
fn a_day_of_fifty_does_not_drift_in_millions_of_steps() {
    no_drift(50, 50, 86_400_000, 999_999);
}

#[test]
fn a_day_of_a_prime_number_does_not_drift_in_millions_of_steps() {
    no_drift(53, 86_371, 86_399_993, 333_337);
}

/// Takes every available token during three million steps. The bucket is never full, so every fraction counts.
fn no_drift(capacity: u32, refill: u32, period_ms: u64, step_us: i64) {
    let bucket = TokenBucket::new(capacity, refill, Duration::from_millis(period_ms)).unwrap();
    let mut level = bucket.unspent();
    let mut taken = 0_i128;
    for step in 0..3_000_000_i64 {
        let now = at(step * step_us);
        while bucket.take(&mut level, 1, now).is_allowed() {
            taken += 1;
        }
        let came_back = i128::from(refill) * i128::from(step * step_us) / (i128::from(period_ms) * 1_000);
        assert_eq!(taken, i128::from(capacity) + came_back, "after {step} steps");
    }
}
