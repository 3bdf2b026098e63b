//! The source: a member of a consumer group, polled by its own thread.
//!
//! The thread reads ahead into [`InFlight`], within bounds, and continues polling while a delivery is slow, so that the
//! group does not expel it. Claims take messages that were read ahead. Settling publishes dead letters to
//! `<topic>.dlq` and then commits the offsets of what is done. An unconfirmed commit is repeated with the next one or a
//! second later.
//!
//! Partitions are assigned cooperatively: when a member joins or leaves, only the partitions that move are interrupted. A
//! partition is revoked when its claimed messages are settled, or after a few seconds.

mod group;
mod poll;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Condvar, Mutex};
use rdkafka::config::{ClientConfig, FromClientConfigAndContext};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::Notify;
use weir_core::SpanId;
use weir_store::{Error, Result};

use self::group::GroupContext;
use super::in_flight::{DeadMessage, Entry, InFlight, Limits};
use super::{Brokers, ENGINE, client_config, dead_letter_topic, error};
use crate::publish::{OutgoingEvent, PublishOutcome, Publisher, trace_headers};
use crate::{ClaimReceipt, MessageClaim, MessageSource, Position, Settlement};

/// The timeout of a commit.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);
const LIMITS: Limits = Limits { messages_max: 4_096, bytes_max: 16 * 1024 * 1024 };

/// The settings of a group member.
#[derive(Clone, Debug)]
pub struct SourceSettings {
    /// The group, whose members share the topic's partitions.
    pub group: String,
    /// How long after a crash the other members take over.
    pub session_timeout: Duration,
}

impl Default for SourceSettings {
    fn default() -> Self {
        Self { group: "weir-sender".to_owned(), session_timeout: Duration::from_secs(10) }
    }
}

impl SourceSettings {
    fn config(&self, brokers: &Brokers) -> ClientConfig {
        let session_ms = self.session_timeout.as_millis().clamp(1_000, 3_600_000);
        let mut config = client_config(brokers);
        config
            .set("group.id", &self.group)
            .set("session.timeout.ms", session_ms.to_string())
            .set("heartbeat.interval.ms", (session_ms / 4).min(3_000).to_string())
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "earliest")
            .set("allow.auto.create.topics", "false")
            // Topics that are created later are found within this time.
            .set("topic.metadata.refresh.interval.ms", "10000")
            .set("queued.min.messages", "10000")
            .set("queued.max.messages.kbytes", "16384")
            .set("fetch.max.bytes", (16 * 1024 * 1024).to_string())
            .set("fetch.error.backoff.ms", "100")
            .set("fetch.queue.backoff.ms", "10");
        config
    }
}

/// A source of one topic's messages.
pub struct KafkaSource {
    shared: Arc<SharedSource>,
    /// Publishes dead letters.
    dead_letters: Arc<dyn Publisher>,
}

type Consumer = BaseConsumer<GroupContext>;

struct SharedSource {
    topic: String,
    state: Mutex<SourceState>,
    /// Notified when the state changes in a way that the polling thread waits for.
    changed: Condvar,
    /// Notified when there may be messages to claim.
    wake: Notify,
    stop: AtomicBool,
    closed: Notify,
}

struct SourceState {
    in_flight: InFlight,
    committing: bool,
    /// Whether the last poll succeeded.
    reachable: bool,
    /// `None` once the source is closed.
    consumer: Option<Weak<Consumer>>,
}

/// A commit to execute.
struct Commit {
    consumer: Arc<Consumer>,
    offsets: Vec<(u16, i64)>,
}

impl std::fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaSource").field("topic", &self.shared.topic).finish_non_exhaustive()
    }
}

