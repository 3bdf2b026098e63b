//! A proxy's question, asked of the policies.
//!
//! Each descriptor spends of every policy that is about it; all descriptors of a question are spent together or not at all.

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

/// The most descriptors in a question, and entries in a descriptor.
const MAX: usize = 64;
/// The most that a descriptor spends: the bound in Envoy's own protocol files.
const HITS_MAX: u64 = 1_000_000_000;
/// The number under which limits are kept that proxies bring along: policies count up from 1 and do not get there.
const OVERRIDE_SCOPE: u32 = i32::MAX.unsigned_abs();
const OVERRIDE_NAME: &str = "override";

/// What one descriptor asks of one policy.
struct Part {
    /// The descriptor's place.
    descriptor: usize,
    policy: Arc<Policy>,
    key: String,
    cost: u32,
    /// Whether the limit allows nothing at all, which no policy can say.
    is_barred: bool,
}

/// Answers a question.
pub(super) async fn should_rate_limit(
    tier: &TierService,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, Status> {
    check(request).map_err(Status::invalid_argument)?;
    let mut parts = Vec::new();
    for (place, descriptor) in request.descriptors.iter().enumerate() {
        parts.extend(find(tier, request, place, descriptor)?);
    }
    let asks: Vec<LimitCheck<'_>> = parts
        .iter()
        .map(|part| LimitCheck { policy: &part.policy, key: &part.key, cost: part.cost })
        .collect();
    let answers = if asks.is_empty() { Vec::new() } else { decide(tier, &parts, &asks).await? };
    Ok(respond(request.descriptors.len(), &parts, &answers))
}

/// Whether a question can be answered; if not, a sentence says why. These are the rules of Envoy's protocol files, and bounds
/// of ours.
fn check(request: &RateLimitRequest) -> Result<(), String> {
    if request.domain.is_empty() {
        return Err("domain is missing: policies name the domain they are about".to_owned());
    }
    if !(1..=MAX).contains(&request.descriptors.len()) {
        let count = request.descriptors.len();
        return Err(format!("there are {count} descriptors and must be 1 to {MAX}"));
    }
    if u64::from(request.hits_addend) > HITS_MAX {
        return Err(format!("hits_addend is {} and must be at most {HITS_MAX}", request.hits_addend));
    }
    let mut descriptors = request.descriptors.iter().enumerate();
    descriptors.try_for_each(|(place, descriptor)| check_descriptor(place, descriptor))
}

fn check_descriptor(place: usize, descriptor: &RateLimitDescriptor) -> Result<(), String> {
    let count = descriptor.entries.len();
    if !(1..=MAX).contains(&count) {
        return Err(format!("descriptors[{place}] has {count} entries and must have 1 to {MAX}"));
    }
    if let Some(entry) = descriptor.entries.iter().position(|entry| entry.key.is_empty()) {
        return Err(format!("descriptors[{place}].entries[{entry}] has no key"));
    }
    match descriptor.hits_addend {
        Some(hits) if hits > HITS_MAX => {
            Err(format!("descriptors[{place}].hits_addend is {hits} and must be at most {HITS_MAX}"))
        }
        _ => Ok(()),
    }
}

/// The policies about a descriptor, and what it asks of them.
fn find(
    tier: &TierService,
    request: &RateLimitRequest,
    place: usize,
    descriptor: &RateLimitDescriptor,
) -> Result<Vec<Part>, Status> {
    let cost = match descriptor.hits_addend {
        // In range: that was checked.
        Some(hits) => u32::try_from(hits).unwrap_or(u32::MAX),
        None => request.hits_addend.max(1),
    };
    let entries: Vec<(&str, &str)> =
        descriptor.entries.iter().map(|entry| (entry.key.as_str(), entry.value.as_str())).collect();
    let matching = tier.matching(&request.domain, &entries);
    if let Some(limit) = &descriptor.limit {
        let base = matching.first().map(|(policy, _)| &**policy);
        let (policy, is_barred) = overriding(limit, base)?;
        let key = bounded(format!("{}\n{}", request.domain, spelled(&entries)));
        return Ok(vec![Part { descriptor: place, policy: Arc::new(policy), key, cost, is_barred }]);
    }
    let part = |(policy, key)| Part { descriptor: place, policy, key: bounded(key), cost, is_barred: false };
    Ok(matching.into_iter().map(part).collect())
}

/// A policy made of the limit that a proxy brings along; whatever else the policy says that it stands in for, it says too.
fn overriding(limit: &RateLimitOverride, base: Option<&Policy>) -> Result<(Policy, bool), Status> {
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

/// Entries as a text that no other entries have: lengths keep them apart.
fn spelled(entries: &[(&str, &str)]) -> String {
    let spell = |(name, value): &(&str, &str)| format!("{}:{name}{}:{value}", name.len(), value.len());
    entries.iter().map(spell).collect()
}

/// A key that every engine can keep. Proxies send whatever their callers do, of any length.
fn bounded(key: String) -> String {
    if key.chars().count() <= NAME_MAX_CHARS && !key.chars().any(char::is_control) {
        return key;
    }
    let digest = digest(&SHA256, key.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Spends, unless something that is only looked at, or barred, is over its limit: then nothing is.
async fn decide(
    tier: &TierService,
    parts: &[Part],
    asks: &[LimitCheck<'_>],
) -> Result<Vec<CheckResult>, Status> {
    let unavailable = |error: weir_store::Error| Status::unavailable(error.to_string());
    let must_look = parts.iter().any(|part| part.cost == 0 || part.is_barred);
    if must_look {
        let looked = tier.decide(asks, true).await.map_err(unavailable)?;
        let is_over = |(part, answer): (&Part, &CheckResult)| {
            (part.cost == 0 || part.is_barred) && code(part, answer) == Code::OverLimit
        };
        if parts.iter().all(|part| part.cost == 0) || parts.iter().zip(&looked.checks).any(is_over) {
            return Ok(looked.checks);
        }
    }
    Ok(tier.decide(asks, false).await.map_err(unavailable)?.checks)
}

/// Whether a descriptor has room with one policy.
fn code(part: &Part, answer: &CheckResult) -> Code {
    let has_room = match part.cost {
        // Nothing always fits. Whoever looks wants to know whether anything would.
        0 => answer.limit_state.remaining > 0,
        _ => answer.allowed,
    };
    if part.policy.spec.shadow || (has_room && !part.is_barred) { Code::Ok } else { Code::OverLimit }
}

fn respond(count: usize, parts: &[Part], answers: &[CheckResult]) -> RateLimitResponse {
    let mut statuses = vec![DescriptorStatus { code: Code::Ok as i32, ..DescriptorStatus::default() }; count];
    for (part, answer) in parts.iter().zip(answers) {
        let status = describe(part, answer);
        let told = &mut statuses[part.descriptor];
        // Of several policies, the one that denies or is nearest to it.
        let is_nearer = (status.code, told.limit_remaining) > (told.code, status.limit_remaining);
        if told.current_limit.is_none() || is_nearer {
            *told = status;
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

fn describe(part: &Part, answer: &CheckResult) -> DescriptorStatus {
    let code = code(part, answer);
    let (_, amount, refill, ms) = part.policy.spec.limit_columns();
    let window = std::time::Duration::from_millis(u64::try_from(ms).unwrap_or(0));
    let per_unit = if refill > 0 { refill } else { amount };
    let wait = match code {
        Code::OverLimit if part.is_barred => window,
        Code::OverLimit => match answer.retry_after {
            Some(wait) if !wait.is_zero() => wait,
            _ => answer.limit_state.next_after,
        },
        Code::Ok | Code::Unknown => answer.limit_state.reset_after,
    };
    DescriptorStatus {
        code: code as i32,
        current_limit: Some(RateLimit {
            requests_per_unit: if part.is_barred { 0 } else { per_unit },
            unit: RateLimitUnit::of(window) as i32,
            name: part.policy.name.as_str().to_owned(),
        }),
        limit_remaining: if part.is_barred { 0 } else { answer.limit_state.remaining },
        duration_until_reset: prost_types::Duration::try_from(wait).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_that_cannot_be_meant_is_refused_with_what_is_wrong() {
        let entry = RateLimitDescriptor::new(&[("a", "")]);
        let ask = |descriptors: &[RateLimitDescriptor]| RateLimitRequest {
            domain: "edge".into(),
            descriptors: descriptors.to_vec(),
            hits_addend: 1_000_000_000,
        };
        let hits = |hits| RateLimitDescriptor { hits_addend: Some(hits), ..entry.clone() };
        assert_eq!(check(&ask(&[entry.clone(), hits(0), hits(1_000_000_000)])), Ok(()));
        let many = RateLimitDescriptor::new(&[("a", "b"); 65]);
        for (question, part) in [
            (RateLimitRequest { domain: String::new(), ..ask(&[hits(1)]) }, "domain is missing"),
            (RateLimitRequest { hits_addend: 1_000_000_001, ..ask(&[hits(1)]) }, "hits_addend is"),
            (ask(&[]), "0 descriptors"),
            (ask(&vec![entry.clone(); 65]), "65 descriptors"),
            (ask(&[entry.clone(), RateLimitDescriptor::new(&[])]), "descriptors[1] has 0 entries"),
            (ask(&[many]), "descriptors[0] has 65 entries"),
            (ask(&[RateLimitDescriptor::new(&[("a", "b"), ("", "b")])]), "entries[1] has no key"),
            (ask(&[hits(1_000_000_001)]), "descriptors[0].hits_addend is"),
        ] {
            let sentence = check(&question).unwrap_err();
            assert!(sentence.contains(part), "{sentence:?} lacks {part:?}");
        }
    }

    #[test]
    fn no_two_descriptors_share_a_key_by_the_way_they_are_spelled() {
        assert_ne!(spelled(&[("a", "b|c")]), spelled(&[("a|b", "c")]));
        assert_ne!(spelled(&[("a", "1"), ("b", "2")]), spelled(&[("a", "11:b1:2")]));
    }

    #[test]
    fn a_key_that_cannot_be_kept_is_kept_by_its_digest() {
        assert_eq!(bounded("10.0.0.1".to_owned()), "10.0.0.1");
        let (long, other) = ("x".repeat(256), "x".repeat(257));
        assert_eq!(bounded(long.clone()).len(), 64);
        assert_ne!(bounded(long), bounded(other));
        assert_eq!(bounded("a\0b".to_owned()).len(), 64);
    }
}
