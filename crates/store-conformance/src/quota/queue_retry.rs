//! Retries: when a message comes again, and what waits for it.

use std::time::Duration;

use weir_queue::Message;

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    TICK, expect_nothing_claimable, numbered_texts, send_numbered, text, texts, texts_by_key,
};

const SECOND: Duration = Duration::from_secs(1);

pub async fn a_retried_message_is_hidden_until_its_time<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let first = Claims::claim(&h, 1).await;
    let after = Duration::from_micros(5_000_007);
    first.must_settle(&h, |_| Disposition::Retry(after)).await;
    expect_nothing_claimable(&h, "its delay has just begun").await;
    h.clock().advance(after - TICK);
    expect_nothing_claimable(&h, "its delay lasts for one more microsecond").await;
    h.clock().advance(TICK);
    let again = Claims::claim(&h, 1).await;
    let expected = Message { attempts: 1, ..first.only().clone() };
    assert_eq!(*again.only(), expected, "it comes on time, unchanged, with one attempt");
}

pub async fn a_retried_message_holds_back_its_key_and_no_other<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    for n in 0..20 {
        send_numbered(&h, &format!("user-{n}"), 2).await;
    }
    let claims = Claims::claim(&h, 43).await;
    let disposition = |message: &_| {
        if text(message) == "alice 1" { Disposition::Retry(SECOND) } else { Disposition::Leave }
    };
    claims.must_settle(&h, disposition).await;
    let others = texts_by_key(&Claims::drain(&h).await);
    assert!(!others.contains_key("alice"), "later messages of the key wait behind the retry");
    assert_eq!(
        others.values().map(Vec::len).sum::<usize>(),
        40,
        "other keys do not wait, even in the same shard"
    );
    h.clock().advance(SECOND);
    let claims = Claims::claim(&h, 3).await;
    assert_eq!(claims.texts(), numbered_texts("alice", 1..=3), "after the delay the key continues in order");
    let attempts: Vec<u32> = claims.messages().map(|message| message.attempts).collect();
    assert_eq!(attempts, [1, 0, 0], "only the retried message counts an attempt");
}

pub async fn a_retry_without_delay_is_claimable_at_once<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let claims = Claims::claim(&h, 1).await;
    claims.must_settle(&h, |_| Disposition::Retry(Duration::ZERO)).await;
    let again = Claims::claim(&h, 2).await;
    assert_eq!(again.texts(), numbered_texts("alice", 1..=2), "there is no delay");
    assert_eq!(again.messages().next().map(|message| message.attempts), Some(1), "it was retried");
}

pub async fn each_retry_counts_one_attempt<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    for attempts in 0..6 {
        let claims = Claims::claim(&h, 1).await;
        assert_eq!(claims.only().attempts, attempts, "a message has the number of its retries");
        claims.must_settle(&h, |_| Disposition::Retry(SECOND)).await;
        h.clock().advance(SECOND);
    }
}

pub async fn later_retries_of_a_key_wait_for_earlier_ones<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let claims = Claims::claim(&h, 3).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" => Disposition::Retry(SECOND * 10),
        _ => Disposition::Retry(SECOND),
    };
    claims.must_settle(&h, disposition).await;
    h.clock().advance(SECOND * 5);
    expect_nothing_claimable(&h, "their delay is over, but they wait for an earlier message of their key")
        .await;
    h.clock().advance(SECOND * 5);
    let claims = Claims::claim(&h, 3).await;
    assert_eq!(claims.texts(), numbered_texts("alice", 1..=3), "all come together, in order");
    assert!(claims.messages().all(|message| message.attempts == 1), "each was retried once");
}

pub async fn an_earlier_retry_does_not_wait_for_a_later_one<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let claims = Claims::claim(&h, 3).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" => Disposition::Retry(SECOND),
        "alice 2" => Disposition::Retry(SECOND * 10),
        _ => Disposition::Leave,
    };
    claims.must_settle(&h, disposition).await;
    h.clock().advance(SECOND);
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "only the first comes, on time");
    h.clock().advance(SECOND * 9);
    assert_eq!(
        texts(&Claims::drain(&h).await),
        numbered_texts("alice", 2..=3),
        "the second comes on time, with the message that waited for it"
    );
}

pub async fn a_retry_scheduled_before_the_clock_was_set_back_keeps_its_delay<H: HasQuota>() {
    let h = H::open().await;
    let Some(clock) = h.store_clock() else { return };
    let ahead = SECOND * 7_200;
    send_numbered(&h, "alice", 1).await;
    h.clock().advance(ahead);
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Retry(SECOND * 9)).await;
    h.clock().set_back(ahead);
    assert_eq!(clock.reschedule_deferred().await.expect("an answer"), 1);
    assert_eq!(clock.reschedule_deferred().await.expect("an answer"), 0, "the second call changes nothing");
    expect_nothing_claimable(&h, "its delay is as long as before").await;
    h.clock().advance(SECOND * 9);
    assert_eq!(Claims::claim(&h, 1).await.texts(), numbered_texts("alice", 1..=1), "and not longer");
}
