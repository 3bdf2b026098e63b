//! What a purge deletes, and what it must not touch.

use std::time::Duration;

use weir_core::Clock;
use weir_core::slot::WindowStatus;
use weir_queue::due::DispatchOutcome;
use weir_store::slot::AssignOutcome;

use super::fixtures::{
    assign, assign_new, assignments, at, counters, event, expect_books, name, pace, put_config, window_starts,
};
use crate::HasSlots;
use crate::fixtures::run_concurrently;

/// How long everything is kept in these cases.
const KEEP: Duration = Duration::from_secs(86_400);

/// Lets the time pass until what is older than `ms` milliseconds after noon is too old.
fn outdate<H: HasSlots>(h: &H, ms: i64) {
    h.clock().advance((at(ms).plus(KEEP)).since(h.clock().now()));
}

async fn purge<H: HasSlots>(h: &H, limit: usize) -> u64 {
    h.slots().purge_slots(KEEP, limit).await.expect("purge_slots must succeed")
}

async fn is_known<H: HasSlots>(h: &H, id: &str) -> bool {
    h.slots().find_slot(&event(id)).await.expect("find_slot must succeed").is_some()
}

pub async fn windows_that_ended_before_the_retention_are_purged<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    assign_new(&h, assignments("e", 6, at(0))).await;
    outdate(&h, 999);
    assert_eq!(purge(&h, 1_000).await, 0, "the first window ends a millisecond later");
    outdate(&h, 1_500);
    assert_eq!(purge(&h, 1_000).await, 3, "two slots and a counter of the first window, none of the second");
    let full = (2, WindowStatus::Closed);
    assert_eq!(counters(&h).await.into_iter().collect::<Vec<_>>(), [(1_000, full), (2_000, full)]);
    expect_books(&h, 4).await;
    assert_eq!(purge(&h, 1_000).await, 0, "nothing else is old");
}

pub async fn an_event_whose_slot_was_purged_is_new<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    assign_new(&h, assignments("e", 2, at(0))).await;
    outdate(&h, 1_000);
    purge(&h, 1_000).await;
    assert!(!is_known(&h, "e-0").await && is_known(&h, "e-1").await);
    let outcomes = assign(&h, assignments("e", 2, at(0))).await;
    assert!(matches!(outcomes[..], [AssignOutcome::New(_), AssignOutcome::Existing(_)]), "{outcomes:?}");
    let AssignOutcome::New(slot) = &outcomes[0] else { unreachable!("matched above") };
    assert_eq!(slot.window_start, at(0), "its window is as if it was never used");
    let next = assign_new(&h, assignments("f", 1, at(0))).await;
    assert_eq!(window_starts(&next), [2_000], "behind windows that are full");
    expect_books(&h, 3).await;
}

pub async fn a_purge_in_parts_leaves_whole_books_after_each<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(3, 1_000)).await;
    assign_new(&h, assignments("e", 100, at(0))).await;
    outdate(&h, 20_000);
    let mut left = 100;
    let mut next_id = 0;
    loop {
        let before = counters(&h).await.values().map(|(count, _)| u64::from(*count)).sum::<u64>();
        let deleted = purge(&h, 7).await;
        if deleted == 0 {
            break;
        }
        assert!(deleted <= 3 * 7, "a part is small: {deleted}");
        let after = counters(&h).await.values().map(|(count, _)| u64::from(*count)).sum::<u64>();
        left -= before - after;
        expect_books(&h, left).await;
        // Full windows are still found to be full, whatever has gone before them.
        next_id += 1;
        let late = assign_new(&h, assignments(&format!("late-{next_id}"), 1, at(25_000))).await;
        assert_eq!(late.len(), 1);
        assert!(late[0].window_start >= at(33_000), "{late:?}");
        left += 1;
    }
    assert_eq!(left, 40 + next_id, "20 windows of 3 slots were old");
}

pub async fn the_window_behind_a_full_one_is_found_while_older_ones_are_purged<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(2, 1_000)).await;
    assign_new(&h, assignments("e", 4, at(0))).await;
    assign_new(&h, assignments("far", 2, at(60_000))).await;
    outdate(&h, 50_000);
    assert_eq!(purge(&h, 1).await, 1, "one slot of the first window");
    let next = assign_new(&h, assignments("f", 1, at(1_000))).await;
    assert_eq!(
        window_starts(&next),
        [2_000],
        "the counter of the empty window behind the full one is still there"
    );
    expect_books(&h, 6).await;
}

