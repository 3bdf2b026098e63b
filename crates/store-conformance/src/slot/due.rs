//! Dispatching slots when they are due.

use std::time::Duration;

use weir_queue::due::{DispatchOutcome, DueSlots};
use weir_store::slot::{MoveOutcome, Slot};

use super::fixtures::{assignment, assignments, at, event, name, pace, put_config};
use crate::HasSlots;
use crate::START;

const TOPIC: &str = "payments-due";
const LEASE: Duration = Duration::from_secs(10);

/// Assigns on a store that schedules dispatches, with one slot a window. Returns the slots in order of time.
async fn assign_for_dispatch<H: HasSlots>(h: &H, prefix: &str, count: usize) -> Vec<Slot> {
    put_config(h, pace(1, 1_000)).await;
    let outcomes = h
        .dispatching_slots()
        .assign_batch(assignments(prefix, count, at(0)).into())
        .await
        .expect("assign_batch must succeed");
    assert_eq!(outcomes.len(), count);
    let mut slots = Vec::new();
    for n in 0..count {
        let found = h.slots().find_slot(&event(&format!("{prefix}-{n}"))).await.expect("an answer");
        slots.push(found.expect("the event has a slot"));
    }
    slots.sort_by_key(|slot| slot.scheduled);
    slots
}

async fn take<H: HasSlots>(h: &H, max: usize) -> DueSlots {
    h.due().claim_due(max, LEASE).await.expect("claim_due must succeed")
}

async fn settle<H: HasSlots>(h: &H, due: &DueSlots, dispatched: DispatchOutcome<'_>) -> bool {
    h.due().settle_due(due, dispatched).await.expect("settle_due must succeed")
}

fn advance_to<H: HasSlots>(h: &H, slot: &Slot) {
    h.clock().advance(slot.scheduled.since(weir_core::Clock::now(h.clock())));
}

/// Drains the topic. Returns the event ids in order.
async fn drain_topic<H: HasSlots>(h: &H) -> Vec<String> {
    let mut ids = Vec::new();
    loop {
        let claim = h.queue().claim(TOPIC, 100, LEASE).await.expect("claim must succeed");
        if claim.messages.is_empty() {
            return ids;
        }
        for message in &claim.messages {
            assert_eq!(message.key, "default", "events of a config keep their order");
            let json = String::from_utf8(message.payload.clone()).expect("JSON is text");
            let id = json.split("\"eventId\":\"").nth(1).and_then(|rest| rest.split('"').next());
            ids.push(id.expect("an eventId").to_owned());
        }
        let done = claim.messages.iter().map(|message| message.position).collect();
        let settlement = weir_queue::Settlement { done, ..Default::default() };
        assert!(h.queue().settle(&claim.receipt, settlement).await.expect("settle must succeed"));
    }
}

fn ids(slots: &[Slot]) -> Vec<String> {
    slots.iter().map(|slot| slot.event.as_str().to_owned()).collect()
}

pub async fn due_slots_are_taken_on_time_and_in_order<H: HasSlots>() {
    let h = H::open().await;
    let slots = assign_for_dispatch(&h, "e", 5).await;
    let early = take(&h, 10).await;
    assert!(early.is_empty());
    assert_eq!(early.next_due_in, Some(slots[0].scheduled.since(START)), "time until the first slot");
    h.clock().advance(slots[2].scheduled.since(START) - Duration::from_micros(1));
    let due = take(&h, 10).await;
    assert_eq!(due.slots, slots[..2], "the third is due a microsecond later");
    assert!(settle(&h, &due, DispatchOutcome::Published(2)).await);
    h.clock().advance(Duration::from_micros(1));
    let due = take(&h, 10).await;
    assert_eq!(due.slots, slots[2..3]);
    assert!(settle(&h, &due, DispatchOutcome::Published(1)).await);
    assert!(take(&h, 10).await.is_empty());
}

pub async fn taken_slots_are_unavailable_until_their_lease_ends<H: HasSlots>() {
    let h = H::open().await;
    let slots = assign_for_dispatch(&h, "e", 3).await;
    advance_to(&h, &slots[2]);
    let first = take(&h, 2).await;
    assert_eq!(first.slots, slots[..2], "no more than requested");
    let meanwhile = take(&h, 10).await;
    assert!(meanwhile.is_empty() && meanwhile.next_due_in.is_none(), "the third must wait for the first two");
    h.clock().advance(LEASE);
    let second = take(&h, 10).await;
    assert_eq!(second.slots, slots);
    assert!(!settle(&h, &first, DispatchOutcome::Enqueue(TOPIC)).await, "its lease has expired");
    assert!(drain_topic(&h).await.is_empty(), "a late settlement does nothing");
    assert!(settle(&h, &second, DispatchOutcome::Enqueue(TOPIC)).await);
    assert_eq!(drain_topic(&h).await, ids(&slots));
}

pub async fn enqueued_slots_are_on_the_topic_once_and_in_order<H: HasSlots>() {
    let h = H::open().await;
    let slots = assign_for_dispatch(&h, "e", 20).await;
    advance_to(&h, &slots[19]);
    for _ in 0..4 {
        let due = take(&h, 5).await;
        assert!(settle(&h, &due, DispatchOutcome::Enqueue(TOPIC)).await);
        assert!(!settle(&h, &due, DispatchOutcome::Enqueue(TOPIC)).await, "a receipt settles once");
    }
    assert_eq!(drain_topic(&h).await, ids(&slots));
    let books = h.queue().audit(TOPIC).await.expect("audit must succeed");
    assert_eq!((books.accepted, books.done, books.difference()), (20, 20, 0));
}

