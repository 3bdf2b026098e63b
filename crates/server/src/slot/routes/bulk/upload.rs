//! The first stage of a bulk load: splits the upload into lines and groups them into batches.
//!
//! A batch is bounded in lines and in bytes, and its bytes are charged to the memory budget of uploads. An upload reserves
//! memory for a batch before it parses one, and waits for it up to `http.read_timeout`; after that it ends with an error for the
//! next line. While it waits it keeps only the memory of a partial line and of batches on their way to the caller. Those
//! need no more memory to get there, so uploads cannot block each other for longer than the timeout.

use std::borrow::Cow;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use weir_store::slot::Assign;

use crate::buffer_budget::{BufferBudget, BufferCharge};
use crate::http::body::parse_json;
use crate::http::error::ApiError;
use crate::slot::routes::{AssignRequest, is_short, parse};

/// The longest line.
const LINE_MAX: usize = 64 * 1024;
/// Events in one commit.
const BATCH: usize = 2_000;
/// The most memory that the lines of a batch occupy: enough for a full batch of events with names of usual length.
const BATCH_BYTES: usize = 512 * 1024;
/// Memory of a line besides its texts. An error has a map of headers.
const EVENT_BYTES: usize = 128;
const INVALID_BYTES: usize = 384;
/// How long an event waits for more of its batch.
const LINGER: Duration = Duration::from_millis(5);

/// A parsed line or its error, with the line's number.
pub(super) enum Line {
    Event(u64, Assign),
    Invalid(u64, Option<String>, ApiError),
}

/// A batch on its way through the stages.
pub(super) struct ParsedBatch {
    pub(super) lines: Vec<Line>,
    pub(super) charge: BufferCharge,
}

/// The batch that is being read.
#[derive(Default)]
struct PendingBatch {
    lines: Vec<Line>,
    /// Approximate memory of the lines.
    bytes: usize,
}

impl PendingBatch {
    fn push(&mut self, line: Line) {
        self.bytes += match &line {
            Line::Event(_, assign) => {
                EVENT_BYTES + assign.event.as_str().len() + assign.config.as_str().len()
            }
            Line::Invalid(_, event, problem) => {
                INVALID_BYTES + event.as_ref().map_or(0, String::len) + problem.message().len()
            }
        };
        self.lines.push(line);
    }
}

/// Why reading an upload stops.
enum Stop {
    Disconnected,
    /// The caller gets this error in place of the next line.
    Error(ApiError),
}

/// Reads an upload and sends its lines in batches.
pub(super) struct Upload {
    batches: mpsc::Sender<ParsedBatch>,
    batch: PendingBatch,
    /// The most memory of a batch.
    batch_bytes: usize,
    reader: LineReader,
    /// Memory for the batch that is being read and for the partial line.
    charge: BufferCharge,
    /// Memory reserved before lines are parsed: a batch and a line.
    reservation: usize,
    /// How long the upload may stall, and how long it may wait for memory.
    timeout: Duration,
    ending: CancellationToken,
}

impl Upload {
    pub(super) fn new(
        batches: mpsc::Sender<ParsedBatch>,
        budget: &BufferBudget,
        timeout: Duration,
        ending: &CancellationToken,
    ) -> Self {
        Self {
            batches,
            batch: PendingBatch::default(),
            batch_bytes: BATCH_BYTES.min(budget.total() / 4),
            reader: LineReader::default(),
            charge: budget.charge(),
            reservation: (BATCH_BYTES + LINE_MAX).min(budget.total() / 2),
            timeout,
            ending: ending.clone(),
        }
    }

    /// Reads until the upload ends, the caller disconnects, or the server stops.
    pub(super) async fn read(mut self, body: Body) {
        match self.read_chunks(body.into_data_stream()).await {
            Ok(()) => self.reader.end().into_iter().for_each(|line| self.batch.push(line)),
            Err(Stop::Disconnected) => return,
            Err(Stop::Error(problem)) => {
                self.batch.push(Line::Invalid(self.reader.number + 1, None, problem));
            }
        }
        if !self.batch.lines.is_empty() {
            let _ = self.send().await;
        }
    }

