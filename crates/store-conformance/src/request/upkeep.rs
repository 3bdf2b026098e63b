//! What the reconciler, the janitor and operators do: jobs a broker does not have, old records, switches, the books.

use std::time::Duration;

use weir_core::RequestId;
use weir_core::request::canary::Percent;
use weir_core::request::state::{Callback, Status};
use weir_store::request::{Pending, RequestAudit, Rollout, RolloutChange, Submit};

use super::fixtures::{
    DAY, SWITCHES, TENANT, accepted, accepted_one, again, begun, books, broken, called_back, calls_back,
    claim, claim_one, claimed, dead_ids, died, done, found, hasty, letters, next_id, now, policy, put_back,
    rejected, reported, reported_one, rollout_change, submitted, switched, taken_over, tenant, wish,
    wish_for, wishes,
};
use crate::HasRequests;
use crate::fixtures::{TICK, at_once};

const SECOND: Duration = Duration::from_secs(1);
/// The finest step in which requests are known to be old.
const MILLI: Duration = Duration::from_millis(1);

fn for_broker<H: HasRequests>(h: &H, key: &str) -> Submit {
    Submit { needs_broker: true, ..wish(h, key) }
}

async fn pending<H: HasRequests>(h: &H, older_than: Duration, limit: usize) -> Vec<Pending> {
    h.requests().pending_requests(older_than, limit).await.expect("pending_requests must succeed")
}

async fn mark<H: HasRequests>(h: &H, ids: &[RequestId]) {
    h.requests().mark_enqueued(ids).await.expect("mark_enqueued must succeed");
}

async fn purge<H: HasRequests>(h: &H, keep: Duration, limit: usize) -> u64 {
    h.requests().purge_requests(keep, limit).await.expect("purge_requests must succeed")
}

/// The ids of [`TENANT`]'s requests, the newest first.
async fn kept<H: HasRequests>(h: &H) -> Vec<RequestId> {
    let listed = h.requests().list_requests(&tenant(TENANT), None, None, usize::MAX).await;
    listed.expect("list_requests must succeed").requests.iter().map(|request| request.id).collect()
}

pub async fn stranded_requests_are_listed_by_age<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(pending(&h, Duration::ZERO, 10).await, []);
    let mut ids = Vec::new();
    for n in 0..4 {
        ids.push(accepted_one(&h, for_broker(&h, &format!("k{n}"))).await);
        accepted_one(&h, wish(&h, &format!("not for a broker {n}"))).await;
        h.clock().advance(SECOND);
    }
    let of = |n: usize, seconds: u32| Pending { id: ids[n], age: SECOND * seconds };
    assert_eq!(pending(&h, Duration::ZERO, 10).await, [of(0, 4), of(1, 3), of(2, 2), of(3, 1)]);
    assert_eq!(pending(&h, Duration::ZERO, 2).await, [of(0, 4), of(1, 3)], "the oldest first");
    assert_eq!(pending(&h, SECOND * 3, 10).await, [of(0, 4), of(1, 3)], "at least that old");
    assert_eq!(pending(&h, SECOND * 3 + TICK, 10).await, [of(0, 4)]);
    assert_eq!(pending(&h, Duration::MAX, 10).await, []);
    assert_eq!(pending(&h, Duration::ZERO, 0).await, []);
    assert_eq!(pending(&h, Duration::ZERO, usize::MAX).await.len(), 4);
}

pub async fn what_the_broker_has_is_accepted<H: HasRequests>() {
    let h = H::open().await;
    let ids = [accepted_one(&h, for_broker(&h, "a")).await, accepted_one(&h, for_broker(&h, "b")).await];
    h.clock().advance(SECOND);
    mark(&h, &[ids[0], ids[0], next_id(&h)]).await;
    let request = found(&h, ids[0]).await;
    assert_eq!((request.status, request.updated_at), (Status::Accepted, now(&h)));
    assert_eq!(pending(&h, Duration::ZERO, 10).await, [Pending { id: ids[1], age: SECOND }]);
    mark(&h, &[]).await;
    assert_eq!(found(&h, ids[1]).await.status, Status::PendingEnqueue);
    assert_eq!(claim(&h, 10).await.len(), 2, "either may be worked on");
}

pub async fn a_job_enqueued_late_goes_on_where_it_stands<H: HasRequests>() {
    let h = H::open().await;
    let begun_one = begun(&h, for_broker(&h, "a")).await;
    let ended = begun(&h, for_broker(&h, "b")).await;
    reported_one(&h, done(&ended)).await.expect("it is taken");
    let dead = died(&h, vec![for_broker(&h, "c")]).await.remove(0);
    assert_eq!(pending(&h, Duration::ZERO, 10).await, [], "somebody has them");
    h.clock().advance(SECOND);
    for id in [begun_one.id, ended.id, dead.id] {
        let before = found(&h, id).await;
        mark(&h, &[id]).await;
        assert_eq!(found(&h, id).await, before);
    }
    assert_eq!(reported_one(&h, done(&begun_one)).await, Ok(Status::Completed), "the lease is as it was");
    books(&h).await;
}

