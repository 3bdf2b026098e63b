//! What a source delivers and commits. How several sources share a topic is in `group.rs`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::topic_partition_list::TopicPartitionList;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use weir_queue::kafka::{
    KafkaPublisher, KafkaSource, PublisherSettings, SourceSettings, TopicSettings, dead_letter_topic,
    ensure_topics,
};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};
use weir_queue::{Message, MessageClaim, MessageSource, Position, Settlement};

use crate::cluster::{Cluster, TEST_TIMEOUT};

const TOPIC: &str = "sms-outbound";
const DLQ: &str = "sms-outbound.dlq";
const GROUP: &str = "weir-sender";
const VISIBILITY: Duration = Duration::from_secs(60);

struct Fixture {
    cluster: Cluster,
    publisher: KafkaPublisher,
    /// Publishes dead letters.
    dead_letters: Arc<KafkaPublisher>,
}

impl Fixture {
    fn start(partitions: i32) -> Self {
        let cluster = Cluster::start(&[(TOPIC, partitions), (DLQ, 1)]);
        let settings = PublisherSettings { timeout: TEST_TIMEOUT, ..PublisherSettings::default() };
        let open = || KafkaPublisher::open(&cluster.brokers(), settings.clone()).unwrap();
        Self { publisher: open(), dead_letters: Arc::new(open()), cluster }
    }

    /// A member of a group that rebalances soon: the mock brokers wait three seconds for the first members, and a second less
    /// than the session for those that rejoin.
    fn source(&self) -> KafkaSource {
        self.source_with_session(Duration::from_secs(4))
    }

    fn source_with_session(&self, session_timeout: Duration) -> KafkaSource {
        let dead_letters: Arc<dyn Publisher> = Arc::clone(&self.dead_letters) as _;
        let settings = SourceSettings { session_timeout, ..SourceSettings::default() };
        KafkaSource::open(&self.cluster.brokers(), TOPIC, &settings, dead_letters).unwrap()
    }

    async fn send(&self, key: &str, range: std::ops::Range<usize>) {
        let events = range.map(|n| OutgoingEvent::new(key, format!("{key} {n}").into_bytes())).collect();
        let outcomes = self.publisher.publish(TOPIC, events).await;
        assert!(outcomes.iter().all(PublishOutcome::is_confirmed), "{outcomes:?}");
    }

    /// The group's committed offsets by partition; 0 for none.
    fn committed(&self, partitions: i32) -> Vec<i64> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", self.cluster.0.bootstrap_servers())
            .set("group.id", GROUP)
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_range(TOPIC, 0, partitions - 1);
        let list = consumer.committed_offsets(list, TEST_TIMEOUT).unwrap();
        list.elements().iter().map(|element| element.offset().to_raw().unwrap_or(0).max(0)).collect()
    }
}

/// Waits until there are messages to claim.
async fn claim(source: &KafkaSource, max: usize) -> MessageClaim {
    let give_up_at = Instant::now() + TEST_TIMEOUT;
    loop {
        let claim = source.claim(TOPIC, max, VISIBILITY).await.unwrap();
        if !claim.messages.is_empty() {
            return claim;
        }
        assert!(Instant::now() < give_up_at, "nothing to claim");
        source.wait(TOPIC, Duration::from_secs(1)).await;
    }
}

/// Claims and settles messages until there were `count`.
async fn deliver(source: &KafkaSource, count: usize) -> Vec<Message> {
    let mut delivered = Vec::new();
    while delivered.len() < count {
        let MessageClaim { messages, receipt } = claim(source, 7.min(count - delivered.len())).await;
        assert!(source.settle(&receipt, done(&messages)).await.unwrap());
        delivered.extend(messages);
    }
    delivered
}

fn done(messages: &[Message]) -> Settlement {
    Settlement { done: messages.iter().map(|message| message.position).collect(), ..Settlement::default() }
}

fn texts(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|message| String::from_utf8(message.payload.clone()).unwrap()).collect()
}

fn numbered(key: &str, range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|n| format!("{key} {n}")).collect()
}