    async fn read_chunks<E>(
        &mut self,
        mut chunks: impl Stream<Item = Result<Bytes, E>> + Unpin,
    ) -> Result<(), Stop> {
        // When the batch is sent even if it is not full.
        let mut due = None;
        loop {
            let until = if self.batch.lines.is_empty() {
                due = None;
                Instant::now() + self.timeout
            } else {
                *due.get_or_insert_with(|| Instant::now() + LINGER)
            };
            let next = self.ending.run_until_cancelled(tokio::time::timeout_at(until, chunks.next()));
            match next.await.ok_or_else(shutting_down)? {
                Ok(Some(Ok(chunk))) => {
                    if self.parse_chunk(&chunk).await? {
                        due = None;
                    }
                }
                Ok(None) => return Ok(()),
                Ok(Some(Err(_cut_off))) => {
                    return Err(Stop::Error(ApiError::invalid("The upload ended before it was complete")));
                }
                Err(_elapsed) if self.batch.lines.is_empty() => {
                    return Err(Stop::Error(ApiError::too_slow()));
                }
                Err(_elapsed) => self.send().await?,
            }
        }
    }

    /// Parses the lines that end in a chunk and sends every full batch. Returns whether one was sent.
    async fn parse_chunk(&mut self, mut chunk: &[u8]) -> Result<bool, Stop> {
        let mut has_sent = false;
        while !chunk.is_empty() {
            self.reserve().await?;
            let Some(line) = self.reader.next(&mut chunk) else { break };
            self.batch.push(line);
            if self.batch.lines.len() >= BATCH || self.batch.bytes >= self.batch_bytes {
                self.send().await?;
                has_sent = true;
            }
        }
        if self.batch.lines.is_empty() {
            self.release()?;
        }
        Ok(has_sent)
    }

    /// Waits until the budget has memory for a batch and a line.
    async fn reserve(&mut self) -> Result<(), Stop> {
        let missing = self.reservation.saturating_sub(self.charge.bytes());
        if missing == 0 {
            return Ok(());
        }
        let grow = tokio::time::timeout(self.timeout, self.charge.grow(missing));
        match self.ending.run_until_cancelled(grow).await.ok_or_else(shutting_down)? {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(out_of_memory()),
        }
    }

    /// Releases all memory but that of the partial line. Another upload may use it while this one waits for its caller.
    fn release(&mut self) -> Result<(), Stop> {
        // The charge grows here only if the budget is too small for the longest line.
        self.charge.try_resize(self.reader.partial.capacity()).map_err(|_exhausted| out_of_memory())
    }

    async fn send(&mut self) -> Result<(), Stop> {
        let PendingBatch { lines, bytes } = std::mem::take(&mut self.batch);
        let batch = ParsedBatch { lines, charge: self.charge.split(bytes) };
        self.release()?;
        self.batches.send(batch).await.map_err(|_closed| Stop::Disconnected)
    }
}

fn shutting_down() -> Stop {
    let message = "The server is shutting down; send this line and those after it again";
    Stop::Error(ApiError::unavailable(message))
}

fn out_of_memory() -> Stop {
    let message =
        "Uploads use all the memory that the server allows them; send this line and those after it again";
    Stop::Error(ApiError::unavailable(message))
}

/// Splits chunks into lines.
#[derive(Default)]
struct LineReader {
    /// The beginning of a line whose end has not been received. Its capacity is at most `LINE_MAX`.
    partial: Vec<u8>,
    /// Whether the partial line is too long. Its content is discarded.
    is_too_long: bool,
    /// The number of the last complete line.
    number: u64,
}

