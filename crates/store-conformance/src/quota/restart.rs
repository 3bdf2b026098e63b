//! A restart loses nothing and repeats nothing.

use std::collections::HashSet;
use std::time::Duration;

use weir_queue::{MessageClaim, Settlement};
use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    TICK, VISIBILITY, accept_batch, configure, expect_nothing_claimable, find_quota, numbered_texts,
    outcome_letters, queue_audit, send, send_batch, send_numbered, sends, text, texts, texts_by_key, user,
};
use crate::quota::queue_dead::dead_letters;

pub async fn counts_and_windows_survive<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 1).await;
    configure(&h, "bob", 2, 3).await;
    send_batch(&h, [sends("alice", 3), sends("bob", 4)].concat()).await;
    h.clock().advance(Duration::from_micros(59_999_999));
    let before = (
        find_quota(&h, "alice").await,
        find_quota(&h, "bob").await,
        h.quota().audit().await.expect("audit must succeed"),
    );
    let h = h.reopen().await;
    let after = (
        find_quota(&h, "alice").await,
        find_quota(&h, "bob").await,
        h.quota().audit().await.expect("audit must succeed"),
    );
    assert_eq!(after, before, "rows are unchanged by the restart");
    let both = || [sends("alice", 3), sends("bob", 1)].concat();
    assert_eq!(outcome_letters(&send_batch(&h, both()).await), "AADD", "spent units stay spent");
    h.clock().advance(TICK);
    assert_eq!(outcome_letters(&send_batch(&h, both()).await), "AAAD", "windows keep their end");
}

pub async fn a_removed_user_stays_removed<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 1).await;
    h.quota().remove(&user("alice")).await.expect("remove must succeed");
    let h = h.reopen().await;
    assert_eq!(find_quota(&h, "alice").await, None, "a restart restores no removed user");
}

pub async fn queued_messages_survive_in_order<H: HasQuota>() {
    let h = H::open().await;
    for name in ["alice", "bob", "carol"] {
        send_numbered(&h, name, 5).await;
    }
    Claims::claim(&h, 4).await.must_settle(&h, |_| Disposition::Done).await;
    let claims = Claims::claim(&h, 11).await;
    let before = texts_by_key(claims.messages());
    claims.must_settle(&h, |_| Disposition::Leave).await;
    let h = h.reopen().await;
    assert_eq!(
        texts_by_key(&Claims::drain(&h).await),
        before,
        "waiting messages are delivered in order, done ones are not"
    );
}

pub async fn retries_survive_with_their_time_and_attempts<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let after = Duration::from_secs(20);
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Retry(after)).await;
    let h = h.reopen().await;
    h.clock().advance(after - TICK);
    expect_nothing_claimable(&h, "the retry keeps its delay").await;
    h.clock().advance(TICK);
    let claims = Claims::claim(&h, 2).await;
    assert_eq!(claims.texts(), numbered_texts("alice", 1..=2), "the retry keeps its position");
    let attempts: Vec<u32> = claims.messages().map(|message| message.attempts).collect();
    assert_eq!(attempts, [1, 0], "the retry keeps its attempts");
}

pub async fn dead_letters_survive<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let disposition = |message: &_| {
        if text(message) == "alice 3" { Disposition::Leave } else { Disposition::Dead("given up") }
    };
    Claims::claim(&h, 3).await.must_settle(&h, disposition).await;
    let before = dead_letters(&h, None, 10).await;
    let h = h.reopen().await;
    assert_eq!(dead_letters(&h, None, 10).await, before, "dead letters are unchanged by the restart");
    assert_eq!(h.queue().replay_all().await.expect("replay_all must succeed"), 2, "they can be replayed");
    assert_eq!(
        texts(&Claims::drain(&h).await),
        numbered_texts("alice", 1..=3),
        "replayed letters have their old positions"
    );
}

pub async fn the_books_survive<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 5).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" => Disposition::Done,
        "alice 2" | "alice 3" => Disposition::Dead("given up"),
        _ => Disposition::Leave,
    };
    Claims::claim(&h, 5).await.must_settle(&h, disposition).await;
    let id = dead_letters(&h, None, 1).await.remove(0).id;
    h.queue().discard(&id).await.expect("discard must succeed");
    let before = queue_audit(&h).await;
    let h = h.reopen().await;
    assert_eq!(queue_audit(&h).await, before, "the books are unchanged by the restart");
    Claims::drain(&h).await;
    let h = h.reopen().await;
    assert_eq!(queue_audit(&h).await.done, 3, "the books continue after the restart");
}

pub async fn claimed_messages_are_redelivered_after_a_restart<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    send_numbered(&h, "bob", 3).await;
    Claims::claim(&h, 6).await;
    let h = h.reopen().await;
    h.clock().advance(VISIBILITY);
    let claims = Claims::claim(&h, 6).await;
    assert!(claims.messages().all(|message| message.attempts == 0), "a restart counts no attempt");
    for (name, texts) in texts_by_key(claims.messages()) {
        assert_eq!(texts, numbered_texts(&name, 1..=3), "leased messages come again, in order");
    }
}

pub async fn a_receipt_from_before_a_restart_settles_nothing<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let before = h.queue().claim(TOPIC, 10, VISIBILITY).await.expect("claim must succeed");
    let h = h.reopen().await;
    h.clock().advance(VISIBILITY);
    let since = h.queue().claim(TOPIC, 10, VISIBILITY).await.expect("claim must succeed");
    assert_eq!(since.messages, before.messages, "leased messages come again");
    let done = Settlement { done: vec![since.messages[0].position], ..Settlement::default() };
    let settle = async |claim: &MessageClaim| {
        h.queue().settle(&claim.receipt, done.clone()).await.expect("settle must succeed")
    };
    assert!(!settle(&before).await, "the lease has expired");
    assert!(settle(&since).await);
}

pub async fn messages_sent_after_a_restart_come_after_older_ones<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let claims = Claims::claim(&h, 2).await;
    let mut ids: HashSet<_> =
        claims.messages().map(|message| crate::fixtures::event(message).message_id).collect();
    claims.must_settle(&h, |_| Disposition::Dead("given up")).await;
    let h = h.reopen().await;
    accept_batch(&h, vec![send("alice", "alice 3")]).await;
    h.queue().replay_all().await.expect("replay_all must succeed");
    let delivered = Claims::drain(&h).await;
    assert_eq!(texts(&delivered), numbered_texts("alice", 1..=3), "positions are not reused after a restart");
    ids.extend(delivered.iter().map(|message| crate::fixtures::event(message).message_id));
    assert_eq!(ids.len(), 3, "message ids are not reused after a restart");
}
