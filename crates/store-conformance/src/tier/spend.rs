//! Taking, charging and refunding under policies.

use std::sync::Arc;
use std::time::Duration;

use weir_core::tier::{Decision, FixedWindow, Limit, LimitDenial, SlidingWindow, TokenBucket};
use weir_store::tier::{LimitCheck, Policy};

use super::fixtures::{
    MINUTE, bucket, fixed, limit_state, policy, remaining, retry_after, server_sharing_counts, shadow,
    sliding, take, take_all, with_limit,
};
use crate::HasLimits;

const MICRO: Duration = Duration::from_micros(1);

pub async fn a_key_may_spend_its_limit_and_no_more<H: HasLimits>() {
    let h = H::open().await;
    for limit in [bucket(5, 1), fixed(5), sliding(5)] {
        let policy = policy(limit);
        for left in (0..5).rev() {
            assert!(take(&h, &policy, "k", 1).await.is_allowed(), "{limit:?}");
            assert_eq!(remaining(&h, &policy, "k").await, left);
        }
        assert!(!take(&h, &policy, "k", 1).await.is_allowed());
        assert_eq!(remaining(&h, &policy, "k").await, 0);
    }
}

pub async fn a_bucket_refills_to_the_microsecond<H: HasLimits>() {
    let h = H::open().await;
    // 7 a minute: a token takes 8 571 428 and 4/7 microseconds.
    let policy = policy(bucket(7, 7));
    assert!(take(&h, &policy, "k", 7).await.is_allowed());
    let mut now = 0;
    for token in 1..=7_u64 {
        let due = (60_000_000 * token).div_ceil(7);
        h.clock().advance(Duration::from_micros(due - 1 - now));
        assert_eq!(retry_after(take(&h, &policy, "k", 1).await), Some(MICRO), "token {token}");
        h.clock().advance(MICRO);
        now = due;
        assert!(take(&h, &policy, "k", 1).await.is_allowed(), "token {token}");
    }
    h.clock().advance(MINUTE);
    assert_eq!(
        limit_state(&h, &policy, "k").await.reset_after,
        Duration::ZERO,
        "a minute pays for seven, exactly"
    );
}

pub async fn a_fixed_window_ends_on_time<H: HasLimits>() {
    let h = H::open().await;
    let policy = policy(fixed(2));
    h.clock().advance(Duration::from_secs(7));
    assert!(take(&h, &policy, "k", 2).await.is_allowed());
    assert_eq!(
        retry_after(take(&h, &policy, "k", 1).await),
        Some(MINUTE),
        "the window starts with the first take"
    );
    h.clock().advance(MINUTE - MICRO);
    assert_eq!(retry_after(take(&h, &policy, "k", 1).await), Some(MICRO));
    h.clock().advance(MICRO);
    assert!(take(&h, &policy, "k", 1).await.is_allowed());
    assert_eq!(limit_state(&h, &policy, "k").await.reset_after, MINUTE);
}

pub async fn a_sliding_window_decays_to_the_microsecond<H: HasLimits>() {
    let h = H::open().await;
    let policy = policy(sliding(7));
    assert!(take(&h, &policy, "k", 7).await.is_allowed());
    // Of the last window at most six sevenths may remain: 8 571 429 microseconds into the next one.
    let due = MINUTE + Duration::from_micros(8_571_429);
    assert_eq!(retry_after(take(&h, &policy, "k", 1).await), Some(due));
    h.clock().advance(due - MICRO);
    assert_eq!(retry_after(take(&h, &policy, "k", 1).await), Some(MICRO));
    h.clock().advance(MICRO);
    assert!(take(&h, &policy, "k", 1).await.is_allowed());
    assert!(!take(&h, &policy, "k", 1).await.is_allowed());
    h.clock().advance(2 * MINUTE);
    assert_eq!(remaining(&h, &policy, "k").await, 7);
}

pub async fn a_denied_decision_spends_nothing<H: HasLimits>() {
    let h = H::open().await;
    let (few, many, window) = (policy(bucket(1, 1)), policy(sliding(10)), policy(fixed(10)));
    let asks = [(&many, "a", 4), (&few, "b", 1), (&window, "c", 4)];
    assert!(take_all(&h, &asks).await.decision.is_allowed());
    let denied = take_all(&h, &asks).await;
    assert_eq!(denied.decision, Decision::Denied(LimitDenial { denied_by: 1, retry_after: Some(MINUTE) }));
    let individual: Vec<bool> = denied.each.iter().map(|(decision, _)| decision.is_allowed()).collect();
    assert_eq!(individual, [true, false, true]);
    assert_eq!((remaining(&h, &many, "a").await, remaining(&h, &window, "c").await), (6, 6));
}

