//! The interfaces of queues, and the events on them.
//!
//! A queue delivers at least once and keeps the order of each key. Messages are enqueued by engines, in the transaction
//! that decided them, or published with confirmation through a [`publish::Publisher`]. Consumers use a [`MessageSource`]:
//! [`MessageSource::claim`] leases a batch, and [`MessageSource::settle`] reports the fate of each message in one commit. A
//! [`Queue`] also has dead letters and counters for operators. Queues in tables are in the engines' crates; [`kafka`] is
//! here.

pub mod due;
pub mod kafka;
pub mod notify;
pub mod pack;
pub mod publish;
pub mod sms;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use weir_core::{Timestamp, TraceContext};
use weir_store::Result;
use weir_store::book::Books;

/// A message's position in its topic. All messages of a key are in one shard, ordered by `id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The shard of the message's key.
    pub shard: u16,
    pub id: i64,
}

/// One message of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub position: Position,
    /// Messages with the same key are delivered in order.
    pub key: String,
    pub payload: Vec<u8>,
    /// How many attempts to deliver it have failed.
    pub attempts: u32,
    /// The trace that the headers of an event name. Queues in tables keep none.
    pub trace: Option<TraceContext>,
}

/// Messages of a topic, leased until `visibility` has passed.
#[derive(Debug, Default)]
pub struct MessageClaim {
    /// In order for each key.
    pub messages: Vec<Message>,
    /// Passed back to [`MessageSource::settle`].
    pub receipt: ClaimReceipt,
}

/// The leases of a [`MessageClaim`]. An expired lease settles nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimReceipt {
    pub topic: String,
    /// One lease for each shard that has messages in the claim.
    pub leases: Vec<ShardLease>,
}

/// A lease of one shard. The token is a fencing token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardLease {
    /// The shard.
    pub shard: u16,
    pub token: i64,
}

/// What happens to a claim's messages. Messages that are not listed are delivered again.
#[derive(Clone, Debug, Default)]
pub struct Settlement {
    /// Delivered.
    pub done: Vec<Position>,
    /// Failed, to be retried after a delay; later messages of the same key wait behind.
    pub retry: Vec<(Position, Duration)>,
    /// Dead letters, with the reason.
    pub dead: Vec<(Position, String)>,
    /// To be delivered again after a delay, without counting an attempt; later messages of the same key wait behind. Until
    /// then, no other worker gets the message, so the present one can continue with it without a lease; see
    /// [`Queue::settle_deferred`].
    pub deferred: Vec<(Position, Duration)>,
}

impl Settlement {
    /// All messages listed in the settlement.
    pub fn positions(&self) -> impl Iterator<Item = Position> {
        let delayed = self.retry.iter().chain(&self.deferred).map(|(position, _)| *position);
        self.done.iter().copied().chain(delayed).chain(self.dead.iter().map(|(position, _)| *position))
    }
}

/// A message that could not be delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The id under `/admin/dlq`.
    pub id: String,
    pub topic: String,
    pub key: String,
    pub payload: Vec<u8>,
    pub reason: String,
    pub attempts: u32,
    pub died_at: Timestamp,
}

/// A topic's counters, read in one snapshot. Every accepted message is counted in exactly one of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueAudit {
    /// Messages ever enqueued.
    pub accepted: u64,
    /// Messages ever delivered.
    pub done: u64,
    /// Dead letters ever discarded by an operator.
    pub discarded: u64,
    /// Dead letters now.
    pub dead: u64,
    /// Messages waiting or leased now.
    pub in_flight: u64,
}

impl QueueAudit {
    /// The books of a topic.
    #[must_use]
    pub fn from_books(books: &Books, topic: &str) -> Self {
        Self {
            accepted: books.amount("accepted", topic),
            done: books.amount("done", topic),
            discarded: books.amount("discarded", topic),
            dead: books.amount("dead_letter", topic),
            in_flight: books.amount("queue_message", topic) + books.amount("queue_pack", topic),
        }
    }

    /// Messages that are missing (positive) or extra (negative); 0 if the counters balance.
    #[must_use]
    pub fn difference(&self) -> i128 {
        let found = [self.done, self.discarded, self.dead, self.in_flight];
        i128::from(self.accepted) - found.into_iter().map(i128::from).sum::<i128>()
    }
}

