//! A broker between the servers that accept requests and the workers.

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
use weir_store::request::{CancelOutcome, RequestStore, SubmitOutcome};
use weir_store::{Error, Result};

use super::fixtures::{Fixture, RunningWorker, until};
use crate::engines::broker_jobs::{RequestBroker, TOPIC};
use crate::request::work::maintenance::Maintenance;

const START: Timestamp = Timestamp::from_seconds(1_767_225_600);

/// A broker in memory that can be made unreachable.
#[derive(Default)]
struct MemoryBroker {
    is_unreachable: AtomicBool,
    messages: Mutex<VecDeque<Vec<u8>>>,
    dead: AtomicUsize,
}

#[async_trait]
impl Publisher for MemoryBroker {
    async fn publish(&self, topic: &str, events: Vec<OutgoingEvent>) -> Vec<PublishOutcome> {
        assert_eq!(topic, TOPIC);
        let is_unreachable = self.is_unreachable.load(Ordering::SeqCst);
        let publish = |event: OutgoingEvent| {
            if is_unreachable {
                return PublishOutcome::Failed(Error::unavailable("memory", "unreachable"));
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
        if self.is_unreachable.load(Ordering::SeqCst) {
            return Err(Error::unavailable("memory", "unreachable"));
        }
        let mut waiting = self.messages.lock();
        let count = waiting.len().min(max);
        let position = Position { shard: 0, id: 0 };
        let message = |payload| Message { position, key: String::new(), payload, attempts: 0, trace: None };
        Ok(MessageClaim {
            messages: waiting.drain(..count).map(message).collect(),
            receipt: ClaimReceipt::default(),
        })
    }

    async fn settle(&self, _: &ClaimReceipt, settlement: Settlement) -> Result<bool> {
        self.dead.fetch_add(settlement.dead.len(), Ordering::SeqCst);
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

fn start_with_broker(fixture: &Fixture, memory: &Arc<MemoryBroker>) -> RunningWorker {
    let mut parts = fixture.parts();
    parts.source = Some(Arc::<MemoryBroker>::clone(memory));
    RunningWorker::new(parts)
}

async fn submit(fixture: &Fixture) -> RequestId {
    fixture.submit_with("1", |submit| submit.needs_broker = true).await
}

#[tokio::test]
async fn a_request_published_after_its_commit_is_accepted_and_completed() {
    let (fixture, memory) = (Fixture::new(None), Arc::new(MemoryBroker::default()));
    let id = submit(&fixture).await;
    assert_eq!(fixture.find(id).await.status, RequestStatus::PendingEnqueue);
    let receipt = weir_store::request::SubmitReceipt {
        id,
        status: RequestStatus::PendingEnqueue,
        accepted_at: fixture.engine.clock().now(),
        window: None,
    };
    let mut outcomes = [SubmitOutcome::Conflict, SubmitOutcome::Accepted(receipt)];
    broker(&fixture, &memory).publish_accepted(&mut outcomes).await;
    assert!(
        matches!(outcomes[1], SubmitOutcome::Accepted(receipt) if receipt.status == RequestStatus::Accepted)
    );
    assert_eq!(fixture.find(id).await.status, RequestStatus::Accepted);
    let worker = start_with_broker(&fixture, &memory);
    assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    worker.stop().await;
}

#[tokio::test]
async fn a_duplicate_id_runs_once_and_an_invalid_id_is_a_dead_letter() {
    let (fixture, memory) = (Fixture::new(None), Arc::new(MemoryBroker::default()));
    let id = submit(&fixture).await;
    let broker = broker(&fixture, &memory);
    for _ in 0..3 {
        broker.publish(&[id]).await.unwrap();
    }
    memory.messages.lock().push_back(b"nonsense".to_vec());
    let worker = start_with_broker(&fixture, &memory);
    until("the invalid id is a dead letter", || async { memory.dead.load(Ordering::SeqCst) == 1 }).await;
    assert_eq!(fixture.end_of(id).await.attempts, 1);
    worker.stop().await;
    let changes = fixture.changes.lock();
    assert_eq!(*changes, [(id, RequestStatus::InProgress), (id, RequestStatus::Completed)]);
}

#[tokio::test]
async fn the_id_of_a_cancelled_request_is_skipped() {
    let (fixture, memory) = (Fixture::new(None), Arc::new(MemoryBroker::default()));
    let (cancelled, other) = (submit(&fixture).await, submit(&fixture).await);
    broker(&fixture, &memory).publish(&[cancelled, other]).await.unwrap();
    assert_eq!(fixture.engine.cancel_request(cancelled).await.unwrap(), CancelOutcome::Cancelled);
    let worker = start_with_broker(&fixture, &memory);
    assert_eq!(fixture.end_of(other).await.status, RequestStatus::Completed);
    worker.stop().await;
    let request = fixture.find(cancelled).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::Cancelled, 0));
    assert_eq!((memory.messages.lock().len(), memory.dead.load(Ordering::SeqCst)), (0, 0));
    let changes = fixture.changes.lock();
    assert_eq!(*changes, [(other, RequestStatus::InProgress), (other, RequestStatus::Completed)]);
}

#[tokio::test]
async fn workers_claim_from_the_store_while_the_broker_is_unreachable() {
    let (fixture, memory) = (Fixture::new(None), Arc::new(MemoryBroker::default()));
    memory.is_unreachable.store(true, Ordering::SeqCst);
    let worker = start_with_broker(&fixture, &memory);
    let id = submit(&fixture).await;
    assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    worker.stop().await;
}

#[tokio::test]
async fn pending_requests_are_published_when_the_broker_returns() {
    let clock = ManualClock::at(START);
    let (fixture, memory) = (Fixture::with_clock(None, clock.clone()), Arc::new(MemoryBroker::default()));
    memory.is_unreachable.store(true, Ordering::SeqCst);
    let id = submit(&fixture).await;
    let broker = broker(&fixture, &memory);
    assert_eq!(broker.publish(&[id]).await.unwrap(), []);
    assert_eq!(fixture.find(id).await.status, RequestStatus::PendingEnqueue);
    memory.is_unreachable.store(false, Ordering::SeqCst);
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
    let is_published = || async { fixture.find(id).await.status == RequestStatus::Accepted };
    until("it is published", is_published).await;
    closing.cancel();
    running.await.unwrap();
    assert_eq!(memory.messages.lock().len(), 1);
    assert_eq!(fixture.metrics.reconciler_heartbeat_seconds.get(), 1_767_225_607);
    assert_eq!(
        *fixture.changes.lock(),
        [(id, RequestStatus::Accepted)],
        "callers that wait for it are notified"
    );
}

#[tokio::test]
async fn maintenance_purges_old_requests() {
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
    until("the old request is purged", is_purged).await;
    closing.cancel();
    running.await.unwrap();
}
