//! The classification of every outcome, and the bounds of the waits.

use std::time::Duration;

use proptest::prelude::*;
use weir_core::request::breaker::DownstreamHealth;
use weir_core::request::retry::{
    CallOutcome, FailureCause, RetryBackoff, RetryBackoffError, RetryDecision, RetryPolicy, classify,
};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn answered(status: u16) -> CallOutcome {
    CallOutcome::Answered { status, retry_after: None }
}

const fn retry(cause: FailureCause) -> RetryDecision {
    RetryDecision::Retry { cause, retry_after: None }
}

#[test]
fn every_status_has_a_meaning() {
    for status in 0..=999 {
        let expected = match status {
            202 => RetryDecision::AwaitCallback,
            200..=299 => RetryDecision::Complete,
            300..=399 => RetryDecision::Fail(FailureCause::Redirected(status)),
            408 | 425 | 429 => retry(FailureCause::Busy(status)),
            400..=499 => RetryDecision::Fail(FailureCause::Rejected(status)),
            _ => retry(FailureCause::ServerError(status)),
        };
        assert_eq!(classify(answered(status)), expected, "{status}");
    }
}

#[test]
fn a_call_that_the_downstream_may_not_have_received_is_retried() {
    assert_eq!(classify(CallOutcome::TimedOut), retry(FailureCause::TimedOut));
    assert_eq!(classify(CallOutcome::Unreachable), retry(FailureCause::Unreachable));
    assert_eq!(classify(CallOutcome::Unreadable), retry(FailureCause::Unreadable));
    assert_eq!(classify(CallOutcome::TooLarge), RetryDecision::Fail(FailureCause::TooLarge));
}

#[test]
fn only_a_downstream_that_has_to_be_called_again_is_down() {
    let health = |outcome| classify(outcome).health();
    assert_eq!(
        [200, 202, 302, 404, 408, 425, 429].map(|status| health(answered(status))),
        [DownstreamHealth::Up; 7]
    );
    assert_eq!([500, 503].map(|status| health(answered(status))), [DownstreamHealth::Down; 2]);
    assert_eq!(
        [CallOutcome::TimedOut, CallOutcome::Unreachable, CallOutcome::Unreadable].map(health),
        [DownstreamHealth::Down; 3]
    );
}

#[test]
fn retry_after_is_returned_for_retried_statuses() {
    for status in [408, 425, 429, 500, 503] {
        let outcome = CallOutcome::Answered { status, retry_after: Some(ms(7_000)) };
        assert!(
            matches!(classify(outcome), RetryDecision::Retry { retry_after: Some(wait), .. } if wait == ms(7_000)),
            "{status}"
        );
    }
}

#[test]
fn a_failure_cause_has_a_code_and_a_message() {
    let rejected = classify(answered(422)).cause().unwrap();
    assert_eq!(
        (rejected.code(), rejected.to_string().as_str()),
        ("DOWNSTREAM_REJECTED", "the downstream answered 422")
    );
    assert_eq!(classify(answered(200)).cause(), None);
    assert_eq!(classify(CallOutcome::TimedOut).cause().map(FailureCause::code), Some("DOWNSTREAM_TIMEOUT"));
}

#[test]
fn the_default_policy_has_the_documented_figures() {
    let policy = RetryPolicy::default();
    assert_eq!(policy.max_attempts.get(), 5);
    let ceilings = [1, 2, 3, 4, 7, 8, 31, 32, u32::MAX].map(|attempts| policy.backoff.ceiling(attempts));
    assert_eq!(ceilings, [400, 800, 1_600, 3_200, 25_600, 30_000, 30_000, 30_000, 30_000].map(ms));
    assert_eq!(policy.backoff.wait(1, None, 0), ms(200));
    assert_eq!(policy.backoff.wait(1, None, u64::MAX), ms(400));
    assert_eq!(policy.backoff.wait(9, None, u64::MAX), ms(30_000));
}

#[test]
fn retry_after_is_honoured_within_the_range() {
    let wait = |asked: u64| RetryBackoff::DEFAULT.wait(1, Some(ms(asked)), 0);
    assert_eq!([wait(0), wait(199), wait(5_000), wait(3_600_000)], [200, 200, 5_000, 30_000].map(ms));
    assert_eq!(
        RetryBackoff::DEFAULT.wait(4, Some(ms(500)), u64::MAX),
        ms(3_200),
        "not sooner than without it"
    );
}

#[test]
fn a_backoff_is_a_range() {
    assert_eq!(RetryBackoff::new(Duration::ZERO, ms(1)), Err(RetryBackoffError));
    assert_eq!(RetryBackoff::new(ms(2), ms(1)), Err(RetryBackoffError));
    assert_eq!(RetryBackoff::new(ms(1), Duration::MAX), Err(RetryBackoffError));
    assert!(RetryBackoff::new(ms(1), ms(1)).is_ok());
    assert_eq!(RetryBackoff::new(ms(200), ms(30_000)), Ok(RetryBackoff::DEFAULT));
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    (1_u64..=86_400_000).prop_flat_map(|cap| (1..=cap, Just(cap)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, ..ProptestConfig::default() })]

    #[test]
    fn a_wait_stays_in_its_range(
        (first, cap) in range(), attempts in any::<u32>(), random in any::<u64>(), asked in any::<Option<u64>>(),
    ) {
        let backoff = RetryBackoff::new(ms(first), ms(cap)).unwrap();
        let wait = backoff.wait(attempts, asked.map(Duration::from_millis), random);
        prop_assert!(ms(first) <= wait && wait <= ms(cap));
        prop_assert!(wait >= asked.map_or(Duration::ZERO, Duration::from_millis).min(ms(cap)));
        if asked.is_none() {
            prop_assert!(wait <= backoff.ceiling(attempts));
        }
    }

    #[test]
    fn a_wait_grows_with_its_cap_its_attempts_and_its_random_number(
        (first, cap) in range(), more in 0_u64..1_000_000, attempts in 1_u32..40, random in any::<u64>(), other_random in any::<u64>(),
    ) {
        let backoff = RetryBackoff::new(ms(first), ms(cap)).unwrap();
        let wait = backoff.wait(attempts, None, random);
        if let Ok(wider) = RetryBackoff::new(ms(first), ms(cap + more)) {
            prop_assert!(wait <= wider.wait(attempts, None, random));
        }
        prop_assert!(wait <= backoff.wait(attempts + 1, None, random));
        prop_assert!(wait <= backoff.wait(attempts, None, random.max(other_random)));
    }

    /// Each half of the random numbers yields half of the range: the spread is even.
    #[test]
    fn waits_are_spread_evenly(attempts in 1_u32..40, part in 0_u64..=16) {
        let backoff = RetryBackoff::DEFAULT;
        let span = backoff.ceiling(attempts) - ms(200);
        let random = u64::try_from((u128::from(part) << 60).min(u128::from(u64::MAX))).unwrap();
        let expected = ms(200) + span * u32::try_from(part).unwrap() / 16;
        let wait = backoff.wait(attempts, None, random);
        prop_assert!(wait.abs_diff(expected) <= Duration::from_nanos(1));
    }
}
