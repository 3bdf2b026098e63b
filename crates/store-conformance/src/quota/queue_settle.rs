//! Settlements: what they change, and what they leave alone.

use std::time::Duration;

use weir_queue::{Position, QueueAudit, Settlement};
use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    TICK, VISIBILITY, claim, expect_nothing_claimable, numbered_texts, queue_audit, send_numbered, text,
    texts, texts_by_key,
};
use crate::quota::queue_dead::dead_letters;

pub async fn done_messages_are_never_redelivered<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    Claims::claim(&h, 3).await.must_settle(&h, |_| Disposition::Done).await;
    expect_nothing_claimable(&h, "everything is done").await;
    h.clock().advance(Duration::from_secs(86_400));
    expect_nothing_claimable(&h, "a done message never comes again").await;
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 3, done: 3, ..QueueAudit::default() },
        "the books agree"
    );
}

pub async fn messages_not_in_the_settlement_are_claimable_again_at_once<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 4).await;
    let claims = Claims::claim(&h, 4).await;
    let disposition = |message: &_| {
        if text(message).ends_with(['1', '2']) { Disposition::Done } else { Disposition::Leave }
    };
    claims.must_settle(&h, disposition).await;
    let again = Claims::claim(&h, 2).await;
    assert_eq!(
        again.texts(),
        numbered_texts("alice", 3..=4),
        "messages left out of a settlement stay, and their lease ends"
    );
    assert!(again.messages().all(|message| message.attempts == 0), "no attempt was counted");
}

pub async fn one_settlement_may_mix_all_dispositions<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    send_numbered(&h, "bob", 2).await;
    send_numbered(&h, "carol", 2).await;
    let claims = Claims::claim(&h, 6).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" | "carol 1" => Disposition::Done,
        "alice 2" => Disposition::Dead("no such number"),
        "bob 1" => Disposition::Retry(Duration::from_secs(5)),
        _ => Disposition::Leave,
    };
    claims.must_settle(&h, disposition).await;
    let expected = QueueAudit { accepted: 6, done: 2, dead: 1, in_flight: 3, discarded: 0 };
    assert_eq!(queue_audit(&h).await, expected, "each message is where the settlement put it");
    assert_eq!(
        texts(&Claims::drain(&h).await),
        ["carol 2"],
        "bob's messages wait for the retry, and alice has none left"
    );
    h.clock().advance(Duration::from_secs(5));
    assert_eq!(
        texts(&Claims::drain(&h).await),
        numbered_texts("bob", 1..=2),
        "after the delay bob's messages come in order"
    );
}

pub async fn a_settlement_touches_no_shard_it_does_not_hold<H: HasQuota>() {
    let h = H::open().await;
    for n in 0..20 {
        send_numbered(&h, &format!("user-{n}"), 1).await;
    }
    let all = Claims::claim(&h, 20).await;
    let all_positions: Vec<Position> = all.messages().map(|message| message.position).collect();
    all.must_settle(&h, |_| Disposition::Leave).await;
    let one = claim(&h, 1).await;
    let held_shards: Vec<u16> = one.receipt.leases.iter().map(|lease| lease.shard).collect();
    let elsewhere: Vec<Position> =
        all_positions.into_iter().filter(|position| !held_shards.contains(&position.shard)).collect();
    let count = elsewhere.len() as u64;
    let settlement = Settlement { done: elsewhere, ..Settlement::default() };
    h.queue().settle(&one.receipt, settlement).await.expect("settle must succeed");
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 20, in_flight: 20, ..QueueAudit::default() },
        "the claim does not hold the shards of {count} messages"
    );
    assert_eq!(Claims::drain(&h).await.len(), 20, "all of them are still delivered");
}

pub async fn a_position_named_twice_counts_once<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let claims = Claims::claim(&h, 3).await;
    let positions: Vec<Position> = claims.messages().map(|message| message.position).collect();
    for receipt in claims.receipts() {
        let settlement = Settlement {
            done: vec![positions[0], positions[0], positions[1]],
            retry: vec![(positions[1], Duration::from_secs(1))],
            dead: vec![
                (positions[0], "dead as well".into()),
                (positions[2], "one".into()),
                (positions[2], "two".into()),
            ],
            deferred: vec![(positions[1], Duration::from_secs(1))],
        };
        h.queue().settle(receipt, settlement).await.expect("settle must succeed");
    }
    let books = queue_audit(&h).await;
    let letters = dead_letters(&h, None, 10).await;
    assert_eq!(letters.len() as u64, books.dead, "a message dies once: {letters:?}");
    h.clock().advance(Duration::from_secs(1));
    let waiting = Claims::drain(&h).await;
    assert_eq!(
        waiting.len() as u64,
        books.in_flight,
        "what is in flight is delivered: {:?}",
        texts_by_key(&waiting)
    );
}

pub async fn an_unknown_position_counts_nothing<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let claims = Claims::claim(&h, 2).await;
    let shard = claims.messages().next().expect("two messages are claimed").position.shard;
    let nowhere = [i64::MAX, i64::MIN, -1, 1 << 40].map(|id| Position { shard, id });
    let elsewhere = [u16::MAX, 999].map(|shard| Position { shard, id: 1 });
    for receipt in claims.receipts() {
        let settlement = Settlement {
            done: [nowhere.as_slice(), &elsewhere].concat(),
            retry: nowhere.iter().map(|&position| (position, TICK)).collect(),
            dead: nowhere.iter().map(|&position| (position, "no such message".into())).collect(),
            deferred: nowhere.iter().map(|&position| (position, TICK)).collect(),
        };
        assert!(
            h.queue().settle(receipt, settlement).await.expect("settle must succeed"),
            "the lease is valid"
        );
    }
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 2, in_flight: 2, ..QueueAudit::default() },
        "unknown positions change nothing"
    );
}

