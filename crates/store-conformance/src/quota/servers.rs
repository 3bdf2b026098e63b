//! Several servers on one engine. The cases pass without running if only one process can use the engine.

use std::collections::BTreeSet;

use crate::HasQuota;
use crate::claims::{Claims, Disposition};
use crate::fixtures::{
    VISIBILITY, accept_batch, claim, configure, expect_nothing_claimable, is_accepted, queue_audit,
    run_concurrently, send_numbered, sends,
};
use crate::quota::queue_workers::{DeliveryLog, configure_keys, work};

pub async fn servers_share_one_limit<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 50, 1).await;
    let Some(other) = h.second_server().await else { return };
    let answers = run_concurrently((0..40).map(|n| {
        let quota = if n % 2 == 0 { h.quota() } else { other.quota() };
        async move { quota.send_batch(sends("alice", 5).into()).await.expect("send_batch must succeed") }
    }));
    let accepted = answers.await.iter().flatten().filter(|outcome| is_accepted(outcome)).count();
    assert_eq!(accepted, 50, "exactly the limit is accepted by all servers together");
    assert_eq!(queue_audit(&other).await.accepted, 50, "each is enqueued once");
}

pub async fn no_key_is_leased_on_two_servers<H: HasQuota>() {
    let h = H::open().await;
    for n in 0..12 {
        send_numbered(&h, &format!("user-{n}"), 3).await;
    }
    let Some(other) = h.second_server().await else { return };
    let mut out = BTreeSet::new();
    for server in [&h, &other].into_iter().cycle().take(20) {
        let messages = claim(server, 2).await.messages;
        let keys: BTreeSet<String> = messages.into_iter().map(|message| message.key).collect();
        for key in keys {
            assert!(out.insert(key.clone()), "{key} is leased on another server");
        }
    }
    assert!(!out.is_empty(), "messages are waiting and none was leased");
}

pub async fn workers_on_two_servers_deliver_each_message_once_and_in_order<H: HasQuota>() {
    let h = H::open().await;
    configure_keys(&h, 10).await;
    let Some(other) = h.second_server().await else { return };
    for n in 0..10 {
        accept_batch(if n % 2 == 0 { &h } else { &other }, sends(&format!("user-{n}"), 30)).await;
    }
    let delivered = DeliveryLog::default();
    let workers = (0..6).map(|n| if n % 2 == 0 { h.queue() } else { other.queue() });
    run_concurrently(workers.map(|queue| work(queue, delivered.clone(), 300))).await;
    delivered.expect_complete(10, 30);
    assert_eq!(queue_audit(&h).await.done, 300, "everything is done once");
}

pub async fn a_restart_of_one_server_ends_no_lease_of_the_other<H: HasQuota>() {
    let h = H::open().await;
    send_numbered(&h, "alice", 2).await;
    let Some(other) = h.second_server().await else { return };
    let claims = Claims::claim(&other, 2).await;
    let h = h.reopen().await;
    expect_nothing_claimable(&h, "the other server still leases alice's messages").await;
    claims.must_settle(&other, |_| Disposition::Leave).await;
    let stale = Claims::claim(&other, 2).await;
    h.clock().advance(VISIBILITY);
    let h = h.reopen().await;
    let holder = Claims::claim(&h, 2).await;
    stale.must_be_refused(&other, |_| Disposition::Done).await;
    assert_eq!(queue_audit(&other).await.in_flight, 2, "lease tokens grow across restarts too");
    holder.must_settle(&h, |_| Disposition::Done).await;
}
