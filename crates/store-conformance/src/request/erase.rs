//! Erasing all data of a tenant.

use std::time::Duration;

use weir_core::request::state::{Callback, TransitionError};
use weir_store::request::{CallbackOutcome, CancelOutcome, Request, Submit, WEBHOOKS_TOPIC};

use super::fixtures::{
    DAY, TENANT, URL, accept_batch, accept_one, call_back, callback_report, cancel, claim_named,
    create_dead_requests, dead_ids, erase, expect_nothing_due, get_request, outage, outcome_letters,
    rejection, replay_one, report_batch, report_one, request_audit, resubmission, submission, submission_for,
    submissions, submit_and_claim, submit_batch, success, tenant, webhooks,
};
use crate::HasRequests;
use crate::fixtures::VISIBILITY;

async fn find<H: HasRequests>(h: &H, id: weir_core::RequestId) -> Option<Request> {
    h.requests().find_request(id).await.expect("find_request must succeed")
}

pub async fn an_erasure_leaves_nothing_of_a_tenant_and_all_of_the_others<H: HasRequests>() {
    let h = H::open().await;
    let waiting = submissions(&h, "waiting", 12);
    let mut ids: Vec<_> = accept_batch(&h, waiting.clone()).await.iter().map(|receipt| receipt.id).collect();
    ids.push(accept_one(&h, Submit { needs_broker: true, ..submission(&h, "pending") }).await);
    let jobs =
        [submit_and_claim(&h, submission(&h, "x")).await, submit_and_claim(&h, submission(&h, "y")).await];
    report_batch(&h, vec![success(&jobs[0]), rejection(&jobs[1])]).await;
    ids.extend(jobs.iter().map(|job| job.id));
    ids.extend(create_dead_requests(&h, submissions(&h, "dead", 4)).await.iter().map(|job| job.id));
    let cancelled = accept_one(&h, submission(&h, "cancelled")).await;
    assert_eq!(cancel(&h, cancelled).await, CancelOutcome::Cancelled);
    ids.push(cancelled);
    let kept = submission_for(&h, "other", "k", "what");
    accept_one(&h, kept.clone()).await;
    let dead_of_other =
        create_dead_requests(&h, vec![submission_for(&h, "other", "d", "what")]).await.remove(0);

    let counted = h.requests().begin_erasure(&tenant(TENANT), 7).await.expect("begin_erasure must succeed");
    assert_eq!(counted, 7, "counting is bounded");
    let mut erased = erase(&h, &tenant(TENANT)).await;
    erased.sort_unstable();
    ids.sort_unstable();
    assert_eq!(erased, ids);
    for id in &ids {
        assert_eq!(find(&h, *id).await, None);
    }
    assert_eq!(dead_ids(&h).await, [dead_of_other.id]);
    assert!(h.requests().pending_requests(Duration::ZERO, 10).await.expect("an answer").is_empty());
    assert!(claim_named(&h, &ids).await.jobs.is_empty());
    let books = request_audit(&h).await;
    assert_eq!((books.accepted, books.erased, books.purged), (22, 20, 0), "{books:?}");
    assert_eq!((books.in_flight, books.dead), (1, 1), "{books:?}");
    assert_eq!(outcome_letters(&submit_batch(&h, vec![resubmission(&h, &kept)], None).await), "R");
    h.clock().advance(DAY * 2);
    let purged = h.requests().purge_requests(DAY * 90, 1_000).await.expect("purge_requests must succeed");
    assert_eq!(purged, 2, "no keys are left but the other tenant's");
    let again: Vec<Submit> = waiting.iter().map(|sent| resubmission(&h, sent)).collect();
    assert_eq!(outcome_letters(&submit_batch(&h, again, None).await), "A".repeat(12));
}

pub async fn a_worker_that_is_calling_an_erased_request_loses_it<H: HasRequests>() {
    let h = H::open().await;
    let job =
        submit_and_claim(&h, Submit { callback_url: Some(URL.to_owned()), ..submission(&h, "k") }).await;
    assert_eq!(erase(&h, &tenant(TENANT)).await, [job.id]);
    for report in [success(&job), outage(&job), rejection(&job)] {
        assert_eq!(report_one(&h, report).await, Err(TransitionError::LeaseLost));
    }
    assert_eq!(call_back(&h, job.id, callback_report(Callback::Completed)).await, CallbackOutcome::Unknown);
    assert_eq!(cancel(&h, job.id).await, CancelOutcome::Unknown);
    assert!(!replay_one(&*h.requests(), job.id).await);
    expect_nothing_due(&h, "it is erased").await;
    assert_eq!((find(&h, job.id).await, webhooks(&h).await), (None, vec![]));
    request_audit(&h).await;
}

