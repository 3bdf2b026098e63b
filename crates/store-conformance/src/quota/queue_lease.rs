//! How long a claim holds its messages, and what is left of it afterwards.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_queue::Message;

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    TICK, VISIBILITY, accept_batch, claim, expect_nothing_claimable, numbered_texts, queue_audit, send,
    send_numbered, text, texts, texts_by_key,
};

pub async fn no_key_is_in_two_claims_at_once<H: HasQuota>() {
    let h = H::open().await;
    for n in 0..12 {
        send_numbered(&h, &format!("user-{n}"), 5).await;
    }
    let mut held_by: BTreeMap<String, usize> = BTreeMap::new();
    for nth in 0..30 {
        for message in claim(&h, 2).await.messages {
            let holder = *held_by.entry(message.key.clone()).or_insert(nth);
            assert_eq!(
                holder,
                nth,
                "{} is out already, but another claim got {}",
                message.key,
                text(&message)
            );
        }
    }
    assert!(!held_by.is_empty(), "something is waiting and nothing was out");
}

pub async fn a_message_sent_while_its_key_is_leased_waits_for_the_settlement<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let held = Claims::claim(&h, 1).await;
    accept_batch(&h, vec![send("alice", "alice 2")]).await;
    expect_nothing_claimable(&h, "alice's messages are out, so her next one has to wait").await;
    held.settled(&h, |_| Disposition::Leave).await;
    assert_eq!(
        Claims::claim(&h, 2).await.texts(),
        numbered_texts("alice", 1..=2),
        "then both come, in order"
    );
}

pub async fn unsettled_messages_are_redelivered_in_order_after_the_visibility_timeout<H: HasQuota>() {
    let h = H::open().await;
    for name in ["alice", "bob", "carol"] {
        send_numbered(&h, name, 4).await;
    }
    let first = Claims::claim(&h, 12).await;
    expect_nothing_claimable(&h, "everything is out").await;
    h.clock().advance(VISIBILITY);
    let again = Claims::claim(&h, 12).await;
    let sorted = |held: &Claims| {
        let mut messages: Vec<Message> = held.messages().cloned().collect();
        messages.sort_by_key(|message| message.position);
        messages
    };
    assert_eq!(
        sorted(&again),
        sorted(&first),
        "the same messages come again, at the same places, not counted as put back"
    );
    assert_eq!(texts_by_key(again.messages()), texts_by_key(first.messages()), "and in the same order");
    again.settled(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 12, "whoever holds them now can settle them");
}

pub async fn a_lease_lasts_to_its_last_microsecond<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let visibility = Duration::from_micros(7_000_003);
    let held = Claims::claim_for(&h, 1, visibility).await;
    h.clock().advance(visibility - TICK);
    expect_nothing_claimable(&h, "the lease has a microsecond left").await;
    held.settled(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 1, "a lease settles to its last microsecond");
}

pub async fn an_expired_lease_settles_nothing<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let late = Claims::claim(&h, 3).await;
    h.clock().advance(VISIBILITY);
    late.refused(&h, all_kinds).await;
    assert_eq!(
        queue_audit(&h).await.in_flight,
        3,
        "nothing was settled, even though nobody else had claimed"
    );
    let again = Claims::claim(&h, 3).await;
    assert_eq!(again.texts(), numbered_texts("alice", 1..=3), "the messages come again, in order");
    assert!(again.messages().all(|message| message.attempts == 0), "and were not put back");
}

/// One disposition of each kind, by the number at the end of the text.
fn all_kinds(message: &Message) -> Disposition {
    match text(message).as_bytes() {
        [.., b'1'] => Disposition::Done,
        [.., b'2'] => Disposition::Retry(Duration::from_secs(5)),
        _ => Disposition::Dead("too late to say so"),
    }
}

pub async fn a_stale_receipt_settles_nothing_and_the_new_holder_settles_all<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let stale = Claims::claim(&h, 3).await;
    h.clock().advance(VISIBILITY);
    let holder = Claims::claim(&h, 3).await;
    stale.refused(&h, all_kinds).await;
    assert_eq!(queue_audit(&h).await.in_flight, 3, "a stale receipt settles nothing");
    holder.settled(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 3, "the new holder settles all of it");
    stale.refused(&h, all_kinds).await;
    assert_eq!(queue_audit(&h).await.done, 3, "a stale receipt stays stale");
}

pub async fn a_settled_receipt_settles_nothing_more<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let held = Claims::claim(&h, 3).await;
    held.settled(&h, |_| Disposition::Leave).await;
    held.refused(&h, all_kinds).await;
    assert_eq!(queue_audit(&h).await.in_flight, 3, "settling gives up the lease");
    assert_eq!(
        texts(&Claims::drain(&h).await),
        numbered_texts("alice", 1..=3),
        "and leaves the messages to the next claim"
    );
}

pub async fn an_old_receipt_does_not_end_a_newer_lease<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let given_up = Claims::claim(&h, 2).await;
    given_up.settled(&h, |_| Disposition::Leave).await;
    let run_out = Claims::claim(&h, 2).await;
    h.clock().advance(VISIBILITY);
    let holder = Claims::claim(&h, 2).await;
    given_up.refused(&h, |_| Disposition::Leave).await;
    run_out.refused(&h, |_| Disposition::Leave).await;
    expect_nothing_claimable(&h, "the newer lease still holds").await;
    holder.settled(&h, |_| Disposition::Done).await;
}

pub async fn a_lease_ends_when_the_clock_is_set_back_before_its_start<H: HasQuota>() {
    let h = H::open().await;
    if h.store_clock().is_none() {
        return;
    }
    let ahead = Duration::from_secs(7_200);
    send_numbered(&h, "alice", 1).await;
    h.clock().advance(ahead);
    let lost = Claims::claim(&h, 1).await;
    h.clock().set_back(ahead);
    let again = Claims::claim(&h, 1).await;
    assert_eq!(again.texts(), lost.texts(), "nobody waits until the clock has caught up");
    again.settled(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 1);
}
