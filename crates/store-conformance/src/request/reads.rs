//! Finding and listing requests.

use std::time::Duration;

use weir_core::request::state::RequestStatus;
use weir_core::{RequestId, RequestType, Timestamp};
use weir_store::request::{
    LIST_SCAN_MAX, Request, RequestFilter, RequestPage, Sealed, Submit, UnfinishedRequest,
};

use super::fixtures::{
    DOWNSTREAM, TENANT, URL, accept_batch, accept_one, create_dead_requests, get_request, next_id, now,
    rejection, report_batch, report_one, submission, submission_for, submissions, submit_and_claim, success,
    tenant,
};
use crate::HasRequests;

/// The ids of a page of [`TENANT`]'s requests.
async fn page<H: HasRequests>(
    h: &H,
    status: Option<RequestStatus>,
    before: Option<RequestId>,
    limit: usize,
) -> Vec<RequestId> {
    let listed =
        h.requests().list_requests(&RequestFilter::of_tenant(&tenant(TENANT), status), before, limit).await;
    let RequestPage { requests, next_before } = listed.expect("list_requests must succeed");
    assert_eq!(next_before, None, "so few requests are read in one pass");
    requests.iter().map(|request| request.id).collect()
}

/// Accepts requests a second apart. Returns their ids, the newest first.
async fn accept_spaced<H: HasRequests>(h: &H, count: usize) -> Vec<RequestId> {
    let mut ids = Vec::new();
    for n in 0..count {
        ids.insert(0, accept_one(h, submission(h, &format!("k{n}"))).await);
        h.clock().advance(Duration::from_secs(1));
    }
    ids
}

pub async fn an_unknown_request_is_none<H: HasRequests>() {
    let h = H::open().await;
    accept_one(&h, submission(&h, "k")).await;
    assert_eq!(h.requests().find_request(next_id(&h)).await.expect("an answer"), None);
}

pub async fn requests_are_listed_the_newest_first<H: HasRequests>() {
    let h = H::open().await;
    let ids = accept_spaced(&h, 4).await;
    assert_eq!(page(&h, None, None, 10).await, ids);
    let mut batch: Vec<_> =
        accept_batch(&h, submissions(&h, "b", 3)).await.iter().map(|receipt| receipt.id).collect();
    batch.reverse();
    assert_eq!(page(&h, None, None, 3).await, batch, "also within one batch");
}

pub async fn a_listed_request_equals_the_found_one<H: HasRequests>() {
    let h = H::open().await;
    let job = submit_and_claim(&h, submission(&h, "k")).await;
    report_batch(&h, vec![success(&job)]).await;
    create_dead_requests(&h, vec![submission(&h, "l")]).await;
    let listed = h
        .requests()
        .list_requests(&RequestFilter::of_tenant(&tenant(TENANT), None), None, 10)
        .await
        .expect("an answer");
    assert_eq!(listed.requests.len(), 2);
    for request in listed.requests {
        let found = get_request(&h, request.id).await;
        let payload = Sealed { bytes: Vec::new(), ..found.payload.clone() };
        assert_eq!(
            Request { payload, result: None, ..found },
            request,
            "equal except for payload and result"
        );
    }
}

pub async fn summaries_by_id_leave_out_payload_and_result<H: HasRequests>() {
    let h = H::open().await;
    let summaries = async |ids: &[RequestId]| {
        let mut found = h.requests().find_summaries(ids).await.expect("find_summaries must succeed");
        found.sort_by_key(|request| request.id);
        found
    };
    assert_eq!(summaries(&[]).await, []);
    let job =
        submit_and_claim(&h, Submit { callback_url: Some(URL.to_owned()), ..submission(&h, "a") }).await;
    report_one(&h, success(&job)).await.expect("the report is accepted");
    let other = accept_one(&h, submission_for(&h, "rival", "b", "b")).await;
    let expected = async |id| {
        let request = get_request(&h, id).await;
        let payload = Sealed { bytes: Vec::new(), ..request.payload.clone() };
        Request { payload, result: None, ..request }
    };
    assert_eq!(
        summaries(&[other, next_id(&h), job.id]).await,
        [expected(job.id).await, expected(other).await]
    );
}

