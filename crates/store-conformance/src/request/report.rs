//! What a worker's report makes of a request.

use std::time::Duration;

use weir_core::request::retry::{Cause, Judgement};
use weir_core::request::state::{Refused, Report, Status};
use weir_store::request::{Failure, Job, JobReport};

use super::fixtures::{
    accepted, begun, books, broken, broken_for, claim, claim_one, dead_ids, died, done, found, next_id,
    nothing_due, now, policy, put_back, rejected, reported, reported_one, says, sealed, taken_over, wish,
    wishes,
};
use crate::HasRequests;
use crate::fixtures::{TICK, awkward_messages};

const SECOND: Duration = Duration::from_secs(1);

fn failure(cause: Cause) -> Option<Failure> {
    Some(Failure { code: cause.code().to_owned(), message: cause.to_string() })
}

pub async fn a_completed_request_has_its_result_and_no_job<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    h.clock().advance(SECOND);
    assert_eq!(reported_one(&h, done(&job)).await, Ok(Status::Completed));
    let request = found(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (Status::Completed, 1));
    assert_eq!((request.result, request.failure), (Some(sealed("result")), None));
    assert_eq!((request.accepted_at, request.updated_at), (job.accepted_at, now(&h)));
    h.clock().advance(policy().callback_within);
    nothing_due(&h, "it is done").await;
    assert_eq!(books(&h).await.completed, 1);
}

pub async fn a_completed_request_may_have_no_result<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    let report = JobReport { result: None, ..done(&job) };
    assert_eq!(reported_one(&h, report).await, Ok(Status::Completed));
    assert_eq!(found(&h, job.id).await.result, None);
}

pub async fn a_rejected_request_says_why_and_is_no_dead_letter<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    h.clock().advance(SECOND);
    assert_eq!(reported_one(&h, rejected(&job)).await, Ok(Status::FailedPermanent));
    let request = found(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (Status::FailedPermanent, 1));
    assert_eq!((request.failure, request.result), (failure(Cause::Rejected(422)), None));
    assert_eq!(request.updated_at, now(&h));
    assert_eq!(dead_ids(&h).await, []);
    nothing_due(&h, "it has come to its end").await;
    assert_eq!(books(&h).await.failed, 1);
}

pub async fn a_retry_waits_as_long_as_chance_decides<H: HasRequests>() {
    let h = H::open().await;
    // After one attempt the wait is from 1 s to 2 s, after two to 4 s; see the policy.
    for (chance, waits) in [(0, [1, 1]), (u64::MAX, [2, 4])] {
        let mut job = begun(&h, wish(&h, &format!("k{chance}"))).await;
        for wait in waits {
            let report = JobReport { chance, ..broken(&job) };
            assert_eq!(reported_one(&h, report).await, Ok(Status::InProgress));
            h.clock().advance(wait * SECOND - TICK);
            nothing_due(&h, "its time has not come").await;
            h.clock().advance(TICK);
            job = claim_one(&h).await;
        }
        assert_eq!(job.attempt, 3);
        assert_eq!(reported_one(&h, done(&job)).await, Ok(Status::Completed));
    }
}

pub async fn a_retry_waits_as_long_as_the_downstream_asks_within_bounds<H: HasRequests>() {
    let h = H::open().await;
    for (asked, wait) in [(Duration::ZERO, 1), (3 * SECOND, 3), (Duration::MAX, 5)] {
        let job = begun(&h, wish(&h, &format!("{asked:?}"))).await;
        assert_eq!(reported_one(&h, broken_for(&job, Some(asked))).await, Ok(Status::InProgress));
        h.clock().advance(wait * SECOND - TICK);
        nothing_due(&h, "its time has not come").await;
        h.clock().advance(TICK);
        assert_eq!(reported_one(&h, done(&claim_one(&h).await)).await, Ok(Status::Completed));
    }
}

