//! One key, as the console shows it: `GET /admin/keys/{key}`.

use std::sync::Arc;

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use weir_core::tier::LimitState;
use weir_core::{Timestamp, UserId};
use weir_queue::rfc3339;
use weir_store::tier::Subscription;

use super::NearLimitResponse;
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::tier::routes::millis_up;
use crate::tier::service::{AnyPolicy, KeyState, UserLimits};

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeyResponse {
    #[schema(value_type = schema::UserId)]
    key: String,
    /// The quota of the user of that name; null if there is none.
    #[schema(required = true)]
    quota: Option<KeyQuota>,
    /// The plan of the user of that name, for AI calls.
    plan: KeyPlan,
    /// The key under each policy, in order of name.
    policies: Vec<KeyPolicy>,
    /// What this server remembers of decisions about the key near a limit, the last one first. Empty if it decided none, or has
    /// started again since.
    remembered: Vec<NearLimitResponse>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct KeyQuota {
    /// Messages allowed in a window.
    #[schema(examples(50))]
    limit: u32,
    #[schema(examples(33))]
    remaining: u32,
    #[schema(examples(60))]
    window_minutes: u64,
    window_began_at: jiff::Timestamp,
    /// When the window ends; null if it is over, and the next message begins a new one.
    #[schema(required = true)]
    reset_at: Option<jiff::Timestamp>,
    /// Whether a message would be accepted now.
    allowed: bool,
    /// Why, in a sentence. The wording may change.
    explanation: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct KeyPlan {
    #[schema(value_type = schema::PlanName)]
    plan: &'static str,
    #[schema(value_type = schema::TierName)]
    tier: &'static str,
    /// Whether the user has a subscription. Without one the plan is the free one, or that of the token's claim, which is not
    /// known here.
    subscribed: bool,
    /// When the subscription ends; null if it does not, or there is none.
    #[schema(required = true)]
    expires_at: Option<jiff::Timestamp>,
    /// Whether AI calls are limited at all.
    enabled: bool,
    minute: KeyMeter,
    daily: KeyMeter,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct KeyMeter {
    #[schema(examples(40))]
    limit: u32,
    #[schema(examples(12))]
    remaining: u32,
    /// Until the limit is fully refilled.
    #[schema(examples(60_000))]
    reset_after_ms: u64,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct KeyPolicy {
    #[schema(value_type = schema::PolicyName)]
    policy: String,
    /// Whether the policy only counts what it would deny.
    shadow: bool,
    /// Whether a call of cost 1 would be allowed now.
    allowed: bool,
    #[schema(examples(5))]
    limit: u32,
    #[schema(examples(4))]
    remaining: u32,
    /// When a call of cost 1 would fit; 0 if it does now, null if it never does.
    #[schema(required = true)]
    retry_after_ms: Option<u64>,
    /// Until the limit is fully refilled.
    #[schema(examples(60_000))]
    reset_after_ms: u64,
    /// Why, in a sentence. The wording may change.
    explanation: String,
}

/// Look at one key.
///
/// Everything that is known of a user or key: the quota, the plan with its meters, the state under each policy and what a call
/// would be answered now, and the last denials that this server has made. Spends nothing.
#[utoipa::path(
    get,
    path = "/admin/keys/{key}",
    tag = "operations",
    params(
        (
            "key" = schema::UserId, Path,
            description = "A user's id, or a key under a policy. Percent-encode it.",
        ),
    ),
    responses((status = 200, description = "The key. One that was never used has everything left.", body = KeyResponse)),
)]
pub(crate) async fn get_key(
    State(app): State<Arc<App>>,
    key: PathParam,
) -> Result<Json<KeyResponse>, ApiError> {
    let key = key.0.map_err(|_not_utf8| ApiError::invalid_field("key", "must be valid UTF-8"))?;
    let user = UserId::parse(key).map_err(|problem| ApiError::invalid_field("key", problem))?;
    let (quota, subscription, limits, policies) = tokio::try_join!(
        app.quota.find(&user),
        app.tier.subscription(&user),
        app.tier.user_limits(user.as_str()),
        app.tier.key_states(user.as_str()),
    )?;
    let now = app.engines.store.wall_clock.now();
    let remembered = app.metrics.near_limits.of_key(user.as_str());
    Ok(Json(KeyResponse {
        quota: quota.map(|quota| describe_quota(&quota, now)),
        plan: describe_plan(&limits, subscription.as_ref()),
        policies: policies.into_iter().map(describe_policy).collect(),
        remembered: remembered.into_iter().map(NearLimitResponse::from).collect(),
        key: user.as_str().to_owned(),
    }))
}

fn describe_quota(quota: &weir_core::quota::Quota, now: Timestamp) -> KeyQuota {
    let (limits, remaining) = (quota.limits, quota.remaining());
    let reset_at = quota.reset_at();
    let is_over = reset_at <= now;
    let minutes = limits.window().as_secs() / 60;
    let limit = limits.rate_limit();
    let explanation = match (remaining, is_over) {
        (_, true) => format!("All {limit} messages are left: the next one begins a window of {minutes} min."),
        (0, false) => format!(
            "Denied until {}: all {limit} messages of this window of {minutes} min are sent.",
            rfc3339(reset_at)
        ),
        (left, false) => format!(
            "{left} of {limit} messages are left in this window, which ends at {}.",
            rfc3339(reset_at)
        ),
    };
    KeyQuota {
        limit,
        remaining,
        window_minutes: minutes,
        window_began_at: rfc3339(quota.last_refresh),
        reset_at: (!is_over).then(|| rfc3339(reset_at)),
        allowed: remaining > 0,
        explanation,
    }
}

fn describe_plan(limits: &UserLimits, subscription: Option<&Subscription>) -> KeyPlan {
    let meter = |state: &LimitState| KeyMeter {
        limit: state.limit,
        remaining: state.remaining,
        reset_after_ms: millis_up(state.reset_after),
    };
    KeyPlan {
        plan: limits.plan.as_str(),
        tier: limits.plan.tier().as_str(),
        subscribed: subscription.is_some(),
        expires_at: subscription.and_then(|own| own.terms.expires_at).map(rfc3339),
        enabled: limits.enabled,
        minute: meter(&limits.minute),
        daily: meter(&limits.daily),
    }
}

fn describe_policy(state: KeyState) -> KeyPolicy {
    let KeyState { policy, result, explanation } = state;
    let shadow = match &policy {
        AnyPolicy::Limit(limit) => limit.spec.shadow,
        AnyPolicy::Concurrency(limit) => limit.spec.shadow,
    };
    KeyPolicy {
        policy: policy.name().to_string(),
        shadow,
        allowed: result.allowed,
        limit: result.limit_state.limit,
        remaining: result.limit_state.remaining,
        retry_after_ms: result.retry_after.map(millis_up),
        reset_after_ms: millis_up(result.limit_state.reset_after),
        explanation,
    }
}