#[tokio::test]
async fn messages_come_in_order_and_are_committed_when_settled() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..10).await;
    let source = fixture.source();
    let first = claim(&source, 4).await;
    assert!(first.messages.len() <= 4);
    assert_eq!(first.messages[0].key, "alice");
    assert_eq!(first.messages[0].position, Position { shard: 0, id: 0 });
    assert!(source.claim(TOPIC, 4, VISIBILITY).await.unwrap().messages.is_empty(), "one claim at a time");
    assert_eq!(fixture.committed(1), [0], "claiming commits nothing");
    assert!(source.settle(&first.receipt, done(&first.messages)).await.unwrap());
    assert_eq!(fixture.committed(1), [i64::try_from(first.messages.len()).unwrap()]);
    assert!(!source.settle(&first.receipt, done(&first.messages)).await.unwrap(), "settled already");
    let rest = deliver(&source, 10 - first.messages.len()).await;
    assert_eq!([texts(&first.messages), texts(&rest)].concat(), numbered("alice", 0..10));
    assert_eq!(fixture.committed(1), [10]);
    assert!(source.claim("another", 4, VISIBILITY).await.unwrap().messages.is_empty());
}

#[tokio::test]
async fn unsettled_messages_are_delivered_again_in_order() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..6).await;
    let source = fixture.source();
    assert_eq!(texts(&deliver(&source, 1).await)[0], "alice 0");
    let seen = fixture.committed(1)[0];
    // Settles nothing, as when the delivery was aborted.
    let failed = claim(&source, 100).await;
    assert!(source.settle(&failed.receipt, Settlement::default()).await.unwrap());
    assert_eq!(fixture.committed(1), [seen]);
    // A gap: the messages after it are delivered again, too.
    let MessageClaim { messages, receipt } = claim(&source, 100).await;
    assert_eq!(texts(&messages)[..], texts(&failed.messages)[..messages.len()]);
    let holed = messages.iter().map(|message| message.position).filter(|position| position.id != seen + 1);
    let settlement = Settlement { done: holed.collect(), ..Settlement::default() };
    assert!(source.settle(&receipt, settlement).await.unwrap());
    assert_eq!(fixture.committed(1), [seen + 1]);
    // Delivered again only after a pause, with an attempt counted.
    let MessageClaim { messages, receipt } = claim(&source, 1).await;
    let pause = Duration::from_millis(200);
    let settlement = Settlement { retry: vec![(messages[0].position, pause)], ..Settlement::default() };
    let put_back = Instant::now();
    assert!(source.settle(&receipt, settlement).await.unwrap());
    let again = claim(&source, 1).await;
    assert!(put_back.elapsed() >= pause);
    assert_eq!((again.messages[0].position, again.messages[0].attempts), (messages[0].position, 1));
    assert!(source.settle(&again.receipt, done(&again.messages)).await.unwrap());
    let rest = usize::try_from(6 - seen - 2).unwrap();
    assert_eq!(texts(&deliver(&source, rest).await), numbered("alice", 6 - rest..6));
    assert_eq!(fixture.committed(1), [6]);
}

#[tokio::test]
async fn dead_letters_are_published_with_their_origin_before_they_are_committed() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..3).await;
    let source = fixture.source();
    let mut seen = Vec::new();
    while seen.len() < 3 {
        let MessageClaim { messages, receipt } = claim(&source, 10).await;
        let (bad, good): (Vec<_>, Vec<_>) = messages.iter().partition(|message| message.position.id == 1);
        let settlement = Settlement {
            done: good.iter().map(|message| message.position).collect(),
            dead: bad.iter().map(|message| (message.position, "malformed".to_owned())).collect(),
            ..Settlement::default()
        };
        assert!(source.settle(&receipt, settlement).await.unwrap());
        seen.extend(messages);
    }
    assert_eq!(fixture.committed(1), [3]);
    let letters = fixture.cluster.read(&dead_letter_topic(TOPIC), 1);
    assert_eq!((letters[0].key.as_str(), letters[0].payload.as_str()), ("alice", "alice 1"));
    let told =
        [("reason", "malformed"), ("source-topic", TOPIC), ("source-partition", "0"), ("source-offset", "1")];
    let told: BTreeMap<_, _> = told.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    assert_eq!(letters[0].headers, told);
}

#[tokio::test]
async fn dead_letters_that_cannot_be_published_are_delivered_again() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..1).await;
    let source = fixture.source();
    let MessageClaim { messages, receipt } = claim(&source, 10).await;
    let refusal = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED];
    fixture.cluster.0.request_errors(RDKafkaApiKey::Produce, &refusal);
    let dead = vec![(messages[0].position, "malformed".to_owned())];
    let settlement = Settlement { dead, ..Settlement::default() };
    source.settle(&receipt, settlement.clone()).await.unwrap_err();
    assert_eq!(fixture.committed(1), [0]);
    let again = claim(&source, 10).await;
    assert_eq!(again.messages, messages);
    // librdkafka refuses the topic until it has fetched the metadata again.
    fixture.dead_letters.ping().await.unwrap();
    assert!(source.settle(&again.receipt, settlement).await.unwrap());
    assert_eq!(fixture.committed(1), [1]);
    fixture.cluster.read(DLQ, 1);
}

