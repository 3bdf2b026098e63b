//! Which jobs a claim returns.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_core::RequestId;
use weir_core::request::state::RequestStatus;
use weir_store::request::{
    CLAIM_BYTES_MAX, ClaimOrder, ClaimedJobs, DownstreamCapacity, Job, JobCounts, Sealed, Submit,
};

use super::fixtures::{
    DOWNSTREAM, accept_batch, accept_one, claim, claim_jobs, claim_named, claim_one, create_dead_requests,
    expect_nothing_due, get_request, next_id, not_called, now, outage, policy, report_batch, report_one,
    room, submission, submissions, submit_and_claim, success,
};
use crate::HasRequests;
use crate::fixtures::awkward_user_ids;

fn ids<'a>(jobs: impl IntoIterator<Item = &'a Job>) -> Vec<RequestId> {
    jobs.into_iter().map(|job| job.id).collect()
}

async fn claim_of<H: HasRequests>(h: &H, room: &[DownstreamCapacity]) -> ClaimedJobs {
    h.requests().claim_jobs(room, &ClaimOrder::default(), &policy()).await.expect("claim_jobs must succeed")
}

async fn downstreams<H: HasRequests>(h: &H) -> Vec<String> {
    let mut names = h.requests().job_downstreams().await.expect("job_downstreams must succeed");
    names.sort_unstable();
    names
}

fn to(downstream: &str, submit: Submit) -> Submit {
    Submit { downstream: downstream.to_owned(), ..submit }
}

pub async fn a_claim_returns_no_more_bytes_than_the_maximum<H: HasRequests>() {
    let h = H::open().await;
    let large = |key| {
        let submission = submission(&h, key);
        let payload = Sealed { bytes: vec![7; CLAIM_BYTES_MAX / 2], ..submission.payload.clone() };
        Submit { payload, ..submission }
    };
    let (sent, huge) = ([large("a"), large("b"), large("c")], large("d"));
    accept_batch(&h, sent.to_vec()).await;
    assert_eq!(ids(&claim(&h, 10).await), [sent[0].id, sent[1].id]);
    assert_eq!(ids(&claim(&h, 10).await), [sent[2].id], "the next claim gets the rest");
    let huge =
        Submit { payload: Sealed { bytes: vec![7; CLAIM_BYTES_MAX + 1], ..huge.payload.clone() }, ..huge };
    accept_one(&h, huge.clone()).await;
    assert_eq!(ids(&claim(&h, 10).await), [huge.id], "a claim returns at least one job, however large");
}

pub async fn a_job_is_the_request_as_it_was_sent<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    accept_one(&h, sent.clone()).await;
    let accepted_at = now(&h);
    h.clock().advance(Duration::from_secs(5));
    let job = claim_one(&h).await;
    let expected = Job {
        id: sent.id,
        tenant: sent.tenant,
        request_type: sent.request_type,
        downstream: sent.downstream,
        payload: sent.payload,
        token: job.token,
        attempt: 1,
        trace: sent.trace,
        accepted_at,
    };
    assert_eq!(job, expected);
    let request = get_request(&h, sent.id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::InProgress, 1));
    assert_eq!((request.accepted_at, request.updated_at), (accepted_at, now(&h)));
}

pub async fn jobs_come_in_the_order_in_which_they_became_due<H: HasRequests>() {
    let h = H::open().await;
    let mut expected = Vec::new();
    for n in 0..6 {
        expected.push(accept_one(&h, submission(&h, &format!("k{n}"))).await);
        h.clock().advance(Duration::from_secs(1));
    }
    // The first job is claimed, not called, and due again after the others.
    let first = claim(&h, 1).await;
    assert_eq!(ids(&first), expected[..1]);
    assert_eq!(report_one(&h, not_called(&first[0], Duration::ZERO)).await, Ok(RequestStatus::InProgress));
    h.clock().advance(Duration::from_secs(1));
    expected.rotate_left(1);
    assert_eq!(ids(&claim(&h, 4).await), expected[..4]);
    assert_eq!(ids(&claim(&h, 4).await), expected[4..]);
    expect_nothing_due(&h, "all are leased").await;
}

pub async fn a_deferred_job_comes_before_jobs_due_later<H: HasRequests>() {
    let h = H::open().await;
    let early = submit_and_claim(&h, submission(&h, "early")).await;
    report_one(&h, not_called(&early, Duration::from_secs(2))).await.expect("the report is accepted");
    h.clock().advance(Duration::from_secs(3));
    let late = accept_one(&h, submission(&h, "late")).await;
    assert_eq!(ids(&claim(&h, 2).await), [early.id, late], "the job due for longest comes first");
}

