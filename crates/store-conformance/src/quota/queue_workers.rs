//! Concurrent workers: each message is delivered once, and those of a key in order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use weir_queue::{Message, Queue, Settlement};
use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::fixtures::{configure, numbered_texts, queue_audit, run_concurrently, send, sends, text};

const KEYS: usize = 50;
const PER_KEY: usize = 40;
const WORKERS: usize = 8;

/// The messages that the workers of a case claimed, by key, in order.
#[derive(Clone, Default)]
pub(crate) struct DeliveryLog(Arc<Mutex<DeliveryState>>);

#[derive(Default)]
struct DeliveryState {
    by_key: BTreeMap<String, Vec<String>>,
    claimed_keys: BTreeSet<String>,
    total: usize,
}

impl DeliveryLog {
    fn record(&self, messages: &[Message]) {
        let mut state = self.0.lock();
        for key in messages.iter().map(|message| &message.key).collect::<BTreeSet<_>>() {
            assert!(state.claimed_keys.insert(key.clone()), "{key} is leased by another worker");
        }
        for message in messages {
            state.by_key.entry(message.key.clone()).or_default().push(text(message));
        }
        state.total += messages.len();
    }

    fn release(&self, messages: &[Message]) {
        let mut state = self.0.lock();
        for message in messages {
            state.claimed_keys.remove(&message.key);
        }
    }

    fn total(&self) -> usize {
        self.0.lock().total
    }

    /// Asserts that each key's messages, `alice 1` … `alice n`, were claimed once and in order.
    pub(crate) fn expect_complete(&self, keys: usize, per_key: usize) {
        let state = self.0.lock();
        assert_eq!(state.by_key.len(), keys, "every key has its messages");
        for (key, texts) in &state.by_key {
            assert_eq!(*texts, numbered_texts(key, 1..=per_key), "{key}'s messages come once and in order");
        }
    }
}

/// Claims and settles until all workers together have claimed `total` messages.
pub(crate) async fn work(queue: Arc<dyn Queue>, delivered: DeliveryLog, total: usize) {
    while delivered.total() < total {
        let claim = queue.claim(TOPIC, 25, Duration::from_secs(3_600)).await.expect("claim must succeed");
        if claim.messages.is_empty() {
            queue.wait(TOPIC, Duration::from_millis(2)).await;
            continue;
        }
        delivered.record(&claim.messages);
        let done = claim.messages.iter().map(|message| message.position).collect();
        // Before the settlement, because right after it another worker may claim the key.
        delivered.release(&claim.messages);
        let settlement = Settlement { done, ..Settlement::default() };
        let settled = queue.settle(&claim.receipt, settlement).await.expect("settle must succeed");
        assert!(settled, "no lease expires");
    }
}

fn key(n: usize) -> String {
    format!("user-{n}")
}

pub(crate) async fn configure_keys<H: HasQuota>(h: &H, keys: usize) {
    for n in 0..keys {
        configure(h, &key(n), 1_000, 60).await;
    }
}

pub async fn eight_workers_deliver_each_message_once_and_in_order<H: HasQuota>() {
    let h = H::open().await;
    configure_keys(&h, KEYS).await;
    for numbers in (1..=PER_KEY).collect::<Vec<_>>().chunks(8) {
        let batch =
            numbers.iter().flat_map(|n| (0..KEYS).map(move |k| send(&key(k), &format!("{} {n}", key(k)))));
        crate::fixtures::accept_batch(&h, batch.collect()).await;
    }
    let delivered = DeliveryLog::default();
    run_concurrently((0..WORKERS).map(|_| work(h.queue(), delivered.clone(), KEYS * PER_KEY))).await;
    delivered.expect_complete(KEYS, PER_KEY);
    assert_eq!(queue_audit(&h).await.done, (KEYS * PER_KEY) as u64, "everything is done once");
}

pub async fn messages_sent_while_workers_run_are_delivered_once_and_in_order<H: HasQuota>() {
    let h = H::open().await;
    configure_keys(&h, 12).await;
    let delivered = DeliveryLog::default();
    let working = run_concurrently((0..4).map(|_| work(h.queue(), delivered.clone(), 12 * 30)));
    let sending = run_concurrently((0..12).map(|k| {
        let quota = h.quota();
        async move {
            for batch in sends(&key(k), 30).chunks(3) {
                quota.send_batch(batch.to_vec().into()).await.expect("send_batch must succeed");
            }
        }
    }));
    tokio::join!(working, sending);
    delivered.expect_complete(12, 30);
    assert_eq!(queue_audit(&h).await.done, 12 * 30, "everything is done once");
}
