//! What a settlement does, and to what.

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
    Claims::claim(&h, 3).await.settled(&h, |_| Disposition::Done).await;
    expect_nothing_claimable(&h, "everything is done").await;
    h.clock().advance(Duration::from_secs(86_400));
    expect_nothing_claimable(&h, "what is done never comes again").await;
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 3, done: 3, ..QueueAudit::default() },
        "the books say so"
    );
}

pub async fn messages_not_in_the_settlement_are_claimable_again_at_once<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 4).await;
    let held = Claims::claim(&h, 4).await;
    let disposition = |message: &_| {
        if text(message).ends_with(['1', '2']) { Disposition::Done } else { Disposition::Leave }
    };
    held.settled(&h, disposition).await;
    let again = Claims::claim(&h, 2).await;
    assert_eq!(
        again.texts(),
        numbered_texts("alice", 3..=4),
        "what was not named stays, and its lease is given up"
    );
    assert!(again.messages().all(|message| message.attempts == 0), "it was not put back");
}

pub async fn one_settlement_may_mix_all_dispositions<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    send_numbered(&h, "bob", 2).await;
    send_numbered(&h, "carol", 2).await;
    let held = Claims::claim(&h, 6).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" | "carol 1" => Disposition::Done,
        "alice 2" => Disposition::Dead("no such number"),
        "bob 1" => Disposition::Retry(Duration::from_secs(5)),
        _ => Disposition::Leave,
    };
    held.settled(&h, disposition).await;
    let expected = QueueAudit { accepted: 6, done: 2, dead: 1, in_flight: 3, discarded: 0 };
    assert_eq!(queue_audit(&h).await, expected, "each message is where the settlement put it");
    assert_eq!(texts(&Claims::drain(&h).await), ["carol 2"], "bob waits for his retry, alice is through");
    h.clock().advance(Duration::from_secs(5));
    assert_eq!(texts(&Claims::drain(&h).await), numbered_texts("bob", 1..=2), "then bob's come, in order");
}

pub async fn a_settlement_touches_no_shard_it_does_not_hold<H: HasQuota>() {
    let h = H::open().await;
    for n in 0..20 {
        send_numbered(&h, &format!("user-{n}"), 1).await;
    }
    let all = Claims::claim(&h, 20).await;
    let everywhere: Vec<Position> = all.messages().map(|message| message.position).collect();
    all.settled(&h, |_| Disposition::Leave).await;
    let one = claim(&h, 1).await;
    let held: Vec<u16> = one.receipt.leases.iter().map(|lease| lease.shard).collect();
    let elsewhere: Vec<Position> =
        everywhere.into_iter().filter(|position| !held.contains(&position.shard)).collect();
    let left = elsewhere.len() as u64;
    let settlement = Settlement { done: elsewhere, ..Settlement::default() };
    h.queue().settle(&one.receipt, settlement).await.expect("settle must succeed");
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 20, in_flight: 20, ..QueueAudit::default() },
        "{left} are not its to settle"
    );
    assert_eq!(Claims::drain(&h).await.len(), 20, "all of them are still delivered");
}

pub async fn a_position_named_twice_counts_once<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let held = Claims::claim(&h, 3).await;
    let places: Vec<Position> = held.messages().map(|message| message.position).collect();
    for receipt in held.receipts() {
        let settlement = Settlement {
            done: vec![places[0], places[0], places[1]],
            retry: vec![(places[1], Duration::from_secs(1))],
            dead: vec![
                (places[0], "dead as well".into()),
                (places[2], "one".into()),
                (places[2], "two".into()),
            ],
            deferred: vec![(places[1], Duration::from_secs(1))],
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
    let held = Claims::claim(&h, 2).await;
    let shard = held.messages().next().expect("two are held").position.shard;
    let nowhere = [i64::MAX, i64::MIN, -1, 1 << 40].map(|id| Position { shard, id });
    let elsewhere = [u16::MAX, 999].map(|shard| Position { shard, id: 1 });
    for receipt in held.receipts() {
        let settlement = Settlement {
            done: [nowhere.as_slice(), &elsewhere].concat(),
            retry: nowhere.iter().map(|&position| (position, TICK)).collect(),
            dead: nowhere.iter().map(|&position| (position, "nothing there".into())).collect(),
            deferred: nowhere.iter().map(|&position| (position, TICK)).collect(),
        };
        assert!(h.queue().settle(receipt, settlement).await.expect("settle must succeed"), "the lease holds");
    }
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 2, in_flight: 2, ..QueueAudit::default() },
        "nothing was there to settle"
    );
}

