//! Limits that are changed without a new window, and lists of users.

use std::time::Duration;

use weir_core::Clock;
use weir_core::quota::Quota;

use crate::fixtures::{
    accept_batch, awkward_user_ids, configure, find_quota, limits, outcome_letters, send_batch, sends, user,
};
use crate::{HasQuota, START};

async fn change<H: HasQuota>(h: &H, user_id: &str, rate_limit: u32, minutes: u32) -> Quota {
    let changed = h.quota().change_limits(&user(user_id), limits(rate_limit, minutes)).await;
    changed.expect("change_limits must succeed")
}

async fn list<H: HasQuota>(h: &H, after: Option<&str>, limit: usize) -> Vec<(String, Quota)> {
    let after = after.map(user);
    let listed = h.quota().list(after.as_ref(), limit).await.expect("list must succeed");
    listed.into_iter().map(|(user, row)| (user.as_str().to_owned(), row)).collect()
}

pub async fn changed_limits_keep_the_window_and_its_count<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 5, 1).await;
    accept_batch(&h, sends("alice", 3)).await;
    h.clock().advance(Duration::from_secs(59));
    let expected = Quota { current_count: 3, ..Quota::new(limits(4, 2), START) };
    assert_eq!(change(&h, "alice", 4, 2).await, expected);
    assert_eq!(find_quota(&h, "alice").await, Some(expected));
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 2)).await), "AD", "one place is left");
    h.clock().advance(Duration::from_secs(61));
    assert_eq!(
        outcome_letters(&send_batch(&h, sends("alice", 5)).await),
        "AAAAD",
        "the longer window is over"
    );
}

pub async fn a_count_above_the_new_limit_stays_and_sends_wait_for_the_window<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 50, 1).await;
    accept_batch(&h, sends("alice", 7)).await;
    assert_eq!(change(&h, "alice", 2, 1).await.current_count, 7);
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 2)).await), "DD");
    let row = find_quota(&h, "alice").await.expect("alice is configured");
    assert_eq!((row.current_count, row.remaining()), (7, 0));
    let audit = h.quota().audit().await.expect("audit must succeed");
    assert_eq!(audit.over_limit, Vec::<String>::new(), "it was within the limit when it was counted");
    let h = h.reopen().await;
    assert_eq!(find_quota(&h, "alice").await, Some(row));
    change(&h, "alice", 8, 1).await;
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 2)).await), "AD");
    h.clock().advance(Duration::from_secs(60));
    change(&h, "alice", 1, 1).await;
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 2)).await), "AD");
}

/// Otherwise the audit would accept that count in every window until the limits are changed again.
pub async fn a_kept_count_is_forgotten_with_its_window<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 50, 1).await;
    accept_batch(&h, sends("alice", 7)).await;
    change(&h, "alice", 2, 1).await;
    // An audit reads what is counted in journals, too.
    let count_max = async || {
        h.quota().audit().await.expect("audit must succeed");
        h.count_max("alice").await
    };
    // What a cache held in advance may be kept, too.
    let kept = count_max().await;
    assert!(kept >= 7, "{kept}");
    h.clock().advance(Duration::from_secs(30));
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 1)).await), "D");
    assert_eq!(count_max().await, kept, "the window is the same");
    h.clock().advance(Duration::from_secs(30));
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 3)).await), "AAD");
    assert_eq!(count_max().await, 2);
}

pub async fn changed_limits_lift_a_denial_at_once<H: HasQuota>() {
    let h = H::open().await;
    configure(&h, "alice", 1, 1).await;
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 2)).await), "AD");
    change(&h, "alice", 3, 1).await;
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 3)).await), "AAD");
}

pub async fn changed_limits_create_a_user_and_revive_no_window<H: HasQuota>() {
    let h = H::open().await;
    assert_eq!(change(&h, "alice", 2, 1).await, Quota::new(limits(2, 1), START));
    accept_batch(&h, sends("alice", 2)).await;
    h.clock().advance(Duration::from_secs(60));
    let now = h.clock().now();
    assert_eq!(change(&h, "alice", 2, 60).await, Quota::new(limits(2, 60), now), "the window was over");
    assert_eq!(outcome_letters(&send_batch(&h, sends("alice", 3)).await), "AAD");
}

pub async fn users_are_listed_page_by_page_as_they_count_now<H: HasQuota>() {
    let h = H::open().await;
    assert_eq!(list(&h, None, 10).await, []);
    let mut names = awkward_user_ids();
    for (n, name) in names.iter().enumerate() {
        configure(&h, name, 100, 1 + u32::from(n % 2 == 0)).await;
        accept_batch(&h, sends(name, 1 + n % 3)).await;
    }
    h.clock().advance(Duration::from_secs(60));
    names.sort_unstable();
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = list(&h, after.as_deref(), 7).await;
        assert!(page.len() <= 7, "no more than asked for");
        let Some((last, _)) = page.last() else { break };
        after = Some(last.clone());
        listed.extend(page);
    }
    assert_eq!(listed.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(), names, "in byte order");
    for (name, row) in listed {
        assert_eq!(Some(row), find_quota(&h, &name).await, "{name:?} is listed as it counts now");
    }
}
