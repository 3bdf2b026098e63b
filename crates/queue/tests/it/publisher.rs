//! The outcomes that a publisher reports, and how it recovers from failures.

use std::time::{Duration, Instant};

use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use weir_queue::kafka::{KafkaPublisher, PublisherSettings};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};

use crate::cluster::{Cluster, TEST_TIMEOUT};

const TOPIC: &str = "events";
const WARM_UP: &str = "warm-up";
/// Long enough for a publisher to discover its brokers on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long publishing may take beyond its timeout: the grace period, and delays on a busy machine.
const SLACK: Duration = Duration::from_millis(500);

/// A publisher whose timeout suffices on a busy machine.
fn publisher(cluster: &Cluster) -> KafkaPublisher {
    let settings = PublisherSettings { timeout: TEST_TIMEOUT, ..PublisherSettings::default() };
    KafkaPublisher::open(&cluster.brokers(), settings).unwrap()
}

/// A publisher with a short timeout that has discovered its brokers.
async fn publisher_with_short_timeout(cluster: &Cluster) -> KafkaPublisher {
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
    let outcomes = publisher.publish(TOPIC, events).await;
    (outcomes, started.elapsed())
}

fn all_confirmed(outcomes: &[PublishOutcome]) -> bool {
    outcomes.iter().all(PublishOutcome::is_confirmed)
}

fn all_failed(outcomes: &[PublishOutcome]) -> bool {
    outcomes.iter().all(|outcome| matches!(outcome, PublishOutcome::Failed(_)))
}

/// Publishes one event after another until one is confirmed, once the brokers are back or the producer is replaced. Returns
/// the index of that event.
async fn publish_until_confirmed(publisher: &KafkaPublisher) -> usize {
    let give_up_at = Instant::now() + TEST_TIMEOUT;
    for n in 0.. {
        let outcomes = publisher.publish(TOPIC, events("after", n..n + 1)).await;
        if all_confirmed(&outcomes) {
            return n;
        }
        assert!(Instant::now() < give_up_at, "never confirmed: {outcomes:?}");
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
async fn keys_get_the_partitions_of_the_java_clients() {
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

/// Kafka's hash of a key, as in `org.apache.kafka.common.utils.Utils`.
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
async fn publishing_to_unreachable_brokers_fails_in_time_then_at_once_and_recovers() {
    let cluster = Cluster::start(&[(TOPIC, 2)]);
    let publisher = publisher_with_short_timeout(&cluster).await;
    assert!(all_confirmed(&publisher.publish(TOPIC, events("before", 0..3)).await));
    publisher.ping().await.unwrap();

    cluster.0.broker_down(Cluster::BROKER).unwrap();
    let (outcomes, took) = publish_timed(&publisher, events("lost", 0..3)).await;
    assert!(all_failed(&outcomes), "nothing was sent: {outcomes:?}");
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    // Once a probe has failed, callers do not wait at all.
    let give_up_at = Instant::now() + TEST_TIMEOUT;
    loop {
        let (outcomes, took) = publish_timed(&publisher, events("lost", 0..3)).await;
        assert!(all_failed(&outcomes), "{outcomes:?}");
        if took < Duration::from_millis(50) {
            break;
        }
        assert!(Instant::now() < give_up_at, "callers still wait");
    }
    assert!(publisher.ping().await.unwrap_err().is_transient());

    cluster.0.broker_up(Cluster::BROKER).unwrap();
    publish_until_confirmed(&publisher).await;
    publisher.ping().await.unwrap();
    let stored = cluster.read(TOPIC, 4);
    assert!(stored.iter().all(|message| message.key != "lost"), "failed events are not stored: {stored:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_times_out_publishes_no_event_without_those_before_it() {
    // After each error, librdkafka repeats the request that it needs before sending, half a second later.
    let not_yet = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS; 3];
    let mut clusters = Vec::new();
    let mut rounds = tokio::task::JoinSet::new();
    // In one of the rounds, the brokers become ready just when the batch times out.
    for round in 0..12 {
        let cluster = Cluster::start(&[(TOPIC, 1)]);
        cluster.0.request_errors(RDKafkaApiKey::InitProducerId, &not_yet);
        let settings = PublisherSettings { timeout: Duration::from_secs(1), ..PublisherSettings::default() };
        let publisher = KafkaPublisher::open(&cluster.brokers(), settings).unwrap();
        clusters.push(cluster);
        rounds.spawn(async move {
            tokio::time::sleep(Duration::from_millis(50 * round)).await;
            // So many that enqueueing takes a while, which makes the first events older than the last.
            let outcomes = publisher.publish(TOPIC, events("alice", 0..20_000)).await;
            let confirmed = outcomes.iter().take_while(|outcome| outcome.is_confirmed()).count();
            assert!(
                outcomes[confirmed..].iter().all(|outcome| !outcome.is_confirmed()),
                "{confirmed}, a gap, more"
            );
        });
    }
    rounds.join_all().await;
}

#[tokio::test]
async fn publishing_to_brokers_that_never_existed_fails_in_time() {
    let cluster = Cluster::start(&[(TOPIC, 2)]);
    cluster.0.broker_down(Cluster::BROKER).unwrap();
    let settings = PublisherSettings { timeout: TIMEOUT, ..PublisherSettings::default() };
    let publisher = KafkaPublisher::open(&cluster.brokers(), settings).unwrap();
    let (outcomes, took) = publish_timed(&publisher, events("lost", 0..3)).await;
    assert!(all_failed(&outcomes), "{outcomes:?}");
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    let asked = Instant::now();
    assert!(publisher.ping().await.is_err());
    assert!(asked.elapsed() < TIMEOUT + SLACK);
    cluster.0.broker_up(Cluster::BROKER).unwrap();
    publish_until_confirmed(&publisher).await;
    cluster.read(TOPIC, 1);
}

#[tokio::test]
async fn brokers_that_do_not_answer_leave_the_outcome_unknown_in_time() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher_with_short_timeout(&cluster).await;
    assert!(all_confirmed(&publisher.publish(TOPIC, events("before", 0..1)).await));
    cluster.0.broker_round_trip_time(Cluster::BROKER, 3 * TIMEOUT).unwrap();
    let (outcomes, took) = publish_timed(&publisher, events("slow", 0..2)).await;
    assert!(
        outcomes.iter().all(|outcome| matches!(outcome, PublishOutcome::Unknown(_))),
        "sent, not answered: {outcomes:?}"
    );
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    cluster.0.broker_round_trip_time(Cluster::BROKER, Duration::ZERO).unwrap();
    publish_until_confirmed(&publisher).await;
}

#[tokio::test]
async fn a_transient_error_is_retried_without_duplicates() {
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
async fn a_permanent_error_fails_its_event_and_not_the_next() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher(&cluster);
    let refusal = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED];
    cluster.0.request_errors(RDKafkaApiKey::Produce, &refusal);
    let outcomes = publisher.publish(TOPIC, events("refused", 0..1)).await;
    let [PublishOutcome::Failed(error)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(!error.is_transient(), "a retry does not help: {error:?}");
    // librdkafka refuses the topic until it has fetched the metadata again.
    publisher.ping().await.unwrap();
    let outcomes = publisher.publish(TOPIC, events("alice", 0..1)).await;
    assert!(all_confirmed(&outcomes), "{outcomes:?}");
    assert!(cluster.read(TOPIC, 1).iter().all(|message| message.key == "alice"));
}

#[tokio::test]
async fn a_producer_that_failed_fatally_is_replaced() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher(&cluster);
    assert!(all_confirmed(&publisher.publish(TOPIC, events("before", 0..1)).await));
    // A sequence error of the brokers, which is fatal to librdkafka's producer.
    let fatal = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER];
    cluster.0.request_errors(RDKafkaApiKey::Produce, &fatal);
    let (outcomes, took) = publish_timed(&publisher, events("lost", 0..1)).await;
    assert!(matches!(outcomes[..], [PublishOutcome::Unknown(_)]), "{outcomes:?}");
    assert!(took < TEST_TIMEOUT, "{took:?}");
    publish_until_confirmed(&publisher).await;
}

