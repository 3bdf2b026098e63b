//! Leases: one worker at a time, and an end for requests whose workers vanish.

use std::time::Duration;

use weir_core::request::retry::Cause;
use weir_core::request::state::{Refused, Status};

use super::fixtures::{
    accepted_one, begun, books, broken, claim_one, claimed, claimed_named, dead_ids, done, found,
    nothing_due, now, policy, put_back, reported_one, status, taken_over, wish,
};
use crate::HasRequests;
use crate::fixtures::TICK;

pub async fn a_lease_lasts_to_its_last_microsecond<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    nothing_due(&h, "a worker has it").await;
    h.clock().advance(policy().lease - TICK);
    nothing_due(&h, "a worker has it still").await;
    assert!(claimed_named(&h, &[job.id]).await.jobs.is_empty(), "nor may it be claimed by name");
    h.clock().advance(TICK);
    assert_eq!(claim_one(&h).await.id, job.id, "but not any longer");
}

pub async fn a_named_claim_takes_over_at_the_very_end_of_a_lease_too<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    h.clock().advance(policy().lease);
    let again = claimed_named(&h, &[job.id]).await.jobs.remove(0);
    assert_eq!((again.id, again.attempt), (job.id, 2));
}

pub async fn a_job_claimed_again_has_a_higher_token_and_counts_an_attempt<H: HasRequests>() {
    let h = H::open().await;
    let first = begun(&h, wish(&h, "k")).await;
    h.clock().advance(policy().lease);
    let second = claim_one(&h).await;
    assert!(second.token > first.token, "tokens only grow");
    assert_eq!((first.attempt, second.attempt), (1, 2));
    assert_eq!(found(&h, first.id).await.attempts, 2);
    nothing_due(&h, "the second worker has a lease of its own").await;
    h.clock().advance(policy().lease - TICK);
    nothing_due(&h, "as long as the first one's").await;
}

pub async fn a_late_worker_changes_nothing<H: HasRequests>() {
    let h = H::open().await;
    let late = begun(&h, wish(&h, "k")).await;
    h.clock().advance(policy().lease);
    let holder = claim_one(&h).await;
    h.clock().advance(Duration::from_secs(1));
    let before = found(&h, late.id).await;
    let reports = [done(&late), broken(&late), taken_over(&late), put_back(&late, Duration::ZERO)];
    for report in reports {
        assert_eq!(reported_one(&h, report).await, Err(Refused::LeaseLost));
    }
    assert_eq!(found(&h, late.id).await, before);
    nothing_due(&h, "its holder has it still").await;
    assert_eq!(reported_one(&h, done(&holder)).await, Ok(Status::Completed));
}

pub async fn a_report_after_the_lease_counts_while_nobody_else_has_claimed<H: HasRequests>() {
    let h = H::open().await;
    let job = begun(&h, wish(&h, "k")).await;
    h.clock().advance(policy().lease * 10);
    assert_eq!(reported_one(&h, done(&job)).await, Ok(Status::Completed), "the call was made");
    nothing_due(&h, "it is done").await;
    assert_eq!(books(&h).await.completed, 1);
}

pub async fn a_request_that_kills_its_workers_becomes_a_dead_letter<H: HasRequests>() {
    let h = H::open().await;
    let id = accepted_one(&h, wish(&h, "k")).await;
    for attempt in 1..=policy().max_attempts.get() {
        assert_eq!(claim_one(&h).await.attempt, attempt);
        h.clock().advance(policy().lease);
    }
    let claimed = claimed(&h, 10).await;
    assert!(claimed.jobs.is_empty());
    assert_eq!(claimed.exhausted, [id]);
    let request = found(&h, id).await;
    assert_eq!((request.status, request.attempts), (Status::FailedRetryExhausted, 3));
    let failure = request.failure.expect("it says why");
    assert_eq!(failure.code, Cause::WorkerLost.code());
    assert_eq!(failure.message, Cause::WorkerLost.to_string());
    assert_eq!(request.updated_at, now(&h));
    assert_eq!(dead_ids(&h).await, [id]);
    nothing_due(&h, "it has come to its end").await;
    assert_eq!(books(&h).await.dead, 1);
}

