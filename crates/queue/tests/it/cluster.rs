//! Mock brokers, and a reader of their topics.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Headers as _;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use weir_queue::kafka::Brokers;

/// The timeout of these tests: longer than anything takes on a busy machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// One mock broker.
pub(crate) struct Cluster(pub(crate) MockCluster<'static, DefaultProducerContext>);

/// A message in a topic.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) partition: i32,
    pub(crate) key: String,
    pub(crate) payload: String,
    pub(crate) headers: BTreeMap<String, String>,
}

impl Cluster {
    pub(crate) const BROKER: i32 = 1;

    pub(crate) fn start(topics: &[(&str, i32)]) -> Self {
        let cluster = MockCluster::new(1).unwrap();
        for (topic, partitions) in topics {
            cluster.create_topic(topic, *partitions, 1).unwrap();
        }
        Self(cluster)
    }

    pub(crate) fn brokers(&self) -> Brokers {
        format!("kafka://{}", self.0.bootstrap_servers()).parse().unwrap()
    }

    /// Reads `count` messages from the beginning of a topic, and asserts that no more follow.
    pub(crate) fn read(&self, topic: &str, count: usize) -> Vec<Stored> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", self.0.bootstrap_servers())
            .set("enable.partition.eof", "true")
            .set("group.id", "reader")
            .set("enable.auto.commit", "false")
            .create()
            .unwrap();
        let metadata = consumer.fetch_metadata(Some(topic), TEST_TIMEOUT).unwrap();
        let mut all = TopicPartitionList::new();
        for partition in metadata.topics()[0].partitions() {
            all.add_partition_offset(topic, partition.id(), Offset::Beginning).unwrap();
        }
        consumer.assign(&all).unwrap();
        let (mut stored, mut ends, give_up_at) = (Vec::new(), 0, Instant::now() + TEST_TIMEOUT);
        while stored.len() < count || ends < all.count() {
            assert!(Instant::now() < give_up_at, "only {stored:?} on {topic}");
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => stored.push(read(&message)),
                Some(Err(rdkafka::error::KafkaError::PartitionEOF(_))) => ends += 1,
                Some(Err(error)) => panic!("{error}"),
                None => {}
            }
        }
        assert_eq!(stored.len(), count, "{stored:?}");
        stored
    }
}

fn read(message: &rdkafka::message::BorrowedMessage<'_>) -> Stored {
    let text = |bytes: Option<&[u8]>| String::from_utf8(bytes.unwrap_or_default().to_vec()).unwrap();
    let headers = message
        .headers()
        .map(|headers| headers.iter().map(|header| (header.key.to_owned(), text(header.value))).collect());
    Stored {
        partition: message.partition(),
        key: text(message.key()),
        payload: text(message.payload()),
        headers: headers.unwrap_or_default(),
    }
}
