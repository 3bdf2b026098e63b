//! Workers that crash, lose their lease, or stop.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use weir_core::request::state::RequestStatus;
use weir_core::{ManualClock, Timestamp};
use weir_queue::Queue;
use weir_store::request::{CancelOutcome, ClaimOrder, RequestStore, WEBHOOKS_TOPIC};

use super::fixtures::{FakeDownstream, Fixture, RunningWorker, answer, until};
use crate::request::settings::RequestSettings;

const START: Timestamp = Timestamp::from_seconds(1_767_225_600);

#[tokio::test]
async fn another_worker_takes_a_crashed_workers_jobs_when_the_lease_ends() {
    let server = FakeDownstream::start(|n| async move {
        if n == 0 {
            std::future::pending::<()>().await;
        }
        answer(200, "done")
    })
    .await;
    let clock = ManualClock::at(START);
    let mut fixture = Fixture::with_clock(Some(&server.url), clock.clone());
    fixture.settings.downstream.read_timeout = Duration::from_secs(60);
    let crashing = fixture.start();
    let id = fixture.submit("{}").await;
    until("the call is running", || async { server.calls() == 1 }).await;
    crashing.kill().await;
    let worker = fixture.start();
    clock.advance(fixture.settings.policy.lease + Duration::from_micros(1));
    let request = fixture.end_of(id).await;
    assert_eq!((request.status, request.attempts, server.calls()), (RequestStatus::Completed, 2, 2));
    worker.stop().await;
}

#[tokio::test]
async fn what_comes_of_a_call_is_thrown_away_if_its_request_was_cancelled() {
    let release = Arc::new(Notify::new());
    let gate = Arc::clone(&release);
    let server = FakeDownstream::start(move |n| {
        let gate = Arc::clone(&gate);
        async move {
            if n == 0 {
                gate.notified().await;
            }
            answer(200, "done")
        }
    })
    .await;
    let mut fixture = Fixture::new(Some(&server.url));
    fixture.settings.downstream.read_timeout = Duration::from_secs(20);
    let worker = fixture.start();
    let url = Some("https://example.com/hook".to_owned());
    let id = fixture.submit_with("{}", |submit| submit.callback_url = url).await;
    until("the call is under way", || async { server.calls() == 1 }).await;
    assert_eq!(fixture.engine.cancel_request(id).await.unwrap(), CancelOutcome::Cancelled);
    release.notify_one();
    // The worker reports, is refused, and goes on with other jobs.
    let next = fixture.submit("{}").await;
    assert_eq!(fixture.end_of(next).await.status, RequestStatus::Completed);
    worker.stop().await;
    let request = fixture.find(id).await;
    assert_eq!((request.status, request.result, request.attempts), (RequestStatus::Cancelled, None, 1));
    let webhooks = fixture.engine.audit(WEBHOOKS_TOPIC).await.unwrap();
    assert_eq!((webhooks.accepted, server.calls()), (0, 2));
    let changes = fixture.changes.lock().clone();
    assert!(!changes.contains(&(id, RequestStatus::Completed)), "{changes:?}");
}

#[tokio::test]
async fn a_report_after_the_lease_ended_changes_nothing() {
    let release = Arc::new(Notify::new());
    let gate = Arc::clone(&release);
    let server = FakeDownstream::start(move |n| {
        let gate = Arc::clone(&gate);
        async move {
            if n == 0 {
                gate.notified().await;
            }
            answer(200, if n == 0 { "late" } else { "in time" })
        }
    })
    .await;
    let clock = ManualClock::at(START);
    let mut fixture = Fixture::with_clock(Some(&server.url), clock.clone());
    fixture.settings.downstream.read_timeout = Duration::from_secs(60);
    let (late, prompt) = (fixture.start(), fixture.start());
    let id = fixture.submit("{}").await;
    until("the first call is under way", || async { server.calls() == 1 }).await;
    clock.advance(fixture.settings.policy.lease + Duration::from_micros(1));
    let request = fixture.end_of(id).await;
    release.notify_one();
    late.stop().await;
    prompt.stop().await;
    assert_eq!(fixture.result(&request).unwrap(), b"in time");
    assert_eq!(fixture.find(id).await, request, "the late report has changed nothing");
    assert_eq!(fixture.metrics.duplicate_calls.get(), 1);
    assert_eq!(fixture.metrics.finished.count(RequestStatus::Completed), 1);
}

#[tokio::test]
async fn two_workers_share_the_work_and_complete_each_request_once() {
    let server = FakeDownstream::always(200, "done").await;
    let fixture = Fixture::new(Some(&server.url));
    let workers = [fixture.start(), fixture.start()];
    let mut ids = Vec::new();
    for _ in 0..400 {
        ids.push(fixture.submit("{}").await);
    }
    for id in ids {
        assert_eq!(fixture.end_of(id).await.status, RequestStatus::Completed);
    }
    for worker in workers {
        worker.stop().await;
    }
    assert_eq!(server.calls(), 400);
    let changes = fixture.changes.lock();
    assert_eq!(changes.iter().filter(|(_, status)| *status == RequestStatus::Completed).count(), 400);
}

/// A worker that stops while a call is under way, with this much patience.
async fn stop_during_a_call(grace: Duration) -> (Fixture, weir_store::request::Request) {
    let release = Arc::new(Notify::new());
    let gate = Arc::clone(&release);
    let server = FakeDownstream::start(move |_| {
        let gate = Arc::clone(&gate);
        async move {
            gate.notified().await;
            answer(200, "done")
        }
    })
    .await;
    let mut fixture = Fixture::new(Some(&server.url));
    fixture.settings.downstream.read_timeout = Duration::from_secs(60);
    let worker = RunningWorker::new(crate::request::work::WorkerDependencies { grace, ..fixture.parts() });
    let id = fixture.submit("{}").await;
    until("the call is running", || async { server.calls() == 1 }).await;
    let answer_soon = async {
        if !grace.is_zero() {
            release.notify_one();
        }
    };
    tokio::join!(worker.stop(), answer_soon);
    let request = fixture.find(id).await;
    (fixture, request)
}

#[tokio::test]
async fn a_stop_waits_for_running_calls() {
    let (_, request) = stop_during_a_call(Duration::from_secs(10)).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::Completed, 1));
}

#[tokio::test]
async fn a_stop_releases_jobs_that_take_too_long() {
    let (fixture, request) = stop_during_a_call(Duration::ZERO).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::InProgress, 0), "no attempt is lost");
    let room = [weir_store::request::DownstreamCapacity {
        downstream: RequestSettings::DEFAULT_DOWNSTREAM.to_owned(),
        jobs: 1,
    }];
    let claimed =
        fixture.engine.claim_jobs(&room, &ClaimOrder::default(), &fixture.settings.policy).await.unwrap();
    assert_eq!(claimed.jobs.len(), 1, "another worker may have it at once");
}

#[tokio::test]
async fn a_payload_without_its_key_waits_and_spends_no_attempt() {
    let fixture = Fixture::new(None);
    let id = fixture.submit_with("1", |submit| submit.payload.key_id = "gone".to_owned()).await;
    let worker = fixture.start();
    // Two changes are reported: the claim and the release.
    let is_released = || async {
        let changes = fixture.changes.lock().len();
        changes == 2
    };
    until("the job is released", is_released).await;
    let request = fixture.find(id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::InProgress, 0));
    worker.stop().await;
}
