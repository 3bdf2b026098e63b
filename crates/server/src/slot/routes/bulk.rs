//! Bulk loads: `POST /api/v1/slots/bulk`, a line an event, answered line by line while the upload goes on.
//!
//! Three stages, each a few batches ahead of the next and no further: lines are read and parsed, batches are assigned,
//! answers are sent. A caller who does not read its answers stops the upload. A line that is wrong, or that the store
//! cannot answer, gets its error in its place; sending the whole load again is always safe.
//!
//! What is between the stages is charged to the budget of uploads until its answers have been written.

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

use self::upload::{Batch, Line, Upload};
use super::{SlotResponse, describe, exhausted, recounting, unknown_config};
use crate::app::App;
use crate::buffer_budget::BufferCharge;
use crate::http::error::ApiError;
use crate::slot::service::SlotService;

/// Batches between two stages.
const AHEAD: usize = 2;

const NDJSON: &str = "application/x-ndjson";

/// What the document shows of an upload.
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
    /// Which line of the upload, counted from 1, empty ones included.
    #[schema(minimum = 1)]
    line: u64,
    /// The event, if that much of the line could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    event_id: Option<&'a str>,
    /// What to branch on: `INVALID_REQUEST` and `NOT_FOUND` fail again until the line or the config is corrected;
    /// `SLOTS_EXHAUSTED`, `DEPENDENCY_UNAVAILABLE` and `REQUEST_TIMEOUT` are worth sending again. More may come.
    #[schema(pattern = "^[A-Z][A-Z_]*$")]
    code: &'a str,
    /// For people: what is wrong. The wording may change.
    message: &'a str,
}

/// One line of the response.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = SlotLine)]
#[expect(dead_code, reason = "lines are written one kind at a time; only the document has both")]
enum LineResponse<'a> {
    Slot(#[schema(inline)] SlotResponse),
    Error(#[schema(inline)] LineError<'a>),
}

/// Assign slots to many events.
///
/// One event a line, one answer a line, in the same order. Answers are streamed while the upload goes on, and there is
/// no limit on the whole. A caller who does not read the answers stops the upload.
///
/// From a file: `curl -N -X POST -T events.ndjson -H 'Content-Type: application/x-ndjson' …/api/v1/slots/bulk`.
///
/// **The status is 200 whatever becomes of the lines.** A line that is wrong, or that the store could not answer, gets
/// its error in its place, and the others go on. A line is an error when it has `code`. Empty lines are skipped but
/// counted. A line may have up to 64 KiB; the last may do without its line break.
///
/// Sending the whole load again is always safe: events that have a slot keep it and are answered with `EXISTING`. Do so
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
        description = "JSON objects, one a line, each as in a single call (`AssignSlotRequest`).",
        example = json!(EXAMPLE),
    ),
    responses(
        (
            status = 200,
            description = "An answer for each line that is not empty, in order. Read every line: some may be errors. If \
                the last one is an error without `eventId` for a line past your last, the upload was cut off \
                or stood still for longer than `http.read_timeout` (10 s); send the load again.",
            body = String, content_type = "application/x-ndjson", item_schema = inline(LineResponse),
        ),
        (
            status = 415,
            description = "The body is not declared as NDJSON, or it is compressed. Send `Content-Type: \
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
            "Content-Type must be application/x-ndjson, one event a line, not encoded",
        ));
    }
    let (lines, parsed) = mpsc::channel(AHEAD);
    let (answers, mut sent) = mpsc::channel::<Bytes>(AHEAD);
    let upload =
        Upload::new(lines, &app.upload_buffers, app.settings.http.read_timeout, app.shutdown.giving_up());
    tokio::spawn(upload.read(request.into_body()));
    tokio::spawn(async move { answer_lines(&app.slot, parsed, answers).await });
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

async fn answer_lines(slots: &SlotService, mut batches: mpsc::Receiver<Batch>, answers: mpsc::Sender<Bytes>) {
    while let Some(Batch { lines, mut charge }) = batches.recv().await {
        let wanted: Vec<Assign> = lines
            .iter()
            .filter_map(|line| match line {
                Line::Event(_, assign) => Some(assign.clone()),
                Line::Wrong(..) => None,
            })
            .collect();
        let outcomes = if wanted.is_empty() { Ok(Vec::new()) } else { slots.assign_batch(wanted).await };
        let text = write(lines, outcomes);
        // Where it cannot be charged for all of the answer, it stays charged for the batch.
        let _ = charge.try_resize(text.len());
        if answers.send(Bytes::from_owner(Answers { text, _charge: charge })).await.is_err() {
            return;
        }
    }
}

/// The answers to a batch, charged until they are sent.
struct Answers {
    text: Vec<u8>,
    _charge: BufferCharge,
}

impl AsRef<[u8]> for Answers {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

fn write(batch: Vec<Line>, outcomes: weir_store::Result<Vec<AssignOutcome>>) -> Vec<u8> {
    let mut text = Vec::with_capacity(batch.len() * 224);
    let failure = outcomes.as_ref().err().map(|error| ApiError::from(error.clone()));
    let mut outcomes = outcomes.unwrap_or_default().into_iter();
    for line in batch {
        match line {
            Line::Wrong(number, event, problem) => write_error(&mut text, number, event.as_deref(), &problem),
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
    // Strings, numbers and times always become JSON.
    let _ = serde_json::to_writer(&mut *text, line);
    text.push(b'\n');
}
