//! Waiting for something to claim. `at_most` is real time: a worker sleeps in it, whatever the store's clock shows.

use std::future::Future;
use std::time::Duration;

use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::Claims;
use crate::fixtures::{accept_batch, configure, send, send_numbered};

const LONG: Duration = Duration::from_secs(60);

async fn expect_prompt_return(waiting: impl Future<Output = ()>, why: &str) {
    let patience = Duration::from_secs(5);
    assert!(
        tokio::time::timeout(patience, waiting).await.is_ok(),
        "wait must return within {patience:?}: {why}"
    );
}

pub async fn wait_returns_when_something_was_sent_before<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let queue = h.queue();
    expect_prompt_return(queue.wait(TOPIC, LONG), "something was enqueued since the last call").await;
    assert_eq!(Claims::drain(&h).await.len(), 1, "and it can be claimed");
    accept_batch(&h, vec![send("alice", "again")]).await;
    expect_prompt_return(queue.wait(TOPIC, LONG), "something was enqueued again").await;
    assert_eq!(Claims::drain(&h).await.len(), 1, "and it can be claimed");
}

pub async fn wait_returns_when_something_is_sent_while_waiting<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 10, 1).await;
    for _ in 0..5 {
        let queue = h.queue();
        let waiter = tokio::spawn(async move { queue.wait(TOPIC, LONG).await });
        tokio::task::yield_now().await;
        accept_batch(&h, vec![send("alice", "hello")]).await;
        expect_prompt_return(
            async { waiter.await.expect("wait must not panic") },
            "something was enqueued meanwhile",
        )
        .await;
        assert_eq!(Claims::drain(&h).await.len(), 1, "and it can be claimed");
    }
}

pub async fn wait_returns_after_its_timeout<H: HasQuota>() {
    let h = H::open().await;
    let queue = h.queue();
    for topic in [TOPIC, TOPIC, "nothing-here"] {
        expect_prompt_return(queue.wait(topic, Duration::from_millis(20)), "at_most has passed").await;
    }
}
