//! When a window ends, and when the next one begins.

use std::time::Duration;

use weir_core::quota::Grant;
use weir_core::verdict::DenialReason;
use weir_core::{Clock, Denial};
use weir_store::quota::SendOutcome;

use crate::fixtures::{
    TICK, accept_batch, configure, find_quota, is_accepted, outcome_letters, send_batch, send_one, sends,
};
use crate::{HasQuota, START};

const MINUTE: Duration = Duration::from_secs(60);

async fn denial<H: HasQuota>(h: &H, user: &str) -> Denial {
    match send_one(h, user).await {
        SendOutcome::Denied { denial, .. } => denial,
        other => panic!("{user} is over the limit and must be denied, but the answer is {other:?}"),
    }
}

async fn grant<H: HasQuota>(h: &H, user: &str) -> Grant {
    match send_one(h, user).await {
        SendOutcome::Accepted { grant, .. } => grant,
        other => panic!("{user} is within the limit and must be accepted, but the answer is {other:?}"),
    }
}

pub async fn retry_after_is_exact_to_the_microsecond<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    accept_batch(&h, sends("alice", 1)).await;
    h.clock().advance(Duration::from_micros(12_345_678));
    let expected =
        Denial { reason: DenialReason::QuotaExceeded, retry_after: Duration::from_micros(47_654_322) };
    assert_eq!(denial(&h, "alice").await, expected, "the wait is the rest of the window");
    h.clock().advance(expected.retry_after);
    assert!(is_accepted(&send_one(&h, "alice").await), "after exactly that wait a send succeeds");
}

pub async fn a_window_ends_after_its_last_microsecond_and_the_next_counts_from_1<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 2, 1).await;
    accept_batch(&h, sends("alice", 2)).await;
    h.clock().advance(MINUTE - TICK);
    assert_eq!(denial(&h, "alice").await.retry_after, TICK, "the window lasts to its last microsecond");
    h.clock().advance(TICK);
    let now = START.plus(MINUTE);
    let expected = Grant { remaining: 1, reset_at: now.plus(MINUTE) };
    assert_eq!(grant(&h, "alice").await, expected, "at its end a new window begins");
    let row = find_quota(&h, "alice").await.expect("alice is configured");
    assert_eq!((row.current_count, row.last_refresh), (1, now), "the new window counts from 1");
    assert_eq!(
        outcome_letters(&send_batch(&h, sends("alice", 2)).await),
        "AD",
        "the limit holds in the new window too"
    );
}

pub async fn a_send_after_the_window_starts_a_new_one_at_its_own_time<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    accept_batch(&h, sends("alice", 1)).await;
    h.clock().advance(Duration::from_micros(150_000_007));
    let now = h.clock().now();
    let expected = Grant { remaining: 0, reset_at: now.plus(MINUTE) };
    assert_eq!(grant(&h, "alice").await, expected, "windows begin with a send, not on a grid");
    h.clock().advance(MINUTE - TICK);
    assert_eq!(denial(&h, "alice").await.retry_after, TICK, "a window has its full length from there");
}

pub async fn reading_an_expired_window_shows_0_and_does_not_move_it<H: HasQuota>() {
    let h = H::open().await;
    let configured = configure(&h, "alice", 5, 1).await;
    accept_batch(&h, sends("alice", 3)).await;
    let count = async || {
        let row = find_quota(&h, "alice").await.expect("alice is configured");
        assert_eq!(
            (row.limits, row.last_refresh),
            (configured.limits, START),
            "reading does not move a window"
        );
        row.current_count
    };
    h.clock().advance(MINUTE - TICK);
    assert_eq!(count().await, 3, "the window has not ended yet");
    h.clock().advance(TICK);
    assert_eq!(count().await, 0, "an expired window has nothing spent");
    h.clock().advance(MINUTE * 1_000);
    assert_eq!(count().await, 0, "however long ago it ended");
}

pub async fn each_users_window_ends_independently<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    h.clock().advance(Duration::from_secs(20));
    configure(&h, "bob", 1, 1).await;
    configure(&h, "carol", 1, 2).await;
    let batch = || [sends("alice", 1), sends("bob", 1), sends("carol", 1)].concat();
    let mut answers = Vec::new();
    for _ in 0..4 {
        answers.push(outcome_letters(&send_batch(&h, batch()).await));
        h.clock().advance(Duration::from_secs(40));
    }
    // At 20, 60, 100 and 140 s: alice's windows begin at 0, 60 and 140; bob's at 20 and 100; carol's at 20 and 140.
    assert_eq!(answers, ["AAA", "ADD", "DAD", "ADA"], "each user's window has its own start and length");
}

pub async fn a_denied_send_does_not_lengthen_the_window<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    accept_batch(&h, sends("alice", 1)).await;
    for second in 0..60 {
        let expected = Duration::from_secs(60 - second);
        assert_eq!(denial(&h, "alice").await.retry_after, expected, "the wait decreases with time");
        h.clock().advance(Duration::from_secs(1));
    }
    assert!(is_accepted(&send_one(&h, "alice").await), "the window ended on time");
}

/// How far the clock jumps in the cases below.
const AHEAD: Duration = Duration::from_secs(7_200);

pub async fn a_clock_set_back_denies_nobody_for_longer_than_a_window<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 2, 1).await;
    h.clock().advance(AHEAD);
    accept_batch(&h, sends("alice", 2)).await;
    h.clock().set_back(AHEAD);
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 1)).await), "D", "spent units stay spent");
    h.clock().advance(MINUTE - TICK);
    assert_eq!(denial(&h, "alice").await.retry_after, TICK, "the window began when the clock was set back");
    h.clock().advance(TICK);
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 3)).await), "AAD", "and has the usual length");
}

pub async fn a_clock_that_jumps_ahead_and_back_grants_at_most_one_extra_window<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 3, 1).await;
    accept_batch(&h, sends("alice", 3)).await;
    h.clock().advance(AHEAD);
    accept_batch(&h, sends("alice", 1)).await;
    h.clock().set_back(AHEAD);
    let sent = send_batch(&h, sends("alice", 9)).await;
    assert_eq!(
        outcome_letters(&sent),
        "AADDDDDDD",
        "only the rest of the window that began while the clock was ahead"
    );
    let row = find_quota(&h, "alice").await.expect("alice is configured");
    assert_eq!(row.current_count, 3);
}
