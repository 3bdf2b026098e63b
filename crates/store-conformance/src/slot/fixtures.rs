//! Helpers for the cases of slot.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, EventId, Timestamp};
use weir_store::slot::{Assign, AssignOutcome, Slot, SlotConfig};

use crate::HasSlots;

/// A time at which windows of every size used here begin, in seconds.
pub const NOON: i64 = 1_767_268_800;

/// The time `ms` milliseconds after [`NOON`].
pub fn at(ms: i64) -> Timestamp {
    Timestamp::from_micros(NOON * 1_000_000 + ms * 1_000)
}

pub fn pace(max: u32, window_ms: u64) -> Pace {
    Pace::new(max, Duration::from_millis(window_ms)).expect("the suite's paces are valid")
}

pub fn name(text: &str) -> ConfigName {
    ConfigName::parse(text).expect("the suite's names are valid")
}

pub fn event(text: &str) -> EventId {
    EventId::parse(text).expect("the suite's ids are valid")
}

/// A command that assigns a slot of the config `default`.
pub fn assignment(id: &str, requested: Timestamp) -> Assign {
    Assign { event: event(id), config: name("default"), requested }
}

/// `count` commands for one time; the event ids begin with `prefix`.
pub fn assignments(prefix: &str, count: usize, requested: Timestamp) -> Vec<Assign> {
    (0..count).map(|n| assignment(&format!("{prefix}-{n}"), requested)).collect()
}

/// Stores a new version of the config `default`.
pub async fn put_config<H: HasSlots>(h: &H, pace: Pace) -> SlotConfig {
    h.slots().put_config(&name("default"), pace).await.expect("put_config must succeed")
}

pub async fn assign<H: HasSlots>(h: &H, batch: Vec<Assign>) -> Vec<AssignOutcome> {
    let count = batch.len();
    let outcomes = h.slots().assign_batch(batch.into()).await.expect("assign_batch must succeed");
    assert_eq!(outcomes.len(), count, "one outcome for each event");
    outcomes
}

/// Assigns a batch of which every event must be new.
pub async fn assign_new<H: HasSlots>(h: &H, batch: Vec<Assign>) -> Vec<Slot> {
    let outcomes = assign(h, batch).await.into_iter();
    outcomes
        .map(|outcome| match outcome {
            AssignOutcome::New(slot) => slot,
            other => panic!("the event must get a slot, not {other:?}"),
        })
        .collect()
}

/// The starts of the slots' windows, in milliseconds after [`NOON`].
pub fn window_starts(slots: &[Slot]) -> Vec<i64> {
    slots.iter().map(|slot| (slot.window_start.as_micros() - NOON * 1_000_000) / 1_000).collect()
}

/// Asserts that each slot is inside its window and not before its requested time.
pub fn check_times(slots: &[Slot], pace: Pace) {
    for slot in slots {
        assert!(slot.scheduled >= slot.requested, "not before the requested time: {slot:?}");
        assert_eq!(pace.window_of(slot.scheduled), slot.window_start, "inside its window: {slot:?}");
    }
}

/// Counters of the config `default`, without empty windows, by the start of the window in milliseconds after [`NOON`].
pub async fn counters<H: HasSlots>(h: &H) -> BTreeMap<i64, (u32, WindowStatus)> {
    let century_ms = 100 * 365 * 86_400 * 1_000;
    let (from, to) = (at(-century_ms), at(century_ms));
    let windows =
        h.slots().windows(&name("default"), from, to, 1_000_000).await.expect("windows must succeed");
    windows
        .into_iter()
        .filter(|window| window.count > 0)
        .map(|window| ((window.start.as_micros() - NOON * 1_000_000) / 1_000, (window.count, window.status)))
        .collect()
}

/// Asserts that the audit finds no difference and counts this many slots.
pub async fn expect_books<H: HasSlots>(h: &H, slots: u64) {
    let books = h.slots().audit_slots().await.expect("audit_slots must succeed");
    assert_eq!((books.slots, books.counted), (slots, slots), "every slot is counted once: {books:?}");
    assert!(books.different.is_empty(), "counters equal slots: {books:?}");
    crate::books::expect_counts(h).await;
}
