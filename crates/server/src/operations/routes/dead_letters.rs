//! Dead letters over HTTP, for the operator: `/admin/dlq`. Dead messages and dead requests both have UUIDs as ids, so they
//! are one list in order of id.

mod filter;
pub(crate) mod groups;
mod messages;

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use weir_core::RequestId;
use weir_queue::DeadLetter;
use weir_queue::rfc3339;
use weir_store::request::{DeadRequest, Request};

use self::filter::{DeadLetterFilter, FilterFields};
use crate::app::App;
use crate::engines::within;
use crate::http::body::{Json, Raw, parse_json};
use crate::http::error::ApiError;
use crate::http::extract::PathParam;
use crate::http::openapi::schema;
use crate::http::pagination::{Page, PageQuery, parse_limit};

/// The `topic` of dead requests.
const REQUESTS: &str = "requests";

/// How many characters of a payload a list shows.
const LISTED_CHARACTERS: usize = 1_024;
/// Enough bytes for that many characters, and one more to see whether the payload is longer.
const LISTED_BYTES: usize = LISTED_CHARACTERS * 4 + 1;

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = DeadLetter)]
pub(crate) struct DeadLetterResponse {
    /// The id for replay and discard.
    #[schema(examples("01a1e10e-307b-72ec-b643-93a845acbee2"))]
    id: String,
    /// The topic of a message, such as `sms-outbound`; `requests` for a request.
    #[schema(examples("sms-outbound"))]
    topic: String,
    /// The owner: the userId of a message on `sms-outbound`, the tenant of a request.
    #[schema(examples("alice"))]
    key: String,
    /// The payload as text; invalid UTF-8 is replaced. Sensitive fields of requests are redacted. A list shows at most 1,024
    /// characters, and nothing of a request whose payload has more than 4,096 bytes.
    #[schema(examples("{\"userId\":\"alice\"}"))]
    payload: String,
    /// Whether `payload` is cut off. `GET /admin/dlq/{id}` shows all of it.
    #[schema(examples(false))]
    truncated: bool,
    /// Why delivery failed. A list shows only the beginning of a long reason.
    #[schema(examples("missing field `message` at line 1 column 14"))]
    reason: String,
    /// How many attempts were made.
    #[schema(examples(1))]
    attempts: u32,
    /// When it became a dead letter.
    died_at: jiff::Timestamp,
    #[serde(flatten)]
    #[schema(value_type = RequestDetails)]
    request: Option<RequestDetails>,
}

/// More fields of dead requests.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = DeadRequestDetails)]
struct RequestDetails {
    /// Only of requests.
    #[schema(required = false)]
    tenant_id: String,
    /// Only of requests.
    #[schema(required = false)]
    request_type: String,
    /// Only of requests: why the last attempt failed.
    failure_code: Option<String>,
    /// Only of requests.
    #[schema(required = false)]
    accepted_at: jiff::Timestamp,
    /// Only of requests.
    callback_url: Option<String>,
}

/// Which dead letters are replayed: those that have all that is given. Without anything, all of them.
/// A field that does not exist is refused: a misspelled one would replay too many.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[schema(examples(json!({"tenant": "acme", "error": "DOWNSTREAM_TIMEOUT", "dryRun": true})))]
pub(crate) struct ReplayRequest {
    /// As in the list.
    topic: Option<String>,
    /// As in the list.
    tenant: Option<String>,
    /// As in the list.
    #[serde(rename = "type")]
    request_type: Option<String>,
    /// As in the list.
    error: Option<String>,
    /// Those that died at this time or later.
    #[schema(value_type = Option<schema::Time>)]
    since: Option<String>,
    /// Those that died before this time.
    #[schema(value_type = Option<schema::Time>)]
    until: Option<String>,
    /// Only count them.
    dry_run: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReplayManyResponse {
    /// How many match.
    #[schema(examples(12))]
    matched: u64,
    /// How many were replayed: none of a dry run, and fewer than matched if others were faster.
    #[schema(examples(12))]
    replayed: u64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ReplayResponse {
    /// How many were replayed.
    #[schema(examples(1))]
    replayed: u64,
}

/// List dead letters.
///
/// Messages that could not be delivered, and requests whose attempts all failed, in order of `id`. Start with `reason`: a
/// malformed event stays malformed, while a fault that has since been repaired is worth a replay.
///
/// The list is read page by page: pass `nextCursor` as `cursor` until it is null. Long payloads are cut off, which
/// `truncated` says; `GET /admin/dlq/{id}` shows one whole.
///
/// A filter looks through 10,000 dead letters of each kind for a page, so a page may have fewer items than `limit`, or none, and
/// still a `nextCursor`.
///
/// With Kafka, malformed events go to the topic `sms-outbound.dlq` instead and are not listed here.
#[utoipa::path(
    get,
    path = "/admin/dlq",
    tag = "dead letters",
    params(PageQuery, FilterFields),
    responses(
        (
            status = 200,
            description = "One page. No items and a null `nextCursor` is good news: nothing is dead.",
            body = Page<DeadLetterResponse>,
        ),
    ),
)]
pub(crate) async fn list_dead_letters(
    State(app): State<Arc<App>>,
    query: Result<Query<PageQuery>, QueryRejection>,
    fields: Result<Query<FilterFields>, QueryRejection>,
) -> Result<Json<Page<DeadLetterResponse>>, ApiError> {
    let Query(query) = query.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let Query(fields) = fields.map_err(|problem| ApiError::invalid(problem.body_text()))?;
    let (limit, filter) = (parse_limit(query.limit.as_deref())?, fields.parse()?);
    // One more of each kind than requested shows whether there is a next page.
    let messages = messages::scan(&app, &filter, query.cursor.as_deref(), limit + 1, LISTED_BYTES);
    let requests = requests(&app, &filter, query.cursor.as_deref(), limit + 1);
    let ((mut letters, stopped_at), (requests, requests_stopped_at)) = tokio::try_join!(messages, requests)?;
    letters.extend(requests);
    letters.sort_by(|one, other| one.id.cmp(&other.id));
    // What is behind the end of a scan comes with the next page, so that none is skipped.
    let scanned_to = [stopped_at, requests_stopped_at].into_iter().flatten().min();
    if let Some(end) = &scanned_to {
        letters.retain(|letter| letter.id <= *end);
    }
    letters.iter_mut().for_each(DeadLetterResponse::cut_payload);
    Ok(Json(Page::cut(letters, limit, |letter| letter.id.clone()).or_next_cursor(scanned_to)))
}

