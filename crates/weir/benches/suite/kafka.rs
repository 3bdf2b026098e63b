//! A private Kafka, and the baseline of Weir with Kafka: per request, one transaction that locks the row, publishes
//! one event, waits for its confirmation, and counts.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::future::try_join_all;
use serde_json::json;
use weir_queue::kafka::{Brokers, KafkaPublisher, PublisherSettings, TopicSettings, ensure_topics};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher as _};
use weir_testkit::kafka::Broker;
use weir_testkit::postgres::Database;

use crate::Bench;
use crate::postgres::{FIRST_KEY, Postgres};
use crate::results::{Row, percentiles_ms};

const CONNECTIONS: usize = 32;
/// Not a topic of Weir, so that no sender takes from it.
const TOPIC: &str = "baseline";
const SELECT: &str = "SELECT rate_limit, time_window, current_count, last_refresh_time
                      FROM rate_limit_store WHERE user_id = $1 FOR UPDATE";
const UPDATE: &str = "UPDATE rate_limit_store SET current_count = current_count + 1 WHERE user_id = $1";

pub(crate) struct Kafka {
    broker: Broker,
}

impl Kafka {
    pub(crate) async fn start() -> Result<Self> {
        eprintln!("starting Kafka");
        let broker = tokio::task::spawn_blocking(Broker::private).await;
        let broker = broker.context("Kafka is needed, or --without-kafka, which leaves out what needs it")?;
        Ok(Self { broker })
    }

    pub(crate) fn url(&self) -> String {
        self.broker.url()
    }

    pub(crate) fn conditions() -> String {
        "Kafka: one broker with 256 MB that waits for no disk, acks=all".to_owned()
    }
}

pub(crate) struct Baseline<'a> {
    postgres: &'a Postgres,
    publisher: KafkaPublisher,
}

/// The transactions of one connection in the measured time.
#[derive(Default)]
struct ConnectionResults {
    latencies_us: Vec<u64>,
    failed: u64,
}

impl<'a> Baseline<'a> {
    pub(crate) async fn new(kafka: &Kafka, postgres: &'a Postgres) -> Result<Self> {
        let brokers: Brokers = kafka.url().parse().context("read the address of Kafka")?;
        ensure_topics(&brokers, &[TOPIC], TopicSettings::default()).await.context("make a topic")?;
        let publisher = KafkaPublisher::open(&brokers, PublisherSettings::default());
        Ok(Self { postgres, publisher: publisher.context("open a publisher")? })
    }

    pub(crate) async fn measure(&self, bench: &Bench) -> Result<Row> {
        let name = "publish in a transaction, one hot row";
        eprintln!("measuring: {name}");
        let database = self.postgres.quota_baseline().await;
        self.postgres.tidy("rate_limit_store").await;
        let before = count(database).await?;
        let measure_from = Instant::now() + bench.warmup;
        let end = measure_from + bench.duration;
        let connections = (0..CONNECTIONS).map(|_| repeat(database, &self.publisher, measure_from, end));
        let done = try_join_all(connections).await.context("a transaction failed")?;
        let failed = done.iter().map(|one| one.failed).sum();
        let latencies_us: Vec<u64> = done.into_iter().flat_map(|one| one.latencies_us).collect();
        let (committed, counted) = (latencies_us.len() as u64, count(database).await? - before);
        ensure!(committed > 0, "no transaction was committed, and {failed} failed");
        ensure!(counted >= committed, "of {committed} transactions only {counted} counted");
        let rate = committed as f64 / bench.duration.as_secs_f64();
        let [p50_ms, p99_ms] = percentiles_ms(latencies_us, [50, 99]);
        Ok(Row::new(name.to_owned(), rate, p50_ms, p99_ms, failed))
    }
}

/// Returns the count of the hot row.
async fn count(database: &Database) -> Result<u64> {
    let sql = format!("SELECT current_count FROM rate_limit_store WHERE user_id = '{FIRST_KEY}'");
    let rows = database.query_strings(&sql).await;
    let count = rows.iter().flatten().flatten().next().context("the hot row is there")?;
    count.parse().context("a count is a number")
}

/// Runs one transaction after another on its own connection.
async fn repeat(
    database: &Database,
    publisher: &KafkaPublisher,
    measure_from: Instant,
    end: Instant,
) -> Result<ConnectionResults> {
    let key = FIRST_KEY.to_string();
    let client = database.connect().await?;
    let (select, update) = (client.prepare(SELECT).await?, client.prepare(UPDATE).await?);
    let mut done = ConnectionResults::default();
    loop {
        let began = Instant::now();
        if began >= end {
            return Ok(done);
        }
        client.batch_execute("BEGIN").await?;
        client.query_one(&select, &[&key]).await?;
        let outcomes = publisher.publish(TOPIC, vec![event(&key)]).await;
        let confirmed = outcomes.iter().all(PublishOutcome::is_confirmed);
        if confirmed {
            client.execute(&update, &[&key]).await?;
        }
        client.batch_execute(if confirmed { "COMMIT" } else { "ROLLBACK" }).await?;
        if began < measure_from {
            continue;
        }
        match confirmed {
            true => done.latencies_us.push(micros(began.elapsed())),
            false => done.failed += 1,
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// An event with the same content and length as Weir's.
fn event(user: &str) -> OutgoingEvent {
    let payload = json!({
        "messageId": "019a8b4e-5c1f-7000-8000-0123456789ab",
        "userId": format!("bench-{user}"),
        "message": "your parcel is on its way",
        "acceptedAt": "2026-11-15T12:00:00.123456Z",
    });
    OutgoingEvent::new(user, payload.to_string().into_bytes())
}
