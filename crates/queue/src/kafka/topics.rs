//! Creates missing topics.

use std::time::Duration;

use rdkafka::ClientContext;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use weir_store::{Error, Result};

use super::{Brokers, ENGINE, EVENT_BYTES_MAX, client_config, error, log};

/// The timeout of each request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// How topics are created. Existing topics are not changed.
#[derive(Clone, Copy, Debug)]
pub struct TopicSettings {
    /// Partitions, which bound how many senders can work at once.
    pub partitions: i32,
    /// On how many brokers each partition is stored; -1 for the brokers' default.
    pub replication: i32,
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self { partitions: 12, replication: -1 }
    }
}

struct AdminContext;

impl ClientContext for AdminContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "weir::kafka", %error, reason, "the admin client reports an error");
    }
}

/// Creates missing topics if the brokers allow it. Brokers that forbid it may create topics at first use, so a refusal is
/// only logged. Fails if no broker answers.
pub async fn ensure_topics(brokers: &Brokers, topics: &[&str], settings: TopicSettings) -> Result<()> {
    let mut config = client_config(brokers);
    config.set("socket.timeout.ms", REQUEST_TIMEOUT.as_millis().to_string());
    let admin = AdminClient::from_config_and_context(&config, AdminContext)
        .map_err(|cause| Error::failed(ENGINE, cause))?;
    // Listing topics first shows whether brokers answer, and avoids a request that they may refuse.
    let (admin, existing) = tokio::task::spawn_blocking(move || {
        let existing = existing(&admin);
        (admin, existing)
    })
    .await
    .map_err(|panic| Error::failed(ENGINE, panic))?;
    let existing = existing.map_err(error)?;
    let missing: Vec<&str> =
        topics.iter().copied().filter(|topic| !existing.iter().any(|other| other == topic)).collect();
    let outcome = if missing.is_empty() { Ok(()) } else { create(&admin, &missing, settings).await };
    // Dropping a client waits for its threads.
    let ended = tokio::task::spawn_blocking(move || drop(admin)).await;
    ended.map_err(|panic| Error::failed(ENGINE, panic))?;
    outcome
}

fn existing(admin: &AdminClient<AdminContext>) -> rdkafka::error::KafkaResult<Vec<String>> {
    let metadata = admin.inner().fetch_metadata(None, REQUEST_TIMEOUT)?;
    let there = metadata.topics().iter().filter(|topic| topic.error().is_none());
    Ok(there.map(|topic| topic.name().to_owned()).collect())
}

async fn create(admin: &AdminClient<AdminContext>, topics: &[&str], settings: TopicSettings) -> Result<()> {
    let bytes_max = EVENT_BYTES_MAX.to_string();
    let new: Vec<NewTopic<'_>> = topics
        .iter()
        .map(|topic| {
            let replication = TopicReplication::Fixed(settings.replication);
            NewTopic::new(topic, settings.partitions, replication).set("max.message.bytes", &bytes_max)
        })
        .collect();
    let options =
        AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT)).operation_timeout(Some(REQUEST_TIMEOUT));
    match admin.create_topics(&new, &options).await {
        Ok(results) => {
            for result in results {
                log_result(result);
            }
            Ok(())
        }
        Err(cause) if is_silence(&cause) => Err(error(cause)),
        Err(cause) => {
            let code = cause.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown);
            log_result(Err((topics.join(", "), code)));
            Ok(())
        }
    }
}

fn is_silence(cause: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let code = cause.rdkafka_error_code();
    matches!(code, Some(Code::BrokerTransportFailure | Code::OperationTimedOut | Code::AllBrokersDown))
}

fn log_result(result: std::result::Result<String, (String, RDKafkaErrorCode)>) {
    match result {
        Ok(topic) => tracing::info!(target: "weir::kafka", topic, "created the topic"),
        // Another server was faster.
        Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
        Err((topic, code)) => {
            tracing::warn!(target: "weir::kafka", topic, %code, "the brokers do not let the topic be made; make it by hand unless they make it at first use");
        }
    }
}
