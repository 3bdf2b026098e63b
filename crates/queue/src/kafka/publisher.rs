//! The publisher: an idempotent producer, a confirmation for every event, and a thread that watches the brokers.
//!
//! Events of a batch are passed to librdkafka one by one, which sends them in as few requests as possible. When a batch
//! times out, events that were not sent are purged and have failed; those that were sent are unknown. If brokers may be
//! unreachable, the watcher thread probes them, and while they do not answer, batches fail at once.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::RwLock;
use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{
    BaseRecord, DeliveryResult, Producer as _, ProducerContext, PurgeConfig, ThreadedProducer,
};
use weir_store::engine_calls::EngineCalls;
use weir_store::{Error, Result};

use super::batch::{PublishBatch, Ticket};
use super::watch::{Problem, Task, Watch};
use super::{Brokers, ENGINE, EVENT_BYTES_MAX, client_config, error, log, status};
use crate::publish::{OutgoingEvent, PublishOutcome, Publisher};

/// How long to wait for the delivery reports of purged events.
const GRACE: Duration = Duration::from_millis(100);
/// The pause between two probes of brokers that do not answer.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// No delay before sending. A batch is queued faster than its first event is sent, so 64 events leave in one or two
/// requests; librdkafka's shortest delay would cost a millisecond and save no request.
const LINGER_MS: &str = "0";

#[derive(Clone, Debug)]
pub struct PublisherSettings {
    /// How long a batch may take. Its outcomes, known or unknown, are returned within a tenth of a second after it.
    pub timeout: Duration,
    /// How many events may be in flight; more are refused.
    pub events_max: usize,
    /// How many bytes of events may be in flight; more are refused.
    pub bytes_max: usize,
}

impl Default for PublisherSettings {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(1), events_max: 100_000, bytes_max: 64 * 1024 * 1024 }
    }
}

impl PublisherSettings {
    fn config(&self, brokers: &Brokers) -> ClientConfig {
        let timeout_ms = self.timeout.as_millis().clamp(1, 900_000).to_string();
        // A connection on which a broker does not answer for this long is closed.
        let socket_timeout_ms = self.timeout.as_millis().clamp(1_000, 300_000).to_string();
        // A batch times out as a whole. If librdkafka timed out its events one by one, the oldest would be missing and later
        // ones sent. So librdkafka's timeout, which bounds its retries, is longer than that of the batch.
        let message_timeout_ms = (2 * self.timeout.as_millis()).clamp(2, 1_800_000).to_string();
        let mut config = client_config(brokers);
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("linger.ms", LINGER_MS)
            .set("message.timeout.ms", message_timeout_ms)
            .set("request.timeout.ms", timeout_ms)
            .set("socket.timeout.ms", socket_timeout_ms)
            .set("retry.backoff.ms", "20")
            .set("queue.buffering.max.messages", self.events_max.clamp(1, 10_000_000).to_string())
            .set("queue.buffering.max.kbytes", (self.bytes_max / 1024).clamp(1, 2_097_151).to_string())
            .set("message.max.bytes", EVENT_BYTES_MAX.to_string())
            // The same partition per key as the Java clients.
            .set("partitioner", "murmur2_random");
        config
    }

    /// The timeout of a probe.
    fn probe_timeout(&self) -> Duration {
        (self.timeout / 2).clamp(Duration::from_millis(100), Duration::from_secs(1))
    }
}

/// Publishes to Kafka.
#[derive(Debug)]
pub struct KafkaPublisher {
    shared: Arc<ProducerState>,
}

type Producer = ThreadedProducer<PublisherContext>;

/// Shared with the watcher thread.
struct ProducerState {
    config: ClientConfig,
    settings: PublisherSettings,
    watch: Arc<Watch>,
    /// The topic that probes ask for: the first that was published to.
    topic: OnceLock<String>,
    producer: RwLock<Producer>,
    calls: EngineCalls,
}

impl std::fmt::Debug for ProducerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProducerState").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Callbacks of librdkafka.
struct PublisherContext {
    watch: Arc<Watch>,
}