pub async fn the_costs_of_the_same_key_add_up<H: HasLimits>() {
    let h = H::open().await;
    for limit in [bucket(5, 1), fixed(5), sliding(5)] {
        let policy = policy(limit);
        assert!(!take_all(&h, &[(&policy, "k", 3), (&policy, "k", 3)]).await.decision.is_allowed());
        assert_eq!(remaining(&h, &policy, "k").await, 5);
        assert!(take_all(&h, &[(&policy, "k", 3), (&policy, "k", 2)]).await.decision.is_allowed());
        assert_eq!(remaining(&h, &policy, "k").await, 0);
    }
}

pub async fn a_cost_of_0_is_always_allowed<H: HasLimits>() {
    let h = H::open().await;
    for limit in [bucket(2, 1), fixed(2), sliding(2)] {
        let policy = policy(limit);
        assert!(take(&h, &policy, "k", 0).await.is_allowed());
        assert_eq!(remaining(&h, &policy, "k").await, 2);
        assert!(take(&h, &policy, "k", 2).await.is_allowed());
        assert!(take(&h, &policy, "k", 0).await.is_allowed(), "a cost of 0 always fits");
    }
}

pub async fn a_cost_above_the_limit_never_fits<H: HasLimits>() {
    let h = H::open().await;
    for limit in [bucket(5, 1), fixed(5), sliding(5)] {
        let policy = policy(limit);
        assert_eq!(retry_after(take(&h, &policy, "k", 6).await), None);
        assert_eq!(retry_after(take(&h, &policy, "k", Limit::MAX).await), None);
        assert_eq!(remaining(&h, &policy, "k").await, 5);
    }
}

pub async fn a_peek_spends_nothing<H: HasLimits>() {
    let h = H::open().await;
    for limit in [bucket(5, 1), fixed(5), sliding(5)] {
        let policy = policy(limit);
        for (cost, fits) in [(5, true), (6, false), (1, true)] {
            let ask = LimitCheck { policy: &policy, key: "k", cost };
            let peeked = h.limits().take(&[ask], true).await.expect("take must succeed");
            assert_eq!(peeked.decision.is_allowed(), fits);
        }
        assert_eq!(remaining(&h, &policy, "k").await, 5);
    }
}

pub async fn a_shadow_never_denies<H: HasLimits>() {
    let h = H::open().await;
    let (watch, bind) = (shadow(fixed(1)), policy(fixed(2)));
    for (at, fits) in [true, false].into_iter().enumerate() {
        let taken = take_all(&h, &[(&watch, "k", 1), (&bind, "k", 1)]).await;
        assert!(taken.decision.is_allowed());
        assert_eq!(taken.each[0].0.is_allowed(), fits, "it reports what it would have decided, take {at}");
    }
    let denied = take_all(&h, &[(&watch, "other", 1), (&bind, "k", 1)]).await;
    assert!(matches!(denied.decision, Decision::Denied(LimitDenial { denied_by: 1, .. })));
    assert_eq!(
        remaining(&h, &watch, "other").await,
        1,
        "a denied decision spends nothing of a shadow either"
    );
    assert!(take_all(&h, &[(&watch, "k", 5)]).await.decision.is_allowed());
}

pub async fn keys_and_policies_stay_distinct<H: HasLimits>() {
    let h = H::open().await;
    let (one, other) = (policy(fixed(1)), policy(fixed(1)));
    for key in
        ["k", "K", "k ", "{k}", "}k{", "{", "}", "{}", "%7B", "k:l", "ü", "a\u{301}", "á", "🦀", "x'\"\\"]
    {
        assert!(take(&h, &one, key, 1).await.is_allowed(), "{key}");
        assert!(take(&h, &other, key, 1).await.is_allowed(), "{key}");
        assert!(!take(&h, &one, key, 1).await.is_allowed(), "{key}");
    }
}

