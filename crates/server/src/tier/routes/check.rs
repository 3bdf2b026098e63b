//! Checks against policies over HTTP: `/v1/check` and `/v1/refund`.

use std::fmt;
use std::sync::Arc;

use axum::extract::State;
use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use weir_core::NameError;
use weir_core::id::check_name;
use weir_core::tier::Limit;

use super::millis_up;
use super::policy::{not_a_limit, unknown_policy};
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::openapi::schema;
use crate::tier::service::{Check, CheckOptions, CheckOutcome, CheckResult};

/// The most keys of one decision, which locks all of them.
const CHECKS_MAX: usize = 64;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(examples(json!({"checks": [{"policy": "login", "key": "10.0.0.1", "cost": 1}]})))]
pub(crate) struct CheckRequest {
    #[schema(min_items = 1, max_items = 64)]
    checks: Vec<CheckItem>,
    /// Whether to decide without spending.
    #[serde(default)]
    peek: bool,
    /// Whether each item of the answer says why, in a sentence for people.
    #[serde(default)]
    explain: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
struct CheckItem {
    #[schema(value_type = schema::PolicyName)]
    policy: Box<str>,
    #[schema(value_type = schema::LimitKey)]
    key: Box<str>,
    /// 1 if it is left out; 0 reads the state without spending.
    #[serde(default)]
    cost: Cost,
}

/// A cost in units of the limit.
#[derive(Clone, Copy, Debug, ToSchema)]
#[schema(maximum = 2_147_483_647, examples(1))]
pub(crate) struct Cost(pub(super) u32);

impl Default for Cost {
    fn default() -> Self {
        Self(1)
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CheckResponse {
    /// Whether all items are allowed.
    #[schema(examples(true))]
    allowed: bool,
    checks: Vec<CheckItemResponse>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = CheckAnswer)]
struct CheckItemResponse {
    #[schema(value_type = schema::PolicyName)]
    policy: Box<str>,
    #[schema(value_type = schema::LimitKey)]
    key: Box<str>,
    /// Whether this item by itself would fit.
    #[schema(examples(true))]
    allowed: bool,
    #[schema(examples(5))]
    limit: u32,
    #[schema(examples(4))]
    remaining: u32,
    /// When the cost would fit; null if it never does, because it is above the limit.
    #[schema(required = true, examples(0))]
    retry_after_ms: Option<u64>,
    /// Until the limit is fully refilled.
    #[schema(examples(60_000))]
    reset_after_ms: u64,
    /// Of a concurrency policy, if the check is allowed: what to give back with `POST /v1/release`. One for the whole cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, format = "uuid")]
    permit_id: Option<String>,
    /// With `explain`: which limit decided, how it stood, and when it would allow. The wording may change.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    explanation: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(examples(json!({"policy": "login", "key": "10.0.0.1", "cost": 1})))]
pub(crate) struct RefundRequest {
    #[schema(value_type = schema::PolicyName)]
    policy: Box<str>,
    #[schema(value_type = schema::LimitKey)]
    key: Box<str>,
    /// 1 if it is left out.
    #[serde(default)]
    cost: Cost,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RefundResponse {
    #[schema(value_type = schema::PolicyName)]
    policy: Box<str>,
    #[schema(value_type = schema::LimitKey)]
    key: Box<str>,
    #[schema(examples(5))]
    limit: u32,
    #[schema(examples(5))]
    remaining: u32,
    /// Until everything is refilled.
    reset_after_ms: u64,
}

/// Check limits.
///
/// One decision about up to 64 keys: all are spent or none. Costs of the same key add up; a cost of 0 reads the state
/// without spending; with `peek` nothing is spent. A denial is 200 with `allowed: false`; each item says whether it would
/// fit by itself. A cost above the limit never fits: `retryAfterMs` is null. An item about a concurrency policy gets a
/// `permitId`, which is in use until it is given back or its time is over; `retryAfterMs` is when enough others will have
/// ended by themselves.
#[utoipa::path(
    post,
    path = "/v1/check",
    tag = "limits",
    request_body = CheckRequest,
    responses(
        (status = 200, description = "The decision.", body = CheckResponse),
        (status = 404, description = "There is no policy of that name. Nothing was spent."),
    ),
)]
pub(crate) async fn check_limits(
    State(app): State<Arc<App>>,
    Json(request): Json<CheckRequest>,
) -> Result<Json<CheckResponse>, ApiError> {
    if !(1..=CHECKS_MAX).contains(&request.checks.len()) {
        return Err(ApiError::invalid_field("checks", format!("must have 1 to {CHECKS_MAX} items")));
    }
    for (at, item) in request.checks.iter().enumerate() {
        if let Err(problem) = check_name(&item.key) {
            return Err(ApiError::invalid_field(&format!("checks[{at}].key"), problem));
        }
    }
    let checks = request.checks.iter();
    let checks: Vec<Check<'_>> =
        checks.map(|item| Check { policy: &item.policy, key: &item.key, cost: item.cost.0 }).collect();
    let options = CheckOptions { peek: request.peek, explain: request.explain };
    let decision = match app.tier.check(&checks, options).await? {
        CheckOutcome::Decided(decision) => decision,
        CheckOutcome::UnknownPolicy(at) => {
            return Err(unknown_policy(checks.get(at).map_or("", |c| c.policy)));
        }
    };
    let mut explanations = decision.explanations.into_iter().flatten();
    let mut permits = decision.permits.into_iter();
    let items = request.checks.into_iter().zip(decision.checks);
    let items = items.map(|(item, result)| {
        let permit_id = permits.next().flatten().map(|id| id.to_string());
        CheckItemResponse { permit_id, explanation: explanations.next(), ..describe(item, &result) }
    });
    Ok(Json(CheckResponse { allowed: decision.allowed, checks: items.collect() }))
}

/// Refund a key.
///
/// Gives back spending, up to the limit.
#[utoipa::path(
    post,
    path = "/v1/refund",
    tag = "limits",
    request_body = RefundRequest,
    responses(
        (status = 200, description = "What the key has left now.", body = RefundResponse),
        (status = 404, description = "There is no policy of that name. Nothing was spent."),
    ),
)]
pub(crate) async fn refund_limit(
    State(app): State<Arc<App>>,
    Json(RefundRequest { policy, key, cost }): Json<RefundRequest>,
) -> Result<Json<RefundResponse>, ApiError> {
    parse_key("key", &key)?;
    let limit_state =
        app.tier.refund(&policy, &key, cost.0).await?.ok_or_else(|| not_a_limit(&app, &policy))?;
    Ok(Json(RefundResponse {
        policy,
        key,
        limit: limit_state.limit,
        remaining: limit_state.remaining,
        reset_after_ms: millis_up(limit_state.reset_after),
    }))
}