impl LineReader {
    /// Removes the next non-empty line from the chunk. If no line ends in the chunk, the rest of it becomes the partial
    /// line.
    fn next(&mut self, chunk: &mut &[u8]) -> Option<Line> {
        while let Some(end) = chunk.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&chunk[..end], &chunk[end + 1..]);
            *chunk = rest;
            let line = if self.partial.is_empty() && !self.is_too_long && line.len() <= LINE_MAX {
                self.number += 1;
                parse_line(self.number, line)
            } else {
                self.append(line);
                self.finish()
            };
            if line.is_some() {
                return line;
            }
        }
        self.append(chunk);
        *chunk = &[];
        None
    }

    fn append(&mut self, part: &[u8]) {
        let length = self.partial.len() + part.len();
        self.is_too_long |= length > LINE_MAX;
        if self.is_too_long {
            self.partial = Vec::new();
            return;
        }
        if length > self.partial.capacity() {
            let capacity = length.next_power_of_two().min(LINE_MAX);
            self.partial.reserve_exact(capacity - self.partial.len());
        }
        self.partial.extend_from_slice(part);
    }

    fn finish(&mut self) -> Option<Line> {
        self.number += 1;
        if std::mem::take(&mut self.is_too_long) {
            let problem = ApiError::invalid(format!("The line is longer than the {LINE_MAX} bytes allowed"));
            Some(Line::Invalid(self.number, None, problem))
        } else {
            parse_line(self.number, &std::mem::take(&mut self.partial))
        }
    }

    /// Returns the last line if it has no line break.
    fn end(&mut self) -> Option<Line> {
        if self.is_too_long || !self.partial.is_empty() { self.finish() } else { None }
    }
}

/// Parses a line; `None` for an empty one.
fn parse_line(number: u64, line: &[u8]) -> Option<Line> {
    let line = line.trim_ascii();
    if line.is_empty() {
        return None;
    }
    let request: AssignRequest = match parse_json(line) {
        Ok(request) => request,
        Err(problem) => return Some(Line::Invalid(number, event_id(line), problem)),
    };
    Some(match parse(request) {
        Ok(assign) => Line::Event(number, assign),
        Err(problem) => Line::Invalid(number, event_id(line), problem),
    })
}

