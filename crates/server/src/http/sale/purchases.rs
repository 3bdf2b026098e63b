//! Buying over HTTP: `/api/v1/purchases`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::header::CACHE_CONTROL;
use http::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use weir_core::UserId;
use weir_core::sale::{Receipt, Refusal, Sku};
use weir_store::sale::{Buy, BuyOutcome};

use super::super::body::Json;
use super::super::error::ApiError;
use super::super::rate_limit_headers::RateLimitHeaders;
use super::error::SaleError;
use super::visitor::{Visitor, parse_buyer};
use super::{SaleQuery, parse_query, success, time_text, unknown_sale};
use crate::app::App;
use crate::service::sale::challenge::Judgement;

const TOKEN: &str = "x-challenge-token";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PurchaseRequest {
    sku: Option<Value>,
    qty: Option<Value>,
    challenge_token: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PurchaseResponse {
    purchase_no: String,
    purchased_at: String,
}

/// `POST /api/v1/purchases`
pub(crate) async fn create_purchase(
    visitor: Visitor,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Json<PurchaseRequest>, ApiError>,
) -> Result<Response, SaleError> {
    let buyer = parse_buyer(&headers)?;
    let Json(request) = body?;
    let sku = parse(&request)?;
    let standing = throttle(&app, &buyer)?;
    let header = headers.get(TOKEN).and_then(|value| value.to_str().ok());
    challenge(&app, &visitor, &buyer, request.challenge_token.as_deref().or(header)).await?;
    let outcome = app.sale.buy(Buy { sku, buyer }).await?;
    let mut response = match outcome {
        BuyOutcome::Bought { receipt, .. } => describe(receipt).into_response(),
        BuyOutcome::Refused(refusal) => refuse(refusal).into_response(),
        BuyOutcome::UnknownSku => unknown_sale().into_response(),
    };
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(standing) = standing {
        standing.write(response.headers_mut());
    }
    Ok(response)
}

/// `GET /api/v1/purchases`
pub(crate) async fn get_purchase(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    query: Result<Query<SaleQuery>, QueryRejection>,
) -> Result<Response, SaleError> {
    let buyer = parse_buyer(&headers)?;
    let sku = parse_query(query)?;
    let receipt = app.sale.purchase(&buyer, sku.as_ref()).await?;
    let receipt = receipt.ok_or_else(|| SaleError::not_found("No purchase found for this user."))?;
    Ok(([(CACHE_CONTROL, "no-store")], describe(receipt)).into_response())
}

fn parse(request: &PurchaseRequest) -> Result<Sku, SaleError> {
    let sku = request.sku.as_ref().and_then(Value::as_str).filter(|sku| !sku.is_empty());
    let mut wrong = Vec::new();
    if sku.is_none() {
        wrong.push(("sku", "must be a non-empty string".to_owned()));
    }
    if request.qty.as_ref().and_then(Value::as_u64) != Some(1) {
        wrong.push(("qty", "must be exactly 1".to_owned()));
    }
    match sku {
        // What cannot be a sku is that of no product.
        Some(sku) if wrong.is_empty() => Sku::parse(sku).map_err(|_none| unknown_sale()),
        _ => Err(SaleError::invalid_fields(wrong, None)),
    }
}

/// Counts the attempt, and refuses one too many.
fn throttle(app: &App, buyer: &UserId) -> Result<Option<RateLimitHeaders>, SaleError> {
    let Some(standing) = app.sale.attempt(buyer) else { return Ok(None) };
    let shown = RateLimitHeaders {
        policy: "purchase",
        limit: app.settings.sale.user_per_second,
        window: Duration::from_secs(1),
        remaining: standing.remaining,
        reset_after: standing.after,
    };
    if standing.is_allowed {
        return Ok(Some(shown));
    }
    let mut refused = SaleError::rate_limited(standing.after);
    shown.write(refused.headers_mut());
    Err(refused)
}

/// Lets a buyer go on who has shown to be a person, where that is asked for.
async fn challenge(
    app: &App,
    visitor: &Visitor,
    buyer: &UserId,
    token: Option<&str>,
) -> Result<(), SaleError> {
    let Some(challenge) = app.sale.challenge() else { return Ok(()) };
    match challenge.judge(token, visitor.address).await? {
        Judgement::Passed => Ok(()),
        Judgement::Flagged => {
            tracing::info!(user_id = %buyer, address = %visitor.address, "a buyer may not be a person");
            Ok(())
        }
        Judgement::Required => {
            let message = "Please solve the challenge and try again.";
            Err(SaleError::refusal("CHALLENGE_REQUIRED", message))
        }
    }
}

fn refuse(refusal: Refusal) -> SaleError {
    match refusal {
        Refusal::AlreadyPurchased => {
            SaleError::refusal("ALREADY_PURCHASED", "You have already purchased this item.")
        }
        Refusal::SoldOut => SaleError::refusal("SOLD_OUT", "Sorry, all items have been sold."),
        Refusal::NotActive => SaleError::refusal("SALE_NOT_ACTIVE", "The sale is not active."),
    }
}

fn describe(receipt: Receipt) -> impl IntoResponse {
    success(PurchaseResponse {
        purchase_no: receipt.purchase_no().to_string(),
        purchased_at: time_text(receipt.at),
    })
}