pub async fn each_downstream_has_its_own_capacity<H: HasRequests>() {
    let h = H::open().await;
    for (downstream, count) in [("a", 5), ("b", 3), ("c", 2)] {
        accept_batch(
            &h,
            submissions(&h, downstream, count)
                .into_iter()
                .map(|submission| to(downstream, submission))
                .collect(),
        )
        .await;
    }
    let count =
        |claimed: &ClaimedJobs, of: &str| claimed.jobs.iter().filter(|job| job.downstream == of).count();
    let claimed = claim_of(&h, &[room("a", 2), room("b", 10), room("nobody", 10)]).await;
    assert_eq!((count(&claimed, "a"), count(&claimed, "b"), claimed.jobs.len()), (2, 3, 5));
    let claimed = claim_of(&h, &[room("c", 1), room("b", 10), room("a", 1)]).await;
    assert_eq!((count(&claimed, "a"), count(&claimed, "c"), claimed.jobs.len()), (1, 1, 2));
    let claimed = claim_of(&h, &[room("a", usize::MAX), room("c", usize::MAX)]).await;
    assert_eq!((count(&claimed, "a"), count(&claimed, "c")), (2, 1), "any capacity is allowed");
}

pub async fn without_capacity_nothing_is_claimed_or_leased<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions(&h, "k", 2)).await;
    for room in [vec![], vec![room(DOWNSTREAM, 0)], vec![room("other", 5)], vec![room("Echo", 5)]] {
        let claimed = claim_of(&h, &room).await;
        assert!(claimed.jobs.is_empty() && claimed.exhausted.is_empty(), "{room:?}: {claimed:?}");
        assert_eq!(claimed.next_due_in, None, "no job to wait for: {room:?}");
    }
    assert_eq!(claim(&h, 5).await.len(), 2);
}

pub async fn an_empty_claim_says_how_long_to_wait<H: HasRequests>() {
    let h = H::open().await;
    let waits = async |room: &[DownstreamCapacity]| claim_of(&h, room).await.next_due_in;
    assert_eq!(waits(&[room("a", 1), room("b", 1)]).await, None, "there are no jobs");
    let job = submit_and_claim(&h, to("a", submission(&h, "1"))).await;
    assert_eq!(waits(&[room("a", 1)]).await, Some(policy().lease), "the lease may expire");
    let after = Duration::from_micros(3_000_001);
    report_one(&h, not_called(&job, after)).await.expect("the report is accepted");
    h.clock().advance(Duration::from_secs(1));
    assert_eq!(waits(&[room("a", 1)]).await, Some(Duration::from_micros(2_000_001)));
    let other = submit_and_claim(&h, to("b", submission(&h, "2"))).await;
    report_one(&h, not_called(&other, Duration::from_secs(1))).await.expect("the report is accepted");
    let both = [room("a", 1), room("b", 1)];
    assert_eq!(waits(&both).await, Some(Duration::from_secs(1)), "the earliest of all downstreams");
    assert_eq!(waits(&[room("a", 1), room("b", 0)]).await, Some(Duration::from_micros(2_000_001)));
    h.clock().advance(Duration::from_secs(1));
    assert_eq!(ids(&claim_of(&h, &both).await.jobs), [other.id], "then a job is due");
}

pub async fn requests_missing_from_the_broker_can_be_claimed<H: HasRequests>() {
    let h = H::open().await;
    let pending = Submit { needs_broker: true, ..submission(&h, "k") };
    let id = accept_one(&h, pending).await;
    assert_eq!(claim_one(&h).await.id, id);
    assert_eq!(get_request(&h, id).await.status, RequestStatus::InProgress);
}

pub async fn downstreams_are_listed_once_while_jobs_wait_for_them<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(downstreams(&h).await, [""; 0]);
    let names = ["a", "b", "a", "c", "b", "a"];
    let batch = names.iter().enumerate().map(|(n, name)| to(name, submission(&h, &n.to_string()))).collect();
    accept_batch(&h, batch).await;
    assert_eq!(downstreams(&h).await, ["a", "b", "c"]);
    let jobs = claim_of(&h, &[room("a", 9), room("c", 9)]).await.jobs;
    report_batch(&h, jobs.iter().map(success).collect()).await;
    assert_eq!(downstreams(&h).await, ["b"]);
    let jobs = claim_of(&h, &[room("b", 9)]).await.jobs;
    report_batch(&h, jobs.iter().map(outage).collect()).await;
    assert_eq!(downstreams(&h).await, ["b"], "jobs between two attempts count as well");
}

