//! Assigning slots to events.

use std::collections::BTreeMap;

use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, Timestamp};
use weir_store::slot::{Assign, AssignOutcome, MoveOutcome, SlotPosition};

use super::fixtures::{
    NOON, assign, assign_new, assignment, assignments, at, check_times, counters, event, expect_books, name,
    pace, put_config, window_starts,
};
use crate::HasSlots;

pub async fn events_fill_their_window_and_then_the_next_ones<H: HasSlots>() {
    let h = H::open().await;
    let pace = pace(3, 4_000);
    put_config(&h, pace).await;
    let first = assign_new(&h, assignments("a", 7, at(0))).await;
    assert_eq!(window_starts(&first), [0, 0, 0, 4_000, 4_000, 4_000, 8_000]);
    let more = assign_new(&h, assignments("b", 3, at(0))).await;
    assert_eq!(
        window_starts(&more),
        [8_000, 8_000, 12_000],
        "the next batch continues where the last one ended"
    );
    check_times(&first, pace);
    check_times(&more, pace);
    let counted = counters(&h).await;
    assert_eq!((counted[&8_000], counted[&12_000]), ((3, WindowStatus::Closed), (1, WindowStatus::Open)));
    expect_books(&h, 10).await;
}

pub async fn a_window_that_has_begun_offers_its_share<H: HasSlots>() {
    let h = H::open().await;
    let pace = pace(4, 4_000);
    put_config(&h, pace).await;
    // A quarter of the window remains, so it offers one slot of four.
    let late = assign_new(&h, assignments("late", 3, at(3_000))).await;
    assert_eq!(window_starts(&late), [0, 4_000, 4_000]);
    assert!(late[0].scheduled >= at(3_000));
    let early = assign_new(&h, assignments("early", 4, at(0))).await;
    assert_eq!(window_starts(&early), [0, 0, 0, 4_000], "events requested at its start may use the others");
    let last = assign_new(&h, vec![assignment("last", at(7_999))]).await;
    assert_eq!(window_starts(&last), [8_000], "the last millisecond of a window offers no slot");
    check_times(&[late, early, last].concat(), pace);
}

pub async fn an_event_keeps_its_slot_when_it_is_assigned_again<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    h.slots().put_config(&name("other"), pace(9, 60_000)).await.expect("put_config must succeed");
    let slot = assign_new(&h, vec![assignment("e", at(500_000))]).await.remove(0);
    for config in ["default", "other", "nobody's"] {
        for requested in [at(0), at(500_000), at(9_000_000)] {
            let again = Assign { event: event("e"), config: name(config), requested };
            assert_eq!(assign(&h, vec![again]).await, [AssignOutcome::Existing(slot.clone())]);
        }
    }
    assert_eq!(h.slots().find_slot(&event("e")).await.expect("an answer"), Some(slot));
    assert_eq!(h.slots().find_slot(&event("f")).await.expect("an answer"), None);
    expect_books(&h, 1).await;
}

pub async fn an_event_twice_in_a_batch_has_one_slot<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    let batch = vec![
        assignment("e", at(0)),
        assignment("f", at(0)),
        assignment("e", at(5_000)),
        assignment("f", at(0)),
    ];
    let outcomes = assign(&h, batch).await;
    let [
        AssignOutcome::New(e),
        AssignOutcome::New(f),
        AssignOutcome::Existing(e2),
        AssignOutcome::Existing(f2),
    ] = &outcomes[..]
    else {
        panic!("new, new, existing, existing, not {outcomes:?}")
    };
    assert_eq!((e, f), (e2, f2));
    expect_books(&h, 2).await;
}

pub async fn an_unknown_config_is_not_an_error<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(5, 1_000)).await;
    let unknown = Assign { event: event("x"), config: name("nobody's"), requested: at(0) };
    let outcomes = assign(&h, vec![assignment("a", at(0)), unknown, assignment("b", at(0))]).await;
    assert!(
        matches!(outcomes[..], [AssignOutcome::New(_), AssignOutcome::UnknownConfig, AssignOutcome::New(_)]),
        "{outcomes:?}"
    );
    assert_eq!(assign(&h, Vec::new()).await, []);
    expect_books(&h, 2).await;
}

