//! Reports of workers: what they change, and when they are refused.

use std::time::Duration;

use weir_core::request::retry::{FailureCause, RetryDecision};
use weir_core::request::state::{RequestStatus, TransitionError, WorkerReport};
use weir_store::request::{Failure, Job, JobReport};

use super::fixtures::{
    accept_batch, awaits_callback, claim, claim_one, create_dead_requests, dead_ids, expect_nothing_due,
    get_request, job_report, next_id, not_called, now, outage, outage_for, policy, rejection, report_batch,
    report_one, request_audit, sealed, submission, submissions, submit_and_claim, success,
};
use crate::HasRequests;
use crate::fixtures::{TICK, awkward_messages};

const SECOND: Duration = Duration::from_secs(1);

fn failure(cause: FailureCause) -> Option<Failure> {
    Some(Failure { code: cause.code().to_owned(), message: cause.to_string() })
}

pub async fn a_completed_request_has_its_result_and_no_job<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(SECOND);
    assert_eq!(report_one(&h, success(&job)).await, Ok(RequestStatus::Completed));
    let request = get_request(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::Completed, 1));
    assert_eq!((request.result, request.failure), (Some(sealed("result")), None));
    assert_eq!((request.accepted_at, request.updated_at), (job.accepted_at, now(&h)));
    h.clock().advance(policy().callback_within);
    expect_nothing_due(&h, "it is done").await;
    assert_eq!(request_audit(&h).await.completed, 1);
}

pub async fn a_completed_request_may_have_no_result<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    let report = JobReport { result: None, ..success(&job) };
    assert_eq!(report_one(&h, report).await, Ok(RequestStatus::Completed));
    assert_eq!(get_request(&h, job.id).await.result, None);
}

pub async fn a_rejected_request_says_why_and_is_no_dead_letter<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(SECOND);
    assert_eq!(report_one(&h, rejection(&job)).await, Ok(RequestStatus::FailedPermanent));
    let request = get_request(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::FailedPermanent, 1));
    assert_eq!((request.failure, request.result), (failure(FailureCause::Rejected(422)), None));
    assert_eq!(request.updated_at, now(&h));
    assert_eq!(dead_ids(&h).await, []);
    expect_nothing_due(&h, "the request is final").await;
    assert_eq!(request_audit(&h).await.failed, 1);
}

pub async fn a_retry_waits_as_long_as_its_random_number_decides<H: HasRequests>() {
    let h = H::open().await;
    // After one attempt the wait is from 1 s to 2 s, after two to 4 s; see the policy.
    for (random, waits) in [(0, [1, 1]), (u64::MAX, [2, 4])] {
        let mut job = submit_and_claim(&h, submission(&h, &format!("k{random}"))).await;
        for wait in waits {
            let report = JobReport { random, ..outage(&job) };
            assert_eq!(report_one(&h, report).await, Ok(RequestStatus::InProgress));
            h.clock().advance(wait * SECOND - TICK);
            expect_nothing_due(&h, "its delay is not over").await;
            h.clock().advance(TICK);
            job = claim_one(&h).await;
        }
        assert_eq!(job.attempt, 3);
        assert_eq!(report_one(&h, success(&job)).await, Ok(RequestStatus::Completed));
    }
}

pub async fn a_retry_waits_as_long_as_the_downstream_asks_within_bounds<H: HasRequests>() {
    let h = H::open().await;
    for (retry_after, wait) in [(Duration::ZERO, 1), (3 * SECOND, 3), (Duration::MAX, 5)] {
        let job = submit_and_claim(&h, submission(&h, &format!("{retry_after:?}"))).await;
        assert_eq!(report_one(&h, outage_for(&job, Some(retry_after))).await, Ok(RequestStatus::InProgress));
        h.clock().advance(wait * SECOND - TICK);
        expect_nothing_due(&h, "its delay is not over").await;
        h.clock().advance(TICK);
        assert_eq!(report_one(&h, success(&claim_one(&h).await)).await, Ok(RequestStatus::Completed));
    }
}

