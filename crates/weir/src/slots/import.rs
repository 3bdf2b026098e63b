//! `weir slots import`: sends a file in chunks, shows the progress, and retries what the server could not answer.
//! Events are idempotent, so an interrupted import is simply run again.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use serde::Deserialize;

use super::ServerArgs;
use super::events::{CsvDefaults, Events};
use crate::client::Client;

/// Events per request.
const CHUNK: usize = 5_000;
/// Attempts per chunk, and the waits between them.
const ATTEMPTS: u32 = 10;
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The number of errors shown; further ones are only counted.
const SHOWN_MAX: u64 = 20;
/// Error codes that are worth a retry.
const RETRYABLE_CODES: [&str; 2] = ["DEPENDENCY_UNAVAILABLE", "SLOTS_EXHAUSTED"];

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// A .ndjson file of events, a .csv file with the columns eventId, configName and requestedTime, or - for NDJSON from standard input
    file: PathBuf,
    /// The config of events in a CSV file without the column configName
    #[arg(long, value_name = "NAME")]
    config: Option<String>,
    /// The time of events in a CSV file without the column requestedTime
    #[arg(long, value_name = "TIME")]
    time: Option<String>,
}

/// Events of one request, one per line, and their line numbers in the file.
#[derive(Debug, Default, PartialEq)]
struct Chunk {
    lines: Vec<u8>,
    line_numbers: Vec<u64>,
}

impl Chunk {
    /// Reads the next events; the chunk is empty at the end of the file.
    fn read(events: &mut Events) -> anyhow::Result<Self> {
        let mut chunk = Self::default();
        while chunk.line_numbers.len() < CHUNK
            && let Some(line_number) = events.next_line(&mut chunk.lines)?
        {
            chunk.line_numbers.push(line_number);
        }
        Ok(chunk)
    }

    fn push(&mut self, line: &[u8], line_number: u64) {
        self.lines.extend_from_slice(line);
        self.line_numbers.push(line_number);
    }

    /// Iterates over the lines and their numbers.
    fn iter(&self) -> impl Iterator<Item = (&[u8], u64)> {
        self.lines.split_inclusive(|byte| *byte == b'\n').zip(self.line_numbers.iter().copied())
    }
}

/// One line of a response: a slot or an error.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EventResult {
    status: Option<String>,
    event_id: Option<String>,
    code: Option<String>,
    message: Option<String>,
}

#[derive(Default)]
struct ImportTally {
    new: u64,
    existing: u64,
    failed: u64,
}

impl ImportTally {
    const fn total(&self) -> u64 {
        self.new + self.existing + self.failed
    }
}