pub async fn a_refund_never_fills_past_full<H: HasLimits>() {
    let h = H::open().await;
    for limit in [bucket(5, 1), fixed(5), sliding(5)] {
        let policy = policy(limit);
        let give = async |cost: u32| {
            h.limits().give_back(&policy, "k", cost, None).await.expect("give_back must succeed");
            remaining(&h, &policy, "k").await
        };
        assert_eq!(give(3).await, 5);
        assert!(take(&h, &policy, "k", 4).await.is_allowed());
        assert_eq!(give(1).await, 2);
        assert_eq!(give(Limit::MAX).await, 5);
        assert!(take(&h, &policy, "k", 5).await.is_allowed());
        assert!(!take(&h, &policy, "k", 1).await.is_allowed(), "{limit:?}");
    }
}

pub async fn a_refund_into_a_past_window_is_worth_nothing<H: HasLimits>() {
    let h = H::open().await;
    let (fixed, sliding) = (policy(fixed(5)), policy(sliding(5)));
    let mut taken_at = None;
    for policy in [&fixed, &sliding] {
        taken_at = Some(take_all(&h, &[(policy, "k", 3)]).await.now);
    }
    h.clock().advance(3 * MINUTE);
    for policy in [&fixed, &sliding] {
        assert!(take(&h, policy, "k", 2).await.is_allowed());
        h.limits().give_back(policy, "k", 3, taken_at).await.expect("give_back must succeed");
        assert_eq!(remaining(&h, policy, "k").await, 3);
    }
}

pub async fn a_debt_is_paid_off_first<H: HasLimits>() {
    let h = H::open().await;
    let policy = policy(bucket(5, 5));
    h.limits().charge(&policy, "k", 8).await.expect("charge must succeed");
    assert_eq!(
        retry_after(take(&h, &policy, "k", 1).await),
        Some(Duration::from_secs(48)),
        "four tokens are missing"
    );
    h.clock().advance(Duration::from_secs(48));
    assert!(take(&h, &policy, "k", 1).await.is_allowed());
    assert!(!take(&h, &policy, "k", 1).await.is_allowed());
}

pub async fn a_forgotten_key_has_spent_nothing<H: HasLimits>() {
    let h = H::open().await;
    for limit in [bucket(5, 1), fixed(5), sliding(5)] {
        let policy = policy(limit);
        h.limits().forget(&policy, "k").await.expect("forget must succeed");
        h.limits().charge(&policy, "k", 50).await.expect("charge must succeed");
        assert!(take(&h, &policy, "l", 1).await.is_allowed());
        h.limits().forget(&policy, "k").await.expect("forget must succeed");
        assert_eq!((remaining(&h, &policy, "k").await, remaining(&h, &policy, "l").await), (5, 4));
        assert!(take(&h, &policy, "k", 5).await.is_allowed());
        assert!(!take(&h, &policy, "k", 1).await.is_allowed());
    }
}

pub async fn what_was_spent_stays_spent_under_another_limit<H: HasLimits>() {
    let h = H::open().await;
    let before = policy(bucket(40, 30));
    assert!(take(&h, &before, "k", 30).await.is_allowed());
    let small = with_limit(&before, bucket(8, 5));
    assert_eq!(retry_after(take(&h, &small, "k", 1).await), Some(23 * Duration::from_secs(12)));
    let larger = with_limit(&before, bucket(50, 5));
    assert_eq!(remaining(&h, &larger, "k").await, 20, "only the capacity changed");
    let window = with_limit(&before, fixed(35));
    assert_eq!(remaining(&h, &window, "k").await, 5);
    assert!(take(&h, &window, "k", 5).await.is_allowed());
    assert_eq!(remaining(&h, &with_limit(&before, sliding(40)), "k").await, 5);
}

pub async fn the_largest_numbers_hold<H: HasLimits>() {
    let h = H::open().await;
    let longest = Limit::MAX_PERIOD;
    let widest = [
        Limit::TokenBucket(TokenBucket::new(Limit::MAX, Limit::MAX, longest).expect("valid")),
        Limit::FixedWindow(FixedWindow::new(Limit::MAX, longest).expect("valid")),
        Limit::SlidingWindow(SlidingWindow::new(Limit::MAX, longest).expect("valid")),
    ];
    for limit in widest {
        let policy = policy(limit);
        assert!(take(&h, &policy, "k", Limit::MAX - 1).await.is_allowed());
        assert_eq!(remaining(&h, &policy, "k").await, 1, "{limit:?}");
        assert!(take(&h, &policy, "k", 1).await.is_allowed());
        assert!(!take(&h, &policy, "k", 1).await.is_allowed());
    }
    let slowest = policy(Limit::TokenBucket(TokenBucket::new(Limit::MAX, 1, longest).expect("valid")));
    assert!(take(&h, &slowest, "k", 3).await.is_allowed());
    assert_eq!(remaining(&h, &slowest, "k").await, Limit::MAX - 3);
    h.clock().advance(longest);
    assert_eq!(remaining(&h, &slowest, "k").await, Limit::MAX - 2);
}

