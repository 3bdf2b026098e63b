//! Submissions: new ones, replays and conflicts.

use std::time::Duration;

use weir_core::request::canonical::Fingerprint;
use weir_core::request::state::RequestStatus;
use weir_core::{IdempotencyKey, RequestType};
use weir_store::request::{Request, RequestFilter, Sealed, Submit, SubmitOutcome, SubmitReceipt};

use super::fixtures::{
    DAY, TENANT, URL, accept_batch, accept_one, claim, claim_one, get_request, now, outcome_letters,
    report_one, request_audit, resubmission, sealed, submission, submission_for, submissions,
    submit_and_claim, submit_batch, submit_one, success, tenant,
};
use crate::HasRequests;
use crate::START;
use crate::fixtures::{TICK, awkward_user_ids};

pub async fn a_new_engine_is_empty_and_its_clock_shows_the_start<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(now(&h), START);
    assert_eq!(request_audit(&h).await.accepted, 0);
    let listed = h
        .requests()
        .list_requests(&RequestFilter::of_tenant(&tenant(TENANT), None), None, 10)
        .await
        .expect("an answer");
    assert_eq!(listed.requests, []);
}

pub async fn a_new_submission_is_accepted_and_read_back_as_it_was_sent<H: HasRequests>() {
    let h = H::open().await;
    h.clock().advance(Duration::from_micros(1_234_567));
    let sent = Submit { callback_url: Some(URL.to_owned()), ..submission(&h, "k") };
    let receipt =
        SubmitReceipt { id: sent.id, status: RequestStatus::Accepted, accepted_at: now(&h), window: None };
    assert_eq!(submit_one(&h, sent.clone()).await, SubmitOutcome::Accepted(receipt));
    let request = Request {
        id: sent.id,
        tenant: sent.tenant,
        request_type: sent.request_type,
        status: RequestStatus::Accepted,
        attempts: 0,
        payload: sent.payload,
        result: None,
        failure: None,
        callback_url: sent.callback_url,
        trace: sent.trace,
        accepted_at: now(&h),
        updated_at: now(&h),
    };
    h.clock().advance(DAY);
    assert_eq!(get_request(&h, sent.id).await, request);
    assert_eq!(request_audit(&h).await.in_flight, 1);
}

pub async fn the_same_submission_is_replayed_with_its_current_status<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    let first = accept_batch(&h, vec![sent.clone()]).await[0];
    h.clock().advance(Duration::from_secs(1));
    assert_eq!(submit_one(&h, resubmission(&h, &sent)).await, SubmitOutcome::Replayed(first));
    let job = claim_one(&h).await;
    let now_begun = SubmitReceipt { status: RequestStatus::InProgress, ..first };
    assert_eq!(submit_one(&h, resubmission(&h, &sent)).await, SubmitOutcome::Replayed(now_begun));
    report_one(&h, success(&job)).await.expect("the report is accepted");
    let now_done = SubmitReceipt { status: RequestStatus::Completed, ..first };
    assert_eq!(submit_one(&h, resubmission(&h, &sent)).await, SubmitOutcome::Replayed(now_done));
    assert_eq!(request_audit(&h).await.accepted, 1, "it is still one request");
}

pub async fn another_payload_under_a_used_key_is_a_conflict_and_changes_nothing<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    accept_one(&h, sent.clone()).await;
    let before = get_request(&h, sent.id).await;
    h.clock().advance(Duration::from_secs(1));
    let other = submission_for(&h, TENANT, "k", "something else");
    assert_eq!(submit_one(&h, other.clone()).await, SubmitOutcome::Conflict);
    assert_eq!(get_request(&h, sent.id).await, before);
    assert_eq!(h.requests().find_request(other.id).await.expect("an answer"), None);
    assert_eq!(
        outcome_letters(&submit_batch(&h, vec![resubmission(&h, &sent)], None).await),
        "R",
        "the key still belongs to the first request"
    );
    assert_eq!(request_audit(&h).await.accepted, 1);
}

