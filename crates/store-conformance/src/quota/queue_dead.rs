//! Dead letters: what they contain, and how they are listed and discarded.

use std::time::Duration;

use weir_core::Clock;
use weir_queue::{DeadLetter, QueueAudit};
use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    event, expect_nothing_claimable, numbered_texts, queue_audit, send_numbered, text, texts,
};

/// A page of dead letters.
pub(crate) async fn dead_letters<H: HasQuota>(h: &H, after: Option<&str>, limit: usize) -> Vec<DeadLetter> {
    let letters = h.queue().dead_letters(after, limit, usize::MAX).await.expect("dead_letters must succeed");
    assert!(letters.len() <= limit, "a page must not be longer than requested");
    letters
}

/// The dead letter, which must be the only one.
pub(crate) async fn only_dead_letter<H: HasQuota>(h: &H) -> DeadLetter {
    let mut letters = dead_letters(h, None, 10).await;
    assert_eq!(letters.len(), 1, "there must be one dead letter: {letters:?}");
    letters.remove(0)
}

/// Enqueues messages of several users and settles all of them as dead.
async fn create_dead_letters<H: HasQuota>(h: &H, users: usize, each: usize) {
    for n in 0..users {
        send_numbered(h, &format!("user-{n}"), each).await;
    }
    Claims::claim(h, users * each).await.must_settle(h, |_| Disposition::Dead("given up")).await;
}

pub async fn dead_letters_are_counted_by_topic<H: HasQuota>() {
    let h = H::open().await;
    let count = async |topic, limit| {
        h.queue().count_dead_letters(topic, limit).await.expect("count_dead_letters must succeed")
    };
    assert_eq!(count(TOPIC, 10).await, 0);
    create_dead_letters(&h, 2, 2).await;
    assert_eq!((count(TOPIC, 10).await, count(TOPIC, 3).await, count("another", 10).await), (4, 3, 0));
    let letter = dead_letters(&h, None, 1).await.remove(0);
    assert!(h.queue().discard(&letter.id).await.expect("discard must succeed"));
    assert_eq!(count(TOPIC, 10).await, 3);
}

pub async fn a_list_cuts_payload_and_reason_to_the_requested_length<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Dead("zürich")).await;
    let whole = only_dead_letter(&h).await;
    assert!(whole.payload.len() > 3, "{whole:?}");
    for max in [0, 1, 3, whole.payload.len() - 1, whole.payload.len(), usize::MAX] {
        let letters = h.queue().dead_letters(None, 10, max).await.expect("dead_letters must succeed");
        let cut = whole.payload.iter().copied().take(max).collect();
        let reason = whole.reason.chars().take(max).collect();
        assert_eq!(letters, [DeadLetter { payload: cut, reason, ..whole.clone() }], "{max} bytes");
    }
}

async fn discard<H: HasQuota>(h: &H, id: &str) -> bool {
    h.queue().discard(id).await.expect("discard must succeed")
}

pub async fn a_dead_letter_has_key_payload_reason_attempts_and_time<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    h.clock().advance(Duration::from_micros(3_000_001));
    let claims = Claims::claim(&h, 1).await;
    claims.must_settle(&h, |_| Disposition::Dead("no such number")).await;
    let letter = only_dead_letter(&h).await;
    let expected = DeadLetter {
        id: letter.id.clone(),
        topic: TOPIC.to_owned(),
        key: "alice".to_owned(),
        payload: claims.only().payload.clone(),
        reason: "no such number".to_owned(),
        attempts: 1,
        died_at: h.clock().now(),
    };
    assert_eq!(letter, expected, "a dead letter has payload, key, reason, attempts and time");
    expect_nothing_claimable(&h, "a dead message cannot be claimed").await;
    h.clock().advance(Duration::from_secs(86_400));
    expect_nothing_claimable(&h, "a dead message cannot be claimed later either").await;
    assert_eq!(
        queue_audit(&h).await,
        QueueAudit { accepted: 1, dead: 1, ..QueueAudit::default() },
        "the books agree"
    );
}

pub async fn a_dead_message_does_not_hold_back_later_ones<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 4).await;
    let claims = Claims::claim(&h, 2).await;
    let disposition = |message: &_| {
        if text(message) == "alice 2" { Disposition::Dead("given up") } else { Disposition::Done }
    };
    claims.must_settle(&h, disposition).await;
    assert_eq!(
        texts(&Claims::drain(&h).await),
        numbered_texts("alice", 3..=4),
        "a dead letter does not hold back its key"
    );
}

pub async fn a_dead_letter_says_how_often_it_was_tried<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    for _ in 0..2 {
        Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Retry(Duration::ZERO)).await;
    }
    Claims::claim(&h, 1).await.must_settle(&h, |_| Disposition::Dead("given up")).await;
    assert_eq!(only_dead_letter(&h).await.attempts, 3, "two retries and the last attempt");
}

