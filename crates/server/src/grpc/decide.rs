//! A proxy's question, asked of the policies.
//!
//! Each descriptor spends of every policy that is about it; all descriptors of a question are spent together or not at all.

use std::sync::Arc;

use ring::digest::{SHA256, digest};
use tonic::Status;
use weir_core::PolicyName;
use weir_core::id::NAME_MAX_CHARS;
use weir_core::tier::{FixedWindow, Limit};
use weir_store::tier::{Ask, Policy, PolicySpec};

use super::message::{
    Code, DescriptorStatus, HeaderValue, RateLimit, RateLimitDescriptor, RateLimitOverride, RateLimitRequest,
    RateLimitResponse, Unit,
};
use crate::service::tier::{Answer, TierService};

/// The most descriptors in a question, and entries in a descriptor.
const MAX: usize = 64;
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
    let is_large = |descriptor: &RateLimitDescriptor| descriptor.entries.len() > MAX;
    if request.descriptors.len() > MAX || request.descriptors.iter().any(is_large) {
        return Err(Status::invalid_argument(format!("at most {MAX} descriptors of {MAX} entries each")));
    }
    let mut parts = Vec::new();
    for (place, descriptor) in request.descriptors.iter().enumerate() {
        parts.extend(find(tier, request, place, descriptor)?);
    }
    let asks: Vec<Ask<'_>> =
        parts.iter().map(|part| Ask { policy: &part.policy, key: &part.key, cost: part.cost }).collect();
    let answers = if asks.is_empty() { Vec::new() } else { decide(tier, &parts, &asks).await? };
    Ok(respond(request.descriptors.len(), &parts, &answers))
}

/// The policies about a descriptor, and what it asks of them.
fn find(
    tier: &TierService,
    request: &RateLimitRequest,
    place: usize,
    descriptor: &RateLimitDescriptor,
) -> Result<Vec<Part>, Status> {
    let cost = match descriptor.hits_addend {
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
    let unit = Unit::try_from(limit.unit).ok().and_then(Unit::length);
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
async fn decide(tier: &TierService, parts: &[Part], asks: &[Ask<'_>]) -> Result<Vec<Answer>, Status> {
    let unavailable = |error: weir_store::Error| Status::unavailable(error.to_string());
    let must_look = parts.iter().any(|part| part.cost == 0 || part.is_barred);
    if must_look {
        let looked = tier.decide(asks, true).await.map_err(unavailable)?;
        let is_over = |(part, answer): (&Part, &Answer)| {
            (part.cost == 0 || part.is_barred) && code(part, answer) == Code::OverLimit
        };
        if parts.iter().all(|part| part.cost == 0) || parts.iter().zip(&looked.checks).any(is_over) {
            return Ok(looked.checks);
        }
    }
    Ok(tier.decide(asks, false).await.map_err(unavailable)?.checks)
}

/// Whether a descriptor has room with one policy.
fn code(part: &Part, answer: &Answer) -> Code {
    let has_room = match part.cost {
        // Nothing always fits. Whoever looks wants to know whether anything would.
        0 => answer.standing.remaining > 0,
        _ => answer.allowed,
    };
    if part.policy.spec.shadow || (has_room && !part.is_barred) { Code::Ok } else { Code::OverLimit }
}

fn respond(count: usize, parts: &[Part], answers: &[Answer]) -> RateLimitResponse {
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

fn describe(part: &Part, answer: &Answer) -> DescriptorStatus {
    let code = code(part, answer);
    let (_, amount, refill, ms) = part.policy.spec.numbers();
    let window = std::time::Duration::from_millis(u64::try_from(ms).unwrap_or(0));
    let per_unit = if refill > 0 { refill } else { amount };
    let wait = match code {
        Code::OverLimit if part.is_barred => window,
        Code::OverLimit => match answer.retry_after {
            Some(wait) if !wait.is_zero() => wait,
            _ => answer.standing.next_after,
        },
        Code::Ok | Code::Unknown => answer.standing.reset_after,
    };
    DescriptorStatus {
        code: code as i32,
        current_limit: Some(RateLimit {
            requests_per_unit: if part.is_barred { 0 } else { per_unit },
            unit: Unit::of(window) as i32,
            name: part.policy.name.as_str().to_owned(),
        }),
        limit_remaining: if part.is_barred { 0 } else { answer.standing.remaining },
        duration_until_reset: Some(wait.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn units_are_found_by_their_lengths() {
        for (unit, seconds) in
            [(Unit::Second, 1), (Unit::Minute, 60), (Unit::Day, 86_400), (Unit::Unknown, 90)]
        {
            assert_eq!(Unit::of(std::time::Duration::from_secs(seconds)), unit);
        }
        assert_eq!(Unit::Unknown.length(), None);
    }
}
