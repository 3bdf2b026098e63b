//! Bulk loads: `POST /api/v1/slots/bulk`, a line an event, answered line by line while the upload goes on.
//!
//! Three stages, each a few batches ahead of the next and no further: lines are read and parsed, batches are assigned,
//! answers are sent. A caller who does not read its answers stops the upload. A line that is wrong, or that the store
//! cannot answer, gets its error in its place; sending the whole load again is always safe.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;
use weir_store::slot::{Assign, AssignOutcome};

use super::super::error::ApiError;
use super::{AssignRequest, SlotResponse, describe, exhausted, parse, unknown_config};
use crate::app::App;
use crate::service::slot::SlotService;

/// The longest line.
const LINE_MAX: usize = 64 * 1024;
/// Events in one commit.
const BATCH: usize = 2_000;
/// Batches between two stages.
const AHEAD: usize = 2;
/// An event that has come is not kept waiting for more for longer than this.
const LINGER: Duration = Duration::from_millis(5);

const NDJSON: &str = "application/x-ndjson";

/// What the document shows of an upload.
const EXAMPLE: &str = concat!(
    r#"{"eventId":"payment-000001","configName":"default","requestedTime":"2026-06-01T12:00:00Z"}"#,
    "\n",
    r#"{"eventId":"payment-000002","configName":"default"}"#,
    "\n",
);

/// A line, understood or not.
enum Line {
    Event(u64, Assign),
    Wrong(u64, Option<String>, ApiError),
}

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
    let idle = app.settings.http.read_timeout;
    tokio::spawn(read_lines(request.into_body(), lines, idle, app.shutdown.ending().clone()));
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

/// Cuts the upload into lines and lines into batches, until it ends, nobody wants the answers, or the server must end.
async fn read_lines(body: Body, batches: mpsc::Sender<Vec<Line>>, idle: Duration, ending: CancellationToken) {
    let mut chunks = body.into_data_stream();
    let mut reader = LineReader::default();
    let mut batch = Vec::new();
    // When the first event of the batch must go on its way.
    let mut due = None;
    loop {
        let until = if batch.is_empty() {
            Instant::now() + idle
        } else {
            *due.get_or_insert_with(|| Instant::now() + LINGER)
        };
        let next = ending.run_until_cancelled(tokio::time::timeout_at(until, chunks.next()));
        let Some(next) = next.await else {
            let message = "The server is shutting down; send this line and those after it again";
            break batch.push(Line::Wrong(reader.number + 1, None, ApiError::unavailable(message)));
        };
        match next {
            Ok(Some(Ok(chunk))) => {
                reader.take(&chunk, &mut batch);
                while batch.len() >= BATCH {
                    let rest = batch.split_off(BATCH);
                    due = None;
                    if batches.send(std::mem::replace(&mut batch, rest)).await.is_err() {
                        return;
                    }
                }
            }
            Ok(None) => break reader.end(&mut batch),
            Ok(Some(Err(_cut_off))) => {
                let problem = ApiError::invalid("The upload ended before it was complete");
                break batch.push(Line::Wrong(reader.number + 1, None, problem));
            }
            Err(_elapsed) if batch.is_empty() => {
                break batch.push(Line::Wrong(reader.number + 1, None, ApiError::too_slow()));
            }
            Err(_elapsed) => {
                due = None;
                if batches.send(std::mem::take(&mut batch)).await.is_err() {
                    return;
                }
            }
        }
    }
    while !batch.is_empty() {
        let rest = batch.split_off(batch.len().min(BATCH));
        if batches.send(std::mem::replace(&mut batch, rest)).await.is_err() {
            return;
        }
    }
}

/// Lines out of chunks that know nothing of them.
#[derive(Default)]
struct LineReader {
    /// What came of a line so far.
    partial: BytesMut,
    /// Whether the line is longer than allowed: the rest of it is thrown away.
    is_too_long: bool,
    /// Of the last whole line.
    number: u64,
}

impl LineReader {
    fn take(&mut self, mut chunk: &[u8], batch: &mut Vec<Line>) {
        while let Some(end) = chunk.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&chunk[..end], &chunk[end + 1..]);
            chunk = rest;
            if self.partial.is_empty() && !self.is_too_long && line.len() <= LINE_MAX {
                self.number += 1;
                batch.extend(understand(self.number, line));
            } else {
                self.keep(line);
                self.finish(batch);
            }
        }
        self.keep(chunk);
    }

    fn keep(&mut self, part: &[u8]) {
        self.is_too_long |= self.partial.len() + part.len() > LINE_MAX;
        if self.is_too_long {
            self.partial.clear();
        } else {
            self.partial.extend_from_slice(part);
        }
    }

    fn finish(&mut self, batch: &mut Vec<Line>) {
        self.number += 1;
        if std::mem::take(&mut self.is_too_long) {
            let problem = ApiError::invalid(format!("The line is longer than the {LINE_MAX} bytes allowed"));
            batch.push(Line::Wrong(self.number, None, problem));
        } else {
            let line = self.partial.split();
            batch.extend(understand(self.number, &line));
        }
    }

    /// The last line may do without its line break.
    fn end(&mut self, batch: &mut Vec<Line>) {
        if self.is_too_long || !self.partial.is_empty() {
            self.finish(batch);
        }
    }
}

