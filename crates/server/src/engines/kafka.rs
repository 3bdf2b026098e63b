//! Kafka as an engine: what is published to it, and who takes from it.

use std::sync::Arc;
use std::time::Duration;

use weir_queue::MessageSource;
use weir_queue::kafka::{
    Brokers, KafkaPublisher, KafkaSource, PublisherSettings, SourceSettings, TopicSettings,
    dead_letter_topic, ensure_topics,
};
use weir_queue::publish::Publisher;
use weir_store::Result;
use weir_store::quota::TOPIC;

use super::broker_jobs::TOPIC as REQUEST_TOPIC;
use crate::settings::Settings;

/// How long a start waits for a broker, and the pause before it is asked again.
const BROKER_PATIENCE: Duration = Duration::from_secs(5);

/// Kafka, to which messages are published and from which the sender takes them.
#[derive(Clone, Debug)]
pub struct Kafka {
    brokers: Brokers,
    pub(super) group: String,
    publisher: Arc<KafkaPublisher>,
    /// How long a publish may take.
    pub(super) timeout: Duration,
}

impl Kafka {
    pub(super) async fn open(brokers: &Brokers, settings: &Settings) -> Result<Self> {
        let (due, settings) = (settings.slot.dispatch_topic.clone(), &settings.store);
        let publishing =
            PublisherSettings { timeout: settings.kafka_timeout, ..PublisherSettings::default() };
        let publisher = Arc::new(KafkaPublisher::open(brokers, publishing)?);
        let partitions = i32::try_from(settings.kafka_partitions).unwrap_or(i32::MAX);
        let how = TopicSettings { partitions, ..TopicSettings::default() };
        let ours =
            [TOPIC, REQUEST_TOPIC].into_iter().flat_map(|topic| [topic.to_owned(), dead_letter_topic(topic)]);
        let topics = ours.chain(due).collect();
        let made = tokio::spawn(make_topics(brokers.clone(), topics, how));
        // A server that is ready has its topics, if there is a broker; else they are made when there is.
        let _ = tokio::time::timeout(BROKER_PATIENCE, made).await;
        let (group, timeout) = (settings.kafka_group.clone(), settings.kafka_timeout);
        Ok(Self { brokers: brokers.clone(), group, publisher, timeout })
    }

    /// What publishes to it.
    pub(super) fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::<KafkaPublisher>::clone(&self.publisher)
    }

    pub(super) fn source(&self) -> Result<Arc<dyn MessageSource>> {
        self.source_of(TOPIC, &self.group)
    }

    pub(super) fn source_of(&self, topic: &str, group: &str) -> Result<Arc<dyn MessageSource>> {
        let settings = SourceSettings { group: group.to_owned(), ..SourceSettings::default() };
        Ok(Arc::new(KafkaSource::open(&self.brokers, topic, &settings, self.publisher())?))
    }

    /// Whether brokers answer.
    pub async fn ping(&self) -> Result<()> {
        self.publisher.ping().await
    }
}

async fn make_topics(brokers: Brokers, topics: Vec<String>, how: TopicSettings) {
    let names: Vec<&str> = topics.iter().map(String::as_str).collect();
    while let Err(error) = ensure_topics(&brokers, &names, how).await {
        tracing::warn!(%brokers, error = %error.with_causes(), "waiting for Kafka");
        tokio::time::sleep(BROKER_PATIENCE).await;
    }
}
