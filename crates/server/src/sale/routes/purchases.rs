//! HTTP routes of purchases: `/api/v1/purchases`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, USER_AGENT};
use http::{HeaderMap, HeaderValue};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use weir_core::UserId;
use weir_core::sale::anomaly::Attempt;
use weir_core::sale::{PurchaseReceipt, PurchaseRefusal, Sku};
use weir_store::sale::{BuyOutcome, FoundPurchase, ThrottledBy};
use weir_store::throttle::ThrottleDecision;

use super::{Outcome, SaleQuery, Success, parse_query, success, time_text, unknown_sale};
use crate::app::App;
use crate::auth::credentials::AuthError;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::http::extract::{TokenOfBuyer, Visitor};
use crate::http::openapi::schema;
use crate::http::rate_limit_headers::RateLimitHeaders;
use crate::http::sale_error::{SaleError, SaleErrorCode};
use crate::sale::challenge::{ChallengeKind, ChallengeOutcome, ChallengeToken};
use crate::sale::events::PurchaseAttempted;
use crate::sale::settings::BuyerIdentity;

const BUYER: &str = "X-User-Id";
const CHALLENGE_TOKEN: &str = "x-challenge-token";

/// The header that names a buyer, for the OpenAPI document.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "parse_buyer reads it")]
struct BuyerHeader {
    /// The buyer. Surrounding whitespace is removed. Not read where tokens name buyers (`sale.identity`).
    #[param(rename = "X-User-Id", value_type = schema::UserId, example = "user@example.com")]
    user: String,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({"sku": "WIDGET-001", "qty": 1})))]
pub(crate) struct PurchaseRequest {
    #[schema(value_type = schema::Sku)]
    sku: Option<Value>,
    /// Always 1: one unit per buyer.
    #[schema(value_type = u32, minimum = 1, maximum = 1)]
    qty: Option<Value>,
    /// The provider's token, if `sale.challenge` is set. The header `X-Challenge-Token` may carry it instead.
    challenge_token: Option<String>,
    /// The challenge that the token is from, if the interactive one has keys of its own: `invisible` by default.
    #[serde(default)]
    #[schema(inline)]
    challenge_kind: ChallengeKind,
}

/// A purchase of one unit.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Purchase)]
struct PurchaseResponse {
    #[schema(value_type = schema::Sku)]
    sku: String,
    /// `PUR-`, the day in UTC, and the number of the purchase in its sale, in four digits or more.
    #[schema(examples("PUR-20260215-0001"))]
    purchase_no: String,
    /// When it was bought.
    #[schema(format = DateTime)]
    purchased_at: String,
}

/// Buy one unit.
///
/// Sells the buyer one unit if the sale is active, has stock, and has not sold this buyer one before. Exact under any
/// concurrency: never more than the stock, never two for one buyer. A buyer who has a unit always gets
/// `ALREADY_PURCHASED`, so a call whose response was lost can be sent again.
///
/// The purchase is on disk before the response, or with `--cache` in Redis, which the store follows.
#[utoipa::path(
    post,
    path = "/api/v1/purchases",
    tag = "sale",
    params(
        BuyerHeader,
        (
            "X-Challenge-Token" = Option<String>,
            Header,
            nullable = false,
            description = "The provider's token, if `sale.challenge` is set; instead of `challengeToken`.",
        ),
    ),
    request_body = PurchaseRequest,
    responses(
        (
            status = 200,
            description = "Check `success`: either the buyer has a unit, or the purchase was refused, and `error.code` is \
                the reason: `SALE_NOT_ACTIVE`, `SOLD_OUT`, `ALREADY_PURCHASED`, or `CHALLENGE_REQUIRED`.",
            body = Outcome<PurchaseResponse>,
        ),
        (status = 404, description = "There is no such sale."),
        (
            status = 503,
            description = "The engine that decides sales did not answer in time, or the server is shutting down. The \
                outcome of a purchase is unknown: ask `GET /api/v1/purchases`, or send it again, which never \
                buys twice.",
        ),
    ),
)]
pub(crate) async fn create_purchase(
    visitor: Visitor,
    token: TokenOfBuyer,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Result<Json<PurchaseRequest>, ApiError>,
) -> Result<Response, SaleError> {
    let started = Instant::now();
    let agent = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok());
    app.sale.record_client(agent);
    let buyer = parse_buyer(&app, &token, &headers)?;
    let Json(request) = body?;
    let sku = parse(&request)?;
    let attempt = Attempt { sku: &sku, user: &buyer, address: visitor.address, agent };
    app.sale.anomalies().record(&attempt);
    let response = buy(&app, &visitor, &headers, &request, &attempt).await.into_response();
    if app.settings.sale.log_attempts {
        let code = response.extensions().get::<SaleErrorCode>().map_or("BOUGHT", |SaleErrorCode(code)| *code);
        PurchaseAttempted { attempt: &attempt, outcome: code, took: started.elapsed() }.emit();
    }
    Ok(response)
}

/// Sells a unit to those who may try and are people.
async fn buy(
    app: &App,
    visitor: &Visitor,
    headers: &HeaderMap,
    request: &PurchaseRequest,
    attempt: &Attempt<'_>,
) -> Result<Response, SaleError> {
    let (sku, buyer) = (attempt.sku.clone(), attempt.user.clone());
    let attempts = app.sale.attempt(&buyer).await;
    if let Some(refused) = attempts.filter(|attempts| !attempts.is_allowed) {
        return Err(too_many_attempts(&refused));
    }
    let header = headers.get(CHALLENGE_TOKEN).and_then(|value| value.to_str().ok());
    let token = request.challenge_token.as_deref().or(header);
    let token = token.map(|token| ChallengeToken { token, kind: request.challenge_kind });
    challenge(app, visitor, &buyer, token).await?;
    let outcome = app.sale.buy(sku.clone(), buyer, visitor.limit.clone()).await?;
    let mut response = match outcome {
        BuyOutcome::Bought { receipt, .. } => describe(&sku, receipt).into_response(),
        BuyOutcome::Refused(refusal) => refuse(refusal).into_response(),
        BuyOutcome::UnknownSku => unknown_sale().into_response(),
        BuyOutcome::Throttled { by, retry_after } => {
            return Err(too_many_together(by, attempts, retry_after));
        }
    };
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(attempts) = attempts {
        rate_limit(&attempts).write(response.headers_mut());
    }
    Ok(response)
}

