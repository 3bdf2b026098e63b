//! Leases: one worker at a time, and dead letters for requests whose workers vanish.

use std::time::Duration;

use weir_core::request::retry::FailureCause;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_store::request::TenantCapacity;

use super::fixtures::{
    accept_one, awaits_callback, claim_jobs, claim_named, claim_one, dead_ids, expect_nothing_due,
    get_request, not_called, now, outage, policy, report_one, request_audit, status, submission,
    submit_and_claim, success,
};
use crate::HasRequests;
use crate::fixtures::TICK;

pub async fn a_lease_lasts_to_its_last_microsecond<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    expect_nothing_due(&h, "a worker holds it").await;
    h.clock().advance(policy().lease - TICK);
    expect_nothing_due(&h, "a worker still holds it").await;
    assert!(claim_named(&h, &[job.id]).await.jobs.is_empty(), "it cannot be claimed by name either");
    h.clock().advance(TICK);
    assert_eq!(claim_one(&h).await.id, job.id, "the lease ended");
}

pub async fn a_claim_by_name_succeeds_exactly_when_the_lease_ends<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(policy().lease);
    let again = claim_named(&h, &[job.id]).await.jobs.remove(0);
    assert_eq!((again.id, again.attempt), (job.id, 2));
}

pub async fn a_job_claimed_again_has_a_higher_token_and_counts_an_attempt<H: HasRequests>() {
    let h = H::open().await;
    let first = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(policy().lease);
    let second = claim_one(&h).await;
    assert!(second.token > first.token, "tokens only grow");
    assert_eq!((first.attempt, second.attempt), (1, 2));
    assert_eq!(get_request(&h, first.id).await.attempts, 2);
    expect_nothing_due(&h, "the second worker has its own lease").await;
    h.clock().advance(policy().lease - TICK);
    expect_nothing_due(&h, "the second lease is as long as the first").await;
}

pub async fn a_worker_that_lost_its_lease_changes_nothing<H: HasRequests>() {
    let h = H::open().await;
    let late = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(policy().lease);
    let holder = claim_one(&h).await;
    h.clock().advance(Duration::from_secs(1));
    let before = get_request(&h, late.id).await;
    let reports = [success(&late), outage(&late), awaits_callback(&late), not_called(&late, Duration::ZERO)];
    for report in reports {
        assert_eq!(report_one(&h, report).await, Err(TransitionError::LeaseLost));
    }
    assert_eq!(get_request(&h, late.id).await, before);
    expect_nothing_due(&h, "the holder's lease is still valid").await;
    assert_eq!(report_one(&h, success(&holder)).await, Ok(RequestStatus::Completed));
}

pub async fn a_report_after_the_lease_counts_while_nobody_else_has_claimed<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(policy().lease * 10);
    assert_eq!(
        report_one(&h, success(&job)).await,
        Ok(RequestStatus::Completed),
        "the downstream was called"
    );
    expect_nothing_due(&h, "it is done").await;
    assert_eq!(request_audit(&h).await.completed, 1);
}

pub async fn a_request_that_kills_its_workers_becomes_a_dead_letter<H: HasRequests>() {
    let h = H::open().await;
    let id = accept_one(&h, submission(&h, "k")).await;
    for attempt in 1..=policy().max_attempts.get() {
        assert_eq!(claim_one(&h).await.attempt, attempt);
        h.clock().advance(policy().lease);
    }
    let claimed = claim_jobs(&h, 10).await;
    assert!(claimed.jobs.is_empty());
    assert_eq!(claimed.exhausted, [id]);
    let request = get_request(&h, id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::FailedRetryExhausted, 3));
    let failure = request.failure.expect("there is a failure");
    assert_eq!(failure.code, FailureCause::WorkerLost.code());
    assert_eq!(failure.message, FailureCause::WorkerLost.to_string());
    assert_eq!(request.updated_at, now(&h));
    assert_eq!(dead_ids(&h).await, [id]);
    expect_nothing_due(&h, "the request is final").await;
    assert_eq!(request_audit(&h).await.dead, 1);
}

