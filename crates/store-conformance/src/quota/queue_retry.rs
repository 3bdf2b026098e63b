//! Messages that are put back for a while.

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
    first.settled(&h, |_| Disposition::Retry(after)).await;
    expect_nothing_claimable(&h, "it was just put back").await;
    h.clock().advance(after - TICK);
    expect_nothing_claimable(&h, "its time is a microsecond away").await;
    h.clock().advance(TICK);
    let again = Claims::claim(&h, 1).await;
    let expected = Message { attempts: 1, ..first.only().clone() };
    assert_eq!(*again.only(), expected, "it comes at its time, as it was, put back once");
}

pub async fn a_retried_message_holds_back_its_key_and_no_other<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    for n in 0..20 {
        send_numbered(&h, &format!("user-{n}"), 2).await;
    }
    let held = Claims::claim(&h, 43).await;
    let disposition = |message: &_| {
        if text(message) == "alice 1" { Disposition::Retry(SECOND) } else { Disposition::Leave }
    };
    held.settled(&h, disposition).await;
    let others = texts_by_key(&Claims::drain(&h).await);
    assert!(!others.contains_key("alice"), "later messages of the key wait behind the retry");
    assert_eq!(others.values().map(Vec::len).sum::<usize>(), 40, "other keys do not, even in the same shard");
    h.clock().advance(SECOND);
    let held = Claims::claim(&h, 3).await;
    assert_eq!(held.texts(), numbered_texts("alice", 1..=3), "then the key goes on, in order");
    let attempts: Vec<u32> = held.messages().map(|message| message.attempts).collect();
    assert_eq!(attempts, [1, 0, 0], "only the message that was put back counts an attempt");
}

pub async fn a_retry_without_delay_is_claimable_at_once<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let held = Claims::claim(&h, 1).await;
    held.settled(&h, |_| Disposition::Retry(Duration::ZERO)).await;
    let again = Claims::claim(&h, 2).await;
    assert_eq!(again.texts(), numbered_texts("alice", 1..=2), "nothing has to be waited for");
    assert_eq!(again.messages().next().map(|message| message.attempts), Some(1), "it was put back");
}

pub async fn each_retry_counts_one_attempt<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    for attempts in 0..6 {
        let held = Claims::claim(&h, 1).await;
        assert_eq!(held.only().attempts, attempts, "a message says how often it was put back");
        held.settled(&h, |_| Disposition::Retry(SECOND)).await;
        h.clock().advance(SECOND);
    }
}

pub async fn later_retries_of_a_key_wait_for_earlier_ones<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let held = Claims::claim(&h, 3).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" => Disposition::Retry(SECOND * 10),
        _ => Disposition::Retry(SECOND),
    };
    held.settled(&h, disposition).await;
    h.clock().advance(SECOND * 5);
    expect_nothing_claimable(&h, "their time has come, but they stand behind one whose time has not").await;
    h.clock().advance(SECOND * 5);
    let held = Claims::claim(&h, 3).await;
    assert_eq!(held.texts(), numbered_texts("alice", 1..=3), "they come together, in order");
    assert!(held.messages().all(|message| message.attempts == 1), "each was put back once");
}

pub async fn an_earlier_retry_does_not_wait_for_a_later_one<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 3).await;
    let held = Claims::claim(&h, 3).await;
    let disposition = |message: &_| match text(message).as_str() {
        "alice 1" => Disposition::Retry(SECOND),
        "alice 2" => Disposition::Retry(SECOND * 10),
        _ => Disposition::Leave,
    };
    held.settled(&h, disposition).await;
    h.clock().advance(SECOND);
    assert_eq!(texts(&Claims::drain(&h).await), ["alice 1"], "the first comes at its own time, and alone");
    h.clock().advance(SECOND * 9);
    assert_eq!(
        texts(&Claims::drain(&h).await),
        numbered_texts("alice", 2..=3),
        "the second at its own, with what waits behind it"
    );
}

pub async fn a_retry_scheduled_before_the_clock_was_set_back_keeps_its_delay<H: HasQuota>() {
    let h = H::open().await;
    let Some(clock) = h.store_clock() else { return };
    let ahead = SECOND * 7_200;
    send_numbered(&h, "alice", 1).await;
    h.clock().advance(ahead);
    Claims::claim(&h, 1).await.settled(&h, |_| Disposition::Retry(SECOND * 9)).await;
    h.clock().set_back(ahead);
    assert_eq!(clock.reschedule_deferred().await.expect("an answer"), 1);
    assert_eq!(clock.reschedule_deferred().await.expect("an answer"), 0, "once is enough");
    expect_nothing_claimable(&h, "it has to wait as long as before").await;
    h.clock().advance(SECOND * 9);
    assert_eq!(Claims::claim(&h, 1).await.texts(), numbered_texts("alice", 1..=1), "and no longer");
}