pub async fn the_last_failed_retry_creates_a_dead_letter<H: HasRequests>() {
    let h = H::open().await;
    let mut job = submit_and_claim(&h, submission(&h, "k")).await;
    for attempt in 1..=2 {
        assert_eq!(job.attempt, attempt);
        assert_eq!(report_one(&h, outage(&job)).await, Ok(RequestStatus::InProgress));
        h.clock().advance(SECOND);
        job = claim_one(&h).await;
    }
    let timed_out =
        WorkerReport::Called(RetryDecision::Retry { cause: FailureCause::TimedOut, retry_after: None });
    assert_eq!(report_one(&h, job_report(&job, timed_out)).await, Ok(RequestStatus::FailedRetryExhausted));
    let request = get_request(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::FailedRetryExhausted, 3));
    assert_eq!(request.failure, failure(FailureCause::TimedOut), "the failure of the last attempt");
    assert_eq!(dead_ids(&h).await, [job.id]);
    assert_eq!(request_audit(&h).await.dead, 1);
}

pub async fn a_failed_attempt_is_shown_until_one_succeeds<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    assert_eq!(get_request(&h, job.id).await.failure, None);
    h.clock().advance(SECOND);
    let report = JobReport { detail: Some("503, try later".to_owned()), ..outage(&job) };
    assert_eq!(report_one(&h, report).await, Ok(RequestStatus::InProgress));
    let failure = Failure {
        code: FailureCause::ServerError(503).code().to_owned(),
        message: "503, try later".to_owned(),
    };
    let request = get_request(&h, job.id).await;
    assert_eq!((request.failure, request.updated_at), (Some(failure.clone()), now(&h)));
    h.clock().advance(SECOND);
    let job = claim_one(&h).await;
    assert_eq!(
        get_request(&h, job.id).await.failure,
        Some(failure.clone()),
        "the failure of the last attempt"
    );
    assert_eq!(report_one(&h, not_called(&job, Duration::ZERO)).await, Ok(RequestStatus::InProgress));
    assert_eq!(get_request(&h, job.id).await.failure, Some(failure), "there was no attempt since");
    let job = claim_one(&h).await;
    assert_eq!(report_one(&h, success(&job)).await, Ok(RequestStatus::Completed));
    assert_eq!(get_request(&h, job.id).await.failure, None);
}

pub async fn a_request_that_awaits_its_callback_cannot_be_claimed<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(SECOND);
    assert_eq!(report_one(&h, awaits_callback(&job)).await, Ok(RequestStatus::InProgress));
    let request = get_request(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::InProgress, 1));
    assert_eq!((request.failure, request.result, request.updated_at), (None, None, now(&h)));
    h.clock().advance(policy().callback_within - TICK);
    expect_nothing_due(&h, "it waits longer than any lease").await;
    assert_eq!(
        report_one(&h, success(&job)).await,
        Err(TransitionError::LeaseLost),
        "the worker has already reported"
    );
}

pub async fn a_call_that_was_not_made_counts_no_attempt<H: HasRequests>() {
    let h = H::open().await;
    let first = submit_and_claim(&h, submission(&h, "k")).await;
    report_one(&h, not_called(&first, Duration::ZERO)).await.expect("the report is accepted");
    let mut token = first.token;
    for _ in 0..10 {
        let job = claim_one(&h).await;
        assert_eq!(job.attempt, 1, "the attempt number is the same");
        assert!(job.token > token, "the lease is new");
        token = job.token;
        let after = 7 * SECOND;
        assert_eq!(report_one(&h, not_called(&job, after)).await, Ok(RequestStatus::InProgress));
        let request = get_request(&h, job.id).await;
        assert_eq!((request.attempts, request.updated_at), (0, now(&h)));
        h.clock().advance(7 * SECOND - TICK);
        expect_nothing_due(&h, "it is deferred").await;
        h.clock().advance(TICK);
    }
    let job = claim_one(&h).await;
    assert_eq!(report_one(&h, success(&job)).await, Ok(RequestStatus::Completed));
    assert_eq!(get_request(&h, job.id).await.attempts, 1);
}

