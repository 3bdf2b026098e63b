//! Dead letters that are put back.

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
    Claims::claim(&h, 1).await.settled(&h, |_| Disposition::Done).await;
    Claims::claim(&h, 1).await.settled(&h, |_| Disposition::Retry(Duration::ZERO)).await;
    let tried = Claims::claim(&h, 1).await;
    tried.settled(&h, |_| Disposition::Dead("given up")).await;
    let id = only_dead_letter(&h).await.id;
    replay(&h, &id).await;
    assert!(dead_letters(&h, None, 10).await.is_empty(), "a replayed letter is not dead any more");
    assert!(!h.queue().replay(&id).await.expect("replay must succeed"), "and cannot be put back twice");
    let held = Claims::claim(&h, 3).await;
    assert_eq!(held.texts(), numbered_texts("alice", 2..=4), "it stands before the later ones of its key");
    let expected = Message { attempts: 0, ..tried.only().clone() };
    assert_eq!(
        held.messages().next(),
        Some(&expected),
        "at its old place, as it was, its attempts forgotten"
    );
    held.settled(&h, |_| Disposition::Done).await;
    let books = queue_audit(&h).await;
    assert_eq!((books.accepted, books.done), (4, 4), "it was accepted once");
}

pub async fn a_replayed_letter_keeps_its_position_before_messages_sent_since<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    Claims::claim(&h, 1).await.settled(&h, |_| Disposition::Dead("given up")).await;
    // The queue is empty now: an engine that gives places anew would give the dead one's to the next message.
    accept_batch(&h, vec![send("alice", "alice 2"), send("alice", "alice 3")]).await;
    replay(&h, &only_dead_letter(&h).await.id).await;
    let held = Claims::claim(&h, 3).await;
    assert_eq!(held.texts(), numbered_texts("alice", 1..=3), "a place is given once");
    held.settled(&h, |_| Disposition::Done).await;
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 3, done: 3, ..QueueAudit::default() },
        "nothing is lost or doubled"
    );
}

pub async fn a_replayed_letter_does_not_wait_for_a_later_retry<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let after = Duration::from_secs(10);
    let disposition = |message: &_| {
        if text(message) == "alice 1" { Disposition::Dead("given up") } else { Disposition::Retry(after) }
    };
    Claims::claim(&h, 2).await.settled(&h, disposition).await;
    replay(&h, &only_dead_letter(&h).await.id).await;
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "only later messages wait behind a retry");
    h.clock().advance(after);
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 2"], "the retry comes at its own time");
}

pub async fn a_replayed_letter_waits_while_its_key_is_leased<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    Claims::claim(&h, 1).await.settled(&h, |_| Disposition::Dead("given up")).await;
    let out = Claims::claim(&h, 2).await;
    replay(&h, &only_dead_letter(&h).await.id).await;
    expect_nothing_claimable(&h, "alice's messages are out").await;
    out.settled(&h, |_| Disposition::Leave).await;
    let held = Claims::claim(&h, 3).await;
    assert_eq!(held.texts(), numbered_texts("alice", 1..=3), "then it comes, before the others");
}

pub async fn a_replayed_letter_can_die_again<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    for round in ["first", "second", "third"] {
        Claims::claim(&h, 1).await.settled(&h, |_| Disposition::Retry(Duration::ZERO)).await;
        Claims::claim(&h, 1).await.settled(&h, |_| Disposition::Dead(round)).await;
        let letter = only_dead_letter(&h).await;
        assert_eq!(
            (letter.reason.as_str(), letter.attempts),
            (round, 2),
            "its last life is the one it tells of"
        );
        assert_eq!(
            queue_audit(&h).await,
            QueueAudit { accepted: 1, dead: 1, ..QueueAudit::default() },
            "it is one message"
        );
        replay(&h, &letter.id).await;
    }
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "and can be delivered in the end");
}

pub async fn replay_all_replays_every_letter_in_order<H: HasQuota>() {
    let h = H::open().await;
    let replay_all = async || h.queue().replay_all().await.expect("replay_all must succeed");
    assert_eq!(replay_all().await, 0, "nothing has died");
    for name in ["alice", "bob", "carol"] {
        send_numbered(&h, name, 4).await;
    }
    let disposition = |message: &_| {
        if text(message).ends_with(['2', '4']) { Disposition::Leave } else { Disposition::Dead("given up") }
    };
    Claims::claim(&h, 12).await.settled(&h, disposition).await;
    assert_eq!(replay_all().await, 6, "it says how many there were");
    assert_eq!(replay_all().await, 0, "and leaves none");
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 12, in_flight: 12, ..QueueAudit::default() },
        "all wait again"
    );
    let delivered = Claims::drain(&h).await;
    assert!(delivered.iter().all(|message| message.attempts == 0), "their attempts are forgotten");
    for (name, texts) in texts_by_key(&delivered) {
        assert_eq!(texts, numbered_texts(&name, 1..=4), "each stands where it stood");
    }
}
