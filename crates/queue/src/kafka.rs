//! Kafka through librdkafka: a publisher that waits for confirmations, and a source that is a member of a consumer group.
//!
//! A [`KafkaPublisher`] reports each event as confirmed, failed or unknown. While no broker answers, it fails at once, and
//! it recovers by itself. A [`KafkaSource`] delivers the messages of one topic in the order of each partition and commits
//! only offsets of settled messages, so a crash repeats messages and never loses any. [`ensure_topics`] creates topics
//! if the brokers allow it. TLS and SASL are a feature of the build (`security.rs`).

mod batch;
mod brokers;
mod in_flight;
mod log;
mod publisher;
mod security;
mod source;
mod status;
mod topics;
mod watch;

use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use weir_store::Error;

pub use self::brokers::{Brokers, BrokersError};
pub use self::publisher::{KafkaPublisher, PublisherSettings};
pub use self::security::{HAS_TLS, Sasl, SaslMechanism, Security, UnknownMechanism};
pub use self::source::{KafkaSource, SourceSettings};
pub use self::topics::{TopicSettings, ensure_topics};

/// The engine's name in errors and health checks.
pub const ENGINE: &str = "kafka";

/// The largest event: the largest body that the API accepts, escaped as JSON in the worst way.
const EVENT_BYTES_MAX: usize = 8 * 1024 * 1024;

#[must_use]
pub fn dead_letter_topic(topic: &str) -> String {
    format!("{topic}.dlq")
}

/// The configuration that all clients share.
fn client_config(brokers: &Brokers) -> ClientConfig {
    let mut config = ClientConfig::new();
    brokers.apply(&mut config);
    config
        .set("client.id", "weir")
        .set("socket.nagle.disable", "true")
        .set("socket.keepalive.enable", "true")
        // Short timeouts, to give up a broker that drops packets and to reconnect when it returns.
        .set("socket.connection.setup.timeout.ms", "2000")
        .set("reconnect.backoff.ms", "50")
        .set("reconnect.backoff.max.ms", "500")
        .set_log_level(RDKafkaLogLevel::Info);
    config
}

/// Classifies an error of Kafka by whether a retry can help.
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
