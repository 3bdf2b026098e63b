//! Dead letters: listing, replaying and discarding them.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_core::RequestId;
use weir_core::request::state::{RequestStatus, TransitionError};
use weir_store::request::{Request, Sealed};

use super::fixtures::{
    accept_one, claim, claim_one, create_dead_requests, dead_ids, dead_requests, expect_nothing_due,
    get_request, next_id, now, outage, outcome_letters, policy, rejection, replay_one, report_batch,
    report_one, request_audit, resubmission, single_attempt_policy, status, submission, submissions,
    submit_and_claim, submit_batch, success,
};
use crate::HasRequests;

async fn replay<H: HasRequests>(h: &H, id: RequestId) -> bool {
    replay_one(&*h.requests(), id).await
}

async fn replay_some<H: HasRequests>(h: &H, limit: usize) -> Vec<RequestId> {
    super::fixtures::replay_some(&*h.requests(), limit).await
}

async fn discard<H: HasRequests>(h: &H, id: RequestId) -> bool {
    h.requests().discard_request(id).await.expect("discard_request must succeed")
}

async fn count<H: HasRequests>(h: &H) -> u64 {
    h.requests().count_dead_requests().await.expect("count_dead_requests must succeed")
}

/// Creates `count` dead letters. Returns their ids in order.
async fn create_dead_letters<H: HasRequests>(h: &H, count: usize) -> Vec<RequestId> {
    create_dead_requests(h, submissions(h, "dead", count)).await;
    let ids = dead_ids(h).await;
    assert_eq!(ids.len(), count);
    ids
}

pub async fn a_dead_letter_is_the_request_and_when_it_died<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    h.clock().advance(Duration::from_secs(3));
    let outcomes = h.requests().report_batch(vec![outage(&job)], &single_attempt_policy()).await;
    assert_eq!(outcomes.expect("report_batch must succeed"), [Ok(RequestStatus::FailedRetryExhausted)]);
    let died_at = now(&h);
    h.clock().advance(Duration::from_secs(60));
    let letter = dead_requests(&h, None, 10).await.remove(0);
    assert_eq!(letter.died_at, died_at);
    assert_eq!(letter.request, get_request(&h, job.id).await);
    assert_eq!(count(&h).await, 1);
}

pub async fn a_payload_that_is_too_long_for_a_list_is_left_out<H: HasRequests>() {
    let h = H::open().await;
    let job = create_dead_requests(&h, vec![submission(&h, "0123456789")]).await.remove(0);
    for (max, is_shown) in [(0, false), (9, false), (10, true), (usize::MAX, true)] {
        let letter =
            h.requests().dead_requests(None, 10, max).await.expect("dead_requests must succeed").remove(0);
        let whole = get_request(&h, job.id).await;
        let bytes = if is_shown { whole.payload.bytes.clone() } else { Vec::new() };
        let payload = Sealed { bytes, ..whole.payload.clone() };
        assert_eq!(letter.request, Request { payload, ..whole }, "{max} bytes");
    }
}

pub async fn dead_letters_are_read_page_by_page<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!((dead_ids(&h).await, count(&h).await), (vec![], 0));
    create_dead_requests(&h, submissions(&h, "a", 4)).await;
    h.clock().advance(Duration::from_secs(1));
    create_dead_requests(&h, submissions(&h, "b", 3)).await;
    let all = dead_ids(&h).await;
    assert!(all.is_sorted(), "in order of id");
    assert_eq!((all.len(), count(&h).await), (7, 7));
    let (mut read, mut after) = (Vec::new(), None);
    loop {
        let page = dead_requests(&h, after, 3).await;
        let Some(last) = page.last() else { break };
        after = Some(last.request.id);
        read.extend(page.iter().map(|letter| letter.request.id));
        // A discarded letter is still a valid cursor.
        assert!(discard(&h, last.request.id).await);
    }
    assert_eq!(read, all);
    assert!(dead_requests(&h, None, 0).await.is_empty());
}

pub async fn a_replayed_letter_starts_again_with_all_its_attempts<H: HasRequests>() {
    let h = H::open().await;
    let dead = create_dead_requests(&h, vec![submission(&h, "k")]).await.remove(0);
    h.clock().advance(Duration::from_secs(60));
    assert!(replay(&h, dead.id).await);
    let request = get_request(&h, dead.id).await;
    assert_eq!((request.status, request.attempts), (RequestStatus::Accepted, 0));
    assert_eq!((request.failure, request.updated_at), (None, now(&h)));
    assert_eq!((dead_ids(&h).await, count(&h).await), (vec![], 0));
    assert_eq!(request_audit(&h).await.in_flight, 1);
    for attempt in 1..=policy().max_attempts.get() {
        let job = claim_one(&h).await;
        assert_eq!((job.id, job.attempt), (dead.id, attempt));
        assert_eq!((&job.payload, &job.downstream), (&dead.payload, &dead.downstream));
        assert_eq!(job.accepted_at, dead.accepted_at);
        report_one(&h, outage(&job)).await.expect("the report is accepted");
        h.clock().advance(Duration::from_secs(10));
    }
    assert_eq!(dead_ids(&h).await, [dead.id], "it can become a dead letter again");
    assert!(replay(&h, dead.id).await, "it can be replayed again");
    assert_eq!(report_one(&h, success(&claim_one(&h).await)).await, Ok(RequestStatus::Completed));
    assert_eq!(request_audit(&h).await.completed, 1);
}

