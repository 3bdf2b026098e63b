//! How several sources share a topic on a real broker. The mock brokers refuse commits while members join, and forget members
//! that answer in another order than they expect, so with them a message may come twice through no fault of the source.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use weir_queue::kafka::{
    Brokers, KafkaPublisher, KafkaSource, PublisherSettings, SourceSettings, TopicSettings, ensure_topics,
};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};
use weir_queue::{MessageSource, Settlement};
use weir_testkit::kafka::Broker;
use weir_testkit::{skip, wait};

use crate::cluster::TEST_TIMEOUT;

const KEYS: usize = 16;
const VISIBILITY: Duration = Duration::from_secs(60);

/// The numbers that were delivered, by key, in the order of delivery.
type Delivered = Arc<Mutex<BTreeMap<String, Vec<usize>>>>;

struct Group {
    brokers: Brokers,
    topic: String,
    publisher: Arc<KafkaPublisher>,
    delivered: Delivered,
    sent: usize,
}

/// A member that settles what it claims until it is told to leave.
struct Member {
    leave: watch::Sender<bool>,
    task: JoinHandle<()>,
    /// How many messages it has settled.
    count: Arc<Mutex<usize>>,
}

impl Group {
    async fn start() -> Self {
        let broker = tokio::task::spawn_blocking(Broker::shared).await.unwrap();
        let brokers: Brokers = broker.url().parse().unwrap();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let topic = format!("group-{}-{}", std::process::id(), now.as_nanos());
        let settings = TopicSettings { partitions: 8, ..TopicSettings::default() };
        ensure_topics(&brokers, &[&topic], settings).await.unwrap();
        let settings = PublisherSettings { timeout: TEST_TIMEOUT, ..PublisherSettings::default() };
        let publisher = Arc::new(KafkaPublisher::open(&brokers, settings).unwrap());
        Self { brokers, topic, publisher, delivered: Delivered::default(), sent: 0 }
    }

    /// Sends the next number to every key.
    async fn send(&mut self) {
        let number = self.sent;
        let event = |key: usize| OutgoingEvent::new(format!("user-{key}"), number.to_string().into_bytes());
        let outcomes = self.publisher.publish(&self.topic, (0..KEYS).map(event).collect()).await;
        assert!(outcomes.iter().all(PublishOutcome::is_confirmed), "{outcomes:?}");
        self.sent += 1;
    }

    fn join(&self) -> Member {
        let settings = SourceSettings { group: self.topic.clone(), ..SourceSettings::default() };
        let dead_letters = Arc::clone(&self.publisher) as Arc<dyn Publisher>;
        let source = KafkaSource::open(&self.brokers, &self.topic, &settings, dead_letters).unwrap();
        let (leave, leaving) = watch::channel(false);
        let count = Arc::<Mutex<usize>>::default();
        let work =
            deliver(source, self.topic.clone(), Arc::clone(&self.delivered), Arc::clone(&count), leaving);
        Member { leave, task: tokio::spawn(work), count }
    }

    /// Sends until `member` has delivered 50 messages, so that it has taken part.
    async fn send_until_delivered_by(&mut self, member: &Member) {
        let before = *member.count.lock();
        tokio::time::timeout(TEST_TIMEOUT, async {
            while *member.count.lock() < before + 50 {
                self.send().await;
            }
        })
        .await
        .expect("the member delivers messages");
    }
}

impl Member {
    async fn leave(self) {
        self.leave.send_replace(true);
        self.task.await.unwrap();
    }
}

async fn deliver(
    source: KafkaSource,
    topic: String,
    delivered: Delivered,
    count: Arc<Mutex<usize>>,
    leaving: watch::Receiver<bool>,
) {
    while !*leaving.borrow() {
        let claim = source.claim(&topic, 5, VISIBILITY).await.unwrap();
        if claim.messages.is_empty() {
            source.wait(&topic, Duration::from_millis(20)).await;
            continue;
        }
        for message in &claim.messages {
            let number = std::str::from_utf8(&message.payload).unwrap().parse().unwrap();
            delivered.lock().entry(message.key.clone()).or_default().push(number);
        }
        let done = claim.messages.iter().map(|message| message.position).collect();
        let held = source.settle(&claim.receipt, Settlement { done, ..Settlement::default() }).await.unwrap();
        assert!(held, "a member that answers keeps what it has claimed until it is settled");
        *count.lock() += claim.messages.len();
    }
    source.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_and_go_and_each_message_is_delivered_once_in_order() {
    if skip("kafka") {
        return;
    }
    let mut group = Group::start().await;
    group.send().await;
    let first = group.join();
    group.send_until_delivered_by(&first).await;
    let second = group.join();
    group.send_until_delivered_by(&second).await;
    let third = group.join();
    group.send_until_delivered_by(&third).await;
    second.leave().await;
    group.send_until_delivered_by(&third).await;
    first.leave().await;
    group.send_until_delivered_by(&third).await;
    let total = group.sent * KEYS;
    let count = || group.delivered.lock().values().map(Vec::len).sum::<usize>();
    wait::until("all messages are delivered", TEST_TIMEOUT, async || count() >= total).await;
    third.leave().await;
    let expected: Vec<usize> = (0..group.sent).collect();
    for (key, numbers) in &*group.delivered.lock() {
        assert_eq!(numbers, &expected, "{key}");
    }
}