pub async fn done_and_dead_messages_cannot_be_settled_again<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let claims = Claims::claim(&h, 2).await;
    let [done, dead] = [0, 1].map(|n| claims.messages().nth(n).expect("two messages are claimed").position);
    let disposition = |message: &_| {
        if text(message) == "alice 1" { Disposition::Done } else { Disposition::Dead("given up") }
    };
    claims.must_settle(&h, disposition).await;
    let before = (queue_audit(&h).await, dead_letters(&h, None, 10).await);
    let last = Claims::claim(&h, 1).await;
    for receipt in last.receipts() {
        let settlement = Settlement {
            done: vec![done, dead],
            retry: vec![(done, Duration::ZERO), (dead, Duration::ZERO)],
            dead: vec![(done, "was done".into()), (dead, "was dead".into())],
            deferred: vec![(done, Duration::ZERO), (dead, Duration::ZERO)],
        };
        assert!(
            h.queue().settle(receipt, settlement).await.expect("settle must succeed"),
            "the lease is valid"
        );
    }
    assert_eq!(
        (queue_audit(&h).await, dead_letters(&h, None, 10).await),
        before,
        "done and dead messages keep their state"
    );
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 3"], "neither comes again");
}

pub async fn an_empty_claim_may_be_settled<H: HasQuota>() {
    let h = H::open().await;
    let empty = claim(&h, 10).await;
    send_numbered(&h, "alice", 1).await;
    // It may return true or false, since there was no lease. But a worker that settles every claim must not fail.
    h.queue()
        .settle(&empty.receipt, Settlement::default())
        .await
        .expect("settling an empty claim must not fail");
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "an empty settlement changes nothing");
}

pub async fn a_deferred_message_is_redelivered_and_counts_no_attempt<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 6).await;
    send_numbered(&h, "bob", 1).await;
    let wait = Duration::from_secs(5);
    let claims = Claims::claim(&h, 7).await;
    claims
        .must_settle(&h, |message| match text(message).as_str() {
            "alice 1" => Disposition::Defer(wait),
            "bob 1" => Disposition::Defer(Duration::ZERO),
            _ => Disposition::Leave,
        })
        .await;
    assert_eq!(texts(&Claims::drain(&h).await), ["bob 1"], "the rest of its key waits for it");
    h.clock().advance(wait - TICK);
    expect_nothing_claimable(&h, "its delay lasts to the last microsecond").await;
    h.clock().advance(TICK);
    let claims = Claims::claim(&h, 6).await;
    assert_eq!(claims.texts(), numbered_texts("alice", 1..=6));
    assert!(claims.messages().all(|message| message.attempts == 0), "{claims:?}");
    claims.must_settle(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await, QueueAudit { accepted: 7, done: 7, ..QueueAudit::default() });
}

pub async fn deferred_messages_are_settled_individually_without_a_lease<H: HasQuota>() {
    let h = H::open().await;
    for user in ["a", "b", "c", "d", "e"] {
        send_numbered(&h, user, 1).await;
    }
    let claims = Claims::claim(&h, 5).await;
    let messages: Vec<_> = claims.messages().cloned().collect();
    let position =
        |user: &str| messages.iter().find(|message| message.key == user).expect("it was claimed").position;
    claims
        .must_settle(&h, |message| match message.key.as_str() {
            "e" => Disposition::Leave,
            _ => Disposition::Defer(VISIBILITY),
        })
        .await;
    let other = Claims::claim(&h, 1).await;
    assert_eq!(other.texts(), ["e 1"], "the others are deferred");
    let settle = async |settlement| {
        h.queue().settle_deferred(TOPIC, settlement).await.expect("settle_deferred must succeed");
    };
    settle(Settlement { done: vec![position("a")], ..Settlement::default() }).await;
    settle(Settlement { dead: vec![(position("b"), "bad".into())], ..Settlement::default() }).await;
    settle(Settlement { retry: vec![(position("c"), TICK)], ..Settlement::default() }).await;
    settle(Settlement { deferred: vec![(position("d"), Duration::ZERO)], ..Settlement::default() }).await;
    // Settling them again, or an unknown position, changes nothing.
    let settled = vec![position("a"), position("b"), Position { shard: 0, id: 1 << 40 }];
    settle(Settlement { done: settled, ..Settlement::default() }).await;
    let expected = QueueAudit { accepted: 5, done: 1, dead: 1, in_flight: 3, ..QueueAudit::default() };
    assert_eq!(queue_audit(&h).await, expected);
    other.must_settle(&h, |_| Disposition::Done).await;
    h.clock().advance(TICK);
    let mut rest: Vec<_> = Claims::drain(&h).await.into_iter().map(|m| (m.key, m.attempts)).collect();
    rest.sort();
    assert_eq!(rest, [("c".to_owned(), 1), ("d".to_owned(), 0)]);
    assert_eq!(dead_letters(&h, None, 10).await[0].attempts, 1);
}