pub async fn fingerprints_are_compared_to_their_last_bit<H: HasRequests>() {
    let h = H::open().await;
    for (n, bytes) in [[0; 32], [0xff; 32], [b'\''; 32]].into_iter().enumerate() {
        let sent = Submit { fingerprint: Fingerprint::from_bytes(bytes), ..submission(&h, &format!("k{n}")) };
        let mut changed = bytes;
        changed[31] ^= 1;
        let other = Submit { fingerprint: Fingerprint::from_bytes(changed), ..resubmission(&h, &sent) };
        let batch = vec![sent.clone(), other.clone(), resubmission(&h, &sent)];
        assert_eq!(outcome_letters(&submit_batch(&h, batch, None).await), "ACR", "in one batch");
        let batch = vec![resubmission(&h, &other), resubmission(&h, &sent)];
        assert_eq!(outcome_letters(&submit_batch(&h, batch, None).await), "CR", "compared with the tables");
    }
}

pub async fn tenants_may_use_the_same_keys<H: HasRequests>() {
    let h = H::open().await;
    let batch = || ["acme", "globex", "ACME", "acme "].map(|of| submission_for(&h, of, "k", of)).to_vec();
    let receipts = accept_batch(&h, batch()).await;
    let outcomes = submit_batch(&h, batch(), None).await;
    let replays: Vec<_> = receipts.into_iter().map(SubmitOutcome::Replayed).collect();
    assert_eq!(outcomes, replays, "each tenant has its own request");
    assert_eq!(request_audit(&h).await.accepted, 4);
}

pub async fn a_key_is_free_again_after_a_day_to_the_microsecond<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    accept_one(&h, sent.clone()).await;
    let other = || submission_for(&h, TENANT, "k", "something else");
    h.clock().advance(DAY - TICK);
    assert_eq!(outcome_letters(&submit_batch(&h, vec![resubmission(&h, &sent), other()], None).await), "RC");
    h.clock().advance(TICK);
    let new = other();
    assert_eq!(
        outcome_letters(&submit_batch(&h, vec![new.clone(), resubmission(&h, &sent)], None).await),
        "AC",
        "the key is new"
    );
    assert_eq!(get_request(&h, sent.id).await.payload, sealed("k"), "the first request still exists");
    h.clock().advance(DAY - TICK);
    assert_eq!(
        outcome_letters(&submit_batch(&h, vec![resubmission(&h, &new)], None).await),
        "R",
        "the key is valid for another day"
    );
    assert_eq!(request_audit(&h).await.accepted, 2);
}

pub async fn a_submission_twice_in_a_batch_is_accepted_once<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    let batch = vec![
        sent.clone(),
        resubmission(&h, &sent),
        submission_for(&h, TENANT, "k", "else"),
        resubmission(&h, &sent),
    ];
    let outcomes = submit_batch(&h, batch, None).await;
    assert_eq!(outcome_letters(&outcomes), "ARCR");
    let receipt =
        SubmitReceipt { id: sent.id, status: RequestStatus::Accepted, accepted_at: now(&h), window: None };
    assert_eq!(outcomes[3], SubmitOutcome::Replayed(receipt));
    assert_eq!(request_audit(&h).await.accepted, 1);
    assert_eq!(claim(&h, 10).await.len(), 1, "it has one job");
}

pub async fn a_mixed_batch_is_answered_in_its_order<H: HasRequests>() {
    let h = H::open().await;
    let old = submissions(&h, "old", 3);
    let receipts = accept_batch(&h, old.clone()).await;
    let [new, late] = [submission(&h, "new"), submission(&h, "late")];
    let batch = vec![
        resubmission(&h, &old[2]),
        new.clone(),
        submission_for(&h, TENANT, "old-1", "else"),
        resubmission(&h, &old[0]),
        late.clone(),
        resubmission(&h, &new),
    ];
    let receipt =
        |id| SubmitReceipt { id, status: RequestStatus::Accepted, accepted_at: now(&h), window: None };
    let expected = [
        SubmitOutcome::Replayed(receipts[2]),
        SubmitOutcome::Accepted(receipt(new.id)),
        SubmitOutcome::Conflict,
        SubmitOutcome::Replayed(receipts[0]),
        SubmitOutcome::Accepted(receipt(late.id)),
        SubmitOutcome::Replayed(receipt(new.id)),
    ];
    assert_eq!(submit_batch(&h, batch, None).await, expected);
    assert_eq!(request_audit(&h).await.accepted, 5);
}