impl ClientContext for PublisherContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "weir::kafka", %error, reason, "the producer reports an error");
        match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::AllBrokersDown) => self.watch.suspect(),
            Some(RDKafkaErrorCode::Fatal) => self.watch.fatal(),
            Some(RDKafkaErrorCode::Authentication) => self.refused(Problem::Credentials, reason),
            Some(RDKafkaErrorCode::SSL) => self.refused(Problem::Tls, reason),
            // In TLS 1.3 a broker refuses a client's certificate after the handshake, and the connection seems to break.
            Some(RDKafkaErrorCode::BrokerTransportFailure) if reason.contains("SSL alert") => {
                self.refused(Problem::Tls, reason);
            }
            _ => {}
        }
    }
}

impl PublisherContext {
    /// Logs why brokers cannot be used, once until they answer.
    fn refused(&self, problem: Problem, reason: &str) {
        if self.watch.set_problem(Some(problem)) {
            let problem = problem.sentence();
            tracing::error!(target: "weir::kafka", reason, "{problem}");
        }
        self.watch.suspect();
    }
}

impl ProducerContext for PublisherContext {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let outcome = match result {
            Ok(_) => PublishOutcome::Confirmed,
            Err((cause, message)) => {
                if cause.rdkafka_error_code() == Some(RDKafkaErrorCode::Fatal) {
                    self.watch.fatal();
                }
                let absent = status::certainly_absent(message);
                let error = error(cause.clone());
                if absent { PublishOutcome::Failed(error) } else { PublishOutcome::Unknown(error) }
            }
        };
        ticket.batch.report(ticket.index, outcome);
    }
}

impl KafkaPublisher {
    /// Opens a publisher, whether or not the brokers are reachable. librdkafka takes half a second to discover them, for
    /// which the first batch may have to wait. Fails only if the client cannot be created locally.
    pub fn open(brokers: &Brokers, settings: PublisherSettings) -> Result<Self> {
        let watch = Arc::new(Watch::default());
        let config = settings.config(brokers);
        let producer = build(&config, &watch).map_err(|cause| Error::failed(ENGINE, cause))?;
        let (topic, producer) = (OnceLock::new(), RwLock::new(producer));
        let calls = EngineCalls::new(ENGINE);
        let shared = Arc::new(ProducerState { config, settings, watch, topic, producer, calls });
        let watcher = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kafka-watcher".to_owned())
            .spawn(move || watcher.run_tasks())
            .map_err(|cause| Error::failed(ENGINE, cause))?;
        Ok(Self { shared })
    }

    /// How long batches took from being published to being confirmed.
    #[must_use]
    pub fn calls(&self) -> EngineCalls {
        self.shared.calls.clone()
    }
}

impl KafkaPublisher {
    /// Why the brokers cannot be used although they are there, if that is so.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        self.shared.watch.problem().map(Problem::sentence)
    }
}

/// The watcher thread then ends and drops the producer; events in flight are abandoned.
impl Drop for KafkaPublisher {
    fn drop(&mut self) {
        self.shared.watch.stop();
    }
}

fn build(config: &ClientConfig, watch: &Arc<Watch>) -> KafkaResult<Producer> {
    ThreadedProducer::from_config_and_context(config, PublisherContext { watch: Arc::clone(watch) })
}

#[async_trait]
impl Publisher for KafkaPublisher {
    async fn publish(&self, topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome> {
        let shared = &self.shared;
        if shared.watch.is_refusing() {
            let refusal = PublishOutcome::Failed(shared.no_answer());
            return vec![refusal; events.len()];
        }
        let _timer = shared.calls.start("publish");
        let batch = PublishBatch::new(events.len());
        shared.enqueue(topic, events, &batch);
        if tokio::time::timeout(shared.settings.timeout, batch.complete()).await.is_err() {
            shared.watch.suspect();
            let purging = Arc::clone(shared);
            tokio::task::spawn_blocking(move || purging.purge_queue());
            // Events without a report after this are unknown.
            let _ = tokio::time::timeout(GRACE, batch.complete()).await;
        }
        batch.close(too_late)
    }

    async fn ping(&self) -> Result<()> {
        if self.shared.watch.is_refusing() {
            return Err(self.shared.no_answer());
        }
        let shared = Arc::clone(&self.shared);
        let joined = tokio::task::spawn_blocking(move || shared.ask()).await;
        joined.map_err(|panic| Error::failed(ENGINE, panic))?.map_err(error)
    }
}

fn too_late() -> Error {
    Error::unavailable(ENGINE, "the brokers did not confirm in time")
}

impl ProducerState {
    fn no_answer(&self) -> Error {
        Error::unavailable(ENGINE, self.watch.problem().map_or("no broker answers", Problem::sentence))
    }

