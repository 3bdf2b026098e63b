//! Holds over HTTP: `/v1/hold` and `/v1/settle`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use weir_core::HoldId;
use weir_queue::sms::rfc3339;

use super::super::body::Json;
use super::super::error::ApiError;
use super::check::{Cost, parse_key};
use super::millis_up;
use super::policy::unknown_policy;
use crate::app::App;
use crate::config::tier::policy_input::parse_span;
use crate::service::tier::{HoldOutcome, SettleOutcome};

/// How long a hold can be settled when the caller does not say, and at most.
const TTL: Duration = Duration::from_secs(60);
const TTL_MAX: Duration = Duration::from_secs(24 * 3_600);

#[derive(Debug, Deserialize)]
pub(crate) struct HoldRequest {
    policy: Box<str>,
    key: Box<str>,
    cost: Cost,
    ttl: Option<Box<str>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HoldResponse {
    allowed: bool,
    hold_id: Option<String>,
    remaining: u32,
    expires_at: Option<jiff::Timestamp>,
    retry_after_ms: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SettleRequest {
    hold_id: Box<str>,
    cost: Cost,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SettleResponse {
    hold_id: String,
    policy: String,
    key: String,
    held: u32,
    cost: u32,
    refunded: u32,
    charged: u32,
}

/// `POST /v1/hold`
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
        HoldOutcome::UnknownPolicy => return Err(unknown_policy(&policy)),
        HoldOutcome::Denied { standing, retry_after } => HoldResponse {
            allowed: false,
            hold_id: None,
            remaining: standing.remaining,
            expires_at: None,
            retry_after_ms: retry_after.map(millis_up),
        },
        HoldOutcome::Held { id, standing, expires_at } => HoldResponse {
            allowed: true,
            hold_id: Some(id.to_string()),
            remaining: standing.remaining,
            expires_at: Some(rfc3339(expires_at)),
            retry_after_ms: Some(0),
        },
    }))
}

/// `POST /v1/settle`
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
