//! Due slots on the store's own queue, for workers outside of Weir: `/admin/queue/claim` and `/admin/queue/settle`.
//! With Kafka as the broker, due slots are published there instead.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use weir_queue::{
    ClaimReceipt, Message, MessageClaim, MessageSource, Position, Queue, Settlement, ShardLease,
};

use crate::app::App;
use crate::engines::within;
use crate::http::body::Json;
use crate::http::error::ApiError;
use crate::peer::{Peer, disconnected};

const MESSAGES_MAX: u32 = 1_000;
const VISIBILITY_MAX: u32 = 3_600;
const WAIT_MAX: u32 = 20;
const DELAY_MAX: u32 = 86_400;
const REASON_MAX: usize = 1_000;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({"topic": "payments-due", "max": 100, "waitSeconds": 20})))]
pub(crate) struct ClaimRequest {
    /// The value of `slot.dispatch.topic`.
    #[schema(value_type = String)]
    topic: Box<str>,
    #[schema(minimum = 1, maximum = 1000, default = 100)]
    max: Option<u32>,
    #[schema(minimum = 1, maximum = 3600, default = 30)]
    visibility_seconds: Option<u32>,
    /// How long to wait if nothing is due.
    #[schema(maximum = 20, default = 0)]
    wait_seconds: Option<u32>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimResponse {
    messages: Vec<MessageResponse>,
    /// Needed to settle the claim; empty if nothing is due.
    #[schema(examples("3-5"))]
    receipt: String,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimedMessage)]
struct MessageResponse {
    #[schema(examples("3-17"))]
    id: String,
    /// The config's name.
    #[schema(examples("default"))]
    key: String,
    /// How often the message was put back.
    attempts: u32,
    /// The slot, as it was assigned.
    payload: Value,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(examples(json!({"topic": "payments-due", "receipt": "3-5", "done": ["3-17"]})))]
pub(crate) struct SettleClaimRequest {
    #[schema(value_type = String)]
    topic: Box<str>,
    /// The `receipt` of the claim.
    #[schema(value_type = String)]
    receipt: Box<str>,
    #[serde(default)]
    done: Vec<String>,
    #[serde(default)]
    retry: Vec<RetryRequest>,
    #[serde(default)]
    dead: Vec<DeadMessageRequest>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = RetriedMessage)]
struct RetryRequest {
    id: String,
    #[schema(maximum = 86_400)]
    delay_seconds: u32,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = DeadMessage)]
struct DeadMessageRequest {
    id: String,
    /// At most 1,000 bytes.
    #[schema(max_length = 1000)]
    reason: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SettleClaimResponse {
    #[schema(examples(1))]
    settled: usize,
}

/// Claim due slots.
///
/// Hands out events of `slot.dispatch.topic`, in order of time for each config, for `visibilitySeconds`. While events
/// of a config are claimed, nobody else can claim any of that config. Settle them with `/admin/queue/settle`; events that
/// are not settled in time are handed out again.
///
/// With Kafka as the broker, due slots are published there instead.
#[utoipa::path(
    post,
    path = "/admin/queue/claim",
    tag = "slot",
    request_body = ClaimRequest,
    responses(
        (
            status = 200,
            description = "The claimed messages; none, with an empty `receipt`, if nothing is due.",
            body = ClaimResponse,
        ),
        (status = 404, description = "Slots are not dispatched, or not on this topic, or on Kafka."),
    ),
)]
pub(crate) async fn claim_messages(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    Json(request): Json<ClaimRequest>,
) -> Result<Json<ClaimResponse>, ApiError> {
    let queue = queue(&app, &request.topic)?;
    let max = bounded("max", request.max.unwrap_or(100), 1, MESSAGES_MAX)?;
    let visibility =
        bounded("visibilitySeconds", request.visibility_seconds.unwrap_or(30), 1, VISIBILITY_MAX)?;
    let wait = bounded("waitSeconds", request.wait_seconds.unwrap_or(0), 0, WAIT_MAX)?;
    let (max, visibility) = (max as usize, Duration::from_secs(visibility.into()));
    let deadline = tokio::time::Instant::now() + Duration::from_secs(wait.into());
    let mut disconnected = pin!(disconnected(peer.as_deref()));
    let mut permit = None;
    loop {
        let claim = queue.claim(&request.topic, max, visibility);
        let claim = within(app.settings.http.timeout, claim).await?;
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        if !claim.messages.is_empty() || left.is_zero() || app.shutdown.closing().is_cancelled() {
            return Ok(Json(describe(claim)));
        }
        if permit.is_none() {
            permit = Some(app.address_limits.acquire_long_lived()?);
        }
        tokio::select! {
            () = queue.wait(&request.topic, left.min(app.settings.sender.poll)) => {}
            () = app.shutdown.closing().cancelled() => {}
            // A claim made now would reach nobody.
            () = &mut disconnected => return Ok(Json(describe(claim))),
        }
    }
}