pub async fn what_is_submitted_after_an_erasure_began_stays<H: HasRequests>() {
    let h = H::open().await;
    let before = accept_one(&h, submission(&h, "a")).await;
    h.requests().begin_erasure(&tenant(TENANT), 10).await.expect("begin_erasure must succeed");
    h.clock().advance(Duration::from_secs(1));
    let later = submission(&h, "b");
    let after = accept_one(&h, later.clone()).await;
    while h.requests().erase_some(10, 0).await.expect("erase_some must succeed").is_some() {}
    assert_eq!((find(&h, before).await, get_request(&h, after).await.id), (None, after));
    assert_eq!(outcome_letters(&submit_batch(&h, vec![resubmission(&h, &later)], None).await), "R");
    assert_eq!(h.requests().erase_some(10, 0).await.expect("erase_some must succeed"), None, "it has ended");
    assert_eq!(erase(&h, &tenant(TENANT)).await, [after], "it can begin again");
}

pub async fn an_erasure_says_at_its_end_how_many_requests_it_erased<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(h.requests().erase_some(10, 0).await.expect("erase_some must succeed"), None);
    accept_batch(&h, submissions(&h, "k", 5)).await;
    for name in [TENANT, "nobody"] {
        h.requests().begin_erasure(&tenant(name), 10).await.expect("begin_erasure must succeed");
        h.clock().advance(Duration::from_secs(1));
    }
    let mut totals = Vec::new();
    while let Some(batch) = h.requests().erase_some(2, 0).await.expect("erase_some must succeed") {
        totals.extend(batch.total.map(|total| (batch.tenant.to_string(), total)));
    }
    assert_eq!(
        totals,
        [(TENANT.to_owned(), 5), ("nobody".to_owned(), 0)],
        "the first begun is the first done"
    );
}

pub async fn an_erasure_can_be_passed_over<H: HasRequests>() {
    let h = H::open().await;
    for name in ["first", "second", "third"] {
        accept_one(&h, submission_for(&h, name, "k", "what")).await;
        h.requests().begin_erasure(&tenant(name), 10).await.expect("begin_erasure must succeed");
        h.clock().advance(Duration::from_secs(1));
    }
    let requests = h.requests();
    let erase_some =
        async |passed_over| requests.erase_some(10, passed_over).await.expect("erase_some must succeed");
    assert_eq!(erase_some(3).await, None);
    let mut ended = Vec::new();
    for passed_over in [1, 1, 0] {
        loop {
            let batch = erase_some(passed_over).await.expect("there are others");
            if batch.total.is_some() {
                ended.push(batch.tenant.to_string());
                break;
            }
        }
    }
    assert_eq!(ended, ["second", "third", "first"]);
}

pub async fn dead_webhooks_of_erased_requests_are_discarded<H: HasRequests>() {
    let h = H::open().await;
    let with_webhook = |tenant: &str| Submit {
        callback_url: Some(URL.to_owned()),
        ..submission_for(&h, tenant, "k", "what")
    };
    for tenant in [TENANT, "other"] {
        let job = submit_and_claim(&h, with_webhook(tenant)).await;
        report_one(&h, success(&job)).await.expect("the report is accepted");
    }
    let queue = h.queue();
    let mut dead = 0;
    while dead < 2 {
        let claim = queue.claim(WEBHOOKS_TOPIC, 10, VISIBILITY).await.expect("claim must succeed");
        let positions = claim.messages.iter().map(|message| (message.position, "gone".to_owned()));
        let settlement = weir_queue::Settlement { dead: positions.collect(), ..Default::default() };
        dead += claim.messages.len();
        queue.settle(&claim.receipt, settlement).await.expect("settle must succeed");
    }
    erase(&h, &tenant(TENANT)).await;
    let books = queue.audit(WEBHOOKS_TOPIC).await.expect("audit must succeed");
    assert_eq!((books.difference(), books.dead, books.discarded), (0, 1, 1), "{books:?}");
}
