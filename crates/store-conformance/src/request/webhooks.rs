//! Whoever asked for it is told of the end of a request, once.

use std::future::Future;
use std::time::Duration;

use weir_core::request::state::{Callback, Status};
use weir_store::request::{CallbackOutcome, Submit, WEBHOOKS};

use super::fixtures::{
    URL, accepted_one, again, begun, broken, called_back, calls_back, claim_one, claimed, claimed_named,
    died, done, policy, put_back, rejected, reported, reported_one, submitted_one, taken_over, webhooks,
    wish,
};
use crate::HasRequests;

/// A submission whose end somebody wants to hear of.
fn told<H: HasRequests>(h: &H, key: &str) -> Submit {
    Submit { callback_url: Some(URL.to_owned()), ..wish(h, key) }
}

/// The worker of every attempt vanishes; the next claim will give the request up.
async fn abandoned<H: HasRequests>(h: &H, submit: Submit) -> weir_core::RequestId {
    let id = accepted_one(h, submit).await;
    for _ in 0..policy().max_attempts.get() {
        assert_eq!(claimed_named(h, &[id]).await.jobs.len(), 1);
        h.clock().advance(policy().lease);
    }
    id
}

async fn soon(waiting: impl Future<Output = ()>, why: &str) {
    let waited = tokio::time::timeout(Duration::from_secs(5), waiting).await;
    assert!(waited.is_ok(), "wait must return soon: {why}");
}

pub async fn every_end_is_put_on_the_topic_once<H: HasRequests>() {
    let h = H::open().await;
    let jobs = [begun(&h, told(&h, "a")).await, begun(&h, told(&h, "b")).await];
    let waiting = begun(&h, told(&h, "c")).await;
    reported(&h, vec![done(&jobs[0]), rejected(&jobs[1]), taken_over(&waiting)]).await;
    assert_eq!(webhooks(&h).await, [jobs[0].id, jobs[1].id]);
    called_back(&h, waiting.id, calls_back(Callback::Completed)).await;
    assert_eq!(webhooks(&h).await, [waiting.id]);
    let dead = died(&h, vec![told(&h, "d")]).await.remove(0);
    assert_eq!(webhooks(&h).await, [dead.id]);
    let lost = abandoned(&h, told(&h, "e")).await;
    assert_eq!(webhooks(&h).await, []);
    assert_eq!(claimed(&h, 10).await.exhausted, [lost]);
    assert_eq!(webhooks(&h).await, [lost]);
    let books = h.queue().audit(WEBHOOKS).await.expect("audit must succeed");
    assert_eq!((books.accepted, books.done, books.difference()), (5, 5, 0));
}

pub async fn without_an_address_nobody_is_told<H: HasRequests>() {
    let h = H::open().await;
    let jobs = [begun(&h, wish(&h, "a")).await, begun(&h, wish(&h, "b")).await];
    let waiting = begun(&h, wish(&h, "c")).await;
    reported(&h, vec![done(&jobs[0]), rejected(&jobs[1]), taken_over(&waiting)]).await;
    called_back(&h, waiting.id, calls_back(Callback::Failed)).await;
    died(&h, vec![wish(&h, "d")]).await;
    let lost = abandoned(&h, wish(&h, "e")).await;
    assert_eq!(claimed(&h, 10).await.exhausted, [lost]);
    assert_eq!(webhooks(&h).await, []);
    assert_eq!(h.queue().audit(WEBHOOKS).await.expect("audit must succeed").accepted, 0);
}

pub async fn nobody_is_told_before_the_end<H: HasRequests>() {
    let h = H::open().await;
    let sent = told(&h, "k");
    let job = begun(&h, sent.clone()).await;
    reported_one(&h, put_back(&job, Duration::ZERO)).await.expect("it is taken");
    let job = claim_one(&h).await;
    reported_one(&h, broken(&job)).await.expect("it is taken");
    h.clock().advance(policy().backoff.ceiling(1));
    let job = claim_one(&h).await;
    reported_one(&h, taken_over(&job)).await.expect("it is taken");
    submitted_one(&h, again(&h, &sent)).await;
    assert_eq!(webhooks(&h).await, []);
}

pub async fn what_is_refused_tells_nobody<H: HasRequests>() {
    let h = H::open().await;
    let late = begun(&h, told(&h, "k")).await;
    h.clock().advance(policy().lease);
    let holder = claim_one(&h).await;
    reported(&h, vec![done(&late), rejected(&late)]).await;
    assert_eq!(webhooks(&h).await, [], "the late worker ended nothing");
    reported(&h, vec![done(&holder), done(&holder), rejected(&late)]).await;
    called_back(&h, late.id, calls_back(Callback::Completed)).await;
    assert_eq!(webhooks(&h).await, [late.id], "it ended once");
}

pub async fn a_dead_letter_that_ends_again_is_told_again<H: HasRequests>() {
    let h = H::open().await;
    let id = died(&h, vec![told(&h, "k")]).await.remove(0).id;
    assert_eq!(webhooks(&h).await, [id]);
    assert!(h.requests().replay_request(id).await.expect("replay_request must succeed"));
    assert_eq!(webhooks(&h).await, [], "a replay is no end");
    let job = claim_one(&h).await;
    assert_eq!(reported_one(&h, done(&job)).await, Ok(Status::Completed));
    assert_eq!(webhooks(&h).await, [id]);
}

pub async fn whoever_waits_for_the_topic_is_woken_by_every_end<H: HasRequests>() {
    let h = H::open().await;
    let queue = h.queue();
    let long = Duration::from_secs(60);
    let job = begun(&h, told(&h, "a")).await;
    reported_one(&h, done(&job)).await.expect("it is taken");
    soon(queue.wait(WEBHOOKS, long), "a report").await;
    let job = begun(&h, told(&h, "b")).await;
    let outcome = called_back(&h, job.id, calls_back(Callback::Failed)).await;
    assert_eq!(outcome, CallbackOutcome::Taken(Status::FailedPermanent));
    soon(queue.wait(WEBHOOKS, long), "a callback").await;
    abandoned(&h, told(&h, "c")).await;
    claimed(&h, 10).await;
    soon(queue.wait(WEBHOOKS, long), "a claim that gave up").await;
    let lost = abandoned(&h, told(&h, "d")).await;
    claimed_named(&h, &[lost]).await;
    soon(queue.wait(WEBHOOKS, long), "a claim by name that gave up").await;
    assert_eq!(webhooks(&h).await.len(), 4);
}
