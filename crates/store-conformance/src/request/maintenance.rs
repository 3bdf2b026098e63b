//! The work of the reconciler, the janitor and operators: pending requests, purges, the rollout, audits.

use std::time::Duration;

use weir_core::RequestId;
use weir_core::request::canary::Percent;
use weir_core::request::state::{Callback, RequestStatus};
use weir_store::request::{PendingRequest, RequestAudit, RequestFilter, Rollout, RolloutChange, Submit};

use super::fixtures::{
    DAY, DEFAULT_ROLLOUT, TENANT, accept_batch, accept_one, awaits_callback, call_back, callback_report,
    change_rollout, claim, claim_jobs, claim_one, create_dead_requests, dead_ids, get_request, next_id,
    not_called, now, outage, outcome_letters, policy, rejection, replay_one, report_batch, report_one,
    request_audit, resubmission, rollout_change, single_attempt_policy, submission, submission_for,
    submissions, submit_and_claim, submit_batch, success, tenant,
};
use crate::HasRequests;
use crate::fixtures::{TICK, run_concurrently};

const SECOND: Duration = Duration::from_secs(1);
/// The resolution in which the age of requests is compared.
const MILLI: Duration = Duration::from_millis(1);

fn for_broker<H: HasRequests>(h: &H, key: &str) -> Submit {
    Submit { needs_broker: true, ..submission(h, key) }
}

async fn pending<H: HasRequests>(h: &H, older_than: Duration, limit: usize) -> Vec<PendingRequest> {
    h.requests().pending_requests(older_than, limit).await.expect("pending_requests must succeed")
}

async fn mark<H: HasRequests>(h: &H, ids: &[RequestId]) {
    h.requests().mark_enqueued(ids).await.expect("mark_enqueued must succeed");
}

async fn purge<H: HasRequests>(h: &H, keep: Duration, limit: usize) -> u64 {
    h.requests().purge_requests(keep, limit).await.expect("purge_requests must succeed")
}

/// The ids of [`TENANT`]'s requests, the newest first.
async fn request_ids<H: HasRequests>(h: &H) -> Vec<RequestId> {
    let listed =
        h.requests().list_requests(&RequestFilter::of_tenant(&tenant(TENANT), None), None, usize::MAX).await;
    listed.expect("list_requests must succeed").requests.iter().map(|request| request.id).collect()
}

pub async fn stranded_requests_are_listed_by_age<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(pending(&h, Duration::ZERO, 10).await, []);
    let mut ids = Vec::new();
    for n in 0..4 {
        ids.push(accept_one(&h, for_broker(&h, &format!("k{n}"))).await);
        accept_one(&h, submission(&h, &format!("not for a broker {n}"))).await;
        h.clock().advance(SECOND);
    }
    let pending_of = |n: usize, seconds: u32| PendingRequest { id: ids[n], age: SECOND * seconds };
    assert_eq!(
        pending(&h, Duration::ZERO, 10).await,
        [pending_of(0, 4), pending_of(1, 3), pending_of(2, 2), pending_of(3, 1)]
    );
    assert_eq!(
        pending(&h, Duration::ZERO, 2).await,
        [pending_of(0, 4), pending_of(1, 3)],
        "the oldest first"
    );
    assert_eq!(pending(&h, SECOND * 3, 10).await, [pending_of(0, 4), pending_of(1, 3)], "at least that age");
    assert_eq!(pending(&h, SECOND * 3 + TICK, 10).await, [pending_of(0, 4)]);
    assert_eq!(pending(&h, Duration::MAX, 10).await, []);
    assert_eq!(pending(&h, Duration::ZERO, 0).await, []);
    assert_eq!(pending(&h, Duration::ZERO, usize::MAX).await.len(), 4);
}