/// The consumer's side of a queue.
#[async_trait]
pub trait MessageSource: Send + Sync + 'static {
    /// Leases up to `max` messages for `visibility`. While messages of a key are leased, no other claim gets any of that
    /// key.
    async fn claim(&self, topic: &str, max: usize, visibility: Duration) -> Result<MessageClaim>;
    /// Settles a claim and releases its leases in one commit. Returns `false` if a lease had expired; the messages of that
    /// lease are unchanged.
    async fn settle(&self, receipt: &ClaimReceipt, settlement: Settlement) -> Result<bool>;
    /// Returns when there may be messages to claim: at once if this process enqueued some since the last call, and after
    /// `at_most` at the latest.
    async fn wait(&self, topic: &str, at_most: Duration);
    /// Leaves the remaining messages to other consumers. Nothing can be claimed afterwards.
    async fn close(&self) {}
}

/// A queue with dead letters and counters for operators.
#[async_trait]
pub trait Queue: MessageSource {
    /// Lists dead letters of all topics in order of id, after `after`. Payloads are cut to `payload_max` bytes and reasons to
    /// as many characters, since a list of full payloads might not fit into memory.
    async fn dead_letters(
        &self,
        after: Option<&str>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadLetter>>;
    /// Settles deferred messages without a lease of their shards, even if they were leased again meanwhile. Skips messages
    /// that no longer exist or that another call is settling.
    async fn settle_deferred(&self, topic: &str, settlement: Settlement) -> Result<()>;
    /// Puts a dead letter back at its position and resets its attempts. Returns `false` if there is none with this id.
    async fn replay(&self, id: &str) -> Result<bool>;
    /// Puts all dead letters back and returns how many there were.
    async fn replay_all(&self) -> Result<u64>;
    /// Discards a dead letter. Returns `false` if there is none with this id.
    async fn discard(&self, id: &str) -> Result<bool>;
    /// Counts the dead letters of a topic, up to `limit`.
    async fn count_dead_letters(&self, topic: &str, limit: usize) -> Result<u64>;
    async fn audit(&self, topic: &str) -> Result<QueueAudit>;
}

/// Converts a store's time for JSON and logs. A time outside of the calendar's range, which only a row edited by hand
/// can hold, becomes the nearest end of the range.
#[must_use]
pub fn rfc3339(at: Timestamp) -> jiff::Timestamp {
    let nearest = if at < Timestamp::EPOCH { jiff::Timestamp::MIN } else { jiff::Timestamp::MAX };
    jiff::Timestamp::from_microsecond(at.as_micros()).unwrap_or(nearest)
}

/// A time that JSON shows with milliseconds at least: callers that compare texts, or parse them with a fixed format, need the
/// same form for every time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MillisTime(jiff::Timestamp);

impl From<Timestamp> for MillisTime {
    fn from(at: Timestamp) -> Self {
        Self(rfc3339(at))
    }
}

impl fmt::Display for MillisTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.subsec_nanosecond() % 1_000_000 == 0 { write!(f, "{:.3}", self.0) } else { self.0.fmt(f) }
    }
}

impl serde::Serialize for MillisTime {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_milliseconds_and_more_only_when_they_need_it() {
        let text = |micros| MillisTime::from(Timestamp::from_micros(micros)).to_string();
        assert_eq!(text(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(text(1_230_000), "1970-01-01T00:00:01.230Z");
        assert_eq!(text(1_234_560), "1970-01-01T00:00:01.23456Z");
        assert_eq!(text(-1_000), "1969-12-31T23:59:59.999Z");
    }

    #[test]
    fn counters_balance_when_every_message_is_counted_once() {
        let books = QueueAudit { accepted: 10, done: 4, discarded: 1, dead: 2, in_flight: 3 };
        assert_eq!(books.difference(), 0);
        assert_eq!(QueueAudit { in_flight: 2, ..books }.difference(), 1, "one is lost");
        assert_eq!(QueueAudit { done: 6, ..books }.difference(), -2, "two were delivered from nowhere");
    }
}
