//! Random histories of a queue, checked against the expected state of every message.
//!
//! The engine may choose which messages a claim returns. But they must be the first of their key, no other claim may hold
//! the key, and the books must be right after every step. `WEIR_CONFORMANCE_SEED` repeats a history.

use std::collections::BTreeSet;
use std::time::Duration;

use fastrand::Rng;
use weir_core::{Clock, Timestamp};
use weir_queue::{DeadLetter, Message, MessageClaim, QueueAudit, Settlement};
use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::Claims;
use crate::fixtures::{configure, queue_audit, send, text};
use crate::quota::history::seed;
use crate::quota::queue_dead::{dead_letter_text, dead_letters};

const HISTORIES: usize = 8;
const STEPS: usize = 60;
const KEYS: usize = 6;

pub async fn random_histories_deliver_in_order_and_lose_nothing<H: HasQuota>() {
    let h = H::open().await;
    for key in 0..KEYS {
        configure(&h, &format!("user-{key}"), 1_000_000, 1_000_000).await;
    }
    let seed = seed();
    let mut history =
        History { h: &h, rng: Rng::with_seed(seed), seed, expected: Vec::new(), open_claims: Vec::new() };
    for _ in 0..HISTORIES {
        for _ in 0..STEPS {
            history.step().await;
            assert_eq!(
                queue_audit(&h).await,
                history.expected_books(),
                "the books must follow every step: seed {seed}"
            );
        }
        history.finish().await;
    }
}

/// The expected state of one message.
struct ExpectedMessage {
    key: String,
    text: String,
    state: MessageState,
    attempts: u32,
    hidden_until: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageState {
    Waiting,
    Dead,
    Done,
    Discarded,
}

/// A claim that is not settled yet.
struct OpenClaim {
    claim: MessageClaim,
    until: Timestamp,
}

struct History<'h, H> {
    h: &'h H,
    rng: Rng,
    seed: u64,
    expected: Vec<ExpectedMessage>,
    open_claims: Vec<OpenClaim>,
}