pub async fn a_final_request_refuses_reports<H: HasRequests>() {
    let h = H::open().await;
    let completed = submit_and_claim(&h, submission(&h, "a")).await;
    let failed = submit_and_claim(&h, submission(&h, "b")).await;
    report_batch(&h, vec![success(&completed), rejection(&failed)]).await;
    let dead = create_dead_requests(&h, vec![submission(&h, "c")]).await.remove(0);
    let ends: [(&Job, RequestStatus); 3] = [
        (&completed, RequestStatus::Completed),
        (&failed, RequestStatus::FailedPermanent),
        (&dead, RequestStatus::FailedRetryExhausted),
    ];
    h.clock().advance(SECOND);
    for (job, end) in ends {
        let before = get_request(&h, job.id).await;
        for report in
            [success(job), rejection(job), outage(job), awaits_callback(job), not_called(job, Duration::ZERO)]
        {
            assert_eq!(report_one(&h, report).await, Err(TransitionError::Final(end)));
        }
        assert_eq!(get_request(&h, job.id).await, before);
    }
    expect_nothing_due(&h, "the requests are final").await;
    request_audit(&h).await;
}

pub async fn a_request_that_was_not_claimed_refuses_reports<H: HasRequests>() {
    let h = H::open().await;
    let known = submit_and_claim(&h, submission(&h, "k")).await;
    let unknown = Job { id: next_id(&h), ..known.clone() };
    assert_eq!(report_one(&h, success(&unknown)).await, Err(TransitionError::LeaseLost));
    let waiting = accept_batch(&h, vec![submission(&h, "l")]).await.remove(0).id;
    for token in [0, 1, known.token, u64::MAX] {
        let guess = Job { id: waiting, token, ..known.clone() };
        assert_eq!(report_one(&h, success(&guess)).await, Err(TransitionError::LeaseLost), "token {token}");
    }
    for token in [0, known.token + 1, u64::MAX, u64::MAX >> 1] {
        let guess = Job { token, ..known.clone() };
        assert_eq!(report_one(&h, success(&guess)).await, Err(TransitionError::LeaseLost), "token {token}");
    }
    assert_eq!(get_request(&h, waiting).await.status, RequestStatus::Accepted);
    assert_eq!(report_one(&h, success(&known)).await, Ok(RequestStatus::Completed));
}

pub async fn a_mixed_batch_of_reports_is_answered_in_its_order<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions(&h, "k", 6)).await;
    let jobs = claim(&h, 6).await;
    let stale = Job { token: jobs[4].token + 1, ..jobs[4].clone() };
    let unknown = Job { id: next_id(&h), ..jobs[0].clone() };
    let batch = vec![
        outage(&jobs[1]),
        success(&stale),
        success(&jobs[0]),
        rejection(&jobs[2]),
        rejection(&jobs[0]),
        success(&unknown),
        awaits_callback(&jobs[3]),
        not_called(&jobs[5], Duration::ZERO),
        success(&jobs[1]),
    ];
    let expected = [
        Ok(RequestStatus::InProgress),
        Err(TransitionError::LeaseLost),
        Ok(RequestStatus::Completed),
        Ok(RequestStatus::FailedPermanent),
        Err(TransitionError::Final(RequestStatus::Completed)),
        Err(TransitionError::LeaseLost),
        Ok(RequestStatus::InProgress),
        Ok(RequestStatus::InProgress),
        Err(TransitionError::LeaseLost),
    ];
    assert_eq!(report_batch(&h, batch).await, expected);
    assert_eq!(get_request(&h, jobs[0].id).await.status, RequestStatus::Completed, "the first report counts");
    assert_eq!(claim_one(&h).await.id, jobs[5].id);
    let books = request_audit(&h).await;
    assert_eq!((books.completed, books.failed, books.in_flight), (1, 1, 4));
}

pub async fn an_empty_batch_of_reports_has_no_outcomes<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(report_batch(&h, Vec::new()).await, []);
}

pub async fn awkward_details_are_stored<H: HasRequests>() {
    let h = H::open().await;
    for (n, detail) in awkward_messages().into_iter().enumerate() {
        let job = submit_and_claim(&h, submission(&h, &format!("k{n}"))).await;
        let report = JobReport { detail: Some(detail.clone()), ..rejection(&job) };
        assert_eq!(report_one(&h, report).await, Ok(RequestStatus::FailedPermanent), "{detail:.40?}");
        let message = get_request(&h, job.id).await.failure.expect("there is a failure").message;
        // Postgres cannot store NUL in text, so an engine may drop it, but nothing else.
        let without_nul = |text: &str| text.replace(['\0', '\u{fffd}'], "");
        assert!(without_nul(&message) == without_nul(&detail), "{detail:.40?} became {message:.40?}");
    }
}