    /// Adds a batch to librdkafka's queue. If the queue is full, the rest of the batch fails at once; while it is being purged
    /// or the producer replaced, the whole batch does.
    fn enqueue(&self, topic: &str, events: Vec<OutgoingEvent>, batch: &Arc<PublishBatch>) {
        if self.topic.get().is_none() {
            // If another thread sets it first, its topic is as good.
            let _ = self.topic.set(topic.to_owned());
        }
        let Some(producer) = self.producer.try_read() else {
            (0..events.len()).for_each(|index| batch.report(index, PublishOutcome::Failed(self.no_answer())));
            return;
        };
        let mut full = None;
        for (index, event) in events.iter().enumerate() {
            if let Some(refusal) = &full {
                batch.report(index, PublishOutcome::Failed(Error::clone(refusal)));
                continue;
            }
            let ticket = Box::new(Ticket { batch: Arc::clone(batch), index });
            let mut record = BaseRecord::with_opaque_to(topic, ticket).payload(event.payload.as_slice());
            if !event.key.is_empty() {
                record = record.key(event.key.as_slice());
            }
            if !event.headers.is_empty() {
                record = record.headers(headers(event));
            }
            if let Err((cause, record)) = producer.send(record) {
                let code = cause.rdkafka_error_code();
                if code == Some(RDKafkaErrorCode::Fatal) {
                    self.watch.fatal();
                }
                let refusal = error(cause);
                if code == Some(RDKafkaErrorCode::QueueFull) {
                    full = Some(refusal.clone());
                }
                record.delivery_opaque.batch.report(index, PublishOutcome::Failed(refusal));
            }
        }
    }

    /// Purges all queued events, including those of other batches, which have certainly not been sent either. Nothing is
    /// enqueued meanwhile, or the beginning of a batch could be purged and its end sent. Waits for librdkafka's threads.
    fn purge_queue(&self) {
        let producer = self.producer.write();
        producer.purge(PurgeConfig::default().queue());
    }

    /// Fetches metadata to find out whether the brokers answer.
    fn ask(&self) -> KafkaResult<()> {
        let producer = self.producer.read().clone();
        let topic = self.topic.get().map(String::as_str);
        producer.client().fetch_metadata(topic, self.settings.probe_timeout())?;
        self.watch.set_problem(None);
        Ok(())
    }

    fn run_tasks(&self) {
        loop {
            match self.watch.next() {
                Task::Stop => return,
                Task::Rebuild => self.rebuild(),
                Task::Probe => self.probe(),
            }
        }
    }

    /// Probes the brokers, and fails queued events if they do not answer.
    fn probe(&self) {
        let Err(cause) = self.ask() else {
            if self.watch.refuse(false) {
                tracing::info!(target: "weir::kafka", "Kafka answers again; publishing continues");
            }
            return;
        };
        if self.watch.refuse(true) {
            tracing::warn!(target: "weir::kafka", error = %cause, "no broker answers; nothing is published until one does");
        }
        // Callers need not wait longer for these events.
        self.purge_queue();
        self.watch.suspect();
        self.watch.pause(PROBE_PAUSE);
    }

    /// Replaces a producer that has failed fatally, such as by losing its sequence numbers. Its events in flight are reported
    /// when it is dropped.
    fn rebuild(&self) {
        let old = {
            let mut current = self.producer.write();
            let Some((code, reason)) = current.client().fatal_error() else {
                // The failed producer is replaced already.
                return;
            };
            tracing::warn!(target: "weir::kafka", %code, reason, "the producer failed and is replaced");
            match build(&self.config, &self.watch) {
                Ok(new) => std::mem::replace(&mut *current, new),
                Err(error) => {
                    tracing::error!(target: "weir::kafka", %error, "the producer cannot be replaced");
                    self.watch.fatal();
                    drop(current);
                    std::thread::sleep(PROBE_PAUSE);
                    return;
                }
            }
        };
        drop(old);
    }
}

fn headers(event: &OutgoingEvent) -> OwnedHeaders {
    let all = OwnedHeaders::new_with_capacity(event.headers.len());
    event.headers.iter().fold(all, |all, (key, value)| all.insert(Header { key, value: Some(value) }))
}
