//! The publisher: an idempotent producer, a word from the brokers for every event, and a thread that looks after both.
//!
//! Events of a batch are handed to librdkafka one after another and leave in as few requests as it can make of them.
//! A batch whose time is up takes back what has not been sent (certainly not there) and calls unknown what has. When
//! brokers may be gone, the caretaker asks them; while they do not answer, callers are refused at once.

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
use weir_store::{Error, Result};

use super::batch::{Batch, Ticket};
use super::watch::{Task, Watch};
use super::{Brokers, ENGINE, EVENT_BYTES_MAX, client_config, error, log, status};
use crate::publish::{OutgoingEvent, PublishOutcome, Publisher};

/// How long what was taken back takes to be reported.
const GRACE: Duration = Duration::from_millis(100);
/// The pause between two questions to brokers that do not answer.
const PROBE_PAUSE: Duration = Duration::from_millis(100);
/// Nothing is waited for. A batch is handed over faster than the first of it gets out, so 64 events leave in one or two
/// requests; the shortest wait that librdkafka keeps costs a millisecond and saves none.
const LINGER_MS: &str = "0";

/// How to publish.
#[derive(Clone, Debug)]
pub struct PublisherSettings {
    /// How long a batch may take; then its fate is told, known or not, within a tenth of a second.
    pub timeout: Duration,
    /// How many events may be on their way; more are refused.
    pub events_max: usize,
    /// How many bytes of events may be on their way; more are refused.
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
        // A broker that keeps silent for so long has lost its connection.
        let socket_timeout_ms = self.timeout.as_millis().clamp(1_000, 300_000).to_string();
        // A batch is given up as a whole, when its own time is up. Were librdkafka to give up its events one by one, the first,
        // which are the oldest, would be missing, and those behind them sent. So its timeout, which bounds how long it tries
        // again what may have been sent, is the longer one.
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
            // Where the clients in Java put the same key.
            .set("partitioner", "murmur2_random");
        config
    }

    /// How long brokers may take to answer a question.
    fn patience(&self) -> Duration {
        (self.timeout / 2).clamp(Duration::from_millis(100), Duration::from_secs(1))
    }
}

/// Publishes to Kafka.
#[derive(Debug)]
pub struct KafkaPublisher {
    shared: Arc<Shared>,
}

type Producer = ThreadedProducer<Context>;

/// What publishers and the caretaker have in common.
struct Shared {
    config: ClientConfig,
    settings: PublisherSettings,
    watch: Arc<Watch>,
    /// A topic to ask brokers about: the first that something was published to.
    topic: OnceLock<String>,
    producer: RwLock<Producer>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// What librdkafka calls back.
struct Context {
    watch: Arc<Watch>,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "weir::kafka", %error, reason, "the producer reports an error");
        match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::AllBrokersDown) => self.watch.suspect(),
            Some(RDKafkaErrorCode::Fatal) => self.watch.fatal(),
            _ => {}
        }
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let fate = match result {
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
        ticket.batch.report(ticket.index, fate);
    }
}

impl KafkaPublisher {
    /// A publisher to these brokers, whether they are there already or not. Getting to know them takes librdkafka half
    /// a second, which the first batch may have to wait.
    /// Fails when the client cannot be made, which no broker has a part in.
    pub fn open(brokers: &Brokers, settings: PublisherSettings) -> Result<Self> {
        let watch = Arc::new(Watch::default());
        let config = settings.config(brokers);
        let producer = build(&config, &watch).map_err(|cause| Error::failed(ENGINE, cause))?;
        let (topic, producer) = (OnceLock::new(), RwLock::new(producer));
        let shared = Arc::new(Shared { config, settings, watch, topic, producer });
        let caretaker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kafka-caretaker".to_owned())
            .spawn(move || caretaker.take_care())
            .map_err(|cause| Error::failed(ENGINE, cause))?;
        Ok(Self { shared })
    }
}

/// The thread ends by itself, and the producer with it: what is still on its way is given up.
impl Drop for KafkaPublisher {
    fn drop(&mut self) {
        self.shared.watch.stop();
    }
}