pub async fn the_last_retry_in_vain_makes_a_dead_letter<H: HasRequests>() {
    let h = H::open().await;
    let mut job = begun(&h, wish(&h, "k")).await;
    for attempt in 1..=2 {
        assert_eq!(job.attempt, attempt);
        assert_eq!(reported_one(&h, broken(&job)).await, Ok(Status::InProgress));
        h.clock().advance(SECOND);
        job = claim_one(&h).await;
    }
    let timed_out = Report::Called(Judgement::Retry { cause: Cause::TimedOut, retry_after: None });
    assert_eq!(reported_one(&h, says(&job, timed_out)).await, Ok(Status::FailedRetryExhausted));
    let request = found(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (Status::FailedRetryExhausted, 3));
    assert_eq!(request.failure, failure(Cause::TimedOut), "why the last one failed");
    assert_eq!(dead_ids(&h).await, [job.id]);
    assert_eq!(books(&h).await.dead, 1);
}

pub async fn a_failed_attempt_shows_until_one_succeeds<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    assert_eq!(found(&h, job.id).await.failure, None);
    h.clock().advance(SECOND);
    let report = JobReport { detail: Some("503, try later".to_owned()), ..broken(&job) };
    assert_eq!(reported_one(&h, report).await, Ok(Status::InProgress));
    let told = Failure { code: Cause::Broken(503).code().to_owned(), message: "503, try later".to_owned() };
    let request = found(&h, job.id).await;
    assert_eq!((request.failure, request.updated_at), (Some(told.clone()), now(&h)));
    h.clock().advance(SECOND);
    let job = claim_one(&h).await;
    assert_eq!(found(&h, job.id).await.failure, Some(told.clone()), "why its last attempt failed");
    assert_eq!(reported_one(&h, put_back(&job, Duration::ZERO)).await, Ok(Status::InProgress));
    assert_eq!(found(&h, job.id).await.failure, Some(told), "no other was made since");
    let job = claim_one(&h).await;
    assert_eq!(reported_one(&h, done(&job)).await, Ok(Status::Completed));
    assert_eq!(found(&h, job.id).await.failure, None);
}

pub async fn a_request_taken_over_waits_for_its_callback<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    h.clock().advance(SECOND);
    assert_eq!(reported_one(&h, taken_over(&job)).await, Ok(Status::InProgress));
    let request = found(&h, job.id).await;
    assert_eq!((request.status, request.attempts), (Status::InProgress, 1));
    assert_eq!((request.failure, request.result, request.updated_at), (None, None, now(&h)));
    h.clock().advance(policy().callback_within - TICK);
    nothing_due(&h, "longer than any lease").await;
    assert_eq!(reported_one(&h, done(&job)).await, Err(Refused::LeaseLost), "the worker has spoken");
}

pub async fn a_call_that_was_not_made_costs_no_attempt<H: HasRequests>() {
    let h = H::open().await;
    let first = begun(&h, wish(&h, "k")).await;
    reported_one(&h, put_back(&first, Duration::ZERO)).await.expect("it is taken");
    let mut token = first.token;
    for _ in 0..10 {
        let job = claim_one(&h).await;
        assert_eq!(job.attempt, 1, "the same attempt again");
        assert!(job.token > token, "but another lease");
        token = job.token;
        let after = 7 * SECOND;
        assert_eq!(reported_one(&h, put_back(&job, after)).await, Ok(Status::InProgress));
        let request = found(&h, job.id).await;
        assert_eq!((request.attempts, request.updated_at), (0, now(&h)));
        h.clock().advance(7 * SECOND - TICK);
        nothing_due(&h, "it is put off").await;
        h.clock().advance(TICK);
    }
    let job = claim_one(&h).await;
    assert_eq!(reported_one(&h, done(&job)).await, Ok(Status::Completed));
    assert_eq!(found(&h, job.id).await.attempts, 1);
}

