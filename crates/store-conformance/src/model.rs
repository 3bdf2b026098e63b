//! The naive engine: plain vectors under one mutex, everything ever accepted kept, every answer counted from the
//! beginning. It is slow and obviously right, which is what engines are compared with.

mod queue;
mod quota;

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::Notify;
use weir_core::quota::QuotaLimits;
use weir_core::{Clock, ManualClock, Timestamp};
use weir_queue::ShardLease;

/// An engine in memory.
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
    /// Everything ever enqueued, in order; its place in this list is its position's id.
    entries: Vec<Entry>,
    leases: Vec<Held>,
    leases_given: i64,
}

/// A configuration and every send it allowed.
#[derive(Debug)]
struct User {
    limits: QuotaLimits,
    since: Timestamp,
    sends: Vec<Timestamp>,
}

#[derive(Debug)]
struct Entry {
    shard: u16,
    key: String,
    payload: Vec<u8>,
    attempts: u32,
    hidden_until: Timestamp,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Waiting,
    Dead { reason: String, died_at: Timestamp },
    Done,
    Discarded,
}

#[derive(Debug)]
struct Held {
    lease: ShardLease,
    until: Timestamp,
}

impl Model {
    /// An empty engine. However many `shards` there are, its answers keep the same promises.
    #[must_use]
    pub fn new(clock: ManualClock, shards: u16) -> Self {
        Self { clock, shards, state: Mutex::default(), sent: Notify::new() }
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }
}