pub(super) fn parse_key(field: &str, key: &str) -> Result<(), ApiError> {
    check_name(key).map_err(|problem: NameError| ApiError::invalid_field(field, problem))
}

fn describe(item: CheckItem, result: &CheckResult) -> CheckItemResponse {
    CheckItemResponse {
        policy: item.policy,
        key: item.key,
        allowed: result.allowed,
        limit: result.limit_state.limit,
        remaining: result.limit_state.remaining,
        retry_after_ms: result.retry_after.map(millis_up),
        reset_after_ms: millis_up(result.limit_state.reset_after),
        permit_id: None,
        explanation: None,
    }
}

impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Amount;
        impl Visitor<'_> for Amount {
            type Value = Cost;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an integer from 0 to {}", Limit::MAX)
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Cost, E> {
                let cost = u32::try_from(number).ok().filter(|cost| *cost <= Limit::MAX);
                cost.map(Cost)
                    .ok_or_else(|| E::custom(format_args!("must be an integer from 0 to {}", Limit::MAX)))
            }
        }
        deserializer.deserialize_any(Amount).map_err(|error| match error.to_string() {
            text if text.starts_with("must ") => error,
            _ => D::Error::custom(format_args!("must be an integer from 0 to {}", Limit::MAX)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_is_an_integer_in_range_and_1_when_it_is_left_out() {
        let cost = |text: &str| {
            let body = format!(r#"{{"policy":"p","key":"k"{text}}}"#);
            crate::http::body::parse_json::<RefundRequest>(body.as_bytes())
        };
        assert_eq!(cost("").unwrap().cost.0, 1);
        assert_eq!(cost(r#","cost":0"#).unwrap().cost.0, 0);
        assert_eq!(cost(r#","cost":2147483647"#).unwrap().cost.0, Limit::MAX);
        for bad in ["2147483648", "-1", "1.5", "\"1\"", "null", "[]", "{}", "true", "99999999999999999999999"]
        {
            let error = cost(&format!(r#","cost":{bad}"#)).unwrap_err();
            assert_eq!(error.message(), "cost must be an integer from 0 to 2147483647", "{bad}");
        }
    }
}
