//! Limits on new requests of a tenant.

use std::time::Duration;

use weir_core::quota::QuotaLimits;
use weir_store::request::{Submit, SubmitOutcome, TenantLimit, TenantWindow};

use super::fixtures::{
    accept_batch, outcome_letters, request_audit, resubmission, submission, submission_for, submissions,
    submit_batch, tenant,
};
use crate::HasRequests;
use crate::fixtures::{TICK, limits};

const MINUTE: Duration = Duration::from_secs(60);

pub async fn exactly_the_limit_is_accepted<H: HasRequests>() {
    let h = H::open().await;
    let outcomes = submit_batch(&h, submissions(&h, "a", 5), limits(3, 1)).await;
    assert_eq!(outcome_letters(&outcomes), "AAALL");
    let refused = SubmitOutcome::Limited { limits: limits(3, 1), retry_after: MINUTE };
    assert_eq!(outcomes[3..], [refused.clone(), refused]);
    assert_eq!(request_audit(&h).await.accepted, 3, "limited submissions are not stored");
}

pub async fn counts_carry_over_from_batch_to_batch<H: HasRequests>() {
    let h = H::open().await;
    for (n, expected) in ["AA", "AA", "AL", "LL"].into_iter().enumerate() {
        assert_eq!(
            outcome_letters(&submit_batch(&h, submissions(&h, &format!("k{n}"), 2), limits(5, 1)).await),
            expected
        );
    }
    assert_eq!(request_audit(&h).await.accepted, 5);
}

pub async fn a_full_window_says_how_long_to_wait_and_ends_on_time<H: HasRequests>() {
    let h = H::open().await;
    accepted_within(&h, 2).await;
    for waited in [Duration::ZERO, Duration::from_micros(12_345_678), MINUTE - TICK] {
        let elapsed = weir_core::Clock::now(h.clock()).since(crate::START);
        h.clock().advance(waited - elapsed);
        let outcomes = submit_batch(&h, vec![submission(&h, "late")], limits(2, 1)).await;
        let retry_after = MINUTE - waited;
        assert_eq!(outcomes, [SubmitOutcome::Limited { limits: limits(2, 1), retry_after }]);
    }
    h.clock().advance(TICK);
    let batch = vec![submission(&h, "late"), submission(&h, "later"), submission(&h, "latest")];
    assert_eq!(
        outcome_letters(&submit_batch(&h, batch, limits(2, 1)).await),
        "AAL",
        "limited submissions do not use their key"
    );
}

async fn accepted_within<H: HasRequests>(h: &H, count: usize) {
    let outcomes = submit_batch(h, submissions(h, "first", count), limits(2, 1)).await;
    assert_eq!(outcome_letters(&outcomes), "A".repeat(count));
}

pub async fn replays_and_conflicts_do_not_count<H: HasRequests>() {
    let h = H::open().await;
    let sent = submission(&h, "k");
    let mut batch = vec![sent.clone()];
    batch.extend((0..10).map(|_| resubmission(&h, &sent)));
    batch.push(submission_for(&h, sent.tenant.as_str(), "k", "else"));
    batch.push(submission(&h, "l"));
    batch.push(submission(&h, "m"));
    batch.push(resubmission(&h, &sent));
    assert_eq!(outcome_letters(&submit_batch(&h, batch, limits(2, 1)).await), "ARRRRRRRRRRCALR");
    assert_eq!(
        outcome_letters(
            &submit_batch(&h, vec![resubmission(&h, &sent), submission(&h, "m")], limits(2, 1)).await
        ),
        "RL"
    );
}

pub async fn each_tenant_has_its_own_window<H: HasRequests>() {
    let h = H::open().await;
    let of_tenant = |tenant: &str, n: usize| submission_for(&h, tenant, &format!("k{n}"), "what");
    let batch =
        vec![of_tenant("a", 0), of_tenant("b", 0), of_tenant("a", 1), of_tenant("b", 1), of_tenant("c", 0)];
    assert_eq!(outcome_letters(&submit_batch(&h, batch, limits(1, 1)).await), "AALLA");
    h.clock().advance(MINUTE / 2);
    assert_eq!(outcome_letters(&submit_batch(&h, vec![of_tenant("d", 0)], limits(1, 1)).await), "A");
    h.clock().advance(MINUTE / 2);
    let batch = vec![of_tenant("d", 1), of_tenant("a", 1), of_tenant("b", 1)];
    assert_eq!(
        outcome_letters(&submit_batch(&h, batch, limits(1, 1)).await),
        "LAA",
        "each window ends at its own time"
    );
}

