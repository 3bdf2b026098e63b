//! Decides a proxy's rate limit request by the policies.
//!
//! Each descriptor spends from every policy that matches it. All descriptors of a request are spent together or not at all.

use std::sync::Arc;

use ring::digest::{SHA256, digest};
use tonic::Status;
use weir_core::PolicyName;
use weir_core::id::NAME_MAX_CHARS;
use weir_core::tier::{FixedWindow, Limit};
use weir_store::tier::{LimitCheck, Policy, PolicySpec};

use super::message::{
    Code, DescriptorStatus, HeaderValue, RateLimit, RateLimitDescriptor, RateLimitOverride, RateLimitRequest,
    RateLimitResponse, RateLimitUnit,
};
use crate::tier::service::{CheckResult, TierService};

/// The most descriptors in a request.
const DESCRIPTORS_MAX: usize = 64;
/// The most entries in a descriptor.
const ENTRIES_MAX: usize = 64;
/// The most that a descriptor spends: the bound in Envoy's own protocol files.
const HITS_MAX: u64 = 1_000_000_000;
/// The scope number of limits that proxies send. Policies are numbered from 1 and never reach it.
const OVERRIDE_SCOPE: u32 = i32::MAX.unsigned_abs();
const OVERRIDE_NAME: &str = "override";

/// The check of one descriptor against one policy.
struct DescriptorCheck {
    /// The index of the descriptor.
    descriptor: usize,
    policy: Arc<Policy>,
    key: String,
    cost: u32,
    /// Whether the limit is 0, which no policy can express.
    denies_all: bool,
}

pub(super) async fn should_rate_limit(
    tier: &TierService,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, Status> {
    check(request).map_err(Status::invalid_argument)?;
    let mut checks = Vec::new();
    for (index, descriptor) in request.descriptors.iter().enumerate() {
        checks.extend(checks_of(tier, request, index, descriptor)?);
    }
    let asks: Vec<LimitCheck<'_>> = checks
        .iter()
        .map(|check| LimitCheck { policy: &check.policy, key: &check.key, cost: check.cost })
        .collect();
    let answers = if asks.is_empty() { Vec::new() } else { decide(tier, &checks, &asks).await? };
    Ok(respond(request.descriptors.len(), &checks, &answers))
}

/// Validates a request by the rules of Envoy's protocol files and by our own bounds.
fn check(request: &RateLimitRequest) -> Result<(), String> {
    if request.domain.is_empty() {
        return Err("domain is missing: policies name the domain that they apply to".to_owned());
    }
    if !(1..=DESCRIPTORS_MAX).contains(&request.descriptors.len()) {
        let count = request.descriptors.len();
        return Err(format!("there are {count} descriptors and must be 1 to {DESCRIPTORS_MAX}"));
    }
    if u64::from(request.hits_addend) > HITS_MAX {
        return Err(format!("hits_addend is {} and must be at most {HITS_MAX}", request.hits_addend));
    }
    let mut descriptors = request.descriptors.iter().enumerate();
    descriptors.try_for_each(|(index, descriptor)| check_descriptor(index, descriptor))
}

fn check_descriptor(index: usize, descriptor: &RateLimitDescriptor) -> Result<(), String> {
    let count = descriptor.entries.len();
    if !(1..=ENTRIES_MAX).contains(&count) {
        return Err(format!("descriptors[{index}] has {count} entries and must have 1 to {ENTRIES_MAX}"));
    }
    if let Some(entry) = descriptor.entries.iter().position(|entry| entry.key.is_empty()) {
        return Err(format!("descriptors[{index}].entries[{entry}] has no key"));
    }
    match descriptor.hits_addend {
        Some(hits) if hits > HITS_MAX => {
            Err(format!("descriptors[{index}].hits_addend is {hits} and must be at most {HITS_MAX}"))
        }
        _ => Ok(()),
    }
}

/// Returns the checks of a descriptor against the policies that match it.
fn checks_of(
    tier: &TierService,
    request: &RateLimitRequest,
    index: usize,
    descriptor: &RateLimitDescriptor,
) -> Result<Vec<DescriptorCheck>, Status> {
    let cost = match descriptor.hits_addend {
        // `check_descriptor` has checked the range.
        Some(hits) => u32::try_from(hits).unwrap_or(u32::MAX),
        None => request.hits_addend.max(1),
    };
    let entries: Vec<(&str, &str)> =
        descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str())).collect();
    let matching = tier.matching(&request.domain, &entries);
    if let Some(limit) = &descriptor.limit {
        let base = matching.first().map(|(policy, _)| &**policy);
        let (policy, denies_all) = override_policy(limit, base)?;
        let key = bounded_key(format!("{}\n{}", request.domain, encode_entries(&entries)));
        let policy = Arc::new(policy);
        return Ok(vec![DescriptorCheck { descriptor: index, policy, key, cost, denies_all }]);
    }
    let check = |(policy, key)| DescriptorCheck {
        descriptor: index,
        policy,
        key: bounded_key(key),
        cost,
        denies_all: false,
    };
    Ok(matching.into_iter().map(check).collect())
}