pub async fn nothing_is_switched_until_somebody_does<H: HasRequests>() {
    let h = H::open().await;
    let read = async || h.requests().rollout().await.expect("rollout must succeed");
    assert_eq!(read().await, None);
    for (processing_enabled, reconciler_enabled, percent) in
        [(true, false, 0), (false, true, 100), (true, true, 42)]
    {
        let canary = Percent::new(percent).expect("a percentage");
        let rollout = Rollout { processing_enabled, reconciler_enabled, canary };
        assert_eq!(switched(&h, rollout_change(rollout)).await, rollout);
        assert_eq!(read().await, Some(rollout));
    }
}

pub async fn switches_that_nobody_names_stay_as_they_are<H: HasRequests>() {
    let h = H::open().await;
    let reconciler_off = RolloutChange { reconciler_enabled: Some(false), ..RolloutChange::default() };
    let mut expected = Rollout { reconciler_enabled: false, ..SWITCHES };
    assert_eq!(switched(&h, reconciler_off).await, expected, "the rest is as in the settings");
    let canary = Percent::new(7).expect("a percentage");
    let changes = [
        RolloutChange { processing_enabled: Some(false), ..RolloutChange::default() },
        RolloutChange { canary: Some(canary), ..RolloutChange::default() },
    ];
    // At once: neither takes back what the other has switched.
    at_once(changes.map(|change| {
        let store = h.requests();
        async move { store.change_rollout(change, SWITCHES).await.expect("change_rollout must succeed") }
    }))
    .await;
    (expected.processing_enabled, expected.canary) = (false, canary);
    assert_eq!(h.requests().rollout().await.expect("rollout must succeed"), Some(expected));
}

pub async fn old_requests_are_purged_when_they_are_final<H: HasRequests>() {
    let h = H::open().await;
    let jobs = [begun(&h, wish(&h, "a")).await, begun(&h, wish(&h, "b")).await];
    let dead = died(&h, vec![wish(&h, "c")]).await.remove(0);
    reported(&h, vec![done(&jobs[0]), rejected(&jobs[1])]).await;
    let waiting = accepted_one(&h, wish(&h, "d")).await;
    let pending_one = accepted_one(&h, for_broker(&h, "e")).await;
    let retried = begun(&h, wish(&h, "f")).await;
    reported_one(&h, broken(&retried)).await.expect("it is taken");
    h.clock().advance(DAY);
    let young = begun(&h, wish(&h, "g")).await;
    reported_one(&h, done(&young)).await.expect("it is taken");
    purge(&h, DAY, 100).await;
    assert_eq!(kept(&h).await.len(), 7, "a day ago is not longer than a day ago");
    h.clock().advance(MILLI);
    assert_eq!(purge(&h, DAY, 100).await, 3, "one that ended in each way");
    assert_eq!(kept(&h).await, [young.id, retried.id, pending_one, waiting]);
    assert_eq!(dead_ids(&h).await, [], "{} went off the list too", dead.id);
    let counted = books(&h).await;
    assert_eq!((counted.accepted, counted.purged, counted.in_flight), (7, 3, 3));
    assert_eq!(purge(&h, DAY, 100).await, 0, "once");
    assert_eq!(claim(&h, 10).await.len(), 3, "what is left is worked on");
}

pub async fn a_purge_takes_so_many_and_no_more<H: HasRequests>() {
    let h = H::open().await;
    accepted(&h, wishes(&h, "k", 7)).await;
    reported(&h, claim(&h, 7).await.iter().map(done).collect()).await;
    // Requests and keys are limited each.
    h.clock().advance(DAY + MILLI);
    assert_eq!(purge(&h, DAY, 0).await, 0);
    for (gone, rest) in [(6, 4), (6, 1), (2, 0), (0, 0)] {
        assert_eq!(purge(&h, DAY, 3).await, gone);
        assert_eq!(kept(&h).await.len(), rest);
        assert_eq!(books(&h).await.purged, 7 - rest as u64);
    }
    assert_eq!(purge(&h, Duration::MAX, usize::MAX).await, 0);
}

