//! Tests the memory through its public interface: it is exact under threads, and behaves like one that never drops an
//! entry.
#![expect(clippy::unwrap_used, reason = "a test may panic; it then fails")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use weir_core::tier::{
    DAILY, Decision, FixedWindow, Limit, LimitUsage, MINUTE, Plan, Rule, ScopedRule, SlidingWindow, Tier,
    TierRule, TokenBucket,
};
use weir_core::{Clock, ManualClock, Timestamp};
use weir_limiter::{KeyRequest, Memory, MemoryFull, MemoryOptions};

const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);
const MINUTE_LONG: Duration = Duration::from_secs(60);

fn tier(plan: Plan) -> Arc<ScopedRule<TierRule>> {
    Arc::new(ScopedRule { scope: 0, rule: plan.tier().defaults().rule() })
}

fn policy(scope: u32, rule: Limit) -> Arc<ScopedRule<Limit>> {
    Arc::new(ScopedRule { scope, rule })
}

fn bucket(capacity: u32) -> Limit {
    Limit::TokenBucket(TokenBucket::new(capacity, 1, MINUTE_LONG).unwrap())
}

/// Options so small that every shard grows, shrinks and sweeps all the time.
fn small(tracks_changes: bool) -> MemoryOptions {
    MemoryOptions { keys_max: 2_048, shards: 2, tracks_changes }
}

#[test]
fn exactly_8_of_200_concurrent_calls_of_a_free_user_pass() {
    let (memory, policy) = (Memory::new(MemoryOptions::default()), tier(Plan::Free));
    let (barrier, passed) = (Barrier::new(200), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..200 {
            scope.spawn(|| {
                barrier.wait();
                let taken = memory.take(&policy, "a@b.c", 1, NOW).unwrap();
                passed.fetch_add(u32::from(taken.decision.is_allowed()), Ordering::SeqCst);
            });
        }
    });
    assert_eq!(passed.into_inner(), 8);
    let spent = memory.peek(&policy, "a@b.c", NOW);
    assert_eq!(policy.rule[DAILY].limit_state(&spent[DAILY], NOW).remaining, 42, "a denial spends nothing");
}

#[test]
fn large_rows_lose_no_key_while_they_are_copied() {
    let (memory, policy) =
        (Memory::new(MemoryOptions { shards: 1, ..MemoryOptions::default() }), policy(0, bucket(300)));
    let ids: Vec<String> = (0..90_000).map(|number| format!("user-{number}")).collect();
    for (id, cost) in ids.iter().zip((1..=100).cycle()) {
        assert!(memory.take(&policy, id, cost, NOW).unwrap().decision.is_allowed());
    }
    for (id, cost) in ids.iter().zip((1..=100).cycle()) {
        let spent = memory.peek(&policy, id, NOW);
        assert_eq!(policy.rule.limit_state(&spent, NOW).remaining, 300 - cost, "{id}");
    }
    assert_eq!(ids.iter().filter(|id| memory.forget(&policy, id)).count(), ids.len());
    assert!(memory.is_empty());
}

#[test]
fn threads_that_take_several_keys_at_once_never_deadlock_or_exceed_a_limit() {
    let (memory, policy) =
        (Memory::new(MemoryOptions { shards: 4, ..MemoryOptions::default() }), policy(0, bucket(300)));
    let ids = ["a", "b", "c", "d", "e", "f"];
    let passed = ids.map(|_| AtomicU32::new(0));
    thread::scope(|scope| {
        for seed in 0..8 {
            let (memory, policy, passed) = (&memory, &policy, &passed);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..500 {
                    let picks = [(); 3].map(|()| random.usize(..ids.len()));
                    let requests = picks.map(|pick| KeyRequest { policy, id: ids[pick], cost: 1 });
                    if memory.take_all(&requests, NOW).unwrap().decision.is_allowed() {
                        for pick in picks {
                            passed[pick].fetch_add(1, Ordering::SeqCst);
                        }
                    }
                }
            });
        }
    });
    for (id, passed) in ids.into_iter().zip(passed) {
        let (passed, spent) = (passed.into_inner(), memory.peek(&policy, id, NOW));
        assert_eq!(policy.rule.spent_units(&spent, NOW), passed, "the stored usage is what was allowed");
        assert!((250..=300).contains(&passed), "{passed} of {id}");
    }
}

