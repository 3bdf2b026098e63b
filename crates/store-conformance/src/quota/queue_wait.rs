//! Waiting for claimable messages. The timeout is real time: it does not depend on the store's clock.

use std::future::Future;
use std::time::Duration;

use weir_store::quota::TOPIC;

use crate::HasQuota;
use crate::claims::Claims;
use crate::fixtures::{accept_batch, configure, send, send_numbered};

const LONG: Duration = Duration::from_secs(60);

async fn expect_prompt_return(waiting: impl Future<Output = ()>, why: &str) {
    let timeout = Duration::from_secs(5);
    assert!(
        tokio::time::timeout(timeout, waiting).await.is_ok(),
        "wait must return within {timeout:?}: {why}"
    );
}

pub async fn wait_returns_when_something_was_sent_before<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 1).await;
    let queue = h.queue();
    expect_prompt_return(queue.wait(TOPIC, LONG), "a message was enqueued since the last call").await;
    assert_eq!(Claims::drain(&h).await.len(), 1, "the message can be claimed");
    accept_batch(&h, vec![send("alice", "again")]).await;
    expect_prompt_return(queue.wait(TOPIC, LONG), "another message was enqueued").await;
    assert_eq!(Claims::drain(&h).await.len(), 1, "the message can be claimed");
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
            "a message was enqueued while waiting",
        )
        .await;
        assert_eq!(Claims::drain(&h).await.len(), 1, "the message can be claimed");
    }
}

pub async fn wait_returns_after_its_timeout<H: HasQuota>() {
    let h = H::open().await;
    let queue = h.queue();
    for topic in [TOPIC, TOPIC, "nothing-here"] {
        expect_prompt_return(queue.wait(topic, Duration::from_millis(20)), "the timeout has passed").await;
    }
}
