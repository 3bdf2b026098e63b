//! The seam of queues, and the events that travel on them.
//!
//! A queue delivers at least once and keeps the order of each key. Messages get in through the transaction that
//! decided them (that is the engines' own business) or, where they must be confirmed before they count, through a
//! [`publish::Publisher`]. They get out through a [`MessageSource`]: [`MessageSource::claim`] hands out a batch for a while, and
//! [`MessageSource::settle`] says what became of each message, in one commit. A [`Queue`] is a source that also keeps dead
//! letters and books for operators. The queues that are tables live with their stores; [`kafka`] is here.

pub mod due;
pub mod kafka;
pub mod notify;
pub mod pack;
pub mod publish;
pub mod sms;

use std::time::Duration;

use async_trait::async_trait;
use weir_core::Timestamp;
use weir_store::Result;

/// Where a message stands in its topic. Shards keep keys apart; within one, messages are in order of `id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The shard of the message's key.
    pub shard: u16,
    /// Its place in the shard.
    pub id: i64,
}

/// One message, as it was enqueued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Where it stands.
    pub position: Position,
    /// Whose order it keeps.
    pub key: String,
    /// What it says.
    pub payload: Vec<u8>,
    /// How often it was put back before.
    pub attempts: u32,
}

/// Some messages of a topic, handed out until `visibility` has passed.
#[derive(Debug, Default)]
pub struct MessageClaim {
    /// In order for each key.
    pub messages: Vec<Message>,
    /// What [`MessageSource::settle`] needs to know them by.
    pub receipt: ClaimReceipt,
}

/// The leases behind a [`MessageClaim`]. A lease that has run out settles nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimReceipt {
    /// The topic.
    pub topic: String,
    /// The shards it holds, each with the number of its lease.
    pub leases: Vec<ShardLease>,
}

/// One shard's lease. Tokens only grow, so an old holder cannot pass for a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardLease {
    /// The shard.
    pub shard: u16,
    /// The number of this lease.
    pub token: i64,
}

/// What became of the messages of a claim. Those not named stay where they are and are handed out again.
#[derive(Clone, Debug, Default)]
pub struct Settlement {
    /// Done for good.
    pub done: Vec<Position>,
    /// To be handed out again after a while; later messages of the same key wait behind it.
    pub retry: Vec<(Position, Duration)>,
    /// Never to be handed out again, and why.
    pub dead: Vec<(Position, String)>,
    /// To be handed out again after a while, which costs no attempt; later messages of the same key wait behind it. A worker
    /// that goes on with such a message has it alone until then, without a lease; see [`Queue::settle_deferred`].
    pub deferred: Vec<(Position, Duration)>,
}

impl Settlement {
    /// All messages that it names.
    pub fn positions(&self) -> impl Iterator<Item = Position> {
        let delayed = self.retry.iter().chain(&self.deferred).map(|(position, _)| *position);
        self.done.iter().copied().chain(delayed).chain(self.dead.iter().map(|(position, _)| *position))
    }
}

/// A message that could not be delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// Its name under `/admin/dlq`.
    pub id: String,
    /// The topic it was on.
    pub topic: String,
    /// Whose it was.
    pub key: String,
    /// What it says.
    pub payload: Vec<u8>,
    /// Why it is here.
    pub reason: String,
    /// How often it was tried.
    pub attempts: u32,
    /// Since when it is here.
    pub died_at: Timestamp,
}

/// The books of a topic, read in one snapshot. Everything accepted is in exactly one of the other places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueAudit {
    /// Messages ever enqueued.
    pub accepted: u64,
    /// Messages ever done.
    pub done: u64,
    /// Dead letters ever thrown away by an operator.
    pub discarded: u64,
    /// Dead letters now.
    pub dead: u64,
    /// Messages waiting or handed out now.
    pub in_flight: u64,
}

impl QueueAudit {
    /// What is missing (positive) or too much (negative); 0 when the books balance.
    #[must_use]
    pub fn difference(&self) -> i128 {
        let found = [self.done, self.discarded, self.dead, self.in_flight];
        i128::from(self.accepted) - found.into_iter().map(i128::from).sum::<i128>()
    }
}

/// How messages get out of a queue: all that a sender needs.
#[async_trait]
pub trait MessageSource: Send + Sync + 'static {
    /// Hands out up to `max` messages for `visibility`. While a key's messages are out, no other claim gets any of
    /// that key.
    async fn claim(&self, topic: &str, max: usize, visibility: Duration) -> Result<MessageClaim>;
    /// Settles a claim and gives up its leases, in one commit. False when a lease had run out: then the messages of
    /// that lease are left to whoever holds it now.
    async fn settle(&self, receipt: &ClaimReceipt, settlement: Settlement) -> Result<bool>;
    /// Returns when there may be something to claim: at once when this process enqueued something since the last
    /// call, at the latest after `at_most`.
    async fn wait(&self, topic: &str, at_most: Duration);
    /// Lets others have what this one would still take. Nothing is claimed after it.
    async fn close(&self) {}
}

/// A queue of topics that keeps its dead letters and its books, for operators.
#[async_trait]
pub trait Queue: MessageSource {
    /// Dead letters of all topics in order of id, after the one named `after`, each with no more than the first
    /// `payload_max` bytes of its payload and as many characters of its reason: payloads may be large, and a list of them
    /// larger than memory.
    async fn dead_letters(
        &self,
        after: Option<&str>,
        limit: usize,
        payload_max: usize,
    ) -> Result<Vec<DeadLetter>>;
    /// Settles messages that were put off. It needs no lease of their shards. One that was handed out again meanwhile is
    /// settled all the same; one that is not there any more, or that another call of this is settling, is passed over.
    async fn settle_deferred(&self, topic: &str, settlement: Settlement) -> Result<()>;
    /// Puts a dead letter back where it stood, its attempts forgotten; false when there is none of that id.
    async fn replay(&self, id: &str) -> Result<bool>;
    /// Puts every dead letter back and says how many.
    async fn replay_all(&self) -> Result<u64>;
    /// Throws a dead letter away; false when there is none of that id.
    async fn discard(&self, id: &str) -> Result<bool>;
    /// Reads the books of a topic.
    async fn audit(&self, topic: &str) -> Result<QueueAudit>;
}

/// Converts a store's time for JSON and logs. A time outside of the calendar's range, which only a row edited by hand
/// can hold, becomes the nearest end of the range.
#[must_use]
pub fn rfc3339(at: Timestamp) -> jiff::Timestamp {
    let nearest = if at < Timestamp::EPOCH { jiff::Timestamp::MIN } else { jiff::Timestamp::MAX };
    jiff::Timestamp::from_microsecond(at.as_micros()).unwrap_or(nearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn books_balance_when_every_message_is_in_one_place() {
        let books = QueueAudit { accepted: 10, done: 4, discarded: 1, dead: 2, in_flight: 3 };
        assert_eq!(books.difference(), 0);
        assert_eq!(QueueAudit { in_flight: 2, ..books }.difference(), 1, "one is lost");
        assert_eq!(QueueAudit { done: 6, ..books }.difference(), -2, "two were delivered from nowhere");
    }
}