#[test]
fn tokens_come_back_to_the_millisecond() {
    let clock = ManualClock::at(NOW);
    let (memory, policy) = (Memory::new(MemoryOptions::default()), tier(Plan::Free));
    let take = || memory.take(&policy, "user", 1, clock.now()).unwrap().decision;
    for _ in 0..8 {
        assert!(take().is_allowed());
    }
    let Decision::Denied(denial) = take() else { panic!("a ninth was allowed") };
    assert_eq!((denial.denied_by, denial.retry_after), (MINUTE, Some(Duration::from_secs(12))));
    for _ in 0..5 {
        clock.advance(Duration::from_millis(11_999));
        assert!(!take().is_allowed());
        clock.advance(Duration::from_millis(1));
        assert!(take().is_allowed());
        assert!(!take().is_allowed());
    }
}

#[test]
fn a_change_of_plan_applies_to_the_next_request_and_what_was_spent_stays_spent() {
    let (memory, free, pro) =
        (Memory::new(MemoryOptions::default()), tier(Plan::Free), tier(Plan::ProYearly));
    let remaining = |policy: &Arc<ScopedRule<TierRule>>, now| {
        let spent = memory.peek(policy, "user", now);
        [0, 1].map(|at| policy.rule[at].limit_state(&spent[at], now).remaining)
    };
    for _ in 0..9 {
        let _ = memory.take(&free, "user", 1, NOW).unwrap();
    }
    assert!(memory.take(&pro, "user", 1, NOW).unwrap().decision.is_allowed());
    assert_eq!(remaining(&pro, NOW), [491, 31]);
    // Back to free with nine spent: from this denial on, tokens come back at the rate of free.
    let Decision::Denied(denial) = memory.take(&free, "user", 1, NOW).unwrap().decision else { panic!() };
    assert_eq!(denial.retry_after, Some(Duration::from_secs(24)));
    let early = Timestamp::from_micros(NOW.as_micros() + 23_999_999);
    assert!(!memory.take(&free, "user", 1, early).unwrap().decision.is_allowed());
    let due = NOW.plus(Duration::from_secs(24));
    assert!(memory.take(&free, "user", 1, due).unwrap().decision.is_allowed());
}

#[test]
fn all_keys_of_a_decision_are_spent_or_none_is() {
    let memory = Memory::new(MemoryOptions::default());
    let (per_user, per_address) = (policy(1, bucket(3)), policy(2, bucket(2)));
    let requests = |cost| {
        let request = |policy, id| KeyRequest { policy, id, cost };
        // The costs of the same key are added up; the same text under another policy is another key.
        [request(&per_user, "x"), request(&per_address, "x"), request(&per_user, "x")]
    };
    let first = memory.take_all(&requests(1), NOW).unwrap();
    assert!(first.decision.is_allowed());
    assert_eq!(first.each[0], first.each[2]);
    let second = memory.take_all(&requests(1), NOW).unwrap();
    assert_eq!(memory.peek_all(&requests(1), NOW), second, "a peek returns the same");
    let Decision::Denied(denial) = second.decision else { panic!("three have one left, not two") };
    assert_eq!((denial.denied_by, denial.retry_after), (0, Some(MINUTE_LONG)));
    assert_eq!(
        second.each.iter().map(|one| one.decision.is_allowed()).collect::<Vec<_>>(),
        [false, true, false]
    );
    assert_eq!(per_address.rule.spent_units(&second.each[1].spent, NOW), 1, "nothing was spent");
    let never = memory.take_all(&requests(2), NOW).unwrap();
    assert!(matches!(never.decision, Decision::Denied(denial) if denial.retry_after.is_none()));
    assert!(memory.take_all(&[], NOW).unwrap().decision.is_allowed());
}

#[test]
fn a_zero_cost_and_a_denial_create_no_entry() {
    let (memory, policy) = (Memory::new(MemoryOptions::default()), policy(0, bucket(3)));
    assert!(memory.take(&policy, "looks", 0, NOW).unwrap().decision.is_allowed());
    assert!(!memory.take(&policy, "asks too much", 4, NOW).unwrap().decision.is_allowed());
    let _ = memory.give_back(&policy, "never took", 1, None, NOW);
    assert!(memory.is_empty());
}

