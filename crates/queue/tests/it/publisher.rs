//! What a publisher says of its events, and how it comes through trouble.

use std::time::{Duration, Instant};

use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use weir_queue::kafka::{KafkaPublisher, PublisherSettings};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};

use crate::cluster::{Cluster, PATIENCE};

const TOPIC: &str = "events";
const WARM_UP: &str = "warm-up";
/// Long enough for a publisher to get to know its brokers on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(3);
/// What a publish may take beyond its timeout: the grace, and a machine that is busy.
const SLACK: Duration = Duration::from_millis(500);

/// A publisher that waits for brokers however busy the machine is.
fn publisher(cluster: &Cluster) -> KafkaPublisher {
    let settings = PublisherSettings { timeout: PATIENCE, ..PublisherSettings::default() };
    KafkaPublisher::open(&cluster.brokers(), settings).unwrap()
}

/// A publisher that does not, and knows its brokers already.
async fn impatient_publisher(cluster: &Cluster) -> KafkaPublisher {
    let settings = PublisherSettings { timeout: TIMEOUT, ..PublisherSettings::default() };
    let publisher = KafkaPublisher::open(&cluster.brokers(), settings).unwrap();
    assert!(all_confirmed(&publisher.publish(WARM_UP, events("first", 0..1)).await));
    publisher
}

fn events(key: &str, range: std::ops::Range<usize>) -> Vec<OutgoingEvent> {
    range.map(|n| OutgoingEvent::new(key, format!("{key} {n}").into_bytes())).collect()
}

async fn publish_timed(
    publisher: &KafkaPublisher,
    events: Vec<OutgoingEvent>,
) -> (Vec<PublishOutcome>, Duration) {
    let started = Instant::now();
    let fates = publisher.publish(TOPIC, events).await;
    (fates, started.elapsed())
}

fn all_confirmed(fates: &[PublishOutcome]) -> bool {
    fates.iter().all(PublishOutcome::is_confirmed)
}

fn all_failed(fates: &[PublishOutcome]) -> bool {
    fates.iter().all(|fate| matches!(fate, PublishOutcome::Failed(_)))
}