pub async fn requests_that_the_broker_has_are_accepted<H: HasRequests>() {
    let h = H::open().await;
    let ids = [accept_one(&h, for_broker(&h, "a")).await, accept_one(&h, for_broker(&h, "b")).await];
    h.clock().advance(SECOND);
    mark(&h, &[ids[0], ids[0], next_id(&h)]).await;
    let request = get_request(&h, ids[0]).await;
    assert_eq!((request.status, request.updated_at), (RequestStatus::Accepted, now(&h)));
    assert_eq!(pending(&h, Duration::ZERO, 10).await, [PendingRequest { id: ids[1], age: SECOND }]);
    mark(&h, &[]).await;
    assert_eq!(get_request(&h, ids[1]).await.status, RequestStatus::PendingEnqueue);
    assert_eq!(claim(&h, 10).await.len(), 2, "both can be claimed");
}

pub async fn marking_a_started_job_as_enqueued_changes_nothing<H: HasRequests>() {
    let h = H::open().await;
    let begun_one = submit_and_claim(&h, for_broker(&h, "a")).await;
    let ended = submit_and_claim(&h, for_broker(&h, "b")).await;
    report_one(&h, success(&ended)).await.expect("the report is accepted");
    let dead = create_dead_requests(&h, vec![for_broker(&h, "c")]).await.remove(0);
    assert_eq!(pending(&h, Duration::ZERO, 10).await, [], "workers have seen them already");
    h.clock().advance(SECOND);
    for id in [begun_one.id, ended.id, dead.id] {
        let before = get_request(&h, id).await;
        mark(&h, &[id]).await;
        assert_eq!(get_request(&h, id).await, before);
    }
    assert_eq!(
        report_one(&h, success(&begun_one)).await,
        Ok(RequestStatus::Completed),
        "the lease is unchanged"
    );
    request_audit(&h).await;
}

pub async fn no_rollout_is_stored_until_somebody_changes_it<H: HasRequests>() {
    let h = H::open().await;
    let read = async || h.requests().rollout().await.expect("rollout must succeed");
    assert_eq!(read().await, None);
    for (processing_enabled, reconciler_enabled, percent) in
        [(true, false, 0), (false, true, 100), (true, true, 42)]
    {
        let canary = Percent::new(percent).expect("a percentage");
        let rollout =
            Rollout { processing_enabled, accepting_enabled: percent > 50, reconciler_enabled, canary };
        assert_eq!(change_rollout(&h, rollout_change(rollout)).await, rollout);
        assert_eq!(read().await, Some(rollout));
    }
}

pub async fn a_rollout_change_leaves_other_switches_alone<H: HasRequests>() {
    let h = H::open().await;
    let reconciler_off = RolloutChange { reconciler_enabled: Some(false), ..RolloutChange::default() };
    let mut expected = Rollout { reconciler_enabled: false, ..DEFAULT_ROLLOUT };
    assert_eq!(
        change_rollout(&h, reconciler_off).await,
        expected,
        "the other switches are those of the settings"
    );
    let canary = Percent::new(7).expect("a percentage");
    let changes = [
        RolloutChange { processing_enabled: Some(false), ..RolloutChange::default() },
        RolloutChange { canary: Some(canary), ..RolloutChange::default() },
    ];
    // Concurrently: neither call may undo the other.
    run_concurrently(
        changes.map(|change| {
            let store = h.requests();
            async move {
                store.change_rollout(change, DEFAULT_ROLLOUT).await.expect("change_rollout must succeed")
            }
        }),
    )
    .await;
    (expected.processing_enabled, expected.canary) = (false, canary);
    assert_eq!(h.requests().rollout().await.expect("rollout must succeed"), Some(expected));
}