pub async fn lists_are_read_page_by_page<H: HasRequests>() {
    let h = H::open().await;
    let ids = accept_spaced(&h, 7).await;
    let (mut read, mut before) = (Vec::new(), None);
    loop {
        let ids = page(&h, None, before, 3).await;
        let Some(last) = ids.last() else { break };
        before = Some(*last);
        read.extend(ids);
        // Requests accepted in between are newer than all following pages.
        accept_one(&h, submission(&h, &format!("meanwhile {}", read.len()))).await;
    }
    assert_eq!(read, ids);
    assert_eq!(page(&h, None, Some(ids[6]), 3).await, [], "nothing is older than the oldest");
    assert_eq!(page(&h, None, None, 0).await, []);
    assert_eq!(page(&h, None, None, usize::MAX).await.len(), 10, "any limit is allowed");
}

pub async fn lists_can_be_filtered_by_status<H: HasRequests>() {
    let h = H::open().await;
    let waiting = accept_one(&h, submission(&h, "a")).await;
    let pending = weir_store::request::Submit { needs_broker: true, ..submission(&h, "b") };
    let pending = accept_one(&h, pending).await;
    let begun_one = submit_and_claim(&h, submission(&h, "c")).await;
    let completed =
        [submit_and_claim(&h, submission(&h, "d")).await, submit_and_claim(&h, submission(&h, "e")).await];
    let failed = submit_and_claim(&h, submission(&h, "f")).await;
    report_batch(&h, vec![success(&completed[0]), success(&completed[1]), rejection(&failed)]).await;
    let exhausted = create_dead_requests(&h, vec![submission(&h, "g")]).await.remove(0);
    let page_of = |status| page(&h, Some(status), None, 10);
    assert_eq!(page_of(RequestStatus::Accepted).await, [waiting]);
    assert_eq!(page_of(RequestStatus::PendingEnqueue).await, [pending]);
    assert_eq!(page_of(RequestStatus::InProgress).await, [begun_one.id]);
    assert_eq!(page_of(RequestStatus::Completed).await, [completed[1].id, completed[0].id]);
    assert_eq!(page_of(RequestStatus::FailedPermanent).await, [failed.id]);
    assert_eq!(page_of(RequestStatus::FailedRetryExhausted).await, [exhausted.id]);
    assert_eq!(page(&h, Some(RequestStatus::Completed), None, 1).await, [completed[1].id]);
    let rest = page(&h, Some(RequestStatus::Completed), Some(completed[1].id), 1).await;
    assert_eq!(rest, [completed[0].id], "filtered lists have pages too");
}

pub async fn a_list_of_a_rare_status_is_bounded_and_says_where_to_continue<H: HasRequests>() {
    let h = H::open().await;
    let rare = submit_and_claim(&h, submission(&h, "rare")).await;
    report_batch(&h, vec![success(&rare)]).await;
    h.clock().advance(Duration::from_secs(1));
    let mut others = Vec::new();
    for n in 0..LIST_SCAN_MAX / 500 {
        let batch = accept_batch(&h, submissions(&h, &format!("{n} "), 500)).await;
        others.extend(batch.iter().map(|receipt| receipt.id));
    }
    others.sort_unstable();
    let list = async |status, before| {
        let listed = h
            .requests()
            .list_requests(&RequestFilter::of_tenant(&tenant(TENANT), Some(status)), before, 5)
            .await;
        let RequestPage { requests, next_before } = listed.expect("list_requests must succeed");
        (requests.iter().map(|request| request.id).collect::<Vec<_>>(), next_before)
    };
    assert_eq!(
        list(RequestStatus::Completed, None).await,
        (vec![], Some(others[0])),
        "none among the requests read"
    );
    assert_eq!(
        list(RequestStatus::Completed, Some(others[0])).await,
        (vec![rare.id], None),
        "the next pass finds it"
    );
    let newest = others.last().copied();
    assert_eq!(
        list(RequestStatus::Completed, newest).await,
        (vec![rare.id], Some(rare.id)),
        "the last request of the pass"
    );
    let newest: Vec<_> = others.iter().rev().take(5).copied().collect();
    assert_eq!(list(RequestStatus::Accepted, None).await, (newest, None), "a full page");
}

