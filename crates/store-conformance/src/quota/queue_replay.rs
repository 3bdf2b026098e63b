//! Replaying dead letters.

use std::time::Duration;

use weir_queue::{Message, QueueAudit};

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    accept_batch, expect_nothing_claimable, numbered_texts, queue_audit, send, send_numbered, text, texts,
    texts_by_key,
};
use crate::quota::queue_dead::{dead_letters, only_dead_letter};

async fn replay<H: HasQuota>(h: &H, id: &str) {
    assert!(h.queue().replay(id).await.expect("replay must succeed"), "the letter was there");
}

pub async fn a_replayed_letter_returns_to_its_position_with_no_attempts<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 4).await;
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Done).await;
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Retry(Duration::ZERO)).await;
    let tried = Claims::claim(&h, 1).await;
    tried.must_settle(&h, |_| Disposition::Dead("given up")).await;
    let id = only_dead_letter(&h).await.id;
    replay(&h, &id).await;
    assert!(dead_letters(&h, None, 10).await.is_empty(), "a replayed letter is not listed any more");
    assert!(!h.queue().replay(&id).await.expect("replay must succeed"), "a letter cannot be replayed twice");
    let claims = Claims::claim(&h, 3).await;
    assert_eq!(
        claims.texts(),
        numbered_texts("alice", 2..=4),
        "it comes before the later messages of its key"
    );
    let expected = Message { attempts: 0, ..tried.only().clone() };
    assert_eq!(
        claims.messages().next(),
        Some(&expected),
        "it has its old position and payload, and no attempts"
    );
    claims.must_settle(&h, |_| Disposition::Done).await;
    let books = queue_audit(&h).await;
    assert_eq!((books.accepted, books.done), (4, 4), "the replay counts as no new message");
}

pub async fn a_replayed_letter_keeps_its_position_before_messages_sent_since<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Dead("given up")).await;
    // The queue is empty now: an engine that reuses positions would give the dead letter's to the next message.
    accept_batch(&h, vec![send("alice", "alice 2"), send("alice", "alice 3")]).await;
    replay(&h, &only_dead_letter(&h).await.id).await;
    let claims = Claims::claim(&h, 3).await;
    assert_eq!(claims.texts(), numbered_texts("alice", 1..=3), "positions are never reused");
    claims.must_settle(&h, |_| Disposition::Done).await;
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 3, done: 3, ..QueueAudit::default() },
        "nothing is lost or duplicated"
    );
}

pub async fn a_replayed_letter_does_not_wait_for_a_later_retry<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let after = Duration::from_secs(10);
    let disposition = |message: &_| {
        if text(message) == "alice 1" { Disposition::Dead("given up") } else { Disposition::Retry(after) }
    };
    Claims::claim(&h, 2).await.must_settle(&h, disposition).await;
    replay(&h, &only_dead_letter(&h).await.id).await;
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "only later messages wait for a retry");
    h.clock().advance(after);
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 2"], "the retry comes at its own time");
}

pub async fn a_replayed_letter_waits_while_its_key_is_leased<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Dead("given up")).await;
    let claims = Claims::claim(&h, 2).await;
    replay(&h, &only_dead_letter(&h).await.id).await;
    expect_nothing_claimable(&h, "alice's messages are leased").await;
    claims.must_settle(&h, |_| Disposition::Leave).await;
    let claims = Claims::claim(&h, 3).await;
    assert_eq!(claims.texts(), numbered_texts("alice", 1..=3), "after that it comes before the others");
}

pub async fn a_replayed_letter_can_die_again<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    for round in ["first", "second", "third"] {
        Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Retry(Duration::ZERO)).await;
        Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Dead(round)).await;
        let letter = only_dead_letter(&h).await;
        assert_eq!(
            (letter.reason.as_str(), letter.attempts),
            (round, 2),
            "reason and attempts are those since the last replay"
        );
        assert_eq!(
            queue_audit(&h).await,
            QueueAudit { accepted: 1, dead: 1, ..QueueAudit::default() },
            "it still counts as one message"
        );
        replay(&h, &letter.id).await;
    }
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "it can be delivered in the end");
}

pub async fn replay_all_replays_every_letter_in_order<H: HasQuota>() {
    let h = H::open().await;
    let replay_all = async || h.queue().replay_all().await.expect("replay_all must succeed");
    assert_eq!(replay_all().await, 0, "there are no dead letters");
    for name in ["alice", "bob", "carol"] {
        send_numbered(&h, name, 4).await;
    }
    let disposition = |message: &_| {
        if text(message).ends_with(['2', '4']) { Disposition::Leave } else { Disposition::Dead("given up") }
    };
    Claims::claim(&h, 12).await.must_settle(&h, disposition).await;
    assert_eq!(replay_all().await, 6, "it returns the number of letters");
    assert_eq!(replay_all().await, 0, "no letter is left");
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 12, in_flight: 12, ..QueueAudit::default() },
        "all are in flight again"
    );
    let delivered = Claims::drain(&h).await;
    assert!(delivered.iter().all(|message| message.attempts == 0), "their attempts are reset");
    for (name, texts) in texts_by_key(&delivered) {
        assert_eq!(texts, numbered_texts(&name, 1..=4), "each has its old position");
    }
}
