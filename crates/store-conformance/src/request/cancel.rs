//! Cancellation: what it ends, and that nothing that comes later counts.

use std::time::Duration;

use weir_core::request::state::{Callback, RequestStatus, TransitionError};
use weir_store::request::{CallbackOutcome, CancelOutcome, RequestFilter, Submit, SubmitOutcome};

use super::fixtures::{
    URL, accept_one, awaits_callback, call_back, callback_report, cancel, claim_named, create_dead_requests,
    dead_ids, expect_nothing_due, get_request, next_id, now, outage, policy, rejection, replay_one,
    report_batch, report_one, request_audit, resubmission, submission, submit_and_claim, submit_one, success,
    webhooks,
};
use crate::HasRequests;

/// A submission whose tenant wants a webhook.
fn with_webhook<H: HasRequests>(h: &H, key: &str) -> Submit {
    Submit { callback_url: Some(URL.to_owned()), ..submission(h, key) }
}

pub async fn a_cancelled_request_is_final_and_never_claimed<H: HasRequests>() {
    let h = H::open().await;
    let waiting = accept_one(&h, with_webhook(&h, "a")).await;
    let pending = accept_one(&h, Submit { needs_broker: true, ..with_webhook(&h, "b") }).await;
    let deferred = submit_and_claim(&h, with_webhook(&h, "c")).await;
    report_one(&h, outage(&deferred)).await.expect("the report is accepted");
    let awaiting = submit_and_claim(&h, with_webhook(&h, "d")).await;
    report_one(&h, awaits_callback(&awaiting)).await.expect("the report is accepted");
    h.clock().advance(Duration::from_millis(5));
    let ids = [waiting, pending, deferred.id, awaiting.id];
    for id in ids {
        assert_eq!(cancel(&h, id).await, CancelOutcome::Cancelled);
        let request = get_request(&h, id).await;
        assert_eq!((request.status, request.updated_at), (RequestStatus::Cancelled, now(&h)));
        assert_eq!(request.failure.map(|failure| failure.code).as_deref(), Some("CANCELLED"));
    }
    h.clock().advance(policy().callback_within);
    expect_nothing_due(&h, "they are cancelled").await;
    assert!(claim_named(&h, &ids).await.jobs.is_empty(), "a broker may still have their ids");
    h.requests().mark_enqueued(&ids).await.expect("mark_enqueued must succeed");
    assert_eq!(get_request(&h, pending).await.status, RequestStatus::Cancelled);
    assert!(h.requests().pending_requests(Duration::ZERO, 10).await.expect("an answer").is_empty());
    assert_eq!((webhooks(&h).await, dead_ids(&h).await), (vec![], vec![]));
    let books = request_audit(&h).await;
    assert_eq!((books.accepted, books.cancelled, books.failed), (4, 4, 0));
}

pub async fn what_comes_of_the_call_of_a_cancelled_request_is_thrown_away<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, with_webhook(&h, "k")).await;
    assert_eq!(cancel(&h, job.id).await, CancelOutcome::Cancelled);
    let before = get_request(&h, job.id).await;
    assert_eq!(before.attempts, 1);
    h.clock().advance(Duration::from_secs(1));
    let reports = vec![success(&job), rejection(&job), outage(&job), awaits_callback(&job)];
    let refused = Err(TransitionError::Final(RequestStatus::Cancelled));
    assert_eq!(report_batch(&h, reports).await, [refused; 4]);
    for callback in [Callback::Completed, Callback::Failed] {
        let outcome = call_back(&h, job.id, callback_report(callback)).await;
        assert_eq!(
            outcome,
            CallbackOutcome::TransitionError(TransitionError::Final(RequestStatus::Cancelled))
        );
    }
    assert_eq!(get_request(&h, job.id).await, before);
    assert_eq!(webhooks(&h).await, []);
    request_audit(&h).await;
}

pub async fn a_request_that_has_ended_cannot_be_cancelled<H: HasRequests>() {
    let h = H::open().await;
    let done = submit_and_claim(&h, submission(&h, "a")).await;
    let refused = submit_and_claim(&h, submission(&h, "b")).await;
    report_batch(&h, vec![success(&done), rejection(&refused)]).await;
    let dead = create_dead_requests(&h, vec![submission(&h, "c")]).await.remove(0);
    let cancelled = accept_one(&h, submission(&h, "d")).await;
    assert_eq!(cancel(&h, cancelled).await, CancelOutcome::Cancelled);
    for (id, status) in [
        (done.id, RequestStatus::Completed),
        (refused.id, RequestStatus::FailedPermanent),
        (dead.id, RequestStatus::FailedRetryExhausted),
        (cancelled, RequestStatus::Cancelled),
    ] {
        let before = get_request(&h, id).await;
        assert_eq!(cancel(&h, id).await, CancelOutcome::AlreadyFinal(status));
        assert_eq!(get_request(&h, id).await, before);
    }
    assert_eq!(cancel(&h, next_id(&h)).await, CancelOutcome::Unknown);
    assert_eq!(dead_ids(&h).await, [dead.id], "a dead letter stays one");
    request_audit(&h).await;
}

pub async fn a_replayed_letter_can_be_cancelled<H: HasRequests>() {
    let h = H::open().await;
    let dead = create_dead_requests(&h, vec![submission(&h, "k")]).await.remove(0);
    assert!(replay_one(&*h.requests(), dead.id).await);
    assert_eq!(cancel(&h, dead.id).await, CancelOutcome::Cancelled);
    assert!(!replay_one(&*h.requests(), dead.id).await);
    expect_nothing_due(&h, "it is cancelled").await;
    assert_eq!(request_audit(&h).await.cancelled, 1);
}

pub async fn a_cancelled_request_keeps_its_key_and_is_listed_and_purged<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    let id = accept_one(&h, sent.clone()).await;
    accept_one(&h, submission(&h, "l")).await;
    cancel(&h, id).await;
    let SubmitOutcome::Replayed(receipt) = submit_one(&h, resubmission(&h, &sent)).await else {
        panic!("the key stands for the cancelled request")
    };
    assert_eq!((receipt.id, receipt.status), (id, RequestStatus::Cancelled));
    for (status, count) in [(RequestStatus::Cancelled, 1), (RequestStatus::FailedPermanent, 0)] {
        let page =
            h.requests().list_requests(&RequestFilter::of_tenant(&sent.tenant, Some(status)), None, 10).await;
        assert_eq!(page.expect("list_requests must succeed").requests.len(), count, "{status:?}");
    }
    let summary = h.requests().find_summaries(&[id]).await.expect("find_summaries must succeed");
    assert_eq!(summary[0].status, RequestStatus::Cancelled);
    h.clock().advance(Duration::from_secs(5));
    let purged = h.requests().purge_requests(Duration::from_secs(1), 10).await;
    assert_eq!(purged.expect("purge_requests must succeed"), 1, "it is final");
    let books = request_audit(&h).await;
    assert_eq!((books.cancelled, books.purged, books.in_flight), (0, 1, 1));
}
