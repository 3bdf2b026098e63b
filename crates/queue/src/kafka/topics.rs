//! Making the topics that are not there yet.

use std::time::Duration;

use rdkafka::ClientContext;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::config::{FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use weir_store::{Error, Result};

use super::{Brokers, ENGINE, EVENT_BYTES_MAX, client_config, error, log};

/// How long brokers may take for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// How topics are made. Those that are there already are left as they are.
#[derive(Clone, Copy, Debug)]
pub struct TopicSettings {
    /// Into how many partitions keys are spread: as many senders can work at once.
    pub partitions: i32,
    /// On how many brokers each partition is kept; -1 leaves it to them.
    pub replication: i32,
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self { partitions: 12, replication: -1 }
    }
}

struct Context;

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "weir::kafka", %error, reason, "the admin client reports an error");
    }
}

/// Makes sure, as far as the brokers allow, that these topics exist. Brokers that let nobody make topics may have them
/// already, or make them at first use, so a refusal is only a line in the log.
/// Fails when no broker answers.
pub async fn ensure_topics(brokers: &Brokers, topics: &[&str], settings: TopicSettings) -> Result<()> {
    let mut config = client_config(brokers);
    config.set("socket.timeout.ms", PATIENCE.as_millis().to_string());
    let admin = AdminClient::from_config_and_context(&config, Context)
        .map_err(|cause| Error::failed(ENGINE, cause))?;
    // Asking first finds out whether anybody answers, and spares brokers a request they may have to refuse.
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
    // Ending a client waits for its threads.
    let ended = tokio::task::spawn_blocking(move || drop(admin)).await;
    ended.map_err(|panic| Error::failed(ENGINE, panic))?;
    outcome
}

fn existing(admin: &AdminClient<Context>) -> rdkafka::error::KafkaResult<Vec<String>> {
    let metadata = admin.inner().fetch_metadata(None, PATIENCE)?;
    let there = metadata.topics().iter().filter(|topic| topic.error().is_none());
    Ok(there.map(|topic| topic.name().to_owned()).collect())
}

async fn create(admin: &AdminClient<Context>, topics: &[&str], settings: TopicSettings) -> Result<()> {
    let bytes_max = EVENT_BYTES_MAX.to_string();
    let new: Vec<NewTopic<'_>> = topics
        .iter()
        .map(|topic| {
            let replication = TopicReplication::Fixed(settings.replication);
            NewTopic::new(topic, settings.partitions, replication).set("max.message.bytes", &bytes_max)
        })
        .collect();
    let options = AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE));
    match admin.create_topics(&new, &options).await {
        Ok(results) => {
            for result in results {
                tell(result);
            }
            Ok(())
        }
        Err(cause) if is_silence(&cause) => Err(error(cause)),
        Err(cause) => {
            tell(Err((topics.join(", "), cause.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Unknown))));
            Ok(())
        }
    }
}

fn is_silence(cause: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let code = cause.rdkafka_error_code();
    matches!(code, Some(Code::BrokerTransportFailure | Code::OperationTimedOut | Code::AllBrokersDown))
}

fn tell(result: std::result::Result<String, (String, RDKafkaErrorCode)>) {
    match result {
        Ok(topic) => tracing::info!(target: "weir::kafka", topic, "made the topic"),
        // Somebody else was faster.
        Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
        Err((topic, code)) => {
            tracing::warn!(target: "weir::kafka", topic, %code, "the brokers do not let the topic be made; make it by hand unless they make it at first use");
        }
    }
}
