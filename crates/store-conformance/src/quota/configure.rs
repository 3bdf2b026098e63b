//! Configuring, finding and removing users.

use std::time::Duration;

use weir_core::quota::{Quota, QuotaLimits};
use weir_core::{Clock, Timestamp};
use weir_queue::QueueAudit;
use weir_store::quota::SendOutcome;

use crate::fixtures::{
    accept_batch, awkward_user_ids, configure, find_quota, is_accepted, limits, outcome_letters, queue_audit,
    send, send_batch, send_one, sends, user,
};
use crate::{HasQuota, START};

pub async fn a_new_engine_is_empty_and_its_clock_shows_the_start<H: HasQuota>() {
    let h = H::open().await;
    assert_eq!(h.clock().now(), START, "a fixture opens at the suite's start");
    assert_eq!(
        h.quota().audit().await.expect("audit must succeed"),
        Default::default(),
        "a new engine has no users"
    );
    assert_eq!(queue_audit(&h).await, QueueAudit::default(), "a new engine has an empty queue");
}

pub async fn configure_creates_a_row_with_nothing_spent<H: HasQuota>() {
    let h = H::open().await;
    let expected = Quota::new(limits(5, 2), START);
    assert_eq!(configure(&h, "alice", 5, 2).await, expected, "configure answers with the row");
    assert_eq!(find_quota(&h, "alice").await, Some(expected), "the row can be found");
}

pub async fn configure_again_replaces_the_limits_and_starts_the_count_again<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 2).await;
    accept_batch(&h, sends("alice", 3)).await;
    h.clock().advance(Duration::from_micros(10_000_001));
    let later = Timestamp::from_micros(START.as_micros() + 10_000_001);
    let expected = Quota::new(limits(2, 7), later);
    assert_eq!(configure(&h, "alice", 2, 7).await, expected, "the new limits begin a window of their own");
    assert_eq!(find_quota(&h, "alice").await, Some(expected), "the row was replaced");
    let outcomes = send_batch(&h, sends("alice", 3)).await;
    assert_eq!(outcome_letters(&outcomes), "AAD", "the new limit holds from a count of 0");
}

pub async fn configure_again_lets_a_denied_user_send_at_once<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 2)).await), "AD", "the limit is 1");
    configure(&h, "alice", 1, 1).await;
    assert!(
        is_accepted(&send_one(&h, "alice").await),
        "the count starts again even when the limits are the same"
    );
}

pub async fn configure_touches_no_other_user<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 2).await;
    configure(&h, "bob", 3, 1).await;
    accept_batch(&h, sends("bob", 2)).await;
    let bob = find_quota(&h, "bob").await;
    h.clock().advance(Duration::from_secs(1));
    configure(&h, "alice", 9, 9).await;
    assert_eq!(find_quota(&h, "bob").await, bob, "another user's row stays as it was");
}

pub async fn find_of_an_unknown_user_is_none<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 1).await;
    assert_eq!(find_quota(&h, "nobody").await, None, "an unknown user has no row");
}

pub async fn find_counts_the_sends_of_the_current_window<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 1).await;
    for spent in 1..=5 {
        accept_batch(&h, sends("alice", 1)).await;
        h.clock().advance(Duration::from_secs(2));
        let row = find_quota(&h, "alice").await.expect("alice is configured");
        assert_eq!((row.current_count, row.last_refresh), (spent, START), "every accepted send counts one");
    }
}

pub async fn remove_returns_whether_there_was_a_row<H: HasQuota>() {
    let h = H::open().await;
    let remove = async |name: &str| h.quota().remove(&user(name)).await.expect("remove must succeed");
    configure(&h, "alice", 5, 1).await;
    configure(&h, "bob", 5, 1).await;
    assert!(!remove("nobody").await, "there was no such row");
    assert!(remove("alice").await, "there was a row");
    assert!(!remove("alice").await, "the row is already removed");
    assert_eq!(find_quota(&h, "alice").await, None, "a removed user has no row");
    assert!(find_quota(&h, "bob").await.is_some(), "no other row is removed");
}

pub async fn a_removed_user_is_not_configured<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 1).await;
    accept_batch(&h, sends("alice", 1)).await;
    h.quota().remove(&user("alice")).await.expect("remove must succeed");
    assert_eq!(send_one(&h, "alice").await, SendOutcome::NotConfigured, "a removed user cannot send");
    assert_eq!(queue_audit(&h).await.accepted, 1, "nothing is enqueued for a removed user");
}

pub async fn a_user_configured_after_removal_starts_afresh<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 2, 5).await;
    accept_batch(&h, sends("alice", 2)).await;
    h.quota().remove(&user("alice")).await.expect("remove must succeed");
    h.clock().advance(Duration::from_secs(30));
    let row = configure(&h, "alice", 2, 5).await;
    let expected = Quota::new(limits(2, 5), h.clock().now());
    assert_eq!(row, expected, "nothing of a removed row remains");
    assert_eq!(
        outcome_letters(&send_batch(&h, sends("alice", 3)).await),
        "AAD",
        "the whole limit is available again"
    );
}

pub async fn awkward_user_ids_are_distinct_users<H: HasQuota>() {
    let h = H::open().await;
    let names = awkward_user_ids();
    for (limit, name) in (1..).zip(&names) {
        let found = find_quota(&h, name).await;
        assert_eq!(found, None, "{name:?} must not be mixed up with an earlier user");
        configure(&h, name, limit, 1).await;
    }
    let batch = names.iter().map(|name| send(name, "hello")).collect();
    let outcomes = send_batch(&h, batch).await;
    for ((limit, name), outcome) in (1..).zip(&names).zip(outcomes) {
        let SendOutcome::Accepted { limits, grant, .. } = outcome else {
            panic!("{name:?} is configured and may send, but the answer is {outcome:?}");
        };
        assert_eq!(
            (limits.rate_limit(), grant.remaining),
            (limit, limit - 1),
            "{name:?} has limits of its own"
        );
        let row = find_quota(&h, name).await.expect("an awkward user is found");
        assert_eq!((row.limits, row.current_count), (limits, 1), "{name:?} has a count of its own");
    }
    for name in &names {
        assert!(h.quota().remove(&user(name)).await.expect("remove must succeed"), "{name:?} can be removed");
    }
    assert_eq!(h.quota().audit().await.expect("audit must succeed").users, 0, "each id removed its own row");
}

pub async fn the_largest_limits_hold<H: HasQuota>() {
    let h = H::open().await;
    let row = configure(&h, "alice", QuotaLimits::MAX, QuotaLimits::MAX).await;
    assert_eq!(row.limits, limits(2_147_483_647, 2_147_483_647), "the largest limits are stored");
    let SendOutcome::Accepted { grant, .. } = send_one(&h, "alice").await else {
        panic!("a send within the largest limit must be accepted");
    };
    let end = Timestamp::from_micros(START.as_micros() + 2_147_483_647 * 60_000_000);
    assert_eq!(
        (grant.remaining, grant.reset_at),
        (QuotaLimits::MAX - 1, end),
        "the largest window ends where it should"
    );
    configure(&h, "bob", 1, QuotaLimits::MAX).await;
    accept_batch(&h, sends("bob", 1)).await;
    h.clock().advance(Duration::from_secs(86_400 * 365));
    let SendOutcome::Denied { denial, at, .. } = send_one(&h, "bob").await else {
        panic!("the largest window must not pass within a year");
    };
    assert_eq!(denial.retry_after, end.since(at), "the wait is the rest of the largest window");
}
