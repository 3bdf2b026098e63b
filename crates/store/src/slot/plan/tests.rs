//! Compares the plan with a model that places events one by one and walks from window to window.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use proptest::prelude::*;
use weir_core::slot::{Pace, WindowStatus, Windows};
use weir_core::{ConfigName, EventId, Timestamp};

use super::{AssignPlan, PlanStep, WindowQuery};
use crate::slot::{Assign, AssignOutcome, Slot};

const WINDOW_MS: u64 = 1_000;
const NOW_MS: i64 = 1_700_000_000_000;

fn at(ms: i64) -> Timestamp {
    Timestamp::from_micros((NOW_MS + ms) * 1_000)
}

fn name(text: &str) -> ConfigName {
    ConfigName::parse(text).unwrap()
}

fn assignment(event: &str, config: &str, requested_ms: i64) -> Assign {
    Assign { event: EventId::parse(event).unwrap(), config: name(config), requested: at(requested_ms) }
}

fn slot(event: &str, config: &str) -> Slot {
    let Assign { event, config, requested } = assignment(event, config, 0);
    Slot { event, config, requested, window_start: at(0), scheduled: at(7) }
}

/// The counters in the tables.
type Counters = BTreeMap<(ConfigName, Timestamp), u32>;

/// Acts as an engine that loads `most` open windows at a time, and full ones as runs.
fn load(windows: &mut Windows, counters: &Counters, need: WindowQuery<'_>, most: usize) {
    let mut start = need.from;
    for _ in 0..most {
        let count = |start| counters.get(&(need.config.clone(), start)).copied().unwrap_or_default();
        let mut end = start;
        while WindowStatus::from_count(count(end), windows.pace()) == WindowStatus::Closed {
            end = windows.next_window(end).unwrap();
        }
        windows.add_full(start, end);
        windows.add(end, count(end));
        start = windows.next_window(end).unwrap();
    }
}

fn place_all(plan: &mut AssignPlan<'_>, counters: &Counters, most: usize) {
    let mut chance = 0;
    let random = || {
        chance += 1;
        chance
    };
    let mut random = random;
    for _ in 0..10_000 {
        let needs = match plan.place(&mut random) {
            PlanStep::Load(needs) => needs,
            step => return assert_eq!(step, PlanStep::Done),
        };
        assert!(!needs.is_empty(), "an unfinished plan must ask for windows");
        for need in needs {
            load(plan.windows(need.config).unwrap(), counters, need, most);
        }
    }
    panic!("the plan does not finish");
}

/// The expected result: for each event the start of its window and whether the slot is new, or `None` for an unknown config.
fn model(
    batch: &[Assign],
    existing: &[Slot],
    paces: &HashMap<ConfigName, Pace>,
    counters: &mut Counters,
) -> Vec<Option<(Timestamp, bool)>> {
    let mut slots: HashMap<EventId, Timestamp> =
        existing.iter().map(|slot| (slot.event.clone(), slot.window_start)).collect();
    let mut decide = |assign: &Assign| {
        if let Some(start) = slots.get(&assign.event) {
            return Some((*start, false));
        }
        let pace = paces.get(&assign.config)?;
        let count = |start| counters.get(&(assign.config.clone(), start)).copied().unwrap_or_default();
        let first = pace.window_of(assign.requested);
        let start = if count(first) < pace.capacity_from(assign.requested) {
            first
        } else {
            let mut later = (1..).map(|n| pace.window_after(first, n));
            later.find(|start| count(*start) < pace.max_per_window()).unwrap()
        };
        *counters.entry((assign.config.clone(), start)).or_default() += 1;
        slots.insert(assign.event.clone(), start);
        Some((start, true))
    };
    batch.iter().map(&mut decide).collect()
}

