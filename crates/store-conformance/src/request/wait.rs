//! Waiting for claimable jobs. The timeout is real time: it does not depend on the store's clock.

use std::future::Future;
use std::time::Duration;

use super::fixtures::{
    accept_one, claim, claim_one, create_dead_requests, replay_one, replay_some, submission,
};
use crate::HasRequests;

const LONG: Duration = Duration::from_secs(60);

async fn expect_prompt_return(waiting: impl Future<Output = ()>, why: &str) {
    let waited = tokio::time::timeout(Duration::from_secs(5), waiting).await;
    assert!(waited.is_ok(), "wait_for_jobs must return soon: {why}");
}

pub async fn wait_returns_when_something_was_accepted_before<H: HasRequests>() {
    let h = H::open().await;
    let store = h.requests();
    for key in ["a", "b"] {
        accept_one(&h, submission(&h, key)).await;
        expect_prompt_return(store.wait_for_jobs(LONG), "a request was accepted since the last call").await;
        claim_one(&h).await;
    }
}

pub async fn wait_returns_when_something_is_accepted_while_waiting<H: HasRequests>() {
    let h = H::open().await;
    for n in 0..5 {
        let store = h.requests();
        let waiter = tokio::spawn(async move { store.wait_for_jobs(LONG).await });
        tokio::task::yield_now().await;
        accept_one(&h, submission(&h, &format!("k{n}"))).await;
        expect_prompt_return(
            async { waiter.await.expect("wait must not panic") },
            "a request was accepted while waiting",
        )
        .await;
        claim_one(&h).await;
    }
}

pub async fn wait_returns_when_a_letter_is_replayed<H: HasRequests>() {
    let h = H::open().await;
    let store = h.requests();
    let jobs = create_dead_requests(&h, vec![submission(&h, "a"), submission(&h, "b")]).await;
    expect_prompt_return(store.wait_for_jobs(LONG), "they were accepted").await;
    replay_one(&*store, jobs[0].id).await;
    expect_prompt_return(store.wait_for_jobs(LONG), "one was replayed").await;
    replay_some(&*store, 10).await;
    expect_prompt_return(store.wait_for_jobs(LONG), "the rest were replayed").await;
    assert_eq!(claim(&h, 10).await.len(), 2);
}

pub async fn wait_returns_after_its_timeout<H: HasRequests>() {
    let h = H::open().await;
    let store = h.requests();
    for _ in 0..3 {
        expect_prompt_return(store.wait_for_jobs(Duration::from_millis(20)), "the timeout has passed").await;
    }
}
