//! Holds over HTTP: `/v1/hold` and `/v1/settle`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use weir_core::HoldId;
use weir_queue::rfc3339;

use super::check::{Cost, parse_key};
use super::millis_up;
use super::policy::not_a_limit;
use crate::app::App;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::openapi::schema;
use crate::tier::service::{HoldOutcome, SettleOutcome};
use crate::tier::settings::policy_input::parse_span;

/// How long a hold can be settled: by default, and at most.
const TTL: Duration = Duration::from_secs(60);
const TTL_MAX: Duration = Duration::from_secs(24 * 3_600);

#[derive(Debug, Deserialize, ToSchema)]
#[schema(examples(json!({"policy": "login", "key": "10.0.0.1", "cost": 2000, "ttl": "PT1M"})))]
pub(crate) struct HoldRequest {
    #[schema(value_type = schema::PolicyName)]
    policy: Box<str>,
    #[schema(value_type = schema::LimitKey)]
    key: Box<str>,
    /// The estimated cost.
    cost: Cost,
    /// How long the hold can be settled: up to 24 hours, one minute if it is left out.
    #[schema(value_type = Option<schema::FixedDuration>)]
    ttl: Option<Box<str>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HoldResponse {
    #[schema(examples(true))]
    allowed: bool,
    /// The id to settle; null if the estimate does not fit.
    #[schema(required = true, format = "uuid")]
    hold_id: Option<String>,
    #[schema(examples(3000))]
    remaining: u32,
    /// Until when the hold can be settled; null if the estimate does not fit.
    #[schema(required = true)]
    expires_at: Option<jiff::Timestamp>,
    /// When the estimate would fit; null if it never does, because it is above the limit.
    #[schema(required = true, examples(0))]
    retry_after_ms: Option<u64>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SettleHoldRequest, examples(json!({"holdId": "019ceaa0-0d7b-7c3e-9a41-5f2d8c6b7e10", "cost": 1234})))]
pub(crate) struct SettleRequest {
    #[schema(value_type = uuid::Uuid)]
    hold_id: Box<str>,
    /// The true cost.
    cost: Cost,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SettleHoldResponse)]
pub(crate) struct SettleResponse {
    #[schema(format = "uuid")]
    hold_id: String,
    #[schema(value_type = schema::PolicyName)]
    policy: String,
    #[schema(value_type = schema::LimitKey)]
    key: String,
    /// The estimate that was held.
    #[schema(examples(2000))]
    held: u32,
    /// The cost at which it was first settled.
    #[schema(examples(1234))]
    cost: u32,
    /// How much was given back.
    #[schema(examples(766))]
    refunded: u32,
    /// How much was charged beyond the hold.
    charged: u32,
}

/// Hold an estimate.
///
/// For work whose cost is known only afterwards: spends `cost` now, and can be settled at the true cost until it
/// expires. A hold that is never settled stays spent in full.
#[utoipa::path(
    post,
    path = "/v1/hold",
    tag = "limits",
    request_body = HoldRequest,
    responses(
        (
            status = 200,
            description = "The decision. If the estimate does not fit, `holdId` and `expiresAt` are null and nothing was spent.",
            body = HoldResponse,
        ),
        (status = 404, description = "There is no policy of that name. Nothing was spent."),
    ),
)]
pub(crate) async fn hold_limit(
    State(app): State<Arc<App>>,
    Json(request): Json<HoldRequest>,
) -> Result<Json<HoldResponse>, ApiError> {
    let HoldRequest { policy, key, cost, ttl } = request;
    parse_key("key", &key)?;
    let ttl = ttl.map_or(Some(TTL), |text| parse_span(&text)).filter(|ttl| *ttl <= TTL_MAX && !ttl.is_zero());
    let ttl = ttl.ok_or_else(|| {
        ApiError::invalid_field("ttl", "must be a duration of up to 24 hours, such as PT1M")
    })?;
    Ok(Json(match app.tier.hold(&policy, &key, cost.0, ttl).await? {
        HoldOutcome::UnknownPolicy => return Err(not_a_limit(&app, &policy)),
        HoldOutcome::Denied { limit_state, retry_after } => HoldResponse {
            allowed: false,
            hold_id: None,
            remaining: limit_state.remaining,
            expires_at: None,
            retry_after_ms: retry_after.map(millis_up),
        },
        HoldOutcome::Held { id, limit_state, expires_at } => HoldResponse {
            allowed: true,
            hold_id: Some(id.to_string()),
            remaining: limit_state.remaining,
            expires_at: Some(rfc3339(expires_at)),
            retry_after_ms: Some(0),
        },
    }))
}

/// Settle a hold.
///
/// Takes the true cost: gives back what is left of the hold, or charges what it cost beyond it, as a debt if there is
/// no room. Once: settled again, whatever the cost, it answers the same.
#[utoipa::path(
    post,
    path = "/v1/settle",
    tag = "limits",
    request_body = SettleRequest,
    responses(
        (status = 200, description = "Settled, now or before.", body = SettleResponse),
        (status = 404, description = "There is no such hold, or it expired more than a day ago."),
        (status = 410, description = "`HOLD_EXPIRED`: the hold had expired; it is spent in full."),
    ),
)]
pub(crate) async fn settle_hold(
    State(app): State<Arc<App>>,
    Json(SettleRequest { hold_id, cost }): Json<SettleRequest>,
) -> Result<Json<SettleResponse>, ApiError> {
    let unknown =
        || ApiError::not_found("There is no such hold; holds are forgotten a day after they expire");
    let id = HoldId::parse(&hold_id).ok_or_else(unknown)?;
    match app.tier.settle(id, cost.0).await? {
        SettleOutcome::Unknown => Err(unknown()),
        SettleOutcome::Expired => {
            let message = "The hold had expired before it was settled; it is spent in full";
            Err(ApiError::gone("HOLD_EXPIRED", message))
        }
        SettleOutcome::Settled { policy, key, held, cost } => Ok(Json(SettleResponse {
            hold_id: id.to_string(),
            policy,
            key,
            held,
            cost,
            refunded: held.saturating_sub(cost),
            charged: cost.saturating_sub(held),
        })),
    }
}