#[test]
fn a_full_memory_rejects_new_keys_until_one_is_idle() {
    let memory = Memory::new(MemoryOptions { keys_max: 20, shards: 1, tracks_changes: false });
    let policy = policy(0, bucket(3));
    for number in 0..20 {
        memory.take(&policy, &number.to_string(), 1, NOW).unwrap();
    }
    assert_eq!(memory.take(&policy, "one more", 1, NOW).map(|_| ()), Err(MemoryFull));
    let requests = ["0", "one more"].map(|id| KeyRequest { policy: &policy, id, cost: 1 });
    assert_eq!(memory.take_all(&requests, NOW).map(|_| ()), Err(MemoryFull));
    assert_eq!(policy.rule.spent_units(&memory.peek(&policy, "0", NOW), NOW), 1, "nothing was spent");
    assert!(memory.take(&policy, "0", 1, NOW).unwrap().decision.is_allowed(), "existing keys continue");
    let later = NOW.plus(MINUTE_LONG);
    assert!(memory.take(&policy, "one more", 1, later).unwrap().decision.is_allowed());
    assert!(memory.len() <= 2, "all but one had become idle");
}

#[test]
fn changes_are_returned_once_and_not_dropped_before() {
    let (memory, policy) = (Memory::new(small(true)), policy(0, bucket(3)));
    let long = "an id that does not fit into an entry";
    for id in ["a", long, "a"] {
        memory.take(&policy, id, 1, NOW).unwrap();
    }
    let later = NOW.plus(Duration::from_secs(3_600));
    assert_eq!(memory.sweep(1_000, later), 0, "not yet handed out");
    let mut changes: Vec<_> = memory
        .changes()
        .map(|change| (change.id.to_string(), policy.rule.spent_units(&change.spent, NOW)))
        .collect();
    changes.sort();
    assert_eq!(changes, [("a".to_owned(), 2), (long.to_owned(), 1)]);
    assert_eq!(memory.changes().count(), 0);
    let _ = (memory.take(&policy, "a", 0, NOW), memory.take(&policy, "a", 2, NOW));
    assert_eq!(memory.changes().count(), 0, "zero costs and denials change nothing");
    assert!(memory.forget(&policy, "a"));
    let forgotten: Vec<_> = memory.changes().collect();
    assert!(matches!(&forgotten[..], [one] if &*one.id == "a" && policy.rule.is_unspent(&one.spent, NOW)));
    assert_eq!(memory.sweep(1_000, later), 2);
    assert!(memory.is_empty());
}

#[test]
fn changes_are_not_tracked_by_default() {
    let (memory, policy) = (Memory::new(small(false)), policy(0, bucket(3)));
    memory.take(&policy, "a", 1, NOW).unwrap();
    assert_eq!(memory.changes().count(), 0);
    assert!(memory.forget(&policy, "a"));
    assert!(!memory.forget(&policy, "a"));
}

/// The rows that a database would have, from the changes returned so far.
type SavedRows = HashMap<(u32, String), (Arc<ScopedRule<Limit>>, LimitUsage)>;

#[derive(Clone, Debug)]
enum Step {
    Take(usize, u32),
    Together([usize; 3]),
    GiveBack(usize, u32),
    Charge(usize, u32),
    Forget(usize),
    Sweep(usize),
    /// Saves all changes and continues with a new memory restored from them.
    Restart,
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let key = || 0_usize..30;
    prop_oneof![
        20 => (key(), 0_u32..4).prop_map(|(key, cost)| Step::Take(key, cost)),
        4 => [key(), key(), key()].prop_map(Step::Together),
        2 => (key(), 0_u32..4).prop_map(|(key, cost)| Step::GiveBack(key, cost)),
        2 => (key(), 0_u32..4).prop_map(|(key, cost)| Step::Charge(key, cost)),
        1 => key().prop_map(Step::Forget),
        3 => (1_usize..40).prop_map(Step::Sweep),
        1 => Just(Step::Restart),
        6 => (0_u64..90_000_000).prop_map(Step::Wait),
    ]
}