pub async fn slots_that_were_not_published_are_taken_again<H: HasSlots>() {
    let h = H::open().await;
    let slots = assign_for_dispatch(&h, "e", 5).await;
    advance_to(&h, &slots[4]);
    let due = take(&h, 5).await;
    assert!(settle(&h, &due, DispatchOutcome::Published(2)).await);
    let due = take(&h, 5).await;
    assert_eq!(due.slots, slots[2..]);
    assert!(settle(&h, &due, DispatchOutcome::Published(0)).await);
    assert_eq!(take(&h, 5).await.slots, slots[2..]);
}

pub async fn a_slot_given_back_is_not_dispatched<H: HasSlots>() {
    let h = H::open().await;
    let slots = assign_for_dispatch(&h, "e", 3).await;
    h.slots().release_slot(&slots[0].event).await.expect("an answer").expect("a slot");
    let moved = h.slots().release_slot(&slots[1].event).await.expect("an answer").expect("a slot");
    let later = assignment(moved.event.as_str(), at(60_000));
    h.dispatching_slots().assign_batch(vec![later].into()).await.expect("assign_batch must succeed");
    advance_to(&h, &slots[2]);
    let due = take(&h, 10).await;
    assert_eq!(due.slots, slots[2..], "neither the slot given back nor the one that was moved");
    assert!(settle(&h, &due, DispatchOutcome::Published(1)).await);
    h.clock().advance(Duration::from_secs(120));
    assert_eq!(ids(&take(&h, 10).await.slots), [moved.event.as_str()]);
}

pub async fn an_event_that_is_moved_is_dispatched_at_its_new_time<H: HasSlots>() {
    let h = H::open().await;
    let slots = assign_for_dispatch(&h, "e", 2).await;
    let moved = h.dispatching_slots().move_slot(&slots[0].event, at(60_000)).await.expect("an answer");
    assert!(matches!(moved, MoveOutcome::Moved(_)), "{moved:?}");
    advance_to(&h, &slots[1]);
    let due = take(&h, 10).await;
    assert_eq!(due.slots, slots[1..], "not at the old time");
    assert!(settle(&h, &due, DispatchOutcome::Published(1)).await);
    h.clock().advance(Duration::from_secs(120));
    assert_eq!(ids(&take(&h, 10).await.slots), [slots[0].event.as_str()]);
}

pub async fn existing_slots_are_scheduled_for_dispatch_if_still_in_the_future<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    h.slots().assign_batch(assignments("old", 4, at(0)).into()).await.expect("assign_batch must succeed");
    let mut slots = Vec::new();
    for n in 0..4 {
        slots.extend(h.slots().find_slot(&event(&format!("old-{n}"))).await.expect("an answer"));
    }
    slots.sort_by_key(|slot| slot.scheduled);
    advance_to(&h, &slots[1]);
    for _ in 0..2 {
        let mut after = None;
        loop {
            after = h.due().record_due(after.as_ref()).await.expect("record_due must succeed");
            if after.is_none() {
                break;
            }
        }
    }
    assert!(take(&h, 10).await.is_empty(), "slots due before are not dispatched");
    advance_to(&h, &slots[3]);
    let due = take(&h, 10).await;
    assert_eq!(due.slots, slots[2..], "a slot scheduled twice is dispatched once");
}

pub async fn scheduled_dispatches_survive_a_restart<H: HasSlots>() {
    let h = H::open().await;
    let slots = assign_for_dispatch(&h, "e", 2).await;
    advance_to(&h, &slots[1]);
    let lost = take(&h, 10).await;
    assert_eq!(lost.slots, slots);
    let h = h.reopen().await;
    h.clock().advance(LEASE);
    assert_eq!(take(&h, 10).await.slots, slots, "unsettled slots are taken again");
}

pub async fn no_dispatch_is_scheduled_unless_the_store_dispatches<H: HasSlots>() {
    let h = H::open().await;
    put_config(&h, pace(1, 1_000)).await;
    h.slots().assign_batch(vec![assignment("e", at(0))].into()).await.expect("assign_batch must succeed");
    let slot = h.slots().find_slot(&event("e")).await.expect("an answer").expect("a slot");
    advance_to(&h, &slot);
    let due = take(&h, 10).await;
    assert!(due.is_empty() && due.next_due_in.is_none());
    assert_eq!(slot.config, name("default"));
}

pub async fn two_servers_dispatch_each_slot_once_and_in_order<H: HasSlots>() {
    let h = H::open().await;
    let Some(other) = h.second_server().await else { return };
    let slots = assign_for_dispatch(&h, "e", 200).await;
    advance_to(&h, &slots[199]);
    let dispatch = async |h: &H| {
        let mut taken = 0;
        loop {
            let due = take(h, 7).await;
            if due.is_empty() {
                // Either none is left, or the other server holds some. The audit says when all are dispatched.
                if h.queue().audit(TOPIC).await.expect("audit must succeed").accepted == 200 {
                    return taken;
                }
                tokio::task::yield_now().await;
                continue;
            }
            taken += due.slots.len();
            assert!(settle(h, &due, DispatchOutcome::Enqueue(TOPIC)).await);
        }
    };
    let (a, b) = tokio::join!(dispatch(&h), dispatch(&other));
    assert_eq!(a + b, 200);
    assert_eq!(drain_topic(&h).await, ids(&slots));
}
