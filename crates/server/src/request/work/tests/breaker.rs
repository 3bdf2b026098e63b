//! A downstream that is down costs no attempts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use weir_core::request::state::RequestStatus;
use weir_core::{ManualClock, Timestamp};

use super::fixtures::{FakeDownstream, Fixture, RunningWorker, answer, until};
use crate::telemetry::labels::DownstreamLabels;

const START: Timestamp = Timestamp::from_seconds(1_767_225_600);

fn breaker(fixture: &Fixture) -> i64 {
    let labels = DownstreamLabels { downstream: "default".to_owned() };
    fixture.metrics.breaker_state.get_or_create(&labels).get()
}

#[tokio::test]
async fn an_open_breaker_parks_jobs_without_spending_attempts_and_resumes_when_it_closes() {
    let is_up = Arc::new(AtomicBool::new(false));
    let up = Arc::clone(&is_up);
    let server = FakeDownstream::start(move |_| {
        let status = if up.load(Ordering::SeqCst) { 200 } else { 503 };
        async move { answer(status, "done") }
    })
    .await;
    let clock = ManualClock::at(START);
    let mut fixture = Fixture::with_clock(Some(&server.url), clock.clone());
    fixture.settings.concurrency = 4;
    let looked = Arc::new(Notify::new());
    let look = Arc::clone(&looked);
    let mut parts = fixture.parts();
    parts.is_enabled = Arc::new(move || {
        look.notify_one();
        Box::pin(std::future::ready(true))
    });
    let worker = RunningWorker::new(parts);
    let mut ids = Vec::new();
    for _ in 0..40 {
        ids.push(fixture.submit("{}").await);
    }
    until("the breaker is open", || async { breaker(&fixture) == 2 }).await;
    let all_reported =
        || async { fixture.changes.lock().len().is_multiple_of(2) && fixture.metrics.retries.get() >= 10 };
    until("running calls are reported", all_reported).await;
    let calls = server.calls();
    assert!((10..10 + 4).contains(&calls), "{calls} calls: ten failures, and those that were under way");
    clock.advance(Duration::from_secs(4));
    for _ in 0..5 {
        looked.notified().await;
    }
    assert_eq!(server.calls(), calls, "nothing is called while the breaker is open");
    is_up.store(true, Ordering::SeqCst);
    clock.advance(Duration::from_secs(2));
    for id in &ids {
        let request = fixture.end_of(*id).await;
        assert_eq!(request.status, RequestStatus::Completed);
        assert!(request.attempts <= 2, "a parked request has spent no attempt");
    }
    assert_eq!(breaker(&fixture), 0);
    assert_eq!(server.calls(), calls + 40, "each request is completed once");
    worker.stop().await;
}

#[tokio::test]
async fn an_unreachable_downstream_does_not_delay_another() {
    let down = FakeDownstream::always(503, "").await;
    let mut fixture = Fixture::with_clock(None, ManualClock::at(START));
    let mut downstream = fixture.settings.downstream.clone();
    downstream.url = Some(down.url.parse().unwrap());
    fixture.settings.downstreams.insert("down".to_owned(), downstream);
    fixture.settings.concurrency = 4;
    let worker = fixture.start();
    for _ in 0..40 {
        fixture.submit_with("1", |submit| "down".clone_into(&mut submit.downstream)).await;
    }
    for _ in 0..40 {
        let id = fixture.submit("1").await;
        assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    }
    worker.stop().await;
}

#[tokio::test]
async fn nothing_is_claimed_while_processing_is_switched_off() {
    let fixture = Fixture::new(None);
    let is_on = Arc::new(AtomicBool::new(false));
    let (asked, switch) = (Arc::new(Notify::new()), Arc::clone(&is_on));
    let ask = Arc::clone(&asked);
    let mut parts = fixture.parts();
    parts.is_enabled = Arc::new(move || {
        ask.notify_one();
        Box::pin(std::future::ready(switch.load(Ordering::SeqCst)))
    });
    let worker = RunningWorker::new(parts);
    let id = fixture.submit("1").await;
    for _ in 0..3 {
        asked.notified().await;
    }
    assert_eq!(fixture.find(id).await.status, RequestStatus::Accepted);
    is_on.store(true, Ordering::SeqCst);
    assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    worker.stop().await;
}
