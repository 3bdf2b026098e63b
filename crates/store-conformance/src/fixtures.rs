//! Helpers for all suites: users, messages, filled queues, and tasks that run concurrently.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{MessageId, UserId};
use weir_queue::sms::{self, SmsEvent};
use weir_queue::{Message, MessageClaim, QueueAudit};
use weir_store::quota::{SendKey, SendMessage, SendOutcome, TOPIC};

use crate::HasQuota;
use crate::books::expect_queue_counts;

/// Lease duration of claims in cases that do not test it.
pub const VISIBILITY: Duration = Duration::from_secs(30);

/// The resolution of stored times.
pub const TICK: Duration = Duration::from_micros(1);

/// Number of empty claims after which a queue counts as empty: a claim may return fewer messages than there are.
pub const EMPTY_ROUNDS: usize = 3;

const CASE_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs a case and fails it if it hangs.
pub async fn with_timeout(case: impl Future<Output = ()>) {
    tokio::time::timeout(CASE_TIMEOUT, Box::pin(case)).await.expect("a case must end within two minutes");
}

pub fn user(text: &str) -> UserId {
    UserId::parse(text).expect("the suite's user ids are valid")
}

pub fn limits(rate_limit: u32, time_window_minutes: u32) -> QuotaLimits {
    QuotaLimits::new(rate_limit, time_window_minutes).expect("the suite's limits are valid")
}

pub fn send(user_id: &str, message: &str) -> SendMessage {
    SendMessage { user: user(user_id), message: message.into(), key: None, trace: None }
}

/// A send with an idempotency key. Another text is another message.
pub fn keyed(user_id: &str, key: &str, message: &str) -> SendMessage {
    let hash = |text: String| {
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(text.bytes()).for_each(|(byte, letter)| *byte = letter);
        bytes
    };
    let key = SendKey { hash: hash(format!("{user_id} {key}")), message: hash(message.to_owned()) };
    SendMessage { key: Some(key), ..send(user_id, message) }
}

/// `count` sends of one user, numbered from 1: `alice 1`, `alice 2`, …
pub fn sends(user_id: &str, count: usize) -> Vec<SendMessage> {
    (1..=count).map(|n| send(user_id, &format!("{user_id} {n}"))).collect()
}

pub async fn configure<H: HasQuota>(h: &H, user_id: &str, rate_limit: u32, minutes: u32) -> Quota {
    let limits = limits(rate_limit, minutes);
    h.quota().configure(&user(user_id), limits).await.expect("configure must succeed")
}

pub async fn find_quota<H: HasQuota>(h: &H, user_id: &str) -> Option<Quota> {
    h.quota().find(&user(user_id)).await.expect("find must succeed")
}

/// Sends a batch and checks that there is one outcome per command.
pub async fn send_batch<H: HasQuota>(h: &H, batch: Vec<SendMessage>) -> Vec<SendOutcome> {
    let expected = batch.len();
    let outcomes = h.quota().send_batch(batch.into()).await.expect("send_batch must succeed");
    assert_eq!(outcomes.len(), expected, "there must be one outcome per command");
    outcomes
}

pub async fn send_one<H: HasQuota>(h: &H, user_id: &str) -> SendOutcome {
    send_batch(h, vec![send(user_id, "hello")]).await.remove(0)
}

/// Sends messages that must all be accepted. Returns their ids.
pub async fn accept_batch<H: HasQuota>(h: &H, batch: Vec<SendMessage>) -> Vec<MessageId> {
    let outcomes = send_batch(h, batch).await;
    outcomes
        .iter()
        .map(|outcome| message_id(outcome).expect("a send within the limit must be accepted"))
        .collect()
}

/// Configures a user with a limit that is never reached and sends `count` messages: `alice 1`, `alice 2`, …
pub async fn send_numbered<H: HasQuota>(h: &H, user_id: &str, count: usize) {
    configure(h, user_id, 1_000_000, 60).await;
    accept_batch(h, sends(user_id, count)).await;
}

/// The id of the message, if the send was accepted.
pub fn message_id(outcome: &SendOutcome) -> Option<MessageId> {
    match outcome {
        SendOutcome::Accepted { message_id, .. } => Some(*message_id),
        _ => None,
    }
}

pub fn is_accepted(outcome: &SendOutcome) -> bool {
    message_id(outcome).is_some()
}

/// Each outcome as a letter: Accepted, Denied, Replayed, key Conflict, Not configured, not Queued (`Q`).
pub fn outcome_letters(outcomes: &[SendOutcome]) -> String {
    let letter = |outcome: &SendOutcome| match outcome {
        SendOutcome::Accepted { .. } => 'A',
        SendOutcome::Denied { .. } => 'D',
        SendOutcome::Replayed { .. } => 'R',
        SendOutcome::KeyConflict => 'C',
        SendOutcome::NotConfigured => 'N',
        SendOutcome::NotQueued(_) => 'Q',
    };
    outcomes.iter().map(letter).collect()
}