/// Look up a purchase.
///
/// Returns the buyer's purchase of one product, or the latest of any. A purchase can be read as soon as its call has
/// returned.
#[utoipa::path(
    get,
    path = "/api/v1/purchases",
    tag = "sale",
    params(BuyerHeader, SaleQuery),
    responses(
        (status = 200, description = "The purchase.", body = Success<PurchaseResponse>),
        (status = 404, description = "The buyer has no such purchase, or there is no such sale."),
    ),
)]
pub(crate) async fn get_purchase(
    token: TokenOfBuyer,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    query: Result<Query<SaleQuery>, QueryRejection>,
) -> Result<Response, SaleError> {
    let buyer = parse_buyer(&app, &token, &headers)?;
    let sku = parse_query(query)?;
    let found = app.sale.purchase(&buyer, sku.as_ref()).await?;
    let FoundPurchase { sku, receipt } =
        found.ok_or_else(|| SaleError::not_found("No purchase found for this user."))?;
    Ok(([(CACHE_CONTROL, "no-store")], describe(&sku, receipt)).into_response())
}

/// Reads the buyer from the header `X-User-Id` or, with `sale.identity = "token"`, from the token alone.
fn parse_buyer(
    app: &App,
    TokenOfBuyer(claims): &TokenOfBuyer,
    headers: &HeaderMap,
) -> Result<UserId, SaleError> {
    if app.settings.sale.identity == BuyerIdentity::Token {
        let buyer = claims.as_ref().and_then(|claims| UserId::parse(claims.sub.as_str()).ok());
        return buyer.ok_or_else(|| {
            ApiError::from(AuthError::Token)
                .with_message("The token must name its user in sub, in 1 to 255 characters")
                .into()
        });
    }
    let text = headers.get(BUYER).and_then(|value| std::str::from_utf8(value.as_bytes()).ok());
    text.and_then(|text| UserId::parse(text.trim()).ok()).ok_or_else(|| {
        let message = "X-User-Id header is required and must be a non-empty string.";
        let allowed = "Must be a non-empty string (max 255 characters)".to_owned();
        SaleError::invalid_fields(vec![(BUYER, allowed)], Some(message))
    })
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
        // No product has an invalid sku.
        Some(sku) if wrong.is_empty() => Sku::parse(sku).map_err(|_invalid| unknown_sale()),
        _ => Err(SaleError::invalid_fields(wrong, None)),
    }
}

/// The rate limit headers of an attempt.
const fn rate_limit(attempt: &ThrottleDecision) -> RateLimitHeaders {
    let ThrottleDecision { is_allowed, limit_state } = attempt;
    RateLimitHeaders {
        policy: "purchase",
        limit: limit_state.limit,
        window: Duration::from_secs(1),
        remaining: limit_state.remaining,
        reset_after: if *is_allowed { limit_state.reset_after } else { limit_state.next_after },
    }
}

/// The buyer has made too many attempts.
fn too_many_attempts(attempt: &ThrottleDecision) -> SaleError {
    let mut refused = SaleError::rate_limited(attempt.limit_state.next_after);
    rate_limit(attempt).write(refused.headers_mut());
    refused
}

/// The buyer, or the address, has made too many attempts on all servers together.
fn too_many_together(by: ThrottledBy, attempt: Option<ThrottleDecision>, retry_after: Duration) -> SaleError {
    match (by, attempt) {
        (ThrottledBy::User, Some(attempt)) => too_many_attempts(&attempt.refused_together(retry_after)),
        _ => SaleError::rate_limited(retry_after),
    }
}

/// Checks the buyer's challenge token, if a challenge is configured.
async fn challenge(
    app: &App,
    visitor: &Visitor,
    buyer: &UserId,
    token: Option<ChallengeToken<'_>>,
) -> Result<(), SaleError> {
    let Some(challenge) = app.sale.challenge() else { return Ok(()) };
    match challenge.check(buyer, token, visitor.address).await? {
        ChallengeOutcome::Passed | ChallengeOutcome::Flagged => Ok(()),
        ChallengeOutcome::Required => {
            let message = "Please solve the challenge and try again.";
            Err(SaleError::refusal("CHALLENGE_REQUIRED", message))
        }
    }
}

fn refuse(refusal: PurchaseRefusal) -> SaleError {
    match refusal {
        PurchaseRefusal::AlreadyPurchased => {
            SaleError::refusal("ALREADY_PURCHASED", "You have already purchased this item.")
        }
        PurchaseRefusal::SoldOut => SaleError::refusal("SOLD_OUT", "Sorry, all items have been sold."),
        PurchaseRefusal::NotActive => SaleError::refusal("SALE_NOT_ACTIVE", "The sale is not active."),
    }
}

fn describe(sku: &Sku, receipt: PurchaseReceipt) -> impl IntoResponse + use<> {
    success(PurchaseResponse {
        sku: sku.to_string(),
        purchase_no: receipt.purchase_no().to_string(),
        purchased_at: time_text(receipt.at),
    })
}
