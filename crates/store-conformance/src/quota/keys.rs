//! Idempotency keys of sends: one message for each key, and the same answer for a day.

use std::time::Duration;

use weir_core::Clock;
use weir_core::quota::Quota;
use weir_store::quota::SendOutcome;

use crate::claims::Claims;
use crate::fixtures::{
    TICK, configure, find_quota, keyed, limits, message_id, outcome_letters, queue_audit, run_concurrently,
    send, send_batch, sends, texts_by_key, user,
};
use crate::{HasQuota, START};

const DAY: Duration = Duration::from_secs(86_400);

async fn count<H: HasQuota>(h: &H, user_id: &str) -> u32 {
    find_quota(h, user_id).await.expect("the user is configured").current_count
}

pub async fn a_key_gets_the_same_answer_and_no_second_message<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 3, 1).await;
    let first = send_batch(&h, vec![keyed("alice", "k", "hello")]).await.remove(0);
    let SendOutcome::Accepted { message_id, grant, .. } = first else { panic!("it is new: {first:?}") };
    h.clock().advance(Duration::from_secs(1));
    send_batch(&h, vec![send("alice", "between")]).await;
    for _ in 0..3 {
        let again = send_batch(&h, vec![keyed("alice", "k", "hello")]).await.remove(0);
        let row = Some(Quota { current_count: 2, ..Quota::new(limits(3, 1), START) });
        assert_eq!(again, SendOutcome::Replayed { message_id, grant, row, at: h.clock().now() });
    }
    assert_eq!((count(&h, "alice").await, queue_audit(&h).await.accepted), (2, 2), "it counts once");
    assert_eq!(texts_by_key(&Claims::drain(&h).await)["alice"], ["hello", "between"]);
}

pub async fn a_key_used_for_another_message_is_a_conflict<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 9, 1).await;
    configure(&h, "bob", 9, 1).await;
    let batch = vec![
        keyed("alice", "k", "hello"),
        keyed("alice", "k", "bye"),
        keyed("alice", "k", "hello"),
        keyed("bob", "k", "bye"),
        keyed("alice", "k2", "bye"),
    ];
    assert_eq!(outcome_letters(&send_batch(&h, batch.clone()).await), "ACRAA", "keys are a user's own");
    assert_eq!(outcome_letters(&send_batch(&h, batch).await), "RCRRR");
    assert_eq!((count(&h, "alice").await, queue_audit(&h).await.accepted), (2, 3));
}

pub async fn a_denial_and_a_missing_user_are_not_recorded<H: HasQuota>() {
    let h = H::open().await;
    let (first, second) = (keyed("alice", "a", "1"), keyed("alice", "b", "2"));
    assert_eq!(outcome_letters(&send_batch(&h, vec![first.clone()]).await), "N");
    configure(&h, "alice", 1, 1).await;
    assert_eq!(outcome_letters(&send_batch(&h, vec![first.clone(), second.clone()]).await), "AD");
    assert_eq!(
        outcome_letters(&send_batch(&h, vec![keyed("alice", "b", "other")]).await),
        "D",
        "no conflict"
    );
    h.clock().advance(Duration::from_secs(60));
    assert_eq!(outcome_letters(&send_batch(&h, vec![second, first]).await), "AR");
}

pub async fn a_used_key_is_answered_over_the_limit_and_after_removal<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    let command = keyed("alice", "k", "hello");
    let id = message_id(&send_batch(&h, vec![command.clone()]).await[0]).expect("it is within the limit");
    let outcomes = send_batch(&h, vec![send("alice", "more"), command.clone()]).await;
    assert_eq!(outcome_letters(&outcomes), "DR");
    h.quota().remove(&user("alice")).await.expect("remove must succeed");
    let now = h.clock().now();
    let outcome = send_batch(&h, vec![command]).await.remove(0);
    assert!(
        matches!(outcome, SendOutcome::Replayed { message_id, row: None, at, .. } if message_id == id && at == now),
        "{outcome:?}"
    );
}

