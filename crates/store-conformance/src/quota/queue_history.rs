//! Random histories of a queue, checked against a sheet that says what must be where.
//!
//! Which messages a claim gets is the engine's choice; that they are a key's first ones, that nobody else has the
//! key, and that the books are right at every step is not. `WEIR_CONFORMANCE_SEED` runs a history again.

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
    let mut run = Run { h: &h, rng: Rng::with_seed(seed), seed, lines: Vec::new(), out: Vec::new() };
    for _ in 0..HISTORIES {
        for _ in 0..STEPS {
            run.step().await;
            assert_eq!(
                queue_audit(&h).await,
                run.expected_books(),
                "the books must follow every step: seed {seed}"
            );
        }
        run.finish().await;
    }
}

/// What the sheet says of one message.
struct Line {
    key: String,
    text: String,
    place: Place,
    attempts: u32,
    hidden_until: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Waiting,
    Dead,
    Done,
    Discarded,
}

/// A claim that was not settled yet.
struct Out {
    claim: MessageClaim,
    until: Timestamp,
}

struct Run<'h, H> {
    h: &'h H,
    rng: Rng,
    seed: u64,
    lines: Vec<Line>,
    out: Vec<Out>,
}

impl<H: HasQuota> Run<'_, H> {
    async fn step(&mut self) {
        match self.rng.u8(0..20) {
            0..5 => self.send().await,
            5..10 => self.claim().await,
            10..15 => self.settle().await,
            15..18 => self.h.clock().advance(Duration::from_secs(self.rng.u64(1..15))),
            _ => self.mend().await,
        }
    }

    async fn send(&mut self) {
        let batch: Vec<_> = (0..self.rng.usize(1..6))
            .map(|_| {
                let (key, text) =
                    (format!("user-{}", self.rng.usize(0..KEYS)), format!("message {}", self.lines.len()));
                let command = send(&key, &text);
                let hidden_until = self.h.clock().now();
                self.lines.push(Line { key, text, place: Place::Waiting, attempts: 0, hidden_until });
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
        assert!(claim.messages.len() <= max, "at most {max} were asked for: seed {seed}");
        let keys: BTreeSet<&str> = claim.messages.iter().map(|message| message.key.as_str()).collect();
        for key in keys {
            let is_out =
                |out: &Out| now < out.until && out.claim.messages.iter().any(|message| message.key == key);
            assert!(!self.out.iter().any(is_out), "{key} is out already: seed {seed}");
            let got: Vec<(String, u32)> = of_key(&claim.messages, key);
            let due = self.due(key, now);
            assert!(
                due.starts_with(&got),
                "{key}'s first messages are {due:?}, but {got:?} came: seed {seed}"
            );
        }
        if !claim.messages.is_empty() {
            self.out.push(Out { claim, until: now.plus(visibility) });
        }
    }

    /// What a key has to hand out, in order, with attempts: up to the first message that is hidden.
    fn due(&self, key: &str, now: Timestamp) -> Vec<(String, u32)> {
        let waiting = self.lines.iter().filter(|line| line.key == key && line.place == Place::Waiting);
        let visible = waiting.take_while(|line| line.hidden_until <= now);
        visible.map(|line| (line.text.clone(), line.attempts)).collect()
    }

    async fn settle(&mut self) {
        if self.out.is_empty() {
            return;
        }
        let now = self.h.clock().now();
        let Out { claim, until } = self.out.swap_remove(self.rng.usize(0..self.out.len()));
        let holds = now < until;
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
            if holds {
                self.record(message, disposition, now.plus(after));
            }
        }
        let settled = self.h.queue().settle(&claim.receipt, settlement).await.expect("settle must succeed");
        assert_eq!(settled, holds, "a claim settles exactly while its lease holds: seed {}", self.seed);
    }

    fn record(&mut self, message: &Message, disposition: u8, retry_at: Timestamp) {
        let line = self.line(&text(message));
        match disposition {
            0..5 => line.place = Place::Done,
            5..7 => {
                line.attempts += 1;
                line.hidden_until = retry_at;
            }
            7..9 => line.place = Place::Dead,
            _ => {}
        }
    }

    fn line(&mut self, text: &str) -> &mut Line {
        self.lines.iter_mut().find(|line| line.text == text).expect("what comes out was put in")
    }

    /// Replays or discards a dead letter, if there is one.
    async fn mend(&mut self) {
        let dead: Vec<DeadLetter> = dead_letters(self.h, None, 1_000).await;
        let Some(letter) = self.rng.choice(&dead) else {
            return;
        };
        let (queue, now, replay) = (self.h.queue(), self.h.clock().now(), self.rng.bool());
        let mended = if replay { queue.replay(&letter.id).await } else { queue.discard(&letter.id).await };
        assert!(mended.expect("replay and discard must succeed"), "the letter was there: seed {}", self.seed);
        let seed = self.seed;
        let line = self.line(&dead_letter_text(letter));
        assert_eq!(line.place, Place::Dead, "{} is not dead: seed {seed}", line.text);
        line.place = if replay { Place::Waiting } else { Place::Discarded };
        (line.attempts, line.hidden_until) = (0, now);
    }

    fn expected_books(&self) -> QueueAudit {
        let count = |place| self.lines.iter().filter(|line| line.place == place).count() as u64;
        QueueAudit {
            accepted: self.lines.len() as u64,
            done: count(Place::Done),
            discarded: count(Place::Discarded),
            dead: count(Place::Dead),
            in_flight: count(Place::Waiting),
        }
    }

    /// Lets every lease and retry run out and delivers the rest: all of it must come, in order.
    async fn finish(&mut self) {
        self.out.clear();
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
            self.line(&text(message)).place = Place::Done;
        }
        assert_eq!(
            queue_audit(self.h).await,
            self.expected_books(),
            "nothing is lost or doubled: seed {}",
            self.seed
        );
    }
}

fn of_key(messages: &[Message], key: &str) -> Vec<(String, u32)> {
    let of_key = messages.iter().filter(|message| message.key == key);
    of_key.map(|message| (text(message), message.attempts)).collect()
}