/// Nothing for an empty line.
fn understand(number: u64, line: &[u8]) -> Option<Line> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return None;
    }
    let request: AssignRequest = match super::super::body::parse_json(line) {
        Ok(request) => request,
        Err(problem) => return Some(Line::Wrong(number, event_id(line), problem)),
    };
    Some(match parse(request) {
        Ok(assign) => Line::Event(number, assign),
        Err(problem) => Line::Wrong(number, event_id(line), problem),
    })
}

/// The event's id, if that at least can be read.
fn event_id(line: &[u8]) -> Option<String> {
    let value: serde_json::Value = serde_json::from_slice(line).ok()?;
    value.get("eventId")?.as_str().map(str::to_owned)
}

async fn answer_lines(
    slots: &SlotService,
    mut batches: mpsc::Receiver<Vec<Line>>,
    answers: mpsc::Sender<Bytes>,
) {
    while let Some(batch) = batches.recv().await {
        let wanted: Vec<Assign> = batch
            .iter()
            .filter_map(|line| match line {
                Line::Event(_, assign) => Some(assign.clone()),
                Line::Wrong(..) => None,
            })
            .collect();
        let outcomes = if wanted.is_empty() { Ok(Vec::new()) } else { slots.assign_batch(wanted).await };
        if answers.send(write(batch, outcomes)).await.is_err() {
            return;
        }
    }
}

fn write(batch: Vec<Line>, outcomes: weir_store::Result<Vec<AssignOutcome>>) -> Bytes {
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
                    None => failure.clone().unwrap_or_else(ApiError::internal),
                };
                write_error(&mut text, number, Some(assign.event.as_str()), &problem);
            }
        }
    }
    text.into()
}

fn write_error(text: &mut Vec<u8>, line: u64, event_id: Option<&str>, problem: &ApiError) {
    write_line(text, &LineError { line, event_id, code: problem.code(), message: problem.message() });
}

fn write_line(text: &mut Vec<u8>, line: &impl Serialize) {
    // Strings, numbers and times always become JSON.
    let _ = serde_json::to_writer(&mut *text, line);
    text.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(batch: &[Line]) -> Vec<(u64, bool)> {
        let number = |line: &Line| match line {
            Line::Event(number, _) => (*number, true),
            Line::Wrong(number, ..) => (*number, false),
        };
        batch.iter().map(number).collect()
    }

    #[test]
    fn lines_are_found_however_the_upload_is_cut() {
        let event = r#"{"eventId":"e","configName":"c","requestedTime":"2026-01-01T00:00:00Z"}"#;
        let upload = format!("{event}\n\r\n{event}\r\nnonsense\n{}\n{event}", "x".repeat(LINE_MAX + 1));
        for size in [1, 7, 100, 70_000, 1_000_000] {
            let (mut reader, mut batch) = (LineReader::default(), Vec::new());
            for chunk in upload.as_bytes().chunks(size) {
                reader.take(chunk, &mut batch);
            }
            reader.end(&mut batch);
            assert_eq!(numbers(&batch), [(1, true), (3, true), (4, false), (5, false), (6, true)], "{size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_is_not_kept_waiting_by_an_upload_that_goes_on_byte_by_byte() {
        let event = r#"{"eventId":"e","configName":"c","requestedTime":"2026-01-01T00:00:00Z"}"#;
        let bytes = format!("{event}\n").into_bytes().into_iter().chain(std::iter::repeat(b' '));
        let trickle = futures_util::stream::iter(bytes).then(async |byte| {
            tokio::time::sleep(LINGER / 2).await;
            Ok::<_, std::convert::Infallible>(Bytes::from(vec![byte]))
        });
        let (lines, mut batches) = mpsc::channel(AHEAD);
        let body = Body::from_stream(trickle);
        tokio::spawn(read_lines(body, lines, Duration::from_secs(10), CancellationToken::new()));
        // Longer than the event takes to come; without a limit the next line would have to be too long first.
        let first = tokio::time::timeout(Duration::from_secs(2), batches.recv()).await.expect("a batch");
        assert_eq!(numbers(&first.expect("it goes on")), [(1, true)]);
    }
}
