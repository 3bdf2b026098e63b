//! Messages that are given up: where they are kept, and how they are read and thrown away.

use std::time::Duration;

use weir_core::Clock;
use weir_queue::{DeadLetter, QueueAudit};
use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::{Claims, Fate};
use crate::fixtures::{books, event, nothing_comes, numbered, queued, text, texts};

/// A page of dead letters.
pub(crate) async fn letters<H: HasQuota>(h: &H, after: Option<&str>, limit: usize) -> Vec<DeadLetter> {
    let letters = h.queue().dead_letters(after, limit, usize::MAX).await.expect("dead_letters must succeed");
    assert!(letters.len() <= limit, "a page must not be longer than was asked for");
    letters
}

/// The only dead letter.
pub(crate) async fn only_letter<H: HasQuota>(h: &H) -> DeadLetter {
    let mut letters = letters(h, None, 10).await;
    assert_eq!(letters.len(), 1, "there must be one dead letter: {letters:?}");
    letters.remove(0)
}

/// Queues messages of several users and lets all of them die.
async fn died<H: HasQuota>(h: &H, users: usize, each: usize) {
    for n in 0..users {
        queued(h, &format!("user-{n}"), each).await;
    }
    Claims::claim(h, users * each).await.settled(h, |_| Fate::Dead("given up")).await;
}

pub async fn a_list_shows_no_more_of_a_letter_than_was_asked_for<H: HasQuota>() {
    let h = H::open().await;
    queued(&h, "alice", 1).await;
    Claims::claim(&h, 1).await.settled(&h, |_| Fate::Dead("zürich")).await;
    let whole = only_letter(&h).await;
    assert!(whole.payload.len() > 3, "{whole:?}");
    for max in [0, 1, 3, whole.payload.len() - 1, whole.payload.len(), usize::MAX] {
        let letters = h.queue().dead_letters(None, 10, max).await.expect("dead_letters must succeed");
        let cut = whole.payload.iter().copied().take(max).collect();
        let reason = whole.reason.chars().take(max).collect();
        assert_eq!(letters, [DeadLetter { payload: cut, reason, ..whole.clone() }], "{max} bytes");
    }
}

async fn discarded<H: HasQuota>(h: &H, id: &str) -> bool {
    h.queue().discard(id).await.expect("discard must succeed")
}

pub async fn a_dead_message_is_kept_with_all_that_is_known_of_it<H: HasQuota>() {
    let h = H::open().await;
    queued(&h, "alice", 1).await;
    h.clock().advance(Duration::from_micros(3_000_001));
    let held = Claims::claim(&h, 1).await;
    held.settled(&h, |_| Fate::Dead("no such number")).await;
    let letter = only_letter(&h).await;
    let expected = DeadLetter {
        id: letter.id.clone(),
        topic: TOPIC.to_owned(),
        key: "alice".to_owned(),
        payload: held.only().payload.clone(),
        reason: "no such number".to_owned(),
        attempts: 1,
        died_at: h.clock().now(),
    };
    assert_eq!(letter, expected, "a dead letter says what, whose, why, how often and when");
    nothing_comes(&h, "what is dead is not handed out").await;
    h.clock().advance(Duration::from_secs(86_400));
    nothing_comes(&h, "however long it is dead").await;
    assert_eq!(
        books(&h).await,
        QueueAudit { accepted: 1, dead: 1, ..QueueAudit::default() },
        "the books say so"
    );
}

pub async fn later_messages_flow_past_a_dead_one<H: HasQuota>() {
    let h = H::open().await;
    queued(&h, "alice", 4).await;
    let held = Claims::claim(&h, 2).await;
    let fate = |message: &_| {
        if text(message) == "alice 2" { Fate::Dead("given up") } else { Fate::Done }
    };
    held.settled(&h, fate).await;
    assert_eq!(texts(&Claims::drain(&h).await), numbered("alice", 3..=4), "a dead letter holds nothing back");
}

pub async fn a_dead_letter_says_how_often_it_was_tried<H: HasQuota>() {
    let h = H::open().await;
    queued(&h, "alice", 1).await;
    for _ in 0..2 {
        Claims::claim(&h, 1).await.settled(&h, |_| Fate::Retry(Duration::ZERO)).await;
    }
    Claims::claim(&h, 1).await.settled(&h, |_| Fate::Dead("given up")).await;
    assert_eq!(only_letter(&h).await.attempts, 3, "it was tried, put back and tried twice more");
}