pub async fn far_events_do_not_disturb_near_ones<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    let year_ms = 365 * 86_400 * 1_000;
    assign_new(&h, assignments("far", 5, at(year_ms))).await;
    assign_new(&h, assignments("further", 5, at(20 * year_ms))).await;
    let near = assign_new(&h, assignments("near", 5, at(0))).await;
    assert_eq!(window_starts(&near), [0, 0, 1_000, 1_000, 2_000]);
    let more = assign_new(&h, assignments("more", 2, at(year_ms))).await;
    assert_eq!(window_starts(&more), [year_ms + 2_000, year_ms + 3_000]);
    expect_books(&h, 17).await;
}

pub async fn gaps_between_full_windows_are_found<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    for full in [0, 1, 3, 4, 6] {
        assign_new(&h, vec![assignment(&format!("full-{full}"), at(full * 1_000))]).await;
    }
    let slots = assign_new(&h, assignments("e", 4, at(0))).await;
    assert_eq!(window_starts(&slots), [2_000, 5_000, 7_000, 8_000], "every gap is used");
    expect_books(&h, 9).await;
}

/// The runs are longer than the search's headroom, and there are more of them than it may need rounds.
pub async fn all_gaps_between_long_runs_of_full_windows_are_found<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    assign_new(&h, assignments("a", 1_800, at(0))).await;
    let gaps: Vec<i64> = (1..=12).map(|n| n * 140).collect();
    for gap in &gaps {
        h.slots()
            .release_slot(&event(&format!("a-{gap}")))
            .await
            .expect("an answer")
            .expect("the event had a slot");
    }
    let slots = assign_new(&h, assignments("b", 14, at(0))).await;
    let expected: Vec<i64> = gaps.into_iter().chain([1_800, 1_801]).map(|window| window * 1_000).collect();
    assert_eq!(window_starts(&slots), expected);
    expect_books(&h, 1_802).await;
}

pub async fn a_slot_given_back_is_assigned_again<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    let slots = assign_new(&h, assignments("a", 6, at(0))).await;
    let back = h.slots().release_slot(&event("a-2")).await.expect("an answer");
    assert_eq!(back.as_ref(), Some(&slots[2]));
    assert_eq!(
        h.slots().release_slot(&event("a-2")).await.expect("an answer"),
        None,
        "it was given back already"
    );
    assert_eq!(counters(&h).await[&1_000], (1, WindowStatus::Open));
    let again = assign_new(&h, vec![assignment("b", at(0)), assignment("a-2", at(0))]).await;
    assert_eq!(window_starts(&again), [1_000, 3_000]);
    expect_books(&h, 7).await;
    for n in 0..6 {
        h.slots().release_slot(&event(&format!("a-{n}"))).await.expect("an answer");
    }
    expect_books(&h, 1).await;
}

async fn move_slot<H: HasSlots>(h: &H, id: &str, requested: Timestamp) -> MoveOutcome {
    h.slots().move_slot(&event(id), requested).await.expect("move_slot must succeed")
}

pub async fn an_event_that_is_moved_gets_another_slot_and_frees_its_place<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    assign_new(&h, assignments("a", 4, at(0))).await;
    let MoveOutcome::Moved(slot) = move_slot(&h, "a-0", at(60_000)).await else {
        panic!("there is room");
    };
    assert_eq!((slot.requested, slot.window_start), (at(60_000), at(60_000)));
    assert_eq!(h.slots().find_slot(&event("a-0")).await.expect("an answer"), Some(slot));
    let counted = counters(&h).await;
    assert_eq!((counted[&0], counted[&60_000]), ((1, WindowStatus::Open), (1, WindowStatus::Open)));
    // Into full windows: the next one with room.
    let MoveOutcome::Moved(slot) = move_slot(&h, "a-0", at(1_000)).await else { panic!("there is room") };
    assert_eq!(slot.window_start, at(2_000));
    expect_books(&h, 4).await;
    // The place that it frees is the first one with room.
    let MoveOutcome::Moved(slot) = move_slot(&h, "a-2", at(1_000)).await else { panic!("there is room") };
    assert_eq!(slot.window_start, at(1_000));
    assert_eq!(window_starts(&assign_new(&h, assignments("b", 2, at(0))).await), [0, 2_000]);
    expect_books(&h, 6).await;
}

