//! How long a claim leases its messages, and what an expired claim can still do.

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
                "{} is leased already, but another claim got {}",
                message.key,
                text(&message)
            );
        }
    }
    assert!(!held_by.is_empty(), "messages are waiting and none was leased");
}

pub async fn a_message_sent_while_its_key_is_leased_waits_for_the_settlement<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let claims = Claims::claim(&h, 1).await;
    accept_batch(&h, vec![send("alice", "alice 2")]).await;
    expect_nothing_claimable(&h, "alice's messages are leased, so her next one has to wait").await;
    claims.must_settle(&h, |_| Disposition::Leave).await;
    assert_eq!(
        Claims::claim(&h, 2).await.texts(),
        numbered_texts("alice", 1..=2),
        "after the settlement both can be claimed, in order"
    );
}

pub async fn unsettled_messages_are_redelivered_in_order_after_the_visibility_timeout<H: HasQuota>() {
    let h = H::open().await;
    for name in ["alice", "bob", "carol"] {
        send_numbered(&h, name, 4).await;
    }
    let first = Claims::claim(&h, 12).await;
    expect_nothing_claimable(&h, "everything is leased").await;
    h.clock().advance(VISIBILITY);
    let again = Claims::claim(&h, 12).await;
    let sorted = |claims: &Claims| {
        let mut messages: Vec<Message> = claims.messages().cloned().collect();
        messages.sort_by_key(|message| message.position);
        messages
    };
    assert_eq!(
        sorted(&again),
        sorted(&first),
        "the same messages come again, at the same positions, without an attempt"
    );
    assert_eq!(
        texts_by_key(again.messages()),
        texts_by_key(first.messages()),
        "the messages come again in the same order"
    );
    again.must_settle(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 12, "the new holder can settle them");
}

pub async fn a_lease_lasts_to_its_last_microsecond<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let visibility = Duration::from_micros(7_000_003);
    let claims = Claims::claim_for(&h, 1, visibility).await;
    h.clock().advance(visibility - TICK);
    expect_nothing_claimable(&h, "the lease lasts for one more microsecond").await;
    claims.must_settle(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 1, "a lease is valid to its last microsecond");
}

pub async fn an_expired_lease_settles_nothing<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let late = Claims::claim(&h, 3).await;
    h.clock().advance(VISIBILITY);
    late.must_be_refused(&h, mixed_dispositions).await;
    assert_eq!(
        queue_audit(&h).await.in_flight,
        3,
        "nothing was settled, even though nobody else has claimed"
    );
    let again = Claims::claim(&h, 3).await;
    assert_eq!(again.texts(), numbered_texts("alice", 1..=3), "the messages can be claimed again, in order");
    assert!(again.messages().all(|message| message.attempts == 0), "no attempt was counted");
}

/// A different disposition for each message, by the digit at the end of its text.
fn mixed_dispositions(message: &Message) -> Disposition {
    match text(message).as_bytes() {
        [.., b'1'] => Disposition::Done,
        [.., b'2'] => Disposition::Retry(Duration::from_secs(5)),
        _ => Disposition::Dead("too late"),
    }
}

pub async fn a_stale_receipt_settles_nothing_and_the_new_holder_settles_all<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let stale = Claims::claim(&h, 3).await;
    h.clock().advance(VISIBILITY);
    let holder = Claims::claim(&h, 3).await;
    stale.must_be_refused(&h, mixed_dispositions).await;
    assert_eq!(queue_audit(&h).await.in_flight, 3, "a stale receipt settles nothing");
    holder.must_settle(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 3, "the new holder settles all of it");
    stale.must_be_refused(&h, mixed_dispositions).await;
    assert_eq!(queue_audit(&h).await.done, 3, "a stale receipt stays stale");
}

pub async fn a_settled_receipt_settles_nothing_more<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let claims = Claims::claim(&h, 3).await;
    claims.must_settle(&h, |_| Disposition::Leave).await;
    claims.must_be_refused(&h, mixed_dispositions).await;
    assert_eq!(queue_audit(&h).await.in_flight, 3, "settling ends the lease");
    assert_eq!(
        texts(&Claims::drain(&h).await),
        numbered_texts("alice", 1..=3),
        "the next claim gets the messages"
    );
}

pub async fn an_old_receipt_does_not_end_a_newer_lease<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let settled = Claims::claim(&h, 2).await;
    settled.must_settle(&h, |_| Disposition::Leave).await;
    let expired = Claims::claim(&h, 2).await;
    h.clock().advance(VISIBILITY);
    let holder = Claims::claim(&h, 2).await;
    settled.must_be_refused(&h, |_| Disposition::Leave).await;
    expired.must_be_refused(&h, |_| Disposition::Leave).await;
    expect_nothing_claimable(&h, "the newer lease is still valid").await;
    holder.must_settle(&h, |_| Disposition::Done).await;
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
    assert_eq!(again.texts(), lost.texts(), "messages need not wait until the clock has caught up");
    again.must_settle(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await.done, 1);
}
