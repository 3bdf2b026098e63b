//! Rate limit headers of a response, allowed or denied.

use std::time::Duration;

use super::bucket::BucketLevel;
use super::plan::{DAILY, MINUTE, TierLimits};
use super::rule::Decision;
use crate::Timestamp;

/// The values of the rate limit headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierHeaders {
    /// Requests per minute.
    pub limit: u32,
    /// Tokens left in the minute's bucket. May exceed `limit`, because the bucket also holds the burst.
    pub remaining: u64,
    /// Seconds until the next token; for a denied request, until it would be allowed.
    pub reset_s: u64,
    /// Seconds to wait, for a denied request only: at least 1, and never too few.
    pub retry_after_s: Option<u64>,
    /// The values of `ratelimit-policy` and `ratelimit`; `None` while limits are switched off.
    pub named: Option<NamedLimit>,
}

/// The limit that `ratelimit-policy` and `ratelimit` describe: the minute's, or the day's if that denied the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedLimit {
    pub name: &'static str,
    /// The tokens it gains per window.
    pub quota: u32,
    pub window_s: u64,
    pub remaining: u32,
}

/// A header's name and value.
pub type HeaderPair = (&'static str, String);

impl TierHeaders {
    /// Returns the headers after a decision; `spent` is the usage after it.
    #[must_use]
    pub fn after(limits: &TierLimits, spent: &[BucketLevel; 2], decision: &Decision, now: Timestamp) -> Self {
        let [daily, minute] = limits.rule();
        let [daily_level, minute_level] = spent;
        let limit_state = minute.limit_state(minute_level, now);
        let (reset, denied_by) = match decision {
            Decision::Allowed => (limit_state.next_after, MINUTE),
            Decision::Denied(denial) => (denial.retry_after.unwrap_or(Duration::MAX), denial.denied_by),
        };
        let (name, bucket, remaining) = if denied_by == DAILY {
            ("daily", daily, daily.limit_state(daily_level, now).remaining)
        } else {
            ("minute", minute, limit_state.remaining)
        };
        Self {
            limit: limits.requests_per_minute(),
            remaining: u64::from(limit_state.remaining),
            reset_s: whole_seconds(reset),
            retry_after_s: (!decision.is_allowed()).then(|| whole_seconds(reset).max(1)),
            named: Some(NamedLimit {
                name,
                quota: bucket.refill(),
                window_s: bucket.period().as_secs(),
                remaining,
            }),
        }
    }

    /// Returns the headers while limits are switched off.
    #[must_use]
    pub const fn unlimited(limits: &TierLimits) -> Self {
        let remaining = i64::MAX.unsigned_abs();
        Self { limit: limits.requests_per_minute(), remaining, reset_s: 0, retry_after_s: None, named: None }
    }

    /// Returns the headers with lower-case names.
    pub fn iter(&self) -> impl Iterator<Item = HeaderPair> {
        let pair = self.named.map(|named| {
            let NamedLimit { name, quota, window_s, remaining } = named;
            [
                ("ratelimit-policy", format!("\"{name}\";q={quota};w={window_s}")),
                ("ratelimit", format!("\"{name}\";r={remaining};t={}", self.reset_s)),
            ]
        });
        let fixed = [
            ("x-ratelimit-limit", self.limit.to_string()),
            ("x-ratelimit-remaining", self.remaining.to_string()),
            ("x-ratelimit-reset", self.reset_s.to_string()),
        ];
        let retry = self.retry_after_s.map(|seconds| ("retry-after", seconds.to_string()));
        fixed.into_iter().chain(pair.into_iter().flatten()).chain(retry)
    }
}

/// Rounds up to whole seconds, so that callers who wait for them have waited long enough.
fn whole_seconds(span: Duration) -> u64 {
    span.as_secs().saturating_add(u64::from(span.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use super::super::{Rule, Tier};
    use super::*;

    const NOW: Timestamp = Timestamp::from_seconds(1_700_000_000);

    fn text(headers: &TierHeaders) -> Vec<String> {
        headers.iter().map(|(name, value)| format!("{name}: {value}")).collect()
    }

    fn spend(limits: &TierLimits, requests: u32) -> ([BucketLevel; 2], Decision) {
        let rule = limits.rule();
        let mut spent = rule.unspent();
        let mut last = Decision::Allowed;
        for _ in 0..requests {
            last = rule.take(&mut spent, 1, NOW);
        }
        (spent, last)
    }

    #[test]
    fn headers_of_an_allowed_request_show_what_is_left_and_the_next_token() {
        let limits = Tier::Pro.defaults();
        let (spent, decision) = spend(&limits, 12);
        let expected = [
            "x-ratelimit-limit: 30",
            "x-ratelimit-remaining: 28",
            "x-ratelimit-reset: 2",
            "ratelimit-policy: \"minute\";q=30;w=60",
            "ratelimit: \"minute\";r=28;t=2",
        ];
        assert_eq!(text(&TierHeaders::after(&limits, &spent, &decision, NOW)), expected);
    }

    #[test]
    fn headers_of_a_request_denied_by_the_minute_show_when_to_retry() {
        let limits = Tier::Free.defaults();
        let (spent, decision) = spend(&limits, 9);
        let now = NOW.plus(Duration::from_micros(1));
        let denied = limits.rule().take(&mut spent.clone(), 1, now);
        assert!(!decision.is_allowed());
        let headers = TierHeaders::after(&limits, &spent, &denied, now);
        assert_eq!(headers.retry_after_s, Some(12), "not a second too few");
        assert_eq!(
            text(&headers)[3..],
            ["ratelimit-policy: \"minute\";q=5;w=60", "ratelimit: \"minute\";r=0;t=12", "retry-after: 12"]
        );
    }

    #[test]
    fn headers_of_a_request_denied_by_the_day_describe_the_day() {
        let limits = TierLimits::new(15, 20, 10).unwrap();
        let (spent, decision) = spend(&limits, 11);
        let expected = [
            "x-ratelimit-limit: 15",
            "x-ratelimit-remaining: 10",
            "x-ratelimit-reset: 8640",
            "ratelimit-policy: \"daily\";q=10;w=86400",
            "ratelimit: \"daily\";r=0;t=8640",
            "retry-after: 8640",
        ];
        assert_eq!(text(&TierHeaders::after(&limits, &spent, &decision, NOW)), expected);
    }

    #[test]
    fn unlimited_headers_show_the_largest_number() {
        let expected =
            ["x-ratelimit-limit: 30", "x-ratelimit-remaining: 9223372036854775807", "x-ratelimit-reset: 0"];
        assert_eq!(text(&TierHeaders::unlimited(&Tier::Pro.defaults())), expected);
    }
}
