//! Callbacks of downstreams: when they are accepted, and what they change.

use std::time::Duration;

use weir_core::request::state::{Callback, RequestStatus, TransitionError};
use weir_store::request::{CallbackOutcome, CallbackReport, Failure, Sealed, Submit};

use super::fixtures::{
    accept_one, awaits_callback, call_back, callback_report, claim_one, create_dead_requests, dead_ids,
    expect_nothing_due, get_request, next_id, now, outage, policy, replay_one, report_one, request_audit,
    sealed, submission, submit_and_claim, success,
};
use crate::HasRequests;

pub async fn a_callback_ends_the_wait<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    report_one(&h, awaits_callback(&job)).await.expect("the report is accepted");
    h.clock().advance(Duration::from_secs(60));
    let outcome = call_back(&h, job.id, callback_report(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Applied(RequestStatus::Completed));
    let request = get_request(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::Completed, 1));
    assert_eq!((request.result, request.failure), (Some(sealed("called back")), None));
    assert_eq!(request.updated_at, now(&h));
    h.clock().advance(policy().callback_within);
    expect_nothing_due(&h, "it is done").await;
    assert_eq!(request_audit(&h).await.completed, 1);
}

pub async fn a_callback_may_say_that_it_failed_and_why<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    report_one(&h, awaits_callback(&job)).await.expect("the report is accepted");
    let outcome = call_back(&h, job.id, callback_report(Callback::Failed)).await;
    assert_eq!(outcome, CallbackOutcome::Applied(RequestStatus::FailedPermanent));
    let failure = Failure { code: "NO_FUNDS".to_owned(), message: "the account is empty".to_owned() };
    let request = get_request(&h, job.id).await;
    assert_eq!((request.failure, request.result), (Some(failure), None));
    assert_eq!(dead_ids(&h).await, [], "a failed callback creates no dead letter");
    assert_eq!(request_audit(&h).await.failed, 1);
}

pub async fn a_callback_may_come_before_the_workers_report<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    let outcome = call_back(&h, job.id, callback_report(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Applied(RequestStatus::Completed));
    let before = get_request(&h, job.id).await;
    for report in [awaits_callback(&job), success(&job), outage(&job)] {
        assert_eq!(report_one(&h, report).await, Err(TransitionError::Final(RequestStatus::Completed)));
    }
    assert_eq!(get_request(&h, job.id).await, before);
    request_audit(&h).await;
}

pub async fn a_callback_may_come_between_attempts<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    report_one(&h, outage(&job)).await.expect("the report is accepted");
    assert!(get_request(&h, job.id).await.failure.is_some());
    let outcome = call_back(&h, job.id, callback_report(Callback::Completed)).await;
    assert_eq!(
        outcome,
        CallbackOutcome::Applied(RequestStatus::Completed),
        "the downstream got the call although its answer was lost"
    );
    assert_eq!(get_request(&h, job.id).await.failure, None);
    h.clock().advance(policy().lease);
    expect_nothing_due(&h, "it is done").await;
}

pub async fn a_repeated_callback_is_refused_and_changes_nothing<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    call_back(&h, job.id, callback_report(Callback::Completed)).await;
    let before = get_request(&h, job.id).await;
    h.clock().advance(Duration::from_secs(1));
    for callback in [Callback::Completed, Callback::Failed] {
        let outcome = call_back(&h, job.id, callback_report(callback)).await;
        assert_eq!(
            outcome,
            CallbackOutcome::TransitionError(TransitionError::Final(RequestStatus::Completed))
        );
    }
    assert_eq!(get_request(&h, job.id).await, before);
}

pub async fn a_callback_for_an_unknown_request_is_not_an_error<H: HasRequests>() {
    let h = H::open().await;
    accept_one(&h, submission(&h, "k")).await;
    let outcome = call_back(&h, next_id(&h), callback_report(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Unknown);
}

pub async fn a_callback_before_the_first_attempt_is_refused<H: HasRequests>() {
    let h = H::open().await;
    let accepted = accept_one(&h, submission(&h, "a")).await;
    let pending = accept_one(&h, Submit { needs_broker: true, ..submission(&h, "b") }).await;
    for (id, status) in [(accepted, RequestStatus::Accepted), (pending, RequestStatus::PendingEnqueue)] {
        let outcome = call_back(&h, id, callback_report(Callback::Completed)).await;
        assert_eq!(outcome, CallbackOutcome::TransitionError(TransitionError::Impossible(status)));
        assert_eq!(get_request(&h, id).await.status, status);
    }
    assert_eq!(request_audit(&h).await.in_flight, 2);
}

pub async fn a_callback_for_a_dead_letter_is_refused_until_it_is_called_again<H: HasRequests>() {
    let h = H::open().await;
    let id = create_dead_requests(&h, vec![submission(&h, "k")]).await.remove(0).id;
    let outcome = call_back(&h, id, callback_report(Callback::Completed)).await;
    assert_eq!(
        outcome,
        CallbackOutcome::TransitionError(TransitionError::Final(RequestStatus::FailedRetryExhausted))
    );
    assert_eq!(dead_ids(&h).await, [id]);
    assert!(replay_one(&*h.requests(), id).await);
    let outcome = call_back(&h, id, callback_report(Callback::Completed)).await;
    assert_eq!(
        outcome,
        CallbackOutcome::TransitionError(TransitionError::Impossible(RequestStatus::Accepted))
    );
    claim_one(&h).await;
    let outcome = call_back(&h, id, callback_report(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Applied(RequestStatus::Completed));
    request_audit(&h).await;
}

pub async fn results_and_failures_of_callbacks_are_stored_unchanged<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "a")).await;
    let result = Sealed { key_id: "key-2".to_owned(), bytes: (0..=255).cycle().take(1 << 20).collect() };
    let report = CallbackReport { result: Some(result.clone()), ..callback_report(Callback::Completed) };
    call_back(&h, job.id, report).await;
    assert!(get_request(&h, job.id).await.result == Some(result));
    let job = submit_and_claim(&h, submission(&h, "b")).await;
    let failure = Failure { code: "é'\"%\\".to_owned(), message: "👩\u{200d}👩 \n '; --".to_owned() };
    let report = CallbackReport { failure: Some(failure.clone()), ..callback_report(Callback::Failed) };
    call_back(&h, job.id, report).await;
    assert_eq!(get_request(&h, job.id).await.failure, Some(failure));
    let job = submit_and_claim(&h, submission(&h, "c")).await;
    let nul = Failure { code: "A\0B".to_owned(), message: "\0".to_owned() };
    let report = CallbackReport { failure: Some(nul), ..callback_report(Callback::Failed) };
    assert_eq!(call_back(&h, job.id, report).await, CallbackOutcome::Applied(RequestStatus::FailedPermanent));
    let job = submit_and_claim(&h, submission(&h, "d")).await;
    let report = CallbackReport { failure: None, ..callback_report(Callback::Failed) };
    assert_eq!(call_back(&h, job.id, report).await, CallbackOutcome::Applied(RequestStatus::FailedPermanent));
}