pub async fn a_key_is_free_after_a_day_and_purged_in_batches<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1_000, 1).await;
    let batch: Vec<_> = (0..10).map(|n| keyed("alice", &n.to_string(), "hello")).collect();
    send_batch(&h, batch.clone()).await;
    let purge = async |limit| h.quota().purge_keys(limit).await.expect("purge_keys must succeed");
    h.clock().advance(DAY.saturating_sub(TICK));
    assert_eq!(purge(100).await, 0, "none has expired");
    assert_eq!(outcome_letters(&send_batch(&h, batch.clone()).await), "RRRRRRRRRR");
    h.clock().advance(TICK);
    assert_eq!(outcome_letters(&send_batch(&h, batch[..2].to_vec()).await), "AA", "a day later they are new");
    assert_eq!((purge(5).await, purge(5).await, purge(5).await), (5, 3, 0));
    assert_eq!(outcome_letters(&send_batch(&h, batch[..3].to_vec()).await), "RRA");
    assert_eq!(queue_audit(&h).await.accepted, 13);
}

pub async fn parallel_sends_with_one_key_are_one_message<H: HasQuota>() {
    let h = std::sync::Arc::new(H::open().await);
    configure(&*h, "alice", 50, 1).await;
    let calls = (0..16).map(|n| {
        let h = std::sync::Arc::clone(&h);
        async move {
            let batch = [vec![keyed("alice", "k", "hello")], sends("alice", n % 3)].concat();
            send_batch(&*h, batch).await.remove(0)
        }
    });
    let outcomes = run_concurrently(calls).await;
    assert_eq!(outcome_letters(&outcomes).matches('A').count(), 1, "{outcomes:?}");
    assert_eq!(outcome_letters(&outcomes).matches('R').count(), 15, "{outcomes:?}");
    let others: u32 = (0..16).map(|n| n % 3).sum();
    assert_eq!(count(&*h, "alice").await, 1 + others);
}

pub async fn sends_with_and_without_keys_share_the_limit<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 30, 1).await;
    let mut accepted = 0;
    for n in 0..25 {
        let batch = vec![send("alice", "plain"), keyed("alice", &n.to_string(), "hello")];
        let letters = outcome_letters(&send_batch(&h, batch).await);
        accepted += letters.matches('A').count();
        assert!(letters == "AA" || accepted == 30, "{letters} when {accepted} of 30 were accepted");
    }
    assert_eq!((accepted, count(&h, "alice").await), (30, 30), "no place is lost and none is used twice");
    let unlucky: Vec<_> = (0..5).map(|n| keyed("alice", &format!("later {n}"), "x")).collect();
    assert_eq!(outcome_letters(&send_batch(&h, unlucky).await), "DDDDD");
}

pub async fn keys_survive_a_restart<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 9, 1).await;
    let command = keyed("alice", "k", "hello");
    let id = message_id(&send_batch(&h, vec![command.clone()]).await[0]).expect("it is within the limit");
    let h = h.reopen().await;
    let outcome = send_batch(&h, vec![command]).await.remove(0);
    assert!(matches!(outcome, SendOutcome::Replayed { message_id, .. } if message_id == id), "{outcome:?}");
    assert_eq!(count(&h, "alice").await, 1);
}

pub async fn servers_share_keys<H: HasQuota>() {
    let a = H::open().await;
    let Some(b) = a.second_server().await else { return };
    configure(&a, "alice", 100, 1).await;
    for n in 0..20 {
        let command = || vec![keyed("alice", &n.to_string(), "hello")];
        let (first, second) = tokio::join!(send_batch(&a, command()), send_batch(&b, command()));
        let mut letters = outcome_letters(&[first, second].concat()).into_bytes();
        letters.sort_unstable();
        assert_eq!(letters, b"AR", "one server accepts it and the other repeats the answer");
    }
    assert_eq!((count(&a, "alice").await, queue_audit(&a).await.accepted), (20, 20));
}