pub async fn a_claim_by_name_exhausts_requests_with_no_attempt_left<H: HasRequests>() {
    let h = H::open().await;
    let id = accept_one(&h, submission(&h, "k")).await;
    for _ in 0..policy().max_attempts.get() {
        claim_one(&h).await;
        h.clock().advance(policy().lease);
    }
    let claimed = claim_named(&h, &[id, id]).await;
    assert!(claimed.jobs.is_empty());
    assert_eq!(claimed.exhausted, [id]);
    assert_eq!(dead_ids(&h).await, [id]);
    request_audit(&h).await;
}

pub async fn a_worker_of_an_exhausted_request_is_refused<H: HasRequests>() {
    let h = H::open().await;
    accept_one(&h, submission(&h, "k")).await;
    let mut last = None;
    for _ in 0..policy().max_attempts.get() {
        last = Some(claim_one(&h).await);
        h.clock().advance(policy().lease);
    }
    claim_jobs(&h, 1).await;
    let last = last.expect("it was claimed");
    let refused = TransitionError::Final(RequestStatus::FailedRetryExhausted);
    assert_eq!(report_one(&h, success(&last)).await, Err(refused));
    assert_eq!(status(&h, last.id).await, RequestStatus::FailedRetryExhausted);
}

pub async fn a_missing_callback_counts_as_an_attempt_until_none_is_left<H: HasRequests>() {
    let h = H::open().await;
    let id = accept_one(&h, submission(&h, "k")).await;
    for attempt in 1..=policy().max_attempts.get() {
        let job = claim_one(&h).await;
        assert_eq!(job.attempt, attempt);
        assert_eq!(report_one(&h, awaits_callback(&job)).await, Ok(RequestStatus::InProgress));
        h.clock().advance(policy().callback_within - TICK);
        expect_nothing_due(&h, "its callback may still come").await;
        h.clock().advance(TICK);
    }
    assert_eq!(claim_jobs(&h, 10).await.exhausted, [id]);
    let failure = get_request(&h, id).await.failure.expect("there is a failure");
    assert_eq!(failure.code, FailureCause::CallbackMissing.code());
    assert_eq!(dead_ids(&h).await, [id]);
}

pub async fn the_policy_of_the_claim_sets_the_lease<H: HasRequests>() {
    let h = H::open().await;
    let long = weir_core::request::retry::RetryPolicy { lease: Duration::from_secs(100), ..policy() };
    let id = accept_one(&h, submission(&h, "k")).await;
    let jobs = h
        .requests()
        .claim_named(&[id], &TenantCapacity::default(), &long)
        .await
        .expect("claim_named must succeed")
        .jobs;
    assert_eq!(jobs.len(), 1);
    h.clock().advance(Duration::from_secs(100) - TICK);
    assert_eq!(claim_jobs(&h, 1).await.next_due_in, Some(TICK));
    h.clock().advance(TICK);
    assert_eq!(claim_one(&h).await.id, id);
}

pub async fn a_clock_set_back_delays_no_request<H: HasRequests>() {
    let h = H::open().await;
    let Some(clock) = h.store_clock() else { return };
    let ahead = Duration::from_secs(7_200);
    let waiting = accept_one(&h, submission(&h, "before")).await;
    h.clock().advance(ahead);
    let leased = claim_one(&h).await;
    assert_eq!(leased.id, waiting);
    let fresh = accept_one(&h, submission(&h, "ahead")).await;
    h.clock().set_back(ahead);
    assert_eq!(clock.reschedule_deferred().await.expect("an answer"), 2);
    assert_eq!(clock.reschedule_deferred().await.expect("an answer"), 0, "the second call changes nothing");
    assert_eq!(claim_one(&h).await.id, fresh, "a request accepted while the clock was ahead is due now");
    expect_nothing_due(&h, "the lease keeps its duration").await;
    h.clock().advance(policy().lease);
    assert!(claim_jobs(&h, 9).await.jobs.iter().any(|job| job.id == leased.id), "and not longer");
}
