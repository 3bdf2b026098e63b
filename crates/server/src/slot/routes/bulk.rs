//! Bulk loads: `POST /api/v1/slots/bulk`, one event per line, answered line by line while the upload continues.
//!
//! There are three stages, connected by short channels: reading and parsing lines, assigning batches, sending answers.
//! When the caller does not read its answers, the upload stops. A line that is invalid, or that the store
//! cannot answer, gets an error in its place. Sending the whole load again is always safe.
//!
//! The engine decides how long a batch waits for windows that another batch holds (docs/slot.md, "Search and headroom").
//!
//! Batches between the stages are charged to the memory budget of uploads until their answers have been written.

mod upload;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use serde::Serialize;
use tokio::sync::mpsc;
use utoipa::ToSchema;
use weir_store::slot::{Assign, AssignOutcome};

use self::upload::{Line, ParsedBatch, Upload};
use super::{SlotResponse, describe, exhausted, recounting, unknown_config};
use crate::app::App;
use crate::buffer_budget::BufferCharge;
use crate::http::error::ApiError;
use crate::slot::service::SlotService;
use crate::telemetry::request_context::inherit;

/// Batches between two stages.
const CHANNEL_CAPACITY: usize = 2;

const NDJSON: &str = "application/x-ndjson";

/// The example of an upload in the OpenAPI document.
const EXAMPLE: &str = concat!(
    r#"{"eventId":"payment-000001","configName":"default","requestedTime":"2026-06-01T12:00:00Z"}"#,
    "\n",
    r#"{"eventId":"payment-000002","configName":"default"}"#,
    "\n",
);

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = SlotLineError, title = "An error, in the place of a slot")]
struct LineError<'a> {
    /// The number of the line in the upload, from 1. Empty lines count.
    #[schema(minimum = 1)]
    line: u64,
    /// The event, if the line has a readable id.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    event_id: Option<&'a str>,
    /// What to branch on: `INVALID_REQUEST` and `NOT_FOUND` fail again until the line or the config is corrected;
    /// lines with `SLOTS_EXHAUSTED`, `DEPENDENCY_UNAVAILABLE` and `REQUEST_TIMEOUT` can be sent again. More codes may be added.
    #[schema(pattern = "^[A-Z][A-Z_]*$")]
    code: &'a str,
    /// The problem, for people. The wording may change.
    message: &'a str,
}

/// One line of the response.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = SlotLine)]
#[expect(dead_code, reason = "each line is serialized as its own type; this one is for the OpenAPI document")]
enum LineResponse<'a> {
    Slot(#[schema(inline)] SlotResponse),
    Error(#[schema(inline)] LineError<'a>),
}

/// Assign slots to many events.
///
/// One event per line, one answer per line, in the same order. Answers are streamed while the upload continues, and its
/// length is not limited. When the caller does not read the answers, the upload stops.
///
/// From a file: `curl -N -X POST -T events.ndjson -H 'Content-Type: application/x-ndjson' …/api/v1/slots/bulk`.
///
/// **The status is 200 even if all lines fail.** A line that is invalid, or that the store could not answer, gets
/// an error in its place, and the upload continues. A line of the response is an error when it has `code`. Empty lines are
/// skipped but counted. A line may have up to 64 KiB; the last one needs no line break.
///
/// Sending the whole load again is always safe: events that have a slot keep it and get `EXISTING`. Do so
/// after a broken connection, and for lines with `DEPENDENCY_UNAVAILABLE` or `SLOTS_EXHAUSTED`.
///
/// Up to 2,000 events are written in one commit, before they are answered. `application/ndjson`, `application/jsonl`
/// and `application/x-jsonlines` are accepted as well.
#[utoipa::path(
    post,
    path = "/api/v1/slots/bulk",
    tag = "slot",
    request_body(
        content = String,
        content_type = "application/x-ndjson",
        description = "JSON objects, one per line, each as in a single call (`AssignSlotRequest`).",
        example = json!(EXAMPLE),
    ),
    responses(
        (
            status = 200,
            description = "An answer for each line that is not empty, in order. Read every line: some may be errors. If \
                the last one is an error without `eventId` for a line past your last, the upload was cut off \
                or stalled for longer than `http.read_timeout` (10 s); send the load again.",
            body = String, content_type = "application/x-ndjson", item_schema = inline(LineResponse),
        ),
        (
            status = 415,
            description = "`Content-Type` is not NDJSON, or the body is compressed. Send `Content-Type: \
                application/x-ndjson` and no `Content-Encoding`. Nothing was assigned.",
        ),
    ),
)]
pub(crate) async fn assign_slots(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    if !is_ndjson(request.headers())
        || request.headers().get(CONTENT_ENCODING).is_some_and(|e| e != "identity")
    {
        return Err(ApiError::unsupported_media_type(
            "Content-Type must be application/x-ndjson, one event per line, without Content-Encoding",
        ));
    }
    let (lines, parsed) = mpsc::channel(CHANNEL_CAPACITY);
    let (answers, mut sent) = mpsc::channel::<Bytes>(CHANNEL_CAPACITY);
    let upload =
        Upload::new(lines, &app.upload_buffers, app.settings.http.read_timeout, app.shutdown.giving_up());
    tokio::spawn(upload.read(request.into_body()));
    tokio::spawn(inherit(async move { answer_lines(&app.slot, parsed, answers).await }));
    let stream = futures_util::stream::poll_fn(move |context| sent.poll_recv(context));
    let body = Body::from_stream(stream.map(Ok::<_, std::convert::Infallible>));
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(NDJSON));
    Ok(response)
}