/// Returns the event's id if the line has one of a valid length.
fn event_id(line: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct IdOnly<'a> {
        #[serde(borrow)]
        event_id: Cow<'a, str>,
    }
    let IdOnly { event_id } = serde_json::from_slice(line).ok()?;
    is_short(&event_id).then(|| event_id.into_owned())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    const EVENT: &str = r#"{"eventId":"e","configName":"c","requestedTime":"2026-01-01T00:00:00Z"}"#;

    fn numbers(batch: &[Line]) -> Vec<(u64, bool)> {
        let number = |line: &Line| match line {
            Line::Event(number, _) => (*number, true),
            Line::Invalid(number, ..) => (*number, false),
        };
        batch.iter().map(number).collect()
    }

    /// Reads an upload and returns its batches.
    fn read(
        chunks: impl Stream<Item = Bytes> + Send + 'static,
        budget: &BufferBudget,
    ) -> mpsc::Receiver<ParsedBatch> {
        let (lines, batches) = mpsc::channel(2);
        let upload = Upload::new(lines, budget, Duration::from_secs(10), &CancellationToken::new());
        tokio::spawn(upload.read(Body::from_stream(chunks.map(Ok::<_, Infallible>))));
        batches
    }

    #[test]
    fn lines_are_found_whatever_the_size_of_chunks() {
        let upload = format!("{EVENT}\n\r\n{EVENT}\r\nnonsense\n{}\n{EVENT}", "x".repeat(LINE_MAX + 1));
        for size in [1, 7, 100, 70_000, 1_000_000] {
            let (mut reader, mut lines) = (LineReader::default(), Vec::new());
            for mut chunk in upload.as_bytes().chunks(size) {
                while let Some(line) = reader.next(&mut chunk) {
                    lines.push(line);
                }
            }
            lines.extend(reader.end());
            assert_eq!(numbers(&lines), [(1, true), (3, true), (4, false), (5, false), (6, true)], "{size}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_does_not_wait_while_the_upload_continues_byte_by_byte() {
        let bytes = format!("{EVENT}\n").into_bytes().into_iter().chain(std::iter::repeat(b' '));
        let trickle = futures_util::stream::iter(bytes).then(async |byte| {
            tokio::time::sleep(LINGER / 2).await;
            Bytes::from(vec![byte])
        });
        let mut batches = read(trickle, &BufferBudget::new(64 << 20));
        // Longer than the event takes to arrive. Without the limit, the batch would wait until the next line is too long.
        let first = tokio::time::timeout(Duration::from_secs(2), batches.recv()).await.expect("a batch");
        assert_eq!(numbers(&first.expect("an open channel").lines), [(1, true)]);
    }

    #[tokio::test]
    async fn a_batch_is_bounded_in_lines_and_in_bytes() {
        let name = "n".repeat(255);
        let long = EVENT.replace("\"e\"", &format!("\"{name}\"")).replace("\"c\"", &format!("\"{name}\""));
        for (line, in_a_batch) in [
            (EVENT, BATCH),
            (&long, BATCH_BYTES / (EVENT_BYTES + 510) + 1),
            ("x", BATCH_BYTES / INVALID_BYTES),
        ] {
            let upload = Bytes::from(format!("{line}\n").repeat(5_000));
            let mut batches = read(futures_util::stream::iter([upload]), &BufferBudget::new(64 << 20));
            let first = batches.recv().await.expect("a batch");
            assert!(first.lines.len() <= in_a_batch, "{} of {line:.20}", first.lines.len());
            let bytes = first.charge.bytes();
            assert!(bytes <= BATCH_BYTES + INVALID_BYTES + 1_000, "{bytes}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_gets_no_memory_within_the_timeout_ends_with_an_error() {
        let budget = BufferBudget::new(4 * BATCH_BYTES);
        let (mut others, upload) = (budget.charge(), Bytes::from(format!("{EVENT}\n{EVENT}\n")));
        others.try_resize(4 * BATCH_BYTES).unwrap();
        let mut batches = read(futures_util::stream::iter([upload.clone()]), &budget);
        let last = batches.recv().await.expect("a batch");
        let [Line::Invalid(1, None, problem)] = &last.lines[..] else { panic!("{:?}", numbers(&last.lines)) };
        assert_eq!(problem.code(), "DEPENDENCY_UNAVAILABLE");
        let mut batches = read(futures_util::stream::iter([upload]), &budget);
        drop(others);
        assert_eq!(numbers(&batches.recv().await.expect("a batch").lines), [(1, true), (2, true)]);
        drop((batches, last));
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn uploads_that_share_a_small_budget_wait_for_each_other_and_all_succeed() {
        const LINES: usize = 5_000;
        let budget = BufferBudget::new(4 * BATCH_BYTES);
        let upload = || {
            let bytes = Bytes::from(format!("{EVENT}\n").repeat(LINES));
            let parts =
                (0..bytes.len()).step_by(1_000).map(move |at| bytes.slice(at..bytes.len().min(at + 1_000)));
            // Lets the other uploads run after each part.
            futures_util::stream::iter(parts).then(async |part| {
                tokio::task::yield_now().await;
                part
            })
        };
        let uploads = (0..16).map(|_| read(upload(), &budget)).map(async |mut batches| {
            let mut events = 0;
            while let Some(batch) = batches.recv().await {
                events += batch.lines.iter().filter(|line| matches!(line, Line::Event(..))).count();
                // A slow reader of answers.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            events
        });
        assert_eq!(futures_util::future::join_all(uploads).await, [LINES; 16]);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn an_id_that_is_too_long_is_refused_and_not_repeated() {
        let line = EVENT.replace("\"e\"", &format!("\"{}\"", "é".repeat(256)));
        let Some(Line::Invalid(1, None, problem)) = parse_line(1, line.as_bytes()) else { panic!("refused") };
        assert_eq!(problem.message(), "eventId must have at most 255 characters");
        let line = EVENT.replace("\"e\"", &format!("\"{}\"", "é".repeat(255)));
        assert!(matches!(parse_line(1, line.as_bytes()), Some(Line::Event(..))));
    }
}
