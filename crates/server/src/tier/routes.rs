//! Tier over HTTP: subscriptions and tiers for the operator, and a user's remaining limits. Policies are in
//! `routes/policy.rs`, checks against them in `routes/check.rs`, holds in `routes/hold.rs`.

pub(crate) mod check;
pub(crate) mod hold;
pub(crate) mod policy;
pub(crate) mod release;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use weir_core::tier::{Anchor, Limit, LimitError, LimitState, Plan, Tier, TierLimits};
use weir_core::{Timestamp, UserId};
use weir_queue::rfc3339;
use weir_store::tier::{Subscription, SubscriptionTerms};

use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::{PathParam, User};
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};
use crate::http::time::parse_time;
use crate::tier::events::{LimitsSwitched, SubscriptionChanged, SubscriptionEnded, TierChanged, TierReset};
use crate::tier::service::{TierCaller, UserLimits};

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({"plan": "PRO_MONTHLY", "expiresAt": "2999-01-01T00:00:00Z", "anchor": "2026-01-31"})))]
pub(crate) struct SubscriptionRequest {
    #[schema(value_type = schema::PlanName)]
    plan: Box<str>,
    /// In the future: from then on it is as if there were no subscription. Never, if it is left out or null.
    #[schema(value_type = Option<schema::Time>)]
    expires_at: Option<Box<str>>,
    /// Months begin on its day, or on the month's last. On the 1st, if it is left out or null.
    #[schema(value_type = Option<schema::Day>)]
    anchor: Option<Box<str>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SubscriptionResponse {
    #[schema(value_type = schema::UserId)]
    user: String,
    #[schema(value_type = schema::PlanName)]
    plan: &'static str,
    #[schema(value_type = schema::TierName)]
    tier: &'static str,
    /// From then on it is as if there were no subscription; null if it never ends.
    #[schema(required = true)]
    expires_at: Option<jiff::Timestamp>,
    /// Months begin on its day, or on the month's last; null if on the 1st.
    #[schema(required = true, value_type = Option<schema::Day>)]
    anchor: Option<String>,
    updated_at: jiff::Timestamp,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct LimitsSwitch {
    /// Whether AI calls are limited by plan.
    #[schema(examples(true))]
    enabled: bool,
}

/// A field that is left out stays as it is.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({"dailyLimit": 1000})))]
pub(crate) struct TierRequest {
    /// How many calls are refilled in a minute.
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 2_147_483_647)]
    requests_per_minute: Option<serde_json::Value>,
    /// How many calls can be made at once.
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 2_147_483_647)]
    burst_capacity: Option<serde_json::Value>,
    /// How many calls are refilled in a day.
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 2_147_483_647)]
    daily_limit: Option<serde_json::Value>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TierResponse {
    #[schema(value_type = schema::TierName)]
    tier: &'static str,
    /// How many calls are refilled in a minute.
    #[schema(minimum = 1, examples(30))]
    requests_per_minute: u32,
    /// How many calls can be made at once.
    #[schema(minimum = 1, examples(40))]
    burst_capacity: u32,
    /// How many calls are refilled in a day.
    #[schema(minimum = 1, examples(500))]
    daily_limit: u32,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LimitsResponse {
    /// The `sub` of the token.
    #[schema(examples("user@example.com"))]
    user: String,
    #[schema(value_type = schema::PlanName)]
    plan: &'static str,
    #[schema(value_type = schema::TierName)]
    tier: &'static str,
    /// Whether limits are switched on at all.
    #[schema(examples(true))]
    enabled: bool,
    minute: RemainingLimit,
    daily: RemainingLimit,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct RemainingLimit {
    /// How many calls are refilled in a minute, or in a day.
    #[schema(minimum = 1, examples(30))]
    limit: u32,
    /// The most calls that can be left.
    #[schema(minimum = 1, examples(40))]
    capacity: u32,
    /// Calls that are left; 9223372036854775807 while limits are switched off.
    #[schema(examples(39))]
    remaining: u64,
    /// Until everything is refilled.
    #[schema(examples(2000))]
    reset_after_ms: u64,
}

/// Subscribe a user to a plan.
///
/// Applies to the user's next call on this server, and within 5 seconds on the others, in place of the subscription
/// before, with its `expiresAt` and `anchor`. What was spent stays spent.
#[utoipa::path(
    put,
    path = "/admin/subscriptions/{user}",
    tag = "tier",
    params(
        (
            "user" = schema::UserId, Path,
            description = "The `sub` of the user's tokens, percent-encoded.",
            example = "user@example.com",
        ),
    ),
    request_body = SubscriptionRequest,
    responses((status = 200, description = "The subscription as it is now.", body = SubscriptionResponse)),
)]
pub(crate) async fn put_subscription(
    State(app): State<Arc<App>>,
    user: PathParam,
    Json(request): Json<SubscriptionRequest>,
) -> Result<Json<SubscriptionResponse>, ApiError> {
    let user = parse_user(user)?;
    let terms = parse_terms(&request, app.tier.now())?;
    let before = app.tier.subscription(&user).await?.map(|subscription| subscription.terms);
    let subscription = app.tier.put_subscription(&user, terms).await?;
    SubscriptionChanged { user: &user, terms, before }.emit();
    Ok(Json(describe_subscription(&subscription)))
}