fn build(config: &ClientConfig, watch: &Arc<Watch>) -> KafkaResult<Producer> {
    ThreadedProducer::from_config_and_context(config, Context { watch: Arc::clone(watch) })
}

#[async_trait]
impl Publisher for KafkaPublisher {
    async fn publish(&self, topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome> {
        let shared = &self.shared;
        if shared.watch.is_refusing() {
            let refusal = PublishOutcome::Failed(no_answer());
            return vec![refusal; events.len()];
        }
        let batch = Batch::new(events.len());
        shared.hand_over(topic, events, &batch);
        if tokio::time::timeout(shared.settings.timeout, batch.complete()).await.is_err() {
            shared.watch.suspect();
            let purging = Arc::clone(shared);
            tokio::task::spawn_blocking(move || purging.take_back());
            // Running out of grace too leaves the rest unknown.
            let _ = tokio::time::timeout(GRACE, batch.complete()).await;
        }
        batch.close(too_late)
    }

    async fn ping(&self) -> Result<()> {
        if self.shared.watch.is_refusing() {
            return Err(no_answer());
        }
        let shared = Arc::clone(&self.shared);
        let asked = tokio::task::spawn_blocking(move || shared.ask()).await;
        asked.map_err(|panic| Error::failed(ENGINE, panic))?.map_err(error)
    }
}

fn no_answer() -> Error {
    Error::unavailable(ENGINE, "no broker answers")
}

fn too_late() -> Error {
    Error::unavailable(ENGINE, "the brokers did not confirm in time")
}

impl Shared {
    /// Puts a batch into librdkafka's queue. When that is full, the rest of the batch is refused on the spot; while it is
    /// emptied or the producer replaced, all of it.
    fn hand_over(&self, topic: &str, events: Vec<OutgoingEvent>, batch: &Arc<Batch>) {
        if self.topic.get().is_none() {
            // Losing the race is fine: one of them is enough.
            let _ = self.topic.set(topic.to_owned());
        }
        let Some(producer) = self.producer.try_read() else {
            (0..events.len()).for_each(|index| batch.report(index, PublishOutcome::Failed(no_answer())));
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

    /// Takes everything back that is still queued: reported with what is known of it. Others' events that wait there
    /// at this moment fail with it; they are certainly not there either, and the brokers are in trouble. Nothing is handed over
    /// meanwhile: the beginning of a batch would be taken back, and its end sent. Waits for librdkafka's threads.
    fn take_back(&self) {
        let producer = self.producer.write();
        producer.purge(PurgeConfig::default().queue());
    }

    /// Asks the brokers something small.
    fn ask(&self) -> KafkaResult<()> {
        let producer = self.producer.read().clone();
        let topic = self.topic.get().map(String::as_str);
        producer.client().fetch_metadata(topic, self.settings.patience()).map(drop)
    }

    fn take_care(&self) {
        loop {
            match self.watch.next() {
                Task::Stop => return,
                Task::Rebuild => self.rebuild(),
                Task::Probe => self.probe(),
            }
        }
    }

    /// Finds out whether the brokers answer.
    fn probe(&self) {
        let Err(cause) = self.ask() else {
            if self.watch.refuse(false) {
                tracing::info!(target: "weir::kafka", "brokers answer again; publishing goes on");
            }
            return;
        };
        if self.watch.refuse(true) {
            tracing::warn!(target: "weir::kafka", error = %cause, "no broker answers; nothing is published until one does");
        }
        // Whoever waits for these need not wait longer.
        self.take_back();
        self.watch.suspect();
        self.watch.pause(PROBE_PAUSE);
    }

    /// A producer that lost count of its sequence numbers never sends again; a new one starts over. What was on its
    /// way is reported when the old one ends.
    fn rebuild(&self) {
        let old = {
            let mut current = self.producer.write();
            let Some((code, reason)) = current.client().fatal_error() else {
                // The one that failed is gone already.
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