/// Settle claimed slots.
///
/// Settles and ends a claim, in one commit. Messages in `done` are removed, those in `retry` are handed out again after
/// their delay, before later ones of their config, and those in `dead` become dead letters. All others are handed out
/// again at once.
#[utoipa::path(
    post,
    path = "/admin/queue/settle",
    tag = "slot",
    request_body = SettleClaimRequest,
    responses(
        (status = 200, description = "How many messages were settled.", body = SettleClaimResponse),
        (status = 404, description = "Slots are not dispatched, or not on this topic, or on Kafka."),
        (
            status = 409,
            description = "`LEASE_EXPIRED`: the claim has run out. Nothing was settled; its messages are handed out \
                again.",
        ),
    ),
)]
pub(crate) async fn settle_messages(
    State(app): State<Arc<App>>,
    Json(request): Json<SettleClaimRequest>,
) -> Result<Json<SettleClaimResponse>, ApiError> {
    let queue = queue(&app, &request.topic)?;
    let leases = parse_leases(&request.receipt)?;
    let receipt = ClaimReceipt { topic: request.topic.into_string(), leases };
    let settlement = Settlement {
        done: request.done.iter().map(|id| parse_position(id)).collect::<Result<_, _>>()?,
        retry: request.retry.iter().map(parse_retry).collect::<Result<_, _>>()?,
        dead: request.dead.into_iter().map(parse_dead).collect::<Result<_, _>>()?,
        ..Settlement::default()
    };
    let settled = settlement.done.len() + settlement.retry.len() + settlement.dead.len();
    match within(app.settings.http.timeout, queue.settle(&receipt, settlement)).await? {
        true => Ok(Json(SettleClaimResponse { settled })),
        false => Err(ApiError::conflict(
            "LEASE_EXPIRED",
            "The claim has run out; its messages are handed out again, claim them anew",
        )),
    }
}

/// Only due slots can be claimed over HTTP; other topics have workers in Weir.
fn queue(app: &App, topic: &str) -> Result<Arc<dyn MessageSource>, ApiError> {
    match app.settings.slot.dispatch_topic.as_deref() {
        Some(_) if app.engines.kafka.is_some() => {
            Err(ApiError::not_found("Due slots are on Kafka here; take them from their topic there"))
        }
        Some(due_topic) if due_topic == topic => Ok(Arc::<dyn Queue>::clone(&app.engines.store.queue)),
        Some(due_topic) => {
            Err(ApiError::not_found(format!("There is no such topic here; due slots are on {due_topic}")))
        }
        None => Err(ApiError::not_found(
            "Due slots are not dispatched here; set slot.dispatch.topic (WEIR_SLOT_DISPATCH_TOPIC)",
        )),
    }
}

fn bounded(field: &str, value: u32, min: u32, max: u32) -> Result<u32, ApiError> {
    let problem = || ApiError::invalid_field(field, format!("must be from {min} to {max}"));
    (min..=max).contains(&value).then_some(value).ok_or_else(problem)
}

fn describe(claim: MessageClaim) -> ClaimResponse {
    let leases = if claim.messages.is_empty() { Vec::new() } else { claim.receipt.leases };
    let receipt: Vec<String> =
        leases.iter().map(|lease| format!("{}-{}", lease.shard, lease.token)).collect();
    let messages = claim.messages.into_iter().map(describe_message).collect();
    ClaimResponse { messages, receipt: receipt.join(".") }
}

fn describe_message(message: Message) -> MessageResponse {
    let Message { position, key, payload, attempts, .. } = message;
    // The dispatcher writes JSON. A payload that somebody edited into something else is shown as text.
    let payload = serde_json::from_slice(&payload)
        .unwrap_or_else(|_not_json| Value::String(String::from_utf8_lossy(&payload).into_owned()));
    MessageResponse { id: format!("{}-{}", position.shard, position.id), key, attempts, payload }
}

fn parse_pair(text: &str) -> Option<(u16, i64)> {
    let (shard, number) = text.split_once('-')?;
    Some((shard.parse().ok()?, number.parse().ok()?))
}

fn parse_position(id: &str) -> Result<Position, ApiError> {
    let (shard, id) =
        parse_pair(id).ok_or_else(|| ApiError::invalid("An id must be one that a claim returned"))?;
    Ok(Position { shard, id })
}

fn parse_leases(receipt: &str) -> Result<Vec<ShardLease>, ApiError> {
    let wrong = || ApiError::invalid_field("receipt", "must be the receipt of a claim");
    let lease = |text| parse_pair(text).map(|(shard, token)| ShardLease { shard, token });
    receipt.split('.').map(|text| lease(text).ok_or_else(wrong)).collect()
}

fn parse_retry(retry: &RetryRequest) -> Result<(Position, Duration), ApiError> {
    let delay = bounded("delaySeconds", retry.delay_seconds, 0, DELAY_MAX)?;
    Ok((parse_position(&retry.id)?, Duration::from_secs(delay.into())))
}

fn parse_dead(dead: DeadMessageRequest) -> Result<(Position, String), ApiError> {
    if dead.reason.len() > REASON_MAX || dead.reason.contains('\0') {
        return Err(ApiError::invalid_field("reason", format!("must be at most {REASON_MAX} bytes of text")));
    }
    Ok((parse_position(&dead.id)?, dead.reason))
}
