//! The naive engine: plain vectors under one mutex. It stores every send and message for ever and computes each answer
//! from all of them. It is slow and obviously correct; engines are compared with it.

mod queue;
mod quota;

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_core::quota::{Grant, QuotaLimits};
use weir_core::{Clock, ManualClock, MessageId, Timestamp};
use weir_queue::ShardLease;
use weir_store::quota::SendKey;

/// The naive engine of quota and its queue.
#[derive(Debug)]
pub struct Model {
    clock: ManualClock,
    shards: u16,
    state: Mutex<State>,
    sent: Notify,
}

#[derive(Debug, Default)]
struct State {
    users: BTreeMap<String, User>,
    /// Every accepted send with a key, in order, until it is purged.
    keys: Vec<AnsweredKey>,
    /// Every message ever enqueued, in order. The index in this list is the id in its position.
    entries: Vec<QueuedMessage>,
    leases: Vec<ActiveLease>,
    last_token: i64,
}

/// The limits of a user and every send they allowed.
#[derive(Debug)]
struct User {
    limits: QuotaLimits,
    since: Timestamp,
    sends: Vec<Timestamp>,
    /// The count that stayed when the limits were changed.
    kept: u32,
}

/// A key and how its send was answered.
#[derive(Debug)]
struct AnsweredKey {
    key: SendKey,
    message_id: MessageId,
    grant: Grant,
    at: Timestamp,
}

#[derive(Debug)]
struct QueuedMessage {
    shard: u16,
    key: String,
    payload: Vec<u8>,
    attempts: u32,
    hidden_until: Timestamp,
    state: MessageState,
}

#[derive(Debug)]
enum MessageState {
    Waiting,
    Dead { reason: String, died_at: Timestamp },
    Done,
    Discarded,
}

#[derive(Debug)]
struct ActiveLease {
    lease: ShardLease,
    until: Timestamp,
}

impl Model {
    /// An empty engine with this many shards.
    #[must_use]
    pub fn new(clock: ManualClock, shards: u16) -> Self {
        Self { clock, shards, state: Mutex::default(), sent: Notify::new() }
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }
}
