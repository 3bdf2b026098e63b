//! The headers of rate-limited responses, allowed or denied: the three `X-RateLimit-*` and the IETF pair. `Retry-After` of a
//! denial is set by `ApiError::rate_limited`. What they say is decided by the capability: quota by the end of the window
//! (`quota/routes.rs`), AI calls by the minute or the day (`core/src/tier/headers.rs`), requests by the tenant's limit
//! (`request/routes/submit.rs`), sale by the buyer's bucket (`sale/routes/purchases.rs`). A throttled address gets `Retry-After`
//! alone.

use std::time::Duration;

use bytes::BytesMut;
use http::{HeaderMap, HeaderName, HeaderValue};
use weir_core::tier::NamedLimit;

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const IETF_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const IETF_STATE: HeaderName = HeaderName::from_static("ratelimit");

/// The state of one limit for one caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateLimitHeaders {
    /// The limit's name.
    pub policy: &'static str,
    /// Calls allowed in a window.
    pub limit: u32,
    pub window: Duration,
    pub remaining: u32,
    /// Time until the window ends.
    pub reset_after: Duration,
}

impl RateLimitHeaders {
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        let reset_s = seconds_up(self.reset_after);
        let named = NamedLimit {
            name: self.policy,
            quota: self.limit,
            window_s: self.window.as_secs(),
            remaining: self.remaining,
        };
        insert([u64::from(self.limit), u64::from(self.remaining), reset_s], Some(named), headers);
    }
}

/// Writes the headers of an AI call and replaces those of the upstream: it may have limits of its own, which callers must not
/// mistake for ours.
pub(crate) fn write_tier(tier: &weir_core::tier::TierHeaders, headers: &mut HeaderMap) {
    if tier.named.is_none() {
        headers.remove(IETF_POLICY);
        headers.remove(IETF_STATE);
    }
    insert([u64::from(tier.limit), tier.remaining, tier.reset_s], tier.named, headers);
}

/// Inserts limit, remaining and reset, and for a named limit the IETF pair.
fn insert(numbers: [u64; 3], named: Option<NamedLimit>, headers: &mut HeaderMap) {
    let [_, _, reset_s] = numbers;
    let mut values = HeaderValues::default();
    for number in numbers {
        values.add_number(number);
    }
    if let Some(NamedLimit { name, quota, window_s, remaining }) = named {
        values.add_parameters(name, [(";q=", u64::from(quota)), (";w=", window_s)]);
        values.add_parameters(name, [(";r=", u64::from(remaining)), (";t=", reset_s)]);
    }
    for (name, value) in
        [LIMIT, REMAINING, RESET, IETF_POLICY, IETF_STATE].into_iter().zip(values.into_values())
    {
        headers.insert(name, value);
    }
}

/// Header values that share one allocation: nearly every response has five of them.
struct HeaderValues {
    text: BytesMut,
    ends: [usize; 5],
    count: usize,
}

impl Default for HeaderValues {
    fn default() -> Self {
        Self { text: BytesMut::with_capacity(128), ends: [0; 5], count: 0 }
    }
}

impl HeaderValues {
    fn add_number(&mut self, number: u64) {
        self.push(number);
        self.end();
    }

    /// Adds a quoted name with two parameters: `"minute";q=30;w=60`.
    fn add_parameters(&mut self, name: &str, parameters: [(&str, u64); 2]) {
        for part in ["\"", name, "\""] {
            self.text.extend_from_slice(part.as_bytes());
        }
        for (key, number) in parameters {
            self.text.extend_from_slice(key.as_bytes());
            self.push(number);
        }
        self.end();
    }

    fn push(&mut self, number: u64) {
        self.text.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    }

    fn end(&mut self) {
        self.ends[self.count] = self.text.len();
        self.count += 1;
    }

    fn into_values(self) -> impl Iterator<Item = HeaderValue> {
        let mut rest = self.text.freeze();
        let mut start = 0;
        self.ends.into_iter().take(self.count).map(move |end| {
            let text = rest.split_to(end - start);
            start = end;
            HeaderValue::from_maybe_shared(text).unwrap_or(HeaderValue::from_static(""))
        })
    }
}

/// Whole seconds, rounded up, so that waiting that long is always enough.
#[must_use]
pub(crate) fn seconds_up(span: Duration) -> u64 {
    span.as_secs() + u64::from(span.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use weir_core::Timestamp;
    use weir_core::tier::{Rule, Tier, TierHeaders};

    use super::*;

    #[test]
    fn a_wait_is_rounded_up_to_whole_seconds() {
        assert_eq!(seconds_up(Duration::from_millis(1)), 1);
        assert_eq!(seconds_up(Duration::from_secs(2)), 2);
        assert_eq!(seconds_up(Duration::new(2, 1)), 3);
    }

    #[test]
    fn the_headers_of_an_ai_call_are_those_of_the_rules() {
        let limits = Tier::Pro.defaults();
        let rule = limits.rule();
        let (mut spent, now) = (rule.unspent(), Timestamp::from_seconds(1_700_000_000));
        let decision = rule.take(&mut spent, 3, now);
        let mut headers = HeaderMap::new();
        for tier in [TierHeaders::after(&limits, &spent, &decision, now), TierHeaders::unlimited(&limits)] {
            write_tier(&tier, &mut headers);
            let written: BTreeSet<_> = headers
                .iter()
                .map(|(name, value)| (name.as_str(), value.to_str().unwrap().to_owned()))
                .collect();
            assert_eq!(written, tier.iter().collect());
        }
    }

    #[test]
    fn all_five_headers_are_written() {
        let mut headers = HeaderMap::new();
        let limit_state = RateLimitHeaders {
            policy: "minute",
            limit: 30,
            window: Duration::from_secs(60),
            remaining: 28,
            reset_after: Duration::from_millis(1_200),
        };
        limit_state.write(&mut headers);
        assert_eq!(headers["x-ratelimit-limit"], "30");
        assert_eq!(headers["x-ratelimit-remaining"], "28");
        assert_eq!(headers["x-ratelimit-reset"], "2");
        assert_eq!(headers["ratelimit-policy"], "\"minute\";q=30;w=60");
        assert_eq!(headers["ratelimit"], "\"minute\";r=28;t=2");
    }
}