#[tokio::test]
async fn a_restart_continues_after_the_committed_offset() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..10).await;
    let source = fixture.source();
    let delivered = deliver(&source, 4).await;
    // Claimed when the source ends: not lost.
    let lost = source.claim(TOPIC, 100, VISIBILITY).await.unwrap();
    source.close().await;
    let source = fixture.source();
    let rest = deliver(&source, 10 - delivered.len()).await;
    assert_eq!([texts(&delivered), texts(&rest)].concat(), numbered("alice", 0..10));
    assert!(lost.messages.iter().all(|message| rest.contains(message)));
    assert_eq!(fixture.committed(1), [10]);
}

#[tokio::test]
async fn another_member_takes_over_at_once_when_one_closes() {
    let fixture = Fixture::start(1);
    let session = Duration::from_secs(10);
    fixture.send("alice", 0..1).await;
    let first = fixture.source_with_session(session);
    deliver(&first, 1).await;
    first.close().await;
    let left = Instant::now();
    fixture.send("alice", 1..2).await;
    let second = fixture.source_with_session(session);
    assert_eq!(texts(&deliver(&second, 1).await), ["alice 1"]);
    // The mock brokers wait most of a session for others to join, and a second session for a silent member.
    assert!(left.elapsed() < session * 3 / 2, "{:?}", left.elapsed());
}

#[tokio::test]
async fn a_partition_assigned_again_is_not_settled_by_an_old_receipt() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..3).await;
    let source = fixture.source();
    let late = claim(&source, 10).await;
    // The group expels its member, which loses its partitions and rejoins.
    let forgotten = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID];
    fixture.cluster.0.request_errors(RDKafkaApiKey::Heartbeat, &forgotten);
    // While the first claim is unsettled, messages can be claimed only if the partition was assigned again.
    let again = claim(&source, 10).await;
    assert_eq!(again.messages[0], late.messages[0]);
    assert!(!source.settle(&late.receipt, done(&late.messages)).await.unwrap());
    assert_eq!(fixture.committed(1), [0], "the old receipt committed nothing");
    assert!(source.settle(&again.receipt, done(&again.messages)).await.unwrap());
    assert_eq!(fixture.committed(1), [i64::try_from(again.messages.len()).unwrap()]);
}

#[tokio::test]
async fn delivery_resumes_when_unreachable_brokers_return() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..2).await;
    let source = fixture.source();
    assert_eq!(texts(&deliver(&source, 2).await), numbered("alice", 0..2));
    fixture.cluster.0.broker_down(Cluster::BROKER).unwrap();
    assert!(source.claim(TOPIC, 10, VISIBILITY).await.unwrap().messages.is_empty());
    fixture.cluster.0.broker_up(Cluster::BROKER).unwrap();
    let give_up_at = Instant::now() + TEST_TIMEOUT;
    while fixture.publisher.ping().await.is_err() {
        assert!(Instant::now() < give_up_at);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    fixture.send("alice", 2..4).await;
    assert_eq!(texts(&deliver(&source, 2).await), numbered("alice", 2..4));
}

#[tokio::test]
async fn a_failed_commit_is_repeated() {
    let fixture = Fixture::start(1);
    fixture.send("alice", 0..3).await;
    let source = fixture.source();
    let MessageClaim { messages, receipt } = claim(&source, 1).await;
    let refusal = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED];
    fixture.cluster.0.request_errors(RDKafkaApiKey::OffsetCommit, &refusal);
    source.settle(&receipt, done(&messages)).await.unwrap_err();
    // Without another settlement, and without delivering the message again.
    let give_up_at = Instant::now() + TEST_TIMEOUT;
    while fixture.committed(1) != [1] {
        assert!(Instant::now() < give_up_at, "{:?}", fixture.committed(1));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(texts(&deliver(&source, 2).await), numbered("alice", 1..3));
}

#[tokio::test]
async fn topics_that_exist_or_cannot_be_created_do_not_fail_the_start() {
    let fixture = Fixture::start(1);
    let brokers = fixture.cluster.brokers();
    ensure_topics(&brokers, &[TOPIC, DLQ], TopicSettings::default()).await.unwrap();
    // The mock brokers do not support the request: a refusal.
    ensure_topics(&brokers, &["another"], TopicSettings::default()).await.unwrap();
    fixture.cluster.0.broker_down(Cluster::BROKER).unwrap();
    let unreachable = ensure_topics(&brokers, &[TOPIC], TopicSettings::default()).await.unwrap_err();
    assert!(unreachable.is_transient(), "{unreachable:?}");
}