/// Publishes one event after another until one is confirmed: brokers that were away, or a producer that failed, come back by
/// themselves. Says which was.
async fn recovers(publisher: &KafkaPublisher) -> usize {
    let give_up_at = Instant::now() + PATIENCE;
    for n in 0.. {
        let fates = publisher.publish(TOPIC, events("after", n..n + 1)).await;
        if all_confirmed(&fates) {
            return n;
        }
        assert!(Instant::now() < give_up_at, "never confirmed: {fates:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!("the loop has no end")
}

#[tokio::test]
async fn a_batch_is_confirmed_and_each_key_keeps_its_order() {
    let cluster = Cluster::start(&[(TOPIC, 4)]);
    let publisher = publisher(&cluster);
    let mut batch: Vec<OutgoingEvent> = Vec::new();
    for n in 0..50 {
        for key in ["alice", "bob", "carol"] {
            batch.extend(events(key, n..n + 1));
        }
    }
    batch[0].headers.push(("why", "because".to_owned()));
    assert!(all_confirmed(&publisher.publish(TOPIC, batch).await));
    assert!(all_confirmed(&publisher.publish(TOPIC, events("alice", 50..60)).await));
    assert!(publisher.publish(TOPIC, Vec::new()).await.is_empty());

    let stored = cluster.read(TOPIC, 160);
    for (key, count) in [("alice", 60), ("bob", 50), ("carol", 50)] {
        let of_key: Vec<_> = stored.iter().filter(|message| message.key == key).collect();
        let expected: Vec<_> = (0..count).map(|n| format!("{key} {n}")).collect();
        assert_eq!(of_key.iter().map(|message| message.payload.clone()).collect::<Vec<_>>(), expected);
        assert!(of_key.iter().all(|message| message.partition == of_key[0].partition), "one partition a key");
    }
    let first = stored.iter().find(|message| message.payload == "alice 0").unwrap();
    assert_eq!(first.headers["why"], "because");
}

#[tokio::test]
async fn keys_land_where_the_clients_in_java_put_them() {
    let cluster = Cluster::start(&[(TOPIC, 12)]);
    let publisher = publisher(&cluster);
    for key in ["alice", "bob", "carol"] {
        assert!(all_confirmed(&publisher.publish(TOPIC, events(key, 0..1)).await));
    }
    for stored in cluster.read(TOPIC, 3) {
        let expected = (murmur2(stored.key.as_bytes()) & 0x7fff_ffff) % 12;
        assert_eq!(stored.partition.unsigned_abs(), expected, "{}", stored.key);
    }
}

/// Kafka's hash of a key, as `org.apache.kafka.common.utils.Utils` has it.
fn murmur2(key: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c ^ u32::try_from(key.len()).unwrap();
    let mut chunks = key.chunks_exact(4);
    for chunk in &mut chunks {
        let k = u32::from_le_bytes(chunk.try_into().unwrap()).wrapping_mul(M);
        hash = hash.wrapping_mul(M) ^ (k ^ (k >> 24)).wrapping_mul(M);
    }
    let rest = chunks.remainder();
    for (n, byte) in rest.iter().enumerate() {
        hash ^= u32::from(*byte) << (8 * n);
    }
    if !rest.is_empty() {
        hash = hash.wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

#[tokio::test]
async fn brokers_that_are_gone_fail_publishing_in_time_then_at_once_and_come_back_by_themselves() {
    let cluster = Cluster::start(&[(TOPIC, 2)]);
    let publisher = impatient_publisher(&cluster).await;
    assert!(all_confirmed(&publisher.publish(TOPIC, events("before", 0..3)).await));
    publisher.ping().await.unwrap();

    cluster.0.broker_down(Cluster::BROKER).unwrap();
    let (fates, took) = publish_timed(&publisher, events("lost", 0..3)).await;
    assert!(all_failed(&fates), "nothing was sent: {fates:?}");
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    // The caretaker's question is not answered: then callers do not wait at all.
    let give_up_at = Instant::now() + PATIENCE;
    loop {
        let (fates, took) = publish_timed(&publisher, events("lost", 0..3)).await;
        assert!(all_failed(&fates), "{fates:?}");
        if took < Duration::from_millis(50) {
            break;
        }
        assert!(Instant::now() < give_up_at, "callers still wait");
    }
    assert!(publisher.ping().await.unwrap_err().is_transient());

    cluster.0.broker_up(Cluster::BROKER).unwrap();
    recovers(&publisher).await;
    publisher.ping().await.unwrap();
    let stored = cluster.read(TOPIC, 4);
    assert!(stored.iter().all(|message| message.key != "lost"), "failed is certainly not there: {stored:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_published_of_a_batch_is_its_beginning() {
    // Each has librdkafka ask again, half a second later, for what it needs to send anything.
    let not_yet = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS; 3];
    let mut clusters = Vec::new();
    let mut rounds = tokio::task::JoinSet::new();
    // In one of the rounds the brokers are ready when the time of the batch is just up.
    for round in 0..12 {
        let cluster = Cluster::start(&[(TOPIC, 1)]);
        cluster.0.request_errors(RDKafkaApiKey::InitProducerId, &not_yet);
        let settings = PublisherSettings { timeout: Duration::from_secs(1), ..PublisherSettings::default() };
        let publisher = KafkaPublisher::open(&cluster.brokers(), settings).unwrap();
        clusters.push(cluster);
        rounds.spawn(async move {
            tokio::time::sleep(Duration::from_millis(50 * round)).await;
            // Enough that handing them over takes a while: the first are older than the last by that.
            let fates = publisher.publish(TOPIC, events("alice", 0..20_000)).await;
            let confirmed = fates.iter().take_while(|fate| fate.is_confirmed()).count();
            assert!(fates[confirmed..].iter().all(|fate| !fate.is_confirmed()), "{confirmed}, a gap, more");
        });
    }
    rounds.join_all().await;
}

#[tokio::test]
async fn brokers_that_were_never_there_fail_publishing_in_time() {
    let cluster = Cluster::start(&[(TOPIC, 2)]);
    cluster.0.broker_down(Cluster::BROKER).unwrap();
    let settings = PublisherSettings { timeout: TIMEOUT, ..PublisherSettings::default() };
    let publisher = KafkaPublisher::open(&cluster.brokers(), settings).unwrap();
    let (fates, took) = publish_timed(&publisher, events("lost", 0..3)).await;
    assert!(all_failed(&fates), "{fates:?}");
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    let asked = Instant::now();
    assert!(publisher.ping().await.is_err());
    assert!(asked.elapsed() < TIMEOUT + SLACK);
    cluster.0.broker_up(Cluster::BROKER).unwrap();
    recovers(&publisher).await;
    cluster.read(TOPIC, 1);
}

#[tokio::test]
async fn brokers_that_keep_silent_leave_the_fate_unknown_in_time() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = impatient_publisher(&cluster).await;
    assert!(all_confirmed(&publisher.publish(TOPIC, events("before", 0..1)).await));
    cluster.0.broker_round_trip_time(Cluster::BROKER, 3 * TIMEOUT).unwrap();
    let (fates, took) = publish_timed(&publisher, events("slow", 0..2)).await;
    assert!(
        fates.iter().all(|fate| matches!(fate, PublishOutcome::Unknown(_))),
        "sent, not answered: {fates:?}"
    );
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    cluster.0.broker_round_trip_time(Cluster::BROKER, Duration::ZERO).unwrap();
    recovers(&publisher).await;
}

#[tokio::test]
async fn an_error_that_passes_is_tried_again_and_repeats_nothing() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher(&cluster);
    let passing = [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
    ];
    cluster.0.request_errors(RDKafkaApiKey::Produce, &passing);
    assert!(all_confirmed(&publisher.publish(TOPIC, events("alice", 0..5)).await));
    let payloads: Vec<_> = cluster.read(TOPIC, 5).into_iter().map(|message| message.payload).collect();
    assert_eq!(payloads, ["alice 0", "alice 1", "alice 2", "alice 3", "alice 4"]);
}

#[tokio::test]
async fn an_error_that_stays_fails_the_event_and_not_the_next() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher(&cluster);
    let refusal = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED];
    cluster.0.request_errors(RDKafkaApiKey::Produce, &refusal);
    let fates = publisher.publish(TOPIC, events("refused", 0..1)).await;
    let [PublishOutcome::Failed(error)] = &fates[..] else { panic!("{fates:?}") };
    assert!(!error.is_transient(), "asking again does not help: {error:?}");
    // librdkafka refuses the topic until the brokers are asked about it again.
    publisher.ping().await.unwrap();
    let fates = publisher.publish(TOPIC, events("alice", 0..1)).await;
    assert!(all_confirmed(&fates), "{fates:?}");
    assert!(cluster.read(TOPIC, 1).iter().all(|message| message.key == "alice"));
}