pub async fn dead_letters_are_read_page_by_page<H: HasQuota>() {
    let h = H::open().await;
    assert!(dead_letters(&h, None, 10).await.is_empty(), "there are no dead letters");
    create_dead_letters(&h, 4, 3).await;
    let all = dead_letters(&h, None, 100).await;
    assert_eq!(all.len(), 12, "every dead message is listed");
    assert!(dead_letters(&h, None, 0).await.is_empty(), "0 messages were requested");
    for size in [1, 5, 12, 13] {
        let mut read: Vec<DeadLetter> = Vec::new();
        loop {
            let page = dead_letters(&h, read.last().map(|letter| letter.id.as_str()), size).await;
            if page.is_empty() {
                break;
            }
            read.extend(page);
            assert!(read.len() <= 12, "pages of {size} must come to an end");
        }
        assert_eq!(read, all, "pages of {size} show each letter once, in the same order");
    }
    let mut texts: Vec<String> = all.iter().map(dead_letter_text).collect();
    texts.sort();
    let mut expected: Vec<String> =
        (0..4).flat_map(|n| numbered_texts(&format!("user-{n}"), 1..=3)).collect();
    expected.sort();
    assert_eq!(texts, expected, "each dead message is one letter");
}

/// The text of the message that died.
pub(crate) fn dead_letter_text(letter: &DeadLetter) -> String {
    weir_queue::sms::decode(&letter.payload).expect("a payload must be an event").message.into_owned()
}

pub async fn paging_continues_after_a_letter_that_was_removed<H: HasQuota>() {
    let h = H::open().await;
    create_dead_letters(&h, 3, 2).await;
    let all = dead_letters(&h, None, 100).await;
    assert!(discard(&h, &all[1].id).await, "the letter was there");
    assert!(h.queue().replay(&all[2].id).await.expect("replay must succeed"), "the letter was there");
    assert_eq!(
        dead_letters(&h, Some(&all[1].id), 100).await,
        all[3..],
        "a discarded letter is still a valid cursor"
    );
    assert_eq!(
        dead_letters(&h, Some(&all[2].id), 100).await,
        all[3..],
        "a replayed letter is still a valid cursor"
    );
    assert_eq!(
        dead_letters(&h, None, 3).await,
        [&all[..1], &all[3..5]].concat(),
        "neither is listed any more"
    );
}

pub async fn a_discarded_letter_is_gone<H: HasQuota>() {
    let h = H::open().await;
    create_dead_letters(&h, 1, 2).await;
    let all = dead_letters(&h, None, 10).await;
    assert!(discard(&h, &all[0].id).await, "the letter was there");
    assert!(!discard(&h, &all[0].id).await, "it is already discarded");
    assert!(
        !h.queue().replay(&all[0].id).await.expect("replay must succeed"),
        "a discarded letter cannot be replayed"
    );
    assert_eq!(dead_letters(&h, None, 10).await, all[1..], "the other letter stays");
    let expected = QueueAudit { accepted: 2, discarded: 1, dead: 1, ..QueueAudit::default() };
    assert_eq!(queue_audit(&h).await, expected, "the books still count it");
    expect_nothing_claimable(&h, "a discarded letter is never delivered").await;
}

pub async fn awkward_reasons_are_stored_unchanged<H: HasQuota>() {
    let h = H::open().await;
    const REASONS: [&str; 6] =
        ["", "it's \"quoted\" \\ 100%", "line\nbreak", "😀 日本語", "{\"json\": true}", "'; --"];
    send_numbered(&h, "alice", REASONS.len()).await;
    for reason in REASONS {
        let claims = Claims::claim(&h, 1).await;
        let sent = event(claims.only()).message_id;
        claims.must_settle(&h, |_| Disposition::Dead(reason)).await;
        let all = dead_letters(&h, None, 10).await;
        let named = |letter: &&DeadLetter| letter.payload == claims.only().payload;
        let letter = all.iter().find(named).expect("the dead message is listed");
        assert_eq!(letter.reason, reason, "the reason of {sent:?} must be stored unchanged");
    }
}

pub async fn unknown_ids_are_an_answer_not_an_error<H: HasQuota>() {
    let h = H::open().await;
    create_dead_letters(&h, 1, 1).await;
    let long = "9".repeat(400);
    let id = only_dead_letter(&h).await.id;
    let almost = [format!("{id}0"), format!(" {id}"), format!("{id} ")];
    let ids = [
        "",
        "0",
        "-1",
        "nothing",
        "' OR 1=1 --",
        "%",
        "99999999999999999999",
        "a\0b",
        "😀",
        "sms-outbound",
        "a:b:c",
        &long,
    ];
    for id in ids.into_iter().chain(almost.iter().map(String::as_str)) {
        let replayed = h.queue().replay(id).await;
        assert!(!replayed.expect("replay of an unknown id must not fail"), "{id:?} names no letter");
        assert!(!discard(&h, id).await, "{id:?} names no letter");
        h.queue().dead_letters(Some(id), 10, 10).await.expect("reading after an unknown id must not fail");
    }
    assert_eq!(queue_audit(&h).await.dead, 1, "the letter is unchanged");
}
