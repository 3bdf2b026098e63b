//! Kafka as an engine: its publisher and its consumers.

use std::sync::Arc;
use std::time::Duration;

use weir_queue::MessageSource;
use weir_queue::kafka::{
    Brokers, KafkaPublisher, KafkaSource, PublisherSettings, SourceSettings, TopicSettings,
    dead_letter_topic, ensure_topics,
};
use weir_queue::publish::Publisher;
use weir_store::Result;
use weir_store::engine_calls::EngineCalls;
use weir_store::quota::TOPIC;

use super::broker_jobs::TOPIC as REQUEST_TOPIC;
use crate::settings::Settings;

/// How long a start waits for topics, and the pause between attempts to create them.
const TOPICS_TIMEOUT: Duration = Duration::from_secs(5);

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
        let (dispatch_topic, settings) = (settings.slot.dispatch_topic.clone(), &settings.store);
        let publisher_settings =
            PublisherSettings { timeout: settings.kafka_timeout, ..PublisherSettings::default() };
        let publisher = Arc::new(KafkaPublisher::open(brokers, publisher_settings)?);
        let partitions = i32::try_from(settings.kafka_partitions).unwrap_or(i32::MAX);
        let topic_settings = TopicSettings { partitions, ..TopicSettings::default() };
        let topics = [TOPIC, REQUEST_TOPIC]
            .into_iter()
            .flat_map(|topic| [topic.to_owned(), dead_letter_topic(topic)])
            .chain(dispatch_topic)
            .collect();
        let created = tokio::spawn(create_topics(brokers.clone(), topics, topic_settings));
        // If Kafka answers, a server that reports ready has its topics; otherwise they are created once Kafka answers.
        let _ = tokio::time::timeout(TOPICS_TIMEOUT, created).await;
        let (group, timeout) = (settings.kafka_group.clone(), settings.kafka_timeout);
        Ok(Self { brokers: brokers.clone(), group, publisher, timeout })
    }

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

    /// Why the brokers cannot be used although they are there, if that is so.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        self.publisher.problem()
    }

    pub(super) fn calls(&self) -> EngineCalls {
        self.publisher.calls()
    }

    pub async fn ping(&self) -> Result<()> {
        self.publisher.ping().await
    }
}

async fn create_topics(brokers: Brokers, topics: Vec<String>, settings: TopicSettings) {
    let names: Vec<&str> = topics.iter().map(String::as_str).collect();
    while let Err(error) = ensure_topics(&brokers, &names, settings).await {
        tracing::warn!(%brokers, error = %error.with_causes(), "waiting for Kafka: cannot create the topics yet");
        tokio::time::sleep(TOPICS_TIMEOUT).await;
    }
}