pub async fn a_worker_from_before_a_replay_stays_fenced_off<H: HasRequests>() {
    let h = H::open().await;
    let mut late = create_dead_requests(&h, vec![submission(&h, "k")]).await;
    for _ in 0..3 {
        let id = late[0].id;
        assert!(replay(&h, id).await);
        for worker in &late {
            assert_eq!(
                report_one(&h, success(worker)).await,
                Err(TransitionError::LeaseLost),
                "no worker holds it"
            );
        }
        let job = claim_one(&h).await;
        assert!(late.iter().all(|worker| worker.token < job.token), "tokens only grow");
        for worker in &late {
            assert_eq!(
                report_one(&h, success(worker)).await,
                Err(TransitionError::LeaseLost),
                "another worker holds it"
            );
        }
        let given_up = h.requests().report_batch(vec![outage(&job)], &single_attempt_policy()).await;
        assert_eq!(given_up.expect("report_batch must succeed"), [Ok(RequestStatus::FailedRetryExhausted)]);
        late.push(job);
    }
    request_audit(&h).await;
}

pub async fn only_dead_letters_are_replayed_or_discarded<H: HasRequests>() {
    let h = H::open().await;
    let waiting = accept_one(&h, submission(&h, "a")).await;
    let begun_one = submit_and_claim(&h, submission(&h, "b")).await.id;
    let ended = submit_and_claim(&h, submission(&h, "c")).await;
    let refused = submit_and_claim(&h, submission(&h, "d")).await;
    report_batch(&h, vec![success(&ended), rejection(&refused)]).await;
    for id in [waiting, begun_one, ended.id, refused.id, next_id(&h)] {
        let before = h.requests().find_request(id).await.expect("an answer");
        assert!(!replay(&h, id).await);
        assert!(!discard(&h, id).await);
        assert_eq!(h.requests().find_request(id).await.expect("an answer"), before);
    }
    assert_eq!(replay_some(&h, 10).await, []);
    request_audit(&h).await;
}

pub async fn a_letter_is_replayed_once<H: HasRequests>() {
    let h = H::open().await;
    let id = create_dead_letters(&h, 1).await[0];
    assert!(replay(&h, id).await);
    assert!(!replay(&h, id).await);
    assert!(!discard(&h, id).await);
    assert_eq!(claim(&h, 10).await.len(), 1, "it has one job");
}

pub async fn several_letters_are_replayed_in_one_call<H: HasRequests>() {
    let h = H::open().await;
    let ids: BTreeSet<_> = create_dead_letters(&h, 7).await.into_iter().collect();
    assert_eq!(replay_some(&h, 0).await, []);
    let first: BTreeSet<_> = replay_some(&h, 3).await.into_iter().collect();
    assert_eq!((first.len(), count(&h).await), (3, 4));
    assert!(first.is_subset(&ids));
    let rest: BTreeSet<_> = replay_some(&h, usize::MAX).await.into_iter().collect();
    assert_eq!((first.len() + rest.len(), &first | &rest), (7, ids.clone()), "each letter is replayed once");
    assert_eq!(replay_some(&h, 10).await, []);
    let jobs = claim(&h, 10).await;
    assert!(jobs.iter().all(|job| job.attempt == 1 && job.token == 2), "{jobs:?}");
    assert_eq!(jobs.iter().map(|job| job.id).collect::<BTreeSet<_>>(), ids);
    request_audit(&h).await;
}

pub async fn a_discarded_letter_is_off_the_list_and_stays_failed<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    create_dead_requests(&h, vec![sent.clone(), submission(&h, "l")]).await;
    let before = get_request(&h, sent.id).await;
    h.clock().advance(Duration::from_secs(1));
    assert!(discard(&h, sent.id).await);
    assert!(!discard(&h, sent.id).await);
    assert!(!replay(&h, sent.id).await, "a discarded letter cannot be replayed");
    assert_eq!((dead_ids(&h).await.len(), count(&h).await), (1, 1));
    assert_eq!(status(&h, sent.id).await, RequestStatus::FailedRetryExhausted);
    assert_eq!(get_request(&h, sent.id).await, before);
    assert_eq!(outcome_letters(&submit_batch(&h, vec![resubmission(&h, &sent)], None).await), "R");
    expect_nothing_due(&h, "a discarded letter stays failed").await;
    assert_eq!(request_audit(&h).await.dead, 2, "the books still count it");
}