/// List subscriptions.
///
/// Those that have not expired, in order of user.
#[utoipa::path(
    get,
    path = "/admin/subscriptions",
    tag = "tier",
    params(PageQuery),
    responses((status = 200, description = "A page of subscriptions.", body = Page<SubscriptionResponse>)),
)]
pub(crate) async fn list_subscriptions(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Json<Page<SubscriptionResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let after = query.cursor.map(UserId::parse).transpose();
    let after = after.map_err(|problem| ApiError::invalid_field("cursor", problem))?;
    // One more than requested shows whether there is a next page.
    let subscriptions = app.tier.subscriptions(after.as_ref(), limit + 1).await?;
    let items = subscriptions.iter().map(describe_subscription).collect();
    Ok(Json(Page::cut(items, limit, |subscription| subscription.user.clone())))
}

/// Read a subscription.
///
/// The plan that a user has subscribed to, unless it has expired.
#[utoipa::path(
    get,
    path = "/admin/subscriptions/{user}",
    tag = "tier",
    params(
        (
            "user" = schema::UserId, Path,
            description = "The `sub` of the user's tokens, percent-encoded.",
            example = "user@example.com",
        ),
    ),
    responses(
        (status = 200, description = "The subscription.", body = SubscriptionResponse),
        (status = 400, description = "The user in the path is too long or contains a control character."),
        (status = 404, description = "The user has no subscription, or it has expired."),
    ),
)]
pub(crate) async fn get_subscription(
    State(app): State<Arc<App>>,
    user: PathParam,
) -> Result<Json<SubscriptionResponse>, ApiError> {
    let user = parse_user(user)?;
    let found = app.tier.subscription(&user).await?.ok_or_else(|| no_subscription(&user))?;
    Ok(Json(describe_subscription(&found)))
}

/// End a subscription.
///
/// From then on the user has the plan that the token claims (`tier.plan_claim`), or the free plan.
#[utoipa::path(
    delete,
    path = "/admin/subscriptions/{user}",
    tag = "tier",
    params(
        (
            "user" = schema::UserId, Path,
            description = "The `sub` of the user's tokens, percent-encoded.",
            example = "user@example.com",
        ),
    ),
    responses(
        (status = 204, description = "Ended."),
        (status = 400, description = "The user in the path is too long or contains a control character."),
        (status = 404, description = "The user has no subscription, or it has expired."),
    ),
)]
pub(crate) async fn delete_subscription(
    State(app): State<Arc<App>>,
    user: PathParam,
) -> Result<StatusCode, ApiError> {
    let user = parse_user(user)?;
    let before = app.tier.subscription(&user).await?.map(|subscription| subscription.terms);
    if !app.tier.delete_subscription(&user).await? {
        return Err(no_subscription(&user));
    }
    SubscriptionEnded { user: &user, before }.emit();
    Ok(StatusCode::NO_CONTENT)
}

/// List what tiers allow.
///
/// All four tiers, as they are now.
#[utoipa::path(
    get,
    path = "/admin/tiers",
    tag = "tier",
    responses((status = 200, description = "The tiers.", body = Page<TierResponse>)),
)]
pub(crate) async fn list_tiers(State(app): State<Arc<App>>) -> Json<Page<TierResponse>> {
    let tiers = app.tier.tiers();
    let items = Tier::ALL.map(|tier| describe_tier(tier, tiers.get(tier)));
    Json(Page::cut(items.into(), Tier::ALL.len(), |tier| tier.tier.to_owned()))
}