prop_compose! {
    /// Few events, times and configs, so that they collide; `c` is not configured.
    fn batch()(assignments in prop::collection::vec(
        (0_u32..60, prop::sample::select(vec!["a", "a", "a", "b", "c"]), -2_i64..8, prop::sample::select(vec![0, 0, 400, 999])), 1..80,
    )) -> Vec<Assign> {
        let assignment = |(event, config, window, into): (u32, &str, i64, i64)| assignment(&format!("e{event}"), config, window * 1_000 + into);
        assignments.into_iter().map(assignment).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn a_batch_is_placed_as_by_the_naive_walk_however_windows_are_loaded(
        batch in batch(),
        max in 1_u32..5,
        full in prop::collection::vec((prop::sample::select(vec!["a", "b"]), -2_i64..12, 0_u32..6), 0..20),
        most in 1_usize..6,
        seen in 0_u32..5,
    ) {
        let pace = Pace::new(max, Duration::from_millis(WINDOW_MS)).unwrap();
        let paces = HashMap::from([(name("a"), pace), (name("b"), pace)]);
        let counters: Counters =
            full.into_iter().map(|(config, window, count)| ((name(config), at(window * 1_000)), count.min(max))).collect();
        let existing: Vec<Slot> = (0..seen).map(|event| slot(&format!("e{event}"), "old")).collect();
        let mut plan = AssignPlan::new(&batch, existing.clone(), &paces, 100);
        place_all(&mut plan, &counters, most);

        let mut expected_counters = counters.clone();
        let expected = model(&batch, &existing, &paces, &mut expected_counters);
        let mut saved = counters;
        for counter in plan.counters() {
            prop_assert!(counter.count <= max);
            prop_assert_eq!(counter.status, WindowStatus::from_count(counter.count, &pace));
            saved.insert((counter.config.clone(), counter.start), counter.count);
        }
        prop_assert_eq!(&saved, &expected_counters);
        let follow_ups: Vec<_> = plan.follow_ups().collect();
        for counter in plan.counters().filter(|counter| counter.status == WindowStatus::Closed) {
            prop_assert!(follow_ups.contains(&(counter.config, pace.window_after(counter.start, 1))));
        }
        let new: Vec<Slot> = plan.slots().cloned().collect();
        let outcomes = plan.outcomes();
        for (outcome, expected) in outcomes.iter().zip(&expected) {
            let found = match outcome {
                AssignOutcome::New(slot) => Some((slot.window_start, true)),
                AssignOutcome::Existing(slot) => Some((slot.window_start, false)),
                AssignOutcome::UnknownConfig => None,
                AssignOutcome::Exhausted => panic!("no window is held"),
                AssignOutcome::Recounting(_) => panic!("plans never contain a config that is being recounted"),
            };
            prop_assert_eq!(found, *expected);
        }
        let answered = outcomes.into_iter().filter_map(|outcome| match outcome {
            AssignOutcome::New(slot) => Some(slot),
            _ => None,
        });
        prop_assert_eq!(new, answered.collect::<Vec<_>>(), "saved slots are the returned ones");
    }
}

#[test]
fn slots_inserted_by_other_transactions_replace_planned_ones() {
    let pace = Pace::new(9, Duration::from_millis(WINDOW_MS)).unwrap();
    let batch = [assignment("e", "a", 0), assignment("f", "a", 0), assignment("e", "a", 0)];
    let mut plan = AssignPlan::new(&batch, [], &HashMap::from([(name("a"), pace)]), 100);
    place_all(&mut plan, &Counters::new(), 1);
    plan.use_existing([slot("e", "b")]);
    let outcomes = plan.outcomes();
    let theirs = AssignOutcome::Existing(slot("e", "b"));
    assert!(matches!(outcomes[1], AssignOutcome::New(_)), "{outcomes:?}");
    assert_eq!((&outcomes[0], &outcomes[2]), (&theirs, &theirs));
}

#[test]
fn locked_windows_are_reported_and_no_event_is_refused() {
    let pace = Pace::new(1, Duration::from_millis(WINDOW_MS)).unwrap();
    let batch = [assignment("e", "a", 0), assignment("f", "a", 0)];
    let mut plan = AssignPlan::new(&batch, [], &HashMap::from([(name("a"), pace)]), 1);
    let PlanStep::Load(needs) = plan.place(|| 0) else { panic!("nothing is known yet") };
    assert_eq!(needs, [WindowQuery { config: &batch[0].config, from: at(0), events: 2 }]);
    let windows = plan.windows(&batch[0].config).unwrap();
    windows.add(at(0), 0);
    for n in 1..=2 {
        windows.add_locked(at(n * 1_000));
    }
    assert_eq!(plan.place(|| 0), PlanStep::WindowsLocked);
}