impl KafkaSource {
    /// Opens a source, whether or not its brokers are reachable. `dead_letters` publishes dead letters. Fails only if the
    /// client cannot be created locally.
    pub fn open(
        brokers: &Brokers,
        topic: &str,
        settings: &SourceSettings,
        dead_letters: Arc<dyn Publisher>,
    ) -> Result<Self> {
        let in_flight = InFlight::new(topic.to_owned(), LIMITS);
        let shared = Arc::new(SharedSource {
            topic: topic.to_owned(),
            state: Mutex::new(SourceState { in_flight, committing: false, reachable: true, consumer: None }),
            changed: Condvar::new(),
            wake: Notify::new(),
            stop: AtomicBool::new(false),
            closed: Notify::new(),
        });
        let context = GroupContext { shared: Arc::clone(&shared) };
        let created = BaseConsumer::from_config_and_context(&settings.config(brokers), context)
            .and_then(|consumer: Consumer| consumer.subscribe(&[topic]).map(|()| Arc::new(consumer)));
        let consumer = created.map_err(|cause| Error::failed(ENGINE, cause))?;
        shared.state.lock().consumer = Some(Arc::downgrade(&consumer));
        let polled = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kafka-source".to_owned())
            .spawn(move || polled.run(consumer))
            .map_err(|cause| Error::failed(ENGINE, cause))?;
        Ok(Self { shared, dead_letters })
    }
}

/// The thread then leaves the group and ends.
impl Drop for KafkaSource {
    fn drop(&mut self) {
        self.shared.end();
    }
}

#[async_trait]
impl MessageSource for KafkaSource {
    async fn claim(&self, topic: &str, max: usize, visibility: Duration) -> Result<MessageClaim> {
        if topic != self.shared.topic {
            return Ok(MessageClaim::default());
        }
        let now = Instant::now();
        let until = now.checked_add(visibility).unwrap_or(now + Duration::from_secs(86_400));
        Ok(self.shared.state.lock().in_flight.claim(max, now, until))
    }

    /// A message that is not settled is delivered again with all messages of its partition after it, since a partition has
    /// only one committed offset. The same holds for `retry`, after its pause.
    async fn settle(&self, receipt: &ClaimReceipt, settlement: Settlement) -> Result<bool> {
        let Some(dead_messages) = self.shared.state.lock().in_flight.dead_messages(receipt, &settlement)
        else {
            return Ok(false);
        };
        let (published, failure) = self.publish_dead_letters(dead_messages).await;
        let (all_held, commit) = self.shared.settle(receipt, &settlement, &published);
        let committed = self.shared.commit(commit).await;
        failure.map_or(Ok(()), Err)?;
        Ok(committed? && all_held)
    }

    /// Leaves the group, so that other members take over at once, including unsettled messages.
    async fn close(&self) {
        let closed = self.shared.closed.notified();
        self.shared.end();
        closed.await;
    }

    async fn wait(&self, topic: &str, at_most: Duration) {
        let now = Instant::now();
        let ready_at = match topic == self.shared.topic {
            true => self.shared.state.lock().in_flight.ready_at(now),
            false => None,
        };
        let at_most = ready_at.map_or(at_most, |ready| at_most.min(ready.saturating_duration_since(now)));
        // The caller also polls after a timeout.
        let _ = tokio::time::timeout(at_most, self.shared.wake.notified()).await;
    }
}

impl KafkaSource {
    /// Publishes dead letters. Returns the confirmed ones, and the last error of the others.
    async fn publish_dead_letters(
        &self,
        dead_messages: Vec<DeadMessage>,
    ) -> (BTreeSet<Position>, Option<Error>) {
        if dead_messages.is_empty() {
            return (BTreeSet::new(), None);
        }
        let topic = &self.shared.topic;
        let positions: Vec<Position> =
            dead_messages.iter().map(|dead_message| dead_message.entry.message.position).collect();
        let events =
            dead_messages.into_iter().map(|dead_message| dead_letter_event(topic, dead_message)).collect();
        let outcomes = self.dead_letters.publish(&dead_letter_topic(topic), events).await;
        let (mut published, mut failure) = (BTreeSet::new(), None);
        for (position, outcome) in positions.into_iter().zip(outcomes) {
            match outcome {
                PublishOutcome::Confirmed => {
                    published.insert(position);
                }
                PublishOutcome::Failed(error) | PublishOutcome::Unknown(error) => failure = Some(error),
            }
        }
        (published, failure)
    }
}