/// Read what a tier allows.
///
/// The limits of a tier as they are now.
#[utoipa::path(
    get,
    path = "/admin/tiers/{tier}",
    tag = "tier",
    params(("tier" = schema::TierName, Path, description = "Which tier.")),
    responses(
        (status = 200, description = "The tier.", body = TierResponse),
        (status = 404, description = "There is no tier of that name."),
    ),
)]
pub(crate) async fn get_tier(
    State(app): State<Arc<App>>,
    tier: PathParam,
) -> Result<Json<TierResponse>, ApiError> {
    let tier = parse_tier(tier)?;
    Ok(Json(describe_tier(tier, app.tier.tiers().get(tier))))
}

/// Change what a tier allows.
///
/// Applies to the next call on this server, within 5 seconds on the others, and from then on instead of the settings. A
/// field that is left out stays as it is. What was spent stays spent.
#[utoipa::path(
    put,
    path = "/admin/tiers/{tier}",
    tag = "tier",
    params(("tier" = schema::TierName, Path, description = "Which tier.")),
    request_body = TierRequest,
    responses(
        (status = 200, description = "The tier as it is now.", body = TierResponse),
        (status = 404, description = "There is no tier of that name."),
    ),
)]
pub(crate) async fn put_tier(
    State(app): State<Arc<App>>,
    tier: PathParam,
    Json(request): Json<TierRequest>,
) -> Result<Json<TierResponse>, ApiError> {
    let tier = parse_tier(tier)?;
    let current = *app.tier.tiers().get(tier);
    let limits = TierLimits::new(
        parse_amount("requestsPerMinute", request.requests_per_minute, current.requests_per_minute())?,
        parse_amount("burstCapacity", request.burst_capacity, current.burst_capacity())?,
        parse_amount("dailyLimit", request.daily_limit, current.daily_limit())?,
    );
    let limits = limits.map_err(|problem| ApiError::invalid_field("tier", problem))?;
    app.tier.put_tier(tier, limits).await?;
    TierChanged { tier, limits, before: current }.emit();
    Ok(Json(describe_tier(tier, &limits)))
}

/// Set a tier back to the settings.
///
/// Forgets what `PUT` has changed of it, on this server at once, within 5 seconds on the others. What was spent stays
/// spent.
#[utoipa::path(
    delete,
    path = "/admin/tiers/{tier}",
    tag = "tier",
    params(("tier" = schema::TierName, Path, description = "Which tier.")),
    responses(
        (status = 204, description = "The tier has the limits of the settings, now or already before."),
        (status = 404, description = "There is no tier of that name."),
    ),
)]
pub(crate) async fn reset_tier(State(app): State<Arc<App>>, tier: PathParam) -> Result<StatusCode, ApiError> {
    let tier = parse_tier(tier)?;
    let before = *app.tier.tiers().get(tier);
    let limits = app.tier.reset_tier(tier).await?;
    TierReset { tier, limits, before }.emit();
    Ok(StatusCode::NO_CONTENT)
}

/// See whether AI calls are limited.
///
/// The switch as this server knows it.
#[utoipa::path(
    get,
    path = "/admin/rate-limit/enabled",
    tag = "tier",
    responses((status = 200, description = "Whether AI calls are limited by plan.", body = LimitsSwitch)),
)]
pub(crate) async fn get_enabled(State(app): State<Arc<App>>) -> Json<LimitsSwitch> {
    Json(LimitsSwitch { enabled: app.tier.is_enabled() })
}

/// Switch the limits of AI calls on or off.
///
/// Applies to the next call on this server, within 5 seconds on the others, and from then on instead of the settings.
/// While they are off, every AI call is allowed and none is counted, with `X-RateLimit-Remaining: 9223372036854775807`.
/// Policies stay in force either way.
#[utoipa::path(
    put,
    path = "/admin/rate-limit/enabled",
    tag = "tier",
    request_body = LimitsSwitch,
    responses((status = 200, description = "The switch as it is now.", body = LimitsSwitch)),
)]
pub(crate) async fn put_enabled(
    State(app): State<Arc<App>>,
    Json(LimitsSwitch { enabled }): Json<LimitsSwitch>,
) -> Result<Json<LimitsSwitch>, ApiError> {
    let before = app.tier.is_enabled();
    app.tier.set_enabled(enabled).await?;
    LimitsSwitched { is_enabled: enabled, before }.emit();
    Ok(Json(LimitsSwitch { enabled }))
}

