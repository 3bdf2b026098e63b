//! Waiting for something to claim. `at_most` is real time: a worker sleeps in it, whatever the store's clock shows.

use std::future::Future;
use std::time::Duration;

use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::Claims;
use crate::fixtures::{accepted, configured, queued, send};

const LONG: Duration = Duration::from_secs(60);

async fn soon(waiting: impl Future<Output = ()>, why: &str) {
    let patience = Duration::from_secs(5);
    assert!(
        tokio::time::timeout(patience, waiting).await.is_ok(),
        "wait must return within {patience:?}: {why}"
    );
}

pub async fn wait_returns_when_something_was_sent_before<H: HasQuota>() {
    let h = H::open().await;
    queued(&h, "alice", 1).await;
    let queue = h.queue();
    soon(queue.wait(TOPIC, LONG), "something was enqueued since the last call").await;
    assert_eq!(Claims::drain(&h).await.len(), 1, "and it can be claimed");
    accepted(&h, vec![send("alice", "again")]).await;
    soon(queue.wait(TOPIC, LONG), "something was enqueued again").await;
    assert_eq!(Claims::drain(&h).await.len(), 1, "and it can be claimed");
}

pub async fn wait_returns_when_something_is_sent_meanwhile<H: HasQuota>() {
    let h = H::open().await;
    configured(&h, "alice", 10, 1).await;
    for _ in 0..5 {
        let queue = h.queue();
        let waiter = tokio::spawn(async move { queue.wait(TOPIC, LONG).await });
        tokio::task::yield_now().await;
        accepted(&h, vec![send("alice", "hello")]).await;
        soon(async { waiter.await.expect("wait must not panic") }, "something was enqueued meanwhile").await;
        assert_eq!(Claims::drain(&h).await.len(), 1, "and it can be claimed");
    }
}

pub async fn wait_returns_by_itself<H: HasQuota>() {
    let h = H::open().await;
    let queue = h.queue();
    for topic in [TOPIC, TOPIC, "nothing-here"] {
        soon(queue.wait(topic, Duration::from_millis(20)), "at_most has passed").await;
    }
}