pub async fn expired_keys_go_at_their_very_time_and_their_requests_stay<H: HasRequests>() {
    let h = H::open().await;
    let sent = wishes(&h, "k", 2);
    accepted(&h, sent.clone()).await;
    h.clock().advance(DAY - TICK);
    assert_eq!(purge(&h, 90 * DAY, 100).await, 0);
    let replays = sent.iter().map(|sent| again(&h, sent)).collect();
    assert_eq!(letters(&submitted(&h, replays, None).await), "RR");
    h.clock().advance(TICK);
    assert_eq!(letters(&submitted(&h, vec![again(&h, &sent[0])], None).await), "A", "the key is used anew");
    assert_eq!(purge(&h, 90 * DAY, 100).await, 1, "the other one goes");
    let batch = vec![again(&h, &sent[0]), wish_for(&h, TENANT, "k-1", "else")];
    assert_eq!(letters(&submitted(&h, batch, None).await), "RA");
    assert_eq!(books(&h).await.in_flight, 4);
}

pub async fn a_key_that_outlives_its_request_is_free<H: HasRequests>() {
    let h = H::open().await;
    let sent = wishes(&h, "k", 2);
    let jobs: Vec<_> = {
        accepted(&h, sent.clone()).await;
        claim(&h, 2).await
    };
    reported(&h, jobs.iter().map(done).collect()).await;
    h.clock().advance(SECOND);
    assert_eq!(purge(&h, Duration::ZERO, 100).await, 2);
    let [same, other] = [again(&h, &sent[0]), wish_for(&h, TENANT, "k-1", "else")];
    let outcomes = submitted(&h, vec![same.clone(), other.clone(), again(&h, &same)], None).await;
    assert_eq!(letters(&outcomes), "AAR", "what is answered as accepted is there");
    assert_eq!(kept(&h).await, [other.id, same.id]);
    assert_eq!(claim(&h, 10).await.len(), 2);
    assert_eq!(books(&h).await.accepted, 4);
}

pub async fn a_replayed_letter_is_not_purged_however_old<H: HasRequests>() {
    let h = H::open().await;
    let id = died(&h, vec![wish(&h, "k")]).await.remove(0).id;
    h.clock().advance(90 * DAY + MILLI);
    assert!(h.requests().replay_request(id).await.expect("replay_request must succeed"));
    purge(&h, 90 * DAY, 100).await;
    assert_eq!(reported_one(&h, done(&claim_one(&h).await)).await, Ok(Status::Completed));
    assert_eq!(purge(&h, 90 * DAY, 100).await, 1);
    assert_eq!(h.requests().find_request(id).await.expect("an answer"), None);
}

pub async fn the_books_follow_every_step<H: HasRequests>() {
    let h = H::open().await;
    let mut expected = RequestAudit::default();
    assert_eq!(books(&h).await, expected);
    accepted(&h, wishes(&h, "k", 8)).await;
    submitted(&h, vec![wish(&h, "k-0"), wish_for(&h, TENANT, "k-1", "else")], None).await;
    (expected.accepted, expected.in_flight, expected.jobs) = (8, 8, 8);
    assert_eq!(books(&h).await, expected, "submissions");
    let jobs = claim(&h, 7).await;
    assert_eq!(books(&h).await, expected, "a claim");
    reported(&h, vec![taken_over(&jobs[0]), broken(&jobs[1]), put_back(&jobs[2], Duration::ZERO)]).await;
    assert_eq!(books(&h).await, expected, "reports that put off");
    reported(&h, vec![done(&jobs[3]), rejected(&jobs[4]), done(&jobs[3])]).await;
    (expected.completed, expected.failed, expected.in_flight, expected.jobs) = (1, 1, 6, 6);
    assert_eq!(books(&h).await, expected, "reports that end");
    called_back(&h, jobs[0].id, calls_back(Callback::Completed)).await;
    (expected.completed, expected.in_flight, expected.jobs) = (2, 5, 5);
    assert_eq!(books(&h).await, expected, "a callback");
    let vain = vec![broken(&jobs[5]), broken(&jobs[6])];
    h.requests().report_batch(vain, &hasty()).await.expect("report_batch must succeed");
    (expected.dead, expected.in_flight, expected.jobs) = (2, 3, 3);
    assert_eq!(books(&h).await, expected, "dead letters");
    h.requests().discard_request(jobs[5].id).await.expect("discard_request must succeed");
    assert_eq!(books(&h).await, expected, "a discarded one stays in the books");
    h.requests().replay_request(jobs[6].id).await.expect("replay_request must succeed");
    (expected.dead, expected.in_flight, expected.jobs) = (1, 4, 4);
    assert_eq!(books(&h).await, expected, "a replay");
    for _ in 0..policy().max_attempts.get() {
        claim(&h, 10).await;
        h.clock().advance(policy().lease);
    }
    assert_eq!(claimed(&h, 10).await.exhausted.len(), 4);
    (expected.dead, expected.in_flight, expected.jobs) = (5, 0, 0);
    assert_eq!(books(&h).await, expected, "lost workers");
    purge(&h, Duration::ZERO, 5).await;
    let counted = books(&h).await;
    assert_eq!((counted.accepted, counted.purged), (8, 5), "a purge");
    assert_eq!(counted.completed + counted.failed + counted.dead, 3);
}