impl<H: HasQuota> History<'_, H> {
    async fn step(&mut self) {
        match self.rng.u8(0..20) {
            0..5 => self.send().await,
            5..10 => self.claim().await,
            10..15 => self.settle().await,
            15..18 => self.h.clock().advance(Duration::from_secs(self.rng.u64(1..15))),
            _ => self.replay_or_discard().await,
        }
    }

    async fn send(&mut self) {
        let batch: Vec<_> = (0..self.rng.usize(1..6))
            .map(|_| {
                let (key, text) =
                    (format!("user-{}", self.rng.usize(0..KEYS)), format!("message {}", self.expected.len()));
                let command = send(&key, &text);
                let hidden_until = self.h.clock().now();
                self.expected.push(ExpectedMessage {
                    key,
                    text,
                    state: MessageState::Waiting,
                    attempts: 0,
                    hidden_until,
                });
                command
            })
            .collect();
        crate::fixtures::accept_batch(self.h, batch).await;
    }

    async fn claim(&mut self) {
        let now = self.h.clock().now();
        let (max, visibility) = (self.rng.usize(1..6), Duration::from_secs(self.rng.u64(5..40)));
        let claim = self.h.queue().claim(TOPIC, max, visibility).await.expect("claim must succeed");
        let seed = self.seed;
        assert!(claim.messages.len() <= max, "at most {max} were requested: seed {seed}");
        let keys: BTreeSet<&str> = claim.messages.iter().map(|message| message.key.as_str()).collect();
        for key in keys {
            let is_claimed = |open: &OpenClaim| {
                now < open.until && open.claim.messages.iter().any(|message| message.key == key)
            };
            assert!(!self.open_claims.iter().any(is_claimed), "{key} is in another claim: seed {seed}");
            let got: Vec<(String, u32)> = of_key(&claim.messages, key);
            let due = self.due(key, now);
            assert!(
                due.starts_with(&got),
                "{key}'s first messages are {due:?}, but {got:?} came: seed {seed}"
            );
        }
        if !claim.messages.is_empty() {
            self.open_claims.push(OpenClaim { claim, until: now.plus(visibility) });
        }
    }

    /// The claimable messages of a key with their attempts, in order, up to the first hidden one.
    fn due(&self, key: &str, now: Timestamp) -> Vec<(String, u32)> {
        let waiting = self
            .expected
            .iter()
            .filter(|expected| expected.key == key && expected.state == MessageState::Waiting);
        let visible = waiting.take_while(|expected| expected.hidden_until <= now);
        visible.map(|expected| (expected.text.clone(), expected.attempts)).collect()
    }

    async fn settle(&mut self) {
        if self.open_claims.is_empty() {
            return;
        }
        let now = self.h.clock().now();
        let OpenClaim { claim, until } =
            self.open_claims.swap_remove(self.rng.usize(0..self.open_claims.len()));
        let is_valid = now < until;
        let mut settlement = Settlement::default();
        for message in &claim.messages {
            let disposition = self.rng.u8(0..10);
            let after = Duration::from_secs(self.rng.u64(0..20));
            match disposition {
                0..5 => settlement.done.push(message.position),
                5..7 => settlement.retry.push((message.position, after)),
                7..9 => settlement.dead.push((message.position, "given up".into())),
                _ => {}
            }
            if is_valid {
                self.record(message, disposition, now.plus(after));
            }
        }
        let settled = self.h.queue().settle(&claim.receipt, settlement).await.expect("settle must succeed");
        assert_eq!(settled, is_valid, "a claim settles only while its lease is valid: seed {}", self.seed);
    }

    fn record(&mut self, message: &Message, disposition: u8, retry_at: Timestamp) {
        let expected = self.expected_message(&text(message));
        match disposition {
            0..5 => expected.state = MessageState::Done,
            5..7 => {
                expected.attempts += 1;
                expected.hidden_until = retry_at;
            }
            7..9 => expected.state = MessageState::Dead,
            _ => {}
        }
    }

    fn expected_message(&mut self, text: &str) -> &mut ExpectedMessage {
        self.expected
            .iter_mut()
            .find(|expected| expected.text == text)
            .expect("only sent messages can be claimed")
    }

    /// Replays or discards a dead letter, if there is one.
    async fn replay_or_discard(&mut self) {
        let dead: Vec<DeadLetter> = dead_letters(self.h, None, 1_000).await;
        let Some(letter) = self.rng.choice(&dead) else {
            return;
        };
        let (queue, now, replay) = (self.h.queue(), self.h.clock().now(), self.rng.bool());
        let changed = if replay { queue.replay(&letter.id).await } else { queue.discard(&letter.id).await };
        assert!(
            changed.expect("replay and discard must succeed"),
            "the letter was there: seed {}",
            self.seed
        );
        let seed = self.seed;
        let expected = self.expected_message(&dead_letter_text(letter));
        assert_eq!(expected.state, MessageState::Dead, "{} is not dead: seed {seed}", expected.text);
        expected.state = if replay { MessageState::Waiting } else { MessageState::Discarded };
        (expected.attempts, expected.hidden_until) = (0, now);
    }

    fn expected_books(&self) -> QueueAudit {
        let count = |state| self.expected.iter().filter(|expected| expected.state == state).count() as u64;
        QueueAudit {
            accepted: self.expected.len() as u64,
            done: count(MessageState::Done),
            discarded: count(MessageState::Discarded),
            dead: count(MessageState::Dead),
            in_flight: count(MessageState::Waiting),
        }
    }

    /// Lets every lease and retry delay expire and drains the queue: all remaining messages must come, in order.
    async fn finish(&mut self) {
        self.open_claims.clear();
        self.h.clock().advance(Duration::from_secs(60));
        let now = self.h.clock().now();
        let drained = Claims::drain(self.h).await;
        for key in (0..KEYS).map(|key| format!("user-{key}")) {
            let due = self.due(&key, now);
            assert_eq!(
                of_key(&drained, &key),
                due,
                "{key}'s last messages must all come, in order: seed {}",
                self.seed
            );
        }
        for message in &drained {
            self.expected_message(&text(message)).state = MessageState::Done;
        }
        assert_eq!(
            queue_audit(self.h).await,
            self.expected_books(),
            "nothing is lost or duplicated: seed {}",
            self.seed
        );
    }
}

fn of_key(messages: &[Message], key: &str) -> Vec<(String, u32)> {
    let of_key = messages.iter().filter(|message| message.key == key);
    of_key.map(|message| (text(message), message.attempts)).collect()
}