pub async fn done_and_dead_messages_cannot_be_settled_again<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let held = Claims::claim(&h, 2).await;
    let [done, dead] = [0, 1].map(|n| held.messages().nth(n).expect("two are held").position);
    let disposition = |message: &_| {
        if text(message) == "alice 1" { Disposition::Done } else { Disposition::Dead("given up") }
    };
    held.settled(&h, disposition).await;
    let before = (queue_audit(&h).await, dead_letters(&h, None, 10).await);
    let last = Claims::claim(&h, 1).await;
    for receipt in last.receipts() {
        let settlement = Settlement {
            done: vec![done, dead],
            retry: vec![(done, Duration::ZERO), (dead, Duration::ZERO)],
            dead: vec![(done, "done before".into()), (dead, "dead before".into())],
            deferred: vec![(done, Duration::ZERO), (dead, Duration::ZERO)],
        };
        assert!(h.queue().settle(receipt, settlement).await.expect("settle must succeed"), "the lease holds");
    }
    assert_eq!(
        (queue_audit(&h).await, dead_letters(&h, None, 10).await),
        before,
        "what is done or dead stays where it is"
    );
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 3"], "and does not come again");
}

pub async fn an_empty_claim_may_be_settled<H: HasQuota>() {
    let h = H::open().await;
    let empty = claim(&h, 10).await;
    send_numbered(&h, "alice", 1).await;
    // True or false: there was nothing to hold. But a worker that settles whatever it was given must not fail.
    h.queue()
        .settle(&empty.receipt, Settlement::default())
        .await
        .expect("settling an empty claim must not fail");
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "and it changes nothing");
}

pub async fn a_deferred_message_is_redelivered_and_counts_no_attempt<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 6).await;
    send_numbered(&h, "bob", 1).await;
    let wait = Duration::from_secs(5);
    let held = Claims::claim(&h, 7).await;
    held.settled(&h, |message| match text(message).as_str() {
        "alice 1" => Disposition::Defer(wait),
        "bob 1" => Disposition::Defer(Duration::ZERO),
        _ => Disposition::Leave,
    })
    .await;
    assert_eq!(texts(&Claims::drain(&h).await), ["bob 1"], "the rest of its key waits behind it");
    h.clock().advance(wait - TICK);
    expect_nothing_claimable(&h, "it is put off to the last microsecond").await;
    h.clock().advance(TICK);
    let held = Claims::claim(&h, 6).await;
    assert_eq!(held.texts(), numbered_texts("alice", 1..=6));
    assert!(held.messages().all(|message| message.attempts == 0), "{held:?}");
    held.settled(&h, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&h).await, QueueAudit { accepted: 7, done: 7, ..QueueAudit::default() });
}

pub async fn deferred_messages_are_settled_individually_without_a_lease<H: HasQuota>() {
    let h = H::open().await;
    for user in ["a", "b", "c", "d", "e"] {
        send_numbered(&h, user, 1).await;
    }
    let held = Claims::claim(&h, 5).await;
    let kept: Vec<_> = held.messages().cloned().collect();
    let place = |user: &str| kept.iter().find(|message| message.key == user).expect("it is kept").position;
    held.settled(&h, |message| match message.key.as_str() {
        "e" => Disposition::Leave,
        _ => Disposition::Defer(VISIBILITY),
    })
    .await;
    let other = Claims::claim(&h, 1).await;
    assert_eq!(other.texts(), ["e 1"], "the others are kept");
    let settle = async |settlement| {
        h.queue().settle_deferred(TOPIC, settlement).await.expect("settle_deferred must succeed");
    };
    settle(Settlement { done: vec![place("a")], ..Settlement::default() }).await;
    settle(Settlement { dead: vec![(place("b"), "bad".into())], ..Settlement::default() }).await;
    settle(Settlement { retry: vec![(place("c"), TICK)], ..Settlement::default() }).await;
    settle(Settlement { deferred: vec![(place("d"), Duration::ZERO)], ..Settlement::default() }).await;
    // Again, and of what is not there: changes nothing.
    let gone = vec![place("a"), place("b"), Position { shard: 0, id: 1 << 40 }];
    settle(Settlement { done: gone, ..Settlement::default() }).await;
    let expected = QueueAudit { accepted: 5, done: 1, dead: 1, in_flight: 3, ..QueueAudit::default() };
    assert_eq!(queue_audit(&h).await, expected);
    other.settled(&h, |_| Disposition::Done).await;
    h.clock().advance(TICK);
    let mut rest: Vec<_> = Claims::drain(&h).await.into_iter().map(|m| (m.key, m.attempts)).collect();
    rest.sort();
    assert_eq!(rest, [("c".to_owned(), 1), ("d".to_owned(), 0)]);
    assert_eq!(dead_letters(&h, None, 10).await[0].attempts, 1);
}