pub async fn a_purge_counts_windows_by_the_newest_version<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    assign_new(&h, assignments("e", 8, at(0))).await;
    put_config(&h, pace(2, 4_000)).await;
    outdate(&h, 6_000);
    assert_eq!(purge(&h, 1_000).await, 6, "4 slots, the counter of their 4 s, and the version before");
    assert_eq!(counters(&h).await.into_iter().collect::<Vec<_>>(), [(4_000, (4, WindowStatus::Closed))]);
    expect_books(&h, 4).await;
}

pub async fn versions_that_were_replaced_before_the_retention_are_purged<H: HasSlots>() {
    let h = H::open().await;
    let versions = async || -> Vec<u32> {
        let listed = h.slots().config_versions(&name("default"), None, 10).await;
        listed.expect("config_versions must succeed").iter().map(|version| version.config.version).collect()
    };
    for max in [5, 6] {
        put_config(&h, pace(max, 1_000)).await;
    }
    h.clock().advance(KEEP);
    put_config(&h, pace(7, 1_000)).await;
    assert_eq!(purge(&h, 1_000).await, 0, "the first was replaced just then");
    h.clock().advance(Duration::from_millis(1));
    assert_eq!(purge(&h, 1_000).await, 1);
    assert_eq!(versions().await, [3, 2], "the second was in use until a millisecond ago");
    h.slots().deactivate(&name("default")).await.expect("an answer");
    h.clock().advance(2 * KEEP);
    assert_eq!(purge(&h, 1_000).await, 1);
    assert_eq!(versions().await, [3], "the newest stays, so that versions are never counted anew");
    assert_eq!(put_config(&h, pace(7, 1_000)).await.version, 4);
}

pub async fn slots_that_wait_to_be_dispatched_are_not_purged<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    let dispatching = h.dispatching_slots();
    dispatching.assign_batch(assignments("e", 4, at(0)).into()).await.expect("assign_batch must succeed");
    outdate(&h, 3_000);
    let purge_dispatching =
        async || dispatching.purge_slots(KEEP, 1_000).await.expect("purge_slots must succeed");
    assert_eq!(purge_dispatching().await, 0, "none was published");
    let due = h.due().claim_due(2, Duration::from_secs(10)).await.expect("claim_due must succeed");
    assert!(h.due().settle_due(&due, DispatchOutcome::Published(2)).await.expect("settle_due must succeed"));
    assert_eq!(purge_dispatching().await, 4, "the two that were, and their counters");
    expect_books(&h, 2).await;
    assert_eq!(purge(&h, 1_000).await, 2, "a store that does not dispatch does not wait for it");
    let due = h.due().claim_due(10, Duration::from_secs(10)).await.expect("claim_due must succeed");
    assert_eq!(due.slots.len(), 1, "a slot that was purged is not dispatched");
}

pub async fn purging_while_assigning_giving_back_and_moving_keeps_the_books<H: HasSlots>() {
    let h = std::sync::Arc::new(H::open().await);
    let other = h.second_server().await.map(std::sync::Arc::new);
    put_config(&*h, pace(3, 1_000)).await;
    outdate(&*h, 10_000);
    let tasks = (0..6_usize).map(|task| {
        let h = match &other {
            Some(other) if task % 2 == 1 => std::sync::Arc::clone(other),
            _ => std::sync::Arc::clone(&h),
        };
        async move {
            for round in 0..15_i64 {
                if task >= 4 {
                    purge(&*h, 20).await;
                    continue;
                }
                // Half of the windows are old, so they are purged while they fill.
                let prefix = format!("{task}-{round}");
                let batch = assignments(&prefix, 10, at((round % 4) * 5_000));
                h.slots().assign_batch(batch.into()).await.expect("assign_batch must succeed");
                let (first, second) = (event(&format!("{prefix}-0")), event(&format!("{prefix}-1")));
                h.slots().release_slot(&first).await.expect("release_slot must succeed");
                h.slots().move_slot(&second, at(12_000)).await.expect("move_slot must succeed");
            }
        }
    });
    run_concurrently(tasks).await;
    while purge(&*h, 1_000).await > 0 {}
    let left = counters(&*h).await;
    assert!(left.keys().all(|start| *start >= 10_000), "{left:?}");
    assert!(left.values().all(|(count, _)| *count <= 3), "no window is overfilled: {left:?}");
    expect_books(&*h, left.values().map(|(count, _)| u64::from(*count)).sum()).await;
}