fn is_ndjson(headers: &HeaderMap) -> bool {
    let Some(Ok(value)) = headers.get(CONTENT_TYPE).map(HeaderValue::to_str) else { return false };
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    matches!(
        essence.as_str(),
        NDJSON | "application/ndjson" | "application/jsonl" | "application/x-jsonlines"
    )
}

async fn answer_lines(
    slots: &SlotService,
    mut batches: mpsc::Receiver<ParsedBatch>,
    answers: mpsc::Sender<Bytes>,
) {
    while let Some(ParsedBatch { lines, mut charge }) = batches.recv().await {
        let events: Vec<Assign> = lines
            .iter()
            .filter_map(|line| match line {
                Line::Event(_, assign) => Some(assign.clone()),
                Line::Invalid(..) => None,
            })
            .collect();
        let outcomes = if events.is_empty() { Ok(Vec::new()) } else { slots.assign_batch(events).await };
        let text = write_answers(lines, outcomes);
        // If the budget has no room for the answers, the charge of the batch remains.
        let _ = charge.try_resize(text.len());
        if answers.send(Bytes::from_owner(ChargedAnswers { text, _charge: charge })).await.is_err() {
            return;
        }
    }
}

/// The answers to a batch, charged to the budget until they are sent.
struct ChargedAnswers {
    text: Vec<u8>,
    _charge: BufferCharge,
}

impl AsRef<[u8]> for ChargedAnswers {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

fn write_answers(batch: Vec<Line>, outcomes: weir_store::Result<Vec<AssignOutcome>>) -> Vec<u8> {
    let mut text = Vec::with_capacity(batch.len() * 224);
    let failure = outcomes.as_ref().err().map(|error| ApiError::from(error.clone()));
    let mut outcomes = outcomes.unwrap_or_default().into_iter();
    for line in batch {
        match line {
            Line::Invalid(number, event, problem) => {
                write_error(&mut text, number, event.as_deref(), &problem)
            }
            Line::Event(number, assign) => {
                let problem = match outcomes.next() {
                    Some(AssignOutcome::New(slot)) => {
                        write_line(&mut text, &describe(slot, "NEW"));
                        continue;
                    }
                    Some(AssignOutcome::Existing(slot)) => {
                        write_line(&mut text, &describe(slot, "EXISTING"));
                        continue;
                    }
                    Some(AssignOutcome::UnknownConfig) => unknown_config(&assign.config),
                    Some(AssignOutcome::Exhausted) => exhausted(),
                    Some(AssignOutcome::Recounting(_)) => recounting(),
                    None => failure.clone().unwrap_or_else(ApiError::internal),
                };
                write_error(&mut text, number, Some(assign.event.as_str()), &problem);
            }
        }
    }
    text
}

fn write_error(text: &mut Vec<u8>, line: u64, event_id: Option<&str>, problem: &ApiError) {
    write_line(text, &LineError { line, event_id, code: problem.code(), message: problem.message() });
}

fn write_line(text: &mut Vec<u8>, line: &impl Serialize) {
    // Serializing strings, numbers and times to memory cannot fail.
    let _ = serde_json::to_writer(&mut *text, line);
    text.push(b'\n');
}