pub async fn without_limits_nothing_is_limited_nor_counted<H: HasRequests>() {
    let h = H::open().await;
    accept_batch(&h, submissions(&h, "a", 20)).await;
    assert_eq!(outcome_letters(&submit_batch(&h, submissions(&h, "b", 3), limits(2, 1)).await), "AAL");
    accept_batch(&h, submissions(&h, "c", 20)).await;
    assert_eq!(request_audit(&h).await.accepted, 42);
}

pub async fn changed_limits_apply_from_the_next_batch<H: HasRequests>() {
    let h = H::open().await;
    assert_eq!(outcome_letters(&submit_batch(&h, submissions(&h, "a", 3), limits(2, 1)).await), "AAL");
    assert_eq!(outcome_letters(&submit_batch(&h, submissions(&h, "b", 3), limits(4, 1)).await), "AAL");
    assert_eq!(outcome_letters(&submit_batch(&h, submissions(&h, "c", 1), limits(1, 1)).await), "L");
    let largest = limits(QuotaLimits::MAX, QuotaLimits::MAX);
    assert_eq!(outcome_letters(&submit_batch(&h, submissions(&h, "d", 1), largest).await), "A");
}

pub async fn a_receipt_says_what_is_left_of_the_limits<H: HasRequests>() {
    let h = H::open().await;
    let sent = submissions(&h, "a", 3);
    let left = |outcomes: &[SubmitOutcome]| -> Vec<Option<TenantWindow>> {
        let window = |outcome: &SubmitOutcome| match outcome {
            SubmitOutcome::Accepted(receipt) | SubmitOutcome::Replayed(receipt) => receipt.window,
            other => panic!("{other:?}"),
        };
        outcomes.iter().map(window).collect()
    };
    let window = |remaining, reset_after| Some(TenantWindow { limits: limits(5, 1), remaining, reset_after });
    let outcomes = submit_batch(&h, sent.clone(), limits(5, 1)).await;
    assert_eq!(left(&outcomes), [window(4, MINUTE), window(3, MINUTE), window(2, MINUTE)]);
    h.clock().advance(MINUTE / 4);
    let again = vec![resubmission(&h, &sent[0]), submission(&h, "b")];
    let outcomes = submit_batch(&h, again, limits(5, 1)).await;
    assert_eq!(outcome_letters(&outcomes), "RA");
    assert_eq!(left(&outcomes), [window(2, MINUTE * 3 / 4), window(1, MINUTE * 3 / 4)]);
    h.clock().advance(MINUTE);
    let outcomes = submit_batch(&h, vec![resubmission(&h, &sent[0])], limits(5, 1)).await;
    assert_eq!(left(&outcomes), [window(5, MINUTE)], "the window has passed, and a replay begins none");
    let outcomes = submit_batch(&h, submissions(&h, "c", 1), None).await;
    assert_eq!(left(&outcomes), [None]);
}

pub async fn tenants_of_one_batch_may_have_different_limits<H: HasRequests>() {
    let h = H::open().await;
    let of = |tenant: &str, n: usize, most: Option<u32>| Submit {
        limits: most.map(|most| limits(most, 1)),
        ..submission_for(&h, tenant, &format!("k{n}"), "what")
    };
    let batch: Vec<Submit> =
        (0..4).flat_map(|n| [of("a", n, Some(1)), of("b", n, Some(3)), of("c", n, None)]).collect();
    let outcomes = h.requests().submit_batch(batch.into()).await.expect("submit_batch must succeed");
    assert_eq!(outcome_letters(&outcomes), "AAALAALAALLA");
    // Limits that change within a batch apply from one submission to the next.
    let batch = vec![of("b", 8, Some(4)), of("b", 9, Some(4)), of("b", 10, None), of("b", 11, Some(9))];
    let outcomes = h.requests().submit_batch(batch.into()).await.expect("submit_batch must succeed");
    assert_eq!(outcome_letters(&outcomes), "ALAA");
}

pub async fn limits_of_tenants_are_stored_until_they_are_removed<H: HasRequests>() {
    let h = H::open().await;
    let store = h.requests();
    let all = async || store.tenant_limits().await.expect("tenant_limits must succeed");
    let put = async |limit: &TenantLimit| store.put_tenant_limit(limit).await.expect("put_tenant_limit");
    let limit = |name: &str, most: Option<u32>| TenantLimit {
        tenant: tenant(name),
        limits: most.map(|most| limits(most, 1)),
    };
    assert_eq!(all().await, []);
    for set in [limit("b", Some(5)), limit("a'", None), limit("b", Some(QuotaLimits::MAX))] {
        assert!(put(&set).await);
    }
    assert_eq!(all().await, [limit("a'", None), limit("b", Some(QuotaLimits::MAX))]);
    let remove = async |name| store.delete_tenant_limit(&tenant(name)).await.expect("delete_tenant_limit");
    assert_eq!((remove("b").await, remove("b").await, remove("c").await), (true, false, false));
    assert_eq!(all().await, [limit("a'", None)]);
}