pub async fn old_requests_are_purged_when_they_are_final<H: HasRequests>() {
    let h = H::open().await;
    let jobs =
        [submit_and_claim(&h, submission(&h, "a")).await, submit_and_claim(&h, submission(&h, "b")).await];
    let dead = create_dead_requests(&h, vec![submission(&h, "c")]).await.remove(0);
    report_batch(&h, vec![success(&jobs[0]), rejection(&jobs[1])]).await;
    let waiting = accept_one(&h, submission(&h, "d")).await;
    let pending_one = accept_one(&h, for_broker(&h, "e")).await;
    let retried = submit_and_claim(&h, submission(&h, "f")).await;
    report_one(&h, outage(&retried)).await.expect("the report is accepted");
    h.clock().advance(DAY);
    let young = submit_and_claim(&h, submission(&h, "g")).await;
    report_one(&h, success(&young)).await.expect("the report is accepted");
    purge(&h, DAY, 100).await;
    assert_eq!(request_ids(&h).await.len(), 7, "a request of exactly that age is kept");
    h.clock().advance(MILLI);
    assert_eq!(purge(&h, DAY, 100).await, 3, "one request of each final status");
    assert_eq!(request_ids(&h).await, [young.id, retried.id, pending_one, waiting]);
    assert_eq!(dead_ids(&h).await, [], "{} is not listed any more", dead.id);
    let counted = request_audit(&h).await;
    assert_eq!((counted.accepted, counted.purged, counted.in_flight), (7, 3, 3));
    assert_eq!(purge(&h, DAY, 100).await, 0, "nothing is left to purge");
    assert_eq!(claim(&h, 10).await.len(), 3, "the remaining jobs can be claimed");
}

pub async fn a_purge_deletes_no_more_than_its_limit<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions(&h, "k", 7)).await;
    report_batch(&h, claim(&h, 7).await.iter().map(success).collect()).await;
    // The limit applies to requests and keys separately.
    h.clock().advance(DAY + MILLI);
    assert_eq!(purge(&h, DAY, 0).await, 0);
    for (purged, rest) in [(6, 4), (6, 1), (2, 0), (0, 0)] {
        assert_eq!(purge(&h, DAY, 3).await, purged);
        assert_eq!(request_ids(&h).await.len(), rest);
        assert_eq!(request_audit(&h).await.purged, 7 - rest as u64);
    }
    assert_eq!(purge(&h, Duration::MAX, usize::MAX).await, 0);
}

pub async fn expired_keys_are_purged_on_time_and_their_requests_stay<H: HasRequests>() {
    let h = H::open().await;
    let sent = submissions(&h, "k", 2);
    accept_batch(&h, sent.clone()).await;
    h.clock().advance(DAY - TICK);
    assert_eq!(purge(&h, 90 * DAY, 100).await, 0);
    let replays = sent.iter().map(|sent| resubmission(&h, sent)).collect();
    assert_eq!(outcome_letters(&submit_batch(&h, replays, None).await), "RR");
    h.clock().advance(TICK);
    assert_eq!(
        outcome_letters(&submit_batch(&h, vec![resubmission(&h, &sent[0])], None).await),
        "A",
        "the key can be used again"
    );
    assert_eq!(purge(&h, 90 * DAY, 100).await, 1, "the other key is purged");
    let batch = vec![resubmission(&h, &sent[0]), submission_for(&h, TENANT, "k-1", "else")];
    assert_eq!(outcome_letters(&submit_batch(&h, batch, None).await), "RA");
    assert_eq!(request_audit(&h).await.in_flight, 4);
}

pub async fn a_key_that_outlives_its_request_is_free<H: HasRequests>() {
    let h = H::open().await;
    let sent = submissions(&h, "k", 2);
    let jobs: Vec<_> = {
        accept_batch(&h, sent.clone()).await;
        claim(&h, 2).await
    };
    report_batch(&h, jobs.iter().map(success).collect()).await;
    h.clock().advance(SECOND);
    assert_eq!(purge(&h, Duration::ZERO, 100).await, 2);
    let [same, other] = [resubmission(&h, &sent[0]), submission_for(&h, TENANT, "k-1", "else")];
    let outcomes = submit_batch(&h, vec![same.clone(), other.clone(), resubmission(&h, &same)], None).await;
    assert_eq!(outcome_letters(&outcomes), "AAR", "accepted requests exist");
    assert_eq!(request_ids(&h).await, [other.id, same.id]);
    assert_eq!(claim(&h, 10).await.len(), 2);
    assert_eq!(request_audit(&h).await.accepted, 4);
}

