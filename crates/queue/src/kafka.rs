//! Kafka, through librdkafka: a publisher that waits for the brokers' word, and a source that is a consumer group.
//!
//! A [`KafkaPublisher`] says of each event whether it is there, certainly not there, or unknown; while no broker
//! answers it refuses at once, and it recovers by itself. A [`KafkaSource`] hands out the messages of one topic in
//! order of each partition and commits offsets only behind what was settled, so a crash repeats and never loses.
//! [`ensure_topics`] makes the topics where the brokers allow it. Connections are plain: neither TLS nor SASL is
//! compiled in.

mod batch;
mod brokers;
mod in_flight;
mod log;
mod publisher;
mod source;
mod status;
mod topics;
mod watch;

use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use weir_store::Error;

pub use self::brokers::{Brokers, BrokersError};
pub use self::publisher::{KafkaPublisher, PublisherSettings};
pub use self::source::{KafkaSource, SourceSettings};
pub use self::topics::{TopicSettings, ensure_topics};

/// Its name in errors and health checks.
pub const ENGINE: &str = "kafka";

/// The largest event: a message of the largest body the API takes, written as JSON at its worst.
const EVENT_BYTES_MAX: usize = 8 * 1024 * 1024;

/// The topic of the dead letters of a topic.
#[must_use]
pub fn dead_letter_topic(topic: &str) -> String {
    format!("{topic}.dlq")
}

/// What every client of ours has in common.
fn client_config(brokers: &Brokers) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers.bootstrap_servers())
        .set("client.id", "weir")
        .set("socket.nagle.disable", "true")
        .set("socket.keepalive.enable", "true")
        // A broker that swallows packets is given up soon, one that comes back is noticed soon.
        .set("socket.connection.setup.timeout.ms", "2000")
        .set("reconnect.backoff.ms", "50")
        .set("reconnect.backoff.max.ms", "500")
        .set_log_level(RDKafkaLogLevel::Info);
    config
}

/// Whether trying again can mend what Kafka said.
fn error(error: KafkaError) -> Error {
    use RDKafkaErrorCode as Code;
    match error.rdkafka_error_code() {
        Some(
            Code::MessageSizeTooLarge
            | Code::InvalidMessage
            | Code::InvalidMessageSize
            | Code::InvalidTopic
            | Code::InvalidRecord
            | Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::UnsupportedVersion
            | Code::InvalidArgument,
        ) => Error::failed(ENGINE, error),
        Some(Code::QueueFull) => Error::Overloaded { lane: ENGINE },
        _ => Error::unavailable(ENGINE, error),
    }
}
