//! A broker between those who accept and those who work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use weir_core::request::state::RequestStatus;
use weir_core::{ManualClock, RequestId, Timestamp};
use weir_queue::publish::{OutgoingEvent, PublishOutcome, Publisher};
use weir_queue::{ClaimReceipt, Message, MessageClaim, MessageSource, Position, Settlement};
use weir_store::request::{RequestStore, SubmitOutcome};
use weir_store::{Error, Result};

use super::fixtures::{Fixture, RunningWorker, until};
use crate::engines::broker_jobs::{RequestBroker, TOPIC};
use crate::request::work::maintenance::Maintenance;

const START: Timestamp = Timestamp::from_seconds(1_767_225_600);

/// A broker in memory, which can be away.
#[derive(Default)]
struct MemoryBroker {
    is_away: AtomicBool,
    messages: Mutex<VecDeque<Vec<u8>>>,
    buried: AtomicUsize,
}

#[async_trait]
impl Publisher for MemoryBroker {
    async fn publish(&self, topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome> {
        assert_eq!(topic, TOPIC);
        let is_away = self.is_away.load(Ordering::SeqCst);
        let publish = |event: OutgoingEvent| {
            if is_away {
                return PublishOutcome::Failed(Error::unavailable("memory", "away"));
            }
            assert_eq!(event.key, event.payload);
            self.messages.lock().push_back(event.payload);
            PublishOutcome::Confirmed
        };
        events.into_iter().map(publish).collect()
    }

    async fn ping(&self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl MessageSource for MemoryBroker {
    async fn claim(&self, _: &str, max: usize, _: Duration) -> Result<MessageClaim> {
        if self.is_away.load(Ordering::SeqCst) {
            return Err(Error::unavailable("memory", "away"));
        }
        let mut waiting = self.messages.lock();
        let count = waiting.len().min(max);
        let position = Position { shard: 0, id: 0 };
        let message = |payload| Message { position, key: String::new(), payload, attempts: 0 };
        Ok(MessageClaim {
            messages: waiting.drain(..count).map(message).collect(),
            receipt: ClaimReceipt::default(),
        })
    }

    async fn settle(&self, _: &ClaimReceipt, settlement: Settlement) -> Result<bool> {
        self.buried.fetch_add(settlement.dead.len(), Ordering::SeqCst);
        Ok(true)
    }

    async fn wait(&self, _: &str, _: Duration) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn broker(fixture: &Fixture, memory: &Arc<MemoryBroker>) -> RequestBroker {
    RequestBroker::new(
        Arc::<MemoryBroker>::clone(memory),
        Arc::new(fixture.engine.clone()),
        Duration::from_secs(1),
    )
}

fn start_told(fixture: &Fixture, memory: &Arc<MemoryBroker>) -> RunningWorker {
    let mut parts = fixture.parts();
    parts.source = Some(Arc::<MemoryBroker>::clone(memory));
    RunningWorker::new(parts)
}

async fn submit(fixture: &Fixture) -> RequestId {
    fixture.submit_with("1", |submit| submit.needs_broker = true).await
}

#[tokio::test]
async fn what_is_published_after_its_commit_is_accepted_and_done() {
    let (fixture, memory) = (Fixture::new(None), Arc::new(MemoryBroker::default()));
    let id = submit(&fixture).await;
    assert_eq!(fixture.find(id).await.status, RequestStatus::PendingEnqueue);
    let receipt = weir_store::request::SubmitReceipt {
        id,
        status: RequestStatus::PendingEnqueue,
        accepted_at: fixture.engine.clock().now(),
    };
    let mut outcomes = [SubmitOutcome::Conflict, SubmitOutcome::Accepted(receipt)];
    broker(&fixture, &memory).publish_accepted(&mut outcomes).await;
    assert!(
        matches!(outcomes[1], SubmitOutcome::Accepted(receipt) if receipt.status == RequestStatus::Accepted)
    );
    assert_eq!(fixture.find(id).await.status, RequestStatus::Accepted);
    let worker = start_told(&fixture, &memory);
    assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    worker.stop().await;
}

#[tokio::test]
async fn an_id_that_comes_twice_is_worked_on_once_and_what_is_no_id_is_buried() {
    let (fixture, memory) = (Fixture::new(None), Arc::new(MemoryBroker::default()));
    let id = submit(&fixture).await;
    let broker = broker(&fixture, &memory);
    for _ in 0..3 {
        broker.publish(&[id]).await.unwrap();
    }
    memory.messages.lock().push_back(b"nonsense".to_vec());
    let worker = start_told(&fixture, &memory);
    until("everything is taken", || async { memory.buried.load(Ordering::SeqCst) == 1 }).await;
    assert_eq!(fixture.end_of(id).await.attempts, 1);
    worker.stop().await;
    let changes = fixture.changes.lock();
    assert_eq!(*changes, [(id, RequestStatus::InProgress), (id, RequestStatus::Completed)]);
}

#[tokio::test]
async fn a_worker_goes_on_with_what_is_in_the_store_while_the_broker_is_away() {
    let (fixture, memory) = (Fixture::new(None), Arc::new(MemoryBroker::default()));
    memory.is_away.store(true, Ordering::SeqCst);
    let worker = start_told(&fixture, &memory);
    let id = submit(&fixture).await;
    assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    worker.stop().await;
}

#[tokio::test]
async fn stranded_requests_are_published_when_the_broker_is_back() {
    let clock = ManualClock::at(START);
    let (fixture, memory) = (Fixture::with_clock(None, clock.clone()), Arc::new(MemoryBroker::default()));
    memory.is_away.store(true, Ordering::SeqCst);
    let id = submit(&fixture).await;
    let broker = broker(&fixture, &memory);
    assert_eq!(broker.publish(&[id]).await.unwrap(), []);
    assert_eq!(fixture.find(id).await.status, RequestStatus::PendingEnqueue);
    memory.is_away.store(false, Ordering::SeqCst);
    clock.advance(Duration::from_secs(7));
    let changes = Arc::clone(&fixture.changes);
    let maintenance = Maintenance {
        store: Arc::new(fixture.engine.clone()),
        broker: Some(broker),
        retention: Duration::from_secs(86_400),
        is_reconciling: Arc::new(|| Box::pin(std::future::ready(true))),
        clock: fixture.engine.clock(),
        metrics: fixture.metrics.clone(),
        on_change: Arc::new(move |id, status| changes.lock().push((id, status))),
    };
    let closing = CancellationToken::new();
    let running = tokio::spawn(maintenance.run(closing.clone()));
    let is_mended = || async { fixture.find(id).await.status == RequestStatus::Accepted };
    until("it is published", is_mended).await;
    closing.cancel();
    running.await.unwrap();
    assert_eq!(memory.messages.lock().len(), 1);
    assert_eq!(fixture.metrics.reconciler_heartbeat_seconds.get(), 1_767_225_607);
    assert_eq!(*fixture.changes.lock(), [(id, RequestStatus::Accepted)], "whoever waits for it is told");
}

#[tokio::test]
async fn upkeep_counts_dead_letters_tells_how_old_the_backlog_is_and_purges_what_is_old() {
    let clock = ManualClock::at(START);
    let fixture = Fixture::with_clock(None, clock.clone());
    let worker = fixture.start();
    let done = fixture.submit("1").await;
    fixture.end_of(done).await;
    worker.stop().await;
    submit(&fixture).await;
    clock.advance(Duration::from_secs(86_401));
    let maintenance = Maintenance {
        store: Arc::new(fixture.engine.clone()),
        broker: None,
        retention: Duration::from_secs(86_400),
        is_reconciling: Arc::new(|| Box::pin(std::future::ready(true))),
        clock: fixture.engine.clock(),
        metrics: fixture.metrics.clone(),
        on_change: Arc::new(|_, _| {}),
    };
    let closing = CancellationToken::new();
    let running = tokio::spawn(maintenance.run(closing.clone()));
    let is_purged = || async { fixture.engine.find_request(done).await.unwrap().is_none() };
    until("what is old is purged", is_purged).await;
    let is_shown = || async { fixture.metrics.reconciler_backlog_age_seconds.get() == 86_401 };
    until("the backlog's age is shown", is_shown).await;
    closing.cancel();
    running.await.unwrap();
    assert_eq!(fixture.metrics.dlq_depth.get(), 0);
}
