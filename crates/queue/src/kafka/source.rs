//! The source: one member of a consumer group, polled by a thread of its own.
//!
//! The thread fetches ahead onto the [`InFlight`], within bounds, and keeps polling while a delivery is slow, so the group
//! never takes it for dead. Claims are answered from what was read ahead. A claim is settled by publishing its dead letters to
//! `<topic>.dlq`, then committing offsets behind what is done; when the commit is not confirmed, the offsets are
//! committed again with the next ones or a second later.
//!
//! Partitions are assigned cooperatively: who joins or leaves the group takes only the partitions that move out of
//! their owners' hands, and the rest go on. A partition is given up only when what is out of it is settled, or after
//! a few seconds.

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
use weir_store::{Error, Result};

use self::group::Context;
use super::in_flight::{DeadMessage, Entry, InFlight, Limits};
use super::{Brokers, ENGINE, client_config, dead_letter_topic, error};
use crate::publish::{OutgoingEvent, PublishOutcome, Publisher};
use crate::{ClaimReceipt, MessageClaim, MessageSource, Position, Settlement};

/// How long a commit may take.
const COMMIT_PATIENCE: Duration = Duration::from_secs(5);
/// How much is held at most.
const LIMITS: Limits = Limits { messages_max: 4_096, bytes_max: 16 * 1024 * 1024 };

/// How to be a member of the group.
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
            // A topic that is made later is found soon.
            .set("topic.metadata.refresh.interval.ms", "10000")
            .set("queued.min.messages", "10000")
            .set("queued.max.messages.kbytes", "16384")
            .set("fetch.max.bytes", (16 * 1024 * 1024).to_string())
            .set("fetch.error.backoff.ms", "100")
            .set("fetch.queue.backoff.ms", "10");
        config
    }
}

/// Messages of one topic.
pub struct KafkaSource {
    shared: Arc<Shared>,
    /// Where dead letters go.
    dead_letters: Arc<dyn Publisher>,
}

type Consumer = BaseConsumer<Context>;

struct Shared {
    topic: String,
    state: Mutex<State>,
    /// The state changed in a way that the thread waits for.
    changed: Condvar,
    /// There may be something to claim.
    wake: Notify,
    stop: AtomicBool,
    closed: Notify,
}

struct State {
    in_flight: InFlight,
    /// Whether offsets are being committed.
    committing: bool,
    /// Whether brokers answered when last heard of.
    reachable: bool,
    /// Until the source is closed.
    consumer: Option<Weak<Consumer>>,
}

/// A commit about to be made.
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
    /// A source of this topic's messages, whether its brokers are there already or not. Dead letters are published
    /// by `dead_letters`.
    /// Fails when the client cannot be made, which no broker has a part in.
    pub fn open(
        brokers: &Brokers,
        topic: &str,
        settings: &SourceSettings,
        dead_letters: Arc<dyn Publisher>,
    ) -> Result<Self> {
        let in_flight = InFlight::new(topic.to_owned(), LIMITS);
        let shared = Arc::new(Shared {
            topic: topic.to_owned(),
            state: Mutex::new(State { in_flight, committing: false, reachable: true, consumer: None }),
            changed: Condvar::new(),
            wake: Notify::new(),
            stop: AtomicBool::new(false),
            closed: Notify::new(),
        });
        let context = Context { shared: Arc::clone(&shared) };
        let made = BaseConsumer::from_config_and_context(&settings.config(brokers), context)
            .and_then(|consumer: Consumer| consumer.subscribe(&[topic]).map(|()| Arc::new(consumer)));
        let consumer = made.map_err(|cause| Error::failed(ENGINE, cause))?;
        shared.state.lock().consumer = Some(Arc::downgrade(&consumer));
        let polled = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kafka-source".to_owned())
            .spawn(move || polled.run(consumer))
            .map_err(|cause| Error::failed(ENGINE, cause))?;
        Ok(Self { shared, dead_letters })
    }
}

/// The thread ends by itself and leaves the group.
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

    /// What is not settled, and everything of its partition behind it, is handed out again: a log has one place to
    /// go on from. That is what becomes of `retry`, too, after its pause.
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

    /// Leaves the group, so that others take over at once. What is out is handed out again, there.
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
        // The caller looks for work after a timeout as well.
        let _ = tokio::time::timeout(at_most, self.shared.wake.notified()).await;
    }
}

impl KafkaSource {
    /// Publishes dead letters; says which are certainly there, and what went wrong with the others.
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
        let events = dead_messages.into_iter().map(|dead_message| letter(topic, dead_message)).collect();
        let fates = self.dead_letters.publish(&dead_letter_topic(topic), events).await;
        let (mut published, mut failure) = (BTreeSet::new(), None);
        for (position, fate) in positions.into_iter().zip(fates) {
            match fate {
                PublishOutcome::Confirmed => {
                    published.insert(position);
                }
                PublishOutcome::Failed(error) | PublishOutcome::Unknown(error) => failure = Some(error),
            }
        }
        (published, failure)
    }
}

fn letter(topic: &str, DeadMessage { entry, reason }: DeadMessage) -> OutgoingEvent {
    let Position { shard, id } = entry.message.position;
    let headers = vec![
        ("reason", reason),
        ("source-topic", topic.to_owned()),
        ("source-partition", shard.to_string()),
        ("source-offset", id.to_string()),
    ];
    OutgoingEvent { key: entry.key, payload: entry.message.payload, headers }
}

impl State {
    /// What there is to commit, if anything.
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

impl Shared {
    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn is_ending(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Settles a claim and begins a commit under one lock: partitions are not given up before the commit ends.
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

    /// Commits what is settled. False when the group has gone on without us.
    async fn commit(self: &Arc<Self>, commit: Result<Option<Commit>>) -> Result<bool> {
        let Some(Commit { consumer, offsets }) = commit? else {
            return Ok(true);
        };
        let shared = Arc::clone(self);
        // Bounded by librdkafka as well, but more generously: it waits for the group's broker to come back.
        let commit = tokio::task::spawn_blocking(move || {
            let outcome =
                list(&shared.topic, &offsets).and_then(|offsets| consumer.commit(&offsets, CommitMode::Sync));
            drop(consumer);
            shared.after_commit(outcome.is_ok().then_some(&offsets));
            outcome
        });
        let committed = tokio::time::timeout(COMMIT_PATIENCE, commit).await;
        let committed = committed.map_err(|late| Error::unavailable(ENGINE, late))?;
        match committed.map_err(|panic| Error::failed(ENGINE, panic))? {
            Ok(()) => Ok(true),
            // Made up for when the rebalance is over, or when it takes the partition away.
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

/// The group is about to settle who has what, and takes no commits meanwhile.
fn is_rebalance(cause: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(cause.rdkafka_error_code(), Some(Code::RebalanceInProgress | Code::IllegalGeneration))
}

/// The group has forgotten this member.
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
