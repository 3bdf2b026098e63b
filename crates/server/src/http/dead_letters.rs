//! Dead letters over HTTP, for the operator: `/admin/dlq`.

use std::sync::Arc;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use weir_queue::DeadLetter;
use weir_queue::sms::rfc3339;

use super::body::Json;
use super::error::ApiError;
use super::page::{Page, parse_limit};
use crate::app::App;
use crate::auth::admin::Operator;
use crate::service::within;

#[derive(Debug, Deserialize)]
pub(crate) struct ListQuery {
    limit: Option<String>,
    cursor: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeadLetterResponse {
    id: String,
    topic: String,
    key: String,
    /// As text; bytes that are no text are replaced.
    payload: String,
    reason: String,
    attempts: u32,
    died_at: jiff::Timestamp,
}

#[derive(Debug, Serialize)]
pub(crate) struct ReplayResponse {
    replayed: u64,
}

/// `GET /admin/dlq`
pub(crate) async fn list_dead_letters(
    _operator: Operator,
    State(app): State<Arc<App>>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Page<DeadLetterResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let limit = parse_limit(query.limit.as_deref())?;
    let queue = app.engines.store.queue();
    // One more than asked for tells whether there is a next page.
    let list = queue.dead_letters(query.cursor.as_deref(), limit + 1);
    let letters = within(app.settings.http.timeout, list).await?;
    Ok(Json(Page::cut(letters.into_iter().map(describe).collect(), limit, |letter| letter.id.clone())))
}

/// `POST /admin/dlq/{id}/replay`
pub(crate) async fn replay_dead_letter(
    _operator: Operator,
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ReplayResponse>, ApiError> {
    let id = parse_id(id)?;
    match within(app.settings.http.timeout, app.engines.store.queue().replay(&id)).await? {
        true => Ok(Json(ReplayResponse { replayed: 1 })),
        false => Err(unknown(&id)),
    }
}

/// `POST /admin/dlq/replay`
pub(crate) async fn replay_all_dead_letters(
    _operator: Operator,
    State(app): State<Arc<App>>,
) -> Result<Json<ReplayResponse>, ApiError> {
    let replayed = within(app.settings.http.timeout, app.engines.store.queue().replay_all()).await?;
    Ok(Json(ReplayResponse { replayed }))
}

/// `DELETE /admin/dlq/{id}`
pub(crate) async fn discard_dead_letter(
    _operator: Operator,
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<StatusCode, ApiError> {
    let id = parse_id(id)?;
    match within(app.settings.http.timeout, app.engines.store.queue().discard(&id)).await? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(unknown(&id)),
    }
}

/// No id has anything but letters, digits and dashes; whatever has is unknown without asking a store.
fn parse_id(id: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    let Path(id) = id.map_err(|_not_utf8| ApiError::invalid_field("id", "must be valid UTF-8"))?;
    let plain = id.len() <= 64 && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if plain {
        Ok(id)
    } else {
        Err(ApiError::not_found("No dead letter has such an id; GET /admin/dlq lists those there are"))
    }
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("No dead letter has the id {id}; GET /admin/dlq lists those there are"))
}

fn describe(letter: DeadLetter) -> DeadLetterResponse {
    DeadLetterResponse {
        id: letter.id,
        topic: letter.topic,
        key: letter.key,
        payload: String::from_utf8_lossy(&letter.payload).into_owned(),
        reason: letter.reason,
        attempts: letter.attempts,
        died_at: rfc3339(letter.died_at),
    }
}