pub async fn jobs_are_counted_by_downstream_and_state<H: HasRequests>() {
    let h = H::open().await;
    let asked = ["a", "b", "none"].map(str::to_owned);
    let counts = async |limit| {
        let counted = h.requests().count_jobs(&asked, limit).await.expect("count_jobs must succeed");
        assert!(counted.iter().map(|counts| &counts.downstream).eq(&asked), "in the order of the names");
        counted
            .into_iter()
            .map(|JobCounts { waiting, running, parked, oldest_waiting, .. }| {
                ([waiting, running, parked], oldest_waiting.map(|age| age.as_secs()))
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(counts(10).await, vec![([0, 0, 0], None); 3]);
    accept_batch(&h, vec![to("a", submission(&h, "first"))]).await;
    h.clock().advance(Duration::from_secs(5));
    accept_batch(&h, ["1", "2", "3"].map(|key| to("a", submission(&h, key))).to_vec()).await;
    accept_batch(&h, vec![to("b", submission(&h, "b"))]).await;
    h.clock().advance(Duration::from_secs(1));
    assert_eq!(counts(10).await, [([4, 0, 0], Some(6)), ([1, 0, 0], Some(1)), ([0, 0, 0], None)]);
    assert_eq!(counts(3).await[0], ([3, 0, 0], Some(6)), "counting stops at the limit");
    let jobs = claim_of(&h, &[room("a", 2)]).await.jobs;
    assert_eq!(counts(10).await[0], ([2, 2, 0], Some(1)));
    report_one(&h, not_called(&jobs[0], Duration::from_secs(3_600))).await.expect("the report counts");
    assert_eq!(counts(10).await[0], ([2, 1, 1], Some(1)));
    h.clock().advance(policy().lease);
    let (of_a, oldest) = counts(10).await[0];
    assert_eq!(of_a, [3, 0, 1], "a job whose lease has ended waits again");
    assert!(oldest >= Some(policy().lease.as_secs()), "{oldest:?}");
    h.clock().advance(Duration::from_secs(3_600));
    assert_eq!(counts(10).await[0].0, [4, 0, 0]);
}

pub async fn awkward_names_of_downstreams_stay_distinct<H: HasRequests>() {
    let h = H::open().await;
    let names = awkward_user_ids();
    let batch: Vec<_> = names.iter().map(|name| to(name, submission(&h, name))).collect();
    accept_batch(&h, batch.clone()).await;
    assert_eq!(downstreams(&h).await.into_iter().collect::<BTreeSet<_>>(), names.iter().cloned().collect());
    for sent in batch {
        let jobs = claim_of(&h, &[room(&sent.downstream, 9)]).await.jobs;
        assert_eq!(ids(&jobs), [sent.id], "{:?}", sent.downstream);
        assert_eq!(jobs[0].downstream, sent.downstream);
    }
}

pub async fn named_requests_are_claimed_and_no_others<H: HasRequests>() {
    let h = H::open().await;
    let receipts = accept_batch(&h, submissions(&h, "k", 5)).await;
    let named = [receipts[3].id, receipts[1].id];
    let claimed = claim_named(&h, &named).await;
    let taken: BTreeSet<_> = ids(&claimed.jobs).into_iter().collect();
    assert_eq!(taken, named.into_iter().collect());
    assert!(claimed.jobs.iter().all(|job| job.attempt == 1 && job.downstream == DOWNSTREAM));
    assert_eq!(get_request(&h, named[0]).await.status, RequestStatus::InProgress);
    let rest: BTreeSet<_> = ids(&claim(&h, 10).await).into_iter().collect();
    assert_eq!(rest, [receipts[0].id, receipts[2].id, receipts[4].id].into());
}

pub async fn a_named_request_that_cannot_be_claimed_is_left_out<H: HasRequests>() {
    let h = H::open().await;
    let taken = submit_and_claim(&h, submission(&h, "taken")).await;
    let later = submit_and_claim(&h, submission(&h, "later")).await;
    let finished = submit_and_claim(&h, submission(&h, "finished")).await;
    let after = Duration::from_secs(1);
    report_batch(&h, vec![not_called(&later, after), success(&finished)]).await;
    let dead = create_dead_requests(&h, vec![submission(&h, "dead")]).await.remove(0);
    let free = accept_one(&h, submission(&h, "free")).await;
    let named = [taken.id, later.id, finished.id, dead.id, next_id(&h), free, free];
    let claimed = claim_named(&h, &named).await;
    assert_eq!(ids(&claimed.jobs), [free], "claimed once although its id is given twice");
    assert!(claimed.exhausted.is_empty());
    assert!(claim_named(&h, &[]).await.jobs.is_empty());
    h.clock().advance(Duration::from_secs(1));
    assert_eq!(ids(&claim_named(&h, &named).await.jobs), [later.id], "once it is due");
}

pub async fn every_job_of_a_large_claim_can_be_reported<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions(&h, "k", 1_500)).await;
    let jobs = claim_jobs(&h, 1_000).await.jobs;
    assert_eq!(jobs.len(), 1_000);
    let outcomes = report_batch(&h, jobs.iter().map(success).collect()).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(RequestStatus::Completed)));
    assert_eq!(claim(&h, 1_000).await.len(), 500);
    assert_eq!(super::fixtures::request_audit(&h).await.completed, 1_000);
}