pub async fn an_event_that_cannot_be_moved_keeps_its_slot<H: HasSlots>() {
    let h = H::open().await;
    assert_eq!(move_slot(&h, "a-0", at(0)).await, MoveOutcome::UnknownEvent);
    put_config(&h, pace(1, 1_000)).await;
    assert_eq!(move_slot(&h, "a-0", at(0)).await, MoveOutcome::UnknownEvent);
    let slot = assign_new(&h, assignments("a", 1, at(0))).await.remove(0);
    let end = Timestamp::from_micros(i64::MAX);
    assert_eq!(move_slot(&h, "a-0", end).await, MoveOutcome::Exhausted);
    assert_eq!(h.slots().find_slot(&slot.event).await.expect("an answer").as_ref(), Some(&slot));
    h.slots().deactivate(&name("default")).await.expect("an answer");
    assert_eq!(move_slot(&h, "a-0", at(5_000)).await, MoveOutcome::UnknownConfig(name("default")));
    assert_eq!(h.slots().find_slot(&slot.event).await.expect("an answer").as_ref(), Some(&slot));
    expect_books(&h, 1).await;
}

pub async fn windows_are_listed_in_order<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    assign_new(&h, assignments("a", 5, at(0))).await;
    let list = async |from: i64, to: i64, limit| -> Vec<i64> {
        let windows = h.slots().windows(&name("default"), at(from), at(to), limit).await.expect("an answer");
        let millis = |start: Timestamp| (start.as_micros() - NOON * 1_000_000) / 1_000;
        windows.iter().filter(|window| window.count > 0).map(|window| millis(window.start)).collect()
    };
    assert_eq!(list(0, 100_000, 100).await, [0, 1_000, 2_000, 3_000, 4_000]);
    assert_eq!(list(1_000, 3_000, 100).await, [1_000, 2_000], "the start is included, the end is not");
    assert_eq!(list(0, 100_000, 2).await, [0, 1_000]);
    let nobody: ConfigName = name("nobody's");
    assert_eq!(h.slots().windows(&nobody, at(0), at(9), 9).await.expect("an answer"), []);
}

pub async fn the_slots_of_a_window_are_listed_in_order_of_time_and_event<H: HasSlots>() {
    let h = H::open().await;
    // All slots of a window of one millisecond have the same time.
    put_config(&h, pace(5, 1)).await;
    h.slots().put_config(&name("another"), pace(5, 1)).await.expect("put_config must succeed");
    let mut other = assignments("z", 1, at(0));
    other[0].config = name("another");
    assign_new(&h, [assignments("b", 2, at(0)), assignments("a", 4, at(0)), other].concat()).await;
    let list = async |mut after: SlotPosition, to: i64, limit| -> Vec<String> {
        let mut events = Vec::new();
        loop {
            let listed = h.slots().slots(&name("default"), after, at(to), limit).await;
            let page = listed.expect("slots must succeed");
            events.extend(page.iter().map(|slot| slot.event.to_string()));
            match page.last() {
                Some(last) if page.len() == limit => {
                    after = SlotPosition { scheduled: last.scheduled, event: Some(last.event.clone()) };
                }
                _ => return events,
            }
        }
    };
    let first = || SlotPosition { scheduled: at(0), event: None };
    for limit in [1, 2, 3, 100] {
        assert_eq!(list(first(), 1, limit).await, ["a-0", "a-1", "a-2", "b-0", "b-1"], "{limit} a page");
        assert_eq!(
            list(first(), 2, limit).await,
            ["a-0", "a-1", "a-2", "b-0", "b-1", "a-3"],
            "{limit} a page"
        );
    }
    assert_eq!(list(SlotPosition { scheduled: at(1), event: None }, 2, 9).await, ["a-3"]);
    h.slots().release_slot(&event("b-0")).await.expect("an answer");
    assert_eq!(list(first(), 1, 2).await, ["a-0", "a-1", "a-2", "b-1"]);
}

pub async fn slots_survive_a_restart<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    let slots = assign_new(&h, assignments("a", 5, at(0))).await;
    let h = h.reopen().await;
    let again = assign(&h, assignments("a", 6, at(0))).await;
    let existing: Vec<_> = slots.into_iter().map(AssignOutcome::Existing).collect();
    assert_eq!(again[..5], existing);
    assert!(
        matches!(&again[5], AssignOutcome::New(slot) if slot.window_start == at(2_000)),
        "{:?}",
        again[5]
    );
    expect_books(&h, 6).await;
}