/// Show one dead letter.
///
/// The same as in the list, with the whole payload. Sensitive fields of a request's payload (`request.sensitive_fields`) are shown as
/// `[REDACTED]`.
#[utoipa::path(
    get,
    path = "/admin/dlq/{id}",
    tag = "dead letters",
    params(
        (
            "id" = String, Path,
            description = "The `id` of the dead letter, as listed.",
            example = "01a1e10e-307b-72ec-b643-93a845acbee2",
        ),
    ),
    responses(
        (status = 200, description = "The dead letter.", body = DeadLetterResponse),
        (
            status = 404,
            description = "There is no dead letter with that id: it was replayed or discarded already, perhaps by \
                somebody else. List them again.",
        ),
    ),
)]
pub(crate) async fn get_dead_letter(
    State(app): State<Arc<App>>,
    id: PathParam,
) -> Result<Json<DeadLetterResponse>, ApiError> {
    let id = parse_id(id)?;
    let request_id = RequestId::parse(&id).ok_or_else(|| unknown(&id))?;
    if let Some(dead) = app.requests.dead_letter(request_id).await? {
        return Ok(Json(describe_request(&app, dead)));
    }
    // The first one after the id before it, if that is it.
    let before = request_id.as_uuid().as_u128().checked_sub(1).map(uuid::Uuid::from_u128);
    let found = messages::list(&app, before.map(|id| id.to_string()).as_deref(), 1, usize::MAX).await?;
    let letter = found.into_iter().find(|letter| letter.id == request_id.to_string());
    letter.map(|letter| Json(describe(letter))).ok_or_else(|| unknown(&id))
}

/// Replay one dead letter.
///
/// Puts one dead letter back where it was, attempts counted from 0. The response comes before delivery; if it dies
/// again it is back in the list with the new reason.
#[utoipa::path(
    post,
    path = "/admin/dlq/{id}/replay",
    tag = "dead letters",
    params(
        (
            "id" = String, Path,
            description = "The `id` of the dead letter, as listed.",
            example = "01a1e10e-307b-72ec-b643-93a845acbee2",
        ),
    ),
    responses(
        (status = 200, description = "Put back.", body = ReplayResponse),
        (
            status = 404,
            description = "There is no dead letter with that id: it was replayed or discarded already, perhaps by \
                somebody else. List them again.",
        ),
    ),
)]
pub(crate) async fn replay_dead_letter(
    State(app): State<Arc<App>>,
    id: PathParam,
) -> Result<Json<ReplayResponse>, ApiError> {
    let id = parse_id(id)?;
    let is_request = match RequestId::parse(&id) {
        Some(id) => app.requests.replay(vec![id]).await? > 0,
        None => false,
    };
    if is_request || within(app.settings.http.timeout, app.engines.store.queue.replay(&id)).await? {
        Ok(Json(ReplayResponse { replayed: 1 }))
    } else {
        Err(unknown(&id))
    }
}