#[tokio::test]
async fn more_events_than_may_be_in_flight_are_refused() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let settings =
        PublisherSettings { timeout: TEST_TIMEOUT, events_max: 10, ..PublisherSettings::default() };
    let publisher = KafkaPublisher::open(&cluster.brokers(), settings).unwrap();
    // So slow that nothing is sent while the batch is enqueued.
    cluster.0.broker_round_trip_time(Cluster::BROKER, Duration::from_millis(100)).unwrap();
    let outcomes = publisher.publish(TOPIC, events("alice", 0..15)).await;
    assert!(all_confirmed(&outcomes[..10]), "{outcomes:?}");
    assert!(all_failed(&outcomes[10..]), "{outcomes:?}");
    let payloads: Vec<_> = cluster.read(TOPIC, 10).into_iter().map(|message| message.payload).collect();
    assert_eq!(payloads, (0..10).map(|n| format!("alice {n}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_event_too_large_for_any_broker_fails_and_no_other_does() {
    let cluster = Cluster::start(&[(TOPIC, 1)]);
    let publisher = publisher(&cluster);
    let mut batch = events("alice", 0..3);
    batch[1].payload = vec![b'x'; 9 * 1024 * 1024];
    let outcomes = publisher.publish(TOPIC, batch).await;
    assert!(
        matches!(&outcomes[..], [PublishOutcome::Confirmed, PublishOutcome::Failed(error), PublishOutcome::Confirmed] if !error.is_transient())
    );
}

#[tokio::test]
async fn concurrent_publishers_store_every_event_once() {
    let cluster = Cluster::start(&[(TOPIC, 4)]);
    let publisher = std::sync::Arc::new(publisher(&cluster));
    let mut tasks = tokio::task::JoinSet::new();
    for user in 0..20 {
        let publisher = std::sync::Arc::clone(&publisher);
        tasks.spawn(async move {
            let key = format!("user-{user}");
            for batch in 0..5 {
                let outcomes = publisher.publish(TOPIC, events(&key, batch * 10..(batch + 1) * 10)).await;
                assert!(all_confirmed(&outcomes), "{outcomes:?}");
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
