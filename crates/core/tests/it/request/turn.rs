//! Fairness of turns over many claims: whatever the weights and the sizes of claims, and whoever has how much to do.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use weir_core::request::turn::{Turn, TurnCandidate, TurnPlan, plan_turns};

/// Tenants with work, by name, and their weights.
type Weights = BTreeMap<String, u32>;

/// One claim over all tenants, as engines do it: in the order of the circle from the turn on.
fn claim(turn: &Turn, tenants: &Weights, room: usize) -> (BTreeMap<String, usize>, Turn) {
    let is_behind = |name: &&String| if turn.had > 0 { **name >= turn.after } else { **name > turn.after };
    let (behind, before): (Vec<&String>, Vec<&String>) = tenants.keys().partition(is_behind);
    let circle = [behind, before].concat();
    let candidates: Vec<TurnCandidate<'_>> = circle
        .iter()
        .map(|name| TurnCandidate {
            tenant: name,
            weight: NonZeroU32::new(tenants[*name]).unwrap(),
            most: usize::MAX,
        })
        .collect();
    let TurnPlan { jobs, next } = plan_turns(turn, &candidates, true, room);
    (circle.into_iter().cloned().zip(jobs).collect(), next)
}

fn weights() -> impl Strategy<Value = Weights> {
    btree_map("[a-e]{1,3}", 1..20_u32, 1..12)
}

proptest! {
    /// A tenant that always has work is never more than one turn ahead of another that always has, whatever others do.
    #[test]
    fn shares_follow_the_weights(
        steady in weights(),
        others in vec((weights(), 1..60_usize), 1..60),
        after in "[a-e]{0,3}",
    ) {
        let mut turn = Turn { after, had: 0 };
        let mut served: BTreeMap<String, usize> = BTreeMap::new();
        for (come_and_go, room) in others {
            let mut tenants = come_and_go;
            tenants.extend(steady.clone());
            let (jobs, next) = claim(&turn, &tenants, room);
            prop_assert_eq!(jobs.values().sum::<usize>(), room, "a claim is filled");
            turn = next;
            jobs.into_iter().for_each(|(name, jobs)| *served.entry(name).or_default() += jobs);
        }
        for (a, weight_a) in &steady {
            for (b, weight_b) in &steady {
                let turns = |name: &String, weight: &u32| served[name] as f64 / f64::from(*weight);
                let ahead = turns(a, weight_a) - turns(b, weight_b);
                prop_assert!(ahead <= 1.0 + 1e-9, "{a} has had {ahead} turns more than {b}: {served:?}");
            }
        }
    }

    /// A tenant that always has work gets its weight before all others together have had theirs once more.
    #[test]
    fn nobody_waits_longer_than_one_round(tenants in weights(), room in 1..40_usize, after in "[a-e]{0,3}") {
        let whole: usize = tenants.values().map(|weight| *weight as usize).sum();
        let mut turn = Turn { after, had: 0 };
        let claims = whole.div_ceil(room);
        let mut served: BTreeMap<String, usize> = BTreeMap::new();
        for _ in 0..claims {
            let (jobs, next) = claim(&turn, &tenants, room);
            turn = next;
            jobs.into_iter().for_each(|(name, jobs)| *served.entry(name).or_default() += jobs);
        }
        for (name, weight) in &tenants {
            prop_assert!(served[name] >= *weight as usize, "{name}: {served:?} after {claims} claims");
        }
    }

    /// Limits are kept, and what one may not have goes to others.
    #[test]
    fn nobody_gets_more_than_it_may_have(
        candidates in vec((1..20_u32, 0..30_usize), 0..12),
        is_circle in any::<bool>(),
        room in 0..200_usize,
    ) {
        let names: Vec<String> = (0..candidates.len()).map(|n| format!("t{n:02}")).collect();
        let candidates: Vec<TurnCandidate<'_>> = names
            .iter()
            .zip(&candidates)
            .map(|(name, (weight, most))| TurnCandidate {
                tenant: name,
                weight: NonZeroU32::new(*weight).unwrap(),
                most: *most,
            })
            .collect();
        let plan = plan_turns(&Turn::default(), &candidates, is_circle, room);
        for (candidate, jobs) in candidates.iter().zip(&plan.jobs) {
            prop_assert!(*jobs <= candidate.most);
            prop_assert!(is_circle || *jobs <= candidate.weight.get() as usize, "one turn each");
        }
        let possible: usize = candidates
            .iter()
            .map(|it| if is_circle { it.most } else { it.most.min(it.weight.get() as usize) })
            .sum();
        prop_assert_eq!(plan.jobs.iter().sum::<usize>(), room.min(possible));
    }
}

#[test]
fn a_turn_that_was_cut_short_goes_on_in_the_next_claim() {
    let tenants = Weights::from([("a".to_owned(), 5), ("b".to_owned(), 1)]);
    let mut turn = Turn::default();
    let mut order = String::new();
    for _ in 0..6 {
        let (jobs, next) = claim(&turn, &tenants, 2);
        turn = next;
        order.push_str(&format!("{}{} ", "a".repeat(jobs["a"]), "b".repeat(jobs["b"])));
    }
    assert_eq!(order, "aa aa ab aa aa ab ");
}