pub async fn dead_letters_are_read_page_by_page<H: HasQuota>() {
    let h = H::open().await;
    assert!(letters(&h, None, 10).await.is_empty(), "nothing has died");
    died(&h, 4, 3).await;
    let all = letters(&h, None, 100).await;
    assert_eq!(all.len(), 12, "all that died is there");
    assert!(letters(&h, None, 0).await.is_empty(), "nothing was asked for");
    for size in [1, 5, 12, 13] {
        let mut read: Vec<DeadLetter> = Vec::new();
        loop {
            let page = letters(&h, read.last().map(|letter| letter.id.as_str()), size).await;
            if page.is_empty() {
                break;
            }
            read.extend(page);
            assert!(read.len() <= 12, "pages of {size} must come to an end");
        }
        assert_eq!(read, all, "pages of {size} show each letter once, in the same order");
    }
    let mut texts: Vec<String> = all.iter().map(letter_text).collect();
    texts.sort();
    let mut expected: Vec<String> = (0..4).flat_map(|n| numbered(&format!("user-{n}"), 1..=3)).collect();
    expected.sort();
    assert_eq!(texts, expected, "each dead message is one letter");
}

/// The text of the message that died.
pub(crate) fn letter_text(letter: &DeadLetter) -> String {
    weir_queue::sms::decode(&letter.payload).expect("a payload must be an event").message.into_owned()
}

pub async fn reading_goes_on_past_a_letter_that_is_gone<H: HasQuota>() {
    let h = H::open().await;
    died(&h, 3, 2).await;
    let all = letters(&h, None, 100).await;
    assert!(discarded(&h, &all[1].id).await, "the letter was there");
    assert!(h.queue().replay(&all[2].id).await.expect("replay must succeed"), "the letter was there");
    assert_eq!(
        letters(&h, Some(&all[1].id), 100).await,
        all[3..],
        "a discarded letter still marks the place"
    );
    assert_eq!(letters(&h, Some(&all[2].id), 100).await, all[3..], "a replayed letter still marks the place");
    assert_eq!(letters(&h, None, 3).await, [&all[..1], &all[3..5]].concat(), "neither is shown any more");
}

pub async fn a_discarded_letter_is_gone<H: HasQuota>() {
    let h = H::open().await;
    died(&h, 1, 2).await;
    let all = letters(&h, None, 10).await;
    assert!(discarded(&h, &all[0].id).await, "the letter was there");
    assert!(!discarded(&h, &all[0].id).await, "it is gone");
    assert!(
        !h.queue().replay(&all[0].id).await.expect("replay must succeed"),
        "what is gone cannot be put back"
    );
    assert_eq!(letters(&h, None, 10).await, all[1..], "the other letter stays");
    let expected = QueueAudit { accepted: 2, discarded: 1, dead: 1, ..QueueAudit::default() };
    assert_eq!(books(&h).await, expected, "the books remember it");
    nothing_comes(&h, "a discarded letter is never delivered").await;
}

pub async fn awkward_reasons_are_kept<H: HasQuota>() {
    let h = H::open().await;
    const REASONS: [&str; 6] =
        ["", "it's \"quoted\" \\ 100%", "line\nbreak", "😀 日本語", "{\"json\": true}", "'; --"];
    queued(&h, "alice", REASONS.len()).await;
    for reason in REASONS {
        let held = Claims::claim(&h, 1).await;
        let sent = event(held.only()).message_id;
        held.settled(&h, |_| Fate::Dead(reason)).await;
        let all = letters(&h, None, 10).await;
        let named = |letter: &&DeadLetter| letter.payload == held.only().payload;
        let letter = all.iter().find(named).expect("what died is a letter");
        assert_eq!(letter.reason, reason, "the reason of {sent} must be kept as it was given");
    }
}

pub async fn unknown_ids_are_an_answer_not_an_error<H: HasQuota>() {
    let h = H::open().await;
    died(&h, 1, 1).await;
    let long = "9".repeat(400);
    let id = only_letter(&h).await.id;
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
        assert!(!discarded(&h, id).await, "{id:?} names no letter");
        h.queue().dead_letters(Some(id), 10, 10).await.expect("reading after an unknown id must not fail");
    }
    assert_eq!(books(&h).await.dead, 1, "the letter was not touched");
}
