//! Webhooks: a request with a callback URL enqueues one for each final status.

use std::future::Future;
use std::time::Duration;

use weir_core::request::state::{Callback, RequestStatus};
use weir_store::request::{CallbackOutcome, Submit, WEBHOOKS_TOPIC};

use super::fixtures::{
    URL, accept_one, awaits_callback, call_back, callback_report, claim_jobs, claim_named, claim_one,
    create_dead_requests, not_called, outage, policy, rejection, replay_one, report_batch, report_one,
    resubmission, submission, submit_and_claim, submit_one, success, webhooks,
};
use crate::HasRequests;

/// A submission with a callback URL.
fn submission_with_callback<H: HasRequests>(h: &H, key: &str) -> Submit {
    Submit { callback_url: Some(URL.to_owned()), ..submission(h, key) }
}

/// Lets the lease of every attempt expire, so that the next claim exhausts the request.
async fn abandon<H: HasRequests>(h: &H, submit: Submit) -> weir_core::RequestId {
    let id = accept_one(h, submit).await;
    for _ in 0..policy().max_attempts.get() {
        assert_eq!(claim_named(h, &[id]).await.jobs.len(), 1);
        h.clock().advance(policy().lease);
    }
    id
}

async fn expect_prompt_return(waiting: impl Future<Output = ()>, why: &str) {
    let waited = tokio::time::timeout(Duration::from_secs(5), waiting).await;
    assert!(waited.is_ok(), "wait must return soon: {why}");
}

pub async fn every_final_request_enqueues_its_webhook_once<H: HasRequests>() {
    let h = H::open().await;
    let jobs = [
        submit_and_claim(&h, submission_with_callback(&h, "a")).await,
        submit_and_claim(&h, submission_with_callback(&h, "b")).await,
    ];
    let waiting = submit_and_claim(&h, submission_with_callback(&h, "c")).await;
    report_batch(&h, vec![success(&jobs[0]), rejection(&jobs[1]), awaits_callback(&waiting)]).await;
    assert_eq!(webhooks(&h).await, [jobs[0].id, jobs[1].id]);
    call_back(&h, waiting.id, callback_report(Callback::Completed)).await;
    assert_eq!(webhooks(&h).await, [waiting.id]);
    let dead = create_dead_requests(&h, vec![submission_with_callback(&h, "d")]).await.remove(0);
    assert_eq!(webhooks(&h).await, [dead.id]);
    let lost = abandon(&h, submission_with_callback(&h, "e")).await;
    assert_eq!(webhooks(&h).await, []);
    assert_eq!(claim_jobs(&h, 10).await.exhausted, [lost]);
    assert_eq!(webhooks(&h).await, [lost]);
    let books = h.queue().audit(WEBHOOKS_TOPIC).await.expect("audit must succeed");
    assert_eq!((books.accepted, books.done, books.difference()), (5, 5, 0));
}

pub async fn without_a_callback_url_no_webhook_is_enqueued<H: HasRequests>() {
    let h = H::open().await;
    let jobs =
        [submit_and_claim(&h, submission(&h, "a")).await, submit_and_claim(&h, submission(&h, "b")).await];
    let waiting = submit_and_claim(&h, submission(&h, "c")).await;
    report_batch(&h, vec![success(&jobs[0]), rejection(&jobs[1]), awaits_callback(&waiting)]).await;
    call_back(&h, waiting.id, callback_report(Callback::Failed)).await;
    create_dead_requests(&h, vec![submission(&h, "d")]).await;
    let lost = abandon(&h, submission(&h, "e")).await;
    assert_eq!(claim_jobs(&h, 10).await.exhausted, [lost]);
    assert_eq!(webhooks(&h).await, []);
    assert_eq!(h.queue().audit(WEBHOOKS_TOPIC).await.expect("audit must succeed").accepted, 0);
}

pub async fn no_webhook_is_enqueued_before_the_final_status<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission_with_callback(&h, "k");
    let job = submit_and_claim(&h, sent.clone()).await;
    report_one(&h, not_called(&job, Duration::ZERO)).await.expect("the report is accepted");
    let job = claim_one(&h).await;
    report_one(&h, outage(&job)).await.expect("the report is accepted");
    h.clock().advance(policy().backoff.ceiling(1));
    let job = claim_one(&h).await;
    report_one(&h, awaits_callback(&job)).await.expect("the report is accepted");
    submit_one(&h, resubmission(&h, &sent)).await;
    assert_eq!(webhooks(&h).await, []);
}

pub async fn refused_reports_enqueue_no_webhook<H: HasRequests>() {
    let h = H::open().await;
    let late = submit_and_claim(&h, submission_with_callback(&h, "k")).await;
    h.clock().advance(policy().lease);
    let holder = claim_one(&h).await;
    report_batch(&h, vec![success(&late), rejection(&late)]).await;
    assert_eq!(webhooks(&h).await, [], "a refused report enqueues no webhook");
    report_batch(&h, vec![success(&holder), success(&holder), rejection(&late)]).await;
    call_back(&h, late.id, callback_report(Callback::Completed)).await;
    assert_eq!(webhooks(&h).await, [late.id], "there is one webhook");
}

pub async fn a_replayed_request_that_ends_again_enqueues_another_webhook<H: HasRequests>() {
    let h = H::open().await;
    let id = create_dead_requests(&h, vec![submission_with_callback(&h, "k")]).await.remove(0).id;
    assert_eq!(webhooks(&h).await, [id]);
    assert!(replay_one(&*h.requests(), id).await);
    assert_eq!(webhooks(&h).await, [], "a replay enqueues no webhook");
    let job = claim_one(&h).await;
    assert_eq!(report_one(&h, success(&job)).await, Ok(RequestStatus::Completed));
    assert_eq!(webhooks(&h).await, [id]);
}

pub async fn every_final_request_wakes_a_waiter_of_the_webhook_topic<H: HasRequests>() {
    let h = H::open().await;
    let queue = h.queue();
    let long = Duration::from_secs(60);
    let job = submit_and_claim(&h, submission_with_callback(&h, "a")).await;
    report_one(&h, success(&job)).await.expect("the report is accepted");
    expect_prompt_return(queue.wait(WEBHOOKS_TOPIC, long), "a report").await;
    let job = submit_and_claim(&h, submission_with_callback(&h, "b")).await;
    let outcome = call_back(&h, job.id, callback_report(Callback::Failed)).await;
    assert_eq!(outcome, CallbackOutcome::Applied(RequestStatus::FailedPermanent));
    expect_prompt_return(queue.wait(WEBHOOKS_TOPIC, long), "a callback").await;
    abandon(&h, submission_with_callback(&h, "c")).await;
    claim_jobs(&h, 10).await;
    expect_prompt_return(queue.wait(WEBHOOKS_TOPIC, long), "a claim that exhausted a request").await;
    let lost = abandon(&h, submission_with_callback(&h, "d")).await;
    claim_named(&h, &[lost]).await;
    expect_prompt_return(queue.wait(WEBHOOKS_TOPIC, long), "a claim by name that exhausted a request").await;
    assert_eq!(webhooks(&h).await.len(), 4);
}
