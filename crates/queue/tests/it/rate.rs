//! Measures one publisher. Run by hand: `cargo test --release -p weir-queue --test it rate -- --ignored --nocapture`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weir_queue::kafka::{KafkaPublisher, PublisherSettings};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};

use crate::cluster::Cluster;

const BATCH: usize = 64;
const SPAN: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement, not a test"]
async fn events_a_second() {
    let cluster = Cluster::start(&[("rate", 12)]);
    let publisher = Arc::new(KafkaPublisher::open(&cluster.brokers(), PublisherSettings::default()).unwrap());
    publisher.publish("rate", vec![OutgoingEvent::new("warm", vec![0])]).await;
    for at_once in [1, 2, 4, 8] {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..at_once {
            tasks.spawn(publish_for(Arc::clone(&publisher), SPAN));
        }
        let batches: usize = tasks.join_all().await.into_iter().sum();
        let per_second = batches * BATCH / 3;
        let wait_us = SPAN.as_micros() * at_once / u128::try_from(batches.max(1)).unwrap();
        eprintln!(
            "{at_once} batches of {BATCH} at once, one key: {per_second} events/s, {wait_us} us a batch"
        );
    }
}

async fn publish_for(publisher: Arc<KafkaPublisher>, span: Duration) -> usize {
    let (started, mut batches) = (Instant::now(), 0);
    while started.elapsed() < span {
        let events = (0..BATCH).map(|_| OutgoingEvent::new("alice", vec![b'x'; 160])).collect();
        let outcomes = publisher.publish("rate", events).await;
        assert!(outcomes.iter().all(PublishOutcome::is_confirmed), "{outcomes:?}");
        batches += 1;
    }
    batches
}
