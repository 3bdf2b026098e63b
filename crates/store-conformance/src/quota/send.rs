//! Sending batches: outcomes, counts and enqueued messages.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use weir_core::quota::Grant;
use weir_core::{Clock, Timestamp};
use weir_queue::QueueAudit;
use weir_store::quota::SendOutcome;

use crate::claims::Claims;
use crate::fixtures::{
    accept_batch, configure, expect_nothing_claimable, find_quota, limits, outcome_letters, queue_audit,
    send, send_batch, send_one, sends, texts_by_key,
};
use crate::{HasQuota, START};

pub async fn an_unknown_user_is_not_configured_and_nothing_is_enqueued<H: HasQuota>() {
    let h = H::open().await;
    assert_eq!(send_one(&h, "nobody").await, SendOutcome::NotConfigured, "nobody configured this user");
    assert_eq!(find_quota(&h, "nobody").await, None, "a send creates no row");
    assert_eq!(queue_audit(&h).await, QueueAudit::default(), "nothing is enqueued");
    expect_nothing_claimable(&h, "nothing was accepted").await;
}

pub async fn an_empty_batch_has_no_outcomes<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    assert_eq!(send_batch(&h, Vec::new()).await, [], "no commands, no outcomes");
    assert_eq!(queue_audit(&h).await, QueueAudit::default(), "nothing is enqueued");
}

pub async fn exactly_the_limit_is_accepted_in_order<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 4, 1).await;
    let outcomes = send_batch(&h, sends("alice", 7)).await;
    assert_eq!(outcome_letters(&outcomes), "AAAADDD", "only the first four are within the limit");
    let reset_at = START.plus(Duration::from_secs(60));
    for (remaining, outcome) in [3, 2, 1, 0].into_iter().zip(&outcomes) {
        let SendOutcome::Accepted { grant, .. } = outcome else { unreachable!("the letters say so") };
        assert_eq!(*grant, Grant { remaining, reset_at }, "the remaining count goes down by one each time");
    }
    let delivered = texts_by_key(&Claims::drain(&h).await);
    assert_eq!(
        delivered["alice"],
        ["alice 1", "alice 2", "alice 3", "alice 4"],
        "accepted messages are delivered"
    );
}

pub async fn a_denial_changes_nothing<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 2, 1).await;
    accept_batch(&h, sends("alice", 2)).await;
    let before = (find_quota(&h, "alice").await, queue_audit(&h).await);
    h.clock().advance(Duration::from_secs(10));
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 3)).await), "DDD", "the limit is exhausted");
    assert_eq!(
        (find_quota(&h, "alice").await, queue_audit(&h).await),
        before,
        "a denial changes neither row nor queue"
    );
}

pub async fn counts_carry_over_from_batch_to_batch<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 1).await;
    let mut answers = String::new();
    for _ in 0..4 {
        answers += &outcome_letters(&send_batch(&h, sends("alice", 2)).await);
        h.clock().advance(Duration::from_secs(1));
    }
    assert_eq!(answers, "AAAAADDD", "batches of one window share its limit");
}

pub async fn a_mixed_batch_answers_in_the_order_of_its_commands<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "zoe", 2, 1).await;
    configure(&h, "bob", 1, 1).await;
    configure(&h, "amy", 9, 1).await;
    let names = ["zoe", "nobody", "bob", "zoe", "amy", "bob", "zoe", "nobody", "amy", "ghost", "zoe", "amy"];
    let batch = (1..).zip(names).map(|(n, name)| send(name, &format!("{n}"))).collect();
    let outcomes = send_batch(&h, batch).await;
    assert_eq!(outcome_letters(&outcomes), "ANAAADDNANDA", "each outcome is at the index of its command");
    let remaining: Vec<u32> = outcomes.iter().filter_map(remaining).collect();
    assert_eq!(remaining, [1, 0, 0, 8, 7, 6], "each user has a count of their own");
    let delivered = texts_by_key(&Claims::drain(&h).await);
    let expected = BTreeMap::from([
        ("amy".into(), vec!["5".into(), "9".into(), "12".into()]),
        ("bob".into(), vec!["3".into()]),
        ("zoe".into(), vec!["1".into(), "4".into()]),
    ]);
    assert_eq!(delivered, expected, "exactly the accepted messages are enqueued, in order");
}

fn remaining(outcome: &SendOutcome) -> Option<u32> {
    match outcome {
        SendOutcome::Accepted { grant, .. } => Some(grant.remaining),
        _ => None,
    }
}

pub async fn a_large_batch_is_decided_whole<H: HasQuota>() {
    let h = H::open().await;
    for n in 0..100 {
        configure(&h, &format!("user-{n}"), 30, 1).await;
    }
    let names = (0..6_000).map(|n| format!("user-{}", n * 7 % 150));
    let outcomes = send_batch(&h, names.map(|name| send(&name, "hello")).collect()).await;
    let expected: String = (0..6_000)
        .map(|n| match (n * 7 % 150, n / 150) {
            (100.., _) => 'N',
            (_, 0..30) => 'A',
            _ => 'D',
        })
        .collect();
    assert!(outcome_letters(&outcomes) == expected, "each of 6,000 outcomes is at the index of its command");
    assert_eq!(queue_audit(&h).await.accepted, 3_000, "each accepted message is enqueued");
}

pub async fn outcomes_carry_the_limits_and_the_stores_time<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 3).await;
    h.clock().advance(Duration::from_micros(1_234_567));
    let now = h.clock().now();
    assert_eq!(now, Timestamp::from_micros(START.as_micros() + 1_234_567), "the clock moved");
    for outcome in send_batch(&h, sends("alice", 2)).await {
        let (SendOutcome::Accepted { limits: used, at, .. } | SendOutcome::Denied { limits: used, at, .. }) =
            outcome
        else {
            panic!("alice is configured");
        };
        assert_eq!((used, at), (limits(1, 3), now), "an outcome has the limits and the time of the decision");
    }
}

pub async fn message_ids_are_unique_within_and_across_batches<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 10_000, 1).await;
    configure(&h, "bob", 10_000, 1).await;
    let mut ids = HashSet::new();
    for _ in 0..5 {
        let batch = [sends("alice", 50), sends("bob", 50)].concat();
        for id in accept_batch(&h, batch).await {
            assert_eq!(id.as_uuid().get_version_num(), 7, "{id} must be a version 7 UUID");
            assert!(ids.insert(id), "{id} is the id of two messages");
        }
    }
}