pub(super) async fn run(arguments: ImportArgs) -> anyhow::Result<ExitCode> {
    let ImportArgs { server, file, config, time } = arguments;
    let client = server.client()?;
    let (mut events, size) = Events::open(&file, CsvDefaults { config, time })?;
    let mut progress = ProgressLine::new(size);
    let mut tally = ImportTally::default();
    loop {
        let chunk = Chunk::read(&mut events)?;
        if chunk.line_numbers.is_empty() {
            break;
        }
        send(&client, chunk, &mut tally, &progress).await?;
        progress.show(&tally, events.bytes());
    }
    progress.end(&tally)?;
    Ok(if tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Sends one chunk until every event of it has a final result.
async fn send(
    client: &Client,
    chunk: Chunk,
    tally: &mut ImportTally,
    progress: &ProgressLine,
) -> anyhow::Result<()> {
    let mut remaining = chunk;
    let mut pause = PAUSE_MIN;
    for attempt in 1..=ATTEMPTS {
        let is_last = attempt == ATTEMPTS;
        let lines = Bytes::copy_from_slice(&remaining.lines);
        match client.post("/api/v1/slots/bulk", "application/x-ndjson", lines).await {
            Ok((200, answers)) => {
                remaining = count_results(&remaining, &answers, tally, progress, is_last)?;
                if remaining.line_numbers.is_empty() {
                    return Ok(());
                }
            }
            Ok((status, answer)) if status < 500 || is_last => {
                anyhow::bail!("the server responded {status}: {}", String::from_utf8_lossy(&answer));
            }
            Err(error) if is_last => return Err(error),
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
    Ok(())
}

/// Counts the final results, and returns the lines to retry.
fn count_results(
    chunk: &Chunk,
    answers: &[u8],
    tally: &mut ImportTally,
    progress: &ProgressLine,
    is_last: bool,
) -> anyhow::Result<Chunk> {
    let mut retries = Chunk::default();
    let mut answers = answers.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    for (line, line_number) in chunk.iter() {
        let Some(answer) = answers.next() else {
            // The server stopped before it answered this line: send it again.
            retries.push(line, line_number);
            continue;
        };
        let answer: EventResult = serde_json::from_slice(answer)?;
        match (answer.status.as_deref(), answer.code.as_deref()) {
            (Some("NEW"), _) => tally.new += 1,
            (Some(_), _) => tally.existing += 1,
            (None, Some(code)) if RETRYABLE_CODES.contains(&code) && !is_last => {
                retries.push(line, line_number)
            }
            (None, _) => {
                tally.failed += 1;
                if tally.failed <= SHOWN_MAX {
                    progress.show_error(line_number, &answer);
                }
            }
        }
    }
    Ok(retries)
}

/// Shows a progress line on a terminal, and always a summary at the end.
struct ProgressLine {
    started: Instant,
    size: Option<u64>,
    is_terminal: bool,
}

impl ProgressLine {
    fn new(size: Option<u64>) -> Self {
        Self { started: Instant::now(), size, is_terminal: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, tally: &ImportTally, bytes: u64) {
        if self.is_terminal {
            // A failed write to the terminal must not end the import.
            let _ = write!(std::io::stderr(), "\r\x1b[2K{}", self.line(tally, bytes));
        }
    }

    fn line(&self, tally: &ImportTally, bytes: u64) -> String {
        let elapsed = self.started.elapsed().as_secs_f64().max(0.001);
        let rate = tally.total() as f64 / elapsed;
        let size = self.size.filter(|size| *size > 0);
        let part = size.map(|size| bytes as f64 / size as f64);
        let bar = part.map_or(String::new(), |part| {
            let left = Duration::from_secs_f64((elapsed / part.max(0.000_1) * (1.0 - part)).max(0.0));
            let filled =
                "█".repeat(size.map_or(0, |size| usize::try_from(bytes * 20 / size).unwrap_or(0).min(20)));
            format!(
                "{filled:░<20} {:3.0} %  ETA {}:{:02}  ",
                part * 100.0,
                left.as_secs() / 60,
                left.as_secs() % 60
            )
        });
        let ImportTally { new, existing, failed } = tally;
        format!("{bar}{rate:.0} events/s  {new} new, {existing} existing, {failed} failed")
    }

    fn show_error(&self, line_number: u64, answer: &EventResult) {
        let clear = if self.is_terminal { "\r\x1b[2K" } else { "" };
        let event = answer.event_id.as_deref().map_or(String::new(), |event| format!(" ({event})"));
        let (code, message) =
            (answer.code.as_deref().unwrap_or("?"), answer.message.as_deref().unwrap_or_default());
        let _ = writeln!(std::io::stderr(), "{clear}line {line_number}{event}: {code}: {message}");
    }

    fn end(&self, tally: &ImportTally) -> std::io::Result<()> {
        if self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
        let elapsed = self.started.elapsed().as_secs_f64().max(0.001);
        let ImportTally { new, existing, failed } = tally;
        let rate = tally.total() as f64 / elapsed;
        writeln!(
            std::io::stdout(),
            "{} events in {elapsed:.1} s ({rate:.0} events/s): {new} new, {existing} existing, {failed} failed",
            tally.total()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retryable_errors_are_sent_again_and_others_are_counted() {
        let chunk = Chunk { lines: b"1\n2\n3\n4\n5\n".to_vec(), line_numbers: vec![1, 2, 4, 5, 9] };
        let answers = br#"{"status":"NEW"}
{"status":"EXISTING"}
{"line":3,"code":"DEPENDENCY_UNAVAILABLE","message":"m"}
{"line":4,"code":"INVALID_REQUEST","message":"m"}
"#;
        let (mut tally, progress) = (ImportTally::default(), ProgressLine::new(None));
        let retries = count_results(&chunk, answers, &mut tally, &progress, false).unwrap();
        let expected = Chunk { lines: b"3\n5\n".to_vec(), line_numbers: vec![4, 9] };
        assert_eq!(retries, expected, "the retryable error and the line without a result");
        assert_eq!((tally.new, tally.existing, tally.failed), (1, 1, 1));
    }

    #[test]
    fn the_line_shows_the_progress() {
        let progress = ProgressLine { size: Some(100), ..ProgressLine::new(None) };
        let line = progress.line(&ImportTally { new: 10, existing: 0, failed: 0 }, 50);
        assert!(line.contains("██████████░░░░░░░░░░  50 %") && line.contains("10 new"), "{line}");
    }
}