/// Buckets that take centuries to fill, as configured by people who want no refill.
pub async fn the_slowest_buckets_are_exact<H: HasLimits>() {
    let h = H::open().await;
    let year = Duration::from_secs(365 * 86_400);
    for capacity in [100, 140, 145, 290, 1_000, 1_000_000, Limit::MAX] {
        let policy = policy(Limit::TokenBucket(TokenBucket::new(capacity, 1, year).expect("valid")));
        let spent = capacity / 10 * 6;
        assert!(take(&h, &policy, "k", spent).await.is_allowed());
        assert_eq!(remaining(&h, &policy, "k").await, capacity - spent, "{capacity}");
        assert!(!take(&h, &policy, "k", spent).await.is_allowed(), "{capacity}");
        assert!(take(&h, &policy, "k", capacity - spent).await.is_allowed(), "{capacity}");
        assert!(!take(&h, &policy, "k", 1).await.is_allowed(), "{capacity}");
        h.limits().charge(&policy, "k", 50).await.expect("an answer");
        h.limits().give_back(&policy, "k", spent, None).await.expect("an answer");
        assert_eq!(remaining(&h, &policy, "k").await, spent - 50, "{capacity}");
        h.clock().advance(year);
        assert_eq!(remaining(&h, &policy, "k").await, spent - 49, "{capacity}");
        h.limits().give_back(&policy, "k", Limit::MAX, None).await.expect("an answer");
        assert_eq!(remaining(&h, &policy, "k").await, capacity, "{capacity}");
    }
}

async fn take_in_parallel<H: HasLimits>(hs: &[Arc<H>], policy: &Arc<Policy>, count: usize) -> u32 {
    let takes: Vec<_> = (0..count)
        .map(|n| {
            let (h, policy) = (Arc::clone(&hs[n % hs.len()]), Arc::clone(policy));
            tokio::spawn(async move { take(&*h, &policy, "k", 1).await.is_allowed() })
        })
        .collect();
    let mut allowed = 0;
    for take in takes {
        allowed += u32::from(take.await.expect("a take"));
    }
    allowed
}

pub async fn parallel_takes_never_pass_the_limit<H: HasLimits>() {
    let h = Arc::new(H::open().await);
    for limit in [bucket(17, 1), fixed(17), sliding(17)] {
        assert_eq!(take_in_parallel(&[Arc::clone(&h)], &policy(limit), 200).await, 17);
    }
}

pub async fn servers_that_share_counts_never_pass_the_limit<H: HasLimits>() {
    let h = H::open().await;
    let Some(other) = server_sharing_counts(&h).await else { return };
    let hs = [Arc::new(h), Arc::new(other)];
    for limit in [bucket(17, 1), fixed(17), sliding(17)] {
        assert_eq!(take_in_parallel(&hs, &policy(limit), 200).await, 17);
    }
}

pub async fn parallel_decisions_over_keys_in_any_order_are_all_or_nothing<H: HasLimits>() {
    let h = Arc::new(H::open().await);
    let (a, b) = (policy(fixed(20)), policy(bucket(20, 1)));
    let tasks: Vec<_> = (0..60)
        .map(|n| {
            let (h, a, b) = (Arc::clone(&h), Arc::clone(&a), Arc::clone(&b));
            tokio::spawn(async move {
                let both = [(&a, "k", 1), (&b, "k", 2)];
                let other = [(&b, "k", 2), (&a, "k", 1)];
                take_all(&*h, if n % 2 == 0 { &both } else { &other }).await.decision.is_allowed()
            })
        })
        .collect();
    let mut allowed = 0;
    for task in tasks {
        allowed += u32::from(task.await.expect("a decision"));
    }
    assert_eq!(allowed, 10);
    assert_eq!((remaining(&*h, &a, "k").await, remaining(&*h, &b, "k").await), (10, 0));
}