pub async fn an_empty_batch_has_no_outcomes<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(submit_batch(&h, Vec::new(), None).await, []);
    assert_eq!(submit_batch(&h, Vec::new(), crate::fixtures::limits(1, 1)).await, []);
    assert_eq!(request_audit(&h).await.accepted, 0);
}

pub async fn a_large_batch_is_accepted_whole<H: HasRequests>() {
    let h = H::open().await;
    let batch = submissions(&h, "k", 2_000);
    let receipts = accept_batch(&h, batch.clone()).await;
    assert!(receipts.iter().zip(&batch).all(|(receipt, sent)| receipt.id == sent.id), "in order");
    let outcomes = submit_batch(&h, batch.iter().map(|sent| resubmission(&h, sent)).collect(), None).await;
    assert!(outcomes.iter().zip(receipts).all(|(outcome, first)| *outcome == SubmitOutcome::Replayed(first)));
    assert_eq!(request_audit(&h).await.in_flight, 2_000);
}

pub async fn awkward_keys_tenants_and_types_stay_distinct_and_unchanged<H: HasRequests>() {
    let h = H::open().await;
    let names = awkward_user_ids();
    let mut batch = Vec::new();
    for name in &names {
        let key = IdempotencyKey::parse(name).expect("the suite's keys are valid");
        let request_type = RequestType::parse(name).expect("the suite's types are valid");
        batch.push(Submit { key, request_type, ..submission(&h, name) });
        batch.push(submission_for(&h, name, "of a tenant", name));
    }
    accept_batch(&h, batch.clone()).await;
    for sent in &batch {
        let request = get_request(&h, sent.id).await;
        assert_eq!((&request.tenant, &request.request_type), (&sent.tenant, &sent.request_type));
    }
    let outcomes = submit_batch(&h, batch.iter().map(|sent| resubmission(&h, sent)).collect(), None).await;
    for (outcome, sent) in outcomes.iter().zip(&batch) {
        let SubmitOutcome::Replayed(receipt) = outcome else { panic!("replayed, not {outcome:?}") };
        assert_eq!(receipt.id, sent.id);
    }
}

pub async fn payloads_are_bytes_of_any_value_and_length<H: HasRequests>() {
    let h = H::open().await;
    let all: Vec<u8> = (0..=255).collect();
    let large = all.iter().copied().cycle().take(1 << 20).collect();
    for (n, bytes) in [Vec::new(), vec![0], all, large].into_iter().enumerate() {
        let payload = Sealed { key_id: "a key's name, 'ü' \" %".to_owned(), bytes };
        let job =
            submit_and_claim(&h, Submit { payload: payload.clone(), ..submission(&h, &format!("k{n}")) })
                .await;
        assert!(job.payload == payload, "the worker gets the same bytes");
        let report = weir_store::request::JobReport { result: Some(payload.clone()), ..success(&job) };
        assert_eq!(report_one(&h, report).await, Ok(RequestStatus::Completed));
        let request = get_request(&h, job.id).await;
        assert!(request.payload == payload && request.result == Some(payload), "callers get the same bytes");
    }
}

pub async fn a_request_for_the_broker_is_pending_enqueue<H: HasRequests>() {
    let h = H::open().await;
    let sent = Submit { needs_broker: true, ..submission(&h, "k") };
    let receipt = SubmitReceipt {
        id: sent.id,
        status: RequestStatus::PendingEnqueue,
        accepted_at: now(&h),
        window: None,
    };
    let batch = vec![sent.clone(), resubmission(&h, &sent)];
    let outcomes = submit_batch(&h, batch, None).await;
    assert_eq!(outcomes, [SubmitOutcome::Accepted(receipt), SubmitOutcome::Replayed(receipt)]);
    assert_eq!(get_request(&h, sent.id).await.status, RequestStatus::PendingEnqueue);
    assert_eq!(request_audit(&h).await.in_flight, 1);
}
