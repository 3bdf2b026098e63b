//! Concurrent callers and servers.

use std::collections::BTreeMap;
use std::sync::Arc;

use weir_core::Timestamp;
use weir_store::slot::{Assign, AssignOutcome, MoveOutcome, Slot, SlotStore};

use super::fixtures::{
    assign_new, assignment, assignments, at, check_times, counters, event, expect_books, pace, put_config,
    window_starts,
};
use crate::HasSlots;
use crate::fixtures::run_concurrently;

/// Assigns batches concurrently, spread over stores.
async fn assign_concurrently(
    stores: Vec<Arc<dyn SlotStore>>,
    batches: Vec<Vec<Assign>>,
) -> Vec<AssignOutcome> {
    let calls = batches.into_iter().enumerate().map(|(n, batch)| {
        let store = Arc::clone(&stores[n % stores.len()]);
        async move { store.assign_batch(batch.into()).await.expect("assign_batch must succeed") }
    });
    run_concurrently(calls).await.into_iter().flatten().collect()
}

fn new_slots(outcomes: &[AssignOutcome]) -> Vec<Slot> {
    let slot = |outcome: &AssignOutcome| match outcome {
        AssignOutcome::New(slot) => Some(slot.clone()),
        _ => None,
    };
    outcomes.iter().filter_map(slot).collect()
}

/// Asserts that no window exceeds the maximum, and that the counters equal the slots, of which there are `slots`.
async fn expect_no_window_overfull<H: HasSlots>(h: &H, max: u32, slots: u64) {
    let counted = counters(h).await;
    assert!(counted.values().all(|(count, _)| *count <= max), "no window over its maximum: {counted:?}");
    expect_books(h, slots).await;
}

pub async fn parallel_batches_overfill_no_window_and_counters_equal_slots<H: HasSlots>() {
    let h = H::open().await;
    let pace = pace(7, 1_000);
    put_config(&h, pace).await;
    let batches = (0..100).map(|n| assignments(&format!("c{n}"), 5, at(0))).collect();
    let outcomes = assign_concurrently(vec![h.slots()], batches).await;
    let slots = new_slots(&outcomes);
    assert_eq!(slots.len(), 500, "every event gets a slot");
    check_times(&slots, pace);
    expect_no_window_overfull(&h, 7, 500).await;
}

pub async fn the_same_events_in_parallel_get_one_slot_each<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(3, 1_000)).await;
    let batches = (0..10)
        .map(|n| {
            let mut batch = assignments("e", 20, at(0));
            batch.rotate_left(n);
            batch
        })
        .collect();
    let outcomes = assign_concurrently(vec![h.slots()], batches).await;
    assert_eq!(new_slots(&outcomes).len(), 20, "each event is new once");
    let mut times: BTreeMap<String, Timestamp> = BTreeMap::new();
    for outcome in outcomes {
        let (AssignOutcome::New(slot) | AssignOutcome::Existing(slot)) = outcome else {
            panic!("every event has a slot, not {outcome:?}")
        };
        let first = *times.entry(slot.event.to_string()).or_insert(slot.scheduled);
        assert_eq!(first, slot.scheduled, "the slot is the same each time");
    }
    expect_no_window_overfull(&h, 3, 20).await;
}

pub async fn giving_back_while_assigning_keeps_the_books_balanced<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(4, 1_000)).await;
    assign_concurrently(vec![h.slots()], vec![assignments("a", 40, at(0))]).await;
    let calls = (0..40).map(|n| {
        let store = h.slots();
        async move {
            if n % 2 == 0 {
                let event = event(&format!("a-{n}"));
                store.release_slot(&event).await.expect("an answer").expect("the event has a slot");
            } else {
                store
                    .assign_batch(vec![assignment(&format!("b-{n}"), at(0))].into())
                    .await
                    .expect("assign_batch must succeed");
            }
        }
    });
    run_concurrently(calls).await;
    expect_no_window_overfull(&h, 4, 40).await;
}