fn dead_letter_event(topic: &str, DeadMessage { entry, reason }: DeadMessage) -> OutgoingEvent {
    let Position { shard, id } = entry.message.position;
    let mut headers = vec![
        ("reason", reason),
        ("source-topic", topic.to_owned()),
        ("source-partition", shard.to_string()),
        ("source-offset", id.to_string()),
    ];
    if let Some(trace) = &entry.message.trace {
        headers.extend(trace_headers(trace, SpanId::from_number(fastrand::u64(..))));
    }
    OutgoingEvent { key: entry.key, payload: entry.message.payload, headers }
}

impl SourceState {
    /// Returns the offsets to commit, if any.
    fn begin_commit(&mut self) -> Result<Option<Commit>> {
        let offsets = self.in_flight.uncommitted();
        if offsets.is_empty() {
            return Ok(None);
        }
        let consumer = self.consumer.as_ref().and_then(Weak::upgrade).ok_or(Error::ShuttingDown)?;
        if std::mem::replace(&mut self.committing, true) {
            return Err(Error::unavailable(ENGINE, "the last commit is not confirmed yet"));
        }
        Ok(Some(Commit { consumer, offsets }))
    }
}

impl SharedSource {
    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Settles a claim and begins the commit under one lock, so that partitions are not revoked before the commit ends.
    fn settle(
        &self,
        receipt: &ClaimReceipt,
        settlement: &Settlement,
        published: &BTreeSet<Position>,
    ) -> (bool, Result<Option<Commit>>) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let all_held = state.in_flight.settle(receipt, settlement, published, now);
        let commit = state.begin_commit();
        let more = state.in_flight.ready_at(now).is_some();
        drop(state);
        self.changed.notify_all();
        if more {
            self.wake.notify_one();
        }
        (all_held, commit)
    }

    /// Commits settled offsets. Returns `false` if the group has expelled this member.
    async fn commit(self: &Arc<Self>, commit: Result<Option<Commit>>) -> Result<bool> {
        let Some(Commit { consumer, offsets }) = commit? else {
            return Ok(true);
        };
        let shared = Arc::clone(self);
        // librdkafka has a longer timeout: it waits for the group's broker to return.
        let commit = tokio::task::spawn_blocking(move || {
            let outcome =
                list(&shared.topic, &offsets).and_then(|offsets| consumer.commit(&offsets, CommitMode::Sync));
            drop(consumer);
            shared.after_commit(outcome.is_ok().then_some(&offsets));
            outcome
        });
        let committed = tokio::time::timeout(COMMIT_TIMEOUT, commit).await;
        let committed = committed.map_err(|late| Error::unavailable(ENGINE, late))?;
        match committed.map_err(|panic| Error::failed(ENGINE, panic))? {
            Ok(()) => Ok(true),
            // The offsets are committed after the rebalance, or when it revokes the partition.
            Err(cause) if is_rebalance(&cause) => Ok(true),
            Err(cause) if is_lost_membership(&cause) => Ok(false),
            Err(cause) => Err(error(cause)),
        }
    }

    fn after_commit(&self, committed: Option<&Vec<(u16, i64)>>) {
        let mut state = self.state.lock();
        state.committing = false;
        if let Some(offsets) = committed {
            state.in_flight.committed(offsets);
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// Whether the group is rebalancing, and accepts no commits meanwhile.
fn is_rebalance(cause: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(cause.rdkafka_error_code(), Some(Code::RebalanceInProgress | Code::IllegalGeneration))
}

/// Whether the group has expelled this member.
fn is_lost_membership(cause: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(cause.rdkafka_error_code(), Some(Code::UnknownMemberId | Code::FencedMemberEpoch))
}

fn list(topic: &str, offsets: &[(u16, i64)]) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(offsets.len());
    for (partition, offset) in offsets {
        list.add_partition_offset(topic, i32::from(*partition), Offset::Offset(*offset))?;
    }
    Ok(list)
}
