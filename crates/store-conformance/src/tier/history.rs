//! Random histories, compared with the naive model step by step.

use std::sync::Arc;
use std::time::Duration;

use weir_core::Timestamp;
use weir_core::tier::{FixedWindow, Limit, Rule, ScopedRule, SlidingWindow, Tier, TierRule, TokenBucket};
use weir_store::tier::{LimitCheck, LimitOutcome, LimitStore, Policy};

use super::fixtures::{policy, shadow, tier_rule, unique_user, with_limit};
use super::model::NaiveLimits;
use crate::HasLimits;

const STEPS: usize = 600;
const KEYS: [&str; 3] = ["a", "b", "{c}"];

/// An engine and the model, and the state of the random history.
struct Comparison {
    engine: Arc<dyn LimitStore>,
    model: NaiveLimits,
    policies: Vec<Arc<Policy>>,
    users: Vec<String>,
    random: fastrand::Rng,
    taken_at: Option<Timestamp>,
}

fn any_limit(random: &mut fastrand::Rng) -> Limit {
    let span = Duration::from_millis(random.u64(1..=20) * [1, 7, 1_000, 60_000][random.usize(0..4)]);
    let amount = random.u32(1..=20);
    match random.u8(0..3) {
        0 => Limit::TokenBucket(TokenBucket::new(amount, random.u32(1..=20), span).expect("valid")),
        1 => Limit::FixedWindow(FixedWindow::new(amount, span).expect("valid")),
        _ => Limit::SlidingWindow(SlidingWindow::new(amount, span).expect("valid")),
    }
}

/// The parts of a decision that callers can see.
fn visible_result(asks: &[LimitCheck<'_>], taken: &LimitOutcome) -> String {
    let each = asks.iter().zip(&taken.each);
    let each = each
        .map(|(ask, (individual, spent))| (*individual, ask.policy.spec.limit.limit_state(spent, taken.now)));
    format!("{:?} {:?} {:?}", taken.decision, taken.now, each.collect::<Vec<_>>())
}

impl Comparison {
    async fn take(&mut self) {
        let count = self.random.usize(1..=3);
        let picks: Vec<(usize, &str, u32)> = (0..count)
            .map(|_| {
                let which = self.random.usize(0..self.policies.len());
                (which, KEYS[self.random.usize(0..KEYS.len())], self.random.u32(0..=6))
            })
            .collect();
        let asks: Vec<LimitCheck<'_>> = picks
            .iter()
            .map(|&(which, key, cost)| LimitCheck { policy: &self.policies[which], key, cost })
            .collect();
        let peek = self.random.u8(0..4) == 0;
        let (engine, model) = (
            self.engine.take(&asks, peek).await.expect("an answer"),
            self.model.take(&asks, peek).await.expect("an answer"),
        );
        assert_eq!(visible_result(&asks, &engine), visible_result(&asks, &model), "{picks:?} peek {peek}");
        self.taken_at = Some(model.now);
    }

    async fn change(&mut self) {
        let policy = Arc::clone(&self.policies[self.random.usize(0..self.policies.len())]);
        let (key, cost) = (KEYS[self.random.usize(0..KEYS.len())], self.random.u32(0..=6));
        let taken_at = self.taken_at.filter(|_| self.random.bool());
        let (engine, model) = match self.random.u8(0..3) {
            0 => (self.engine.charge(&policy, key, cost).await, self.model.charge(&policy, key, cost).await),
            1 => (
                self.engine.give_back(&policy, key, cost, taken_at).await,
                self.model.give_back(&policy, key, cost, taken_at).await,
            ),
            _ => {
                self.engine.forget(&policy, key).await.expect("an answer");
                self.model.forget(&policy, key).await.expect("an answer");
                return;
            }
        };
        let limit = &policy.spec.limit;
        let limit_state = |(spent, now)| limit.limit_state(&spent, now);
        let (engine, model) =
            (engine.map(limit_state).expect("an answer"), model.map(limit_state).expect("an answer"));
        assert_eq!(engine, model, "{limit:?} {key} {cost} {taken_at:?}");
    }

    async fn call(&mut self) {
        let user = self.users[self.random.usize(0..self.users.len())].clone();
        let rule: Arc<ScopedRule<TierRule>> = tier_rule(Tier::ALL[self.random.usize(0..4)]);
        let cost = self.random.u32(0..=3);
        let engine = self.engine.take_tier(&user, &rule, cost).await.expect("an answer");
        let model = self.model.take_tier(&user, &rule, cost).await.expect("an answer");
        let [daily, minute] = &rule.rule;
        let limit_state = |spent: &<TierRule as Rule>::Usage| {
            (daily.limit_state(&spent[0], model.now), minute.limit_state(&spent[1], model.now))
        };
        assert_eq!(
            (engine.decision, limit_state(&engine.spent)),
            (model.decision, limit_state(&model.spent))
        );
    }
}

pub async fn random_histories_match_the_naive_model<H: HasLimits>() {
    for seed in 0..6 {
        let h = H::open().await;
        let mut random = fastrand::Rng::with_seed(seed);
        let mut policies: Vec<_> = (0..3).map(|_| policy(any_limit(&mut random))).collect();
        policies.push(shadow(any_limit(&mut random)));
        let (engine, model) = (h.limits(), NaiveLimits::new(h.clock().clone()));
        let users = vec![unique_user(), unique_user()];
        let mut comparison = Comparison { engine, model, policies, users, random, taken_at: None };
        for _ in 0..STEPS {
            match comparison.random.u8(0..10) {
                0..5 => comparison.take().await,
                5..7 => comparison.change().await,
                7 => comparison.call().await,
                8 => {
                    let at = comparison.random.usize(0..comparison.policies.len());
                    if comparison.random.u8(0..3) == 0 {
                        let limit = any_limit(&mut comparison.random);
                        comparison.policies[at] = with_limit(&comparison.policies[at], limit);
                    }
                }
                _ => {
                    let span =
                        comparison.random.u64(0..=3_000) * [1, 1_000, 20_000][comparison.random.usize(0..3)];
                    h.clock().advance(Duration::from_micros(span));
                }
            }
        }
    }
}