pub async fn moving_while_assigning_and_giving_back_keeps_the_books_balanced<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(4, 1_000)).await;
    let other = h.second_server().await;
    let stores = [h.slots(), other.as_ref().map_or_else(|| h.slots(), HasSlots::slots)];
    assign_concurrently(vec![h.slots()], vec![assignments("a", 40, at(0))]).await;
    // Each event is moved twice at once, some are given back and assigned again meanwhile, and others arrive.
    let calls = (0..160).map(|n| {
        let store = stores[n % 2].clone();
        async move {
            let id = event(&format!("a-{}", n / 4));
            match n % 4 {
                0 | 1 => {
                    let requested = at(i64::try_from(n % 7).unwrap_or(0) * 1_000);
                    let outcome = store.move_slot(&id, requested).await.expect("move_slot must succeed");
                    assert!(
                        matches!(outcome, MoveOutcome::Moved(_) | MoveOutcome::UnknownEvent),
                        "{outcome:?}"
                    );
                }
                2 if n % 8 == 2 => {
                    store.release_slot(&id).await.expect("an answer");
                    let again = vec![assignment(id.as_str(), at(0))];
                    store.assign_batch(again.into()).await.expect("assign_batch must succeed");
                }
                _ => {
                    let new = vec![assignment(&format!("b-{n}"), at(0))];
                    store.assign_batch(new.into()).await.expect("assign_batch must succeed");
                }
            }
        }
    });
    run_concurrently(calls).await;
    expect_no_window_overfull(&h, 4, 40 + 60).await;
}

pub async fn two_servers_overfill_no_window_and_give_each_event_one_slot<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(10, 4_000)).await;
    let Some(other) = h.second_server().await else { return };
    let stores = vec![h.slots(), other.slots()];
    // Every event is sent twice, to both servers.
    let batches = (0..40).map(|n| assignments(&format!("c{}", n / 2), 25, at(0))).collect();
    let outcomes = assign_concurrently(stores, batches).await;
    assert_eq!(new_slots(&outcomes).len(), 500, "each event is new once");
    assert!(!outcomes.iter().any(|outcome| matches!(outcome, AssignOutcome::Exhausted)));
    expect_no_window_overfull(&h, 10, 500).await;
}

pub async fn bulks_and_single_calls_at_once_all_get_slots<H: HasSlots>() {
    let h = H::open().await;
    expect_all_placed(&h, vec![h.slots()]).await;
}

pub async fn bulks_and_single_calls_on_two_servers_all_get_slots<H: HasSlots>() {
    let h = H::open().await;
    let Some(other) = h.second_server().await else { return };
    expect_all_placed(&h, vec![h.slots(), other.slots()]).await;
}

/// Assigns four bulks of 1,000 events and 400 single events for one time. Each bulk needs more windows than the headroom has.
async fn expect_all_placed<H: HasSlots>(h: &H, stores: Vec<Arc<dyn SlotStore>>) {
    let pace = pace(9, 1_000);
    put_config(h, pace).await;
    let bulks = (0..4).map(|n| assignments(&format!("bulk-{n}"), 1_000, at(0)));
    let batches = bulks.chain((0..400).map(|n| vec![assignment(&format!("single-{n}"), at(0))])).collect();
    let outcomes = assign_concurrently(stores, batches).await;
    let slots = new_slots(&outcomes);
    assert_eq!(slots.len(), 4_400, "every event gets a slot");
    check_times(&slots, pace);
    expect_no_window_overfull(h, 9, 4_400).await;
    // Later events find every gap that was skipped.
    let last = counters(h).await.into_keys().next_back().expect("there are windows");
    let room = usize::try_from(last / 1_000 + 1).expect("a number of windows") * 9 - 4_400;
    let late = assign_new(h, assignments("late", room, at(0))).await;
    assert!(window_starts(&late).is_sorted(), "the first window with room is used first");
    assert!(counters(h).await.into_values().all(|(count, _)| count == 9), "no window has a gap");
}

pub async fn a_pace_that_changes_under_load_keeps_the_books<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(5, 1_000)).await;
    let calls = (0..30).map(|n| {
        let store = h.slots();
        async move {
            if n % 10 == 9 {
                let (max, size) = [(5, 1_000), (8, 2_000), (3, 500)][n / 10];
                let name = super::fixtures::name("default");
                store.put_config(&name, pace(max, size)).await.map(drop).expect("put_config must succeed");
            } else {
                let mut batch = assignments(&format!("c{n}"), 10, at(0));
                while let Some(assign) = batch.first() {
                    store.wait_for_recount(&assign.config).await.expect("waiting must succeed");
                    let outcomes = store.assign_batch(batch.into()).await.expect("assign_batch must succeed");
                    let recounting = outcomes.into_iter().filter_map(|outcome| match outcome {
                        AssignOutcome::Recounting(assign) => Some(assign),
                        _ => None,
                    });
                    batch = recounting.collect();
                }
            }
        }
    });
    run_concurrently(calls).await;
    expect_books(&h, 270).await;
}