/// Claims once from the topic of quota.
pub async fn claim<H: HasQuota>(h: &H, max: usize) -> MessageClaim {
    h.queue().claim(TOPIC, max, VISIBILITY).await.expect("claim must succeed")
}

/// Asserts that no message is claimable now.
pub async fn expect_nothing_claimable<H: HasQuota>(h: &H, why: &str) {
    for _ in 0..EMPTY_ROUNDS {
        let messages = claim(h, 100).await.messages;
        assert!(messages.is_empty(), "{why}, but these were claimed: {:?}", texts(&messages));
    }
}

/// Decodes the payload of a message.
pub fn event(message: &Message) -> SmsEvent<'_> {
    sms::decode(&message.payload).expect("a payload must be an event")
}

/// The text in the payload of a message.
pub fn text(message: &Message) -> String {
    event(message).message.into_owned()
}

pub fn texts<'a>(messages: impl IntoIterator<Item = &'a Message>) -> Vec<String> {
    messages.into_iter().map(text).collect()
}

/// The texts of messages grouped by key, in order.
pub fn texts_by_key<'a>(messages: impl IntoIterator<Item = &'a Message>) -> BTreeMap<String, Vec<String>> {
    let mut by_key: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for message in messages {
        by_key.entry(message.key.clone()).or_default().push(text(message));
    }
    by_key
}

/// The texts that [`send_numbered`] sends: `alice 1`, `alice 2`, …
pub fn numbered_texts(user_id: &str, numbers: impl IntoIterator<Item = usize>) -> Vec<String> {
    numbers.into_iter().map(|n| format!("{user_id} {n}")).collect()
}

/// Audits the topic of quota; its books must balance.
pub async fn queue_audit<H: HasQuota>(h: &H) -> QueueAudit {
    let books = h.queue().audit(TOPIC).await.expect("audit must succeed");
    assert_eq!(books.difference(), 0, "the books must balance: {books:?}");
    expect_queue_counts(h, TOPIC).await;
    books
}

/// Runs futures concurrently, each in its own task. Returns their results in the order of the futures.
pub async fn run_concurrently<T, F>(futures: impl IntoIterator<Item = F>) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let mut tasks = JoinSet::new();
    for (n, future) in futures.into_iter().enumerate() {
        tasks.spawn(async move { (n, future.await) });
    }
    let mut answers = tasks.join_all().await;
    answers.sort_by_key(|(n, _)| *n);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

const AWKWARD_USER_IDS: &[&str] = &[
    "alice",
    "Alice",
    "ALICE",
    "alice ",
    " alice",
    "alice  ",
    " ",
    "  ",
    "a%",
    "a_",
    "%",
    "_",
    "'",
    "\"",
    "''",
    "\\",
    "\\\\",
    "\\'",
    "'; DROP TABLE rate_limit_store; --",
    "{a}",
    "{b}",
    "a:b",
    "a/b",
    "../a",
    "null",
    "NULL",
    "0",
    "00",
    "1e3",
    "$1",
    "?1",
    "%s",
    "é",
    "e\u{301}",
    "É",
    "ß",
    "ss",
    "İ",
    "i",
    "日本語",
    "مرحبا",
    "👩\u{200d}👩\u{200d}👧",
    "👩",
    "\u{feff}alice",
    "alice\u{a0}",
    "a,b",
    "a\u{2028}b",
    "\u{10ffff}",
    "{\"a\":1}",
];

/// Ids that a careless engine would trim, fold, escape or truncate. All are different users.
pub fn awkward_user_ids() -> Vec<String> {
    let long = ["x".repeat(255), "x".repeat(254), "😀".repeat(255), format!("{}😁", "😀".repeat(254))];
    AWKWARD_USER_IDS.iter().map(ToString::to_string).chain(long).collect()
}

const AWKWARD_MESSAGES: &[&str] = &[
    "",
    " ",
    "  two spaces each side  ",
    "\n",
    "line\r\nbreak\ttab",
    "nul \0 inside",
    "\u{1}\u{1f}\u{7f}\u{85}",
    "null",
    "{}",
    r#"{"messageId":"x","userId":"y"}"#,
    "[1,2",
    "\"",
    "\\",
    "\\u0000",
    "'; --",
    "%s %d $1 ?1",
    "👩\u{200d}👩\u{200d}👧",
    "e\u{301}",
    "\u{feff}",
    "\u{2028}\u{2029}",
    "\u{fffd}\u{ffff}\u{10ffff}",
    "\u{202e}abc",
];

/// Texts that a careless engine would trim, reject, decode or truncate.
pub fn awkward_messages() -> Vec<String> {
    AWKWARD_MESSAGES
        .iter()
        .map(ToString::to_string)
        .chain(["m".repeat(200 * 1024), "😀".repeat(50 * 1024)])
        .collect()
}