pub async fn tenants_see_their_own_requests_only<H: HasRequests>() {
    let h = H::open().await;
    let of_tenant = |tenant: &str, key: &str| submission_for(&h, tenant, key, key);
    let batch = vec![
        of_tenant("acme", "1"),
        of_tenant("globex", "1"),
        of_tenant("Acme", "1"),
        of_tenant("acme%", "1"),
        of_tenant("globex", "2"),
    ];
    let ids: Vec<_> = accept_batch(&h, batch).await.iter().map(|receipt| receipt.id).collect();
    let list = async |name: &str| -> Vec<RequestId> {
        let listed =
            h.requests().list_requests(&RequestFilter::of_tenant(&tenant(name), None), None, 10).await;
        listed.expect("list_requests must succeed").requests.iter().map(|request| request.id).collect()
    };
    assert_eq!(list("acme").await, [ids[0]]);
    assert_eq!(list("globex").await, [ids[4], ids[1]]);
    assert_eq!(list("Acme").await, [ids[2]]);
    assert_eq!(list("acme%").await, [ids[3]]);
    assert_eq!(list("nobody").await, []);
}

pub async fn a_list_of_every_tenant_can_be_filtered_by_type<H: HasRequests>() {
    let h = H::open().await;
    let payout = RequestType::parse("payout").expect("a valid type");
    let batch = vec![
        submission_for(&h, "acme", "1", "1"),
        Submit { request_type: payout.clone(), ..submission_for(&h, "globex", "1", "1") },
        Submit { request_type: payout.clone(), ..submission_for(&h, "acme", "2", "2") },
    ];
    let ids: Vec<_> = accept_batch(&h, batch).await.iter().map(|receipt| receipt.id).collect();
    let list = async |filter: RequestFilter, before, limit| -> Vec<RequestId> {
        let listed = h.requests().list_requests(&filter, before, limit).await;
        listed.expect("list_requests must succeed").requests.iter().map(|request| request.id).collect()
    };
    let (all, of_type) = (
        RequestFilter::default(),
        RequestFilter { request_type: Some(payout.clone()), ..RequestFilter::default() },
    );
    assert_eq!(list(all.clone(), None, 10).await, [ids[2], ids[1], ids[0]], "of every tenant");
    assert_eq!(list(all, Some(ids[2]), 1).await, [ids[1]], "in pages");
    assert_eq!(list(of_type, None, 10).await, [ids[2], ids[1]]);
    let of_both =
        RequestFilter { request_type: Some(payout), ..RequestFilter::of_tenant(&tenant("acme"), None) };
    assert_eq!(list(of_both, None, 10).await, [ids[2]]);
    let done = RequestFilter { status: Some(RequestStatus::Completed), ..RequestFilter::default() };
    assert_eq!(list(done, None, 10).await, []);
}

pub async fn unfinished_requests_come_with_their_jobs_the_longest_due_first<H: HasRequests>() {
    let h = H::open().await;
    let unfinished = async |downstream: &str, limit| -> Vec<UnfinishedRequest> {
        h.requests().unfinished_requests(downstream, limit).await.expect("unfinished_requests must succeed")
    };
    assert_eq!(unfinished(DOWNSTREAM, 10).await, []);
    let done = submit_and_claim(&h, submission(&h, "done")).await;
    report_batch(&h, vec![success(&done)]).await;
    let claimed = submit_and_claim(&h, submission(&h, "claimed")).await;
    let first = accept_one(&h, submission(&h, "first")).await;
    let due: Timestamp = now(&h);
    h.clock().advance(Duration::from_secs(1));
    let second = accept_one(&h, submission_for(&h, "rival", "second", "second")).await;
    let found = unfinished(DOWNSTREAM, 10).await;
    let ids: Vec<_> = found.iter().map(|one| (one.request.id, one.is_leased)).collect();
    assert_eq!(ids, [(first, false), (second, false), (claimed.id, true)], "the lease ends last");
    assert_eq!(found[0].claimable_at, due);
    assert!(found[2].claimable_at > found[1].claimable_at);
    let summary = get_request(&h, first).await;
    let payload = Sealed { bytes: Vec::new(), ..summary.payload.clone() };
    assert_eq!(found[0].request, Request { payload, result: None, ..summary });
    assert_eq!(unfinished(DOWNSTREAM, 1).await.len(), 1);
    assert_eq!(unfinished("another", 10).await, []);
}