/// Creates ten keys of each kind of limit, some with short ids and some with long ones.
fn key(number: usize) -> (Arc<ScopedRule<Limit>>, String) {
    let kind = number % 3;
    let rule = match kind {
        0 => bucket(3),
        1 => Limit::FixedWindow(FixedWindow::new(3, MINUTE_LONG).unwrap()),
        _ => Limit::SlidingWindow(SlidingWindow::new(3, MINUTE_LONG).unwrap()),
    };
    let id =
        if number.is_multiple_of(2) { format!("user {number}") } else { format!("user number {number:030}") };
    (policy(u32::try_from(kind).unwrap(), rule), id)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn decisions_match_a_model_that_never_drops_or_restarts(
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let keys: Vec<_> = (0..30).map(key).collect();
        let (mut memory, mut now) = (Memory::new(small(true)), NOW);
        let mut saved = SavedRows::new();
        let mut model: HashMap<usize, LimitUsage> = HashMap::new();
        for step in steps {
            match step {
                Step::Take(at, cost) => {
                    let (policy, id) = &keys[at];
                    let spent = model.entry(at).or_insert_with(|| policy.rule.unspent());
                    let expected = policy.rule.take(spent, cost, now);
                    prop_assert_eq!(memory.take(policy, id, cost, now).unwrap().decision, expected);
                }
                Step::Together(picks) => {
                    let requests = picks.map(|at| KeyRequest { policy: &keys[at].0, id: &keys[at].1, cost: 1 });
                    let peeked = memory.peek_all(&requests, now).decision;
                    let taken = memory.take_all(&requests, now).unwrap();
                    prop_assert_eq!(peeked, taken.decision);
                    let mut after = model.clone();
                    let fits = picks.iter().all(|at| {
                        let rule = &keys[*at].0.rule;
                        rule.take(after.entry(*at).or_insert_with(|| rule.unspent()), 1, now).is_allowed()
                    });
                    prop_assert_eq!(taken.decision.is_allowed(), fits);
                    if fits {
                        model = after;
                    }
                }
                Step::GiveBack(at, cost) => {
                    let (policy, id) = &keys[at];
                    let spent = model.entry(at).or_insert_with(|| policy.rule.unspent());
                    policy.rule.give_back(spent, cost, None, now);
                    memory.give_back(policy, id, cost, None, now);
                }
                Step::Charge(at, cost) => {
                    let (policy, id) = &keys[at];
                    let spent = model.entry(at).or_insert_with(|| policy.rule.unspent());
                    policy.rule.charge(spent, cost, now);
                    memory.charge(policy, id, cost, now).unwrap();
                }
                Step::Forget(at) => {
                    model.remove(&at);
                    memory.forget(&keys[at].0, &keys[at].1);
                }
                Step::Sweep(budget) => {
                    memory.sweep(budget, now);
                }
                Step::Restart => {
                    for change in memory.changes() {
                        let name = (change.policy.scope, change.id.to_string());
                        saved.insert(name, (change.policy, change.spent));
                    }
                    memory = Memory::new(small(true));
                    for ((_, id), (policy, spent)) in &saved {
                        memory.restore(policy, id, *spent, now).unwrap();
                    }
                }
                Step::Wait(micros) => now = now.plus(Duration::from_micros(micros)),
            }
            for (at, (policy, id)) in keys.iter().enumerate() {
                let (spent, unspent) = (memory.peek(policy, id, now), policy.rule.unspent());
                let expected = policy.rule.limit_state(model.get(&at).unwrap_or(&unspent), now);
                prop_assert_eq!(policy.rule.limit_state(&spent, now), expected);
            }
        }
    }
}

#[test]
fn every_tier_has_its_own_numbers() {
    let memory = Memory::new(MemoryOptions::default());
    for (tier, burst) in Tier::ALL.into_iter().zip([8, 20, 40, 80]) {
        let policy = Arc::new(ScopedRule { scope: 0, rule: tier.defaults().rule() });
        let id = format!("a user of {tier}");
        let passed = (0..200).filter(|_| memory.take(&policy, &id, 1, NOW).unwrap().decision.is_allowed());
        assert_eq!(passed.count(), burst);
    }
}