pub async fn times_before_1970_are_valid<H: HasSlots>() {
    let h = H::open().await;
    let pace = pace(1, 7_000);
    put_config(&h, pace).await;
    let requested = Timestamp::from_micros(-1_234_567_000);
    let slots = assign_new(&h, assignments("old", 3, requested)).await;
    check_times(&slots, pace);
    put_config(&h, super::fixtures::pace(1, 3_000)).await;
    expect_books(&h, 3).await;
}

/// Past the largest timestamp there is no window; only there events are refused.
pub async fn after_the_last_representable_window_events_are_refused<H: HasSlots>() {
    let h = H::open().await;
    let pace = pace(2, 1_000);
    put_config(&h, pace).await;
    let last = pace.window_of(Timestamp::from_micros(i64::MAX));
    let outcomes =
        assign(&h, assignments("a", 4, pace.window_of(Timestamp::from_micros(last.as_micros() - 1)))).await;
    let found = outcomes.iter().map(|outcome| match outcome {
        AssignOutcome::New(slot) => Some(slot.window_start),
        AssignOutcome::Exhausted => None,
        other => panic!("new or exhausted, not {other:?}"),
    });
    let before = Timestamp::from_micros(last.as_micros() - 1_000_000);
    assert_eq!(found.collect::<Vec<_>>(), [Some(before), Some(before), Some(last), Some(last)]);
    for requested in [before, last] {
        assert_eq!(assign(&h, assignments("b", 1, requested)).await, [AssignOutcome::Exhausted]);
    }
    expect_books(&h, 4).await;
}

/// Finds the window of an event by walking window by window and counting all placed events in each.
fn naive_walk(placed: &[Timestamp], pace: &Pace, requested: Timestamp) -> Timestamp {
    let count = |start: Timestamp| placed.iter().filter(|other| **other == start).count() as u64;
    let first = pace.window_of(requested);
    if count(first) < u64::from(pace.capacity_from(requested)) {
        return first;
    }
    let later = (1..).map(|n| pace.window_after(first, n));
    later
        .into_iter()
        .find(|start| count(*start) < u64::from(pace.max_per_window()))
        .expect("there is always a later window")
}

/// The run is much longer than the search's headroom; only windows with free slots count towards that.
pub async fn a_gap_before_a_long_run_of_full_windows_does_not_end_the_search<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    let slots = assign_new(&h, assignments("a", 300, at(0))).await;
    let gap = slots.iter().find(|slot| slot.window_start == at(5_000)).expect("one slot is in that window");
    h.slots().release_slot(&gap.event).await.expect("an answer").expect("the event has a slot");
    let mut found = window_starts(&assign_new(&h, assignments("b", 3, at(0))).await);
    found.sort_unstable();
    assert_eq!(found, [5_000, 300_000, 301_000]);
    expect_books(&h, 302).await;
}

pub async fn random_histories_match_the_naive_walk<H: HasSlots>() {
    let seed = fastrand::u64(..);
    let mut rng = fastrand::Rng::with_seed(seed);
    let h = H::open().await;
    let pace = pace(rng.u32(1..5), 1_000);
    put_config(&h, pace).await;
    let mut placed: BTreeMap<String, Timestamp> = BTreeMap::new();
    for round in 0..30 {
        let count = rng.usize(1..12);
        let batch: Vec<_> = (0..count)
            .map(|n| assignment(&format!("{round}-{n}"), at(rng.i64(0..8) * 500 - 1_000)))
            .collect();
        let slots = assign_new(&h, batch.clone()).await;
        check_times(&slots, pace);
        for (assign, slot) in batch.iter().zip(slots) {
            let so_far: Vec<_> = placed.values().copied().collect();
            let expected = naive_walk(&so_far, &pace, assign.requested);
            assert_eq!(slot.window_start, expected, "seed {seed}, round {round}, {assign:?}");
            placed.insert(slot.event.to_string(), slot.window_start);
        }
        if rng.bool() {
            let removed = placed.keys().nth(rng.usize(0..placed.len())).cloned().expect("one of them");
            h.slots().release_slot(&event(&removed)).await.expect("an answer").expect("the event has a slot");
            placed.remove(&removed);
        }
    }
    expect_books(&h, placed.len() as u64).await;
}