/// Returns a policy with the limit that a proxy sends, and otherwise the properties of the policy that it replaces.
fn override_policy(limit: &RateLimitOverride, base: Option<&Policy>) -> Result<(Policy, bool), Status> {
    let unit = RateLimitUnit::try_from(limit.unit).ok().and_then(RateLimitUnit::length);
    let unit = unit.ok_or_else(|| Status::invalid_argument("limit.unit must be a unit of time"))?;
    let amount = limit.requests_per_unit.clamp(1, Limit::MAX);
    let window =
        FixedWindow::new(amount, unit).map_err(|error| Status::invalid_argument(error.to_string()))?;
    let name = match base {
        Some(policy) => policy.name.clone(),
        None => PolicyName::parse(OVERRIDE_NAME).map_err(|error| Status::internal(error.to_string()))?,
    };
    let plain = PolicySpec::plain(Limit::FixedWindow(window));
    let spec = match base {
        Some(policy) => PolicySpec { shadow: policy.spec.shadow, on_outage: policy.spec.on_outage, ..plain },
        None => plain,
    };
    Ok((Policy::new(name, OVERRIDE_SCOPE, spec), limit.requests_per_unit == 0))
}

/// Encodes entries as a text that no other entries have, by writing the lengths of names and values.
fn encode_entries(entries: &[(&str, &str)]) -> String {
    let encode = |(name, value): &(&str, &str)| format!("{}:{name}{}:{value}", name.len(), value.len());
    entries.iter().map(encode).collect()
}