pub async fn a_named_claim_gives_up_what_has_no_attempt_left<H: HasRequests>() {
    let h = H::open().await;
    let id = accepted_one(&h, wish(&h, "k")).await;
    for _ in 0..policy().max_attempts.get() {
        claim_one(&h).await;
        h.clock().advance(policy().lease);
    }
    let claimed = claimed_named(&h, &[id, id]).await;
    assert!(claimed.jobs.is_empty());
    assert_eq!(claimed.exhausted, [id]);
    assert_eq!(dead_ids(&h).await, [id]);
    books(&h).await;
}

pub async fn a_worker_of_a_request_given_up_is_told_so<H: HasRequests>() {
    let h = H::open().await;
    accepted_one(&h, wish(&h, "k")).await;
    let mut last = None;
    for _ in 0..policy().max_attempts.get() {
        last = Some(claim_one(&h).await);
        h.clock().advance(policy().lease);
    }
    claimed(&h, 1).await;
    let last = last.expect("it was claimed");
    let refused = Refused::Final(Status::FailedRetryExhausted);
    assert_eq!(reported_one(&h, done(&last)).await, Err(refused));
    assert_eq!(status(&h, last.id).await, Status::FailedRetryExhausted);
}

pub async fn a_callback_that_never_comes_costs_an_attempt_and_then_the_request<H: HasRequests>() {
    let h = H::open().await;
    let id = accepted_one(&h, wish(&h, "k")).await;
    for attempt in 1..=policy().max_attempts.get() {
        let job = claim_one(&h).await;
        assert_eq!(job.attempt, attempt);
        assert_eq!(reported_one(&h, taken_over(&job)).await, Ok(Status::InProgress));
        h.clock().advance(policy().callback_within - TICK);
        nothing_due(&h, "its callback may still come").await;
        h.clock().advance(TICK);
    }
    assert_eq!(claimed(&h, 10).await.exhausted, [id]);
    let failure = found(&h, id).await.failure.expect("it says why");
    assert_eq!(failure.code, Cause::CallbackMissing.code());
    assert_eq!(dead_ids(&h).await, [id]);
}

pub async fn the_lease_is_that_of_the_policy_claimed_with<H: HasRequests>() {
    let h = H::open().await;
    let long = weir_core::request::retry::Policy { lease: Duration::from_secs(100), ..policy() };
    let id = accepted_one(&h, wish(&h, "k")).await;
    let jobs = h.requests().claim_named(&[id], &long).await.expect("claim_named must succeed").jobs;
    assert_eq!(jobs.len(), 1);
    h.clock().advance(Duration::from_secs(100) - TICK);
    assert_eq!(claimed(&h, 1).await.next, Some(TICK));
    h.clock().advance(TICK);
    assert_eq!(claim_one(&h).await.id, id);
}

pub async fn a_clock_that_is_set_back_holds_up_no_request<H: HasRequests>() {
    let h = H::open().await;
    let Some(clock) = h.store_clock() else { return };
    let ahead = Duration::from_secs(7_200);
    let waiting = accepted_one(&h, wish(&h, "before")).await;
    h.clock().advance(ahead);
    let leased = claim_one(&h).await;
    assert_eq!(leased.id, waiting);
    let fresh = accepted_one(&h, wish(&h, "ahead")).await;
    h.clock().set_back(ahead);
    assert_eq!(clock.bring_back_waiting().await.expect("an answer"), 2);
    assert_eq!(clock.bring_back_waiting().await.expect("an answer"), 0, "once is enough");
    assert_eq!(claim_one(&h).await.id, fresh, "what was accepted ahead is due now");
    nothing_due(&h, "the lease lasts for as long as it was to").await;
    h.clock().advance(policy().lease);
    assert!(claimed(&h, 9).await.jobs.iter().any(|job| job.id == leased.id), "and no longer");
}
