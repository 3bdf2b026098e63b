//! The model counts windows differently from the rule in core; random histories check that both give the same answers.

use std::time::Duration;

use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Clock, ManualClock, UserId, Verdict};
use weir_store::quota::{QuotaStore, SendMessage, SendOutcome};
use weir_store_conformance::START;
use weir_store_conformance::model::Model;

#[tokio::test]
async fn the_model_decides_like_the_rule_in_core() {
    for seed in 0..200 {
        agree_over_a_history(&mut fastrand::Rng::with_seed(seed), seed).await;
    }
}

async fn agree_over_a_history(rng: &mut fastrand::Rng, seed: u64) {
    let clock = ManualClock::at(START);
    let model = Model::new(clock.clone(), 1);
    let user = UserId::parse("alice").expect("a valid id");
    let limits = QuotaLimits::new(rng.u32(1..5), rng.u32(1..3)).expect("valid limits");
    let mut rule = model.configure(&user, limits).await.expect("the model answers");
    assert_eq!(rule, Quota::new(limits, START), "seed {seed}");
    for step in 0..50 {
        let to_end = rule.reset_at().since(clock.now());
        clock.advance(match rng.u8(0..8) {
            0 => to_end,
            1 => to_end.saturating_sub(Duration::from_micros(1)),
            2 => Duration::from_secs(rng.u64(0..200)),
            _ => Duration::from_secs(rng.u64(0..15)),
        });
        assert_eq!(
            model.find(&user).await.expect("the model answers"),
            Some(rule.as_of(clock.now())),
            "seed {seed}, step {step}"
        );
        if rng.u8(0..8) == 0 {
            let limits = QuotaLimits::new(rng.u32(1..5), rng.u32(1..4)).expect("valid limits");
            let row = model.change_limits(&user, limits).await.expect("the model answers");
            rule.change_limits(limits, clock.now());
            assert_eq!(row, rule.as_of(clock.now()), "seed {seed}, step {step}");
        }
        let command = SendMessage { user: user.clone(), message: "hello".into(), key: None, trace: None };
        let outcome = model.send_batch(vec![command].into()).await.expect("the model answers").remove(0);
        let verdict = match outcome {
            SendOutcome::Accepted { grant, .. } => Verdict::Allowed(grant),
            SendOutcome::Denied { denial, .. } => Verdict::Denied(denial),
            SendOutcome::NotConfigured => panic!("alice is configured"),
            other => panic!("{other:?} without a broker and keys"),
        };
        assert_eq!(verdict, rule.send(clock.now()), "seed {seed}, step {step}");
    }
}