/// Returns a key that every engine can store: its digest if it is too long or has control characters. Proxies forward values
/// of their callers, of any length.
fn bounded_key(key: String) -> String {
    if key.chars().count() <= NAME_MAX_CHARS && !key.chars().any(char::is_control) {
        return key;
    }
    let digest = digest(&SHA256, key.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Spends all checks, or nothing if a check of cost 0, or one that denies all, is over its limit.
async fn decide(
    tier: &TierService,
    checks: &[DescriptorCheck],
    asks: &[LimitCheck<'_>],
) -> Result<Vec<CheckResult>, Status> {
    let unavailable = |error: weir_store::Error| Status::unavailable(error.to_string());
    let must_peek = checks.iter().any(|check| check.cost == 0 || check.denies_all);
    if must_peek {
        let peeked = tier.decide(asks, true).await.map_err(unavailable)?;
        let is_over = |(check, answer): (&DescriptorCheck, &CheckResult)| {
            (check.cost == 0 || check.denies_all) && code(check, answer) == Code::OverLimit
        };
        if checks.iter().all(|check| check.cost == 0) || checks.iter().zip(&peeked.checks).any(is_over) {
            return Ok(peeked.checks);
        }
    }
    Ok(tier.decide(asks, false).await.map_err(unavailable)?.checks)
}

/// The code of one check.
fn code(check: &DescriptorCheck, answer: &CheckResult) -> Code {
    let has_room = match check.cost {
        // A cost of 0 is always allowed. It asks whether a cost of 1 would be.
        0 => answer.limit_state.remaining > 0,
        _ => answer.allowed,
    };
    if check.policy.spec.shadow || (has_room && !check.denies_all) { Code::Ok } else { Code::OverLimit }
}

fn respond(count: usize, checks: &[DescriptorCheck], answers: &[CheckResult]) -> RateLimitResponse {
    let mut statuses = vec![DescriptorStatus { code: Code::Ok as i32, ..DescriptorStatus::default() }; count];
    for (check, answer) in checks.iter().zip(answers) {
        let status = describe(check, answer);
        let current = &mut statuses[check.descriptor];
        // Of several policies, reports the one that denies, or that is nearest to denying.
        let is_nearer = (status.code, current.limit_remaining) > (current.code, status.limit_remaining);
        if current.current_limit.is_none() || is_nearer {
            *current = status;
        }
    }
    let over = statuses.iter().filter(|status| status.code == Code::OverLimit as i32);
    let waits = over.map(|status| status.duration_until_reset.unwrap_or_default());
    let longest = waits.max_by_key(|wait| (wait.seconds, wait.nanos));
    let overall = if longest.is_some() { Code::OverLimit } else { Code::Ok };
    let retry_after = longest.map(|wait| wait.seconds.saturating_add(i64::from(wait.nanos > 0)).max(1));
    RateLimitResponse {
        overall_code: overall as i32,
        statuses,
        response_headers_to_add: retry_after
            .map(|seconds| HeaderValue { key: "retry-after".to_owned(), value: seconds.to_string() })
            .into_iter()
            .collect(),
    }
}

fn describe(check: &DescriptorCheck, answer: &CheckResult) -> DescriptorStatus {
    let code = code(check, answer);
    let (_, amount, refill, ms) = check.policy.spec.limit_columns();
    let window = std::time::Duration::from_millis(u64::try_from(ms).unwrap_or(0));
    let per_unit = if refill > 0 { refill } else { amount };
    let wait = match code {
        Code::OverLimit if check.denies_all => window,
        Code::OverLimit => match answer.retry_after {
            Some(wait) if !wait.is_zero() => wait,
            _ => answer.limit_state.next_after,
        },
        Code::Ok | Code::Unknown => answer.limit_state.reset_after,
    };
    DescriptorStatus {
        code: code as i32,
        current_limit: Some(RateLimit {
            requests_per_unit: if check.denies_all { 0 } else { per_unit },
            unit: RateLimitUnit::from_length(window) as i32,
            name: check.policy.name.as_str().to_owned(),
        }),
        limit_remaining: if check.denies_all { 0 } else { answer.limit_state.remaining },
        duration_until_reset: prost_types::Duration::try_from(wait).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_request_is_refused_with_a_reason() {
        let entry = RateLimitDescriptor::new(&[("a", "")]);
        let request = |descriptors: &[RateLimitDescriptor]| RateLimitRequest {
            domain: "edge".into(),
            descriptors: descriptors.to_vec(),
            hits_addend: 1_000_000_000,
        };
        let hits = |hits| RateLimitDescriptor { hits_addend: Some(hits), ..entry.clone() };
        assert_eq!(check(&request(&[entry.clone(), hits(0), hits(1_000_000_000)])), Ok(()));
        let many = RateLimitDescriptor::new(&[("a", "b"); 65]);
        for (invalid, part) in [
            (RateLimitRequest { domain: String::new(), ..request(&[hits(1)]) }, "domain is missing"),
            (RateLimitRequest { hits_addend: 1_000_000_001, ..request(&[hits(1)]) }, "hits_addend is"),
            (request(&[]), "0 descriptors"),
            (request(&vec![entry.clone(); 65]), "65 descriptors"),
            (request(&[entry.clone(), RateLimitDescriptor::new(&[])]), "descriptors[1] has 0 entries"),
            (request(&[many]), "descriptors[0] has 65 entries"),
            (request(&[RateLimitDescriptor::new(&[("a", "b"), ("", "b")])]), "entries[1] has no key"),
            (request(&[hits(1_000_000_001)]), "descriptors[0].hits_addend is"),
        ] {
            let sentence = check(&invalid).unwrap_err();
            assert!(sentence.contains(part), "{sentence:?} lacks {part:?}");
        }
    }

    #[test]
    fn different_entries_are_encoded_differently() {
        assert_ne!(encode_entries(&[("a", "b|c")]), encode_entries(&[("a|b", "c")]));
        assert_ne!(encode_entries(&[("a", "1"), ("b", "2")]), encode_entries(&[("a", "11:b1:2")]));
    }

    #[test]
    fn a_key_that_cannot_be_stored_is_replaced_by_its_digest() {
        assert_eq!(bounded_key("10.0.0.1".to_owned()), "10.0.0.1");
        let (long, other) = ("x".repeat(256), "x".repeat(257));
        assert_eq!(bounded_key(long.clone()).len(), 64);
        assert_ne!(bounded_key(long), bounded_key(other));
        assert_eq!(bounded_key("a\0b".to_owned()).len(), 64);
    }
}