pub async fn what_is_final_takes_no_report<H: HasRequests>() {
    let h = H::open().await;
    let completed = begun(&h, wish(&h, "a")).await;
    let failed = begun(&h, wish(&h, "b")).await;
    reported(&h, vec![done(&completed), rejected(&failed)]).await;
    let dead = died(&h, vec![wish(&h, "c")]).await.remove(0);
    let ends: [(&Job, Status); 3] = [
        (&completed, Status::Completed),
        (&failed, Status::FailedPermanent),
        (&dead, Status::FailedRetryExhausted),
    ];
    h.clock().advance(SECOND);
    for (job, end) in ends {
        let before = found(&h, job.id).await;
        for report in [done(job), rejected(job), broken(job), taken_over(job), put_back(job, Duration::ZERO)]
        {
            assert_eq!(reported_one(&h, report).await, Err(Refused::Final(end)));
        }
        assert_eq!(found(&h, job.id).await, before);
    }
    nothing_due(&h, "they have come to their end").await;
    books(&h).await;
}

pub async fn what_was_not_claimed_takes_no_report<H: HasRequests>() {
    let h = H::open().await;
    let known = begun(&h, wish(&h, "k")).await;
    let unknown = Job { id: next_id(&h), ..known.clone() };
    assert_eq!(reported_one(&h, done(&unknown)).await, Err(Refused::LeaseLost));
    let waiting = accepted(&h, vec![wish(&h, "l")]).await.remove(0).id;
    for token in [0, 1, known.token, u64::MAX] {
        let guess = Job { id: waiting, token, ..known.clone() };
        assert_eq!(reported_one(&h, done(&guess)).await, Err(Refused::LeaseLost), "token {token}");
    }
    for token in [0, known.token + 1, u64::MAX, u64::MAX >> 1] {
        let guess = Job { token, ..known.clone() };
        assert_eq!(reported_one(&h, done(&guess)).await, Err(Refused::LeaseLost), "token {token}");
    }
    assert_eq!(found(&h, waiting).await.status, Status::Accepted);
    assert_eq!(reported_one(&h, done(&known)).await, Ok(Status::Completed));
}

pub async fn a_mixed_batch_of_reports_is_answered_in_its_order<H: HasRequests>() {
    let h = H::open().await;
    accepted(&h, wishes(&h, "k", 6)).await;
    let jobs = claim(&h, 6).await;
    let stale = Job { token: jobs[4].token + 1, ..jobs[4].clone() };
    let unknown = Job { id: next_id(&h), ..jobs[0].clone() };
    let batch = vec![
        broken(&jobs[1]),
        done(&stale),
        done(&jobs[0]),
        rejected(&jobs[2]),
        rejected(&jobs[0]),
        done(&unknown),
        taken_over(&jobs[3]),
        put_back(&jobs[5], Duration::ZERO),
        done(&jobs[1]),
    ];
    let expected = [
        Ok(Status::InProgress),
        Err(Refused::LeaseLost),
        Ok(Status::Completed),
        Ok(Status::FailedPermanent),
        Err(Refused::Final(Status::Completed)),
        Err(Refused::LeaseLost),
        Ok(Status::InProgress),
        Ok(Status::InProgress),
        Err(Refused::LeaseLost),
    ];
    assert_eq!(reported(&h, batch).await, expected);
    assert_eq!(found(&h, jobs[0].id).await.status, Status::Completed, "the first report counts");
    assert_eq!(claim_one(&h).await.id, jobs[5].id);
    let books = books(&h).await;
    assert_eq!((books.completed, books.failed, books.in_flight), (1, 1, 4));
}

pub async fn an_empty_batch_of_reports_answers_empty<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(reported(&h, Vec::new()).await, []);
}

pub async fn awkward_details_are_kept<H: HasRequests>() {
    let h = H::open().await;
    for (n, detail) in awkward_messages().into_iter().enumerate() {
        let job = begun(&h, wish(&h, &format!("k{n}"))).await;
        let report = JobReport { detail: Some(detail.clone()), ..rejected(&job) };
        assert_eq!(reported_one(&h, report).await, Ok(Status::FailedPermanent), "{detail:.40?}");
        let message = found(&h, job.id).await.failure.expect("it says why").message;
        // No Postgres text holds a NUL, so one may be lost; the rest may not.
        let kept = |text: &str| text.replace(['\0', '\u{fffd}'], "");
        assert!(kept(&message) == kept(&detail), "{detail:.40?} became {message:.40?}");
    }
}
