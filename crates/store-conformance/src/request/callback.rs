//! What a downstream says when it calls back.

use std::time::Duration;

use weir_core::request::state::{Callback, Refused, Status};
use weir_store::request::{CallbackOutcome, CallbackReport, Failure, Sealed, Submit};

use super::fixtures::{
    accepted_one, begun, books, broken, called_back, calls_back, claim_one, dead_ids, died, done, found,
    next_id, nothing_due, now, policy, reported_one, sealed, taken_over, wish,
};
use crate::HasRequests;

pub async fn a_callback_ends_the_wait<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    reported_one(&h, taken_over(&job)).await.expect("it is taken");
    h.clock().advance(Duration::from_secs(60));
    let outcome = called_back(&h, job.id, calls_back(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Taken(Status::Completed));
    let request = found(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (Status::Completed, 1));
    assert_eq!((request.result, request.failure), (Some(sealed("called back")), None));
    assert_eq!(request.updated_at, now(&h));
    h.clock().advance(policy().callback_within);
    nothing_due(&h, "it is done").await;
    assert_eq!(books(&h).await.completed, 1);
}

pub async fn a_callback_may_say_that_it_failed_and_why<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    reported_one(&h, taken_over(&job)).await.expect("it is taken");
    let outcome = called_back(&h, job.id, calls_back(Callback::Failed)).await;
    assert_eq!(outcome, CallbackOutcome::Taken(Status::FailedPermanent));
    let failure = Failure { code: "NO_FUNDS".to_owned(), message: "the account is empty".to_owned() };
    let request = found(&h, job.id).await;
    assert_eq!((request.failure, request.result), (Some(failure), None));
    assert_eq!(dead_ids(&h).await, [], "that is no dead letter");
    assert_eq!(books(&h).await.failed, 1);
}

pub async fn a_callback_may_come_before_the_workers_report<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    let outcome = called_back(&h, job.id, calls_back(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Taken(Status::Completed));
    let before = found(&h, job.id).await;
    for report in [taken_over(&job), done(&job), broken(&job)] {
        assert_eq!(reported_one(&h, report).await, Err(Refused::Final(Status::Completed)));
    }
    assert_eq!(found(&h, job.id).await, before);
    books(&h).await;
}

pub async fn a_callback_may_come_between_attempts<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    reported_one(&h, broken(&job)).await.expect("it is taken");
    assert!(found(&h, job.id).await.failure.is_some());
    let outcome = called_back(&h, job.id, calls_back(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Taken(Status::Completed), "the answer was lost, not the call");
    assert_eq!(found(&h, job.id).await.failure, None);
    h.clock().advance(policy().lease);
    nothing_due(&h, "it is done").await;
}

pub async fn a_repeated_callback_is_refused_and_changes_nothing<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    called_back(&h, job.id, calls_back(Callback::Completed)).await;
    let before = found(&h, job.id).await;
    h.clock().advance(Duration::from_secs(1));
    for callback in [Callback::Completed, Callback::Failed] {
        let outcome = called_back(&h, job.id, calls_back(callback)).await;
        assert_eq!(outcome, CallbackOutcome::Refused(Refused::Final(Status::Completed)));
    }
    assert_eq!(found(&h, job.id).await, before);
}

pub async fn a_callback_for_an_unknown_request_is_an_answer<H: HasRequests>() {
    let h = H::open().await;
    accepted_one(&h, wish(&h, "k")).await;
    let outcome = called_back(&h, next_id(&h), calls_back(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Unknown);
}

pub async fn a_callback_before_anybody_called_is_refused<H: HasRequests>() {
    let h = H::open().await;
    let accepted = accepted_one(&h, wish(&h, "a")).await;
    let pending = accepted_one(&h, Submit { needs_broker: true, ..wish(&h, "b") }).await;
    for (id, status) in [(accepted, Status::Accepted), (pending, Status::PendingEnqueue)] {
        let outcome = called_back(&h, id, calls_back(Callback::Completed)).await;
        assert_eq!(outcome, CallbackOutcome::Refused(Refused::Impossible(status)));
        assert_eq!(found(&h, id).await.status, status);
    }
    assert_eq!(books(&h).await.in_flight, 2);
}

pub async fn a_callback_for_a_dead_letter_is_refused_until_it_is_called_again<H: HasRequests>() {
    let h = H::open().await;
    let id = died(&h, vec![wish(&h, "k")]).await.remove(0).id;
    let outcome = called_back(&h, id, calls_back(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Refused(Refused::Final(Status::FailedRetryExhausted)));
    assert_eq!(dead_ids(&h).await, [id]);
    assert!(h.requests().replay_request(id).await.expect("replay_request must succeed"));
    let outcome = called_back(&h, id, calls_back(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Refused(Refused::Impossible(Status::Accepted)));
    claim_one(&h).await;
    let outcome = called_back(&h, id, calls_back(Callback::Completed)).await;
    assert_eq!(outcome, CallbackOutcome::Taken(Status::Completed));
    books(&h).await;
}

pub async fn what_a_callback_says_is_kept_unchanged<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "a")).await;
    let result = Sealed { key_id: "key-2".to_owned(), bytes: (0..=255).cycle().take(1 << 20).collect() };
    let report = CallbackReport { result: Some(result.clone()), ..calls_back(Callback::Completed) };
    called_back(&h, job.id, report).await;
    assert!(found(&h, job.id).await.result == Some(result));
    let job = begun(&h, wish(&h, "b")).await;
    let failure = Failure { code: "é'\"%\\".to_owned(), message: "👩\u{200d}👩 \n '; --".to_owned() };
    let report = CallbackReport { failure: Some(failure.clone()), ..calls_back(Callback::Failed) };
    called_back(&h, job.id, report).await;
    assert_eq!(found(&h, job.id).await.failure, Some(failure));
    let job = begun(&h, wish(&h, "c")).await;
    let nul = Failure { code: "A\0B".to_owned(), message: "\0".to_owned() };
    let report = CallbackReport { failure: Some(nul), ..calls_back(Callback::Failed) };
    assert_eq!(called_back(&h, job.id, report).await, CallbackOutcome::Taken(Status::FailedPermanent));
    let job = begun(&h, wish(&h, "d")).await;
    let report = CallbackReport { failure: None, ..calls_back(Callback::Failed) };
    assert_eq!(called_back(&h, job.id, report).await, CallbackOutcome::Taken(Status::FailedPermanent));
}