#[tokio::test]
async fn a_producer_that_failed_for_good_is_replaced() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher(&cluster);
    assert!(all_confirmed(&publisher.publish(TOPIC, events("before", 0..1)).await));
    // As if the brokers had lost count: librdkafka gives the producer up.
    let fatal = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER];
    cluster.0.request_errors(RDKafkaApiKey::Produce, &fatal);
    let (fates, took) = publish_timed(&publisher, events("lost", 0..1)).await;
    assert!(matches!(fates[..], [PublishOutcome::Unknown(_)]), "{fates:?}");
    assert!(took < PATIENCE, "{took:?}");
    recovers(&publisher).await;
}

#[tokio::test]
async fn more_events_than_may_be_on_their_way_are_refused() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let settings = PublisherSettings { timeout: PATIENCE, events_max: 10, ..PublisherSettings::default() };
    let publisher = KafkaPublisher::open(&cluster.brokers(), settings).unwrap();
    // Slow enough that nothing leaves while the batch is handed over.
    cluster.0.broker_round_trip_time(Cluster::BROKER, Duration::from_millis(100)).unwrap();
    let fates = publisher.publish(TOPIC, events("alice", 0..15)).await;
    assert!(all_confirmed(&fates[..10]), "{fates:?}");
    assert!(all_failed(&fates[10..]), "{fates:?}");
    let payloads: Vec<_> = cluster.read(TOPIC, 10).into_iter().map(|message| message.payload).collect();
    assert_eq!(payloads, (0..10).map(|n| format!("alice {n}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_event_too_large_for_any_broker_fails_alone() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher(&cluster);
    let mut batch = events("alice", 0..3);
    batch[1].payload = vec![b'x'; 9 * 1024 * 1024];
    let fates = publisher.publish(TOPIC, batch).await;
    assert!(
        matches!(&fates[..], [PublishOutcome::Confirmed, PublishOutcome::Failed(error), PublishOutcome::Confirmed] if !error.is_transient())
    );
}

#[tokio::test]
async fn many_publish_at_once_and_every_event_is_there_once() {
    let cluster = Cluster::start(&[(TOPIC, 4)]);
    let publisher = std::sync::Arc::new(publisher(&cluster));
    let mut tasks = tokio::task::JoinSet::new();
    for user in 0..20 {
        let publisher = std::sync::Arc::clone(&publisher);
        tasks.spawn(async move {
            let key = format!("user-{user}");
            for batch in 0..5 {
                let fates = publisher.publish(TOPIC, events(&key, batch * 10..(batch + 1) * 10)).await;
                assert!(all_confirmed(&fates), "{fates:?}");
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    let stored = cluster.read(TOPIC, 1000);
    for user in 0..20 {
        let key = format!("user-{user}");
        let payloads = stored.iter().filter(|message| message.key == key).map(|message| &message.payload);
        let expected: Vec<_> = (0..50).map(|n| format!("{key} {n}")).collect();
        assert!(payloads.eq(&expected), "{key} out of order");
    }
}
