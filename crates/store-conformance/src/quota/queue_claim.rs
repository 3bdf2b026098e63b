//! What a claim hands out.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_queue::QueueAudit;
use weir_store::quota::{SendOutcome, TOPIC};

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    VISIBILITY, accept_batch, awkward_messages, awkward_user_ids, claim, configure, event,
    expect_nothing_claimable, numbered_texts, queue_audit, send, send_batch, send_numbered, sends, text,
    texts_by_key, user,
};

pub async fn every_accepted_message_is_claimable_as_its_event<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 10, 1).await;
    for _ in 0..3 {
        h.clock().advance(Duration::from_micros(1_000_001));
        let outcome = send_batch(&h, vec![send("alice", "hello")]).await.remove(0);
        let SendOutcome::Accepted { message_id, at, .. } = outcome else { panic!("alice may send") };
        let claims = Claims::claim(&h, 1).await;
        let event = event(claims.only());
        assert_eq!(claims.only().key, "alice", "the key is the user");
        assert_eq!(claims.only().attempts, 0, "it was never retried");
        assert_eq!(
            event.message_id,
            Some(*message_id.as_uuid()),
            "the event has the message id that the caller got"
        );
        assert_eq!(
            (event.user_id.as_ref(), event.message.as_ref()),
            ("alice", "hello"),
            "the event has user and text"
        );
        assert_eq!(event.accepted_at, Some(weir_queue::rfc3339(at)), "the event has the time of acceptance");
        claims.must_settle(&h, |_| Disposition::Done).await;
    }
}

pub async fn awkward_messages_arrive_unchanged<H: HasQuota>() {
    let h = H::open().await;
    let messages = awkward_messages();
    configure(&h, "alice", 1_000, 1).await;
    accept_batch(&h, messages.iter().map(|message| send("alice", message)).collect()).await;
    let delivered = Claims::drain(&h).await;
    assert_eq!(delivered.len(), messages.len(), "every message arrives");
    for (sent, arrived) in messages.iter().zip(&delivered) {
        let shown: String = sent.chars().take(40).collect();
        assert!(*sent == text(arrived), "{shown:?} must arrive as it was sent");
    }
}

pub async fn awkward_user_ids_arrive_as_keys<H: HasQuota>() {
    let h = H::open().await;
    let names = awkward_user_ids();
    for name in &names {
        configure(&h, name, 5, 1).await;
    }
    let batch: Vec<_> = names.iter().map(|name| send(name, name)).collect();
    accept_batch(&h, [batch.clone(), batch].concat()).await;
    let delivered = Claims::drain(&h).await;
    assert!(delivered.iter().all(|message| event(message).user_id == message.key), "the key is the user");
    let expected: BTreeMap<_, _> = names.iter().map(|name| (name.clone(), vec![name.clone(); 2])).collect();
    assert_eq!(texts_by_key(&delivered), expected, "each user's messages arrive under their own key");
}

pub async fn claims_keep_the_order_of_each_key<H: HasQuota>() {
    let h = H::open().await;
    let names = ["alice", "bob", "carol", "dave", "erin"];
    for name in names {
        configure(&h, name, 100, 1).await;
    }
    for n in 1..=12 {
        accept_batch(&h, names.iter().map(|name| send(name, &format!("{name} {n}"))).collect()).await;
    }
    let mut delivered = Vec::new();
    for max in (1..=7).cycle().take(200) {
        let claims = Claims::claim(&h, max.min(60 - delivered.len())).await;
        claims.must_settle(&h, |_| Disposition::Done).await;
        delivered.extend(claims.messages().cloned());
        if delivered.len() == 60 {
            break;
        }
    }
    let expected: BTreeMap<_, _> =
        names.iter().map(|name| (name.to_string(), numbered_texts(name, 1..=12))).collect();
    assert_eq!(texts_by_key(&delivered), expected, "each key's messages come once and in order");
}

pub async fn a_claim_hands_out_at_most_max<H: HasQuota>() {
    let h = H::open().await;
    for n in 0..40 {
        send_numbered(&h, &format!("user-{n}"), 2).await;
    }
    for max in [1, 2, 3, 10, 17] {
        let claim = claim(&h, max).await;
        assert!(!claim.messages.is_empty(), "messages are waiting and none is leased");
        assert!(claim.messages.len() <= max, "a claim of {max} returned {} messages", claim.messages.len());
        let is_settled =
            h.queue().settle(&claim.receipt, Default::default()).await.expect("settle must succeed");
        assert!(is_settled, "the lease is still valid");
    }
}

pub async fn a_claim_of_0_messages_returns_and_leases_nothing<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    assert!(claim(&h, 0).await.messages.is_empty(), "0 messages were requested");
    let claims = Claims::claim(&h, 2).await;
    assert_eq!(
        claims.texts(),
        numbered_texts("alice", 1..=2),
        "messages that were not returned are not leased"
    );
}

pub async fn a_claim_may_ask_for_any_number<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let claim = claim(&h, usize::MAX).await;
    assert!(!claim.messages.is_empty(), "a claim may ask for more than there is");
    let letters =
        h.queue().dead_letters(None, usize::MAX, usize::MAX).await.expect("dead_letters must succeed");
    assert!(letters.is_empty(), "there are no dead letters");
}

pub async fn an_empty_claim_holds_nothing_back<H: HasQuota>() {
    let h = H::open().await;
    expect_nothing_claimable(&h, "nothing was sent").await;
    send_numbered(&h, "alice", 1).await;
    let claims = Claims::claim(&h, 1).await;
    assert_eq!(claims.texts(), ["alice 1"], "an empty claim must not block the next one");
    claims.must_settle(&h, |_| Disposition::Retry(Duration::from_secs(1))).await;
    expect_nothing_claimable(&h, "the only message waits for its retry").await;
    h.clock().advance(Duration::from_secs(1));
    assert_eq!(
        Claims::claim(&h, 1).await.texts(),
        ["alice 1"],
        "nor may an empty claim whose messages were all hidden"
    );
}

pub async fn an_unknown_topic_has_nothing_to_claim<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    for topic in ["nothing-here", "", "SMS-OUTBOUND", "sms-outbound ", "sms%", "' OR 1=1 --"] {
        let claim = h.queue().claim(topic, 10, VISIBILITY).await.expect("claim must succeed");
        assert!(claim.messages.is_empty(), "there is nothing on {topic:?}");
    }
    assert_eq!(Claims::drain(&h).await.len(), 1, "the message is on {TOPIC}");
}

pub async fn messages_of_a_removed_user_are_still_delivered<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    h.quota().remove(&user("alice")).await.expect("remove must succeed");
    send_numbered(&h, "alice", 0).await;
    accept_batch(&h, vec![send("alice", "alice 3")]).await;
    let delivered = texts_by_key(&Claims::drain(&h).await);
    assert_eq!(
        delivered["alice"],
        numbered_texts("alice", 1..=3),
        "accepted messages are delivered even if the user is removed"
    );
}

pub async fn a_large_claim_is_settled_whole<H: HasQuota>() {
    let h = H::open().await;
    let names: Vec<String> = (0..40).map(|n| format!("user-{n}")).collect();
    for name in &names {
        configure(&h, name, 1_000, 1).await;
    }
    accept_batch(&h, names.iter().flat_map(|name| sends(name, 100)).collect()).await;
    Claims::claim(&h, 4_000).await.must_settle(&h, |_| Disposition::Done).await;
    let expected = QueueAudit { accepted: 4_000, done: 4_000, ..QueueAudit::default() };
    assert_eq!(queue_audit(&h).await, expected, "4,000 messages can be settled at once");
}