pub async fn a_replayed_letter_is_not_purged_however_old<H: HasRequests>() {
    let h = H::open().await;
    let id = create_dead_requests(&h, vec![submission(&h, "k")]).await.remove(0).id;
    h.clock().advance(90 * DAY + MILLI);
    assert!(replay_one(&*h.requests(), id).await);
    purge(&h, 90 * DAY, 100).await;
    assert_eq!(report_one(&h, success(&claim_one(&h).await)).await, Ok(RequestStatus::Completed));
    assert_eq!(purge(&h, 90 * DAY, 100).await, 1);
    assert_eq!(h.requests().find_request(id).await.expect("an answer"), None);
}

pub async fn the_books_are_right_after_every_step<H: HasRequests>() {
    let h = H::open().await;
    let mut expected = RequestAudit::default();
    assert_eq!(request_audit(&h).await, expected);
    accept_batch(&h, submissions(&h, "k", 8)).await;
    submit_batch(&h, vec![submission(&h, "k-0"), submission_for(&h, TENANT, "k-1", "else")], None).await;
    (expected.accepted, expected.in_flight, expected.jobs) = (8, 8, 8);
    assert_eq!(request_audit(&h).await, expected, "submissions");
    let jobs = claim(&h, 7).await;
    assert_eq!(request_audit(&h).await, expected, "a claim");
    report_batch(&h, vec![awaits_callback(&jobs[0]), outage(&jobs[1]), not_called(&jobs[2], Duration::ZERO)])
        .await;
    assert_eq!(request_audit(&h).await, expected, "reports that defer");
    report_batch(&h, vec![success(&jobs[3]), rejection(&jobs[4]), success(&jobs[3])]).await;
    (expected.completed, expected.failed, expected.in_flight, expected.jobs) = (1, 1, 6, 6);
    assert_eq!(request_audit(&h).await, expected, "reports that are final");
    call_back(&h, jobs[0].id, callback_report(Callback::Completed)).await;
    (expected.completed, expected.in_flight, expected.jobs) = (2, 5, 5);
    assert_eq!(request_audit(&h).await, expected, "a callback");
    let failures = vec![outage(&jobs[5]), outage(&jobs[6])];
    h.requests().report_batch(failures, &single_attempt_policy()).await.expect("report_batch must succeed");
    (expected.dead, expected.in_flight, expected.jobs) = (2, 3, 3);
    assert_eq!(request_audit(&h).await, expected, "dead letters");
    h.requests().discard_request(jobs[5].id).await.expect("discard_request must succeed");
    assert_eq!(request_audit(&h).await, expected, "a discarded one stays in the books");
    replay_one(&*h.requests(), jobs[6].id).await;
    (expected.dead, expected.in_flight, expected.jobs) = (1, 4, 4);
    assert_eq!(request_audit(&h).await, expected, "a replay");
    for _ in 0..policy().max_attempts.get() {
        claim(&h, 10).await;
        h.clock().advance(policy().lease);
    }
    assert_eq!(claim_jobs(&h, 10).await.exhausted.len(), 4);
    (expected.dead, expected.in_flight, expected.jobs) = (5, 0, 0);
    assert_eq!(request_audit(&h).await, expected, "lost workers");
    purge(&h, Duration::ZERO, 5).await;
    let counted = request_audit(&h).await;
    assert_eq!((counted.accepted, counted.purged), (8, 5), "a purge");
    assert_eq!(counted.completed + counted.failed + counted.dead, 3);
}