/// Replay dead letters.
///
/// Puts the dead letters that match back on their topics and restarts the dead requests that match, attempts counted from 0;
/// without a filter all of them. The response comes before delivery: list the dead letters again a moment later to see which
/// came back. With `dryRun` they are only counted.
///
/// Repair the cause first. What died of a cause that persists dies again.
#[utoipa::path(
    post,
    path = "/admin/dlq/replay",
    tag = "dead letters",
    request_body = Option<ReplayRequest>,
    responses((status = 200, description = "How many match, and how many were put back.", body = ReplayManyResponse)),
)]
pub(crate) async fn replay_dead_letters(
    State(app): State<Arc<App>>,
    Raw(body): Raw,
) -> Result<Json<ReplayManyResponse>, ApiError> {
    let request = if body.is_empty() { ReplayRequest::default() } else { parse_json(&body)? };
    let ReplayRequest { topic, tenant, request_type, error, since, until, dry_run } = request;
    let filter = FilterFields { topic, tenant, request_type, error, since, until }.parse()?;
    let mut counts = messages::replay(&app, &filter, dry_run).await?;
    if filter.includes_topic(REQUESTS) {
        let matches = |dead: &DeadRequest| filter.matches_request(dead);
        let requests = app.requests.replay_matching(dry_run, &matches).await?;
        counts.matched += requests.matched;
        counts.replayed += requests.replayed;
    }
    Ok(Json(ReplayManyResponse { matched: counts.matched, replayed: counts.replayed }))
}

/// Discard one dead letter.
///
/// Throws one dead letter away. **This cannot be undone.** The audit counts it as `discarded`, so the books still
/// balance; a request stays failed and can still be read.
#[utoipa::path(
    delete,
    path = "/admin/dlq/{id}",
    tag = "dead letters",
    params(
        (
            "id" = String, Path,
            description = "The `id` of the dead letter, as listed.",
            example = "01a1e10e-307b-72ec-b643-93a845acbee2",
        ),
    ),
    responses(
        (status = 204, description = "Discarded."),
        (
            status = 404,
            description = "There is no dead letter with that id: it was replayed or discarded already, perhaps by \
                somebody else. List them again.",
        ),
    ),
)]
pub(crate) async fn discard_dead_letter(
    State(app): State<Arc<App>>,
    id: PathParam,
) -> Result<StatusCode, ApiError> {
    let id = parse_id(id)?;
    let is_request = match RequestId::parse(&id) {
        Some(id) => app.requests.discard(id).await?,
        None => false,
    };
    if is_request || within(app.settings.http.timeout, app.engines.store.queue.discard(&id)).await? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(unknown(&id))
    }
}

impl DeadLetterResponse {
    /// Cuts the payload to what a list shows.
    fn cut_payload(&mut self) {
        if let Some((end, _)) = self.payload.char_indices().nth(LISTED_CHARACTERS) {
            self.payload.truncate(end);
            self.truncated = true;
        }
    }
}

/// Dead requests that match, and where the scan stopped before the end.
async fn requests(
    app: &App,
    filter: &DeadLetterFilter,
    after: Option<&str>,
    limit: usize,
) -> Result<(Vec<DeadLetterResponse>, Option<String>), ApiError> {
    let after = match after.map(RequestId::parse) {
        // A cursor that is not an id counts as one after the last request.
        Some(None) => return Ok((Vec::new(), None)),
        after => after.flatten(),
    };
    if !filter.includes_topic(REQUESTS) {
        return Ok((Vec::new(), None));
    }
    let matches = |dead: &DeadRequest| filter.matches_request(dead);
    let scan = app.requests.scan_dead(after, limit, LISTED_CHARACTERS * 4, &matches).await?;
    let letters = scan.letters.into_iter().map(|dead| describe_request(app, dead)).collect();
    Ok((letters, scan.stopped_at.map(|id| id.to_string())))
}

/// An id has only letters, digits and dashes, so anything else is unknown without a query.
fn parse_id(id: PathParam) -> Result<String, ApiError> {
    let id = id.0.map_err(|_not_utf8| ApiError::invalid_field("id", "must be valid UTF-8"))?;
    let plain = id.len() <= 64 && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if plain {
        Ok(id.into())
    } else {
        Err(ApiError::not_found("No dead letter has such an id; GET /admin/dlq lists all"))
    }
}

fn unknown(id: &str) -> ApiError {
    ApiError::not_found(format!("No dead letter has the id {id}; GET /admin/dlq lists all"))
}

fn describe(letter: DeadLetter) -> DeadLetterResponse {
    DeadLetterResponse {
        id: letter.id,
        topic: letter.topic,
        key: letter.key,
        payload: String::from_utf8_lossy(&letter.payload).into_owned(),
        truncated: false,
        reason: letter.reason,
        attempts: letter.attempts,
        died_at: rfc3339(letter.died_at),
        request: None,
    }
}

fn describe_request(app: &App, dead: DeadRequest) -> DeadLetterResponse {
    let payload = app.requests.redacted_payload(&dead.request);
    let Request { id, tenant, request_type, attempts, failure, callback_url, accepted_at, .. } =
        app.requests.open_texts(dead.request);
    let (failure_code, reason) = failure.map(|failure| (failure.code, failure.message)).unzip();
    DeadLetterResponse {
        id: id.to_string(),
        topic: REQUESTS.to_owned(),
        key: tenant.to_string(),
        truncated: payload.is_none(),
        payload: payload.unwrap_or_default(),
        reason: reason.unwrap_or_default(),
        attempts,
        died_at: rfc3339(dead.died_at),
        request: Some(RequestDetails {
            tenant_id: tenant.to_string(),
            request_type: request_type.to_string(),
            failure_code,
            accepted_at: rfc3339(accepted_at),
            callback_url,
        }),
    }
}