/// See the remaining limits.
///
/// What is left of the caller's minute and day. Spends nothing.
#[utoipa::path(
    get,
    path = "/api/v1/limits/me",
    tag = "tier",
    responses((status = 200, description = "What is left.", body = LimitsResponse)),
)]
pub(crate) async fn get_my_limits(
    User(claims): User,
    State(app): State<Arc<App>>,
) -> Result<Json<LimitsResponse>, ApiError> {
    let caller = TierCaller { user: &claims.sub, plan_claim: claims.plan.as_deref() };
    let UserLimits { enabled, plan, limits, minute, daily } = app.tier.user_limits(caller).await?;
    let describe = |limit: u32, state: &LimitState| RemainingLimit {
        limit,
        capacity: state.limit,
        remaining: if enabled { u64::from(state.remaining) } else { i64::MAX.unsigned_abs() },
        reset_after_ms: millis_up(state.reset_after),
    };
    Ok(Json(LimitsResponse {
        user: claims.sub.clone(),
        plan: plan.as_str(),
        tier: plan.tier().as_str(),
        enabled,
        minute: describe(limits.requests_per_minute(), &minute),
        daily: describe(limits.daily_limit(), &daily),
    }))
}

/// Whole milliseconds, rounded up, so that a caller who waits for them has waited long enough.
pub(crate) fn millis_up(span: Duration) -> u64 {
    u64::try_from(span.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX)
}

fn parse_user(path: PathParam) -> Result<UserId, ApiError> {
    let text = path.0.map_err(|_not_utf8| ApiError::invalid_field("user", "must be valid UTF-8"))?;
    UserId::parse(text).map_err(|problem| ApiError::invalid_field("user", problem))
}

fn parse_terms(request: &SubscriptionRequest, now: Timestamp) -> Result<SubscriptionTerms, ApiError> {
    let plan: Plan = request.plan.parse().map_err(|problem| ApiError::invalid_field("plan", problem))?;
    let expires_at = request.expires_at.as_deref().map(|text| parse_time("expiresAt", text)).transpose()?;
    if expires_at.is_some_and(|at| at <= now) {
        return Err(ApiError::invalid_field("expiresAt", "must be in the future"));
    }
    let anchor = request.anchor.as_deref().map(str::parse::<Anchor>).transpose();
    let anchor = anchor.map_err(|problem| ApiError::invalid_field("anchor", problem))?;
    Ok(SubscriptionTerms { plan, expires_at, anchor })
}

fn parse_tier(path: PathParam) -> Result<Tier, ApiError> {
    let tier = path.0.ok().and_then(|text| text.parse().ok());
    tier.ok_or_else(|| ApiError::not_found("There is no such tier; there are free, starter, pro, business"))
}

fn parse_amount(field: &str, value: Option<serde_json::Value>, current: u32) -> Result<u32, ApiError> {
    let Some(value) = value else { return Ok(current) };
    let amount = value.as_u64().and_then(|amount| u32::try_from(amount).ok());
    let amount = amount.filter(|amount| (1..=Limit::MAX).contains(amount));
    amount.ok_or_else(|| ApiError::invalid_field(field, LimitError::Amount))
}

fn no_subscription(user: &UserId) -> ApiError {
    let advice = "PUT /admin/subscriptions/{user} gives it a plan";
    ApiError::not_found(format!("The user {user} has no subscription; {advice}"))
}

fn describe_subscription(subscription: &Subscription) -> SubscriptionResponse {
    SubscriptionResponse {
        user: subscription.user.to_string(),
        plan: subscription.terms.plan.as_str(),
        tier: subscription.terms.plan.tier().as_str(),
        expires_at: subscription.terms.expires_at.map(rfc3339),
        anchor: subscription.terms.anchor.map(|anchor| anchor.to_string()),
        updated_at: rfc3339(subscription.updated_at),
    }
}

const fn describe_tier(tier: Tier, limits: &TierLimits) -> TierResponse {
    TierResponse {
        tier: tier.as_str(),
        requests_per_minute: limits.requests_per_minute(),
        burst_capacity: limits.burst_capacity(),
        daily_limit: limits.daily_limit(),
    }
}
