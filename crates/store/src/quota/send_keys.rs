//! Idempotency keys of sends: what is recorded under one, and what a repeated send is answered.
//!
//! A key is recorded in the commit that counts its message. Where a broker is published to before that commit, the id of the
//! message is recorded in a commit of its own before anything is published, so that every attempt publishes the same message.
//! There nothing is published under a key without a record: another batch may just have forgotten it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use weir_core::quota::{Grant, Quota};
use weir_core::{MessageId, Timestamp};

use super::{EnqueueOutcome, SendMessage, SendOutcome};

/// How long a key is recorded.
pub const KEY_RETENTION: Duration = Duration::from_secs(86_400);

/// A keyed hash of a user and the key that the caller chose.
pub type SendKeyHash = [u8; 16];

/// An idempotency key as it is stored: not the caller's text but keyed hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendKey {
    pub hash: SendKeyHash,
    /// A keyed hash of the message.
    pub message: [u8; 16],
}

/// What is recorded under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRecord {
    /// A keyed hash of the message.
    pub message: [u8; 16],
    pub message_id: MessageId,
    /// What the send was answered; `None` as long as it is not known whether the message was published.
    pub grant: Option<Grant>,
    /// When the key may be used for another message.
    pub expires_at: Timestamp,
}

/// How a send with a key is decided.
pub(super) enum KeyDecision {
    /// It is the first with its key: as if it had none.
    New,
    /// Its message may have been published under this id, and is not counted.
    Resumed(MessageId),
    Answered(SendOutcome),
}

impl SendRecord {
    #[must_use]
    pub fn is_live(&self, now: Timestamp) -> bool {
        now < self.expires_at
    }
}

/// `needs_record` says that its message is published before the commit.
pub(super) fn decide(
    key: &SendKey,
    record: Option<&SendRecord>,
    row: Option<&Quota>,
    now: Timestamp,
    needs_record: bool,
) -> KeyDecision {
    let Some(record) = record.filter(|record| record.is_live(now)) else {
        let not_queued = KeyDecision::Answered(SendOutcome::NotQueued(EnqueueOutcome::Failed));
        return if needs_record { not_queued } else { KeyDecision::New };
    };
    if record.message != key.message {
        return KeyDecision::Answered(SendOutcome::KeyConflict);
    }
    match record.grant {
        None => KeyDecision::Resumed(record.message_id),
        Some(grant) => KeyDecision::Answered(SendOutcome::Replayed {
            message_id: record.message_id,
            grant,
            row: row.map(|row| row.as_of(now)),
            at: now,
        }),
    }
}

/// The keys of a batch, each once and in order: rows of keys are locked in this order.
#[must_use]
pub fn hashes(batch: &[SendMessage]) -> Vec<SendKeyHash> {
    let mut hashes: Vec<_> = batch.iter().filter_map(|send| Some(send.key?.hash)).collect();
    hashes.sort_unstable();
    hashes.dedup();
    hashes
}

/// The records that give messages their ids before they are published, in the order of [`hashes`].
#[must_use]
pub fn reservations(
    batch: &[SendMessage],
    now: Timestamp,
    mut random: impl FnMut() -> [u8; 10],
) -> Vec<(SendKeyHash, SendRecord)> {
    let mut messages: HashMap<SendKeyHash, [u8; 16]> = HashMap::new();
    for key in batch.iter().filter_map(|send| send.key) {
        messages.entry(key.hash).or_insert(key.message);
    }
    let record = |hash| {
        let message_id = MessageId::new(now, random());
        let expires_at = now.plus(KEY_RETENTION);
        (hash, SendRecord { message: messages[&hash], message_id, grant: None, expires_at })
    };
    hashes(batch).into_iter().map(record).collect()
}

/// What a batch changes in the records, both in order of the hash.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SendKeyChanges {
    /// The accepted sends.
    pub saved: Vec<(SendKeyHash, SendRecord)>,
    /// Keys that were reserved for this batch and of which nothing was published.
    pub forgotten: Vec<SendKeyHash>,
}

impl SendKeyChanges {
    /// `reserved` are the keys whose records this batch has created before it published.
    pub(super) fn of(
        sends: &[SendMessage],
        outcomes: &[SendOutcome],
        reserved: &HashSet<SendKeyHash>,
    ) -> Self {
        let (mut saved, mut reserved) = (Vec::new(), reserved.clone());
        for (send, outcome) in sends.iter().zip(outcomes) {
            let Some(key) = send.key else { continue };
            match *outcome {
                SendOutcome::Accepted { message_id, grant, at, .. } => {
                    let expires_at = at.plus(KEY_RETENTION);
                    let record =
                        SendRecord { message: key.message, message_id, grant: Some(grant), expires_at };
                    saved.push((key.hash, record));
                    reserved.remove(&key.hash);
                }
                SendOutcome::NotQueued(EnqueueOutcome::Unknown) => drop(reserved.remove(&key.hash)),
                _ => {}
            }
        }
        saved.sort_unstable_by_key(|(hash, _)| *hash);
        let mut forgotten: Vec<_> = reserved.into_iter().collect();
        forgotten.sort_unstable();
        Self { saved, forgotten }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.saved.is_empty() && self.forgotten.is_empty()
    }
}
