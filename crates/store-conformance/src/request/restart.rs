//! A restart loses nothing and repeats nothing.

use std::time::Duration;

use weir_core::request::canary::Percent;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_store::request::{RequestFilter, Rollout, Submit};

use super::fixtures::{
    TENANT, URL, accept_batch, awaits_callback, change_rollout, claim_jobs, claim_one, create_dead_requests,
    dead_requests, expect_nothing_due, get_request, outage, outcome_letters, policy, rejection, replay_one,
    report_batch, report_one, request_audit, resubmission, rollout_change, submission, submission_for,
    submit_and_claim, submit_batch, success, tenant, webhooks,
};
use crate::HasRequests;
use crate::fixtures::{TICK, limits};

pub async fn everything_is_unchanged_after_a_restart<H: HasRequests>() {
    let h = H::open().await;
    let jobs = [
        submit_and_claim(&h, submission(&h, "a")).await,
        submit_and_claim(&h, submission(&h, "b")).await,
        submit_and_claim(&h, submission(&h, "c")).await,
    ];
    report_batch(&h, vec![success(&jobs[0]), rejection(&jobs[1]), outage(&jobs[2])]).await;
    submit_and_claim(&h, submission(&h, "d")).await;
    accept_batch(&h, vec![submission(&h, "e"), Submit { needs_broker: true, ..submission(&h, "f") }]).await;
    create_dead_requests(&h, vec![submission(&h, "g"), submission(&h, "h")]).await;
    let rollout = Rollout {
        processing_enabled: false,
        accepting_enabled: false,
        reconciler_enabled: true,
        canary: Percent::new(7).expect("a percentage"),
    };
    change_rollout(&h, rollout_change(rollout)).await;
    let read = async |h: &H| {
        let listed =
            h.requests().list_requests(&RequestFilter::of_tenant(&tenant(TENANT), None), None, 100).await;
        let pending = h.requests().pending_requests(Duration::ZERO, 10).await;
        let rollout = h.requests().rollout().await;
        (
            listed.expect("list_requests must succeed"),
            dead_requests(h, None, 10).await,
            pending.expect("pending_requests must succeed"),
            rollout.expect("rollout must succeed"),
            h.requests().job_downstreams().await.expect("job_downstreams must succeed"),
            request_audit(h).await,
        )
    };
    let before = read(&h).await;
    assert_eq!((before.0.requests.len(), before.1.len(), before.2.len(), before.3), (8, 2, 1, Some(rollout)));
    let h = h.reopen().await;
    assert_eq!(read(&h).await, before);
}

pub async fn keys_and_windows_survive<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    assert_eq!(
        outcome_letters(&submit_batch(&h, vec![sent.clone(), submission(&h, "l")], limits(3, 1)).await),
        "AA"
    );
    let h = h.reopen().await;
    let batch = vec![
        resubmission(&h, &sent),
        submission_for(&h, TENANT, "l", "else"),
        submission(&h, "m"),
        submission(&h, "n"),
    ];
    assert_eq!(
        outcome_letters(&submit_batch(&h, batch, limits(3, 1)).await),
        "RCAL",
        "spent units stay spent"
    );
}

pub async fn leases_survive_and_their_holders_can_report<H: HasRequests>() {
    let h = H::open().await;
    let [reported, lost] =
        [submit_and_claim(&h, submission(&h, "a")).await, submit_and_claim(&h, submission(&h, "b")).await];
    let h = h.reopen().await;
    assert_eq!(
        report_one(&h, success(&reported)).await,
        Ok(RequestStatus::Completed),
        "a worker in another process can still report"
    );
    h.clock().advance(policy().lease - TICK);
    expect_nothing_due(&h, "a restart ends no lease").await;
    assert_eq!(claim_jobs(&h, 1).await.next_due_in, Some(TICK));
    h.clock().advance(TICK);
    let h = h.reopen().await;
    let holder = claim_one(&h).await;
    assert_eq!((holder.id, holder.attempt), (lost.id, 2));
    let h = h.reopen().await;
    assert_eq!(report_one(&h, success(&lost)).await, Err(TransitionError::LeaseLost), "its lease was lost");
    assert_eq!(report_one(&h, success(&holder)).await, Ok(RequestStatus::Completed));
}

pub async fn retry_delays_and_callback_deadlines_survive<H: HasRequests>() {
    let h = H::open().await;
    let [retried, waiting] =
        [submit_and_claim(&h, submission(&h, "a")).await, submit_and_claim(&h, submission(&h, "b")).await];
    report_batch(&h, vec![outage(&retried), awaits_callback(&waiting)]).await;
    let h = h.reopen().await;
    assert_eq!(claim_jobs(&h, 1).await.next_due_in, Some(Duration::from_secs(1)));
    h.clock().advance(Duration::from_secs(1));
    let job = claim_one(&h).await;
    assert_eq!((job.id, job.attempt), (retried.id, 2));
    report_one(&h, success(&job)).await.expect("the report is accepted");
    let h = h.reopen().await;
    let remaining = policy().callback_within - Duration::from_secs(1);
    assert_eq!(claim_jobs(&h, 1).await.next_due_in, Some(remaining));
}

pub async fn tokens_grow_over_restarts_and_replays<H: HasRequests>() {
    let h = H::open().await;
    let late = create_dead_requests(&h, vec![submission(&h, "k")]).await.remove(0);
    let h = h.reopen().await;
    assert!(replay_one(&*h.requests(), late.id).await);
    let h = h.reopen().await;
    let job = claim_one(&h).await;
    assert!(job.token > late.token);
    assert_eq!(report_one(&h, success(&late)).await, Err(TransitionError::LeaseLost));
    assert_eq!(report_one(&h, success(&job)).await, Ok(RequestStatus::Completed));
    assert_eq!(get_request(&h, job.id).await.attempts, 1);
}

pub async fn webhooks_survive<H: HasRequests>() {
    let h = H::open().await;
    let job =
        submit_and_claim(&h, Submit { callback_url: Some(URL.to_owned()), ..submission(&h, "k") }).await;
    report_one(&h, success(&job)).await.expect("the report is accepted");
    let h = h.reopen().await;
    assert_eq!(get_request(&h, job.id).await.callback_url.as_deref(), Some(URL));
    assert_eq!(webhooks(&h).await, [job.id]);
    let h = h.reopen().await;
    assert_eq!(webhooks(&h).await, []);
}
